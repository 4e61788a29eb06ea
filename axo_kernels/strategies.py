"""The three strategies of the fused operations, without autograd (fused.py adds it).

    serial   the whole product, then the whole collective (or the other way round): the baseline
    split    the product cut into chunks; each chunk's collective runs while the next chunk is computed
    signal   one kernel over all tiles in chunk order, with a flag for each chunk between it and the communication
    stream

``split`` needs nothing but a communicator that returns pending work. ``signal`` needs Triton on a GPU; on a CPU the
same schedule, flags and communication stream are used, with torch (or, under the interpreter, the kernel itself)
computing the segments. A strategy that cannot run is an error, never another strategy in silence. Shapes are 2-D here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from axo_kernels import device as devices
from axo_kernels.comm import FusedCommunicator, Ran
from axo_kernels.gemm import describable, matmul, precision, uses_descriptors
from axo_kernels.layout import Product, as_row_major, check_offsets, product_of
from axo_kernels.schedule import NO_FLAG, Schedule, plan, tile_table
from axo_kernels.tiles import Config, default_config, shrink
from axo_kernels.workspace import Workspace

STRATEGIES = ("serial", "split", "signal")
# Multiprocessors that a signalling product leaves to the communication library.
RESERVED_UNITS = 4

Finish = Callable[[], None]


def check_strategy(operation: str, strategy: str, chunks: int, device: torch.device) -> None:
    """Refuse an unknown strategy, and one that this device cannot run."""
    if strategy not in STRATEGIES:
        raise ValueError(f"{operation}: strategy={strategy!r}; use one of {', '.join(STRATEGIES)}")
    if chunks < 1:
        raise ValueError(f"{operation}: chunks={chunks}; use at least 1")
    if strategy == "signal" and device.type != "cpu" and not devices.runs_triton(device):
        raise ValueError(f"{operation}: strategy='signal' needs Triton on {device}; install triton, or use 'split'")


def engine(strategy: str, device: torch.device) -> str:
    """Who multiplies."""
    if devices.interpreted() and device.type == "cpu":
        return "interpreter"
    if device.type == "cuda" and devices.gemm_kernels() is not None:
        return "triton"
    return "torch"


def _multiple(strategy: str, device: torch.device) -> int:
    """Chunk borders on tile borders, where tiles are large enough to matter."""
    return 128 if device.type == "cuda" else 1


def start_all_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    comm: FusedCommunicator,
    layout: str,
    strategy: str,
    chunks: int,
    bias: torch.Tensor | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, Finish]:
    """Begin ``sum over ranks of A B`` ; the result may be read after ``finish()``.

    Between the two the caller may compute something else on the compute stream. ``bias`` is added by rank 0 alone, so
    that it enters the sum once.
    """
    product = product_of(a, b, layout)
    check_strategy("matmul_all_reduce", strategy, chunks, a.device)
    bias = bias if comm.rank == 0 else None
    comm.ran.append(Ran("matmul_all_reduce", strategy, chunks, layout, engine(strategy, a.device)))
    if strategy == "serial":
        out = matmul(a, b, layout, bias=bias)
        work = comm.all_reduce(out)
        return out, work.wait
    schedule = plan("all_reduce", product.m, chunks, comm.rank, comm.size, _multiple(strategy, a.device))
    out = torch.empty((product.m, product.n), dtype=a.dtype, device=a.device)
    if strategy == "split":
        works = []
        for start, stop in schedule.bounds:
            matmul(_rows(a, layout, start, stop), b, layout, out[start:stop], bias)
            works.append(comm.all_reduce(out[start:stop]))

        def finish() -> None:
            for work in works:
                work.wait()

        return out, finish
    workspace = comm.workspaces.get("matmul_all_reduce", schedule, product, a.device)
    workspace.advance()
    comm.fork(a.device)

    def communicate() -> None:
        for chunk, (start, stop) in enumerate(schedule.bounds):
            comm.wait_flag(workspace, chunk)
            comm.all_reduce(out[start:stop])

    _produce(a, b, out, product, schedule, workspace, comm, bias, config, communicate)
    return out, comm.join


def run_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    comm: FusedCommunicator,
    layout: str,
    strategy: str,
    chunks: int,
    config: Config | None = None,
) -> torch.Tensor:
    """Return this rank's block of rows of ``sum over ranks of A B``: ``(M / size, N)``."""
    product = product_of(a, b, layout)
    check_strategy("matmul_reduce_scatter", strategy, chunks, a.device)
    schedule = plan("reduce_scatter", product.m, chunks, comm.rank, comm.size, _multiple(strategy, a.device))
    comm.ran.append(Ran("matmul_reduce_scatter", strategy, chunks, layout, engine(strategy, a.device)))
    out = torch.empty((schedule.rows, product.n), dtype=a.dtype, device=a.device)
    if strategy == "serial":
        comm.reduce_scatter(out, matmul(a, b, layout)).wait()
        return out
    workspace = comm.workspaces.get("matmul_reduce_scatter", schedule, product, a.device)
    workspace.advance()
    packed = workspace.buffer((product.m, product.n), a.dtype, a.device)
    if strategy == "split":
        works = []
        for segment, last in _with_last(schedule):
            rows = _rows(a, layout, segment.source, segment.source + segment.rows)
            matmul(rows, b, layout, packed[segment.target : segment.target + segment.rows])
            if last:
                works.append(_scatter_chunk(comm, schedule, segment.flag, packed, out))
        for work in works:
            work.wait()
        return out
    comm.fork(a.device)

    def communicate() -> None:
        for chunk in range(schedule.chunks):
            comm.wait_flag(workspace, chunk)
            _scatter_chunk(comm, schedule, chunk, packed, out)

    _produce(a, b, packed, product, schedule, workspace, comm, None, config, communicate)
    comm.join()
    return out


