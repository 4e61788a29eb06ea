"""Newton-Schulz: the nearest orthogonal matrix, roughly, by products alone; of a matrix at hand, or of one on the grid.

    X <- X / |X|;   then ns_steps times   G = X X^T,   H = b G + c G G,   X <- a X + H X

X is (m, k) with m <= k; a tall matrix is transposed first. On the grid its rows lie over some axes (R parts) and its
columns over others (C parts), and no rank ever has a buffer larger than its part of X. Of G and H each of the R C ranks
has m / (R C) rows, all m columns. The i-th of the R parts of rows is X_i; in one step

    G      for each part j:  X_j is broadcast over R;  X_i X_j^T is reduced over C, each row to the rank that has it
    G G    for each rank q:  its rows of G are broadcast over all ranks
    H X    for each part j:  X_j is broadcast over R again, and the rows of H that go with X_i over C

That is 2 (m / C) k + m^2 + 2 m^2 / R elements that come to a rank in a step, less its own parts, and ns_steps of them.
One gather of X brings m k. Rows may lie in any order, since products of permuted rows are permuted, so the row blocks
of a fused weight need nothing; but each row must lie on one rank.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (the polynomial, its coefficients);
Irony, Toledo and Tiskin, "Communication lower bounds for distributed-memory matrix multiplication".
Not here: momentum, rates, and which rank works on which matrix (``axo.optim.muon``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate, pairwise, product
from typing import NamedTuple

import torch

from axo.comm.counting import Count
from axo.grid import AXES, Coords, Grid
from axo.perf.flops import newton_schulz_bytes, newton_schulz_flops
from axo.placement import Placement, Range, chunk_bounds

FIRST = Coords(0, 0, 0, 0)  # the rank with the largest parts
Coefficients = tuple[float, float, float]


def orthogonalize(matrix: torch.Tensor, coefficients: Coefficients, steps: int, eps: float) -> torch.Tensor:
    """Orthogonalize a whole matrix (n, k), in its dtype, by the operations of ``torch.optim.Muon`` in their order."""
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def orthogonalize_shards(
    part: torch.Tensor, placement: Placement, coefficients: Coefficients, steps: int, eps: float
) -> torch.Tensor:
    """Orthogonalize a matrix of which each rank has its ``part``; this rank's part. All its ranks must call it.

    Args:
        part: This rank's shard, (n / R, k / C), on the grid's device.
        placement: Where the matrix lies; no row on several ranks (``Placement.copies``).
        coefficients, steps, eps: As of :func:`orthogonalize`.
    """
    return _Distributed(placement).orthogonalize(part, coefficients, steps, eps)


class Cost(NamedTuple):
    """What one rank spends on a matrix, or on several.

    Attributes:
        sent: (op, axis) -> calls, elements and bytes that it puts in, as ``axo.count_collectives`` counts them.
        moved: Bytes that come to it or leave it, the larger of both in each collective.
        flops: Of its products.
        memory: Bytes of the matrices that it has at a time.
    """

    sent: dict[tuple[str, str], Count]
    moved: float
    flops: float
    memory: int


def gather_cost(placement: Placement, grid: Grid, steps: int, itemsize: int) -> Cost:
    """Count one matrix that every rank gathers whole (``axo.unshard``) and works on."""
    shape, size, sent, moved = placement.global_shape, math.prod(placement.max_local_shape(grid)), {}, 0.0
    for axis in split_axes(placement, grid):
        sent["all_gather", axis] = Count(1, size, size * itemsize)
        moved += (grid.size(axis) - 1) * size * itemsize
        size *= grid.size(axis)
    return Cost(sent, moved, newton_schulz_flops(shape, steps), newton_schulz_bytes(shape, itemsize))


def distributed_cost(placement: Placement, grid: Grid, steps: int, itemsize: int, coords: Coords = FIRST) -> Cost:
    """Count one matrix that stays on the grid (:func:`orthogonalize_shards`), on the rank at ``coords``."""
    layout = MatrixLayout(placement, grid)
    sent = {("all_reduce", axis): Count(1, 1, 4) for axis in split_axes(placement, grid)}
    calls = Counter[tuple[str, str, int]]()
    mine, columns = layout.part_of(coords), layout.columns_of(coords)
    rows = mine.stop - mine.start
    for part in layout.parts:
        width = part.stop - part.start
        for axis in _receivers(layout.rows_over, part.coords, coords):
            calls["broadcast", axis, width * columns] += 2 * steps
        for piece in mine.pieces:
            size = (piece.stop - piece.start) * width
            for axis in _receivers(layout.columns_over, piece.coords, coords):
                calls["broadcast", axis, size] += steps
            for axis in _senders(layout.columns_over, piece.coords, coords):
                calls["reduce", axis, size] += steps
        for piece in part.pieces:
            for axis in _receivers(layout.rows_over + layout.columns_over, piece.coords, coords):
                calls["broadcast", axis, (piece.stop - piece.start) * layout.m] += steps
    for (op, axis, size), count in calls.items():
        if size:
            sent[op, axis] = sent.get((op, axis), Count()).plus(count, count * size, count * size * itemsize)
    moved = sum(count.bytes for count in sent.values())
    own = layout.piece_of(coords)
    flops = steps * (4.0 * rows * layout.m * columns + 2.0 * (own.stop - own.start) * layout.m**2)
    memory = 3 * rows * columns + 3 * (own.stop - own.start) * layout.m
    return Cost(sent, moved, flops, itemsize * memory)


def least_moved(placement: Placement, grid: Grid, steps: int, itemsize: int, *, whole: bool) -> float:
    """Bytes that must come to some rank at least, whatever the algorithm.

    Args:
        placement, grid, steps, itemsize: Of the matrix, as of the costs.
        whole: Of one rank that works on the matrix alone: all that it has not. Else of ranks that share each product
            evenly, with the memory that ``distributed_cost`` names: f / (2 sqrt(2) sqrt(M)) - M elements for f
            multiplications on a rank with room for M elements, and 0 where that is negative.
    """
    own = math.prod(placement.max_local_shape(grid))
    if whole:
        return float(itemsize * (math.prod(placement.global_shape) - own))
    cost = distributed_cost(placement, grid, steps, itemsize)
    room = cost.memory / itemsize
    return itemsize * max(0.0, cost.flops / 2 / (2 * math.sqrt(2) * math.sqrt(room)) - room)


def split_axes(placement: Placement, grid: Grid) -> tuple[str, ...]:
    """The axes of several ranks that split a tensor, in the grid's order."""
    return tuple(axis for axis in AXES if axis in placement.axes and grid.size(axis) > 1)


