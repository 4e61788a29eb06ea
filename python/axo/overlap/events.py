"""A collective on its way, and a record of what an engine issues, waits for and computes: for tests, traces, planning.

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
from typing import Any, NamedTuple

import torch

from axo.comm.communicator import Communicator
from axo.comm.connect import Communicators
from axo.comm.work import Work
from axo.grid import AXES
from axo.offload.parameters import home_of
from axo.offload.shards import Shards
from axo.overlap.options import Overlap
from axo.overlap.pool import Pool


class Event(NamedTuple):
    """One event of one rank; see the module."""

    what: str
    op: str
    axis: str
    layer: str
    start: float
    end: float


Events = list[Event]


class span:
    """Record what a block does from its start to its end, if there is a record."""

    __slots__ = ("_events", "_names", "_start")

    def __init__(self, events: Events | None, what: str, op: str, axis: str, layer: str) -> None:
        self._events, self._names = events, (what, op, axis, layer)

    def __enter__(self) -> None:
        self._start = time.perf_counter() if self._events is not None else 0.0

    def __exit__(self, *error: Any) -> None:
        if self._events is not None:
            self._events.append(Event(*self._names, self._start, time.perf_counter()))


class Context:
    """What the parts of one engine share.

    Attributes:
        comms, device: The communicators of the grid, and where they work.
        communicators: Those of the axes, by name, and of an expert's holders along them.
        overlap: The options.
        reduce_dtype: In which gradients are reduced; None: as they come.
        pool: Buffers.
        events: The record under way, if any.
        defers: Gradients stay on this rank, unreduced, and gathered weights are kept for the next micro-batch.
        holding: That is since a pipeline's step is under way.
    """

    def __init__(self, comms: Communicators, overlap: Overlap, reduce_dtype: torch.dtype | None) -> None:
        self.comms, self.device, self.overlap, self.reduce_dtype = comms, comms.device, overlap, reduce_dtype
        lines = {axis: comms.axis(axis) for axis in AXES} | comms.expert_lines
        self.communicators: dict[str | None, Communicator] = dict(lines.items())
        self.pool = Pool()
        self.events: Events | None = None
        self.defers = self.holding = False
        self._shards: Shards | None = None

    def start(
        self, call: Callable[..., Any], tensor: torch.Tensor, op: str, axis: str, layer: str, *, pending: bool
    ) -> TracedWork:
        """Issue a collective that completes ``tensor``; it is under way if ``pending``, else complete.

        Args:
            call: Issues it; takes ``async_op``.
        """
        axis = axis.partition("/")[0]  # an expert's holders along it are counted as the axis
        if pending:
            return TracedWork(self, call(async_op=True), tensor, op, axis, layer)
        with span(self.events, "wait", op, axis, layer):
            call(async_op=False)
        return TracedWork(self, None, tensor, op, axis, layer)

    def shards_of(self, weight: torch.Tensor) -> Shards | None:
        """The ways between host and device of a weight that was offloaded to the host; None: it was not."""
        if weight.device.type == self.device.type or home_of(weight if weight._base is None else weight._base) is None:
            return None
        if self._shards is None:
            self._shards = Shards(self.device)
        return self._shards

    def settle(self) -> None:
        """The weights are about to change: let no copy of one be under way."""
        if self._shards is not None:
            self._shards.settle()


class TracedWork:
    """A collective under way: its Work, and what to call it; None: it is complete. ``wait`` may be called again."""

    __slots__ = ("_context", "_names", "_work", "tensor")

    def __init__(
        self, context: Context, work: Work | None, tensor: torch.Tensor, op: str, axis: str, layer: str
    ) -> None:
        self._context, self.tensor, self._names, self._work = context, tensor, (op, axis, layer), work
        if context.events is not None and work is not None:
            now = time.perf_counter()
            context.events.append(Event("issue", op, axis, layer, now, now))

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
            events = self._context.events
            if events is None or self._work.is_completed():
                self._work.wait()
            else:
                with span(events, "wait", *self._names):
                    self._work.wait()
            self._work = None
        return self.tensor
