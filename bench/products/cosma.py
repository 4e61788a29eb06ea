"""COSMA's product (Kwasniewski et al., 2019): any grid, and of all grids the one that moves least for the shape.

    A, B and C as in Agarwal's algorithm (``agarwal.py``), on a grid x, y, z of any sizes

    each rank multiplies one cuboid of the m k n scalar products: [m/z, k/y] by [k/y, n/x]
    gather what the cuboid's two faces of A and B lack, multiply, scatter the sums of its face of C

Where memory is no limit, the least volume is that of the cuboids nearest to cubes: split a wide weight over x, a long
sum over y, many rows over z. The recursion of CARMA (Demmel et al., 2013), which halves the longest side each time,
ends there for ranks that are powers of two. A grid with x = y = z is Agarwal's; an axis of one rank sends nothing.

Not here: rounds with smaller buffers where memory is short; which grid is best is the caller's search over ``cost()``.
"""

from __future__ import annotations

from axo.grid import Grid

from .agarwal import Agarwal


class Cosma(Agarwal):
    name = "cosma"

    def check(self, grid: Grid) -> None:
        """Every grid will do."""
