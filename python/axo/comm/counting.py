"""Counts the collectives that this process issues: the oracle for every claim about communication.

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
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from axo.comm.work import Work


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

    def _add(self, op: str, axis: str, elements: int, item_size: int) -> None:
        with self._lock:
            self[op, axis] = self[op, axis].plus(1, elements, elements * item_size)

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


class _Active:
    """The open ``count_collectives`` blocks of this process.

    One object for the process, not a context variable: backward runs layers on autograd's own threads, and their
    collectives belong to the block that called backward.
    """

    def __init__(self) -> None:
        self.blocks: tuple[CollectiveCounts, ...] = ()
        self._lock = threading.Lock()

    def open(self, counts: CollectiveCounts) -> None:
        with self._lock:
            self.blocks += (counts,)

    def close(self, counts: CollectiveCounts) -> None:
        with self._lock:
            self.blocks = tuple(block for block in self.blocks if block is not counts)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing inside: for collectives of a check, which are no part of what is counted."""
        with self._lock:
            blocks, self.blocks = self.blocks, ()
        try:
            yield
        finally:
            with self._lock:
                self.blocks += blocks

    def record(self, op: str, axis: str, elements: int, item_size: int) -> None:
        for block in self.blocks:
            block._add(op, axis, elements, item_size)


active = _Active()


class Observed(NamedTuple):
    """One collective as it was seen: seconds of ``time.perf_counter``; ``work`` is None if the caller was blocked."""

    op: str
    axis: str
    bytes: int
    start: float
    end: float
    work: Work | None


class Awaited(NamedTuple):
    """A wait for ``work``, a pending collective: seconds of ``time.perf_counter``."""

    axis: str
    start: float
    end: float
    work: Work


class _Watch:
    """Who watches the collectives of this process as they are issued and waited for (a trace does)."""

    def __init__(self) -> None:
        self.issued: list[Observed] | None = None
        self.waits: list[Awaited] = []
        self._next: tuple[str, int] = ("", 0)

    def open(self) -> None:
        """Begin to watch."""
        self.issued, self.waits = [], []

    def close(self) -> tuple[list[Observed], list[Awaited]]:
        """End, and give what was issued and what was waited for."""
        issued, self.issued = self.issued or [], None
        return issued, self.waits

    def about_to(self, op: str, size: int) -> None:
        """The next collective that is issued is this one."""
        self._next = (op, size)

    def add(self, axis: str, start: float, work: Work | None) -> None:
        """It has been issued."""
        if self.issued is not None:
            op, size = self._next
            self.issued.append(Observed(op, axis, size, start, time.perf_counter(), work))

    def waited(self, axis: str, start: float, work: Work) -> None:
        """This rank was blocked for ``work``, a pending one, since ``start``."""
        if self.issued is not None:
            self.waits.append(Awaited(axis, start, time.perf_counter(), work))


watch = _Watch()


@contextmanager
def count_collectives() -> Iterator[CollectiveCounts]:
    """Count what is issued inside the block; gives a :class:`CollectiveCounts`."""
    counts = CollectiveCounts()
    active.open(counts)
    try:
        yield counts
    finally:
        active.close(counts)
