"""SUMMA (van de Geijn and Watts, 1995) on a q x q grid: broadcast a column of A and a row of B, q times.

    x = y = q; block (i, j) of A, B and C lies at x = i, y = j

    forward    for t in 0 .. q-1:   A[i, t] to all of row i (along y);  B[t, j] to all of column j (along x)
                                    C[i, j] += A[i, t] B[t, j]
    backward   for t in 0 .. q-1:   B[t, j] along x;  dA[i, t] = sum over j of dC[i, j] B[t, j]^T, reduced along y to t
                                    A[i, t] along y;  dB[t, j] = sum over i of A[i, t]^T dC[i, j], reduced along x to t

The blocks of step t+1 travel while step t multiplies; reductions are awaited at the end. Each product moves
(q - 1) (m k + k n) elements forward. Optimus (Xu et al., 2021) trains transformers with it. Tesseract is this with a
depth (``axo.matmul.tesseract``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from axo.grid import Grid
from axo.matmul.algorithm import (
    BACKWARD,
    FORWARD,
    Algorithm,
    Layout,
    Shape,
    Transfer,
    accumulator,
    add_product,
    ahead,
    dropped,
    part,
    start_broadcast,
    whole_elements,
)

if TYPE_CHECKING:
    from torch import Tensor

    from axo.comm.connect import Communicators
    from axo.comm.work import Work


class Summa(Algorithm):
    name = "summa"
    a = b = c = Layout(rows=(("x",),), columns=(("y",),))

    def check(self, grid: Grid) -> None:
        if grid.x != grid.y or grid.z != 1:
            raise self.refuse(grid, "x = y and z = 1, such as 2x2x1x1")

    def forward(self, comms: Communicators, a: Tensor, b: Tensor, shape: Shape) -> Tensor:
        total = accumulator(a, a.shape[0], b.shape[1])
        for _, (a_t, b_t) in _steps(comms, a, b, shape):
            add_product(total, a_t, b_t)
        return total.to(a.dtype)

    def backward(
        self, comms: Communicators, a: Tensor, b: Tensor, grad_c: Tensor, shape: Shape
    ) -> tuple[Tensor, Tensor]:
        sums = []
        for t, (a_t, b_t) in _steps(comms, a, b, shape):
            grad_a, grad_b = grad_c @ b_t.T, a_t.T @ grad_c
            sums.append((comms.y.reduce(grad_a, t, async_op=True), comms.x.reduce(grad_b, t, async_op=True)))
        done = [(left.wait(), right.wait()) for left, right in sums]
        return done[comms.y.rank][0], done[comms.x.rank][1]

    def cost(self, grid: Grid, shape: Shape) -> list[Transfer]:
        q, d = grid.x, grid.z
        in_a, in_b, _ = whole_elements(shape)
        calls, deliveries = q * q * d, q * q * d * (q - 1)  # of each matrix: q d groups of ranks, q blocks each
        moved_a, moved_b = (q - 1) * in_a, (q - 1) * in_b * d
        return dropped(
            Transfer(phase, op, axis, calls, deliveries, moved)
            for phase, op in ((FORWARD, "broadcast"), (BACKWARD, "broadcast"), (BACKWARD, "reduce"))
            for axis, moved in (("y", moved_a), ("x", moved_b))
        )


def _steps(comms: Communicators, a: Tensor, b: Tensor, shape: Shape) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Yield each step t with A[i, t] and B[t, j]; those of the next step travel meanwhile."""

    def start(t: int) -> tuple[Work, Work]:
        inner = part(shape.k, comms.x.size, t)
        return start_broadcast(comms.y, a, t, a.shape[0], inner), start_broadcast(comms.x, b, t, inner, b.shape[1])

    return ahead(range(comms.x.size), start)
