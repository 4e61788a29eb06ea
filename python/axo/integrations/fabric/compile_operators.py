"""Parallel layers as operators of a graph, where there are no gradients.

    axo::layer(Tensor input, Tensor(a!) order, int key, int features, ScalarType dtype, ScalarType? autocast) -> Tensor
    axo::hook(Tensor(a!) order, int key) -> ()

An operator runs the layer's own ``forward``, or the hook with which a pass of the model begins or ends. It gets a
number and not the layer: numbers are what a graph can hold. A compiler sees shapes and dtypes only. Collectives must
come in one order on all ranks, so all operators of a model say that they write ``order``, one number that nobody reads:
a compiler then keeps them as they stand. (Registered as ordered effects, they make torch 2.13's Inductor delete inputs
that are still needed.) Weights are read when a graph runs.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from axo.matmul.products import compute_dtype
from axo.nn import Embedding, LayerNorm, Linear, RMSNorm

# What the numbers in graphs mean. A graph outlives the call that made it, so this is nobody's argument.
_KNOWN: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


def register(thing: Any) -> int:
    """A number for a layer or hook: no other's ever, as a graph may outlive them, and the same on all ranks."""
    key = next(_NUMBERS)
    _KNOWN[key] = thing
    return key


def new_order() -> torch.Tensor:
    """What the operators of one model share."""
    with torch.inference_mode(False):
        return torch.zeros(1)


def result_of(layer: type) -> Callable[[Any, torch.Tensor], tuple[int, torch.dtype]] | None:
    """What says how many features a layer of this class returns, and in which dtype; None: it is no operator."""
    found = {Linear.forward: _of_linear, Embedding.forward: _of_embedding}
    found |= {LayerNorm.forward: _of_norm, RMSNorm.forward: _of_norm}
    return found.get(layer.forward)  # type: ignore[attr-defined]


def _of_linear(layer: Any, input: torch.Tensor) -> tuple[int, torch.dtype]:
    whole = layer.gather_output and layer.out_axis is not None
    return layer.out_features if whole else layer.matmul.exchange.block_rows, compute_dtype(input)


def _of_embedding(layer: Any, input: torch.Tensor) -> tuple[int, torch.dtype]:
    return layer.embedding_dim if layer.gather_output else layer.weight.shape[1], layer.weight.dtype


def _of_norm(layer: Any, input: torch.Tensor) -> tuple[int, torch.dtype]:
    lifted = layer.centered and input.device.type == "cuda" and torch.is_autocast_enabled("cuda")
    return layer.local_features, torch.float32 if lifted and input.dtype != torch.float64 else input.dtype


def run_layer(layer: Any, result: Any, input: torch.Tensor) -> torch.Tensor:
    """Put a call of ``layer`` into the graph that is being made."""
    order, key = layer._axo_operator
    features, dtype = result(layer, input)
    kind = input.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return torch.ops.axo.layer(input, order, key, features, dtype, autocast)


def run_hook(order: torch.Tensor, key: int) -> None:
    """Put a call of a hook into the graph that is being made."""
    torch.ops.axo.hook(order, key)


@torch.library.custom_op("axo::layer", mutates_args=("order",))
def _layer(
    input: torch.Tensor, order: torch.Tensor, key: int, features: int, dtype: torch.dtype, autocast: torch.dtype | None
) -> torch.Tensor:
    # Autocast is traced away: a compiled graph runs without it.
    with contextlib.nullcontext() if autocast is None else torch.autocast(input.device.type, autocast):
        output = _KNOWN[key].untraced(input)
    assert output.shape[-1] == features and output.dtype == dtype, (output.shape, output.dtype, features, dtype)
    return output


@_layer.register_fake
def _(
    input: torch.Tensor, order: torch.Tensor, key: int, features: int, dtype: torch.dtype, autocast: torch.dtype | None
) -> torch.Tensor:
    lead = input.shape[:-1] if input.is_floating_point() else input.shape
    return input.new_empty((*lead, features), dtype=dtype)


@torch.library.custom_op("axo::hook", mutates_args=("order",))
def _hook(order: torch.Tensor, key: int) -> None:
    hook = _KNOWN[key].hook
    with torch.no_grad():  # of an engine: it asks whether there are gradients, then not what passes it by
        hook(*[None] * len(inspect.signature(hook).parameters))


@_hook.register_fake
def _(order: torch.Tensor, key: int) -> None:
    return None
