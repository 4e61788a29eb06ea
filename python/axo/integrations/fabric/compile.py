"""Parallel models under torch.compile: communication is never traced.

    with gradients      each parallel layer runs as it is, between graphs of everything else (attention, norms of one
                        rank, activations, rotary positions): it issues work in forward and waits for it in backward,
                        or a layer later; a graph traced through it would hold the handles of one step
    without             linear layers, norms and embeddings are single operators of a graph, so that a whole model can
                        be one: ``torch.compile(model, fullgraph=True)``

    axo::layer(Tensor input, Tensor(a!) order, int key, int features, ScalarType dtype, ScalarType? autocast) -> Tensor
    axo::hook(Tensor(a!) order, int key) -> ()

An operator runs the layer's own ``forward``, or the hook with which a pass of the model begins or ends. It gets a
number and not the layer: numbers are what a graph can hold. A compiler sees shapes and dtypes only. Collectives must
come in one order on all ranks, so all operators of a model say that they write ``order``, one number that nobody reads:
a compiler then keeps them as they stand. (Registered as ordered effects, they make torch 2.13's Inductor delete inputs
that are still needed.) Weights are read when a graph runs. Graph breaks cost little beside a layer's products.

Not here: one graph of a step in training. Without gradients too the other layers (adapters, convolutions, grouped
routers of experts) and tokens that are split over x are breaks.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from axo.matmul.products import compute_dtype
from axo.nn import Embedding, LayerNorm, Linear, RMSNorm
from axo.nn.layer import ParallelLayer
from axo.overlap import Engine

_REASON = "axo: a parallel layer issues and awaits communication; it runs between graphs"


def keep_out_of_graphs(model: nn.Module) -> None:
    """Let Dynamo run parallel layers, and hooks of all modules, as they are. Call it before the first forward pass.

    Layers get a class of the same name whose ``forward`` Dynamo does not look into, so that copies of them do too.
    Without a compiler nothing changes but a microsecond a layer. Harmless when called twice.
    """
    if torch._dynamo.config.disable:
        return
    with torch.inference_mode(False):
        order = torch.zeros(1)
    module: Any
    for module in model.modules():
        communicates = hasattr(module, "load_serial") or hasattr(module, "exchange")
        if communicates and not hasattr(module, "_axo_outside"):
            kind: Any = type(module)
            module.__class__ = _outside(kind)
            module._axo_operator = order, _register(module)
        hooks: Any
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in hooks.items():
                hooks[key] = hook if isinstance(hook, _Hook) else _Hook(hook, order)


@functools.cache
def _outside(kind: Any) -> Any:
    result = _RESULTS.get(kind.forward)
    untraced = torch.compiler.disable(kind.forward, reason=_REASON)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and not torch.is_grad_enabled():
            if result is not None and not getattr(self, "scatters_tokens", False):
                return _call(self, result, *args, **kwargs)
        return untraced(self, *args, **kwargs)

    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        new = kind.__deepcopy__(self, memo)
        new._axo_operator = new._axo_operator[0], _register(new)
        return new

    body = {
        "forward": forward,
        "untraced": untraced,
        "__deepcopy__": deepcopy,
        "_axo_outside": True,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    return type(kind.__name__, (kind,), body)


class _Hook:
    """Calls a hook outside of graphs; one of an engine, where there are no gradients, as an operator."""

    def __init__(self, hook: Any, order: torch.Tensor) -> None:
        self.hook, self.order = hook, order
        self.is_engines = isinstance(getattr(hook, "__self__", None), Engine)
        self.eager_only = getattr(hook, "eager_only", False)  # it looks at a first pass, and changes nothing
        self.key = _register(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook(copy.deepcopy(self.hook, memo), copy.deepcopy(self.order, memo))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and self.eager_only:
            return None
        if torch.compiler.is_compiling() and not torch.is_grad_enabled() and self.is_engines:
            return torch.ops.axo.hook(self.order, self.key)
        return self.untraced(*args, **kwargs)

    @torch.compiler.disable(reason=_REASON)
    def untraced(self, *args: Any, **kwargs: Any) -> Any:
        return self.hook(*args, **kwargs)


# Hooks of a compiled model itself are called outside of its graph. They must not become graphs of their own.
torch._dynamo.eval_frame.skip_code(_Hook.__call__.__code__)


# What the numbers in graphs mean. A graph outlives the call that made it, so this is nobody's argument.
_KNOWN: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


def _register(thing: Any) -> int:
    """A number for a layer or hook: no other's ever, as a graph may outlive them, and the same on all ranks."""
    key = next(_NUMBERS)
    _KNOWN[key] = thing
    return key


def _of_linear(layer: Linear, input: torch.Tensor) -> tuple[int, torch.dtype]:
    whole = layer.gather_output and layer.out_axis is not None
    return layer.out_features if whole else layer.matmul.exchange.block_rows, compute_dtype(input)


def _of_embedding(layer: Embedding, input: torch.Tensor) -> tuple[int, torch.dtype]:
    return layer.embedding_dim if layer.gather_output else layer.weight.shape[1], layer.weight.dtype


def _of_norm(layer: LayerNorm | RMSNorm, input: torch.Tensor) -> tuple[int, torch.dtype]:
    lifted = layer.centered and input.device.type == "cuda" and torch.is_autocast_enabled("cuda")
    return layer.local_features, torch.float32 if lifted and input.dtype != torch.float64 else input.dtype


# By a layer's forward: what tells how many features it returns, and in which dtype. A layer that has no entry here does
# not become an operator.
_RESULTS: dict[Any, Callable[[Any, torch.Tensor], tuple[int, torch.dtype]]] = {
    Linear.forward: _of_linear,
    Embedding.forward: _of_embedding,
    LayerNorm.forward: _of_norm,
    RMSNorm.forward: _of_norm,
}


def _call(layer: ParallelLayer, result: Any, input: torch.Tensor) -> torch.Tensor:
    """Put a call of ``layer`` into the graph that is being made."""
    order, key = layer.__dict__["_axo_operator"]
    features, dtype = result(layer, input)
    kind = input.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return torch.ops.axo.layer(input, order, key, features, dtype, autocast)


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
    with torch.no_grad():  # an engine's: without gradients it does not look at its arguments
        hook(*[None] * len(inspect.signature(hook).parameters))


@_hook.register_fake
def _(order: torch.Tensor, key: int) -> None:
    return None
