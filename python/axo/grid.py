"""The 4D grid: which rank stands where, and who its peers on an axis are.

``rank = x + Gx * (y + Gy * (z + Gz * data))``: x is innermost, so the peers of x are neighbours in rank order and, with
one rank a GPU, sit in the same node first. Written ``GxxGyxGzxGdata``, e.g. ``2x2x2x1``. Pure arithmetic: no torch, no
process group.

Source: "Democratizing AI" (AxoNN), section on the 4D algorithm; the hierarchy order of its equation (10).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from axo.check import whole_number

AXES = ("x", "y", "z", "data")


class Coords(NamedTuple):
    """Where a rank stands on each axis, counted from 0."""

    x: int
    y: int
    z: int
    data: int


@dataclass(frozen=True)
class Grid:
    """Sizes of the four axes.

    Args:
        x: Ranks that split out_features of a normal layer (and in_features of a transposed one).
        y: Ranks that split in_features of a normal layer (and out_features of a transposed one).
        z: Ranks that split rows (batch), and shard each weight block by rows.
        data: Data-parallel groups.

    Raises:
        ValueError: A size is not a whole number of at least 1.
    """

    x: int = 1
    y: int = 1
    z: int = 1
    data: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            whole_number(f"Grid: {axis}", getattr(self, axis), least=1)

    @classmethod
    def parse(cls, text: Grid | str) -> Grid:
        """Read ``"2x2x2x1"`` (or ``"2x2x2"``: data is then 1); a grid stays what it is.

        Raises:
            ValueError: The text is not three or four sizes joined by ``x``.
        """
        if isinstance(text, Grid):
            return text
        if not isinstance(text, str) or not re.fullmatch(r"\s*\d+(\s*[xX]\s*\d+){2,3}\s*", text):
            raise ValueError(
                f"grid {text!r} is not of the form XxYxZxDATA; write four sizes such as 2x2x2x1, or the first three"
            )
        return cls(*(int(size) for size in re.split(r"[xX]", text)))

    @classmethod
    def all(cls, world_size: int) -> Iterator[Grid]:
        """Yield every ordered grid of ``world_size`` ranks: 35 of 16, 816 of 32,768."""
        for x in _divisors(world_size):
            for y in _divisors(world_size // x):
                for z in _divisors(world_size // (x * y)):
                    yield cls(x, y, z, world_size // (x * y * z))

    def __str__(self) -> str:
        return f"{self.x}x{self.y}x{self.z}x{self.data}"

    def in_stages(self, stages: int) -> str:
        """The grid in words, where each of ``stages`` stages of a pipeline is one."""
        return str(self) if stages == 1 else f"{self} in {stages} stages"

    @cached_property
    def world_size(self) -> int:
        return self.x * self.y * self.z * self.data

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Ranks along each axis."""
        return {"x": self.x, "y": self.y, "z": self.z, "data": self.data}

    def size(self, axis: str) -> int:
        """Ranks along ``axis``."""
        return self.sizes[axis if axis in AXES else checked_axis(axis)]

    def stride(self, axis: str) -> int:
        """Distance in rank numbers between neighbours on ``axis``."""
        return {"x": 1, "y": self.x, "z": self.x * self.y, "data": self.x * self.y * self.z}[checked_axis(axis)]

    def coords(self, rank: int) -> Coords:
        """Where ``rank`` stands.

        Raises:
            ValueError: The rank is not of this grid.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not of grid {self}; its ranks are 0 to {self.world_size - 1}")
        rest, x = divmod(rank, self.x)
        rest, y = divmod(rest, self.y)
        data, z = divmod(rest, self.z)
        return Coords(x, y, z, data)

    def rank(self, x: int = 0, y: int = 0, z: int = 0, data: int = 0) -> int:
        """The rank that stands at these coordinates.

        Raises:
            ValueError: A coordinate is outside its axis.
        """
        for axis, coord in zip(AXES, (x, y, z, data), strict=True):
            if not 0 <= coord < getattr(self, axis):
                raise ValueError(f"{axis}={coord} is outside grid {self}; use 0 to {getattr(self, axis) - 1}")
        return x + self.x * (y + self.y * (z + self.z * data))

    def ranks(self, axis: str, rank: int) -> list[int]:
        """The peers of ``rank`` along ``axis`` (itself too), in the order of their coordinate."""
        stride, size = self.stride(axis), self.size(axis)
        first = rank - getattr(self.coords(rank), axis) * stride
        return list(range(first, first + size * stride, stride))


class Holders(NamedTuple):
    """Which data ranks hold a tensor of which the others have nothing: one expert of several.

    Each run of ``z`` neighbours along z, times ``data`` along data, has one rank that does: its ``place``-th.
    """

    place: int
    z: int = 1
    data: int = 1

    def run(self, axis: str) -> int:
        """Neighbours along ``axis`` of which one holds it."""
        return {"z": self.z, "data": self.data}.get(axis, 1)

    @property
    def places(self) -> int:
        """Ranks of a run."""
        return self.z * self.data

    def place_of(self, coords: Coords) -> int:
        """Which of its run the rank at ``coords`` is."""
        return coords.z % self.z + self.z * (coords.data % self.data)

    def holds(self, coords: Coords) -> bool:
        """Whether the rank at ``coords`` does."""
        return self.place_of(coords) == self.place

    def among(self, coords: Coords) -> Coords:
        """Where a rank that holds it stands in the grid of those that do."""
        return coords._replace(z=coords.z // self.z, data=coords.data // self.data)

    def grid(self, grid: Grid) -> Grid:
        """Of those ranks alone."""
        return replace(grid, z=grid.z // self.z, data=grid.data // self.data)

    @property
    def first(self) -> Coords:
        """Of the first rank that does."""
        return Coords(0, 0, self.place % self.z, self.place // self.z)


def check_ranks(what: str, grid: Grid, stages: int, ranks: int) -> None:
    """Check that there are as many ranks as ``grid`` has, in each of ``stages`` stages of a pipeline.

    Raises:
        ValueError: There are others; ``what`` asked, and a grid that fits is named.
    """
    wanted = stages * grid.world_size
    if ranks == wanted:
        return
    instead = "another grid or number of stages"
    if stages == 1:
        cubes = (other for other in Grid.all(ranks) if other.data == 1)
        instead = f"a grid such as {min(cubes, key=lambda other: (other.x + other.y + other.z, -other.x, -other.y))}"
    raise ValueError(
        f"{what}: grid {grid.in_stages(stages)} has {wanted} ranks, but {ranks} were started; start {wanted}, or use"
        f" {instead}"
    )


def check_experts(owner: str, grid: Grid, experts: object) -> None:
    """Refuse a number of ranks over which a grid cannot spread experts.

    Raises:
        ValueError: Names it, and what would work.
    """
    fitting = [
        n for n in range(1, grid.z * grid.data + 1) if grid.z % n == 0 or (grid.z * grid.data) % n == n % grid.z == 0
    ]
    if type(experts) is not int or experts not in fitting:
        raise ValueError(
            f"{owner}: experts={experts!r} ranks do not divide z={grid.z} of grid {grid}, nor are they all of z and a"
            f" part of data={grid.data}; use one of {', '.join(map(str, fitting))}"
        )


def checked_axis(axis: str) -> str:
    if axis not in AXES:
        raise ValueError(f"{axis!r} is not an axis; use one of {', '.join(AXES)}")
    return axis


def _divisors(number: int) -> list[int]:
    whole_number("world_size", number, least=1)
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]
