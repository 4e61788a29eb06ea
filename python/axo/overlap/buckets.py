"""Gradients on their way over the axes that replicate them: in buckets, started while backward still runs.

A gradient that is reduced over data gets a slot in the open bucket of its kind (dtype and axes) in the order in which
layers ask: the same on all ranks. Others have a bucket each. A full bucket closes and is then all-reduced in place, one
axis after the other. Where its parts are still on their way (reduce-scattered over z into their slots), that waits
until the next bucket of the kind closes, or for the end of backward: what is issued when depends on sizes and order
alone, never on time.

With ZeRO-2 the last reduction is a reduce-scatter, so that each rank gets its rows of each gradient: a closed bucket of
gradients ``[r_i, c_i]`` is packed as ``[Gdata, sum of ceil(r_i / Gdata) c_i]``, for each rank its rows of every
gradient, the shorter padded with zeros.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from axo.comm.work import Work
from axo.overlap.events import TracedWork
from axo.overlap.pool import Pool
from axo.overlap.route import Copies, Reduction
from axo.placement import chunk_bounds, chunk_size

if TYPE_CHECKING:
    from axo.overlap.engine import Engine

BucketKind = tuple[torch.dtype, torch.device, tuple[Reduction, ...]]


class Slot:
    """Where one gradient of ``parameter`` lies: ``tensor``, padded rows included; ``rows`` of them are real.

    ``first`` is the row of the parameter that its first row belongs to.
    """

    __slots__ = ("arriving", "bucket", "copies", "first", "parameter", "rows", "tensor")

    def __init__(self, parameter: torch.Tensor, tensor: torch.Tensor, rows: int, bucket: Bucket) -> None:
        self.parameter, self.tensor, self.rows, self.bucket = parameter, tensor, rows, bucket
        self.first = 0
        self.arriving: TracedWork | None = None
        self.copies: Copies | None = None

    def leaves(self) -> bool:
        """Whether the gradient is complete when it has arrived, so that it may leave for another place then."""
        return not self.bucket.reductions and self.copies is None and self.bucket.exact

    def leave(self, tensor: torch.Tensor) -> None:
        """The gradient will be in ``tensor``; its place in the bucket is given up."""
        self.arriving, self.tensor, self.bucket.buffer = None, tensor, tensor

    def gradient(self) -> torch.Tensor:
        """The finished gradient, padding dropped: a view of the bucket unless that has room to spare."""
        shape = (self.rows, *self.parameter.shape[1:])
        found = self.tensor if self.tensor.shape == shape else self.tensor[: self.rows].view(shape)
        return found if self.bucket.exact else found.clone()


class Bucket:
    """Gradients of one kind in one buffer."""

    def __init__(self, kind: BucketKind, capacity: int, pool: Pool) -> None:
        dtype, device, reductions = kind
        self.kind, self.reductions, self.capacity = kind, list(reductions), capacity
        self.buffer = pool.allocate((capacity,), dtype, device)
        self.used = 0
        self.slots: list[Slot] = []
        self.under_way: TracedWork | None = None

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

    def advance(self, engine: Engine) -> bool:
        """Wait for the reduction under way and issue the next; False when none is left."""
        if self.under_way is not None:
            self.under_way.wait()
            self.under_way = None
        if not self.reductions or not self.used:
            return False
        axis, op = self.reductions.pop(0)
        work, part, name = self.start(engine, axis, op)
        self.under_way = TracedWork(engine, work, part, name, axis, f"{len(self.slots)} gradients")
        return True

    def start(self, engine: Engine, axis: str, op: str) -> tuple[Work, torch.Tensor, str]:
        """Issue one reduction: its work, what it completes, and its name."""
        part = self.buffer[: self.used]
        return engine.comms.axis(axis).all_reduce(part, op, async_op=True), part, "all_reduce"


class ScatteredBucket(Bucket):
    """A bucket whose reduction over data is a reduce-scatter."""

    _scattered = False

    @property
    def exact(self) -> bool:
        return self._scattered or super().exact

    def start(self, engine: Engine, axis: str, op: str) -> tuple[Work, torch.Tensor, str]:
        if axis != "data":
            return super().start(engine, axis, op)
        ranks, mine = engine.comms.grid.data, engine.comms.coords.data
        sizes = [chunk_size(slot.rows, ranks) * math.prod(slot.tensor.shape[1:]) for slot in self.slots]
        like, total = self.buffer, sum(sizes)
        parts = engine.pool.allocate((ranks, total), like.dtype, like.device)
        result = engine.pool.allocate((total,), like.dtype, like.device)
        for slot, part, piece in zip(self.slots, parts.split(sizes, 1), result.split(sizes), strict=True):
            _pack(slot.tensor[: slot.rows], part)
            low, high = chunk_bounds(slot.rows, ranks, mine)
            shape = (chunk_size(slot.rows, ranks), *slot.tensor.shape[1:])
            slot.tensor, slot.first, slot.rows = piece.view(shape), low, high - low
        self.buffer = result  # lets go of the whole gradients
        self._scattered = True
        work = engine.comms.data.reduce_scatter(parts.view(-1), result, op=op, async_op=True)
        return work, result, "reduce_scatter"


def _pack(gradient: torch.Tensor, part: torch.Tensor) -> None:
    """(r, ...) -> (ranks, ceil(r / ranks) * row), each line one rank's rows."""
    ranks, rows = part.shape[0], gradient.shape[0]
    if rows % ranks == 0:
        part.copy_(gradient.reshape(ranks, -1))
        return
    for index in range(ranks):
        low, high = chunk_bounds(rows, ranks, index)
        flat = gradient[low:high].reshape(-1)
        part[index, : flat.numel()].copy_(flat)
        part[index, flat.numel() :].zero_()