def _receivers(axes: tuple[str, ...], source: Coords, coords: Coords) -> Iterator[str]:
    """The axes, inner first, along which the rank at ``coords`` takes part in a broadcast from ``source``."""
    for number in reversed(range(len(axes))):
        if all(getattr(coords, outer) == getattr(source, outer) for outer in axes[:number]):
            yield axes[number]


def _senders(axes: tuple[str, ...], target: Coords, coords: Coords) -> Iterator[str]:
    """The same of a reduction to ``target``: along the inner axes first, and further only where its sum has gone."""
    for axis in reversed(axes):
        yield axis
        if getattr(coords, axis) != getattr(target, axis):
            return


class RankRows(NamedTuple):
    """Rows of G and H that one rank has: a range of the m, and that rank's coordinates."""

    start: int
    stop: int
    coords: Coords


class SharedRows(NamedTuple):
    """Rows of X that ranks along the columns' axes share: a range of the m, and who has these rows of G."""

    start: int
    stop: int
    coords: Coords
    pieces: tuple[RankRows, ...]


class MatrixLayout:
    """A matrix (m, k), m <= k, on a grid: which axes split its rows and its columns, and where each row lies.

    Args:
        placement: Of the matrix as it is stored, (n, k).
        grid: The grid.

    Attributes:
        m: Rows, the shorter dim. transposed: Whether the stored matrix has them as columns.
        rows_over, columns_over: The axes that split rows and columns, outer to inner.
    """

    def __init__(self, placement: Placement, grid: Grid) -> None:
        self.placement, self.grid = placement, grid
        n, k = placement.global_shape
        of_rows, of_columns = (tuple(axis for axis in axes if grid.size(axis) > 1) for axes in placement.splits)
        self.m, self.transposed = min(n, k), n > k
        self.rows_over, self.columns_over = (of_columns, of_rows) if self.transposed else (of_rows, of_columns)

    def columns_of(self, coords: Coords) -> int:
        """How many columns the rank at ``coords`` has."""
        return self.placement.local_shape(self.grid, coords)[0 if self.transposed else 1]

    @cached_property
    def parts(self) -> tuple[SharedRows, ...]:
        """The rows of X, part by part, as if they lay one behind the other."""
        dim = 1 if self.transposed else 0
        where = list(self._places(self.rows_over))
        ends = accumulate((self.placement.local_shape(self.grid, each)[dim] for each in where), initial=0)
        across = list(self._places(self.columns_over))
        parts = []
        for at, (start, stop) in zip(where, pairwise(ends), strict=True):
            pieces = []
            for number, column in enumerate(across):
                low, high = chunk_bounds(stop - start, len(across), number)
                both = at._replace(**{axis: getattr(column, axis) for axis in self.columns_over})
                pieces.append(RankRows(start + low, start + high, both))
            parts.append(SharedRows(start, stop, at, tuple(pieces)))
        return tuple(parts)

    def part_of(self, coords: Coords) -> SharedRows:
        """The rows of X that the rank at ``coords`` has."""
        return next(part for part in self.parts if _same(part.coords, coords, self.rows_over))

    def piece_of(self, coords: Coords) -> RankRows:
        """The rows of G that the rank at ``coords`` has."""
        return next(each for each in self.part_of(coords).pieces if _same(each.coords, coords, self.columns_over))

    def _places(self, axes: tuple[str, ...]) -> Iterator[Coords]:
        for index in product(*(range(self.grid.size(axis)) for axis in axes)):
            yield FIRST._replace(**dict(zip(axes, index, strict=True)))


