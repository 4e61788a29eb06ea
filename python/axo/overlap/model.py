"""The engine of a whole model: give its layers one, find it again, record what it does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from axo.comm.connect import Communicators
from axo.optim.zero import STAGES, Zero
from axo.overlap.engine import Engine, Exchange
from axo.overlap.events import Events
from axo.overlap.gathers import EVALUATION, TRAINING
from axo.overlap.gradients import REDUCE_DTYPES
from axo.overlap.options import Overlap
from axo.placement import Placement


def exchanges(model: nn.Module) -> Iterator[tuple[str, Exchange]]:
    """(module name, Exchange) of each parallel layer in ``model``; a layer may have several."""
    for name, module in model.named_modules():
        for exchange in getattr(module, "exchanges", ()):
            yield name, exchange


def engines(model: nn.Module) -> list[Engine]:
    """The engines of the layers in ``model``, each once."""
    return list(dict.fromkeys(exchange.engine for _, exchange in exchanges(model)))


def attach(
    model: nn.Module,
    comms: Communicators,
    overlap: Overlap | None = None,
    *,
    zero: int = 0,
    reduce_dtype: torch.dtype | None = None,
    same_inputs: bool = False,
) -> None:
    """Give the parallel layers of ``model`` one engine, whose passes are the forward passes of ``model``.

    Layers of one repeated block (an entry of an ``nn.ModuleList`` or ``nn.Sequential``) are gathered together.
    ``zero`` and ``reduce_dtype`` are as for ``axo.parallelize``. ``same_inputs``: the model takes the same input on all
    ranks along x and y, which its first pass with gradients checks, and its first one without.

    Raises:
        ValueError: ``zero`` is not a stage, or ``reduce_dtype`` not a dtype for it.
    """
    if zero not in STAGES or isinstance(zero, bool):
        raise ValueError(f"zero={zero!r} is not known; use 0, 1 or 2, and the axis z for what ZeRO-3 does")
    if reduce_dtype not in REDUCE_DTYPES:
        raise ValueError(f"reduce_dtype={reduce_dtype} is not supported; use one of {REDUCE_DTYPES}")
    if comms.grid.world_size == 1:
        return
    engine = Engine(comms, overlap or Overlap(), zero, reduce_dtype)
    for name, exchange in exchanges(model):
        block = re.match(r"(?:.*?\.)?\d+(?=\.)", name)
        exchange.join(engine, name, block[0] if block else name)
    if engine.zero is not None:
        _cut_state(model, engine.zero)
    if same_inputs and comms.grid.x * comms.grid.y > 1:
        engine.compares_inputs = {TRAINING, EVALUATION}
    engine.root_at(model)


def detach(model: nn.Module) -> Callable[[nn.Module], None]:
    """Take the engine of ``model`` away. What is returned gives a module with some of its layers an engine like it.

    For several stages of a pipeline on one rank, each of which runs its micro-batches by itself.
    """
    for old in engines(model):
        if old.rooted:
            zero = 0 if old.zero is None else old.zero.stage
            old.uproot()
            return lambda part: attach(part, old.comms, old.overlap, zero=zero, reduce_dtype=old.reduce_dtype)
    return lambda part: None


def _cut_state(model: nn.Module, zero: Zero) -> None:
    """Let the placements of all parameters say what cuts their optimizer state."""
    for module in model.modules():
        placements: dict[str, Placement] = getattr(module, "placements", {})
        for name, placement in placements.items():
            placements[name] = replace(placement, zero=zero)
            parameter = module._parameters.get(name)
            if getattr(parameter, "placement", None) is placement:
                parameter.placement = placements[name]  # type: ignore[union-attr]


@contextmanager
def record(model: nn.Module) -> Iterator[Events]:
    """Record what the engines of ``model`` issue, wait for and compute inside the block; see ``axo.overlap.events``."""
    events: Events = []
    recorded = engines(model)
    for engine in recorded:
        engine.events = events
    try:
        yield events
    finally:
        for engine in recorded:
            engine.events = None
