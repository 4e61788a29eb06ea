"""AxoNN's algorithm on a grid x, y, z (Algorithm 1 of both AxoNN papers): the one that Axo's layers use.

    A [m over z, k over y], the same along x;  B [k over y, n over x], its columns cut again over z
    C [m over z, n over x], the same along y

    forward    all-gather B along z;  C = all-reduce along y of A B
    backward   dA = all-reduce along x of dC B^T;  dB = reduce-scatter along z of A^T dC

The layers (``axo.matmul.product``) run it with what training needs: overlap, a cache of gathered weights, buckets. This
is the bare product, to compare with the others. B is gathered as its transpose, whose rows lie one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from axo.grid import Grid
from axo.matmul.algorithm import BACKWARD, FORWARD, Algorithm, Layout, Shape, Transfer, chunk, dropped, part

if TYPE_CHECKING:
    from torch import Tensor

    from axo.comm.communicator import Communicator
    from axo.comm.connect import Communicators


class Axonn(Algorithm):
    name = "axonn"
    a = Layout(rows=(("z",),), columns=(("y",),))
    b = Layout(rows=(("y",),), columns=(("x",), ("z",)))
    c = Layout(rows=(("z",),), columns=(("x",),))

    def check(self, grid: Grid) -> None:
        """Every grid will do."""

    def forward(self, comms: Communicators, a: Tensor, b: Tensor, shape: Shape) -> Tensor:
        columns = part(shape.n, comms.x.size, comms.x.rank)
        return comms.y.all_reduce(a @ start_gather(comms.z, b.T, columns)().T)

    def backward(
        self, comms: Communicators, a: Tensor, b: Tensor, grad_c: Tensor, shape: Shape
    ) -> tuple[Tensor, Tensor]:
        columns = part(shape.n, comms.x.size, comms.x.rank)
        grad_a = grad_c @ start_gather(comms.z, b.T, columns)()
        work = comms.x.all_reduce(grad_a, async_op=True)  # behind dB's product
        grad_b = scatter(comms.z, grad_c.T @ a).T
        return work.wait(), grad_b

    def cost(self, grid: Grid, shape: Shape) -> list[Transfer]:
        x, y, z = grid.x, grid.y, grid.z
        padded = sum(z * chunk(part(shape.n, x, i), z) for i in range(x)) * shape.k  # B, shards as long as the longest
        weights = [
            Transfer(phase, op, "z", x * y, x * y * z * (z - 1), (z - 1) * padded)
            for phase, op in ((FORWARD, "all_gather"), (BACKWARD, "all_gather"), (BACKWARD, "reduce_scatter"))
        ]
        output = Transfer(FORWARD, "all_reduce", "y", x * z, x * z * 2 * (y - 1), 2 * (y - 1) * shape.m * shape.n)
        grad = Transfer(BACKWARD, "all_reduce", "x", y * z, y * z * 2 * (x - 1), 2 * (x - 1) * shape.m * shape.k)
        return dropped([*weights, output, grad])


def start_gather(comm: Communicator, shard: Tensor, rows: int) -> Callable[[], Tensor]:
    """Start to gather the shards of a block of ``rows`` rows; calling the result gives the block."""
    if comm.size == 1:
        return lambda: shard
    step = chunk(rows, comm.size)
    padded = shard.new_zeros(step, shard.shape[1])
    padded[: shard.shape[0]] = shard
    work = comm.all_gather(padded, async_op=True)
    return lambda: work.wait().reshape(comm.size * step, shard.shape[1])[:rows]


def scatter(comm: Communicator, block: Tensor) -> Tensor:
    """Sum ``block`` over the ranks and keep this rank's rows of it."""
    if comm.size == 1:
        return block
    rows = block.shape[0]
    step = chunk(rows, comm.size)
    padded = block.new_zeros(comm.size * step, block.shape[1])
    padded[:rows] = block
    return comm.reduce_scatter(padded).reshape(step, block.shape[1])[: part(rows, comm.size, comm.rank)]
