"""Gradients on their way over the axes that replicate them: in buckets, started while backward still runs.

A gradient that is reduced over data gets a slot in the open bucket of its kind (dtype and axes) in the order in which
layers ask: the same on all ranks. Others have a bucket each. A full bucket closes and is then all-reduced in place, one
axis after the other. Where its parts are still on their way (reduce-scattered over z into their slots), that waits
until the next bucket of the kind closes, or for the end of backward: what is issued when depends on sizes and order
alone, never on time.

``DataAxis`` is what the engine wants of it, so that something else can take the shards reduced over z from here on
(ZeRO-2, ``axo.overlap.scatter``: a reduce-scatter over data, and a gradient for this rank's rows only).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch

from axo.overlap.events import Pending

Stage = tuple[str, str]  # axis, op


class Copies(NamedTuple):
    """Rows that ``holders`` hold too, each of which has its own part of their gradient."""

    rows: list[tuple[int, int]]
    holders: Any

    def start(self, tensor: torch.Tensor, first: int, rows: int) -> list[Any]:
        """Begin to add the parts up, in place; ``tensor`` holds ``rows`` rows from row ``first`` on."""
        spans = [(max(a, first) - first, min(b, first + rows) - first) for a, b in self.rows]
        return [self.holders.all_reduce(tensor[a:b], "sum", async_op=True) for a, b in spans if a < b]


class Slot:
    """Where one gradient of ``parameter`` lies: ``tensor``, padded rows included; ``rows`` of them are real.

    ``first`` is the row of the parameter that its first row belongs to.
    """

    __slots__ = ("arriving", "bucket", "copies", "first", "parameter", "rows", "tensor")

    def __init__(self, parameter: torch.Tensor, tensor: torch.Tensor, rows: int, bucket: Any) -> None:
        self.parameter, self.tensor, self.rows, self.bucket = parameter, tensor, rows, bucket
        self.first = 0
        self.arriving: Pending | None = None
        self.copies: Copies | None = None

    def gradient(self) -> torch.Tensor:
        """The finished gradient, padding dropped: a view of the bucket unless that has room to spare."""
        found = self.tensor[: self.rows].view(self.rows, *self.parameter.shape[1:])
        return found if self.bucket.exact else found.clone()


class DataAxis(Protocol):
    """What takes gradients from where they are complete over z (or local, for what z replicates)."""

    def slot(self, parameter: torch.Tensor, shape: tuple[int, ...], rows: int, like: torch.Tensor, stages: Any) -> Slot:
        """Room for a gradient that is then reduced over ``stages``."""

    def ready(self, slot: Slot, arriving: Pending | None = None) -> None:
        """The slot is filled, or will be when ``arriving`` is complete."""

    def drain(self) -> None:
        """Issue what is closed: whoever calls is about to use the same communicators."""

    def finish(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Complete everything; (parameter, gradient) in the order of the slots."""

    def drop(self) -> None:
        """Forget everything (an exception in backward)."""


class Bucket:
    """Gradients of one kind in one buffer."""

    def __init__(self, kind: Any, stages: tuple[Stage, ...], capacity: int, like: torch.Tensor, pool: Any) -> None:
        self.kind, self.stages, self.capacity = kind, list(stages), capacity
        self.buffer = pool.take((capacity,), like.dtype, like.device)
        self.used = 0
        self.slots: list[Slot] = []
        self.under_way: Pending | None = None

    @property
    def exact(self) -> bool:
        """Whether the buffer has no room to spare, so that gradients may stay in it."""
        return self.used == self.capacity

    def arrived(self) -> bool:
        return all(slot.arriving is None for slot in self.slots)

    def wait_for_parts(self) -> None:
        for slot in self.slots:
            if slot.arriving is not None:
                slot.arriving.wait()
                slot.arriving = None

    def advance(self, engine: Any) -> bool:
        """Wait for the reduction under way and issue the next; False when none is left."""
        if self.under_way is not None:
            self.under_way.wait()
            self.under_way = None
        if not self.stages or not self.used:
            return False
        axis, op = self.stages.pop(0)
        work, part, name = self.start(engine, axis, op)
        self.under_way = Pending(engine, work, part, name, axis, f"{len(self.slots)} gradients")
        return True

    def start(self, engine: Any, axis: str, op: str) -> tuple[Any, torch.Tensor, str]:
        """Issue one reduction: its work, what it completes, and its name."""
        part = self.buffer[: self.used]
        return engine.comms.axis(axis).all_reduce(part, op, async_op=True), part, "all_reduce"


