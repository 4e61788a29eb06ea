"""The 2.5D algorithm (Solomonik and Demmel, 2011) on a q x q x d grid: d copies of Cannon, each with some of its steps.

    x = y = q, z = d; block (i, j) of A, B and C lies at x = i, y = j, z = 0

    forward    A and B to every layer, along z;  layer l does steps l q/d .. (l+1) q/d - 1 of Cannon's q;
               C = sum of the layers' C, reduced along z to layer 0
    backward   A, B and dC to every layer;  each does its share of Cannon's backward;  dA and dB reduced to layer 0

A layer, by Cannon (1969): blocks go round rings, one step a product.

    forward    skew    A[i, j] goes i places back along y, B[i, j] goes j places back along x: rank (i, j) then
                       holds A[i, s] and B[s, j] with s = i + j, plus the layer's first step
               steps   C[i, j] += A[i, s] B[s, j]; A one place back along y, B along x: s grows by one
    backward   A and B go round as before. With them go the sums dA[i, s] (along y) and dB[s, j] (along x), to which
               rank (i, j) adds dC[i, j] B[s, j]^T and A[i, s]^T dC[i, j]; at the end they go home

All indices modulo q. The next blocks travel while the present ones are multiplied; sums that go round cannot, since
they are what is being computed. Copies cost memory (d times A and B while it multiplies) and save shifts: a layer makes
q/d - 1. Where d does not divide q, the first layers do one step more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from axo.grid import Coords, Grid
from axo.matmul.algorithm import (
    BACKWARD,
    FORWARD,
    Algorithm,
    Layout,
    Shape,
    Transfer,
    accumulator,
    add_product,
    chunk,
    dropped,
    part,
    start_broadcast,
    whole_elements,
)

if TYPE_CHECKING:
    from torch import Tensor

    from axo.comm.communicator import Communicator
    from axo.comm.connect import Communicators


class Solomonik(Algorithm):
    name = "solomonik"
    a = b = c = Layout(rows=(("x",),), columns=(("y",),), only={"z": 0})

    def check(self, grid: Grid) -> None:
        if grid.x != grid.y:
            raise self.refuse(grid, "x = y = q, and z as the number of copies, such as 2x2x2x1")

    def forward(self, comms: Communicators, a: Tensor, b: Tensor, shape: Shape) -> Tensor:
        a, b = self._copies(comms, shape, A=a, B=b)
        total = multiply(comms, a, b, shape, *_share(comms.x.size, comms.z.size, comms.z.rank)).to(a.dtype)
        return self._at_layer_0(comms, total)

    def backward(
        self, comms: Communicators, a: Tensor, b: Tensor, grad_c: Tensor, shape: Shape
    ) -> tuple[Tensor, Tensor]:
        a, b, grad_c = self._copies(comms, shape, A=a, B=b, C=grad_c)
        share = _share(comms.x.size, comms.z.size, comms.z.rank)
        grad_a, grad_b = gradients(comms, a, b, grad_c, shape, *share)
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
        return dropped([*depth, *rings(q, shape, [_share(q, d, layer) for layer in range(d)])])

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


def multiply(comms: Communicators, a: Tensor, b: Tensor, shape: Shape, first: int, last: int) -> Tensor:
    """The sum of steps ``first`` to ``last - 1``, in fp32 at least."""
    total = accumulator(a, a.shape[0], b.shape[1])
    for a_s, b_s in _travel(comms, a, b, shape, first, last):
        add_product(total, a_s, b_s)
    return total


def gradients(
    comms: Communicators, a: Tensor, b: Tensor, grad_c: Tensor, shape: Shape, first: int, last: int
) -> tuple[Tensor, Tensor]:
    """What steps ``first`` to ``last - 1`` add to dA and dB, at their owners, in fp32 at least."""
    i, j, q = comms.x.rank, comms.y.rank, comms.x.size
    width = [part(shape.k, q, s) for s in range(q)]
    if first >= last:
        return accumulator(a, a.shape[0], width[j]), accumulator(b, width[i], b.shape[1])
    grad_a = accumulator(a, a.shape[0], width[(i + j + first) % q])
    grad_b = accumulator(b, width[(i + j + first) % q], b.shape[1])
    for step, (a_s, b_s) in enumerate(_travel(comms, a, b, shape, first, last), first):
        if step > first:
            s = (i + j + step) % q
            works = (
                _start_shift(comms.y, grad_a, 1, (a.shape[0], width[s])),
                _start_shift(comms.x, grad_b, 1, (width[s], b.shape[1])),
            )
            grad_a, grad_b = (work() for work in works)
        add_product(grad_a, grad_c, b_s.T)
        add_product(grad_b, a_s.T, grad_c)
    # rank (i, j) holds the sums of s = i + j + last - 1, whose home is y = s, x = s
    home_a = _start_shift(comms.y, grad_a, -(i + last - 1), (a.shape[0], width[j]))
    home_b = _start_shift(comms.x, grad_b, -(j + last - 1), (width[i], b.shape[1]))
    return home_a(), home_b()


def _travel(
    comms: Communicators, a: Tensor, b: Tensor, shape: Shape, first: int, last: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield A[i, s] and B[s, j] with s = i + j + step for each step; the next ones travel meanwhile."""
    if first >= last:
        return
    i, j, q = comms.x.rank, comms.y.rank, comms.x.size
    width = [part(shape.k, q, s) for s in range(q)]

    def fetch(a: Tensor, b: Tensor, back_a: int, back_b: int, step: int) -> tuple:
        s = (i + j + step) % q
        return (
            _start_shift(comms.y, a, back_a, (a.shape[0], width[s])),
            _start_shift(comms.x, b, back_b, (width[s], b.shape[1])),
        )

    pending = fetch(a, b, i + first, j + first, first)
    for step in range(first, last):
        a, b = (work() for work in pending)
        if step + 1 < last:
            pending = fetch(a, b, 1, 1, step + 1)
        yield a, b


