"""Over which axes the tensors of one layer travel, and how many rows they have on this rank. No communication here.

    weight gather    this rank's rows -> its block            all-gather over z      [rows/Gz, c] -> [rows, c]
    weight gradient  of the block -> of this rank's rows      reduce-scatter over z, then all-reduce over data
    vector gradient  of a tensor that z replicates            all-reduce over z, then over data

That is axonn's arrangement. In general: the axis that splits the rows of a weight and the rows of activations too is
the one to gather over (``shard_axis``; none, where a product brings the parts); gradients are reduced over the axes
that split rows of activations and do not split the tensor. An expert that some of the data ranks hold
(``Placement.holders``) has these alone as z and data: "z/experts", "data/experts". An axis of size 1 does not appear.
Rows that do not divide over the shard axis travel in a buffer padded to ``G * ceil(rows / G)``; since bounds follow
``torch.chunk`` the padding is the tail of that buffer, and the block is a view of its head.

Rows that neighbours along x hold too (``Placement.copies``) get their gradients summed over those ranks last.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from axo.comm.communicator import Communicator
from axo.comm.connect import Communicators
from axo.comm.work import Work
from axo.placement import Placement, Range, chunk_size

GRAD_REDUCE = {"mean": "avg", "sum": "sum"}
Reduction = tuple[str, str]  # axis, op


class Copies(NamedTuple):
    """Rows that ``holders`` hold too, each of which has its own part of their gradient."""

    rows: list[Range]
    holders: Communicator

    def start(self, tensor: torch.Tensor, first: int, rows: int) -> list[Work]:
        """Begin to add the parts up, in place; ``tensor`` holds ``rows`` rows from row ``first`` on."""
        spans = [(max(a, first) - first, min(b, first + rows) - first) for a, b in self.rows]
        return [self.holders.all_reduce(tensor[a:b], "sum", async_op=True) for a, b in spans if a < b]


class Route:
    """The axes and sizes of one layer.

    Args:
        comms: The communicators of the grid.
        placement: Where the weight lies; its rows are sharded over the shard axis innermost.
        grad_reduce: ``"mean"`` averages gradients over the data ranks (Gz * Gdata), ``"sum"`` adds them.

    Attributes:
        name: What records and messages call the layer.
        together: Layers that are equal in this are gathered as one group.
        sizes: Ranks along each axis; 1 for None.
        shard_axis, shards: The axis that the weight is gathered over (None: it is not), and its ranks.
        block_rows, shard_rows, padded_rows: Of the weight: after the gather, on this rank, and as they travel.
        weight_reductions, vector_reductions: What the gradient of this rank's rows, or of a vector, is reduced over.
        fp8: As which scaling of ``axo_kernels.fused.fp8`` the weight is packed before it is gathered; None: it is not.
        weight_copies, vector_copies: The rows that neighbours hold too: of this rank's weight, or of its block.
        silent, alone: Whether the gradient of a vector, or of the weight, needs no communication.

    Raises:
        ValueError: ``grad_reduce`` is not known.
    """

    def __init__(self, comms: Communicators, placement: Placement, grad_reduce: str = "mean") -> None:
        if grad_reduce not in GRAD_REDUCE:
            raise ValueError(f"grad_reduce={grad_reduce!r} is not known; use 'mean' or 'sum'")
        self.comms = comms
        self.op = GRAD_REDUCE[grad_reduce]
        self.name = ""
        self.together = ""
        grid, coords, row_axes = comms.grid, comms.coords, comms.arrangement.rows
        self.sizes: dict[str | None, int] = {None: 1} | {**grid.sizes}
        self.sizes |= {name: line.size for name, line in comms.expert_lines.items()}
        self._holders = placement.holders
        split_by = next((axis for axis in placement.splits[0] if axis in row_axes), None)
        self.shard_axis = None if split_by is None else self._line(split_by)
        self.shards = self.sizes[self.shard_axis]
        whole = placement.without(split_by) if split_by else placement
        self.block_rows = whole.local_shape(grid, coords)[0]
        self.shard_rows = placement.local_shape(grid, coords)[0]
        self.padded_rows = self.shards * chunk_size(self.block_rows, self.shards)
        self.fp8: str | None = None
        self.weight_reductions = self._reductions(row_axes, placement.split_axes)
        self.vector_reductions = self._reductions(row_axes)
        self.weight_copies: Copies | None = None
        self.vector_copies: Copies | None = None
        shared = whole.copied_rows(grid, coords)
        if shared:  # the same on all ranks of the outer axis, so all of them come here
            holders = comms.neighbours(placement.splits[0][0], max(placement.copies or (1,)))
            mine = placement.copied_rows(grid, coords)
            self.weight_copies = Copies(mine, holders) if mine else None
            self.vector_copies = Copies(shared, holders)
        self.silent = not self.vector_reductions and self.vector_copies is None
        self.alone = self.shards == 1 and not self.weight_reductions and self.weight_copies is None

    def _reductions(self, axes: tuple[str, ...], but: frozenset[str] = frozenset()) -> tuple[Reduction, ...]:
        lines = [self._line(axis) for axis in reversed(axes) if axis not in but]
        return tuple([(line, self.op) for line in lines if self.sizes[line] > 1])

    def _line(self, axis: str) -> str:
        """The ranks along ``axis`` that hold the weight: an expert's are those of the same place alone."""
        return axis if self._holders is None or self._holders.run(axis) == 1 else f"{axis}/experts"

    def reductions_of(self, sum_over: tuple[str, ...]) -> tuple[Reduction, ...]:
        """What the gradient of a vector is reduced over whose partial sums lie on the ranks of ``sum_over`` too."""
        return tuple((axis, "sum") for axis in sum_over if self.sizes[axis] > 1) + self.vector_reductions
