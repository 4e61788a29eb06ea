"""The 2.5D algorithm (Solomonik and Demmel, 2011) on a q x q x d grid: d copies of Cannon, each with some of its steps.

    x = y = q, z = d; block (i, j) of A, B and C lies at x = i, y = j, z = 0

    forward    A and B to every layer, along z;  layer l does steps l q/d .. (l+1) q/d - 1 of Cannon's q;
               C = sum of the layers' C, reduced along z to layer 0
    backward   A, B and dC to every layer;  each does its share of Cannon's backward;  dA and dB reduced to layer 0

d = 1 is Cannon. Copies cost memory (d times A and B while it multiplies) and save shifts: a layer makes q/d - 1.
Where d does not divide q, the first layers do one step more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from axo.grid import Coords, Grid
from axo.matmul.algorithm import (
    BACKWARD,
    FORWARD,
    Algorithm,
    Layout,
    Shape,
    Transfer,
    chunk,
    dropped,
    part,
    start_broadcast,
    whole_elements,
)

from . import cannon

if TYPE_CHECKING:
    from torch import Tensor

    from axo.comm.connect import Communicators


class Solomonik(Algorithm):
    name = "solomonik"
    a = b = c = Layout(rows=(("x",),), columns=(("y",),), only={"z": 0})

    def check(self, grid: Grid) -> None:
        if grid.x != grid.y:
            raise self.refuse(grid, "x = y = q, and z as the number of copies, such as 2x2x2x1")

    def forward(self, comms: Communicators, a: Tensor, b: Tensor, shape: Shape) -> Tensor:
        a, b = self._copies(comms, shape, A=a, B=b)
        total = cannon.multiply(comms, a, b, shape, *_share(comms.x.size, comms.z.size, comms.z.rank)).to(a.dtype)
        return self._at_layer_0(comms, total)

    def backward(
        self, comms: Communicators, a: Tensor, b: Tensor, grad_c: Tensor, shape: Shape
    ) -> tuple[Tensor, Tensor]:
        a, b, grad_c = self._copies(comms, shape, A=a, B=b, C=grad_c)
        share = _share(comms.x.size, comms.z.size, comms.z.rank)
        grad_a, grad_b = cannon.gradients(comms, a, b, grad_c, shape, *share)
        return self._at_layer_0(comms, grad_a.to(a.dtype)), self._at_layer_0(comms, grad_b.to(b.dtype))

    def cost(self, grid: Grid, shape: Shape) -> list[Transfer]:
        q, d = grid.x, grid.z
        in_a, in_b, in_c = whole_elements(shape)
        blocks, there = q * q, d - 1
        over_z = [
            (FORWARD, "broadcast", 2, in_a + in_b),
            (FORWARD, "reduce", 1, in_c),
            (BACKWARD, "broadcast", 3, in_a + in_b + in_c),
            (BACKWARD, "reduce", 2, in_a + in_b),
        ]
        depth = [
            Transfer(phase, op, "z", n * blocks, n * blocks * there, elements * there)
            for phase, op, n, elements in over_z
        ]
        return dropped([*depth, *cannon.rings(q, shape, [_share(q, d, layer) for layer in range(d)])])

    def _copies(self, comms: Communicators, shape: Shape, **parts: Tensor) -> list[Tensor]:
        """Each layer's copies of the parts that layer 0 holds."""
        works = []
        at = Coords(comms.x.rank, comms.y.rank, 0, 0)
        for matrix, mine in parts.items():
            rows, columns = self.a.slices(comms.grid, at, shape.of(matrix))
            works.append(start_broadcast(comms.z, mine, 0, rows.stop - rows.start, columns.stop - columns.start))
        return [work.wait() for work in works]

    @staticmethod
    def _at_layer_0(comms: Communicators, block: Tensor) -> Tensor:
        total = comms.z.reduce(block, 0)
        return total if comms.z.rank == 0 else block.new_empty(0, 0)


def _share(q: int, d: int, layer: int) -> tuple[int, int]:
    """The steps of one layer: first, and one past the last."""
    first = min(q, layer * chunk(q, d))
    return first, first + part(q, d, layer)
