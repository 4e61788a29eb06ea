"""The device transport on a GPU: right, light, in a graph, and when a rank dies. (Kernels have ``bench.kernels``.)

    axo bench device --out results
    python3 -m bench.device --out results             the same, from the root of a checkout
    python3 -m bench.device --out results --standin   the same code on stand-ins; its times mean nothing

Ranks are processes with a limit of time: on GPUs of their own where there are enough. Else they share one, each with a
host of its own as far as NCCL knows (``NCCL_HOSTID``): then it takes the network, here the loopback. Torch's own NCCL
backend is tried first there, so that what fails is known as the library's.

1. Right: every collective, dtype and a few sizes, at 1, 2 and 4 ranks, against sums written out.
2. Light: microseconds of host time for a call, beside torch's own NCCL backend, in turns. Judged between two ranks:
   with one NCCL launches no kernel, which is not what a program pays.
3. A graph of three communicators, replayed.
4. At two ranks: fused operations by flags, and sums by push; a small GPT on grids of two ranks beside serial steps; an
   abort frees a call that hangs; a killed rank is named.

What cannot run here gives a row that says "not measured", and why.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import axo
from axo.comm.transports import meet
from axo_kernels import adapt, all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from axo_kernels.fused.strategies import FusedPlan, start_all_reduce, unreachable
from axo_kernels.tune.error_line import in_a_line

from .lib.arguments import Parser
from .lib.attempts import attempt, end_with_parent
from .lib.step_models import Contestant, Sizes, axo_contestant, serial
from .lib.table import Table, environment
from .lib.trials import OutOfTimeError, Trial

COLUMNS = {"check": "s", "ranks": "d", "bytes": "d", "us": ".1f", "wrong": "d"}
OVERHEAD_US = 3.0
BATCH = 100  # calls between two waits for the device: more could fill a stream, and then a call waits for it
TOGETHER_SECONDS = 75.0  # for the ranks of one start
ENDS_SECONDS = 20.0  # in which a call that hangs, or misses a rank, is to end
LOSSES_APART = 1e-4  # fp32, three steps; a wrong gradient is off by 1e-2


class Gpu:
    """The GPU of this machine."""

    kind = trains_on = "cuda"
    replays = calls = 1000
    rival: str | None = "nccl"

    def __init__(self, folder: Path | None = None) -> None:
        pass

    def shared(self, ranks: int) -> bool:
        """Whether so many ranks are on one GPU."""
        return torch.cuda.device_count() < ranks

    def place(self, rank: int, ranks: int) -> torch.device:
        return torch.device("cuda", 0 if self.shared(ranks) else rank)

    def environment(self, rank: int, ranks: int) -> dict[str, str]:
        """What a rank's process begins with: where they share a GPU, each is a host of its own."""
        if not self.shared(ranks):
            return {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
        hosts = {"NCCL_HOSTID": f"bench-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0"}
        hosts["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # for sums by push
        return {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} | hosts

    def counts(self, ranks: int) -> list[int]:
        """Elements of a collective. On one GPU a call takes milliseconds: ranks have the device in turns."""
        return [1000] if self.shared(ranks) and ranks > 2 else [1, 1000, 1 << 20]

    def capture(self) -> tuple[AbstractContextManager, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        return torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"), graph.replay


class StandIn:
    """The stand-in of tests/standin.py: bytes really move, times mean nothing. ``folder``: where processes meet."""

    kind, trains_on = "standin", "cpu"
    replays, calls, rival = 30, 20, None

    def __init__(self, folder: Path | None = None) -> None:
        try:
            from tests import standin
        except ModuleNotFoundError:
            raise ValueError("--standin wants a checkout: the stand-in is part of the tests") from None
        standin.build()
        if folder is not None:
            self._gpu = standin.install(folder)

    def shared(self, ranks: int) -> bool:
        """Two ranks have GPUs of their own, four one of all, so that both are walked through."""
        return ranks > 2

    def place(self, rank: int, ranks: int) -> torch.device:
        return torch.device("standin", 0 if self.shared(ranks) else rank)

    def environment(self, rank: int, ranks: int) -> dict[str, str]:
        hosts = {"NCCL_HOSTID": f"bench-{rank}"} if self.shared(ranks) else {}
        return {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)} | hosts

    def counts(self, ranks: int) -> list[int]:
        return [1, 300]

    def capture(self) -> tuple[AbstractContextManager, Callable[[], None]]:
        graph = self._gpu.capture()
        return graph, graph.replay


Say = Callable[..., object]  # (check=..., us=..., wrong=...): a row of this rank


class Rank:
    """One rank, a process: its communicators, all over the same ranks."""

    def __init__(self, gpu: Any, store: Any, rank: int, size: int) -> None:
        self.gpu, self.rank, self.size, self.store = gpu, rank, size, store
        self.device = gpu.place(rank, size)
        torch.accelerator.set_device_index(self.device.index)
        torch.accelerator.set_stream(torch.Stream(device=self.device))
        options = axo.DeviceOptions(max_ctas=2 if size > 1 else 0)
        axo_store = dist.PrefixStore("axo", store)
        self.world = meet(axo_store, "bench", rank, size, self.device, 60.0, options, meeting=60.0)
        splits = [self.world.split(0, rank, name=name) for name in ("second", "third")]
        self.lines = [self.world, *(line for line in splits if line is not None)]

    def synchronize(self) -> None:
        torch.accelerator.current_stream(self.device).synchronize()

    def close(self) -> None:
        self.synchronize()
        for line in reversed(self.lines):
            line.close()


def torch_alone(gpu: Any, store: Any, rank: int, size: int, say: Say) -> None:
    """Torch's own backend first: where it cannot sum over these ranks, ours is not to blame."""
    if gpu.rival is None:
        return
    device = gpu.place(rank, size)
    torch.accelerator.set_device_index(device.index)
    dist.init_process_group(
        gpu.rival, store=dist.PrefixStore("alone", store), rank=rank, world_size=size, device_id=device
    )
    total = torch.ones(1000, device=device)
    dist.all_reduce(total)
    say(check="torch NCCL all_reduce sum", wrong=int((total != size).sum()))
    dist.destroy_process_group()


def right(rank: Rank, say: Say) -> None:
    """Every collective against what it must give: whole numbers, so equality is exact."""
    gpu, size = rank.gpu, rank.size
    sizes = gpu.counts(size)
    comm, me, device = rank.world, rank.rank, rank.device
    wrong: dict[str, int] = {}
    reduced = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64)
    moved = (torch.uint8, torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn)

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
                    compare("all_reduce avg", comm.all_reduce(mine.clone(), "avg"), (results["sum"] / size).to(dtype))
    comm.barrier()
    window = size > 1 and not gpu.shared(size)  # windows want ranks of one host
    shared = axo.empty_shared((1000,), device=device, comms=comm) if window else None
    if shared is not None:
        shared.fill_(me + 1.0)
        compare("all_reduce in a window", comm.all_reduce(shared), torch.full((1000,), size * (size + 1) / 2))
    for name, count in wrong.items():
        say(check=name, wrong=count)


def call_times(gpu: Any, rank: Rank, store: Any) -> dict[str, float]:
    """Microseconds of host time for a call, by contestant: Axo's and torch's, in turns."""
    tensor = torch.ones(1, device=rank.device)
    rounds = 4 if gpu.shared(rank.size) else 9
    calls: dict[str, Callable[[], Any]] = {
        "axo all_reduce": lambda: rank.world.all_reduce(tensor),
        "axo all_reduce, pending": lambda: rank.world.all_reduce(tensor, async_op=True).wait(),
    }
    if gpu.rival is not None:
        dist.init_process_group(gpu.rival, store=store, rank=rank.rank, world_size=rank.size, device_id=rank.device)
        calls["torch NCCL all_reduce"] = lambda: dist.all_reduce(tensor)
        calls["torch NCCL all_reduce, pending"] = lambda: dist.all_reduce(tensor, async_op=True).wait()
    times: dict[str, list[float]] = {name: [] for name in calls}
    calls_each = gpu.calls if not gpu.shared(rank.size) else min(gpu.calls, BATCH)
    batch = min(BATCH, calls_each)
    for _ in range(rounds):
        for name, call in calls.items():
            spent = 0.0
            for _ in range(calls_each // batch):
                rank.synchronize()
                start = time.perf_counter()
                for _ in range(batch):
                    call()
                spent += time.perf_counter() - start
            times[name].append(1e6 * spent / (calls_each // batch * batch))
    rank.synchronize()
    if gpu.rival is not None:
        dist.destroy_process_group()
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def light(rank: Rank, say: Say) -> None:
    """Host time of a call, Axo's beside torch's."""
    for name, us in call_times(rank.gpu, rank, dist.PrefixStore("torch", rank.store)).items():
        say(check=name, us=us, bytes=4)


def graph(rank: Rank, say: Say) -> None:
    """Three communicators in one graph; every replay's results are checked."""
    gpu, size = rank.gpu, rank.size
    source = torch.ones(1000, device=rank.device)
    tensors = [torch.zeros(1000, device=rank.device) for _ in rank.lines]
    bad = torch.zeros(1, device=rank.device)
    for line, tensor in zip(rank.lines, tensors, strict=True):
        line.all_reduce(tensor)  # the library connects before the capture
    rank.synchronize()
    context, replay = gpu.capture()
    with context:
        for tensor in tensors:
            tensor.copy_(source)
        works = [line.all_reduce(t, async_op=True) for line, t in zip(rank.lines, tensors, strict=True)]
        for work in works:
            work.wait()
    replays = gpu.replays if not gpu.shared(size) else min(100, gpu.replays)
    start = time.perf_counter()
    for number in range(replays):
        source.fill_(float(number % 7))
        replay()
        for tensor in tensors:
            bad += (tensor != size * float(number % 7)).any()
    rank.synchronize()
    us = 1e6 * (time.perf_counter() - start) / replays
    say(check=f"graph of 3 communicators, {replays} replays", bytes=4000, us=us, wrong=int(bad.item()))
    del context, replay, works
    gc.collect()  # the library's end waits for graphs that captured it


def signalled(rank: Rank, say: Say) -> None:
    """Fused operations whose collectives follow flags of a running kernel, against the serial ones."""
    if rank.device.type != "cuda":
        return  # on stand-ins no kernel runs
    comm = adapt(rank.world)
    torch.manual_seed(5)
    x, w = (torch.randint(-2, 3, (rows, 256), device=rank.device).bfloat16() for rows in (512, 512))
    for name, operation in (
        ("matmul_all_reduce", lambda how: matmul_all_reduce(x, w, comm, layout="NT", strategy=how, chunks=2)),
        ("matmul_reduce_scatter", lambda how: matmul_reduce_scatter(x, w, comm, layout="NT", strategy=how, chunks=2)),
        ("all_gather_matmul", lambda how: all_gather_matmul(x, w, comm, layout="NT", strategy=how, chunks=2)),
    ):
        got, expected = operation("signal"), operation("serial")
        comm.check()
        say(check=f"{name} by signals", wrong=int((got != expected).sum()))


def pushed(rank: Rank, say: Say) -> None:
    """Sums by push against the serial ones, of shapes that have the room of their line grow, two under way at once."""
    if rank.device.type != "cuda":
        return
    comm = adapt(rank.world, store=lambda: rank.store)
    if why := unreachable(comm, rank.device):
        say(check=f"sums by push: not measured: it {why}")
        return
    torch.manual_seed(6)
    wrong, started = 0, time.perf_counter()
    for rows in (256, 512, 256):
        x, w = (torch.randint(-2, 3, (count, 256), device=rank.device).bfloat16() for count in (rows, 512))
        expected = matmul_all_reduce(x, w, comm, layout="NT")
        (first, end_first), (second, end_second) = (
            start_all_reduce(each, w, comm, "NT", FusedPlan("push")) for each in (x, x)
        )
        end_second(), end_first()
        scattered = [matmul_reduce_scatter(x, w, comm, layout="NT", strategy=how) for how in ("serial", "push")]
        comm.check()
        wrong += sum(int((a != b).sum()) for a, b in ((first, expected), (second, expected), scattered))
    say(check="sums by push", wrong=wrong, us=1e6 * (time.perf_counter() - started))


def freed(rank: Rank, say: Say) -> None:
    """Rank 0 waits for a sum that nobody else joins, until another thread aborts it; then its GPU goes on."""
    rank.world.all_reduce(torch.ones(4, device=rank.device))
    rank.synchronize()
    key = "freed"
    if rank.rank:
        rank.store.wait([key], timedelta(seconds=ENDS_SECONDS))
        return
    pending = rank.world.all_reduce(torch.ones(4, device=rank.device), async_op=True)
    began: list[float] = []

    def end_it() -> None:
        time.sleep(1.0)
        began.append(time.perf_counter())
        rank.world.abort("bench")

    threading.Thread(target=end_it, daemon=True).start()
    try:
        pending.synchronize(ENDS_SECONDS)
        wrong = 1
    except axo.Aborted:
        wrong = 0
    us = 1e6 * (time.perf_counter() - began[0]) if began else None
    wrong += int(torch.ones(3, device=rank.device).sum().item() != 3)  # hangs where the kernel was not let go
    say(check="an abort frees a hung all_reduce", us=us, wrong=wrong)
    rank.store.set(key, "yes")


def killed(rank: Rank, say: Say) -> None:
    """Rank 1 dies; the others are told which."""
    t = torch.ones(4, device=rank.device)
    rank.world.all_reduce(t)
    rank.world.barrier()
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.perf_counter()
    wrong = 1
    try:
        rank.world.all_reduce(t, async_op=True).synchronize(ENDS_SECONDS)
    except axo.PeerLost as lost:
        wrong = int(lost.peer != 1)
    say(check="a killed rank is named", us=1e6 * (time.perf_counter() - started), wrong=wrong)


def trained(gpu: Any, store: Any, rank: int, size: int, say: Say) -> None:
    """Three steps of a small GPT on grids of two ranks beside serial ones: losses within the rounding of fp32."""
    sizes, device = Sizes(64, 2, 4, 96, 32, 4), torch.device(gpu.trains_on)
    if device.type == "cuda":
        device = gpu.place(rank, size)
        torch.cuda.set_device(device)
    ids = torch.randint(sizes.vocab, (sizes.rows, sizes.seq_len + 1), generator=torch.Generator().manual_seed(3))
    alone = Contestant("serial", serial(sizes, device), sizes)
    expected = [float(alone.step(ids[:, :-1].to(device), ids[:, 1:].to(device))) for _ in range(3)]
    # One world for all grids: a store of each grid's own at one port may be met by a rank of the grid before.
    dist.init_process_group("axo", store=dist.PrefixStore("training", store), rank=rank, world_size=size)
    for grid in ("2x1x1x1", "1x1x2x1", "1x1x1x2"):
        comms = axo.connect(grid, device=gpu.trains_on)
        mine = axo.shard_batch(ids, comms).to(device)
        one = axo_contestant("axo", sizes, comms)
        losses = [one.step(mine[:, :-1], mine[:, 1:]) for _ in range(3)]
        means = [float(comms.world.all_reduce(loss.clone().float(), "avg")) for loss in losses]
        apart = max(abs(a - b) for a, b in zip(means, expected, strict=True))
        say(check=f"training on {grid}, losses as serial", wrong=int(not apart < LOSSES_APART), apart=apart)
        comms.close()
    dist.destroy_process_group()


# What the ranks of one start do, in this order, with communicators of the bench's own.
CHECKS: dict[str, Callable[[Rank, Say], None]] = {
    "collectives": right,
    "graph": graph,
    "host time of a call": light,
    "signals": signalled,
    "push": pushed,
    "abort": freed,
    "death": killed,
}


def in_processes(gpu: Any, size: int, checks: Sequence[str], table: Table) -> list[dict[str, Any]]:
    """Run checks on so many ranks, which are processes; returns the rows of all, which are in the table as well.

    Raises:
        RuntimeError: One of them failed, or they did not end within their time; what they had said is in the table.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", f"{__package__}.device", *(["--standin"] if gpu.kind == "standin" else [])]
        command += ["--rank", ",".join(checks), str(size), folder]
        until = time.perf_counter() + TOGETHER_SECONDS * (4 if gpu.kind == "standin" else 1)
        with socket.create_server(("127.0.0.1", 0)) as free:
            where = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        ranks = [
            Trial([*command, str(rank)], os.environ | gpu.environment(rank, size) | where | {"RANK": str(rank)})
            for rank in range(size)
        ]
        failed: tuple[int, str] | None = None
        for number, rank in enumerate(ranks):
            try:
                became = "" if failed else rank.wait(until)
                if became and not (number == 1 and "death" in checks):
                    failed = number, f"rank {number} of {size} {became}:"
            except OutOfTimeError:
                failed = number, f"{size} ranks did not end within {TOGETHER_SECONDS:g} s: rank {number}"
        for rank in ranks:
            rank.kill()
        said = [rank.said() for rank in ranks]
    rows = [row for each, _ in said for row in each if "check" in row]
    for check in dict.fromkeys(row["check"] for row in rows):
        mine = [row for row in rows if row["check"] == check]
        us, apart, wrong = (
            [row[name] for row in mine if row.get(name) is not None] for name in ("us", "apart", "wrong")
        )
        table.add(
            check=check, ranks=size, bytes=mine[0].get("bytes"), us=max(us, default=None),
            wrong=sum(wrong) if wrong else None, one_gpu=gpu.shared(size), apart=max(apart, default=None),
        )  # fmt: skip
    if failed:
        each, last = said[failed[0]]
        told = [row["failed"] for row in each if "failed" in row]
        told += [f"in {last['begins']}"] if last else ["has said nothing"]
        raise RuntimeError(f"{failed[1]} {told[0]}")
    return rows


def one_process(kind: type, checks: Sequence[str], size: int, folder: Path, number: int) -> None:
    """One rank of :func:`in_processes`: what it finds it prints."""
    end_with_parent()
    peers = folder / "peers"
    peers.mkdir(exist_ok=True)
    gpu, store = kind(peers), dist.FileStore(str(folder / "store"), size)

    def say(**row: Any) -> None:
        print(json.dumps(row), flush=True)

    def run(name: str, call: Callable[..., None], *given: Any) -> None:
        say(begins=name)
        try:
            call(*given, say)
        except Exception as error:
            say(failed=f"{name}: {in_a_line(error)}")
            raise

    if gpu.kind == "standin":
        torch.set_num_threads(1)
    if "torch" in checks:
        run("torch", torch_alone, gpu, store, number, size)
    if "training" in checks:
        run("training", trained, gpu, store, number, size)
    if wanted := [name for name in checks if name in CHECKS]:
        rank = Rank(gpu, store, number, size)
        for name in wanted:
            run(name, CHECKS[name], rank)
        if {"abort", "death"} & set(wanted):
            os._exit(0)  # a communicator that has failed has no peaceful end to wait for
        rank.close()


def judged(extra: dict[int, float | None], shared: bool = False) -> dict[str, bool | str]:
    """The verdict on how much longer Axo's call takes than torch's, by ranks. That of one rank is no verdict, nor is
    that of two on one GPU, where the library takes the network."""
    name = f"overhead over torch's NCCL backend under {OVERHEAD_US:g} us a call"
    alone, together = extra.get(1), extra.get(2)
    if together is not None:
        where = ", two ranks on one GPU" if shared else ""
        return {f"{name}{where}: {together:.2f}": together < OVERHEAD_US}
    if alone is not None:
        return {name: f"not measured: one rank takes another path in NCCL ({alone:.2f} us there)"}
    return {name: "not measured"}


_ALONE = ("by signals", "sums by push", "training on", "an abort frees", "a killed rank is named")


def alone_at_two(rows: Sequence[dict[str, Any]]) -> dict[str, bool | str]:
    """The verdicts on what two ranks alone do."""
    verdicts: dict[str, bool | str] = {}
    for part in _ALONE:
        mine = [row for row in rows if part in row["check"] and row["ranks"] == 2 and row["wrong"] is not None]
        verdicts[f"two ranks: {part}, {len(mine)} checks"] = (
            all(not row["wrong"] for row in mine) if mine else "not measured"
        )
    return verdicts


def measure(gpu: Any, table: Table, smoke: bool = False) -> dict[str, bool | str]:
    """All of it; the verdicts. ``smoke``: two ranks, and of every check the least."""
    device = torch.device("cuda" if gpu.kind == "cuda" else "cpu")
    verdicts: dict[str, bool | str] = {}
    extra: dict[int, float | None] = {}

    def start(what: str, size: int, *checks: str) -> None:
        attempt(f"{what} at {size} ranks", lambda: in_processes(gpu, size, checks, table), device, table)

    for size in (2,) if smoke else (2, 4, 1):
        name, shared = f"collectives and graph at {size} ranks", gpu.shared(size)
        # one start for all of it: each costs an import of torch, a context of the GPU and a meeting of the library
        checks = ["torch"] if shared else []
        checks += ["collectives", "graph", *(["host time of a call"] if size <= 2 else [])]
        start("collectives, graph, host time", size, *checks)
        graphs = [row for row in table.rows if row["ranks"] == size and row["check"].startswith("graph")]
        if shared and not any(row["ranks"] == size for row in table.rows):
            why = table.failed.pop(f"collectives, graph, host time at {size} ranks")
            verdicts[name] = f"not measured: torch's own backend does not run so: {why}"
            continue
        failed = f"collectives, graph, host time at {size} ranks" in table.failed
        verdicts[name] = bool(graphs) and not failed and not any(row["wrong"] for row in graphs)
        if size <= 2:
            times: dict[str, float] = {}
            for row in (row for row in table.rows if row["ranks"] == size):
                times[row["check"]] = max(row.get("us") or 0.0, times.get(row["check"], 0.0))
            rival = times.get("torch NCCL all_reduce")
            if rival is not None and "axo all_reduce" in times:
                extra[size] = times["axo all_reduce"] - rival
        if size == 2:
            start("signals and sums by push", size, "signals", "push")
            for what in ("training", "abort"):
                start({"abort": "an abort"}.get(what, what), size, what)
            start("a killed rank", size, "death")
    wrong = sum(row["wrong"] or 0 for row in table.rows)
    verdicts["wrong results of collectives: 0"] = wrong == 0
    verdicts |= alone_at_two(table.rows)
    verdicts |= judged(extra, gpu.shared(2))
    verdicts |= dict.fromkeys(table.failed.values(), False)
    return verdicts


def main(arguments: list[str] | None = None) -> int:
    """Run everything; returns the number of failed verdicts."""
    parser = Parser("axo bench device", __doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/device"))
    parser.add_argument("--standin", action="store_true", help="on stand-ins for a GPU; times mean nothing")
    parser.add_argument("--smoke", action="store_true", help="two ranks, the least of everything")
    parser.add_argument(
        "--rank", nargs=4, help=argparse.SUPPRESS
    )  # checks, ranks, folder, rank: one process of several
    options = parser.parse_args(arguments)
    kind = StandIn if options.standin else Gpu
    if options.rank:
        checks, size, folder, number = options.rank
        one_process(kind, checks.split(","), int(size), Path(folder), int(number))
        return 0
    if not options.standin and not torch.cuda.is_available():
        parser.error("no GPU is visible; --standin walks through on stand-ins")
    gpu = kind()
    started = time.perf_counter()
    header = environment(torch.device("cpu" if options.standin else "cuda"), "device") | {"bench": "device"}
    path = options.out / "device.jsonl"
    path.unlink(missing_ok=True)
    table = Table(COLUMNS, path, header | ({"kind": "standin"} if options.standin else {}))
    verdicts = measure(gpu, table, options.smoke) | {"seconds": f"{time.perf_counter() - started:.0f}"}
    return table.judge(verdicts)


if __name__ == "__main__":
    raise SystemExit(main())
