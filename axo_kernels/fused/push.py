"""Sums over ranks whose memory each other's kernels reach: nothing but kernels, and no collective.

    product    tiles of rank g's rows are stored into g's memory, ``parts[rank]``; the last of them sets g's flag there
    sum        rank g waits for the flags of all, and adds their parts in the order of ranks, in fp32, rounded once
    gather     of an all-reduce: the sum is stored into every rank's memory, ``sums[g]``, and flags are set there; each
               copies the sums of all as they come

So a reduce-scatter is three launches with the epoch's, an all-reduce four, on the current stream and whatever the
number of ranks; rows travel while the tiles behind them are computed. Bytes are those of a ring.

When room may be written again: a reduce-scatter's parts have two slots, taken by the epoch's parity on the device, so
that replays of a captured graph take them in turn too. Who pushes epoch e has seen the flags of all of e - 1, which
each sets behind its sum of e - 2. An all-reduce has one: it ends with every rank's sums of
its epoch, so all have read their parts then; and a sum follows everybody's product, which follows their copies of the
epoch before. A model visits every order of this (tests/kernels/fused/push_model.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from axo_kernels import device as devices
from axo_kernels.comm.communicator import FusedCommunicator
from axo_kernels.fused.chunks import ChunkOrder, push_order
from axo_kernels.fused.segments import SegmentedProduct, programs_left
from axo_kernels.fused.workspace import Workspace, table_width
from axo_kernels.gemm.layout import Product
from axo_kernels.gemm.tiles import Config

_ALIGNED = 256  # bytes, of each part: loads and stores of 16 bytes a thread
_BLOCK = 2048  # elements that a program adds at once


class PushWorkspace(Workspace):
    """Room and flags in memory that the ranks reach, and tables of its addresses.

        flags   int32[2 * size]                   of each rank's part; of an all-reduce, then of each rank's sum
        parts   [slots, size, stride]             of this rank's rows, one from each rank
        sums    [size, stride]                    of an all-reduce: each rank's rows

    Attributes:
        block: Rows of a rank; the last ranks have fewer, or none.
        stride: Elements from one part to the next.
        owners: Where this rank's parts go, by the epoch's parity, and their flags: addresses, int64 ``[2, 2, width of
            the table of segments]``.
        copies: Of an all-reduce, where this rank's sum goes, and its flags: addresses, int64 ``[2, size]``.
    """

    def __init__(
        self, name: str, order: ChunkOrder, product: Product, comm: FusedCommunicator, sums: bool, device: torch.device
    ) -> None:
        super().__init__(name, order, device)
        size, rank, item = comm.size, comm.rank, product.dtype.itemsize
        self.block = -(-product.m // size)
        room = -(-self.block * product.n * item // _ALIGNED) * _ALIGNED
        first = -(-8 * size // _ALIGNED) * _ALIGNED  # behind the flags
        self.stride, slots = room // item, 1 if sums else 2
        self._memory = comm.peer_memory(first + (slots + sums) * size * room, device)  # mapped while peers may write
        self.flags = self._memory.mine[: 8 * size].view(torch.int32)
        rooms = self._memory.mine[first:].view(product.dtype).view(-1, size, self.stride)
        self.parts, self.sums = rooms[:slots], rooms[slots:]

        def addresses(slot: int, flag: int, width: int) -> list[list[int]]:
            """Of this rank's room in a slot of every rank's memory, and of its flag there."""
            offsets = first + (slot * size + rank) * room, 4 * flag
            rows = [[base + offset for base in self._memory.bases][:width] for offset in offsets]
            return [row + [0] * (width - len(row)) for row in rows]

        owners = [addresses(slot, rank, table_width(order)) for slot in (0, slots - 1)]
        self.owners = torch.tensor(owners, dtype=torch.int64).to(device)
        self.copies = torch.tensor(addresses(slots, size + rank, size), dtype=torch.int64).to(device)

    def _awaited(self, number: int) -> str:
        return f"the {'sum' if number >= self.order.size else 'part'} of rank {number % self.order.size}"


def push(
    operation: str,
    product: Product,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    comm: FusedCommunicator,
    config: Config | None = None,
    bias: torch.Tensor | None = None,
) -> Iterator[None]:
    """Sum A B over the ranks, a step at a time: the product, the sum, and the gather of an all-reduce.

    Args:
        operation: ``"matmul_all_reduce"`` or ``"matmul_reduce_scatter"``.
        out: ``(m, n)``, or of a reduce-scatter this rank's rows of it; contiguous.
        bias: ``(n,)``, of one rank alone.
    """
    if not product.m * product.n:
        return
    device, size, sums = a.device, comm.size, operation == "matmul_all_reduce"
    order = push_order(product.m, comm.rank, size)
    workspace = comm.workspaces.get(
        operation,
        order,
        ("push", product),
        device,
        lambda: PushWorkspace(operation, order, product, comm, sums, device),
    )
    assert isinstance(workspace, PushWorkspace)
    kernels, units = devices.signal_kernels(), programs_left(comm, device)
    assert kernels is not None
    elements = workspace.block * product.n

    def add(parts: torch.Tensor, into: torch.Tensor, total: int, first_flag: int, count: int, copies: int) -> None:
        """Launch the kernel that adds ``count`` parts of each block; ``total``: elements of all blocks."""
        blocks = -(-total // elements)
        if blocks:  # else this rank has no rows
            kernels.sum_kernel[(max(1, min(-(-elements // _BLOCK), units // blocks)), blocks)](
                parts, into, workspace.flags, workspace.counters, workspace.epoch, workspace.status,
                total, elements, workspace.stride, parts.stride(0) if len(parts) > 1 else 0, first_flag, comm.spins,
                1.0 if sums else comm.scale,
                PARTS=count, COPIES=copies, BLOCK=_BLOCK, num_warps=8,
            )  # fmt: skip

    workspace.advance()
    start, stop = order.bounds[comm.rank]
    like = workspace.parts[0, 0, :elements].view(workspace.block, product.n)
    SegmentedProduct(product, workspace, comm, bias, config).launch(a, b, like, owners=workspace.owners)
    yield
    add(workspace.parts, workspace.copies if sums else out, (stop - start) * product.n, 0, size, size if sums else 0)
    if sums:
        yield
        add(workspace.sums, out, product.m * product.n, size, 1, 0)
