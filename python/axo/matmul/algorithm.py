"""What every distributed product ``C[m, n] = A[m, k] B[k, n]`` has in common: layouts, forward, backward, cost.

An algorithm says where the parts of A, B and C lie on a grid (``Layout``), computes C and the gradients

    dA = dC B^T        dB = A^T dC

with the communicators of the axes, and counts what it sends (``cost``) in three units:

    calls        collectives, each counted once for its whole group; a send is one call
    deliveries   blocks that arrive at a rank other than their owner: the unit in which algorithms can be compared
    elements     the numbers in those blocks

A broadcast or reduce among g ranks is one call and g - 1 deliveries; an all_gather or reduce_scatter is one call and
g (g - 1) deliveries of shards; an all_reduce counts as a reduce and a broadcast, 2 (g - 1).

Nothing here imports torch: costs are arithmetic, and products use the methods of the tensors that they are given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from axo.grid import Coords, Grid
from axo.matmul.cost import BACKWARD, FORWARD, chunk, part

if TYPE_CHECKING:
    from torch import Tensor

    from axo.comm.communicator import Communicator
    from axo.comm.connect import Communicators
    from axo.comm.work import Work
    from axo.overlap.events import TracedWork

__all__ = [
    "BACKWARD",
    "FORWARD",
    "Algorithm",
    "Layout",
    "Shape",
    "Transfer",
    "ahead",
    "chunk",
    "part",
    "whole_elements",
]


class Shape(NamedTuple):
    """Whole sizes of a product: A is (m, k), B is (k, n), C is (m, n)."""

    m: int
    k: int
    n: int

    def of(self, matrix: str) -> tuple[int, int]:
        """Rows and columns of the matrix ``"A"``, ``"B"`` or ``"C"``."""
        return {"A": (self.m, self.k), "B": (self.k, self.n), "C": (self.m, self.n)}[matrix]


class Transfer(NamedTuple):
    """What one kind of collective moves on one axis in one pass, over all ranks together."""

    phase: str  # "forward" or "backward"
    op: str
    axis: str
    calls: int
    deliveries: int
    elements: int


# How one dim is cut: one cut after the other, each over the ranks of some axes together, the first of them outermost.
Cuts = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Layout:
    """Which part of a matrix a rank holds. Cuts follow ``torch.chunk``: the last parts may be short or empty.

    Attributes:
        rows, columns: How each dim is cut.
        only: Coordinates of the ranks that hold a part at all; the others hold (0, 0). Axes that are not named
            anywhere hold copies.
    """

    rows: Cuts = ()
    columns: Cuts = ()
    only: Mapping[str, int] = field(default_factory=dict)

    def held(self, coords: Coords) -> bool:
        """Whether the rank at ``coords`` holds a part."""
        return all(getattr(coords, axis) == at for axis, at in self.only.items())

    def slices(self, grid: Grid, coords: Coords, size: tuple[int, int]) -> tuple[slice, slice]:
        """Rows and columns of the part that the rank at ``coords`` holds of a matrix of ``size``."""
        if not self.held(coords):
            return slice(0, 0), slice(0, 0)
        return _cut(self.rows, grid, coords, size[0]), _cut(self.columns, grid, coords, size[1])


def _cut(cuts: Cuts, grid: Grid, coords: Coords, size: int) -> slice:
    start = 0
    for axes in cuts:
        parts, index = 1, 0
        for axis in axes:
            parts, index = parts * grid.size(axis), index * grid.size(axis) + getattr(coords, axis)
        start, size = start + min(size, index * chunk(size, parts)), part(size, parts, index)
    return slice(start, start + size)


class Algorithm(ABC):
    """One distributed product. Objects hold no tensor and no communicator.

    Attributes:
        name: As in ``axo_bench.products.algorithms``.
        a, b, c: Where the matrices lie before and after.
    """

    name: str
    a: Layout
    b: Layout
    c: Layout

    @abstractmethod
    def check(self, grid: Grid) -> None:
        """Refuse a grid that the algorithm cannot use.

        Raises:
            ValueError: It says which grids would do.
        """

    @abstractmethod
    def forward(self, comms: Communicators, a: Tensor, b: Tensor, shape: Shape) -> Tensor:
        """Multiply.

        Args:
            comms: The communicators of the grid.
            a, b: This rank's parts (``layout.slices``), of one dtype.
            shape: Whole sizes.

        Returns:
            This rank's part of C, in the dtype of ``a``; sums over blocks are made in fp32 at least.
        """

    @abstractmethod
    def backward(
        self, comms: Communicators, a: Tensor, b: Tensor, grad_c: Tensor, shape: Shape
    ) -> tuple[Tensor, Tensor]:
        """Return this rank's parts of dA and dB, laid out as A and B."""

    @abstractmethod
    def cost(self, grid: Grid, shape: Shape) -> list[Transfer]:
        """Count what forward and backward send, over all ranks of ``grid``; axes of one rank send nothing."""

    def memory(self, grid: Grid, shape: Shape, coords: Coords | None = None) -> int:
        """Elements of A, B and C that the rank at ``coords`` (the first) holds between products."""
        total = 0
        for matrix, layout in (("A", self.a), ("B", self.b), ("C", self.c)):
            rows, columns = layout.slices(grid, coords or Coords(0, 0, 0, 0), shape.of(matrix))
            total += (rows.stop - rows.start) * (columns.stop - columns.start)
        return total

    def refuse(self, grid: Grid, wanted: str) -> ValueError:
        """The error for a grid that does not fit."""
        return ValueError(f"algorithm {self.name!r} cannot use grid {grid}; it needs {wanted}")


def ahead(
    steps: Iterable[int], fetch: Callable[[int], tuple[Work | TracedWork, ...]]
) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Yield (step, what ``fetch(step)`` brought), where each step's blocks travel while the one before multiplies.

    Args:
        steps: The numbers of the steps, in order.
        fetch: Issues what a step needs and gives pending works, whose ``wait()`` gives tensors.
    """
    order = list(steps)
    pending: tuple[Work | TracedWork, ...] = fetch(order[0]) if order else ()
    for index, step in enumerate(order):
        current, pending = pending, fetch(order[index + 1]) if index + 1 < len(order) else ()
        yield step, tuple(work.wait() for work in current)


def accumulator(like: Tensor, rows: int, columns: int) -> Tensor:
    """Zeros to sum blocks in: fp32 for bf16 and fp16, whose partial sums lose bits, else the dtype of ``like``."""
    zeros = like.new_zeros(rows, columns)
    return zeros.float() if like.dtype.itemsize == 2 else zeros


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right``, in the dtype of ``total``."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


def start_broadcast(comm: Communicator, mine: Tensor, root: int, rows: int, columns: int) -> Work:
    """Start a broadcast of the block of rank ``root``; the work's ``wait()`` gives it, (rows, columns)."""
    block = mine.contiguous() if comm.rank == root else mine.new_empty(rows, columns)
    return comm.broadcast(block, root, async_op=True)


def whole_elements(shape: Shape) -> tuple[int, int, int]:
    """Numbers in A, B and C."""
    return shape.m * shape.k, shape.k * shape.n, shape.m * shape.n


def dropped(transfers: Iterable[Transfer]) -> list[Transfer]:
    """Leave out what is never issued: collectives on axes of one rank, where nothing arrives anywhere."""
    return [transfer for transfer in transfers if transfer.deliveries]
