"""Cannon's algorithm (1969) on a q x q grid: the 2.5D algorithm (``solomonik.py``) with one layer.

A product sends 2 q^3 - 2 q blocks forward, with the skew.
"""

from __future__ import annotations

from axo.grid import Grid

from .solomonik import Solomonik


class Cannon(Solomonik):
    name = "cannon"

    def check(self, grid: Grid) -> None:
        if grid.x != grid.y or grid.z != 1:
            raise self.refuse(grid, "x = y and z = 1, such as 2x2x1x1")
