"""What plan "auto" knows of Hugging Face's attention: classes that work on any number of heads.

Attention of the Llama family reshapes to (batch, tokens, -1, head_dim), so it computes with as many heads as its
projections give it: q, k and v normal, o transposed, heads over x. Only its ratio of query to key-value heads changes,
and that only where neighbours share a head. Norms of single heads (Qwen 3, Gemma 3) have the same weights on all ranks,
whose gradients are summed over x. GPT-2's splits one projection at ``split_size``, which becomes 1/Gx of it.

transformers is not imported here: classes are known by module and name. Not here: cross-attention, head masks,
``output_attentions`` (gives this rank's heads).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from axo.errors import Refused
from axo.placement import check_divides
from axo.plans.auto.conv1d import is_conv1d
from axo.plans.heads import kv_copies

SEPARATE = (
    *("llama.LlamaAttention", "mistral.MistralAttention", "mixtral.MixtralAttention", "granite.GraniteAttention"),
    *("qwen2.Qwen2Attention", "qwen3.Qwen3Attention", "qwen3_moe.Qwen3MoeAttention"),
    *("gemma.GemmaAttention", "gemma2.Gemma2Attention", "gemma3.Gemma3Attention"),
    "vit.ViTAttention",  # since transformers 5; before, its projections lie below another module
)
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_HEAD_NORMS = ("q_norm", "k_norm")


def _hf_name(module: nn.Module) -> str:
    """``llama.LlamaAttention`` for a class of transformers' models, else an empty string."""
    where = type(module).__module__.split(".")
    return f"{where[2]}.{type(module).__name__}" if where[:2] == ["transformers", "models"] and len(where) > 3 else ""


@dataclass(frozen=True)
class Attention:
    """How one attention module is split by heads.

    Attributes:
        layers: Child -> (kind, options of the layer): the first projections are whole->split, the last split->whole.
        attributes: What its forward reads and computes with this rank's heads.
        whole: Children that draw random numbers for what the last projection gives.
        norms: Children that normalise single heads, all by the same weights.
        key_heads: How many heads of keys a rank computes.
    """

    layers: dict[str, tuple[str, dict[str, Any]]]
    attributes: dict[str, Any]
    whole: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    key_heads: int = 0


def attention(module: Any, name: str, ranks: int) -> Attention | str:
    """How to split ``module`` over ``ranks`` along x; a reason in words where that cannot be; "" if no attention."""
    kind = _hf_name(module)
    try:
        if kind in SEPARATE and hasattr(module, "q_proj"):
            return _separate(module, name, ranks)
        if kind == "gpt2.GPT2Attention" and not module.is_cross_attention:
            return _fused(module, name, ranks)
    except ValueError as error:
        return str(error)
    return ""


def _separate(module: Any, name: str, ranks: int) -> Attention:
    if any(type(getattr(module, child)) is not nn.Linear for child in _PROJECTIONS):
        raise ValueError(f"{name}: its projections are not all torch.nn.Linear")
    size = module.head_dim
    heads, groups = module.q_proj.out_features // size, module.k_proj.out_features // size
    check_divides(name, "query heads", heads, "x", ranks)
    copies = kv_copies(name, "key-value heads", groups, ranks)
    shared = {"out_blocks": (groups * size,), "out_copies": (copies,)} if copies > 1 else {}
    layers = {"q_proj": ("normal", {}), "k_proj": ("normal", shared), "v_proj": ("normal", shared)}
    grouped = hasattr(module, "num_key_value_groups")
    mine = {"num_key_value_groups": heads // ranks // (groups * copies // ranks)} if grouped else {}
    norms = tuple(child for child in _HEAD_NORMS if hasattr(module, child))
    return Attention({**layers, "o_proj": ("transposed", {})}, mine, norms=norms, key_heads=groups * copies // ranks)


def _fused(module: Any, name: str, ranks: int) -> Attention:
    if not (is_conv1d(module.c_attn) and is_conv1d(module.c_proj)):
        raise ValueError(f"{name}: its projections are not Conv1D")
    check_divides(name, "heads", module.num_heads, "x", ranks)
    layers = {"c_attn": ("normal", {"out_blocks": (module.split_size,) * 3}), "c_proj": ("transposed", {})}
    mine = {"split_size": module.split_size // ranks, "num_heads": module.num_heads // ranks}
    return Attention(layers, mine, ("resid_dropout",), key_heads=mine["num_heads"])


def refuse_whole_heads(module: nn.Module, name: str, key_heads: int) -> None:
    """Let the first pass of ``module`` refuse a cache that already holds other heads than its own: prefix tuning's."""

    def check(module: Any, inputs: Any, named: dict[str, Any]) -> None:
        handle.remove()
        cache = named.get("past_key_values", named.get("past_key_value"))
        layers = getattr(cache, "layers", ())
        keys = getattr(layers[module.layer_idx], "keys", None) if len(layers) > module.layer_idx else None
        if isinstance(keys, torch.Tensor) and keys.dim() == 4 and keys.shape[1] != key_heads:
            raise Refused(
                f"forward: {name!r} computes {key_heads} of {keys.shape[1]} heads of keys on this rank, and is given a"
                " cache with all of them (prefix tuning does); keep attention whole by"
                " plan={'*.self_attn.*': 'replicate'}"
            )

    check.eager_only = True  # type: ignore[attr-defined]
    handle = module.register_forward_pre_hook(check, with_kwargs=True)


def refuse_resizing(model: nn.Module) -> None:
    """Let transformers' models say that their tables can no longer get other sizes."""
    for module in model.modules():
        if callable(getattr(type(module), "resize_token_embeddings", None)):
            module.resize_token_embeddings = _resize  # type: ignore[assignment]


def _resize(*_: Any, **__: Any) -> Any:
    raise Refused(
        "resize_token_embeddings: the embedding is split over ranks, and a rank would resize its part; call it before"
        " the model is split (axo.parallelize, on_grid, fabric.setup)"
    )
