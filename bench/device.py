"""The device transport on a GPU: right, light, and in a graph. (The kernels have ``bench.kernels``.)

    axo bench device --out results
    python3 -m bench.device --out results             the same, from the root of a checkout
    python3 -m bench.device --out results --standin   the same code on stand-ins; its times mean nothing

1. Right: every collective, dtype and a few sizes, at 1, 2 and 4 ranks, against sums written out. Ranks are threads: on
   GPUs of their own where there are enough, else together on one (NCCL 2.30 and newer).
2. Light: microseconds of host time for a call, beside torch's own NCCL backend, in turns. Judged between two ranks, as
   processes on GPUs of their own: with one rank NCCL launches no kernel, which is not what a program pays.
3. A graph of three communicators, replayed 1,000 times.

What cannot run here gives a row that says "not measured", and why.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import axo
from axo.comm.transports import meet

from .lib.arguments import Parser
from .lib.attempts import attempt, end, end_with_parent
from .lib.table import Table, environment

COLUMNS = {"check": "s", "ranks": "d", "bytes": "d", "us": ".1f", "wrong": "d"}
OVERHEAD_US = 3.0
BATCH = 100  # calls between two waits for the device: more could fill a stream, and then a call waits for it
TOGETHER_SECONDS = 120.0  # for two processes that measure together
ONE_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}


class Gpu:
    """The GPU of this machine."""

    kind = "cuda"
    replays = 1000
    calls = 1000

    def __init__(self, folder: Path | None = None) -> None:
        pass

    def place(self, rank: int, ranks: int) -> torch.device:
        count = torch.cuda.device_count()
        return torch.device("cuda", rank if count >= ranks else 0)

    def refusal(self, ranks: int) -> str | None:
        """Why so many ranks cannot run here."""
        count = torch.cuda.device_count()
        version = tuple(torch.cuda.nccl.version())
        if count >= ranks or (version >= (2, 30) and torch.version.hip is None):
            return None
        return f"{ranks} ranks want {ranks} GPUs or NCCL 2.30; here are {count} and {'.'.join(map(str, version))}"

    def apart(self, ranks: int) -> bool:
        """Whether so many ranks have GPUs of their own."""
        return torch.cuda.device_count() >= ranks

    def capture(self) -> tuple[AbstractContextManager, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        # torch's own stream for captures is one for all threads, on the GPU of the first
        return torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"), graph.replay

    def rival(self) -> str | None:
        return "nccl"


class StandIn:
    """The stand-in of tests/standin.py: bytes really move, times mean nothing. ``folder``: where processes meet."""

    kind = "standin"
    replays = 30
    calls = 20

    def __init__(self, folder: Path | None = None) -> None:
        try:
            from tests import standin
        except ModuleNotFoundError:
            raise ValueError("--standin wants a checkout: the stand-in is part of the tests") from None
        standin.build()
        self._gpu = standin.install(folder)

    def place(self, rank: int, ranks: int) -> torch.device:
        return torch.device("standin", rank)

    def refusal(self, ranks: int) -> str | None:
        return None

    def apart(self, ranks: int) -> bool:
        return True

    def capture(self) -> tuple[AbstractContextManager, Callable[[], None]]:
        graph = self._gpu.capture()
        return graph, graph.replay

    def rival(self) -> str | None:
        return None


class Rank:
    """One rank, on a thread or as a process: its communicators, all over the same ranks."""

    def __init__(
        self, gpu: Any, store: Any, rank: int, size: int, meet_here: Callable[[], int], threads: bool = True
    ) -> None:
        self.gpu, self.rank, self.size = gpu, rank, size
        self.meet_here = meet_here  # returns when the threads of all ranks have come
        self.device = gpu.place(rank, size)
        torch.accelerator.set_device_index(self.device.index)
        torch.accelerator.set_stream(torch.Stream(device=self.device))
        options = axo.DeviceOptions(max_ctas=2 if size > 1 else 0)
        self.world = meet(store, "bench", rank, size, self.device, 60.0, options, meeting=60.0, threads=threads)
        splits = [self.world.split(0, rank, name=name) for name in ("second", "third")]
        self.lines = [self.world, *(line for line in splits if line is not None)]

    def synchronize(self) -> None:
        torch.accelerator.current_stream(self.device).synchronize()

    def close(self) -> None:
        self.synchronize()
        for line in reversed(self.lines):
            line.close()


def on_ranks(gpu: Any, size: int, work: Callable[[Rank], None]) -> None:
    """Call ``work`` on so many ranks; the first error ends the others and is raised."""
    store = dist.HashStore()
    errors: list[BaseException] = []
    ranks: list[Rank] = []
    threads_met = threading.Barrier(size)

    def run(number: int) -> None:
        try:
            rank = Rank(gpu, store, number, size, threads_met.wait)
            ranks.append(rank)
            work(rank)
            rank.close()
        except BaseException as error:
            errors.append(error)
            threads_met.abort()
            for other in list(ranks):
                for line in other.lines:
                    line.abort(f"rank {number}: {error}")

    threads = [threading.Thread(target=run, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def right(gpu: Any, size: int, table: Table) -> None:
    """Every collective against what it must give: whole numbers, so equality is exact."""
    sizes = [1, 1000, 1 << 20] if gpu.kind == "cuda" else [1, 300]
    reduced = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64)
    totals: dict[str, int] = {}
    lock = threading.Lock()
    moved = (torch.uint8, torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn)

    def check(rank: Rank) -> None:
        comm, me, device = rank.world, rank.rank, rank.device
        wrong: dict[str, int] = {}

        def compare(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
            same = torch.equal(got.cpu().view(torch.uint8), expected.contiguous().view(torch.uint8))
            wrong[name] = wrong.get(name, 0) + (not same)

        def part(of: int, count: int, dtype: torch.dtype) -> torch.Tensor:
            return ((torch.arange(count) + of) % 2).to(dtype)

        for dtype in (*reduced, *moved):
            for count in sizes:
                everyone = [part(r, count, dtype) for r in range(size)]
                whole, mine = torch.cat(everyone), everyone[me].to(device)
                compare("all_gather", comm.all_gather(mine), whole)
                compare("broadcast", comm.broadcast(mine.clone(), size - 1), everyone[-1])
                compare("all_to_all", comm.all_to_all(torch.cat([mine] * size)), whole)
                gathered = comm.gather(mine, 0)
                if me == 0:
                    compare("gather", gathered, whole)
                source, out = (whole.to(device), None) if me == 0 else (None, torch.empty_like(mine))
                compare("scatter", comm.scatter(source, 0, out), everyone[me])
                if size > 1:
                    got, peer = torch.empty_like(mine), (me + 1) % size
                    with axo.group():
                        comm.send(mine, peer)
                        comm.recv(got, (me - 1) % size)
                    compare("send and recv", got, everyone[(me - 1) % size])
                    rows = [count if r == 0 else 1 for r in range(size)]
                    got = comm.all_to_all(mine[:1].repeat(sum(rows)), send_counts=rows, recv_counts=[rows[me]] * size)
                    expected = torch.cat([everyone[r][:1].repeat(rows[me]) for r in range(size)])
                    compare("uneven all_to_all", got, expected)
                if dtype not in reduced:
                    continue
                stack = torch.stack(everyone)
                results = {"sum": stack.sum(0), "max": stack.amax(0), "min": stack.amin(0), "product": stack.prod(0)}
                for op, result in results.items():
                    expected = result.to(dtype)
                    compare(f"all_reduce {op}", comm.all_reduce(mine.clone(), op), expected)
                    at_root = comm.reduce(mine.clone(), 0, op)
                    if me == 0:
                        compare(f"reduce {op}", at_root, expected)
                    compare(f"reduce_scatter {op}", comm.reduce_scatter(torch.cat([mine] * size), op=op), expected)
                if dtype.is_floating_point:
                    half = (results["sum"] / 2).to(dtype)
                    compare("scaled all_reduce", comm.all_reduce(mine.clone(), scale=0.5), half)
                    compare("scaled reduce_scatter", comm.reduce_scatter(torch.cat([mine] * size), scale=0.5), half)
                    if size != 3:
                        compare(
                            "all_reduce avg", comm.all_reduce(mine.clone(), "avg"), (results["sum"] / size).to(dtype)
                        )
        comm.barrier()
        shared = axo.empty_shared((1000,), device=device, comms=comm) if size > 1 else None
        if shared is not None:
            shared.fill_(me + 1.0)
            compare("all_reduce in a window", comm.all_reduce(shared), torch.full((1000,), size * (size + 1) / 2))
        for name, count in wrong.items():
            with lock:
                totals[name] = totals.get(name, 0) + count

    on_ranks(gpu, size, check)
    for name, count in sorted(totals.items()):
        table.add(check=name, ranks=size, bytes=None, us=None, wrong=count)


def call_times(gpu: Any, rank: Rank, store: Any) -> dict[str, float]:
    """Microseconds of host time for a call, by contestant: Axo's and torch's, in turns."""
    tensor = torch.ones(1, device=rank.device)
    calls: dict[str, Callable[[], Any]] = {
        "axo all_reduce": lambda: rank.world.all_reduce(tensor),
        "axo all_reduce, pending": lambda: rank.world.all_reduce(tensor, async_op=True).wait(),
    }
    rival = gpu.rival()
    if rival is not None:
        dist.init_process_group(rival, store=store, rank=rank.rank, world_size=rank.size, device_id=rank.device)
        calls["torch NCCL all_reduce"] = lambda: dist.all_reduce(tensor)
        calls["torch NCCL all_reduce, pending"] = lambda: dist.all_reduce(tensor, async_op=True).wait()
    times: dict[str, list[float]] = {name: [] for name in calls}
    batch = min(BATCH, gpu.calls)
    for _ in range(9):
        for name, call in calls.items():
            spent = 0.0
            for _ in range(gpu.calls // batch):
                rank.synchronize()
                start = time.perf_counter()
                for _ in range(batch):
                    call()
                spent += time.perf_counter() - start
            times[name].append(1e6 * spent / (gpu.calls // batch * batch))
    rank.synchronize()
    if rival is not None:
        dist.destroy_process_group()
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def light(gpu: Any, size: int, table: Table) -> float | None:
    """Host time of a call: rows, of the slower rank each; returns the most that Axo's takes over torch's on a rank.

    Several ranks are processes, since threads would wait for each other's turn with Python's lock.
    """
    found: list[dict[str, float]] = []
    if size == 1:
        on_ranks(gpu, 1, lambda rank: found.append(call_times(gpu, rank, dist.HashStore())))
    else:
        found = in_processes(gpu, size)
    for name in found[0]:
        table.add(check=name, ranks=size, bytes=4, us=max(times[name] for times in found), wrong=None)
    rival = "torch NCCL all_reduce"
    return max(times["axo all_reduce"] - times[rival] for times in found) if rival in found[0] else None


def in_processes(gpu: Any, size: int) -> list[dict[str, float]]:
    """What :func:`call_times` finds on each of so many ranks, which are processes.

    Raises:
        RuntimeError: One of them failed, or they did not end within their time.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", f"{__package__}.device", *(["--standin"] if gpu.kind == "standin" else [])]
        until = time.monotonic() + TOGETHER_SECONDS
        ranks = [
            subprocess.Popen([*command, "--light", str(rank), str(size), folder], stdout=subprocess.DEVNULL)
            for rank in range(size)
        ]
        try:
            for number, rank in enumerate(ranks):
                if rank.wait(max(0.0, until - time.monotonic())):
                    raise RuntimeError(f"rank {number} of {size} ended with {rank.returncode} (its lines are above)")
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{size} ranks did not end within {TOGETHER_SECONDS:g} s") from None
        finally:
            for rank in ranks:
                end(rank)
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(size)]


