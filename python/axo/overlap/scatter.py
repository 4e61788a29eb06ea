"""ZeRO-2's data axis: buckets that are reduce-scattered over data, so that each rank gets its rows of each gradient.

A closed bucket of gradients ``[r_i, c_i]`` is packed as ``[Gdata, sum of ceil(r_i / Gdata) c_i]``: for each rank its
rows of every gradient, the shorter padded with zeros. What was all-reduced before (over z, for what z replicates) and
when things are issued is as in ``axo.overlap.buckets``.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from axo.overlap.buckets import AllReduceBuckets, Bucket, Slot
from axo.placement import chunk_bounds, chunk_size


class ScatterBuckets(AllReduceBuckets):
    """The data axis that gives every rank its rows of the gradient of its shard. Arguments as for the plain one."""

    def bucket(self, kind: Any, stages: Any, capacity: int, like: torch.Tensor) -> Bucket:
        return _Scattered(kind, stages, capacity, like, self._engine.pool)


class _Scattered(Bucket):
    """A bucket whose last stage is a reduce-scatter."""

    _scattered = False

    @property
    def exact(self) -> bool:
        return self._scattered or super().exact

    def start(self, engine: Any, axis: str, op: str) -> tuple[Any, torch.Tensor, str]:
        if axis != "data":
            return super().start(engine, axis, op)
        ranks, mine = engine.comms.grid.data, engine.comms.coords.data
        sizes = [chunk_size(slot.rows, ranks) * _row(slot) for slot in self.slots]
        like, total = self.buffer, sum(sizes)
        parts = engine.pool.take((ranks, total), like.dtype, like.device)
        result = engine.pool.take((total,), like.dtype, like.device)
        for slot, part, piece in zip(self.slots, parts.split(sizes, 1), result.split(sizes), strict=True):
            _pack(slot.tensor[: slot.rows], part)
            low, high = chunk_bounds(slot.rows, ranks, mine)
            shape = (chunk_size(slot.rows, ranks), *slot.tensor.shape[1:])
            slot.tensor, slot.first, slot.rows = piece.view(shape), low, high - low
        self.buffer = result  # lets go of the whole gradients
        self._scattered = True
        work = engine.comms.data.reduce_scatter(parts.view(-1), result, op=op, async_op=True)
        return work, result, "reduce_scatter"


def _row(slot: Slot) -> int:
    return math.prod(slot.tensor.shape[1:])


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
