"""One kernel over all segments of a fused product, in the order of the schedule, meeting the communication stream at
the flags; without Triton the same order, flags and stream with torch's products.

Who communicates, and what, is in strategies.py; which rows make a segment, in schedule.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from axo_kernels import device as devices
from axo_kernels.comm.adapters import Communicator
from axo_kernels.fused.chunks import NO_FLAG, Schedule, Segment, tile_table
from axo_kernels.fused.workspace import Workspace
from axo_kernels.gemm.layout import Product, as_row_major, check_offsets
from axo_kernels.gemm.matmul import describable, precision, uses_descriptors, vendor_matmul
from axo_kernels.gemm.tiles import Config, cut_to_fit, default_config, shrink


def produce(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    product: Product,
    schedule: Schedule,
    workspace: Workspace,
    comm: Communicator,
    bias: torch.Tensor | None,
    config: Config | None,
    communicate: Callable[[], None],
) -> None:
    """Compute the segments in order and set the flag of each chunk; ``communicate`` waits for them."""
    try:
        if devices.runs_triton(a.device):
            launch_segments(a, b, out, product, schedule, workspace, comm, bias, config, along_n=False)
            communicate()  # the producer comes first in host order
            return
        communicate()
        for segment, last in with_last(schedule):
            rows = rows_of(a, product.layout, segment.source, segment.source + segment.rows)
            vendor_matmul(rows, b, product.layout, out[segment.target : segment.target + segment.rows], bias)
            if last:
                workspace.write_on_host(segment.flag)
    except BaseException:
        comm.abandon()
        raise


def consume(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    product: Product,
    schedule: Schedule,
    workspace: Workspace,
    comm: Communicator,
    bias: torch.Tensor | None,
    config: Config | None,
    gather: str,
) -> None:
    """Compute the segments in order, each after the flag of its chunk."""
    if devices.runs_triton(a.device):
        launch_segments(a, b, out, product, schedule, workspace, comm, bias, config, along_n=gather == "b")
        if a.device.type == "cpu":
            workspace.check(comm.rank, comm.timeout)
        return
    packed, other = (a, b) if gather == "a" else (b, a)
    multiply = partial(vendor_matmul, layout=product.layout)
    for segment in schedule.segments:
        if segment.flag != NO_FLAG:
            workspace.wait_on_host(segment.flag, comm.timeout, comm.rank)
        segment_product(packed, other, out, segment, gather, bias, multiply)


def launch_segments(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    product: Product,
    schedule: Schedule,
    workspace: Workspace,
    comm: Communicator,
    bias: torch.Tensor | None,
    config: Config | None,
    along_n: bool,
) -> None:
    """Launch the kernel that computes segment by segment and meets the communication stream at the flags."""
    kernels = devices.signal_kernels()
    assert kernels is not None
    target = devices.target_of(a.device)
    left, right = as_row_major(a, b, product.layout)
    for tensor, name in ((left, "a"), (right, "b"), (out, "out")):
        check_offsets(tensor, name)
    described = describable(left, right, out, accumulate=False)
    if config is None:
        config = shrink(default_config(target, a.dtype, uses_descriptors(target, a, described), "fused"), product)
        config = cut_to_fit(config, target, a.dtype)
    if not product.m * product.n:  # no tile will set a flag, and what is sent is empty
        if schedule.signals:
            workspace.flags.copy_(workspace.epoch.expand_as(workspace.flags))
        return
    if not config.fits(target, a.dtype):
        raise ValueError(f"fused product {product.name}: configuration '{config.name}' does not fit {target.arch}")
    descriptors = config.descriptors and described
    block, across = (config.block_n, config.block_m) if along_n else (config.block_m, config.block_n)
    other_size = product.m if along_n else product.n
    tiles = tile_table(schedule, block, -(-other_size // across))
    table, width = workspace.table(tiles)
    units = programs_left(comm, a.device)
    programs = max(1, min(tiles.total, units))
    a_transposed, b_transposed = left.stride(-1) != 1, right.stride(-1) != 1
    first, second = left, right
    if descriptors:
        from triton.tools.tensor_descriptor import TensorDescriptor

        a_block, b_block = [config.block_m, config.block_k], [config.block_k, config.block_n]
        stored_a, stored_b = left.mT if a_transposed else left, right.mT if b_transposed else right
        first = TensorDescriptor.from_tensor(stored_a, a_block[::-1] if a_transposed else a_block)
        second = TensorDescriptor.from_tensor(stored_b, b_block[::-1] if b_transposed else b_block)
    kernels.segment_matmul_kernel[(programs,)](
        first, second, out, out if bias is None else bias.contiguous(), product.m, product.n, product.k,
        left.stride(0), left.stride(1), right.stride(0), right.stride(1), out.stride(0), out.stride(1),
        table, workspace.flags, workspace.counters, workspace.epoch, workspace.status, tiles.total, comm.spins,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP_M=config.group_m,
        NUM_PROGRAMS=units, SEGMENTS=width, ALONG_N=along_n, WAIT=not schedule.signals, SIGNAL=schedule.signals,
        DESCRIPTORS=descriptors, A_TRANSPOSED=a_transposed, B_TRANSPOSED=b_transposed,
        EVEN_K=product.k % config.block_k == 0, HAS_BIAS=bias is not None, PRECISION=precision(a),
        INTERPRETED=devices.interpreted(), FENCE=descriptors and target.nvidia and not schedule.signals,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip


def programs_left(comm: Communicator, device: torch.device) -> int:
    """Programs of a kernel that waits or signals: all resident at once, beside the communication's thread blocks.

    Raises:
        ValueError: Nothing is left. A kernel on all of the device would wait for a collective that cannot start.
    """
    units = devices.target_of(device).units
    left = units - (comm.reserved_units if device.type == "cuda" else 0)
    if left < 1:
        raise ValueError(
            f"fused product: strategy='signal' leaves {comm.reserved_units} multiprocessors to the communication, and "
            f"{device} has {units}; use strategy='split'"
        )
    return left


def with_last(schedule: Schedule) -> list[tuple[Segment, bool]]:
    """Segments, each with whether it completes its chunk."""
    segments = schedule.segments
    return [
        (segment, index + 1 == len(segments) or segments[index + 1].flag != segment.flag)
        for index, segment in enumerate(segments)
    ]


def rows_of(a: torch.Tensor, layout: str, start: int, stop: int) -> torch.Tensor:
    """Rows of the product, as a view of the stored operand."""
    return a[:, start:stop] if layout == "TN" else a[start:stop]


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
    part = packed[segment.source : segment.source + segment.rows]
    span = slice(segment.target, segment.target + segment.rows)
    if gather == "a":
        multiply(part, other, out=out[span], bias=bias)
    else:
        multiply(other, part, out=out[:, span], bias=None if bias is None else bias[span])
