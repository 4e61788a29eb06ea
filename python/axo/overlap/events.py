"""A record of what the engine issues, waits for and computes, in order: for tests, traces and the planner.

    with axo.overlap.record(model) as events:
        model(x).sum().backward()
    [(e.what, e.op, e.axis, e.layer) for e in events]

``what`` is "issue" (a collective starts; ``end`` is ``start``), "wait" (this rank blocks for one, from ``start`` to
``end``) or "compute" (a product: op is forward, dI or dW; axis is ""). Seconds are those of ``time.perf_counter``.
Waits that find their collective complete are not recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from axo.comm.work import Work

if TYPE_CHECKING:
    from axo.overlap.engine import Engine


class Event(NamedTuple):
    """One event of one rank; see the module."""

    what: str
    op: str
    axis: str
    layer: str
    start: float
    end: float


Events = list[Event]


def add(events: Events | None, what: str, op: str, axis: str, layer: str, start: float | None = None) -> None:
    """Append an event that ends now, if there is a record."""
    if events is not None:
        now = time.perf_counter()
        events.append(Event(what, op, axis, layer, now if start is None else start, now))


class span:
    """Record what a block does from its start to its end, if there is a record."""

    __slots__ = ("_events", "_names", "_start")

    def __init__(self, events: Events | None, what: str, op: str, axis: str, layer: str) -> None:
        self._events, self._names = events, (what, op, axis, layer)

    def __enter__(self) -> None:
        if self._events is not None:
            self._start = time.perf_counter()

    def __exit__(self, *error: Any) -> None:
        if self._events is not None:
            add(self._events, *self._names, self._start)


def computed(events: Events | None, op: str, layer: str, product: Callable[..., torch.Tensor], *operands: Any) -> Any:
    """What ``product`` makes of the operands, recorded as "compute" if there is a record."""
    if events is None:
        return product(*operands)
    with span(events, "compute", op, "", layer):
        return product(*operands)


class TracedWork:
    """A collective under way: its Work, and what to call it. ``wait`` may be called again."""

    __slots__ = ("_engine", "_names", "_work", "tensor")

    def __init__(self, engine: Engine, work: Work, tensor: torch.Tensor, op: str, axis: str, layer: str) -> None:
        self._engine, self.tensor, self._names = engine, tensor, (op, axis, layer)
        self._work: Work | None = work
        if engine.events is not None:
            add(engine.events, "issue", op, axis, layer)

    def done(self) -> bool:
        """Whether it has completed; its buffers are then let go. Never blocks."""
        if self._work is not None:
            if not self._work.is_completed():
                return False
            self._work.wait()
            self._work = None
        return True

    def wait(self) -> torch.Tensor:
        """Block until it has completed; its tensor."""
        if self._work is not None:
            events = self._engine.events
            if events is None or self._work.is_completed():
                self._work.wait()
            else:
                with span(events, "wait", *self._names):
                    self._work.wait()
            self._work = None
        return self.tensor
