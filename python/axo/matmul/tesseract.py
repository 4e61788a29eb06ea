"""Tesseract (Wang et al., 2021) on a q x q x d grid: d layers of SUMMA, each with its own rows of A and all of B.

    x = y = q, z = d; A and C in q d x q blocks, block (h = i + k q, j) at x = i, y = j, z = k
                      B in q x q blocks, block (i, j) at x = i, y = j and at every z

    forward    each layer k multiplies its rows by SUMMA: no message leaves a layer         (Algorithm 3)
    backward   each layer by SUMMA; then dB = sum of the layers' dB, all-reduced along z    (section 3.1)

Without that last sum the copies of B drift apart: each layer has seen its own rows only. A product moves
m k (q - 1) + k n d (q - 1) elements forward, and a rank holds m k / p + k n d / p + m n / p (equation 8). The paper
asks for d <= q; a larger depth works, but gains nothing over more data ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from axo.grid import Grid
from axo.matmul.algorithm import BACKWARD, Layout, Shape, Transfer, dropped, whole_elements
from axo.matmul.summa import Summa

if TYPE_CHECKING:
    from torch import Tensor

    from axo.comm.connect import Communicators


class Tesseract(Summa):
    name = "tesseract"
    a = c = Layout(rows=(("z", "x"),), columns=(("y",),))
    b = Layout(rows=(("x",),), columns=(("y",),))

    def check(self, grid: Grid) -> None:
        if grid.x != grid.y:
            raise self.refuse(grid, "x = y = q, and z as its depth, such as 2x2x2x1")

    def backward(
        self, comms: Communicators, a: Tensor, b: Tensor, grad_c: Tensor, shape: Shape
    ) -> tuple[Tensor, Tensor]:
        grad_a, grad_b = super().backward(comms, a, b, grad_c, shape)
        return grad_a, comms.z.all_reduce(grad_b)

    def cost(self, grid: Grid, shape: Shape) -> list[Transfer]:
        q, d = grid.x, grid.z
        _, in_b, _ = whole_elements(shape)
        depth = Transfer(BACKWARD, "all_reduce", "z", q * q, 2 * (d - 1) * q * q, 2 * (d - 1) * in_b)
        return dropped([*super().cost(grid, shape), depth])