def _same(first: Coords, second: Coords, axes: tuple[str, ...]) -> bool:
    return all(getattr(first, axis) == getattr(second, axis) for axis in axes)


class _Distributed:
    """The distributed products of one matrix."""

    def __init__(self, placement: Placement) -> None:
        self.comms = placement.communicators
        self.layout = MatrixLayout(placement, self.comms.grid)
        self.coords = self.comms.coords
        self.part, self.piece = self.layout.part_of(self.coords), self.layout.piece_of(self.coords)

    def orthogonalize(self, shard: torch.Tensor, coefficients: Coefficients, steps: int, eps: float) -> torch.Tensor:
        a, b, c = coefficients
        x = (shard.T if self.layout.transposed else shard).contiguous()
        square = x.to(torch.promote_types(x.dtype, torch.float32)).square().sum().reshape(1)
        for axis in split_axes(self.layout.placement, self.layout.grid):
            self.comms.axis(axis).all_reduce(square)
        x = x / square.sqrt().to(x.dtype).clamp(min=eps)
        for _ in range(steps):
            x = self._applied(self._polynomial(self._gram(x), b, c), x, a)
        return x.T if self.layout.transposed else x

    def _gram(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows of X X^T."""
        gram = x.new_empty((self.piece.stop - self.piece.start, self.layout.m))
        for part in self.layout.parts:
            other = self._broadcast(x, (part.stop - part.start, x.shape[1]), self.layout.rows_over, part.coords)
            for piece in self.part.pieces:
                rows = x[self._local(piece)] @ other.T
                self._reduce(rows, piece.coords)
                if piece is self.piece:
                    gram[:, part.start : part.stop] = rows
        return gram

    def _polynomial(self, gram: torch.Tensor, b: float, c: float) -> torch.Tensor:
        """This rank's rows of b G + c G G; G is symmetric, so another rank's rows are columns too."""
        result, axes = torch.empty_like(gram), self.layout.rows_over + self.layout.columns_over
        for piece in (piece for part in self.layout.parts for piece in part.pieces):
            other = self._broadcast(gram, (piece.stop - piece.start, self.layout.m), axes, piece.coords)
            columns = slice(piece.start, piece.stop)
            result[:, columns] = torch.addmm(gram[:, columns], gram, other.T, beta=b, alpha=c)
        return result

    def _applied(self, h: torch.Tensor, x: torch.Tensor, a: float) -> torch.Tensor:
        """This rank's part of a X + H X, added up in fp32."""
        result = x.to(torch.promote_types(x.dtype, torch.float32)) * a
        for part in self.layout.parts:
            width = part.stop - part.start
            other = self._broadcast(x, (width, x.shape[1]), self.layout.rows_over, part.coords)
            columns = h[:, part.start : part.stop].contiguous()
            for piece in self.part.pieces:
                shape = (piece.stop - piece.start, width)
                rows = self._broadcast(columns, shape, self.layout.columns_over, piece.coords)
                result[self._local(piece)] += rows @ other
        return result.to(x.dtype)

    def _local(self, piece: RankRows) -> slice:
        """Where rows of this rank's part of X lie in it."""
        return slice(piece.start - self.part.start, piece.stop - self.part.start)

    def _broadcast(self, tensor: torch.Tensor, shape: Range, axes: tuple[str, ...], source: Coords) -> torch.Tensor:
        """The ``tensor`` of the rank at ``source``, of that shape, on all ranks along ``axes``."""
        mine = _same(source, self.coords, axes)
        buffer = tensor if mine else tensor.new_empty(shape)
        for axis in _receivers(axes, source, self.coords) if buffer.numel() else ():
            self.comms.axis(axis).broadcast(buffer, getattr(source, axis))
        return buffer

    def _reduce(self, tensor: torch.Tensor, target: Coords) -> None:
        """Add up, at ``target``, what ranks along the columns' axes have."""
        for axis in _senders(self.layout.columns_over, target, self.coords) if tensor.numel() else ():
            self.comms.axis(axis).reduce(tensor, getattr(target, axis))
