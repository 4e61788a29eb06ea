"""How much of the communication is hidden behind the product, for each fused operation and strategy.

    axo bench overlap --shapes 4096x4096x4096 --shares 0.2,0.4,0.8      communication simulated on one device
    torchrun --nproc-per-node 4 -m axo_bench.overlap --shapes ...      real ranks (NCCL, or Gloo on CPUs)

Simulated: the link's speed is chosen so that communication alone takes the given share of the vendor's product
(bench.lib.simulated). Efficiency is ``1 - (t_fused - t_gemm) / (t_serial - t_gemm)`` with the vendor's product as
t_gemm: 1 is all hidden, 0 is serial, negative is slower than serial. Each row also has the own kernel's time with all
flags set beforehand, and the error against the serial result. Over ranks the largest time counts. With ``--groups`` a
Hopper has a rival more: ``signal`` by the kernel in Gluon, which the tuner does not try before a GPU has trusted it.

``graph_ms`` and ``graph_efficiency`` are the same as replays of captured graphs, product and serial way too, so that
no launch of the host is in any of them (one GPU, simulated; ``-`` elsewhere).
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch

from axo_kernels import FusedCommunicator, SignalTimeout, adapt
from axo_kernels import device as devices
from axo_kernels.fused.chunks import chunk_order
from axo_kernels.fused.segments import SegmentedProduct, whole_tiles
from axo_kernels.fused.strategies import FusedPlan, run_all_gather, run_reduce_scatter, start_all_reduce, unreachable
from axo_kernels.gemm import tiles
from axo_kernels.gemm.layout import Product, product_of
from axo_kernels.gemm.matmul import vendor_matmul
from axo_kernels.gemm.tiles import Config
from axo_kernels.tune.timing import paired, relative_error

from .lib import arguments
from .lib.arguments import Parser
from .lib.attempts import attempt_each
from .lib.emulation import emulated
from .lib.simulated import SimulatedCommunicator
from .lib.table import Table, environment

OPERATIONS = ("matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul")
COLUMNS = {
    "operation": "s",
    "shape": "s",
    "share": ".2f",
    "strategy": "s",
    "chunks": "d",
    "gemm_ms": ".3f",
    "own_ms": ".3f",
    "comm_ms": ".3f",
    "serial_ms": ".3f",
    "fused_ms": ".3f",
    "efficiency": ".2f",
    "graph_ms": ".3f",
    "graph_efficiency": ".2f",
    "error": ".1e",
}


def main(given: list[str] | None = None) -> int:
    """Run the bench; returns 1 when a fused result differs from the serial one, or a case failed."""
    parser = Parser("axo bench overlap", __doc__, json=True)
    parser.add_argument("--shapes", default="", help="MxNxK, comma-separated; 4096 cubed, on a CPU 1024, by default")
    parser.add_argument("--shares", default="0.2,0.4,0.8", help="communication over product, when simulated")
    parser.add_argument("--chunks", default="2,4,8")
    parser.add_argument("--size", type=int, default=4, help="ranks, when simulated")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--groups", action="store_true", help="on a Hopper also by the kernel in Gluon")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    options = parser.parse_args(given)
    real = int(os.environ.get("WORLD_SIZE", "1")) > 1
    try:
        device = arguments.device("--device", options.device)
        edge = 1024 if device.type == "cpu" else 4096
        shapes = arguments.shapes("--shapes", options.shapes or f"{edge}x{edge}x{edge}")
        shares = arguments.shares("--shares", options.shares) if not real else [0.0]
        counts = arguments.numbers("--chunks", options.chunks)
        size = int(os.environ["WORLD_SIZE"]) if real else arguments.numbers("--size", str(options.size), 2)[0]
        _check_cuts(shapes, counts, size)
        device = _place(device, real)
    except ValueError as error:
        parser.error(str(error))
    comm = None
    if real:
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
        comm = adapt(torch.distributed.group.WORLD)
    rank = comm.rank if comm else 0
    table = Table(COLUMNS, options.json if rank == 0 else None, {"bench": "overlap"} | environment(device))
    dtype = getattr(torch, options.dtype)
    if rank == 0 and (told := emulated(dtype, device, "--dtype float32")):
        table.note(told)
    measure(shapes, shares, counts, dtype, device, table, options, comm)
    if real:
        torch.distributed.destroy_process_group()
    return int(bool(table.failed) or any(not row["right"] for row in table.rows))


def _check_cuts(shapes: list[tuple[int, int, int]], counts: list[int], size: int) -> None:
    """Refuse what the ranks or the chunks cannot cut.

    Raises:
        ValueError: Rows do not divide over the ranks, or are fewer than the chunks.
    """
    for m, n, k in shapes:
        for name, rows in (("M", m), ("N", n)):
            if rows % size:
                up = -(-rows // size) * size
                raise ValueError(f"--shapes {m}x{n}x{k}: {name}={rows} does not divide over {size} ranks; use {up}")
            if max(counts) > rows // size:
                raise ValueError(f"--chunks {max(counts)} do not fit the {rows // size} rows of {name} on each rank")


def _place(device: torch.device, real: bool) -> torch.device:
    """The device of this rank.

    Raises:
        ValueError: There are more ranks than GPUs here.
    """
    if device.type != "cuda":
        return device
    ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if real and ranks > gpus:
        raise ValueError(
            f"{ranks} ranks need as many GPUs; {gpus} are here: start {gpus}, or one, which simulates them"
        )
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if real else device
    torch.cuda.set_device(device)
    return device


def measure(
    shapes: list[tuple[int, int, int]],
    shares: list[float],
    counts: list[int],
    dtype: torch.dtype,
    device: torch.device,
    table: Table,
    options: argparse.Namespace,
    comm: FusedCommunicator | None = None,
    each: float | None = None,
) -> int:
    """Measure every operation and share that the table lacks, by every strategy and chunk count.

    Returns:
        How many are left when ``options.seconds`` have passed, or the device has stopped working.
    """
    measured = {(row["operation"], row["shape"].split()[1], row["asked_share"]) for row in table.rows}
    captured = ["split", "signal"]  # strategies that graphs may hold
    cases = {
        _name(operation, shape, share): partial(
            _case, operation, shape, share, counts, dtype, device, table, options, comm, captured
        )
        for shape, operation, share in itertools.product(shapes, OPERATIONS, shares)
        if (operation, "x".join(map(str, shape)), share) not in measured
    }
    return attempt_each(cases, "cases", device, table, options.seconds, each, together=comm is not None)


def _name(operation: str, shape: tuple[int, int, int], share: float) -> str:
    return f"{operation} {'x'.join(map(str, shape))} share {share:g}"


def _case(
    operation: str,
    shape: tuple[int, int, int],
    share: float,
    counts: list[int],
    dtype: torch.dtype,
    device: torch.device,
    table: Table,
    options: argparse.Namespace,
    comm: FusedCommunicator | None,
    captured: list[str],
) -> None:
    m, n, k = shape
    rank = comm.rank if comm else 0
    size = comm.size if comm else options.size
    generator = torch.Generator(device).manual_seed(7)
    layout = "TN" if operation == "matmul_reduce_scatter" else "NT"
    stored = ((k, m), (k, n)) if layout == "TN" else ((m, k), (n, k))
    a, b = (
        torch.randn(sizes, generator=generator, device=device).mul_(0.01 * (rank + 1)).to(dtype) for sizes in stored
    )
    product = product_of(a, b, layout)
    gemm = partial(vendor_matmul, a, b, layout)
    if operation == "all_gather_matmul":
        rows = n // size
        b = b[rank * rows : (rank + 1) * rows].contiguous()
    moved = _bytes(operation, product, size)
    if comm is None:
        seconds = paired([gemm], device, options.rounds)[0].seconds
        comm = SimulatedCommunicator(size, moved / (share * seconds), device, timeout=5.0)
    serial = _call(operation, a, b, comm, layout, FusedPlan())
    expected = serial()
    alone = _communication(operation, product, comm, device)
    strategies = ("split", "signal") if device.type == "cpu" or devices.runs_triton(device) else ("split",)
    rivals = {
        (strategy, chunks): _call(operation, a, b, comm, layout, FusedPlan(strategy, chunks))
        for strategy in strategies
        for chunks in counts
    }
    groups = _groups(operation, product, comm, counts, device) if options.groups else None
    rivals |= {
        ("groups", chunks): _call(operation, a, b, comm, layout, FusedPlan("signal", chunks, groups))
        for chunks in counts if groups is not None
    }  # fmt: skip
    if not isinstance(comm, SimulatedCommunicator) and operation != "all_gather_matmul":
        why = unreachable(comm, device)
        if why:
            table.note(f"{operation}: no push: {why}")
        else:
            rivals["push", 1] = _call(operation, a, b, comm, layout, FusedPlan("push"))
    errors = {key: relative_error(call(), expected) for key, call in rivals.items()}
    own = _own(a, b, comm, product, operation, device)
    other = _own(a, b, comm, product, operation, device, groups) if groups is not None else None
    quiet = comm.without_effects() if isinstance(comm, SimulatedCommunicator) else nullcontext()
    owns = [call for call in (own, other) if call]
    calls: list[Callable[[], object]] = [gemm, serial, alone, *owns, *rivals.values()]
    if device.type == "cpu" and not rank:
        calls = _telling(calls, f"{_name(operation, shape, share)}: call", len(calls) * (2 + options.rounds), table)
    with quiet:
        measured = paired(calls, device, options.rounds)
    timings = comm.maximum([timing.seconds for timing in measured])
    comm.check() if device.type == "cuda" else None
    head, own_times, tail = timings[:3], timings[3 : 3 + len(owns)], timings[3 + len(owns) :]
    graphs: dict[object, float] = {}
    while isinstance(comm, SimulatedCommunicator) and captured:
        held: dict[object, Callable[[], object]] = {"gemm": gemm, "serial": serial}
        held |= {key: call for key, call in rivals.items() if key[0] in captured}
        try:
            with comm.without_effects():
                seconds_of = _graphs(list(held.values()), device, options.rounds, comm)
            graphs = dict(zip(held, seconds_of, strict=True)) if seconds_of else {}
            break
        except SignalTimeout as error:  # what was measured by launches stands, and graphs without flags can be had
            table.note(f"{_name(operation, shape, share)}, as graphs: {error}; no more graphs of it")
            captured.remove("signal" if "signal" in captured else "split")  # each try waits for seconds
    for (strategy, chunks), fused in zip(rivals, tail, strict=True):
        graph = graphs.get((strategy, chunks))
        table.add(
            operation=operation,
            shape=product.name,
            share=head[2] / head[0],
            asked_share=share,
            strategy=strategy,
            chunks=chunks,
            gemm_ms=head[0] * 1e3,
            own_ms=own_times[strategy == "groups"] * 1e3 if owns else None,
            comm_ms=head[2] * 1e3,
            serial_ms=head[1] * 1e3,
            fused_ms=fused * 1e3,
            efficiency=_hidden(fused, head[0], head[1]),
            graph_ms=graph * 1e3 if graph else None,
            graph_efficiency=_hidden(graph, graphs["gemm"], graphs["serial"]) if graph else None,
            error=errors[strategy, chunks],
            right=errors[strategy, chunks] < 1e-2,  # the same sums in another order, rounded to bf16
        )


def _telling(calls: list[Callable[[], object]], what: str, most: int, table: Table) -> list[Callable[[], object]]:
    """The same calls, which say how many of ``most`` there have been: on a CPU a case may take minutes."""
    number = itertools.count(1)

    def telling(call: Callable[[], object]) -> object:
        table.progress(f"{what} {next(number)} of {most}")
        return call()

    return [partial(telling, call) for call in calls]


def _hidden(fused: float, gemm: float, serial: float) -> float | None:
    """The share of the communication that is hidden; None where there is none."""
    return 1 - (fused - gemm) / (serial - gemm) if serial > gemm else None


def _graphs(
    calls: list[Callable[[], object]], device: torch.device, rounds: int, comm: FusedCommunicator
) -> list[float] | None:
    """Seconds of each call as replays of a captured graph, which has no launches of its own; None on a CPU.

    The calls have run before, outside the capture.

    Raises:
        SignalTimeout: In a replay a flag was never set.
    """
    if device.type != "cuda":
        return None
    replays = []
    for call in calls:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        replays.append(graph.replay)
        graph.replay()
        comm.check()
    return [timing.seconds for timing in paired(replays, device, rounds)]


def _bytes(operation: str, product: Product, size: int) -> float:
    """Bytes that a ring moves through each rank's link."""
    item, share = product.dtype.itemsize, (size - 1) / size
    if operation == "matmul_all_reduce":
        return 2 * share * product.m * product.n * item
    if operation == "matmul_reduce_scatter":
        return share * product.m * product.n * item
    return share * product.n * product.k * item


