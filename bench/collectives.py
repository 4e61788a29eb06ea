"""How fast are the collectives of this machine's CPUs? Axo against torch's Gloo, interleaved in one run.

    axo bench collectives --ranks 2,4 --ops all_reduce,barrier --sizes 1K,1M,64M

Columns as in nccl-tests: size in bytes (all_reduce, broadcast: the buffer; all_gather: the whole result;
reduce_scatter, all_to_all: the whole input), time of one call in microseconds (median of rounds, each the slowest
rank's mean), algbw = size / time and busbw = algbw * the operation's factor in GB/s (1e9 bytes), and #wrong elements
over all ranks. Calls are blocking. "axo" is Axo's own API, "axo-c10d" torch.distributed over it, "gloo" torch's
default.

It does not measure overlap, nor GPUs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .table import Table, environment

COLUMNS = {"op": "s", "rival": "s", "ranks": "d", "dtype": "s", "size": "d", "count": "d", "time_us": ".2f"}
COLUMNS |= {"algbw": ".3f", "busbw": ".3f", "times_gloo": ".1f", "wrong": "d"}
RIVALS = ("axo", "axo-c10d", "gloo")
BUS_FACTOR = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "barrier": lambda n: 0.0,
}
MEMORY_SHARE = 0.25  # of what is free, for the buffers of all ranks


def main(arguments: list[str] | None = None) -> int:
    """Run the bench; returns 1 when a result is wrong."""
    parser = argparse.ArgumentParser(prog="axo bench collectives", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2", help="numbers of ranks, comma-separated")
    parser.add_argument("--ops", default=",".join(BUS_FACTOR), help="operations, comma-separated")
    parser.add_argument("--sizes", default="1K,64K,1M,16M,64M", help="bytes, with K, M or G")
    parser.add_argument("--dtype", default="float32", help="float64, float32, bfloat16, float16, int32, ...")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, default=None, help="append JSON lines here")
    parser.add_argument("--plot", type=Path, default=None, help="write a log-log PNG of busbw here")
    options = parser.parse_args(arguments)
    unknown = set(options.ops.split(",")) - set(BUS_FACTOR)
    if unknown:
        parser.error(f"--ops: {', '.join(sorted(unknown))}: choose from {', '.join(BUS_FACTOR)}")

    from axo.launch import launch_local

    header = {"bench": "collectives", **environment(torch.device("cpu")), "copy_gbs": copy_limit()}
    table = Table(COLUMNS, options.json, header)
    for ranks in map(int, options.ranks.split(",")):
        cases = list(cases_of(options, ranks))
        for row in launch_local(measure, ranks, cases, options.dtype, options.rounds):
            table.add(**row)
    table.note(f"memory traffic of a copy, one core: {header['copy_gbs']:.1f} GB/s", copy_gbs=header["copy_gbs"])
    if options.plot:
        plot(table.rows, options.plot)
    return int(any(row["wrong"] for row in table.rows))


def cases_of(options: argparse.Namespace, ranks: int) -> Any:
    """(op, bytes) that fit into memory; those that do not are named."""
    for op in options.ops.split(","):
        for text in ["0"] if op == "barrier" else options.sizes.split(","):
            size = parse_size(text)
            if 3 * size * ranks > MEMORY_SHARE * free_memory():
                print(f"left out: {op} of {text} on {ranks} ranks needs more than {MEMORY_SHARE:.0%} of free memory")
            else:
                yield op, size


def parse_size(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    unit = units.get(text[-1].upper(), 1)
    return int(text[:-1] if unit > 1 else text) * unit


def free_memory() -> int:
    with open("/proc/meminfo", encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def copy_limit() -> float:
    """GB/s of memory traffic (read and write) of a large copy in one thread.

    NumPy, since ranks are forked from this process: torch's thread pool must not have run in it.
    """
    source = np.ones(64 << 20, dtype=np.uint8)
    target = np.empty_like(source)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - start)
    return 2 * source.nbytes / min(seconds) / 1e9


def measure(cases: list[tuple[str, int]], dtype_name: str, rounds: int) -> list[dict[str, Any]]:
    """On every rank: time all cases; the rows."""
    import axo

    dtype = getattr(torch, dtype_name)
    comms = axo.connect(f"{os.environ['WORLD_SIZE']}x1x1x1")
    groups = {"axo-c10d": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    rows = []
    for op, size in cases:
        calls: dict[str, Callable[..., Any]] = {"axo": axo_call(comms.world, op)}
        calls |= {rival: c10d_call(group, op) for rival, group in groups.items()}
        # Whole multiples of the ranks, so that parts are equal.
        count = size // dtype.itemsize // comms.world.size * comms.world.size
        wrong = {rival: count_wrong(call, comms.world, op, count, dtype) for rival, call in calls.items()}
        seconds = time_calls(calls, comms.world, op, count, dtype, rounds)
        for rival in RIVALS:
            if rival not in seconds:
                continue
            algbw = count * dtype.itemsize / seconds[rival] / 1e9
            rows.append(
                {
                    "op": op,
                    "rival": rival,
                    "ranks": comms.world.size,
                    "dtype": dtype_name,
                    "size": count * dtype.itemsize,
                    "count": count,
                    "time_us": seconds[rival] * 1e6,
                    "algbw": algbw,
                    "busbw": algbw * BUS_FACTOR[op](comms.world.size),
                    "times_gloo": seconds["gloo"] / seconds[rival],
                    "wrong": wrong[rival],
                }
            )
    comms.close()
    return rows


def axo_call(comm: Any, op: str) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    return {
        "all_reduce": lambda whole, part: comm.all_reduce(whole),
        "all_gather": lambda whole, part: comm.all_gather(part, whole),
        "reduce_scatter": lambda whole, part: comm.reduce_scatter(whole, part),
        "all_to_all": lambda whole, part: comm.all_to_all(whole, torch.empty_like(whole)),
        "broadcast": lambda whole, part: comm.broadcast(whole),
        "barrier": lambda whole, part: comm.barrier(),
    }[op]


def c10d_call(group: Any, op: str) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    def all_to_all(whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(whole)
        dist.all_to_all_single(out, whole, group=group)
        return out

    return {
        "all_reduce": lambda whole, part: dist.all_reduce(whole, group=group),
        "all_gather": lambda whole, part: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda whole, part: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_to_all": all_to_all,
        "broadcast": lambda whole, part: dist.broadcast(whole, 0, group=group),
        "barrier": lambda whole, part: dist.barrier(group=group),
    }[op]


def count_wrong(call: Any, comm: Any, op: str, count: int, dtype: torch.dtype) -> int:
    """Elements that differ from what whole numbers must give, over all ranks."""
    base, ranks = torch.arange(count) % 5, comm.size
    each = count // ranks
    mine = slice(comm.rank * each, (comm.rank + 1) * each)
    whole, part = (base + comm.rank).to(dtype), (base[mine] + comm.rank).to(dtype)
    if op == "all_gather":
        whole.zero_()
    result = call(whole, part)
    total = ranks * base + ranks * (ranks - 1) // 2
    owner = torch.arange(ranks).repeat_interleave(each)
    got, expected = {
        "all_reduce": (whole, total),
        "all_gather": (whole, base + owner),
        "reduce_scatter": (part, total[mine]),
        "all_to_all": (result, base[mine].repeat(ranks) + owner),
        "broadcast": (whole, base),
        "barrier": (base, base),
    }[op]
    wrong = (got.to(torch.float64) != expected.to(torch.float64)).sum().reshape(1)
    return int(comm.all_reduce(wrong))


def time_calls(calls: Any, comm: Any, op: str, count: int, dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """Seconds of one call for each rival: median over rounds of the slowest rank's mean; rivals take turns."""
    whole, part = torch.zeros(count, dtype=dtype), torch.zeros(count // comm.size, dtype=dtype)
    repeats = max(2, min(200, (4 << 20) // max(whole.nbytes, 1)))
    seconds: dict[str, list[float]] = {rival: [] for rival in calls}
    for round_number in range(rounds + 1):  # the first warms up
        for rival, call in calls.items():
            comm.barrier()
            start = time.perf_counter()
            for _ in range(repeats):
                call(whole, part)
            spent = torch.tensor([(time.perf_counter() - start) / repeats], dtype=torch.float64)
            slowest = comm.all_reduce(spent, "max").item()
            if round_number:
                seconds[rival].append(slowest)
    return {rival: statistics.median(values) for rival, values in seconds.items()}


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Bus bandwidth over size, a line for each operation, rival and number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    lines: dict[tuple, list[tuple[int, float]]] = {}
    for row in rows:
        if row["op"] != "barrier":
            lines.setdefault((row["op"], row["rival"], row["ranks"]), []).append((row["size"], row["busbw"]))
    for (op, rival, ranks), points in lines.items():
        axes.loglog(*zip(*sorted(points), strict=True), marker="o", label=f"{op} {rival} x{ranks}")
    axes.set_xlabel("size (bytes)")
    axes.set_ylabel("busbw (GB/s)")
    axes.legend(fontsize=6)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    raise SystemExit(main())
