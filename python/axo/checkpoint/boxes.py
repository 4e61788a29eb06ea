"""Which rank has which part of a tensor, and what of it goes where: plain arithmetic, apart from files.

A box is a range of indices in each dim of the whole tensor. A plain shard is one box; a fused weight whose row blocks
are split one by one (q, k and v) is one box for each block, so that boxes lie in the serial layout and never in a
rank's own concatenation: with three dims where the blocks are experts (``Placement.stack``), whose rows a rank holds in
two. A part without elements has no box.

    boxes_of(...)   the boxes of a rank, this or another, on this grid or another
    assign(...)     a save: each box that several ranks hold is written by one of them, bytes balanced
    overlaps(...)   a load: what each stored box gives to each box that is wanted

Boxes come from wherever they are announced: from a folder's metadata, or from the ranks of another grid.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch

from axo.grid import Coords, Grid
from axo.placement import Placement, local_ranges
from axo.sharding import unshard

Lengths = tuple[int, ...]


class Box(NamedTuple):
    """``size`` elements in each dim, from ``offset`` on."""

    offset: Lengths
    size: Lengths

    def within(self, outer: Box, tensor: torch.Tensor) -> torch.Tensor:
        """These elements, as a view of ``tensor``, which holds those of ``outer``."""
        starts = (start - first for start, first in zip(self.offset, outer.offset, strict=True))
        return tensor[tuple(slice(start, start + size) for start, size in zip(starts, self.size, strict=True))]


def overlaps(wanted: Iterable[Box], stored: Sequence[Box]) -> Iterator[tuple[Box, Box, Box]]:
    """(wanted box, stored box, what they share) for each pair that shares elements."""
    for box in wanted:
        ends = [offset + size for offset, size in zip(*box, strict=True)]
        for source in stored:
            offset = tuple(map(max, box.offset, source.offset))
            stops = (min(end, start + size) for end, start, size in zip(ends, *source, strict=True))
            size = tuple(stop - start for stop, start in zip(stops, offset, strict=True))
            if all(length > 0 for length in size):
                yield box, source, Box(offset, size)


def assign(of_ranks: Sequence[dict[Any, int]]) -> dict[Any, int]:
    """Which rank writes what: of those that hold it, the one with the fewest bytes so far.

    Args:
        of_ranks: For each rank, what it holds -> bytes. Nothing (0 bytes) falls to the first that holds it.
    """
    holders: dict[Any, list[int]] = {}
    for rank, keys in enumerate(of_ranks):
        for key in keys:
            holders.setdefault(key, []).append(rank)
    written = [0] * len(of_ranks)
    writer: dict[Any, int] = {}
    for key, ranks in sorted(holders.items(), key=lambda item: len(item[1])):
        size = of_ranks[ranks[0]][key]
        writer[key] = rank = min(ranks, key=written.__getitem__) if size else ranks[0]
        written[rank] += size
    return writer


def boxes_of(
    shape: Lengths, placement: Placement | None, grid: Grid | None = None, coords: Coords | None = None
) -> dict[Box, tuple[slice | None, ...]]:
    """The boxes of a tensor that a rank holds, and where each lies in the rank's own part.

    Args:
        shape: Of the whole tensor.
        placement: How it lies on the grid; None: whole on every rank.
        grid, coords: Another grid, and a rank's coordinates there; None: the placement's own, and this rank.
    """
    stacked = placement is not None and len(shape) > len(placement.global_shape)
    dims = range(len(shape) - stacked)
    ranges = [[(0, shape[dim])] if placement is None else placement.ranges(dim, grid, coords) for dim in dims]
    ranges = [of_dim or [(0, 0)] for of_dim in ranges]  # a dim of which there is nothing: one empty range
    boxes: dict[Box, tuple[slice | None, ...]] = {}
    for corner in product(*(zip(of_dim, local_ranges(of_dim), strict=True) for of_dim in ranges)):
        size = tuple(stop - start for (start, stop), _ in corner)
        if math.prod(size) or not math.prod(shape):
            offset, lies = tuple(start for (start, _), _ in corner), tuple(slice(*where) for _, where in corner)
            if stacked:  # a range of rows is of one expert
                boxes[Box((*divmod(offset[0], shape[1]), *offset[1:]), (1, *size))] = (None, *lies)
            else:
                boxes[Box(offset, size)] = lies
    return boxes


class Parts:
    """This rank's part of one tensor.

    Args:
        local: The part, or the whole tensor where nothing splits it.
        placement: How the whole lies on the grid; None: this rank holds all of it.

    Attributes:
        shape: Of the whole tensor.
        boxes: Each box of it -> where that lies in ``local``.
    """

    def __init__(self, local: torch.Tensor, placement: Placement | None = None) -> None:
        self.local, self.placement = local.detach(), placement
        self.shape: Lengths = tuple(local.shape if placement is None else placement.whole_shape)
        self.boxes = boxes_of(self.shape, placement)

    def whole(self) -> torch.Tensor:
        """The whole tensor, on every rank; every rank must call it."""
        return self.local if self.placement is None else unshard(self.local, self.placement)

    @torch.no_grad()
    def fill(self, whole: torch.Tensor) -> None:
        """Copy this rank's part out of the whole tensor."""
        self.local.copy_(whole if self.placement is None else self.placement.take(whole))

    def view(self, box: Box) -> torch.Tensor:
        """One of the boxes, as a view of the part."""
        return self.local[self.boxes[box]]

    def staged(self) -> Parts:
        """The same with a copy of the data in host memory."""
        return Parts(self.local.to("cpu", copy=True), self.placement)
