"""What a pipeline has to know of a model family: where its blocks are, what stands before and after them.

    family      blocks          first stage                     last stage
    LitGPT      transformer.h   transformer.wte                 transformer.ln_f, lm_head
    Llama       model.layers    model.embed_tokens              model.norm, lm_head
    GPT-2       transformer.h   transformer.wte, wpe, drop      transformer.ln_f, lm_head
    ViT         encoder.layer,  embeddings                      layernorm, classifier
                or layers

Llama is transformers' LlamaForCausalLM, GPT-2 its GPT2LMHeadModel, ViT its ViTForImageClassification (all but the
classifier below ``vit``). A stage runs the model's own forward, ViT's as it stands here; what other stages hold passes
things through. A stage other than the first takes the residual stream in place of token ids or images; one other than
the last gives it in place of logits.

transformers is not imported here: classes are known by module and name.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from axo.errors import Refused


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        blocks: Name of the list of blocks.
        before, after: Names of the modules of the first and of the last stage; what a call of each is to give where it
            is elsewhere (``axo.nn.placeholder.Placeholder``).
        block_gives: The same of a block.
        table: Name of the table of token ids; "": none, and the residual stream has ``config.hidden_size`` features.
        finish: Prepares the module of one stage; told whether it is the first and whether it is the last.
    """

    blocks: str
    before: dict[str, str]
    after: dict[str, str]
    block_gives: str
    table: str
    finish: Callable[[Any, bool, bool], None]


def family_of(model: nn.Module) -> Family:
    """The family of ``model``.

    Raises:
        Refused: It is of none that is known.
    """
    for kind in type(model).__mro__:
        if _name(kind) in _KNOWN:
            return _of_this_release(_KNOWN[_name(kind)], kind, model)
    raise Refused(
        f"pipeline: a {type(model).__qualname__} cannot be cut into stages by itself: known are litgpt.GPT, and of"
        " transformers LlamaForCausalLM, GPT2LMHeadModel and ViTForImageClassification; of any other model make each"
        " stage's module by hand, and give it to axo.pipeline.Stage"
    )


def _of_this_release(family: Family, kind: type, model: Any) -> Family:
    """``family`` as the installed transformers has it: 5 renames ViT's blocks, later ones let GPT-2's give a tensor."""
    if family.finish is _vit and hasattr(model.vit, "layers"):
        return replace(family, blocks="vit.layers")
    block = getattr(sys.modules[kind.__module__], "GPT2Block", None)
    if block is not None and inspect.signature(block.forward).return_annotation in (torch.Tensor, "torch.Tensor"):
        return replace(family, block_gives="input")
    return family


def _name(kind: type) -> str:
    """``llama.LlamaForCausalLM`` for a class of transformers' models, ``litgpt.GPT`` for LitGPT's."""
    where = kind.__module__.split(".")
    if where[:2] == ["transformers", "models"] and len(where) > 3:
        return f"{where[2]}.{kind.__name__}"
    return f"litgpt.{kind.__name__}" if kind.__module__ in ("litgpt.model", "litgpt.lora") else ""


def _litgpt(model: Any, first: bool, last: bool) -> None:
    """What GPT.forward itself does to embeddings and to logits belongs to the stages that have them."""
    changes: dict[str, Any] = {} if first else {"scale_embeddings": False}
    if not last:
        changes["final_logit_softcapping"] = None
    if any(getattr(model.config, name) != value for name, value in changes.items()):
        model.config = copy.copy(model.config)
        for name, value in changes.items():
            setattr(model.config, name, value)
    ranks = next((part.comms.grid.x for part in model.modules() if getattr(part, "scatters_tokens", False)), 1)
    if not first and ranks > 1:
        model.forward = partial(_part_of_tokens, model, ranks)


def _part_of_tokens(model: Any, ranks: int, first: torch.Tensor) -> torch.Tensor:
    """A GPT that takes its part of the tokens: attention sees, and rotates, all of them.

    The residual stream (rows, tokens / ranks, features) -> that, or logits.
    """
    tables = {name: model._buffers[name] for name in ("cos", "sin")}
    for name, table in tables.items():
        model._buffers[name] = _Rows(table, ranks)
    try:
        return type(model).forward(model, first)
    finally:
        model._buffers.update(tables)


class _Rows:
    """A table of which ``[:n]`` gives the first ``ranks * n`` rows."""

    def __init__(self, table: torch.Tensor, ranks: int) -> None:
        self.table, self.ranks = table, ranks

    def __getitem__(self, rows: slice) -> torch.Tensor:
        tokens = rows.stop * self.ranks
        if tokens > len(self.table):
            raise ValueError(f"pipeline: rows of {tokens} tokens are longer than max_seq_length={len(self.table)}")
        return self.table[:tokens]


def _hugging_face(model: Any, first: bool, last: bool) -> None:
    model.forward = partial(_one_tensor, model, "input_ids" if first else "inputs_embeds")


def _one_tensor(model: Any, takes: str, first: torch.Tensor) -> torch.Tensor:
    """Token ids (rows, tokens), or the residual stream (rows, tokens, features) -> that, or logits."""
    return type(model).forward(model, **{takes: first}, use_cache=False).logits


def _vit(model: Any, first: bool, last: bool) -> None:
    model.forward = partial(_one_image, model, last)


def _one_image(model: Any, pools: bool, first: torch.Tensor) -> torch.Tensor:
    """Images (rows, colors, height, width), or the residual stream (rows, patches + 1, features) -> that, or logits
    (rows, labels)."""
    hidden = model.vit.embeddings(first)
    for layer in model.vit.layers if hasattr(model.vit, "layers") else model.vit.encoder.layer:
        output = layer(hidden)
        hidden = output[0] if isinstance(output, tuple) else output
    hidden = model.vit.layernorm(hidden)
    return model.classifier(hidden[:, 0] if pools else hidden)


_KNOWN = {
    "litgpt.GPT": Family(
        "transformer.h",
        {"transformer.wte": "input"},
        {"transformer.ln_f": "input", "lm_head": "input"},
        "input",
        "transformer.wte",
        _litgpt,
    ),
    "llama.LlamaForCausalLM": Family(
        "model.layers",
        {"model.embed_tokens": "input"},
        {"model.norm": "input", "lm_head": "input"},
        "input",
        "model.embed_tokens",
        _hugging_face,
    ),
    "gpt2.GPT2LMHeadModel": Family(
        "transformer.h",
        {"transformer.wte": "input", "transformer.wpe": "zero", "transformer.drop": "input"},
        {"transformer.ln_f": "input", "lm_head": "input"},
        "tuple",
        "transformer.wte",
        _hugging_face,
    ),
    "vit.ViTForImageClassification": Family(
        "vit.encoder.layer",
        {"vit.embeddings": "input"},
        {"vit.layernorm": "input", "classifier": "input"},
        "input",
        "",
        _vit,
    ),
}
