"""The communication of one parallel layer, in one place: what goes over which axis, and in what order.

    gather_weight   this rank's rows -> its block     all-gather over z      [rows/Gz, c] -> [rows, c]
    reduce          partial sums     -> sums          all-reduce over x or y, in place
    weight_gradient gradient of the block -> of this rank's rows    reduce-scatter over z, then all-reduce over data
    gradient        gradient of a tensor replicated over z          all-reduce over z, then over data

An axis of size 1 issues nothing. Rows that do not divide over z travel in a buffer padded to ``Gz * ceil(rows / Gz)``;
since bounds follow ``torch.chunk`` the padding is the tail of that buffer, and the block is a view of its head.

Rows that neighbours along x hold too (``Placement.copies``) get their gradients summed over those ranks last.

Layers call nothing else, so whoever wants to move a gather forward or a reduction back changes this file only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from axo.placement import Placement, Range, chunk_size

GRAD_REDUCE = {"mean": "avg", "sum": "sum"}
Step = Callable[[torch.Tensor], Any]


class Pending:
    """A tensor on its way through collectives, each started when the one before it is complete.

    Dropping it is safe at any time: the operation under way keeps its tensors, and nothing else knows of it.
    """

    def __init__(self, tensor: torch.Tensor, *steps: Step) -> None:
        self._tensor = tensor
        self._steps = list(steps)
        self._work: Any = None
        self._start_next()

    def _start_next(self) -> None:
        self._work = self._steps.pop(0)(self._tensor) if self._steps else None

    def advance(self) -> bool:
        """Wait for the collective under way and start the next; False when none is left."""
        if self._work is None:
            return False
        self._tensor = self._work.wait()
        self._start_next()
        return self._work is not None

    def wait(self) -> torch.Tensor:
        """Finish all collectives and return the tensor."""
        while self.advance():
            pass
        return self._tensor


def wait_all(*pending: Pending) -> None:
    """Finish several, turn by turn, so that the second collective of one runs beside the first of another."""
    running = list(pending)
    while running:
        running = [each for each in running if each.advance()]


class _Spans:
    """All-reduces of some rows of a tensor, in place; waiting for it gives the whole tensor."""

    def __init__(self, tensor: torch.Tensor, spans: list[Range], communicator: Any) -> None:
        self._tensor = tensor
        self._works = [communicator.all_reduce(tensor[a:b], "sum", async_op=True) for a, b in spans]

    def wait(self) -> torch.Tensor:
        for work in self._works:
            work.wait()
        return self._tensor


class Exchange:
    """Runs the collectives of a layer on its communicators.

    Args:
        comms: The communicators of the grid.
        placement: Where the weight lies; its rows are sharded over z innermost.
        grad_reduce: ``"mean"`` averages gradients over the Gz * Gdata data ranks, ``"sum"`` adds them.
    """

    def __init__(self, comms: Any, placement: Placement, grad_reduce: str = "mean") -> None:
        if grad_reduce not in GRAD_REDUCE:
            raise ValueError(f"grad_reduce={grad_reduce!r} is not known; use 'mean' or 'sum'")
        self.comms = comms
        self.op = GRAD_REDUCE[grad_reduce]
        self.block_rows = placement.without("z").local_shape(comms.grid, comms.coords)[0]
        self.shard_rows = placement.local_shape(comms.grid, comms.coords)[0]
        self._copied_rows = placement.copied_rows(comms.grid, comms.coords)
        self._copied_block_rows = placement.without("z").copied_rows(comms.grid, comms.coords)
        if self._copied_block_rows:  # the same on all ranks of the outer axis, so all of them come here
            self._holders = comms.neighbours(placement.splits[0][0], max(placement.copies or (1,)))
        self.padded_rows = comms.grid.z * chunk_size(self.block_rows, comms.grid.z)

    def size(self, axis: str | None) -> int:
        """Ranks along ``axis``; 1 for no axis."""
        return 1 if axis is None else self.comms.grid.size(axis)

    def gather_weight(self, shard: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """This rank's rows -> its block, in ``dtype``: (rows/Gz, c) -> (rows, c). The shard itself where Gz is 1."""
        shard = shard.detach().to(dtype)
        if self.size("z") == 1:
            return shard
        missing = self.padded_rows // self.size("z") - shard.shape[0]
        if missing:
            shard = F.pad(shard, (0, 0, 0, missing))
        return self.comms.axis("z").all_gather(shard.contiguous())[: self.block_rows]

    def reduce(self, tensor: torch.Tensor, axis: str | None, op: str = "sum") -> torch.Tensor:
        """All-reduce ``tensor`` over ``axis``, in place where it is contiguous."""
        return tensor if self.size(axis) == 1 else self.comms.axis(axis).all_reduce(tensor.contiguous(), op)

    def start_reduce(self, tensor: torch.Tensor, axis: str | None) -> Pending:
        """Begin to add up partial sums over ``axis``, in place where they are contiguous."""
        return Pending(tensor.contiguous(), *self._reductions([axis], "sum"))

    def start_gradient(self, grad: torch.Tensor, sum_over: tuple[str, ...] = ()) -> Pending:
        """Begin to reduce the gradient of a tensor that z and data replicate.

        ``sum_over`` names axes whose ranks hold partial sums, whatever ``grad_reduce`` says.
        """
        steps = self._reductions(list(sum_over), "sum") + self._reductions(["z", "data"], self.op)
        return Pending(grad.contiguous(), *steps, *self._sum_copies(self._copied_block_rows))

    def weight_gradient_buffer(self, columns: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for the gradient of the block: the padded buffer, and the block as a view of it."""
        buffer = like.new_empty((self.padded_rows, columns))
        buffer[self.block_rows :].zero_()
        return buffer, buffer[: self.block_rows]

    def start_weight_gradient(self, buffer: torch.Tensor) -> Pending:
        """Begin to reduce the buffer of ``weight_gradient_buffer`` to this rank's rows of it, still padded."""
        steps: list[Step] = []
        if self.size("z") > 1:
            steps.append(lambda tensor: self.comms.axis("z").reduce_scatter(tensor, op=self.op, async_op=True))
        return Pending(buffer, *steps, *self._reductions(["data"], self.op), *self._sum_copies(self._copied_rows))

    def finish_weight_gradient(self, pending: Pending, dtype: torch.dtype) -> torch.Tensor:
        """The finished gradient of this rank's rows, padding dropped, in ``dtype``."""
        return pending.wait()[: self.shard_rows].to(dtype)

    def _sum_copies(self, spans: list[Range]) -> list[Step]:
        """Add up rows that several ranks hold, each of which has its own part of the gradient."""
        return [lambda tensor: _Spans(tensor, spans, self._holders)] if spans else []

    def _reductions(self, axes: list[str | None], op: str) -> list[Step]:
        def over(axis: str | None) -> Step:
            return lambda value: self.comms.axis(axis).all_reduce(value, op, async_op=True)

        return [over(axis) for axis in axes if self.size(axis) > 1]
