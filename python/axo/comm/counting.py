"""What this process issues, for those who observe it: counts, the oracle for every claim about communication; traces.

    with axo.count_collectives() as counts:
        layer(x)
    assert counts == {("all_gather", "z"): (1, 512, 2048), ("all_reduce", "y"): (1, 1024, 4096)}

What is counted, per (operation, axis): calls; elements, which is what this rank puts in (all_gather and gather: its
shard; all_reduce, reduce_scatter, reduce, all_to_all: the whole input; broadcast, send, recv: the tensor; scatter: the
part it receives; barrier: 0); bytes = elements * bytes of one element. Communicators of one rank issue nothing and
never appear. Collectives of torch.distributed are not seen.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch


class Count(NamedTuple):
    calls: int = 0
    elements: int = 0
    bytes: int = 0

    def plus(self, calls: int, elements: int, size: int) -> Count:
        return Count(self.calls + calls, self.elements + elements, self.bytes + size)


class CollectiveCounts(dict[tuple[str, str], Count]):
    """``counts[op, axis]`` -> :class:`Count`; zero for what was not issued. Compares equal to a dict of such tuples."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def __missing__(self, key: tuple[str, str]) -> Count:
        return Count()

    def get(self, key: tuple[str, str], default: object = None) -> Count:  # type: ignore[override]
        """``self[key]``: every key has a count."""
        return self[key]

    def _add(self, op: str, axis: str, tensor: torch.Tensor) -> None:
        with self._lock:
            self[op, axis] = self[op, axis].plus(1, tensor.numel(), tensor.nbytes)

    def __repr__(self) -> str:
        rows = (f"{op} {axis}: {c.calls} x, {c.elements} elements, {c.bytes} B" for (op, axis), c in self.items())
        return f"CollectiveCounts({'; '.join(rows)})"

    def total(self, op: str | None = None, axis: str | None = None) -> Count:
        """The sum over all operations and axes, or over those that match."""
        total = Count()
        for (counted_op, counted_axis), count in self.items():
            if op in (None, counted_op) and axis in (None, counted_axis):
                total = total.plus(*count)
        return total


class ObservedWork(Protocol):
    """A pending collective, as an observer sees it: a ``Work``."""

    def is_completed(self) -> bool: ...
    def duration(self) -> float | None: ...


class Observed(NamedTuple):
    """One collective as it was seen: seconds of ``time.perf_counter``; ``work`` is None if the caller was blocked."""

    op: str
    axis: str
    bytes: int
    start: float
    end: float
    work: ObservedWork | None


class Awaited(NamedTuple):
    """A wait for ``work``, a pending collective: seconds of ``time.perf_counter``."""

    axis: str
    start: float
    end: float
    work: ObservedWork


class _Observers:
    """Who observes the collectives of this process: the open ``count_collectives`` blocks, and a trace.

    One object for the process, not a context variable: backward runs layers on autograd's own threads, and their
    collectives belong to the block that called backward.

    Attributes:
        active: Whether anybody does. Communicators look here first.
    """

    def __init__(self) -> None:
        self.active = False
        self._blocks: tuple[CollectiveCounts, ...] = ()
        self._trace: tuple[list[Observed], list[Awaited]] | None = None
        self._lock = threading.Lock()

    def _change(self, more: tuple[CollectiveCounts, ...], fewer: tuple[CollectiveCounts, ...]) -> None:
        with self._lock:
            gone = set(map(id, fewer))
            self._blocks = (*(block for block in self._blocks if id(block) not in gone), *more)
            self.active = bool(self._blocks) or self._trace is not None

    @contextmanager
    def counted(self, counts: CollectiveCounts) -> Iterator[CollectiveCounts]:
        """Add what is issued inside the block to ``counts``."""
        self._change((counts,), ())
        try:
            yield counts
        finally:
            self._change((), (counts,))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing inside: for collectives of a check, which are no part of what is counted."""
        blocks = self._blocks
        self._change((), blocks)
        try:
            yield
        finally:
            self._change(blocks, ())

    def open(self) -> None:
        """Begin a trace of each collective and each wait."""
        self._trace = [], []
        self._change((), ())

    def close(self) -> tuple[list[Observed], list[Awaited]]:
        """End it, and give what was issued and what was waited for."""
        trace, self._trace = self._trace or ([], []), None
        self._change((), ())
        return trace

    def issued(self, op: str, axis: str, tensor: torch.Tensor, start: float, work: ObservedWork | None) -> None:
        """A collective has been issued since ``start``; ``tensor``: what is counted of it."""
        for block in self._blocks:
            block._add(op, axis, tensor)
        if self._trace is not None:
            self._trace[0].append(Observed(op, axis, tensor.nbytes, start, time.perf_counter(), work))

    def waited(self, axis: str, start: float, work: ObservedWork) -> None:
        """This rank was blocked for ``work``, a pending one, since ``start``."""
        if self._trace is not None:
            self._trace[1].append(Awaited(axis, start, time.perf_counter(), work))


observers = _Observers()


def count_collectives() -> AbstractContextManager[CollectiveCounts]:
    """Count what is issued inside the block; gives a :class:`CollectiveCounts`."""
    return observers.counted(CollectiveCounts())