def _start_shift(comm: Communicator, block: Tensor, back: int, size: tuple[int, int]) -> Callable[[], Tensor]:
    """Start to send ``block`` ``back`` places back along the ring; calling the result gives the block that comes."""
    q, back = comm.size, back % comm.size
    if back == 0:
        return lambda: block
    arriving = block.new_empty(size)
    sending = comm.send(block.contiguous(), (comm.rank - back) % q, async_op=True)
    receiving = comm.recv(arriving, (comm.rank + back) % q, async_op=True)

    def finish() -> Tensor:
        receiving.wait()
        sending.wait()
        return arriving

    return finish


def rings(q: int, shape: Shape, shares: list[tuple[int, int]]) -> list[Transfer]:
    """Count the sends of layers that do steps ``first`` to ``last - 1`` each."""
    in_a, in_b, _ = whole_elements(shape)
    totals = {(phase, axis): [0, 0] for phase in (FORWARD, BACKWARD) for axis in ("y", "x")}

    def add(phase: str, axis: str, offset: int, shifts: int) -> None:
        """One journey of all blocks of A (y) or B (x): a skew by row (or column) + ``offset``, and ``shifts`` steps."""
        whole, lines, columns = (in_a, shape.m, shape.k) if axis == "y" else (in_b, shape.n, shape.k)
        stays = part(lines, q, -offset % q) * columns  # the line whose skew is a multiple of q
        total = totals[phase, axis]
        total[0] += q * (q - 1) + shifts * q * q
        total[1] += whole - stays + shifts * whole

    for first, last in shares:
        if first < last:
            for axis in ("y", "x"):
                add(FORWARD, axis, first, last - first - 1)
                add(BACKWARD, axis, first, last - first - 1)  # A and B again
                add(BACKWARD, axis, last - 1, last - first - 1)  # the sums, which go home at the end
    return dropped(Transfer(phase, "send", axis, n, n, moved) for (phase, axis), (n, moved) in totals.items())
