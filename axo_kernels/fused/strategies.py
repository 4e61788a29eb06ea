"""The three strategies of the fused operations, without autograd (fused.py adds it).

    serial   the whole product, then the whole collective (or the other way round): the baseline
    split    the product cut into chunks; each chunk's collective runs while the next chunk is computed
    signal   one kernel over all tiles in chunk order, with a flag for each chunk between it and the communication
    stream

``serial`` and ``split`` multiply with ``multiply`` (what the tuner chose for the plain product), or with the vendor
library; ``signal`` with its own kernel, whose tiles are ``config``. ``split`` needs nothing but a communicator that
returns pending work. ``signal`` needs Triton on a GPU; on a CPU the same schedule, flags and communication stream are
used, with torch (or, under the interpreter, the kernel itself) computing the segments. A strategy that cannot run is an
error, never another strategy in silence. Shapes are 2-D here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from axo_kernels import device as devices
from axo_kernels.comm.adapters import Communicator, Ran
from axo_kernels.fused.chunks import NO_FLAG, Schedule, plan
from axo_kernels.fused.segments import consume, produce, rows_of, segment_product, with_last
from axo_kernels.gemm.layout import Product, product_of
from axo_kernels.gemm.matmul import vendor_matmul
from axo_kernels.gemm.tiles import Config

STRATEGIES = ("serial", "split", "signal")

Finish = Callable[[], None]
Multiply = Callable[..., torch.Tensor]  # (a, b, out=..., bias=...)


def check_strategy(operation: str, strategy: str, chunks: int, device: torch.device) -> None:
    """Refuse an unknown strategy, and one that this device cannot run."""
    if strategy not in STRATEGIES:
        raise ValueError(f"{operation}: strategy={strategy!r}; use one of {', '.join(STRATEGIES)}")
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise ValueError(f"{operation}: chunks={chunks!r}; use a whole number of at least 1")
    if strategy == "signal" and device.type != "cpu" and not devices.runs_triton(device):
        raise ValueError(
            f"{operation}: strategy='signal' wants triton and a GPU that it serves (sm_80 or later, or AMD's), which "
            f"{device} is not here; use 'split'"
        )


def engine(strategy: str, device: torch.device, multiply: Multiply | None = None) -> str:
    """Who multiplies."""
    if strategy != "signal":
        return "torch" if multiply is None else "tuned"
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
    comm: Communicator,
    layout: str,
    strategy: str,
    chunks: int,
    bias: torch.Tensor | None = None,
    config: Config | None = None,
    multiply: Multiply | None = None,
) -> tuple[torch.Tensor, Finish]:
    """Begin ``sum over ranks of A B`` ; the result may be read after ``finish()``.

    Between the two the caller may compute something else on the compute stream. ``bias`` is added by rank 0 alone, so
    that it enters the sum once.
    """
    comm.poll()
    product = product_of(a, b, layout)
    check_strategy("matmul_all_reduce", strategy, chunks, a.device)
    bias = bias if comm.rank == 0 else None
    comm.ran.append(Ran("matmul_all_reduce", strategy, chunks, layout, engine(strategy, a.device, multiply)))
    multiply = multiply or partial(vendor_matmul, layout=layout)
    if strategy == "serial":
        out = multiply(a, b, bias=bias)
        work = comm.all_reduce(out)
        return out, work.wait
    schedule = plan("all_reduce", product.m, chunks, comm.rank, comm.size, _multiple(strategy, a.device))
    out = torch.empty((product.m, product.n), dtype=a.dtype, device=a.device)
    if strategy == "split":
        works = []
        for start, stop in schedule.bounds:
            multiply(rows_of(a, layout, start, stop), b, out=out[start:stop], bias=bias)
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

    produce(a, b, out, product, schedule, workspace, comm, bias, config, communicate)
    return out, comm.join


def start_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    comm: Communicator,
    layout: str,
    strategy: str,
    chunks: int,
    config: Config | None = None,
    multiply: Multiply | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Finish]:
    """Begin this rank's block of rows of ``sum over ranks of A B``: ``(M / size, N)``, complete after ``finish()``.

    ``out``: contiguous, where it goes.
    """
    comm.poll()
    product = product_of(a, b, layout)
    check_strategy("matmul_reduce_scatter", strategy, chunks, a.device)
    pieces = 1 if strategy == "serial" else chunks
    schedule = plan("reduce_scatter", product.m, pieces, comm.rank, comm.size, _multiple(strategy, a.device))
    comm.ran.append(Ran("matmul_reduce_scatter", strategy, chunks, layout, engine(strategy, a.device, multiply)))
    multiply = multiply or partial(vendor_matmul, layout=layout)
    if out is None:
        out = torch.empty((schedule.rows, product.n), dtype=a.dtype, device=a.device)
    if strategy == "serial":
        return out, comm.reduce_scatter(out, multiply(a, b)).wait
    workspace = comm.workspaces.get("matmul_reduce_scatter", schedule, product, a.device)
    workspace.advance()
    packed = workspace.buffer((product.m, product.n), a.dtype, a.device)
    if strategy == "split":
        works = []
        for segment, last in with_last(schedule):
            rows = rows_of(a, layout, segment.source, segment.source + segment.rows)
            multiply(rows, b, out=packed[segment.target : segment.target + segment.rows])
            if last:
                works.append(_scatter_chunk(comm, schedule, segment.flag, packed, out))

        def finish() -> None:
            for work in works:
                work.wait()

        return out, finish
    comm.fork(a.device)

    def communicate() -> None:
        for chunk in range(schedule.chunks):
            comm.wait_flag(workspace, chunk)
            _scatter_chunk(comm, schedule, chunk, packed, out)

    produce(a, b, packed, product, schedule, workspace, comm, None, config, communicate)
    return out, comm.join


def run_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    comm: Communicator,
    layout: str,
    strategy: str,
    chunks: int,
    config: Config | None = None,
    multiply: Multiply | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do the same and wait for it."""
    out, finish = start_reduce_scatter(a, b, comm, layout, strategy, chunks, config, multiply, out)
    finish()
    return out


