"""Parallel models under torch.compile: communication is never traced.

    with gradients      each parallel layer runs as it is, between graphs of everything else (attention, norms of one
                        rank, activations, rotary positions): it issues work in forward and waits for it in backward,
                        or a layer later; a graph traced through it would hold the handles of one step
    without             linear layers, norms and embeddings are single operators (opaque_ops.py) of a graph, so that a
                        whole model can be one: ``torch.compile(model, fullgraph=True)``

Graph breaks cost little beside a layer's products.

Not here: one graph of a step in training. Without gradients too the other layers (adapters, convolutions, grouped
routers of experts) and tokens that are split over x are breaks.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import nn

from axo.integrations.fabric import compile_operators as opaque_ops
from axo.overlap import Engine

_REASON = "axo: a parallel layer issues and awaits communication; it runs between graphs"


def keep_out_of_graphs(model: nn.Module) -> None:
    """Let Dynamo run parallel layers, and hooks of all modules, as they are. Call it before the first forward pass.

    Layers get a class of the same name whose ``forward`` Dynamo does not look into, so that copies of them do too.
    Without a compiler nothing changes but a microsecond a layer. Harmless when called twice.
    """
    if torch._dynamo.config.disable:
        return
    order = opaque_ops.new_order()
    module: Any
    for module in model.modules():
        if _communicates(module) and not hasattr(module, "_axo_outside"):
            layer: Any = type(module)
            module.__class__ = _outside(layer)
            module._axo_operator = order, opaque_ops.register(module)
        hooks: Any
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in hooks.items():
                hooks[key] = hook if isinstance(hook, _Hook) else _Hook(hook, order)


def _communicates(module: Any) -> bool:
    return hasattr(module, "load_serial") or hasattr(module, "exchange")


@functools.cache
def _outside(layer: Any) -> Any:
    result = opaque_ops.result_of(layer)
    untraced = torch.compiler.disable(layer.forward, reason=_REASON)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and not torch.is_grad_enabled():
            if result is not None and not getattr(self, "scatters_tokens", False):
                return opaque_ops.run_layer(self, result, *args, **kwargs)
        return untraced(self, *args, **kwargs)

    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        new = layer.__deepcopy__(self, memo)
        new._axo_operator = new._axo_operator[0], opaque_ops.register(new)
        return new

    body = {
        "forward": forward,
        "untraced": untraced,
        "__deepcopy__": deepcopy,
        "_axo_outside": True,
        "__module__": layer.__module__,
        "__qualname__": layer.__qualname__,
        "__doc__": layer.__doc__,
    }
    return type(layer.__name__, (layer,), body)


class _Hook:
    """Calls a hook outside of graphs; one of an engine, where there are no gradients, as an operator."""

    def __init__(self, hook: Any, order: torch.Tensor) -> None:
        self.hook, self.order = hook, order
        self.is_engines = isinstance(getattr(hook, "__self__", None), Engine)
        self.key = opaque_ops.register(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook(copy.deepcopy(self.hook, memo), copy.deepcopy(self.order, memo))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and not torch.is_grad_enabled() and self.is_engines:
            return opaque_ops.run_hook(self.order, self.key)
        return self.untraced(*args, **kwargs)

    @torch.compiler.disable(reason=_REASON)
    def untraced(self, *args: Any, **kwargs: Any) -> Any:
        return self.hook(*args, **kwargs)


# Hooks of a compiled model itself are called from outside of its graph: none is then to become one of its own.
torch._dynamo.eval_frame.skip_code(_Hook.__call__.__code__)
