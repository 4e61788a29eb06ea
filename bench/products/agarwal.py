"""The 3D algorithm of Agarwal et al. (1995) on a grid x, y, z (q x q x q in the paper): gather, multiply, scatter.

    A [m over z, k over y], its rows cut again over x;  B [k over y, n over x], its rows cut again over z
    C [m over z, n over x], its rows cut again over y

    forward    all-gather A along x and B along z;  C = reduce-scatter along y of A B
    backward   all-gather dC along y, A along x, B along z;  dA = reduce-scatter along x of dC B^T;
               dB = reduce-scatter along z of A^T dC

Nothing is held twice: memory is (m k + k n + m n) / p. AxoNN's algorithm keeps A whole along x and sums C whole along y
instead, which saves the gathers of activations. Shards are padded to the longest where rows do not divide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from axo.grid import Grid
from axo.matmul.algorithm import BACKWARD, FORWARD, Algorithm, Layout, Shape, Transfer, chunk, dropped, part
from axo.matmul.axonn import scatter, start_gather

if TYPE_CHECKING:
    from torch import Tensor

    from axo.comm.connect import Communicators


class Agarwal(Algorithm):
    name = "agarwal"
    a = Layout(rows=(("z",), ("x",)), columns=(("y",),))
    b = Layout(rows=(("y",), ("z",)), columns=(("x",),))
    c = Layout(rows=(("z",), ("y",)), columns=(("x",),))

    def check(self, grid: Grid) -> None:
        if not grid.x == grid.y == grid.z:
            raise self.refuse(grid, "x = y = z, such as 2x2x2x1")

    def forward(self, comms: Communicators, a: Tensor, b: Tensor, shape: Shape) -> Tensor:
        rows, inner = part(shape.m, comms.z.size, comms.z.rank), part(shape.k, comms.y.size, comms.y.rank)
        gathered_a, gathered_b = start_gather(comms.x, a, rows), start_gather(comms.z, b, inner)
        return scatter(comms.y, gathered_a() @ gathered_b())

    def backward(
        self, comms: Communicators, a: Tensor, b: Tensor, grad_c: Tensor, shape: Shape
    ) -> tuple[Tensor, Tensor]:
        rows, inner = part(shape.m, comms.z.size, comms.z.rank), part(shape.k, comms.y.size, comms.y.rank)
        gathered_c, gathered_b = start_gather(comms.y, grad_c, rows), start_gather(comms.z, b, inner)
        gathered_a = start_gather(comms.x, a, rows)  # travels while dA is computed
        whole_c = gathered_c()
        grad_a = scatter(comms.x, whole_c @ gathered_b().T)
        return grad_a, scatter(comms.z, gathered_a().T @ whole_c)

    def cost(self, grid: Grid, shape: Shape) -> list[Transfer]:
        moved = {"A": ("x", "z", "y"), "B": ("z", "y", "x"), "C": ("y", "z", "x")}  # cut again over, rows, columns over
        passes = [(FORWARD, "all_gather", "AB"), (FORWARD, "reduce_scatter", "C")]
        passes += [(BACKWARD, "all_gather", "CBA"), (BACKWARD, "reduce_scatter", "AB")]
        return dropped(
            self._collective(grid, shape.of(matrix), phase, op, *moved[matrix])
            for phase, op, matrices in passes
            for matrix in matrices
        )

    @staticmethod
    def _collective(
        grid: Grid, size: tuple[int, int], phase: str, op: str, axis: str, rows_over: str, columns_over: str
    ) -> Transfer:
        g, groups = grid.size(axis), grid.size(rows_over) * grid.size(columns_over)
        padded = sum(g * chunk(part(size[0], grid.size(rows_over), i), g) for i in range(grid.size(rows_over)))
        return Transfer(phase, op, axis, groups, groups * g * (g - 1), (g - 1) * padded * size[1])