def _scatter_chunk(comm: Communicator, schedule: Schedule, chunk: int, packed: torch.Tensor, out: torch.Tensor) -> Any:
    start, stop = schedule.bounds[chunk]
    first, last = schedule.packed(chunk)
    return comm.reduce_scatter(out[start:stop], packed[first:last])


def run_all_gather(
    a: torch.Tensor,
    b: torch.Tensor,
    comm: Communicator,
    layout: str,
    gather: str,
    strategy: str,
    chunks: int,
    bias: torch.Tensor | None = None,
    config: Config | None = None,
    keep: bool = True,
    multiply: Multiply | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gather one operand's shards (rows, dim 0) and multiply; return the product and, with ``keep``, what was gathered.

    ``gather="a"``: A's rows are rows of the result (NN, NT). ``gather="b"``: B's rows are columns of the result (NT).
    """
    if (gather, layout) not in (("a", "NN"), ("a", "NT"), ("b", "NT")):
        raise ValueError(
            f"all_gather_matmul: gather={gather!r} with layout={layout!r}; the gathered rows must be rows or columns "
            f"of the result: use gather='a' with NN or NT, or gather='b' with NT"
        )
    comm.poll()
    check_strategy("all_gather_matmul", strategy, chunks, a.device)
    shard = (a if gather == "a" else b).contiguous()
    other = b if gather == "a" else a
    rows, depth = shard.shape
    product = product_of(a, b, layout)
    schedule = plan(
        "all_gather", rows, 1 if strategy == "serial" else chunks, comm.rank, comm.size, _multiple(strategy, a.device)
    )
    comm.ran.append(Ran("all_gather_matmul", strategy, chunks, layout, engine(strategy, a.device, multiply)))
    multiply = multiply or partial(vendor_matmul, layout=layout)
    if strategy == "serial":
        full = shard.new_empty((comm.size * rows, depth))
        comm.all_gather(full, shard).wait()
        first, second = (full, other) if gather == "a" else (other, full)
        return multiply(first, second, bias=bias), full if keep else None
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
            segment_product(packed, other, out, segment, gather, bias, multiply)
        for work in works[arrived + 1 :]:
            work.wait()
    else:
        comm.fork(a.device)
        for chunk in range(schedule.chunks):  # the producer of the flags comes first in host order
            gather_chunk(chunk)
            comm.write_flag(workspace, chunk)
        first, second = (packed, other) if gather == "a" else (other, packed)
        try:
            consume(first, second, out, product, schedule, workspace, comm, bias, config, gather)
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