def one_process(kind: type, number: int, size: int, folder: Path) -> None:
    """One rank of :func:`in_processes`."""
    end_with_parent()
    peers = folder / "peers"
    peers.mkdir(exist_ok=True)
    gpu, store = kind(peers), dist.FileStore(str(folder / "store"), size)
    rank = Rank(gpu, dist.PrefixStore("axo", store), number, size, lambda: 0, threads=False)
    found = call_times(gpu, rank, dist.PrefixStore("torch", store))
    rank.close()
    (folder / f"{number}.json").write_text(json.dumps(found))


def judged(extra: dict[int, float | None]) -> dict[str, bool | str]:
    """The verdict on what :func:`light` has found, by ranks. That of one rank is no verdict."""
    name = f"overhead over torch's NCCL backend under {OVERHEAD_US:g} us a call"
    alone, together = extra.get(1), extra.get(2)
    if together is not None:
        return {f"{name}: {together:.2f}": together < OVERHEAD_US}
    if alone is not None:
        return {name: f"not measured: one rank takes another path in NCCL ({alone:.2f} us there)"}
    return {name: "not measured"}


def graph(gpu: Any, size: int, table: Table) -> None:
    """Three communicators in one graph; every replay's results are checked."""

    def check(rank: Rank) -> None:
        source = torch.ones(1000, device=rank.device)
        tensors = [torch.zeros(1000, device=rank.device) for _ in rank.lines]
        bad = torch.zeros(1, device=rank.device)
        for line, tensor in zip(rank.lines, tensors, strict=True):
            line.all_reduce(tensor)  # the library connects before the capture
        rank.synchronize()
        # Nobody may ask for an event while another thread captures.
        rank.meet_here()
        context, replay = gpu.capture()
        with context:
            for tensor in tensors:
                tensor.copy_(source)
            works = [line.all_reduce(t, async_op=True) for line, t in zip(rank.lines, tensors, strict=True)]
            for work in works:
                work.wait()
        rank.meet_here()
        start = time.perf_counter()
        for number in range(gpu.replays):
            source.fill_(float(number % 7))
            replay()
            for tensor in tensors:
                bad += (tensor != size * float(number % 7)).any()
        rank.synchronize()
        us = 1e6 * (time.perf_counter() - start) / gpu.replays
        if rank.rank == 0:
            name = f"graph of 3 communicators, {gpu.replays} replays"
            table.add(check=name, ranks=size, bytes=4000, us=us, wrong=int(bad.item()))

    on_ranks(gpu, size, check)


