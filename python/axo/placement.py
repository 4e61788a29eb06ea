"""Which part of a logical tensor a rank owns, and how to cut it out. Pure arithmetic: no process group.

A placement says, for every tensor dim, which grid axes split it, outer to inner. The weight of a normal layer,
``[n, k]``, is ``splits=(("x", "z"), ("y",))``: rows over x, the rows of that block again over z, columns over y. Bounds
are those of ``torch.chunk``: parts of ``ceil(size / parts)``, the last ones short or empty. So nested parts stay
contiguous. Parts that are padded to equal length and laid end to end are the whole tensor, with all padding at its end.

A fused weight (litgpt's qkv) has row blocks: the outer axis splits every block by itself and the rank holds its parts
one after the other; inner axes split that concatenation. A block may be cut into fewer parts than the outer axis has
ranks: then ``copies`` neighbouring ranks hold the same part (key-value heads that several ranks' queries share). The
weights of all experts of a mixture in one tensor, ``[E, n, k]``, lie so too (``stack``): a rank has rows of ``[E n,
k]`` in two dims, of its own experts where they lie on several ranks.

Not here: moving data between ranks (``axo.sharding``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, NamedTuple, SupportsIndex, cast

from axo.errors import Refused
from axo.grid import AXES, Coords, Grid, Holders, checked_axis

if TYPE_CHECKING:
    import torch

    from axo.comm.connect import Communicators

Range = tuple[int, int]
BLOCKS = 8  # of a rank whose tokens are chosen by work


def chunk_size(size: int, parts: int) -> int:
    """Length of the first of ``parts`` parts of ``size``: ``ceil(size / parts)``."""
    return -(-size // parts)


def chunk_bounds(size: int, parts: int, index: int) -> Range:
    """Start and stop of part ``index``, as ``torch.chunk`` cuts."""
    step = -(-size // parts)
    return min(index * step, size), min((index + 1) * step, size)


def context_ranges(length: int, ranks: int, rank: int) -> list[Range]:
    """The tokens of a sequence that a rank of a context has: piece ``rank`` of ``2 * ranks``, and that as far from the
    end: an early one and a late one, so that every rank has as much causal attention to do. The first pieces are longer
    by one token where they do not divide it, and all ranks have as many tokens, or one less."""
    size, longer = divmod(length, 2 * ranks)
    starts = ((piece, piece * size + min(piece, longer)) for piece in (rank, 2 * ranks - 1 - rank))
    return [(start, start + size + (piece < longer)) for piece, start in starts]


def cut_ranges(whole: torch.Tensor, ranges: Iterable[Range], dim: int) -> torch.Tensor:
    """The parts of ``whole`` in these ranges of ``dim``, one behind the other."""
    import torch

    return torch.cat([whole.narrow(dim, 0, 0), *(whole.narrow(dim, low, high - low) for low, high in ranges)], dim)


def ranges_by_work(work: Sequence[int], ranks: int) -> list[list[Range]]:
    """The tokens of each rank of a context, such that all have as many, up to ``BLOCKS``, and about as much work.

    The sequence is cut into ``BLOCKS`` even blocks a rank. Of those with the most work, and so on, each rank gets one:
    who has the least so far the one with the most.

    Args:
        work: Of each token; for attention, how many tokens it sees.
        ranks: Of the context.
    """
    parts, sums = BLOCKS * ranks, [0, *accumulate(work)]
    bounds = [len(work) * part // parts for part in range(parts + 1)]
    blocks = [(sums[high] - sums[low], low, high) for low, high in pairwise(bounds)]
    blocks.sort(reverse=True)
    loads, mine = [0] * ranks, [list[Range]() for _ in range(ranks)]
    for first in range(0, parts, ranks):
        order = sorted(range(ranks), key=loads.__getitem__)
        for rank, (most, low, high) in zip(order, blocks[first : first + ranks], strict=True):
            loads[rank] += most
            mine[rank].append((low, high))
    return [sorted(part for part in ranges if part[0] < part[1]) for ranges in mine]


def check_divides(
    owner: str, what: str, size: int, axis: str, parts: int, fits: Callable[[int], bool] = lambda parts: True
) -> None:
    """Refuse a size that an axis does not divide. ``fits``: whether else a number of parts would do.

    Raises:
        Refused: Names owner, dimension, size, axis, and what would work.
    """
    if size % parts == 0:
        return
    down, up = size // parts * parts, chunk_size(size, parts) * parts
    use = f"{what}={down} or {up}" if down else f"{what}={up}"
    listed = ", ".join(str(d) for d in range(1, max(2 * parts, 9)) if size % d == 0 and fits(d))
    raise Refused(
        f"{owner}: {what}={size} does not divide over {axis}={parts}; use {use}, or a grid with {axis} in {{{listed}}}"
    )


def check_whole(owner: str, least: int | None, arguments: Mapping[str, object]) -> None:
    """Refuse arguments that are no whole numbers of at least ``least`` (None: of any size); of a tuple, each of it.

    Raises:
        ValueError: Names owner, argument and value.
    """
    for name, value in arguments.items():
        several = isinstance(value, Iterable) and not isinstance(value, str)
        for each in cast("Iterable[SupportsIndex]", value if several else (value,)):
            try:
                fits = least is None or operator.index(each) >= least
                operator.index(each)
            except TypeError:
                fits = False
            if not fits:
                of_at_least = "" if least is None else f" of at least {least}"
                raise ValueError(f"{owner}: {name}={value!r} is not a whole number{of_at_least}")


def check_copies(owner: str, copies: tuple[int, ...] | None, axis: str, parts: int) -> None:
    """Refuse copies that do not divide the axis whose ranks hold them.

    Raises:
        Refused: Names owner, count and axis.
    """
    for count in copies or ():
        if count < 1 or parts % count:
            raise Refused(f"{owner}: {count} ranks cannot share a part: they do not divide {axis}={parts}")


def _length(ranges: list[Range]) -> int:
    length = 0
    for start, stop in ranges:
        length += stop - start
    return length


def split_ranges(ranges: list[Range], parts: int, index: int) -> list[Range]:
    """Part ``index`` of the concatenation of ``ranges``, as ranges."""
    start, stop = chunk_bounds(_length(ranges), parts, index)
    taken, position = [], 0
    for a, b in ranges:
        low, high = max(start - position, 0), min(stop - position, b - a)
        if low < high:
            taken.append((a + low, a + high))
        position += b - a
    return taken


def local_ranges(ranges: list[Range]) -> list[Range]:
    """Where each of a rank's global ranges lies in the rank's own part."""
    ends = list(accumulate((stop - start for start, stop in ranges), initial=0))
    return list(pairwise(ends))


class _Held(NamedTuple):
    """What one rank holds: of each dim the global index ranges, in local order, and how many indices these are."""

    ranges: tuple[list[Range], ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """An immutable description of how a tensor lies on the grid.

    Args:
        global_shape: Shape of the whole tensor.
        splits: For each dim the axes that split it, outer to inner. Dims left out are whole.
        blocks: Lengths of the row blocks of dim 0 that its outer axis splits one by one; None: one block.
        comms: The communicators that ``axo.shard`` and ``axo.unshard`` use; no part of equality.
        block_dim: Which dim the blocks are of: 0, or 1 for a weight that is stored as [in, out].
        copies: For each block, how many neighbours along the outer axis hold the same part; None: one each.
        zero: What cuts the optimizer's state of the tensor over data (``axo.optim.zero``); None: nothing does.
        counted: False where an earlier stage of a pipeline holds the same tensor: norms count it there.
        holders: The data ranks that hold it, among which z cuts it; the others have no row. None: all of them. Of a
            ``stack``: those that hold the same part of it, which are others for each place.
        stack: E, where dim 0 is of E equal parts one behind the other, each of one or more ``blocks``; None: it is not.

    Raises:
        ValueError: The description contradicts itself.
    """

    global_shape: tuple[int, ...]
    splits: tuple[tuple[str, ...], ...] = ()
    blocks: tuple[int, ...] | None = None
    comms: Communicators | None = field(default=None, compare=False, repr=False)
    copies: tuple[int, ...] | None = None
    block_dim: int = 0
    zero: object = field(default=None, compare=False, repr=False)
    counted: bool = field(default=True, compare=False, repr=False)
    holders: Holders | None = None
    stack: int | None = None

    def __post_init__(self) -> None:
        try:
            shape = tuple(map(operator.index, self.global_shape))
        except TypeError:
            shape = (-1,)
        if min(shape, default=0) < 0:
            raise ValueError(f"Placement: {self.global_shape} is not a shape; use whole numbers of at least 0")
        splits = tuple(map(tuple, self.splits)) + ((),) * (len(shape) - len(self.splits))
        object.__setattr__(self, "global_shape", shape)
        object.__setattr__(self, "splits", splits)
        if len(splits) > len(shape):
            raise ValueError(f"Placement: {len(splits)} splits for {len(shape)} dims of shape {shape}")
        used = [*chain.from_iterable(splits)]
        for axis in set(used).difference(AXES):
            checked_axis(axis)
        if len(set(used)) < len(used):
            twice = next(axis for axis in used if used.count(axis) > 1)
            raise ValueError(f"Placement: axis {twice} splits twice in {splits}; an axis splits one dim once")
        if self.blocks is not None:
            object.__setattr__(self, "blocks", tuple(self.blocks))
            if not -1 < self.block_dim < len(shape) or sum(self.blocks) != shape[self.block_dim]:
                raise ValueError(
                    f"Placement: row blocks {self.blocks} do not add up to dim {self.block_dim} of shape {shape}"
                )
        if self.copies is not None:
            object.__setattr__(self, "copies", tuple(self.copies))
            if (
                len(self.copies) != len(self.blocks or ())
                or len({1, *self.copies}) > 2
                or min(self.copies) < 1
                or self.block_dim
            ):
                raise ValueError(
                    f"Placement: copies={self.copies} must name one count for each of the row blocks {self.blocks}: 1,"
                    " or another that all copied blocks share"
                )
            if max(self.copies) == 1:
                object.__setattr__(self, "copies", None)

    @property
    def communicators(self) -> Communicators:
        """What the tensor's parts travel over.

        Raises:
            ValueError: The placement was made without ``comms``.
        """
        if self.comms is None:
            raise ValueError(f"{self} knows no communicators; make it with comms=, or give grid and coordinates")
        return self.comms

    @cached_property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor as others know it: ``global_shape``, but for a ``stack``: ``(E, rows, ...)``."""
        if self.stack is None:
            return self.global_shape
        return self.stack, self.global_shape[0] // self.stack, *self.global_shape[1:]

    @cached_property
    def axes(self) -> frozenset[str]:
        """The axes along which ranks have different parts; over the others the tensor is replicated."""
        apart = () if self.holders is None else (axis for axis in ("z", "data") if self.holders.run(axis) > 1)
        return self.split_axes.union(apart)

    @cached_property
    def split_axes(self) -> frozenset[str]:
        """The axes that split any dim."""
        return frozenset(chain.from_iterable(self.splits))

    def is_first_holder(self, coords: Coords) -> bool:
        """Whether no rank before that at ``coords`` has the same part."""
        place = coords if self.holders is None else self.holders.among(coords)
        for axis in self._copied_over:  # asked of each tensor in each step: no generator
            if getattr(place, axis):
                return False
        return True

    @cached_property
    def _copied_over(self) -> tuple[str, ...]:
        return tuple(axis for axis in AXES if axis not in self.split_axes)

    @property
    def state_dim(self) -> int:
        """The dim that ZeRO cuts: that which z splits, else the first."""
        return next((dim for dim, axes in enumerate(self.splits) if "z" in axes), 0)

    @cached_property
    def state(self) -> Placement:
        """Where the optimizer's state of the tensor lies: with ZeRO cut once more, over data."""
        if self.zero is None or not self.global_shape:
            return self
        splits = list(self.splits)
        splits[self.state_dim] += ("data",)
        return replace(self, splits=tuple(splits), zero=None)

    def without(self, *axes: str) -> Placement:
        """The same tensor with these axes not splitting it: ``without("z")`` is the block of a weight."""
        kept = tuple([tuple([axis for axis in dim if axis not in axes]) for dim in self.splits])
        if (
            self.blocks is not None and self.splits[self.block_dim][:1] and self.splits[self.block_dim][0] in axes
        ):  # nothing splits block by block then
            return replace(self, splits=kept, blocks=None, copies=None)
        return replace(self, splits=kept)

    def ranges(self, dim: int, grid: Grid | None = None, coords: Coords | None = None) -> list[Range]:
        """The global index ranges of ``dim`` that the rank holds, in local order."""
        return self._held(grid, coords).ranges[dim]

    def _held(self, grid: Grid | None, coords: Coords | None) -> _Held:
        """That of the rank at ``coords`` of ``grid``; by default this rank's, which is worked out once."""
        comms = self.comms
        if comms is not None and grid in (None, comms.grid) and coords in (None, comms.coords):
            return self._own
        return self._held_by(*self._where(grid, coords))

    @cached_property
    def _own(self) -> _Held:
        comms = self.communicators
        return self._held_by(comms.grid, comms.coords)

    def _held_by(self, grid: Grid, coords: Coords) -> _Held:
        ranges, shape, holds, place = [], [], True, 0
        if self.holders is not None:
            holds, place = self.stack is not None or self.holders.holds(coords), self.holders.place_of(coords)
            grid, coords = self.holders.grid(grid), self.holders.among(coords)
        for dim in range(len(self.global_shape)):
            ranges.append(self._ranges(dim, grid, coords, place) if holds or dim else [])
            shape.append(_length(ranges[dim]))
        return _Held(tuple(ranges), tuple(shape))

    def _ranges(self, dim: int, grid: Grid, coords: Coords, place: int) -> list[Range]:
        axes, low, high = self.splits[dim], 0, self.global_shape[dim]
        if dim == self.block_dim and self.blocks is not None and axes:
            starts = accumulate(self.blocks, initial=0)
            parts = zip(starts, self._block_parts(grid, coords), strict=False)
            ranges = [(start + low, start + high) for start, (low, high) in parts]
            if self.stack is not None and self.holders is not None:
                each = len(ranges) // self.holders.places
                ranges = ranges[each * place : each * (place + 1)]
            for axis in axes[1:]:
                ranges = split_ranges(ranges, getattr(grid, axis), getattr(coords, axis))
            return ranges
        for axis in axes:  # a part of a range is a range
            start, stop = chunk_bounds(high - low, getattr(grid, axis), getattr(coords, axis))
            low, high = low + start, low + stop
        return [(low, high)] if low < high or not axes else []

    def _block_parts(self, grid: Grid, coords: Coords) -> list[Range]:
        """The part of each row block that the rank holds, counted from the block's start."""
        outer = self.splits[self.block_dim][0]
        ranks, mine = grid.size(outer), getattr(coords, outer)
        blocks = self.blocks or ()
        parts = []
        for block, copies in zip(blocks, self.copies or (1,) * len(blocks), strict=True):
            if ranks % copies:
                raise ValueError(f"{self}: {copies} copies do not divide over {outer}={ranks}")
            parts.append(chunk_bounds(block, ranks // copies, mine // copies))
        return parts

    def copied_rows(self, grid: Grid | None = None, coords: Coords | None = None) -> list[Range]:
        """The local rows (of dim 0) that neighbours along the outer axis hold too."""
        grid, coords = self._where(grid, coords)
        if self.copies is None or not self.splits[0]:
            return []
        spans, end = [], 0
        for copies, (low, high) in zip(self.copies, self._block_parts(grid, coords), strict=True):
            if copies > 1:
                spans.append((end, end + high - low))
            end += high - low
        bounds = (0, end)
        for axis in self.splits[0][1:]:
            start, stop = chunk_bounds(bounds[1] - bounds[0], grid.size(axis), getattr(coords, axis))
            bounds = (bounds[0] + start, bounds[0] + stop)
        merged: list[Range] = []
        for a, b in spans:
            a, b = max(a, bounds[0]) - bounds[0], min(b, bounds[1]) - bounds[0]
            if a >= b:
                continue
            if merged and merged[-1][1] == a:
                merged[-1] = (merged[-1][0], b)
            else:
                merged.append((a, b))
        return merged

    def counted_rows(self, grid: Grid | None = None, coords: Coords | None = None) -> list[Range]:
        """The local rows (of dim 0) less those that a neighbour before this rank holds too: every row once."""
        grid, coords = self._where(grid, coords)
        rows = self.local_shape(grid, coords)[0]
        copied = self.copied_rows(grid, coords)
        if not copied or getattr(coords, self.splits[0][0]) % max(self.copies or (1,)) == 0:
            return [(0, rows)]
        edges = [0, *(edge for span in copied for edge in span), rows]
        return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]

    def local_shape(self, grid: Grid | None = None, coords: Coords | None = None) -> tuple[int, ...]:
        """Shape of the rank's part."""
        return self._held(grid, coords).shape

    def max_local_shape(self, grid: Grid | None = None) -> tuple[int, ...]:
        """The largest part of any rank, which is that of the first holder: what a padded exchange moves."""
        return self.local_shape(grid, Coords(0, 0, 0, 0) if self.holders is None else self.holders.first)

    def take(self, full: torch.Tensor, grid: Grid | None = None, coords: Coords | None = None) -> torch.Tensor:
        """Cut the rank's part out of the whole tensor: a view where one is enough, else a copy.

        Raises:
            ValueError: The tensor is not of the global shape.
        """
        import torch  # here: sizes are checked, and plans made, where it is not installed

        if tuple(full.shape) != self.whole_shape:
            raise ValueError(f"shard: the tensor has shape {tuple(full.shape)}, its placement says {self.whole_shape}")
        part = full = full if self.stack is None else full.flatten(0, 1)
        for dim in range(full.dim()):
            pieces = [part.narrow(dim, a, b - a) for a, b in self.ranges(dim, grid, coords)]
            part = pieces[0] if len(pieces) == 1 else torch.cat(pieces or [part.narrow(dim, 0, 0)], dim)
        return part

    def put(self, full: torch.Tensor, part: torch.Tensor, grid: Grid, coords: Coords) -> None:
        """Write the part of the rank at ``coords`` into ``full``; ``part`` may be padded at the end of each dim."""
        self._put(full, part, [self.ranges(dim, grid, coords) for dim in range(full.dim())], 0)

    def _put(self, full: torch.Tensor, part: torch.Tensor, ranges: list[list[Range]], dim: int) -> None:
        if dim == full.dim():
            full.copy_(part)
            return
        for (a, b), (start, _) in zip(ranges[dim], local_ranges(ranges[dim]), strict=True):
            self._put(full.narrow(dim, a, b - a), part.narrow(dim, start, b - a), ranges, dim + 1)

    def _where(self, grid: Grid | None, coords: Coords | None) -> tuple[Grid, Coords]:
        if grid is None or coords is None:
            grid = self.communicators.grid if grid is None else grid
            coords = self.communicators.coords if coords is None else coords
        return grid, coords


def is_split(placement: Placement | None) -> bool:
    """Whether other ranks hold other parts."""
    return placement is not None and any(placement.communicators.grid.size(axis) > 1 for axis in placement.axes)


def placement_of(tensor: object) -> Placement | None:
    """How a tensor lies on its grid; None: nobody has said, so it is whole on every rank."""
    placement = getattr(tensor, "placement", None)
    return placement if isinstance(placement, Placement) else None
