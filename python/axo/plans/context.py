"""Models over a context: positions, labels and attention of sequences whose tokens lie on several ranks.

    LitGPT         a block gets the rotations of its own tokens and, in the place of the mask, the batch's ``Pieces``;
                   its attention calls ``axo.nn.attention``; with ``input_pos`` (generation) each rank has whole
                   sequences, and all is as without a context
    Hugging Face   the model is given positions, shifted labels and the ``Pieces`` as arguments, which its own code
                   hands down to the attention that is registered here under the name of ``_NAME``

Each pass begins with one small all-gather: how long the sequences are. A block that is run again in backward has its
arguments, and so the batch that it was called with; one of LitGPT's that a module around it runs again (torch's
``checkpoint_wrapper``) has those of the last pass, which must be the same one.

Soft caps of scores are computed by the model's own code over gathered keys and values.

Not here, refused: other families, adapters, caches of transformers, masks of padding, dropout in attention.
"""

from __future__ import annotations

import copy
import inspect
import math
import sys
from functools import partial
from typing import Any

import torch
from torch import nn

from axo.comm.connect import Communicators
from axo.errors import Refused
from axo.nn.context import Pieces, check_heads, check_kind, next_labels, pieces_of, with_documents
from axo.nn.context_attention import attention, own_attention

FAMILIES = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "mistral")
_NAME = "axo_context"
_SLIDES = "apply_sliding_window_attention"  # LitGPT's attention makes the mask of a window itself


