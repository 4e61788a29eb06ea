"""Keep communication out of the graphs that torch.compile makes of a parallel model.

A parallel layer issues work in forward and waits for it in backward, or a layer later; a graph traced through it would
hold the handles of one step. So each parallel layer runs as it is, between graphs of everything else (attention, norms
of one rank, activations, rotary positions). Graph breaks cost little beside a layer's products.

Not here: collectives as operators that Inductor may reorder; one graph of the whole model (``fullgraph=True``), which
Dynamo refuses.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

_REASON = "axo: a parallel layer issues and awaits communication; it runs between graphs"


def keep_out_of_graphs(model: nn.Module) -> None:
    """Let Dynamo run parallel layers, and hooks of all modules, as they are. Call it before the first forward pass.

    Layers get a class of the same name whose ``forward`` Dynamo leaves alone, so that copies of them do too. Without
    a compiler nothing changes but a microsecond a layer. Harmless when called twice.
    """
    if torch._dynamo.config.disable:
        return
    for module in model.modules():
        if _communicates(module) and not hasattr(module, "_axo_outside"):
            layer: Any = type(module)
            module.__class__ = _outside(layer)
        hooks: Any
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in hooks.items():
                hooks[key] = hook if isinstance(hook, _Hook) else _Hook(hook)


def _communicates(module: Any) -> bool:
    return hasattr(module, "load_serial") or hasattr(module, "exchange")


@functools.cache
def _outside(layer: Any) -> Any:
    body = {
        "forward": torch.compiler.disable(layer.forward, reason=_REASON),
        "_axo_outside": True,
        "__module__": layer.__module__,
        "__qualname__": layer.__qualname__,
        "__doc__": layer.__doc__,
    }
    return type(layer.__name__, (layer,), body)


class _Hook:
    """Calls a hook outside of graphs; a copy of it calls the copied hook."""

    def __init__(self, hook: Any) -> None:
        self._hook = hook

    @torch.compiler.disable(reason=_REASON)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._hook(*args, **kwargs)
