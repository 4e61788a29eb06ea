"""Megatron-LM's product (Shoeybi et al., 2020) on x ranks: the weight cut by columns, or by rows; activations whole.

    column     A whole;  B [k, n over x];  C [m, n over x]
               forward    nothing is sent
               backward   dA = all-reduce of dC B^T
    row        A [m, k over x];  B [k over x, n];  C whole
               forward    C = all-reduce of A B
               backward   nothing is sent

A transformer's MLP is a column product and then a row product: one all-reduce each way. A and C of the pair are held
whole by every rank, which is what Tesseract's memory formula (equation 10) charges it for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from axo.grid import Grid
from axo.matmul.algorithm import BACKWARD, FORWARD, Algorithm, Layout, Shape, Transfer, dropped

if TYPE_CHECKING:
    from torch import Tensor

    from axo.comm.connect import Communicators


class MegatronColumn(Algorithm):
    name = "megatron"
    a = Layout()
    b = c = Layout(columns=(("x",),))

    def check(self, grid: Grid) -> None:
        if grid.y != 1 or grid.z != 1:
            raise self.refuse(grid, "y = z = 1, such as 4x1x1x1")

    def forward(self, comms: Communicators, a: Tensor, b: Tensor, shape: Shape) -> Tensor:
        return a @ b

    def backward(
        self, comms: Communicators, a: Tensor, b: Tensor, grad_c: Tensor, shape: Shape
    ) -> tuple[Tensor, Tensor]:
        grad_a = grad_c @ b.T
        work = comms.x.all_reduce(grad_a, async_op=True)  # behind dB's product
        grad_b = a.T @ grad_c
        return work.wait(), grad_b

    def cost(self, grid: Grid, shape: Shape) -> list[Transfer]:
        return _all_reduce(grid, BACKWARD, shape.m * shape.k)


class MegatronRow(MegatronColumn):
    name = "megatron-row"
    a = Layout(columns=(("x",),))
    b = Layout(rows=(("x",),))
    c = Layout()

    def forward(self, comms: Communicators, a: Tensor, b: Tensor, shape: Shape) -> Tensor:
        return comms.x.all_reduce(a @ b)

    def backward(
        self, comms: Communicators, a: Tensor, b: Tensor, grad_c: Tensor, shape: Shape
    ) -> tuple[Tensor, Tensor]:
        return grad_c @ b.T, a.T @ grad_c

    def cost(self, grid: Grid, shape: Shape) -> list[Transfer]:
        return _all_reduce(grid, FORWARD, shape.m * shape.n)


def _all_reduce(grid: Grid, phase: str, elements: int) -> list[Transfer]:
    there = 2 * (grid.x - 1)
    return dropped([Transfer(phase, "all_reduce", "x", 1, there, there * elements)])