def check(model: nn.Module, kind: str, ranks: int, x: int) -> None:
    """Refuse a model whose attention, on a grid of ``x``, cannot look beyond a rank's tokens, before anything changes.

    Raises:
        ValueError: The kind is not known.
        Refused: Names the model, and what of it.
    """
    owner, config = f"parallelize: {type(model).__name__}", getattr(model, "config", None)
    check_kind("parallelize", kind)
    if type(model).__module__.startswith("litgpt.adapter"):
        raise Refused(f"{owner}: context={ranks} with a prompt before the tokens is not supported; use LoRA")
    if not _is_litgpt(model) and getattr(config, "model_type", "") not in FAMILIES:
        raise Refused(
            f"{owner}: context={ranks} is not known of this model: it is of litgpt.GPT, and of transformers' families"
            f" {', '.join(FAMILIES)}; in a model of your own call axo.nn.attention, which takes windows and ALiBi too,"
            " and make its layers by hand"
        )
    assert config is not None
    check_kind(owner, kind, _own(config))
    litgpt = _is_litgpt(model)
    if not litgpt:
        _check_hugging_face(f"{owner}: context={ranks}", type(model).__name__, config)
    heads = config.n_head if litgpt else config.num_attention_heads
    groups = config.n_query_groups if litgpt else config.num_key_value_heads
    check_heads(owner, kind, heads // x, max(1, groups // x), ranks)
    if not litgpt and getattr(config, "attention_dropout", None):
        raise Refused(f"{owner}: attention_dropout={config.attention_dropout} in a context is not supported; use 0")


def _check_hugging_face(owner: str, name: str, config: Any) -> None:
    """Refuse what looks at more than a rank's tokens in another place than attention.

    Raises:
        Refused: Says what.
    """
    if not name.endswith(("ForCausalLM", "Model")):
        raise Refused(f"{owner} is of language models (...ForCausalLM) or their bodies: other heads look at all tokens")
    rotations = repr([getattr(config, field, None) for field in ("rope_scaling", "rope_parameters")])
    if "dynamic" in rotations or "longrope" in rotations:
        raise Refused(f"{owner} with rotations that depend on a sequence's length (dynamic, longrope) is not supported")
    if getattr(config, "use_bidirectional_attention", False) or getattr(config, "is_causal", True) is False:
        raise Refused(f"{owner} with attention that is not causal is not supported")


def install(model: nn.Module, comms: Communicators, kind: str, grad_reduce: str) -> None:
    """Let a model, whose layers are parallel, take and give the tokens of this rank."""
    (_LitGPT if _is_litgpt(model) else _HuggingFace)(model, comms, kind, grad_reduce)


def _is_litgpt(model: nn.Module) -> bool:
    return any(kind.__name__ == "GPT" and kind.__module__ == "litgpt.model" for kind in type(model).__mro__)


def _own(config: Any) -> str:
    """What attention does that only the model's own code can, in words; empty: nothing."""
    caps = (getattr(config, name, None) for name in ("attention_logit_softcapping", "attn_logit_softcapping"))
    return "soft-capped scores" if any(caps) else ""


class _LitGPT:
    """Hooks of one ``litgpt.GPT``."""

    def __init__(self, model: Any, comms: Communicators, kind: str, grad_reduce: str) -> None:
        self._comms, self._kind = comms, kind
        self._now: tuple[torch.Tensor, torch.Tensor, Pieces] | None = None
        self._whole = False  # each rank has whole sequences in the pass at hand
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        for index, block in enumerate(model.transformer.h):
            attn, stock, window = block.attn, block.attn.scaled_dot_product_attention, None
            if slides := bool(getattr(attn, _SLIDES, False)):
                window, attn.build_kv_cache = block.config.sliding_window_size, partial(_cache_of_window, attn)
            block.register_forward_pre_hook(partial(self._tell, index, slides))
            attn.scaled_dot_product_attention = partial(_litgpt_attention, attn, window, stock)

    def __deepcopy__(self, memo: dict[int, Any]) -> _LitGPT:
        return self

    def _begin(self, model: Any, args: Any, named: dict[str, Any]) -> None:
        if "context_cut" in named:
            raise Refused(
                "forward: a GPT takes no context_cut: it knows no packed documents; cut its batches by"
                " axo.shard_batch(batch, comms) without positions="
            )
        self._whole = has_whole_sequences(args, named)
        if self._whole:
            return
        pieces = pieces_of(args[0], self._comms.context, self._kind)
        if pieces.length > model.max_seq_length:
            raise ValueError(
                f"forward: sequences of {pieces.length} tokens are longer than max_seq_length={model.max_seq_length}"
            )
        positions = pieces.positions(model.cos.device)
        self._now = model.cos[positions].unsqueeze(0), model.sin[positions].unsqueeze(0), pieces

    def _tell(self, index: int, slides: bool, block: Any, args: Any) -> Any:
        if slides:
            setattr(block.attn, _SLIDES, self._whole)
        if self._whole:
            return None
        assert self._now is not None, "the model's own hook comes first"
        cos, sin, pieces = self._now
        if block.config.rope_indices is not None:
            cos, sin = (table[..., block.config.rope_indices[index]] for table in (cos, sin))
        return (args[0], cos, sin, pieces, *args[4:])


def has_whole_sequences(args: Any, named: dict[str, Any]) -> bool:
    """Whether a ``litgpt.GPT`` on a context is called with a place in its cache, as to generate."""
    return (args[1] if len(args) > 1 else named.get("input_pos")) is not None


def _cache_of_window(attn: Any, *args: Any, **options: Any) -> Any:
    setattr(attn, _SLIDES, True)  # as LitGPT left it, until the next pass over pieces
    return type(attn).build_kv_cache(attn, *args, **options)


def _litgpt_attention(
    attn: Any, window: int | None, stock: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pieces: Any = None
) -> torch.Tensor:
    """LitGPT's ``scaled_dot_product_attention``: (B, heads, t, size) -> (B, t, heads, size).

    It repeats keys and values for each head of queries, of which one each travels. With a mask in the place of
    ``pieces`` it is ``stock``.
    """
    if not isinstance(pieces, Pieces):
        whole: torch.Tensor = stock(q, k, v, pieces)
        return whole
    repeats = attn.config.n_head // attn.config.n_query_groups
    k, v = k[:, ::repeats], v[:, ::repeats]
    if not _own(attn.config):
        scale = attn.mscale * attn.mscale / math.sqrt(attn.config.attention_scores_scalar or q.shape[-1])
        return attention(q, k, v, pieces, scale=scale, window=window).transpose(1, 2)

    def repeated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = stock(q, *(each.repeat_interleave(repeats, 1) for each in (k, v)), mask)
        return output

    return own_attention(q, k, v, pieces, repeated, window=window)


class _HuggingFace:
    """Hooks of one of transformers' models."""

    def __init__(self, model: Any, comms: Communicators, kind: str, grad_reduce: str) -> None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register(_NAME, _hugging_face_attention)
        self._comms, self._kind, self._mean = comms, kind, grad_reduce == "mean"
        self._names = list(inspect.signature(model.forward).parameters)
        config = copy.deepcopy(model.config)  # another model may have been made of it
        config._attn_implementation = _NAME
        for module in model.modules():
            if getattr(module, "config", None) is not None:
                module.config = config
        model.register_forward_pre_hook(self._begin, with_kwargs=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> _HuggingFace:
        return self

    def _begin(self, model: Any, args: Any, named: dict[str, Any]) -> Any:
        named = {**dict(zip(self._names, args, strict=False)), **named}
        tokens = next(named[name] for name in ("input_ids", "inputs_embeds") if named.get(name) is not None)
        pieces = pieces_of(tokens, self._comms.context, self._kind, named.pop("context_cut", None))
        self._check(named, pieces)
        positions = named.get("position_ids")
        if positions is None:
            named["position_ids"] = pieces.positions(tokens.device).unsqueeze(0)
        else:
            pieces = with_documents(pieces, positions)
        if named.get("labels") is not None and named.get("shift_labels") is None:
            named["shift_labels"] = next_labels(named["labels"], pieces)
        if named.get("shift_labels") is not None and named.get("num_items_in_batch") is None:
            named["num_items_in_batch"] = self._counted(named["shift_labels"])
        return (), {**named, "attention_mask": None, "use_cache": False, "axo_pieces": pieces}

    def _check(self, named: dict[str, Any], pieces: Pieces) -> None:
        """Refuse what reaches beyond the tokens of a rank in a way that is not known here, alike on every rank."""
        if pieces.length < pieces.ranks:
            raise ValueError(
                f"forward: a sequence of {pieces.length} tokens over {pieces.ranks} ranks leaves some without, which"
                " transformers' code cannot run; use a longer one"
            )
        if isinstance(kept := named.get("logits_to_keep"), torch.Tensor) or kept:
            raise Refused("forward: logits_to_keep is not supported in a context, which cannot generate; leave it out")
        if named.get("ignore_index", -100) != -100:
            raise Refused("forward: ignore_index is not supported in a context; use labels of -100")
        for name in ("past_key_values", "cu_seq_lens_q"):
            if named.get(name) is not None:
                raise Refused(
                    f"forward: {name} is not supported in a context; there is no cache, and position_ids that begin at"
                    " 0 with each document say where packed documents are"
                )
        mask = named.get("attention_mask")
        if mask is not None:
            hides = torch.tensor([mask.dim() != 2 or bool((mask == 0).any())], device=self._comms.device).int()
            if bool(pieces.communicator.all_reduce(hides, "max").item()):
                raise Refused(
                    "forward: an attention_mask that hides tokens is not supported in a context; pack documents, with"
                    " position_ids that begin at 0 with each, or pad behind the end, with labels of -100 and no mask"
                )

    def _counted(self, labels: torch.Tensor) -> torch.Tensor:
        """What a rank's sum of losses is divided by, so that gradients are those of the mean over all ranks' labels."""
        count = (labels != -100).sum().reshape(1)
        for axis in self._comms.arrangement.rows:
            if self._comms.grid.size(axis) > 1:
                self._comms.axis(axis).all_reduce(count)
        return count.squeeze(0) / (self._comms.data_ranks if self._mean else 1)


def _hugging_face_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    axo_pieces: Pieces | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' attention interface: (B, heads, t, size) -> (B, t, heads, size), and no weights."""
    if axo_pieces is None:
        raise Refused(f"forward: {type(module).__name__} is of a model on a context; call the model itself")
    if softcap is None:
        output = attention(query, key, value, axo_pieces, scale=scaling, window=sliding_window)
        return output.transpose(1, 2).contiguous(), None
    eager = partial(sys.modules[type(module).__module__].eager_attention_forward, module)  # type: ignore[attr-defined]
    own = partial(eager, scaling=scaling, softcap=softcap)
    result: tuple[torch.Tensor, None] = own_attention(query, key, value, axo_pieces, own, window=sliding_window)
    return result
