"""One kernel over all segments of a fused product, in their order, meeting the communication stream at the flags;
without Triton the same order, flags and stream with torch's products.

Who communicates, and what, is in strategies.py; which rows make a segment, in chunks.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from axo_kernels import device as devices
from axo_kernels.comm.communicator import FusedCommunicator
from axo_kernels.fused.chunks import NO_FLAG, ChunkOrder, Segment, tile_table
from axo_kernels.fused.workspace import Workspace
from axo_kernels.gemm.layout import Product, as_row_major, check_offsets
from axo_kernels.gemm.matmul import (
    describable,
    hints,
    launch_grouped,
    operand_descriptors,
    precision,
    uses_descriptors,
    vendor_matmul,
)
from axo_kernels.gemm.tiles import Config, cut_to_fit, default_config, shrink


@dataclass(frozen=True)
class SegmentedProduct:
    """A product that is computed segment by segment, without its tensors.

    Attributes:
        product: Layout, sizes and dtype.
        workspace: Its chunks and segments, and their flags.
        comm: Whose communication stream it meets at the flags.
        bias: ``(N,)``, or None.
        config: Tiles of the kernel; None takes the default.
    """

    product: Product
    workspace: Workspace
    comm: FusedCommunicator
    bias: torch.Tensor | None = None
    config: Config | None = None

    def produce(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, communicate: Callable[[], None]) -> None:
        """Compute the segments in order and set the flag of each chunk; ``communicate`` waits for them."""
        try:
            if devices.runs_triton(a.device):
                self.launch(a, b, out)
                communicate()  # the producer comes first in host order
                return
            communicate()
            for segment, last in with_last(self.workspace.order):
                rows = rows_of(a, self.product.layout, segment)
                vendor_matmul(rows, b, self.product.layout, out[segment.written], self.bias)
                if last:
                    self.workspace.write_on_host(segment.flag)
        except BaseException:
            self.comm.abandon()
            raise

    def consume(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, gather: str) -> None:
        """Compute the segments in order, each after the flag of its chunk; ``gather`` names the packed operand."""
        if devices.runs_triton(a.device):
            self.launch(a, b, out, along_n=gather == "b")
            if a.device.type == "cpu":
                self.workspace.check(self.comm.rank, self.comm.timeout)
            return
        packed, other = (a, b) if gather == "a" else (b, a)
        multiply = partial(vendor_matmul, layout=self.product.layout)
        for segment in self.workspace.order.segments:
            if segment.flag != NO_FLAG:
                self.workspace.wait_on_host(segment.flag, self.comm.timeout, self.comm.rank)
            segment_product(packed, other, out, segment, gather, self.bias, multiply)

    def launch(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        along_n: bool = False,
        owners: torch.Tensor | None = None,
    ) -> None:
        """Launch the kernel that computes segment by segment and meets the communication stream at the flags.

        Args:
            along_n: Segments are columns of the result (a gathered weight), not rows.
            owners: Addresses, int64 ``[2, 2, segments]``, by the epoch's parity of each segment's room in its owner's
                memory, and of its flag there: nothing is written here, and nobody waited for, so that no multiprocessor
                is left free. ``out`` then says how rows lie there.
        """
        kernels = devices.signal_kernels()
        assert kernels is not None
        product, workspace = self.product, self.workspace
        signals = workspace.order.signals
        target = devices.target_of(a.device)
        left, right = as_row_major(a.resolve_neg(), b.resolve_neg(), product.layout)
        for tensor, name in ((left, "a"), (right, "b"), (out, "out")):
            check_offsets(tensor, name)
        described = product.k > 0 and describable(left, right, out, accumulate=False)
        config = self.config
        if config is not None and config.groups:  # what it cannot do, the default does
            whole = whole_tiles(workspace.order, config, along_n)
            config = config if described and whole and owners is None else None
        if config is None:
            config = shrink(default_config(target, a.dtype, uses_descriptors(target, a, described), "fused"), product)
            config = cut_to_fit(config, target, a.dtype)
        if not product.m * product.n:  # no tile will set a flag, and what is sent is empty
            if signals:
                workspace.flags.copy_(workspace.epoch.word).add_(workspace.epoch.counted)
            return
        if not config.fits(target, a.dtype):
            raise ValueError(f"fused product {product.name}: configuration '{config.name}' does not fit {target.arch}")
        descriptors = config.descriptors and described
        block, across = (config.block_n, config.block_m) if along_n else (config.block_m, config.block_n)
        tiles = tile_table(workspace.order, block, -(-(product.m if along_n else product.n) // across))
        table, width = workspace.table(tiles)
        units = target.units if owners is not None else programs_left(self.comm, a.device)
        epoch_word, counted = workspace.epoch.parts
        meeting = {
            "table": table, "counters": workspace.counters, "epoch_word": epoch_word, "counted": counted,
            "status": workspace.status, "tiles": tiles.total, "bound": self.comm.spins, "NUM_PROGRAMS": units,
            "SEGMENTS": width, "ALONG_N": along_n, "WAIT": not signals,
        }  # fmt: skip
        if config.groups:
            launch_grouped(left, right, out, self.bias, product, config, False, flags=workspace.flags, **meeting)
            return
        kernels.segment_matmul_kernel[(max(1, min(tiles.total, units)),)](
            *(operand_descriptors(left, right, config) if descriptors else (left, right)),
            out, out if self.bias is None else self.bias.resolve_neg().contiguous(), product.m, product.n, product.k,
            left.stride(0), left.stride(1), right.stride(0), right.stride(1), out.stride(0), out.stride(1),
            flags=workspace.flags if owners is None else owners,
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP_M=config.group_m,
            XCDS=target.xcds, SIGNAL=signals, PUSH=owners is not None, DESCRIPTORS=descriptors,
            A_TRANSPOSED=left.stride(-1) != 1, B_TRANSPOSED=right.stride(-1) != 1,
            EVEN_K=product.k % config.block_k == 0, HAS_BIAS=self.bias is not None, PRECISION=precision(a),
            INTERPRETED=devices.interpreted(), FENCE=descriptors and target.nvidia and not signals,
            ALIGNMENT=alignment(workspace.order), **meeting,
            num_warps=config.warps, num_stages=config.stages, **hints(config),
        )  # fmt: skip


def whole_tiles(order: ChunkOrder, config: Config, along_n: bool) -> bool:
    """Whether no tile crosses the end of a segment: the kernel for Hopper stores without masks."""
    return all(segment.rows % (config.block_n if along_n else config.block_m) == 0 for segment in order.segments)


def alignment(order: ChunkOrder) -> int:
    """The largest of 1, 2, 4, 8, 16 that divides where each segment is read and written, and how much."""
    borders = ((segment.source, segment.target, segment.rows) for segment in order.segments)
    return math.gcd(16, *(number for three in borders for number in three))


def programs_left(comm: FusedCommunicator, device: torch.device) -> int:
    """Programs of a kernel that waits or signals: all resident at once, beside the communication's thread blocks.

    One a multiprocessor, whatever the tile: more would also be put on those that are left to the communication, whose
    thread blocks need most of one.

    Raises:
        ValueError: Nothing is left. A kernel on all of the device would wait for a collective that cannot start.
    """
    units = devices.target_of(device).units
    left = units - (comm.reserved_units if device.type == "cuda" else 0)
    if left < 1:
        raise ValueError(
            f"fused product: a kernel that waits leaves {comm.reserved_units} multiprocessors to the communication, "
            f"and {device} has {units}; use strategy='split'"
        )
    return left


def with_last(order: ChunkOrder) -> list[tuple[Segment, bool]]:
    """Segments, each with whether it completes its chunk."""
    segments = order.segments
    return [
        (segment, index + 1 == len(segments) or segments[index + 1].flag != segment.flag)
        for index, segment in enumerate(segments)
    ]


def rows_of(a: torch.Tensor, layout: str, segment: Segment) -> torch.Tensor:
    """A segment's rows of the product, as a view of the stored operand."""
    return a[:, segment.read] if layout == "TN" else a[segment.read]


def segment_product(
    packed: torch.Tensor,
    other: torch.Tensor,
    out: torch.Tensor,
    segment: Segment,
    gather: str,
    bias: torch.Tensor | None,
    multiply: Callable[..., torch.Tensor],
) -> None:
    """Multiply the rows of one segment of the gathered operand into their place."""
    part, span = packed[segment.read], segment.written
    if gather == "a":
        multiply(part, other, out=out[span], bias=bias)
    else:
        multiply(other, part, out=out[:, span], bias=None if bias is None else bias[span])