class Buckets:
    """The gradients of one backward pass, once they are complete over z (or as they come, where z replicates).

    Args:
        engine: Communicators, pool and record.
        bucket_bytes: Size at which a bucket closes; 0: each gradient by itself.
        scatter: Every rank gets its rows of each gradient (ZeRO-2); else all of them.
    """

    def __init__(self, engine: Engine, bucket_bytes: int, *, scatter: bool = False) -> None:
        self._engine, self._bytes = engine, bucket_bytes
        self._bucket = ScatteredBucket if scatter else Bucket
        self._open: dict[BucketKind, Bucket] = {}
        self._closed: list[Bucket] = []
        self._slots: list[Slot] = []
        self._sizes: dict[BucketKind, list[int]] = {}  # of each kind: elements of its buckets in the last backward

    def slot(
        self,
        parameter: torch.Tensor,
        shape: tuple[int, ...],
        rows: int,
        like: torch.Tensor,
        reductions: tuple[Reduction, ...],
    ) -> Slot:
        """Room for a gradient that is then reduced by ``reductions``."""
        kind = (like.dtype, like.device, reductions)
        size = math.prod(shape)
        bucket = self._open.get(kind)
        if bucket is not None and bucket.used + size > bucket.capacity:
            self._close(kind)
            bucket = None
        if bucket is None:
            bucket = self._open[kind] = self._bucket(kind, self._capacity(kind, size), self._engine.pool)
        room = bucket.buffer if size == bucket.capacity else bucket.buffer[bucket.used : bucket.used + size]
        tensor = room.view(shape)
        slot = Slot(parameter, tensor, rows, bucket)
        bucket.used += size
        bucket.slots.append(slot)
        self._slots.append(slot)
        return slot

    def ready(self, slot: Slot, arriving: TracedWork | None = None) -> None:
        """The slot is filled, or will be when ``arriving`` is complete."""
        slot.arriving = arriving
        if slot.bucket.used == slot.bucket.capacity:
            self._close(slot.bucket.kind)

    def _capacity(self, kind: BucketKind, size: int) -> int:
        """Elements of the next bucket: what it took last time, else the size of the option."""
        dtype, _, reductions = kind
        if "data" not in dict(reductions):
            return size
        sizes = self._sizes.get(kind, [])
        number = sum(bucket.kind == kind for bucket in self._closed)
        return max(size, sizes[number] if number < len(sizes) else self._bytes // dtype.itemsize)

    def _close(self, kind: BucketKind) -> None:
        bucket = self._open.pop(kind)
        if not bucket.reductions:
            return
        for other in self._closed:
            if other.under_way is None and other.reductions and other.kind == kind:
                other.wait_for_parts()
                other.advance(self._engine)
        self._closed.append(bucket)
        if bucket.arrived():
            bucket.advance(self._engine)

    def drain(self) -> None:
        """Issue what is closed: whoever calls is about to use the same communicators."""
        for bucket in self._closed:
            if bucket.under_way is None and bucket.reductions:
                bucket.wait_for_parts()
                bucket.advance(self._engine)

    def close(self) -> None:
        """No gradient comes any more: issue every bucket whose parts are there."""
        for kind in list(self._open):
            self._close(kind)

    def finish(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Complete everything, after ``close``; (parameter, gradient) in the order of the slots."""
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
        """Forget everything: at the end, or after an exception in backward."""
        for bucket in (*self._open.values(), *self._closed, *(slot.bucket for slot in self._slots)):
            bucket.slots = []  # they refer to each other: buffers would stay until the garbage collector comes
        self._open, self._closed, self._slots = {}, [], []
