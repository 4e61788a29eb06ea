"""Open MPI's side of bench/collectives.py: the same cases through mpi4py, in a run of its own under mpirun.

Not interleaved with the others, since its ranks need another launcher; where mpirun or mpi4py is missing, one line says
so. Types that MPI cannot reduce (bfloat16, float16) and operations without an equal are left out.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from .collective_calls import BUS_FACTOR

DTYPES = ("float64", "float32", "int64", "int32", "int16", "int8", "uint8")
SECONDS = 600


def run(ranks: int, cases: list[tuple[str, int, str]], rounds: int) -> tuple[list[dict[str, Any]], str]:
    """The rows, and why there are none."""
    launcher = shutil.which("mpirun")
    if launcher is None or importlib.util.find_spec("mpi4py") is None:
        return [], "not installed (mpirun and mpi4py)"
    cases = [case for case in cases if case[2] in DTYPES]
    command = [launcher, "--oversubscribe", "--allow-run-as-root", "-np", str(ranks), sys.executable, "-m"]
    command += ["bench.mpi" if __package__ == "bench" else "axo_bench.mpi", json.dumps(cases), str(rounds)]
    folder = Path(__file__).resolve().parent.parent
    result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=folder, check=False)
    if result.returncode:
        return [], f"mpirun failed: {result.stderr.strip().splitlines()[-1:]}"
    return json.loads(result.stdout.splitlines()[-1]), ""


def rank_main(cases: list[tuple[str, int, str]], rounds: int) -> None:
    from mpi4py import MPI

    from .collectives import ROUND_BYTES, row_of

    comm = MPI.COMM_WORLD
    rows = []
    for op, size, dtype in cases:
        item = np.dtype(dtype).itemsize
        count = size // item // comm.size * comm.size
        whole, other = np.zeros(count, dtype), np.zeros(count, dtype)
        part = np.zeros(count // comm.size, dtype)
        root = comm.rank == 0
        call = {
            "all_reduce": lambda w=whole: comm.Allreduce(MPI.IN_PLACE, w),
            "all_gather": lambda w=whole, p=part: comm.Allgather(p, w),
            "reduce_scatter": lambda w=whole, p=part: comm.Reduce_scatter_block(w, p),
            "all_to_all": lambda w=whole, o=other: comm.Alltoall(w, o),
            "broadcast": lambda w=whole: comm.Bcast(w),
            "reduce": lambda w=whole, here=root: comm.Reduce(MPI.IN_PLACE if here else w, w if here else None),
            "gather": lambda w=whole, p=part, here=root: comm.Gather(p, w if here else None),
            "scatter": lambda w=whole, p=part, here=root: comm.Scatter(w if here else None, p),
            "barrier": comm.Barrier,
        }.get(op)
        if call is None:
            continue
        repeats = max(2, min(200, ROUND_BYTES // max(count * item, 1)))
        times = []
        for round_number in range(rounds + 1):
            call()
            comm.Barrier()
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            slowest = comm.allreduce((time.perf_counter() - start) / repeats, MPI.MAX)
            if round_number:
                times.append(slowest)
        whole[:] = np.arange(count) % 5 + comm.rank
        wrong = 0
        if op == "all_reduce":
            call()
            total = comm.size * (np.arange(count) % 5) + comm.size * (comm.size - 1) // 2
            wrong = comm.allreduce(int((whole != total.astype(dtype)).sum()))
        rows.append({**row_of(op, "mpi", comm.size, dtype, size, count * item, count, times), "wrong": wrong})
    if comm.rank == 0:
        assert {row["op"] for row in rows} <= set(BUS_FACTOR)
        print(json.dumps(rows))


if __name__ == "__main__":
    rank_main(json.loads(sys.argv[1]), int(sys.argv[2]))