def _call(
    operation: str, a: torch.Tensor, b: torch.Tensor, comm: FusedCommunicator, layout: str, way: FusedPlan
) -> Callable[[], torch.Tensor]:
    if operation == "matmul_reduce_scatter":
        return partial(run_reduce_scatter, a, b, comm, layout, way)
    if operation == "all_gather_matmul":
        return lambda: run_all_gather(a, b, comm, layout, "b", way, keep=False)[0]

    def run() -> torch.Tensor:
        out, finish = start_all_reduce(a, b, comm, layout, way)
        finish()
        return out

    return run


def _communication(
    operation: str, product: Product, comm: FusedCommunicator, device: torch.device
) -> Callable[[], None]:
    """The collective alone."""
    full = torch.zeros((product.m, product.n), dtype=product.dtype, device=device)
    weight = torch.zeros((product.n, product.k), dtype=product.dtype, device=device)
    if operation == "matmul_all_reduce":
        return lambda: comm.all_reduce(full).wait()
    if operation == "matmul_reduce_scatter":
        part = torch.empty_like(full[: product.m // comm.size])
        return lambda: comm.reduce_scatter(part, full).wait()
    shard = torch.empty_like(weight[: product.n // comm.size])
    return lambda: comm.all_gather(weight, shard).wait()


def _groups(
    operation: str, product: Product, comm: FusedCommunicator, counts: list[int], device: torch.device
) -> Config | None:
    """The tile of the kernel for Hopper that is a rival, as strategy ``groups``; None on other GPUs, and where a tile
    would cross the end of a chunk."""
    if device.type != "cuda" or not devices.target_of(device).hopper or product.dtype.itemsize != 2 or not tiles.HOPPER:
        return None
    kind, config, gathers = operation.replace("matmul", "").strip("_"), tiles.HOPPER[0], "gather" in operation
    rows = product.n // comm.size if gathers else product.m
    orders = [chunk_order(kind, rows, chunks, comm.rank, comm.size, 128) for chunks in counts]
    return config if all(whole_tiles(order, config, gathers) for order in orders) else None


def _own(
    a: torch.Tensor,
    b: torch.Tensor,
    comm: FusedCommunicator,
    product: Product,
    operation: str,
    device: torch.device,
    config: Config | None = None,
) -> Callable[[], None] | None:
    """The signalling kernel with every flag set beforehand: what the kernel itself costs."""
    if not devices.runs_triton(device) or device.type != "cuda":
        return None
    gathers = operation == "all_gather_matmul"
    rows = product.n // comm.size if gathers else product.m
    kind = "all_gather" if gathers else "all_reduce"
    order = chunk_order(kind, rows, 4, comm.rank, comm.size, 128)
    workspace = comm.workspaces.get(f"alone {operation}", order, product, device)
    out = torch.empty((product.m, product.n), dtype=product.dtype, device=device)
    full = b.repeat(comm.size, 1) if gathers else b
    workspace.flags.fill_(workspace.epoch.counted)
    return lambda: SegmentedProduct(product, workspace, comm, config=config).launch(a, full, out, along_n=gathers)


if __name__ == "__main__":
    raise SystemExit(main())