def _with_last(schedule: Schedule) -> list[tuple[Any, bool]]:
    """Segments, each with whether it completes its chunk."""
    segments = schedule.segments
    return [
        (segment, index + 1 == len(segments) or segments[index + 1].flag != segment.flag)
        for index, segment in enumerate(segments)
    ]


def _scatter_chunk(
    comm: FusedCommunicator, schedule: Schedule, chunk: int, packed: torch.Tensor, out: torch.Tensor
) -> Any:
    start, stop = schedule.bounds[chunk]
    first, last = schedule.packed(chunk)
    return comm.reduce_scatter(out[start:stop], packed[first:last])


def run_all_gather(
    a: torch.Tensor,
    b: torch.Tensor,
    comm: FusedCommunicator,
    layout: str,
    gather: str,
    strategy: str,
    chunks: int,
    bias: torch.Tensor | None = None,
    config: Config | None = None,
    keep: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gather one operand's shards (rows, dim 0) and multiply; return the product and, with ``keep``, what was gathered.

    ``gather="a"``: A's rows are rows of the result (NN, NT). ``gather="b"``: B's rows are columns of the result (NT).
    """
    if (gather, layout) not in (("a", "NN"), ("a", "NT"), ("b", "NT")):
        raise ValueError(
            f"all_gather_matmul: gather={gather!r} with layout={layout!r}; the gathered rows must be rows or columns "
            f"of the result: use gather='a' with NN or NT, or gather='b' with NT"
        )
    check_strategy("all_gather_matmul", strategy, chunks, a.device)
    shard = (a if gather == "a" else b).contiguous()
    other = b if gather == "a" else a
    rows, depth = shard.shape
    product = product_of(a, b, layout)
    schedule = plan("all_gather", rows, chunks, comm.rank, comm.size, _multiple(strategy, a.device))
    comm.ran.append(Ran("all_gather_matmul", strategy, chunks, layout, engine(strategy, a.device)))
    if strategy == "serial":
        full = shard.new_empty((comm.size * rows, depth))
        comm.all_gather(full, shard).wait()
        first, second = (full, other) if gather == "a" else (other, full)
        return matmul(first, second, layout, bias=bias), full if keep else None
    m = comm.size * rows if gather == "a" else product.m
    n = product.n if gather == "a" else comm.size * rows
    out = torch.empty((m, n), dtype=a.dtype, device=a.device)
    product = Product(layout, m, n, product.k, a.dtype)
    workspace = comm.workspaces.get("all_gather_matmul " + gather, schedule, product, a.device)
    workspace.advance()
    packed = workspace.buffer((comm.size * rows, depth), a.dtype, a.device)
    mine = []
    for chunk, (start, stop) in enumerate(schedule.bounds):
        first_row = schedule.packed(chunk)[0] + comm.rank * (stop - start)
        mine.append(packed[first_row : first_row + stop - start])
        mine[-1].copy_(shard[start:stop])

    def gather_chunk(chunk: int) -> Any:
        first, last = schedule.packed(chunk)
        return comm.all_gather(packed[first:last], mine[chunk])

    if strategy == "split":
        works = [gather_chunk(chunk) for chunk in range(schedule.chunks)]
        arrived = -1
        for segment in schedule.segments:
            while segment.flag != NO_FLAG and arrived < segment.flag:
                arrived += 1
                works[arrived].wait()
            _segment_product(packed, other, out, segment, layout, gather, bias)
        for work in works[arrived + 1 :]:
            work.wait()
    else:
        comm.fork(a.device)
        for chunk in range(schedule.chunks):  # the producer of the flags comes first in host order
            gather_chunk(chunk)
            comm.write_flag(workspace, chunk)
        first, second = (packed, other) if gather == "a" else (other, packed)
        try:
            _consume(first, second, out, product, schedule, workspace, comm, bias, config, gather)
        except BaseException:
            comm.abandon()
            raise
        comm.join()
    return out, _unpacked(packed, schedule) if keep else None


def _unpacked(packed: torch.Tensor, schedule: Schedule) -> torch.Tensor:
    """The gathered operand in rank order, from ``[chunk][rank][rows]``."""
    full = torch.empty_like(packed)
    by_rank = full.view(schedule.size, schedule.rows, -1)
    for chunk, (start, stop) in enumerate(schedule.bounds):
        first, last = schedule.packed(chunk)
        by_rank[:, start:stop] = packed[first:last].view(schedule.size, stop - start, -1)
    return full


def _rows(a: torch.Tensor, layout: str, start: int, stop: int) -> torch.Tensor:
    """Rows of the product, as a view of the stored operand."""
    return a[:, start:stop] if layout == "TN" else a[start:stop]


def _segment_product(
    packed: torch.Tensor,
    other: torch.Tensor,
    out: torch.Tensor,
    segment: Any,
    layout: str,
    gather: str,
    bias: torch.Tensor | None,
) -> None:
    part = packed[segment.source : segment.source + segment.rows]
    span = slice(segment.target, segment.target + segment.rows)
    if gather == "a":
        matmul(part, other, layout, out[span], bias)
    else:
        matmul(other, part, layout, out[:, span], None if bias is None else bias[span])


def _produce(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    product: Product,
    schedule: Schedule,
    workspace: Workspace,
    comm: FusedCommunicator,
    bias: torch.Tensor | None,
    config: Config | None,
    communicate: Finish,
) -> None:
    """Compute the segments in order and set the flag of each chunk; ``communicate`` waits for them."""
    try:
        if devices.runs_triton(a.device):
            launch_segments(a, b, out, product, schedule, workspace, comm, bias, config, along_n=False)
            communicate()  # the producer comes first in host order
            return
        communicate()
        for segment, last in _with_last(schedule):
            rows = _rows(a, product.layout, segment.source, segment.source + segment.rows)
            matmul(rows, b, product.layout, out[segment.target : segment.target + segment.rows], bias)
            if last:
                workspace.write_on_host(segment.flag)
    except BaseException:
        comm.abandon()
        raise


def _consume(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    product: Product,
    schedule: Schedule,
    workspace: Workspace,
    comm: FusedCommunicator,
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
    for segment in schedule.segments:
        if segment.flag != NO_FLAG:
            workspace.wait_on_host(segment.flag, comm.timeout, comm.rank)
        _segment_product(packed, other, out, segment, product.layout, gather, bias)


def launch_segments(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    product: Product,
    schedule: Schedule,
    workspace: Workspace,
    comm: FusedCommunicator,
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
    if not config.fits(target, a.dtype):
        raise ValueError(f"fused product {product.name}: configuration '{config.name}' does not fit {target.arch}")
    descriptors = config.descriptors and described
    block, across = (config.block_n, config.block_m) if along_n else (config.block_m, config.block_n)
    other_size = product.m if along_n else product.n
    tiles = tile_table(schedule, block, -(-other_size // across))
    table, width = workspace.table(tiles)
    reserved = RESERVED_UNITS if target.units > 4 * RESERVED_UNITS else 0
    programs = max(1, min(tiles.total, target.units - reserved))
    a_transposed, b_transposed = product.layout == "TN", product.layout == "NT"
    first, second = left, right
    if descriptors:
        from triton.tools.tensor_descriptor import TensorDescriptor

        a_block, b_block = [config.block_m, config.block_k], [config.block_k, config.block_n]
        first = TensorDescriptor.from_tensor(a, a_block[::-1] if a_transposed else a_block)
        second = TensorDescriptor.from_tensor(b, b_block[::-1] if b_transposed else b_block)
    kernels.segment_matmul_kernel[(programs,)](
        first, second, out, out if bias is None else bias.contiguous(), product.m, product.n, product.k,
        left.stride(0), left.stride(1), right.stride(0), right.stride(1), out.stride(0), out.stride(1),
        table, workspace.flags, workspace.counters, workspace.epoch, workspace.status, tiles.total, comm.spins,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP_M=config.group_m,
        NUM_PROGRAMS=programs, SEGMENTS=width, ALONG_N=along_n, WAIT=not schedule.signals, SIGNAL=schedule.signals,
        DESCRIPTORS=descriptors, A_TRANSPOSED=a_transposed, B_TRANSPOSED=b_transposed,
        EVEN_K=product.k % config.block_k == 0, HAS_BIAS=bias is not None, PRECISION=precision(a),
        INTERPRETED=devices.interpreted(), FENCE=descriptors and target.nvidia and not schedule.signals,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
