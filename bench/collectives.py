"""How fast are the collectives of this machine's CPUs? Axo against its rivals, interleaved in one run.

    axo bench collectives --ranks 2,4 --ops all_reduce,barrier --sizes 1K,1M,64M

Columns as in nccl-tests: size in bytes (all_reduce, broadcast, reduce, sendrecv: the buffer; all_gather, gather: the
whole result; reduce_scatter, scatter, all_to_all: the whole input), time of one call in microseconds (median of rounds,
each the slowest rank's mean), algbw = size / time and busbw = algbw * the operation's factor in GB/s (1e9 bytes), and
#wrong elements over all ranks. Calls are blocking. Rivals: "axo" is Axo's own API, "axo-shared" the same with every
buffer from axo.empty_shared, "axo-c10d" torch.distributed over Axo, "gloo" torch's default, "mpi" Open MPI through
mpi4py, in ranks of its own that take their turns too (bench/mpi.py), where both are installed. Its settings come from
the environment: OMPI_MCA_coll_xhc_priority=100 for its shared-memory component XHC, which pip's build has not
(ompi_info | grep xhc).

The machine's copy traffic, bytes read plus bytes written by all ranks that copy at once, is measured in the same ranks;
beside an all_reduce of 64 MiB or more in its very rounds, as one rival more: memory that other machines share is twice
as fast a minute later. The floor of an all_reduce is 5 bytes of it for a byte of private buffers (staged), 4 where
buffers are shared; `of_floor` is algbw over that. A program may beat it: caches hold what a large copy streams.

`--progress` asks instead whether a pending all_reduce advances while Python computes (bench/progress.py). It does not
measure GPUs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from . import mpi
from .lib import collective_calls as calls_of
from .lib.arguments import Parser
from .lib.collective_calls import BUS_FACTOR
from .lib.picture import panels
from .lib.table import Table, environment

COLUMNS = {"op": "s", "rival": "s", "ranks": "d", "dtype": "s", "size": "d", "count": "d", "time_us": ".2f"}
COLUMNS |= {"least_us": ".2f", "algbw": ".3f", "busbw": ".3f", "times_gloo": ".1f", "times_mpi": ".2f"}
COLUMNS |= {"of_floor": ".2f", "wrong": "d"}
RIVALS = ("axo", "axo-shared", "axo-c10d", "gloo", "mpi")
FLOOR_BYTES = {"axo": 5, "axo-c10d": 5, "axo-shared": 4}  # of an all_reduce, moved for each byte of its size
DEFAULT_OPS = "all_reduce,all_gather,reduce_scatter,all_to_all,broadcast,barrier"
FLOOR_SIZE = 64 << 20  # from here on; less stays in caches
MEMORY_SHARE = 0.25  # of what is free, for the buffers of all ranks
ROUND_BYTES = 16 << 20  # moved by one rival in one round, where calls are small


def main(arguments: list[str] | None = None) -> int:
    """Run the bench; returns 1 when a result is wrong."""
    parser = Parser("axo bench collectives", __doc__, json=True)
    parser.add_argument("--ranks", default="2", help="numbers of ranks, comma-separated")
    parser.add_argument("--ops", default=DEFAULT_OPS, help=f"operations, comma-separated, of {', '.join(BUS_FACTOR)}")
    parser.add_argument("--sizes", default="1K,64K,1M,16M,64M", help="bytes, with K, M or G")
    parser.add_argument("--dtype", default="float32", help="dtypes, comma-separated: float64, float32, bfloat16, ...")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--rivals", default="axo,axo-shared,axo-c10d,gloo", help="comma-separated, of: " + ", ".join(RIVALS)
    )
    parser.add_argument("--progress", action="store_true", help="measure progress under computation instead")
    parser.add_argument("--plot", type=Path, default=None, help="write a log-log PNG of busbw here")
    options = parser.parse_args(arguments)
    for name, known in (("ops", BUS_FACTOR), ("rivals", RIVALS)):
        unknown = set(getattr(options, name).split(",")) - set(known)
        if unknown:
            parser.error(f"--{name}: {', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    for name in options.dtype.split(","):
        if not isinstance(getattr(torch, name, None), torch.dtype):
            parser.error(f"--dtype: {name} is not a dtype of torch")

    from axo.launch import launch_local

    if options.progress:
        from .progress import bench

        return bench(options)
    header = {"bench": "collectives", **environment(torch.device("cpu"))}
    table = Table(COLUMNS, options.json, header)
    for ranks in map(int, options.ranks.split(",")):
        cases = list(cases_of(options, ranks))
        rivals = options.rivals.split(",")
        with mpi.ranks_of(ranks) if "mpi" in rivals else nullcontext((None, "")) as (folder, why):
            rows, traffic = launch_local(measure, ranks, cases, rivals, options.rounds, folder, table)
        table.rows += rows  # rank 0 has printed them
        if why:
            table.note(f"mpi, {ranks} ranks: {why}")
        table.note(f"copy traffic of {ranks} ranks at once: {traffic:.1f} GB/s", ranks=ranks, copy_gbs=traffic)
    if options.plot:
        plot(table.rows, options.plot)
    return int(any(row["wrong"] for row in table.rows))


def cases_of(options: argparse.Namespace, ranks: int) -> Any:
    """(op, bytes, dtype) that fit into memory; those that do not are named."""
    for op in options.ops.split(","):
        for text in ["0"] if op == "barrier" else options.sizes.split(","):
            size = parse_size(text)
            if 5 * size * ranks > MEMORY_SHARE * free_memory():
                print(f"left out: {op} of {text} on {ranks} ranks needs more than {MEMORY_SHARE:.0%} of free memory")
                continue
            for dtype in options.dtype.split(","):
                yield op, size, dtype


def parse_size(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    unit = units.get(text[-1:].upper(), 1)
    count = text[:-1] if unit > 1 else text
    if not (count.isascii() and count.isdigit()):
        raise ValueError(f"size {text!r} is not a number of bytes; write 4096, 64K, 1M or 1G")
    return int(count) * unit


def free_memory() -> int:
    with open("/proc/meminfo", encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def traffic_of(ranks: int, seconds: list[float]) -> float:
    """GB/s, read and written, of all ranks that copy FLOOR_SIZE bytes each, for the median of ``seconds``."""
    return 2 * FLOOR_SIZE * ranks / statistics.median(seconds) / 1e9


def measure(
    cases: list[tuple[str, int, str]], rivals: list[str], rounds: int, mpi_folder: str | None, table: Table
) -> tuple[list[dict[str, Any]], float]:
    """On every rank: time all cases; the rows, which rank 0 adds to ``table`` as they come, and the copy traffic."""
    import axo

    comms = axo.connect(f"{os.environ['WORLD_SIZE']}x1x1x1")
    comm = comms.world
    groups: dict[str, Any] = {"axo-c10d": dist.group.WORLD}
    if "gloo" in rivals:
        groups["gloo"] = dist.new_group(backend="gloo")
    peer = mpi.Peer(mpi_folder, comm.rank) if mpi_folder else None
    target, source = (torch.ones(FLOOR_SIZE, dtype=torch.uint8).numpy() for _ in range(2))
    copy = partial(np.copyto, target, source)
    traffic = traffic_of(comm.size, time_calls({"copy": copy}, comm, FLOOR_SIZE, 5)["copy"])
    rows = []
    for op, size, dtype_name in cases:
        dtype = getattr(torch, dtype_name)
        # Whole multiples of the ranks, so that parts are equal.
        count = size // dtype.itemsize // comm.size * comm.size
        calls = {}
        for rival in [rival for rival in rivals if rival != "mpi"]:
            group = groups.get(rival)
            buffers = calls_of.Buffers(count, dtype, comm, shared=rival == "axo-shared")
            call = calls_of.c10d_call(group, op, buffers) if group else calls_of.axo_call(comm, op, buffers)
            if rival == "gloo" and calls_of.refused(call):
                continue
            calls[rival] = buffers, call
        wrong = {rival: calls_of.count_wrong(call, comm, op, buffers) for rival, (buffers, call) in calls.items()}
        timed: dict[str, Any] = {rival: call for rival, (_, call) in calls.items()}
        if peer is not None and (found := peer.prepare(op, count, dtype_name)) is not None:
            timed["mpi"], wrong["mpi"] = peer, found
        if op == "all_reduce" and size >= FLOOR_SIZE:
            timed["copy"] = copy
        seconds = time_calls(timed, comm, count * dtype.itemsize, rounds)
        copied = seconds.pop("copy", None)
        for rival, times in seconds.items():
            median, moved = statistics.median(times), count * dtype.itemsize
            row = {"op": op, "rival": rival, "ranks": comm.size, "dtype": dtype_name, "case": size, "size": moved}
            row |= {"count": count, "time_us": median * 1e6, "least_us": min(times) * 1e6, "wrong": wrong[rival]}
            row |= {"algbw": moved / median / 1e9, "busbw": moved / median / 1e9 * BUS_FACTOR[op](comm.size)}
            for other in {"gloo", "mpi"} & set(seconds):
                row[f"times_{other}"] = statistics.median(seconds[other]) / median
            row["of_floor"] = None
            if copied is not None:
                row["copy_gbs"] = traffic_of(comm.size, copied)
                if rival in FLOOR_BYTES:
                    row["of_floor"] = row["algbw"] * FLOOR_BYTES[rival] / row["copy_gbs"]
            rows.append(row)
            if comm.rank == 0:
                table.add(**row)
    comms.close()
    return rows, traffic


def time_calls(calls: dict[str, Any], comm: Any, size: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of one call for each rival and round: the slowest rank's mean. Rivals take turns, in rotating order.

    Each turn begins with a call that is not timed: the rival before leaves caches, and threads, that are not its own.
    """
    repeats = max(2, min(200, ROUND_BYTES // max(size, 1)))
    seconds: dict[str, list[float]] = {rival: [] for rival in calls}
    order = list(calls.items())
    for round_number in range(rounds + 1):  # the first warms up
        for rival, call in order[round_number % len(order) :] + order[: round_number % len(order)]:
            if isinstance(call, mpi.Peer):
                mean = call.spend(repeats)
            else:
                call()
                comm.barrier()
                start = time.perf_counter()
                for _ in range(repeats):
                    call()
                mean = (time.perf_counter() - start) / repeats
            slowest = comm.all_reduce(torch.tensor([mean], dtype=torch.float64), "max").item()
            if round_number:
                seconds[rival].append(slowest)
    return seconds


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Bus bandwidth over size, a line for each operation, rival, dtype and number of ranks."""
    operations = sorted({row["op"] for row in rows if row["op"] != "barrier"}) or ["all_reduce"]
    columns = min(2, len(operations))
    lines_of_panels = -(-len(operations) // columns)
    with panels(path, (6 * columns, 4 * lines_of_panels), lines_of_panels, columns) as every:
        for panel in every[len(operations) :]:
            panel.set_visible(False)
        for op, panel in zip(operations, every, strict=False):
            lines: dict[tuple, list[tuple[int, float]]] = {}
            for row in rows:
                if row["op"] == op:
                    lines.setdefault((row["rival"], row["ranks"], row["dtype"]), []).append((row["size"], row["busbw"]))
            for (rival, ranks, dtype), points in lines.items():
                panel.loglog(*zip(*sorted(points), strict=True), marker="o", label=f"{rival}, {ranks} ranks, {dtype}")
            panel.set(title=op, xlabel="size (bytes)", ylabel="busbw (GB/s)")
            panel.grid(visible=True, which="major", alpha=0.3)
            panel.legend(fontsize=6)


if __name__ == "__main__":
    raise SystemExit(main())
