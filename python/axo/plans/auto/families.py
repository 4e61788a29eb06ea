"""Attention of known families, as tables: which projections give heads, which takes them, what counts them.

A table comes from Hugging Face's ``base_model_tp_plan`` of the model's family, where that splits attention; else from
``CLASSES``, by class; else from ``FORMS``, by the names of projections. Forms are tried out before they are used
(``axo.plans.auto.attention``), since anybody may write such a class. What has no table stays whole.

transformers is not imported here: its classes are known by module and name. Not here: attention whose positions are a
bias for each head (T5, BLOOM), projections that are no ``torch.nn.Linear`` or ``Conv1D`` (Falcon).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Heads:
    """The table of one kind of attention. Names are paths below the attention module.

    Attributes:
        first: Projections that take whole features and give heads: of queries, keys and values, or all in one.
        last: The projection that takes heads and gives whole features.
        counts: Attributes of which a rank has its share; the first is the number of heads.
        blocks: How many equal blocks one projection gives (queries, keys, values); 1 where it goes head by head.
        after: Modules with parameters that work on what the last projection gives.
        form: It is a form: any class may have it, and its forward may read its sizes off its input.
    """

    first: tuple[str, ...]
    last: str
    counts: tuple[str, ...] = ()
    blocks: int = 1
    after: tuple[str, ...] = ()
    form: bool = False


_QKV = ("q_proj", "k_proj", "v_proj")
# Families of transformers without a plan of their own that splits attention.
CLASSES = {
    "gpt2.GPT2Attention": Heads(("c_attn",), "c_proj", ("num_heads", "split_size"), 3),
    "opt.OPTAttention": Heads(_QKV, "out_proj", ("num_heads",)),
    "whisper.WhisperAttention": Heads(_QKV, "out_proj", ("num_heads",)),
    "bert.BertAttention": Heads(
        ("self.query", "self.key", "self.value"),
        "output.dense",
        ("self.num_attention_heads", "self.all_head_size"),
        after=("output",),
    ),
    "vit.ViTAttention": Heads(  # of transformers 4; since 5 its projections are named as Llama's
        ("attention.query", "attention.key", "attention.value"),
        "output.dense",
        ("attention.num_attention_heads", "attention.all_head_size"),
        after=("output",),
    ),
}
_LLAMA = Heads(_QKV, "o_proj")
FORMS = (
    Heads(("c_attn",), "c_proj", ("n_head", "n_embd"), 3, form=True),  # nanoGPT's
    Heads(("qkv",), "proj", ("heads",), 3, form=True),
    Heads(("qkv",), "proj", ("num_heads",), 3, form=True),  # a plain ViT's
)


def of_transformers(module: nn.Module) -> str:
    """``llama.LlamaAttention`` for a class of transformers' models, else an empty string."""
    package, *rest = type(module).__module__.split(".")
    return f"{rest[1]}.{type(module).__name__}" if package == "transformers" and rest[:1] == ["models"] else ""


def table_of(module: nn.Module, name: str) -> Heads | None:
    """The table of ``module``, which is ``name`` in its model; None: it has none."""
    return next(filter(lambda heads: _has(module, heads), _tables(module, name)), None)


def _tables(module: nn.Module, name: str) -> Iterator[Heads]:
    if family := of_transformers(module):
        if plan := _split_by_plan(module, name):
            yield plan
        if family in CLASSES:
            yield CLASSES[family]
        if family == "vit.ViTAttention":
            yield _LLAMA
    else:
        yield from FORMS


def _split_by_plan(module: Any, name: str) -> Heads | None:
    """What Hugging Face's plan says of the children of ``module``: "colwise" gives heads, "rowwise" takes them."""
    plan: dict[str, str] = getattr(getattr(module, "config", None), "base_model_tp_plan", None) or {}
    pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", f".{name}.")
    ways = {
        child: plan[key]
        for child, _ in module.named_children()
        for key in plan
        if f"{pattern}{child}".endswith(f".{key}")
    }
    last = [child for child, way in ways.items() if way == "rowwise"]
    first = tuple(child for child, way in ways.items() if way == "colwise")
    heads_known = hasattr(module, "head_dim") or hasattr(module, "head_size")
    return Heads(first, last[0]) if heads_known and len(last) == 1 and len(first) in (1, 3) else None


def _has(module: nn.Module, heads: Heads) -> bool:
    return all(at(module, path) is not None for path in (*heads.first, heads.last, *heads.counts))


def at(module: Any, path: str) -> Any:
    """What lies at ``path`` below ``module``; None: nothing does."""
    for part in path.split("."):
        module = getattr(module, part, None)
    return module
