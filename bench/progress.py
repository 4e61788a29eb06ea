"""Does a pending all_reduce advance while Python computes, and what do the two cost each other?

    axo bench collectives --progress --ranks 2

Every rank issues an all_reduce of 64 MiB, then multiplies matrices of its own, in one thread and without a call into
Axo, for about twice as long as the all_reduce takes alone. A round counts as complete when the operation is done, on
every rank, at the moment the product returns. `both_ms` is the time of the two together, up to the wait's return;
`cost` is both over the sum of the two alone. All times are medians of the slowest rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
from functools import partial
from typing import Any

import torch

from .lib.clock import slowest
from .lib.table import Table, environment

COLUMNS = {"case": "s", "ranks": "d", "size": "d", "rounds": "d", "complete": "d", "reduce_ms": ".1f"}
COLUMNS |= {"matmul_ms": ".1f", "both_ms": ".1f", "cost": ".3f"}
SIZE = 64 << 20


def bench(options: argparse.Namespace) -> int:
    from axo.launch import launch_local

    header = {"bench": "collectives progress", **environment(torch.device("cpu"))}
    table = Table(COLUMNS, options.json, header)
    for ranks in map(int, options.ranks.split(",")):
        for shared in (False, True):
            table.add(**launch_local(measure, ranks, shared, max(options.rounds, 20)))
    return 0


def measure(shared: bool, rounds: int) -> dict[str, Any]:
    import axo

    torch.set_num_threads(1)
    comms = axo.connect(f"{os.environ['WORLD_SIZE']}x1x1x1")
    comm = comms.world
    count = SIZE // 4
    data = axo.empty_shared((count,)).zero_() if shared else torch.zeros(count)

    def reduced() -> None:
        comm.all_reduce(data, async_op=True).wait()

    reduce = statistics.median(slowest(comm, reduced) for _ in range(9))
    a, b = torch.ones(512, 512), torch.ones(512, 512)
    out = torch.empty(512, 512)
    torch.matmul(a, b, out=out)

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.matmul(a, b, out=out)

    once = statistics.median(slowest(comm, partial(multiply, 8)) for _ in range(9)) / 8
    times = max(1, round(2 * reduce / once))
    done = torch.zeros(1)

    def both() -> None:
        work = comm.all_reduce(data, async_op=True)
        multiply(times)
        done.fill_(work.is_completed())
        work.wait()

    seconds, complete = [], 0
    for _ in range(rounds):
        seconds.append([slowest(comm, call) for call in (reduced, partial(multiply, times), both)])
        complete += int(comm.all_reduce(done.clone(), "min"))
    comms.close()
    alone, product, together = (1e3 * statistics.median(each) for each in zip(*seconds, strict=True))
    return {
        "case": "shared" if shared else "private", "ranks": comm.size, "size": SIZE, "rounds": rounds,
        "complete": complete, "reduce_ms": alone, "matmul_ms": product, "both_ms": together,
        "cost": together / (alone + product),
    }  # fmt: skip