def measure(gpu: Any, table: Table) -> dict[str, bool | str]:
    """All of it; the verdicts."""
    if gpu.kind == "cuda" and torch.cuda.device_count() < 4:
        for name, value in ONE_GPU.items():
            os.environ.setdefault(name, value)
    device = torch.device("cuda" if gpu.kind == "cuda" else "cpu")
    verdicts: dict[str, bool | str] = {}
    for size in (1, 2, 4):
        refusal, failed = gpu.refusal(size), len(table.failed)
        for what, check in (("collectives", right), ("graph", graph)) if refusal is None else ():
            attempt(f"{what} at {size} ranks", partial(check, gpu, size, table), device, table)
        name = f"collectives and graph at {size} ranks"
        verdicts[name] = f"not measured: {refusal}" if refusal else len(table.failed) == failed
    wrong = sum(row["wrong"] or 0 for row in table.rows)
    verdicts["wrong results of collectives: 0"] = wrong == 0
    extra: dict[int, float | None] = {}

    def host_time(size: int) -> None:
        extra[size] = light(gpu, size, table)

    for size in (1, 2):
        if size == 1 or gpu.apart(size):
            attempt(f"host time of a call at {size} ranks", partial(host_time, size), device, table)
    verdicts |= judged(extra)
    verdicts |= dict.fromkeys(table.failed.values(), False)
    return verdicts


def main(arguments: list[str] | None = None) -> int:
    """Run everything; returns the number of failed verdicts."""
    parser = Parser("axo bench device", __doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/device"))
    parser.add_argument("--standin", action="store_true", help="on stand-ins for a GPU; times mean nothing")
    parser.add_argument("--light", nargs=3, help=argparse.SUPPRESS)  # rank, ranks, folder: one process of several
    options = parser.parse_args(arguments)
    if options.light:
        number, size, folder = options.light
        one_process(StandIn if options.standin else Gpu, int(number), int(size), Path(folder))
        return 0
    if not options.standin and not torch.cuda.is_available():
        parser.error("no GPU is visible; --standin walks through on stand-ins")
    gpu = StandIn() if options.standin else Gpu()
    started = time.perf_counter()
    header = environment(torch.device("cpu" if options.standin else "cuda")) | {"bench": "device"}
    path = options.out / "device.jsonl"
    path.unlink(missing_ok=True)
    table = Table(COLUMNS, path, header | ({"kind": "standin"} if options.standin else {}))
    verdicts = measure(gpu, table) | {"seconds": f"{time.perf_counter() - started:.0f}"}
    return table.judge(verdicts)


if __name__ == "__main__":
    raise SystemExit(main())
