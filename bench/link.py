"""Collectives of CPU ranks over a limited link: against what the formulas say, and hidden behind products.

    axo bench link --ranks 8 --ranks-per-host 2 --limit 200M

Ranks of this machine play several hosts (axo.comm.hosts.simulate), and what leaves a host is held to the rate of
``--limit``. ``expected`` is the bytes that leave a host over the rate, plus the latency of each step: for H hosts
all_reduce 2 (H-1)/H N in two steps, all_gather and reduce_scatter (H-1)/H N in one, with N the whole message; ``3 at
once`` are three communicators of the same ranks that all-reduce N/3 bytes each. ``#wrong`` counts wrong elements.

Overlap: an all_reduce issued before a product and waited for after it. ``hidden`` is the share of the communication's
time that the product covers, (comm + compute - both) / comm: 1 is all of it. Medians over rounds of the slowest rank.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .lib.arguments import Parser, numbers
from .lib.link import rate, seconds
from .lib.table import Table, environment

COLUMNS = {
    "what": "s",
    "ranks": "d",
    "hosts": "d",
    "size": "d",
    "ms": ".2f",
    "expected": ".2f",
    "ratio": ".3f",
    "compute": ".2f",
    "both": ".2f",
    "hidden": ".2f",
    "#wrong": "d",
}


def main(arguments: list[str] | None = None) -> int:
    """Run the bench; returns 1 when a result is wrong."""
    from axo.launch import launch_local

    parser = Parser("axo bench link", __doc__, json=True)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--limit", type=rate, default="200M", help="bytes a second that leave a host: 200M, 1.5G")
    parser.add_argument("--latency", type=seconds, default=0.0, help="of each step between hosts, such as 200us")
    parser.add_argument("--sizes", default="1000000,4000000,16000000", help="bytes of the whole message")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    if options.ranks % options.ranks_per_host or options.ranks == options.ranks_per_host:
        parser.error(f"{options.ranks} ranks do not make several hosts of {options.ranks_per_host}")
    options.sizes = numbers("--sizes", options.sizes)
    header = environment(torch.device("cpu")) | {"limit": options.limit, "latency": options.latency}
    rows = launch_local(measure, options.ranks, options, Table(COLUMNS, options.json, header))
    return int(any(row["#wrong"] for row in rows))


def measure(options: argparse.Namespace, table: Table) -> list[dict[str, Any]]:
    """The rows, on every rank; rank 0 adds them to ``table`` as they come."""
    import axo
    from axo.comm.hosts import simulate

    torch.set_num_threads(1)
    hosts = options.ranks // options.ranks_per_host
    latency = options.latency
    simulate(options.ranks_per_host, rate=options.limit, latency=latency)
    rows: list[dict[str, Any]] = []

    def add(**row: Any) -> None:
        rows.append(row)
        if world.rank == 0:
            table.add(**row)

    with axo.connect(f"{options.ranks}x1x1x1") as comms:
        world = comms.world
        three = [world.split(0, world.rank, name=f"part{i}") for i in range(3)]
        for size in options.sizes:
            count = size // 4 // options.ranks // 3 * options.ranks * 3
            whole, part = torch.zeros(count), torch.zeros(count // options.ranks)
            thirds = list(whole.chunk(3))
            share = (hosts - 1) / hosts * whole.nbytes / options.limit
            calls: dict[str, tuple[Callable[[], Any], float]] = {
                "all_reduce": (partial(world.all_reduce, whole), 2 * share + _steps(hosts) * latency),
                "all_gather": (partial(world.all_gather, part, whole), share + latency),
                "reduce_scatter": (partial(world.reduce_scatter, whole, part), share + latency),
                "all_reduce 3 at once": (
                    partial(_at_once, three, thirds),
                    2 * share + _steps(hosts) * latency,
                ),
            }
            for what, (call, expected) in calls.items():
                seconds = _median(world, call, options.rounds)
                wrong = _wrong(world, what, whole)
                figures = {"ms": seconds * 1e3, "expected": expected * 1e3, "ratio": seconds / expected}
                size_of = {"ranks": options.ranks, "hosts": hosts, "size": whole.nbytes}
                add(**{"what": what} | size_of | figures | {"#wrong": wrong})
            add(**_overlap(world, whole, options, hosts, 2 * share + _steps(hosts) * latency))
    return rows


def _at_once(communicators: list[Any], tensors: list[torch.Tensor]) -> None:
    works = [comms.all_reduce(t, async_op=True) for comms, t in zip(communicators, tensors, strict=True)]
    for work in works:
        work.wait()


def _steps(hosts: int) -> int:
    return 1 if hosts == 2 else 2


def _overlap(
    world: Any, whole: torch.Tensor, options: argparse.Namespace, hosts: int, expected: float
) -> dict[str, Any]:
    """The all_reduce beside products that take about as long on this machine, all ranks computing."""
    matrix = torch.randn(192, 192)

    def compute(repeats: int) -> None:
        for _ in range(repeats):
            matrix @ matrix

    once = _median(world, lambda: compute(20), options.rounds) / 20
    repeats = max(1, int(1.5 * expected / once))

    def both() -> None:
        work = world.all_reduce(whole, async_op=True)
        compute(repeats)
        work.wait()

    alone = _median(world, lambda: world.all_reduce(whole), options.rounds)
    computing = _median(world, lambda: compute(repeats), options.rounds)
    together = _median(world, both, options.rounds)
    return {
        "what": "all_reduce behind products", "ranks": options.ranks, "hosts": hosts, "size": whole.nbytes,
        "ms": alone * 1e3, "expected": expected * 1e3, "ratio": alone / expected, "compute": computing * 1e3,
        "both": together * 1e3, "hidden": (alone + computing - together) / alone,
        "#wrong": _wrong(world, "all_reduce", whole),
    }  # fmt: skip


def _median(world: Any, call: Callable[[], Any], rounds: int) -> float:
    """Seconds of one call: median over rounds of the slowest rank; the first round warms up."""
    values = []
    for _ in range(rounds + 1):
        world.barrier()
        start = time.perf_counter()
        call()
        spent = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        values.append(world.all_reduce(spent, "max").item())
    return statistics.median(values[1:])


def _wrong(world: Any, what: str, whole: torch.Tensor) -> int:
    """Elements that differ from what whole numbers must give, over all ranks."""
    base = (torch.arange(whole.numel()) % 5).float()
    total = world.size * base + sum(range(world.size))
    each = whole.numel() // world.size
    mine = slice(world.rank * each, (world.rank + 1) * each)
    if what == "all_gather":
        got, expected = (
            world.all_gather(base[mine] + world.rank),
            base + torch.arange(world.size).repeat_interleave(each),
        )
    elif what == "reduce_scatter":
        got, expected = world.reduce_scatter(base + world.rank), total[mine]
    else:
        got, expected = world.all_reduce(base + world.rank), total
    return int(world.all_reduce((got != expected).sum().reshape(1)))


if __name__ == "__main__":
    raise SystemExit(main())
