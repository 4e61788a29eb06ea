"""Sums over ranks whose memory each other's kernels reach: nothing but kernels, and no collective.

    product    tiles of rank g's rows are stored into g's memory, ``parts[rank]``; the last of them sets g's flag there
    sum        rank g waits for the flags of all, and adds their parts in the order of ranks, in fp32, rounded once
    gather     of an all-reduce: the sum is stored into every rank's memory, ``sums[g]``, and flags are set there; each
               copies the sums of all as they come

So a reduce-scatter is two launches, an all-reduce three, on the current stream and whatever the number of ranks; rows
travel while the tiles behind them are computed. Bytes are those of a ring.

All sums of a line lie in one room (workspace.py), which has two halves, taken by the epoch's parity on the device, so
that replays of a captured graph take them in turn too. Who pushes epoch e has ended e - 1, which every rank had begun,
so that every rank has ended e - 2, the last to use that half: whatever the two were, and however large. A sum that is
still under way when the next one begins is ended first, on all ranks alike. A model visits every order of this
(tests/kernels/fused/push_model.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from axo_kernels import device as devices
from axo_kernels.comm.communicator import FusedCommunicator
from axo_kernels.fused.chunks import ChunkOrder, push_order
from axo_kernels.fused.segments import SegmentedProduct
from axo_kernels.fused.workspace import PeerRoom, Workspace, aligned, table_width
from axo_kernels.gemm.layout import Product
from axo_kernels.gemm.tiles import Config

_BLOCK = 2048  # elements that a program adds at once


class PushWorkspace(Workspace):
    """The order of a sum at one shape, and tables of addresses in the room of its line.

        parts   [2, size, block * n]   of this rank's rows, one from each rank, by the epoch's parity; each part on 256
        sums    [2, size, block * n]   of an all-reduce: each rank's rows

    Attributes:
        owners: Where this rank's parts go, by the epoch's parity, and their flags: addresses, int64 ``[2, 2, width of
            the table of segments]``.
        copies: Of an all-reduce, where this rank's sum goes, and its flags: addresses, int64 ``[2, 2, size]``.
    """

    def __init__(
        self, name: str, order: ChunkOrder, product: Product, rank: int, room: PeerRoom, device: torch.device
    ) -> None:
        super().__init__(name, order, device)
        self.flags, self.counters, self.epoch = room.flags, room.counters, room.epoch
        size, part = order.size, part_bytes(product, order.size)
        halves = room.halves[:, : room.capacity // part * part].view(product.dtype)
        halves = halves.view(2, -1, part // product.dtype.itemsize)
        self.parts, self.sums = halves[:, :size], halves[:, size : 2 * size]

        def addresses(place: int, flag: int, width: int) -> torch.Tensor:
            """Of this rank's part at a place of every rank's halves, and of its flag there."""
            offsets = [(room.offset + half * room.capacity + (place + rank) * part, 4 * flag) for half in (0, 1)]
            rows = [[[base + offset for base in room.bases] for offset in each] for each in offsets]
            table = torch.tensor(rows, dtype=torch.int64)
            return torch.nn.functional.pad(table, (0, width - size)).to(device)

        self.owners = addresses(0, rank, table_width(order))
        self.copies = addresses(size, size + rank, size)

    def _awaited(self, number: int) -> str:
        return f"the {'sum' if number >= self.order.size else 'part'} of rank {number % self.order.size}"


def part_bytes(product: Product, size: int) -> int:
    """Of one rank's rows of a product: the last ranks have fewer, or none."""
    return aligned(-(-product.m // size) * product.n * product.dtype.itemsize)


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

    The next push of the line launches what is left of this one. All are on one stream.

    Args:
        operation: ``"matmul_all_reduce"`` or ``"matmul_reduce_scatter"``.
        out: ``(m, n)``, or of a reduce-scatter this rank's rows of it; contiguous.
        bias: ``(n,)``, of one rank alone.
    """
    if not product.m * product.n:
        return iter(())
    device, size, sums = a.device, comm.size, operation == "matmul_all_reduce"
    room = comm.peer_room((2 if sums else 1) * size * part_bytes(product, size), device)
    room.settle()
    order = push_order(product.m, comm.rank, size)
    workspace = room.workspaces.get(
        operation, order, product, device, lambda: PushWorkspace(operation, order, product, comm.rank, room, device)
    )
    assert isinstance(workspace, PushWorkspace)
    kernels, units = devices.signal_kernels(), devices.target_of(device).units
    assert kernels is not None
    if device.type == "cuda":  # what waits leaves room to other communication, but is no collective's peer
        units = max(1, units - comm.reserved_units)
    block = -(-product.m // size)
    elements = block * product.n

    def add(parts: torch.Tensor, into: torch.Tensor, total: int, first_flag: int, count: int, copies: int) -> None:
        """Launch the kernel that adds ``count`` parts of each block; ``total``: elements of all blocks."""
        blocks = -(-total // elements)
        if blocks:  # else this rank has no rows
            kernels.sum_kernel[(max(1, min(-(-elements // _BLOCK), units // blocks)), blocks)](
                parts, into, workspace.flags, workspace.counters, *workspace.epoch.parts, workspace.status,
                total, elements, parts.stride(1), parts.stride(0), first_flag, comm.spins, 1.0 if sums else comm.scale,
                PARTS=count, COPIES=copies, BLOCK=_BLOCK, num_warps=8,
            )  # fmt: skip

    def launches() -> Iterator[None]:
        workspace.advance()
        start, stop = workspace.order.bounds[comm.rank]
        like = workspace.parts[0, 0, :elements].view(block, product.n)
        SegmentedProduct(product, workspace, comm, bias, config).launch(a, b, like, owners=workspace.owners)
        yield
        add(
            workspace.parts, workspace.copies if sums else out, (stop - start) * product.n, 0, size, size if sums else 0
        )
        if sums:
            yield
            add(workspace.sums, out, product.m * product.n, size, 1, 0)

    room.under_way = launches()
    return room.under_way