class AllReduceBuckets:
    """The plain data axis: every rank gets the whole gradient of its shard.

    Args:
        engine: Communicators, pool and record.
        bucket_bytes: Size at which a bucket closes; 0: each gradient by itself.
    """

    def __init__(self, engine: Any, bucket_bytes: int) -> None:
        self._engine, self._bytes = engine, bucket_bytes
        self._open: dict[Any, Bucket] = {}
        self._closed: list[Bucket] = []
        self._slots: list[Slot] = []
        self._sizes: dict[Any, list[int]] = {}  # of each kind: elements of its buckets in the last backward

    def slot(
        self, parameter: torch.Tensor, shape: tuple[int, ...], rows: int, like: torch.Tensor, stages: tuple[Stage, ...]
    ) -> Slot:
        kind = (like.dtype, like.device, stages)
        size = math.prod(shape)
        bucket = self._open.get(kind)
        if bucket is not None and bucket.used + size > bucket.capacity:
            self._close(kind)
            bucket = None
        if bucket is None:
            bucket = self._open[kind] = self.bucket(kind, stages, self._capacity(kind, size), like)
        tensor = bucket.buffer[bucket.used : bucket.used + size].view(shape)
        slot = Slot(parameter, tensor, rows, bucket)
        bucket.used += size
        bucket.slots.append(slot)
        self._slots.append(slot)
        return slot

    def bucket(self, kind: Any, stages: tuple[Stage, ...], capacity: int, like: torch.Tensor) -> Bucket:
        """An empty bucket."""
        return Bucket(kind, stages, capacity, like, self._engine.pool)

    def ready(self, slot: Slot, arriving: Pending | None = None) -> None:
        slot.arriving = arriving
        if slot.bucket.used == slot.bucket.capacity:
            self._close(slot.bucket.kind)

    def _capacity(self, kind: Any, size: int) -> int:
        """Elements of the next bucket: what it took last time, else the size of the option."""
        dtype, _, stages = kind
        if not any(axis == "data" for axis, _ in stages):
            return size
        sizes = self._sizes.get(kind, [])
        number = sum(bucket.kind == kind for bucket in self._closed)
        return max(size, sizes[number] if number < len(sizes) else self._bytes // dtype.itemsize)

    def _close(self, kind: Any) -> None:
        bucket = self._open.pop(kind)
        if not bucket.stages:
            return
        for other in self._closed:
            if other.kind == kind and other.under_way is None and other.stages:
                other.wait_for_parts()
                other.advance(self._engine)
        self._closed.append(bucket)
        if bucket.arrived():
            bucket.advance(self._engine)

    def drain(self) -> None:
        for bucket in self._closed:
            if bucket.under_way is None and bucket.stages:
                bucket.wait_for_parts()
                bucket.advance(self._engine)

    def finish(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for kind in list(self._open):
            self._close(kind)
        running = list(self._closed)
        for bucket in running:
            if bucket.under_way is None:
                bucket.wait_for_parts()
                bucket.advance(self._engine)
        while running:
            running = [bucket for bucket in running if bucket.advance(self._engine)]
        slots = self._slots
        self._sizes = {}
        for bucket in self._closed:
            self._sizes.setdefault(bucket.kind, []).append(bucket.used)
        self.drop()
        for slot in slots:
            if slot.arriving is not None:
                slot.arriving.wait()
        works = [
            work
            for slot in slots
            if slot.copies is not None
            for work in slot.copies.start(slot.tensor, slot.first, slot.rows)
        ]
        for work in works:
            work.wait()
        for slot in slots:
            yield slot.parameter, slot.gradient()

    def drop(self) -> None:
        self._open, self._closed, self._slots = {}, [], []
