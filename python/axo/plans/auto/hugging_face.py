"""What transformers' models are told that run on a grid: caches and tables must fit this rank's part."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from axo.errors import Refused


def refuse_whole_heads(module: nn.Module, name: str, key_heads: int) -> None:
    """Let the first pass of ``module`` refuse a cache that already holds other heads than its own: prefix tuning's."""

    def check(module: Any, inputs: Any, named: dict[str, Any]) -> None:
        handle.remove()
        cache = next((named[key] for key in ("past_key_values", "past_key_value", "layer_past") if key in named), None)
        layers, index = getattr(cache, "layers", ()), getattr(module, "layer_idx", None)
        keys = getattr(layers[index], "keys", None) if index is not None and len(layers) > index else None
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
