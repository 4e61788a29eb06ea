"""Where an algorithm puts rows, features and weights on the grid: the one place that layers, plans and data ask.

| | ``axonn`` | ``tesseract``; ``summa``: its case z = 1 |
|---|---|---|
| grid | any | x = y = q, z = depth |
| rows of activations, split over | data, z | data, z, x |
| features of the residual stream, split over | y | y |
| features inside a block (heads, MLP width, logits), split over | x | y |
| a normal layer takes and leaves features over | y, x | y, y |
| a transposed layer takes and leaves features over | x, y | y, y |
| weight ``[n, k]``: n, k split over | out axis and z, in axis | y, x |
| embedding ``[V, h]``: V, h split over | x and z, y | x, y |
| what its product moves (``axo.matmul``) | ``axonn`` | ``tesseract``, ``summa`` |

An axis that splits rows gives each of its ranks other rows. So gradients are reduced over it. Where it also splits a
weight, the weight is gathered over it before use (axonn: z; Tesseract's embedding: x), or the product broadcasts it.

Sources: Algorithm 1 of "Democratizing AI"; "Tesseract" (Wang et al., 2021), section 3. Pure arithmetic: no torch.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

from axo.errors import Refused
from axo.grid import AXES, Coords, Grid

Splits = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Arrangement:
    """How one algorithm of training uses the axes.

    Args:
        name: As ``axo.parallelize(algorithm=...)`` has it.
        rows: The axes that split rows, outer to inner.
        inner: The axis that splits features between a normal layer and the transposed one after it.
        square: The grid must have x = y, since weights lie in blocks over both.
        deep: z may be larger than 1.
    """

    name: str
    rows: tuple[str, ...]
    inner: str
    square: bool = False
    deep: bool = True

    stream = "y"  # the axis that splits features of the residual stream, whatever the algorithm

    def features(self, transposed: bool) -> tuple[str, str]:
        """The axes that split the features which a linear layer takes and leaves."""
        return (self.inner, self.stream) if transposed else (self.stream, self.inner)

    def weight(self, in_axes: tuple[str, ...], out_axes: tuple[str, ...]) -> Splits:
        """How the weight ``[n, k]`` of a linear layer is split that takes and leaves features so split."""
        return (out_axes, ("x",)) if self.square else ((*out_axes, "z"), in_axes)

    @property
    def table(self) -> Splits:
        """How the weight ``[V, h]`` of an embedding is split."""
        return (("x",), (self.stream,)) if self.square else (("x", "z"), (self.stream,))

    def row_parts(self, grid: Grid) -> int:
        """Into how many parts the rows are cut: ranks that work on rows of their own."""
        return math.prod(map(grid.sizes.__getitem__, self.rows))

    def row_part(self, grid: Grid, coords: Coords) -> int:
        """Which of these parts the rank at ``coords`` has."""
        index = 0
        for axis in self.rows:
            index = index * grid.size(axis) + getattr(coords, axis)
        return index

    def leads(self, coords: Coords) -> bool:
        """Whether the rank at ``coords`` is the first of those that work on its rows."""
        return not any(getattr(coords, axis) for axis in AXES if axis not in self.rows)

    def describe_rows(self, grid: Grid) -> str:
        """``data=2 x z=4``: for messages."""
        return " x ".join(f"{axis}={grid.size(axis)}" for axis in self.rows)

    def check(self, grid: Grid) -> None:
        """Refuse a grid that the algorithm cannot use; warn of one that it gains nothing from.

        Raises:
            Refused: It names grids of as many ranks that would do, if there are any.
        """
        if not self._fits(grid):
            fitting = sorted(filter(self._fits, Grid.all(grid.world_size)), key=lambda g: (g.z > g.x, -g.x, g.data))
            such = ", ".join(str(g) for g in fitting[:3])
            depth = "z as its depth" if self.deep else "z = 1"
            raise Refused(f"algorithm {self.name!r} cannot use grid {grid}; it needs x = y and {depth}, such as {such}")
        if self.square and grid.z > grid.x:
            warnings.warn(
                f"algorithm {self.name!r} on grid {grid}: a depth z={grid.z} above q={grid.x} moves no less than data"
                f" ranks would; use z of at most {grid.x} and more data",
                UserWarning,
                stacklevel=3,
            )

    def _fits(self, grid: Grid) -> bool:
        return (not self.square or grid.x == grid.y) and (self.deep or grid.z == 1)

    def only_axonn(self, owner: str) -> None:
        """Refuse this algorithm for what only axonn can do.

        Raises:
            Refused: This is another; names ``owner``.
        """
        if self.square:
            raise Refused(f"{owner} is not supported by algorithm {self.name!r}; use algorithm='axonn'")


AXONN = Arrangement("axonn", ("data", "z"), "x")
TESSERACT = Arrangement("tesseract", ("data", "z", "x"), "y", square=True)
SUMMA = Arrangement("summa", ("data", "z", "x"), "y", square=True, deep=False)
ARRANGEMENTS = {each.name: each for each in (AXONN, TESSERACT, SUMMA)}


def arrangement_of(owner: str, algorithm: str) -> Arrangement:
    """The arrangement of an algorithm by name.

    Raises:
        ValueError: There is none that trains models.
    """
    if algorithm not in ARRANGEMENTS:
        raise ValueError(f"{owner}: algorithm={algorithm!r} is not known; use one of {', '.join(ARRANGEMENTS)}")
    return ARRANGEMENTS[algorithm]
