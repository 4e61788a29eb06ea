"""Overlap of communication and computation: OAR, ORS, OAG and the gather cache, as one object a model holds.

    model = axo.parallelize(model, comms, overlap=axo.Overlap(gather_cache="none"))

``attach`` does the same to a model made of Axo's layers by hand. Each layer's ``Exchange`` asks its engine; nothing
here is global. See ``options`` for what can be switched, ``engine`` for when things happen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from axo.overlap.engine import Engine
from axo.overlap.events import Event, Events
from axo.overlap.guard import watch
from axo.overlap.options import Overlap, cache_limits

__all__ = ["Engine", "Event", "Events", "Overlap", "attach", "cache_limits", "engines", "exchanges", "record"]


def exchanges(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(module name, Exchange) of each parallel layer in ``model``."""
    for name, module in model.named_modules():
        found = getattr(module, "exchange", None) or getattr(getattr(module, "matmul", None), "exchange", None)
        if found is not None and hasattr(found, "engine"):
            yield name, found


def engines(model: nn.Module) -> list[Engine]:
    """The engines of the layers in ``model``, each once."""
    return list(dict.fromkeys(exchange.engine for _, exchange in exchanges(model)))


def attach(model: nn.Module, comms: Any, overlap: Overlap | None = None) -> None:
    """Give the parallel layers of ``model`` one engine, whose passes are the forward passes of ``model``.

    Layers of one repeated block (an entry of an ``nn.ModuleList`` or ``nn.Sequential``) are gathered together.
    """
    if comms.grid.world_size == 1:
        return
    engine = Engine(comms, overlap or Overlap())
    for name, exchange in exchanges(model):
        exchange.engine = engine
        exchange.name = name
        block = re.match(r"(?:.*?\.)?\d+(?=\.)", name)
        exchange.group = block[0] if block else name
    engine.root_at(model)
    watch(engine, list(model.parameters()))


@contextmanager
def record(model: nn.Module) -> Iterator[Events]:
    """Record what the engines of ``model`` issue, wait for and compute inside the block; see ``axo.overlap.events``."""
    events: Events = []
    found = engines(model)
    for engine in found:
        engine.events = events
    try:
        yield events
    finally:
        for engine in found:
            engine.events = None
