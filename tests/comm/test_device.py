"""axo.connect on a GPU that is not there: every call of the Communicator on device tensors, between processes.

Oracles: those of test_collectives (each rank makes all ranks' inputs and reduces them serially), and the calls that
the stand-in saw. Its own rules fail a test through ``Gpu.violations``. tests/standin.py says what this proves.
"""

import glob
import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import axo
from axo.comm.device import DeviceOptions, ask_for_launch_order
from axo.comm.transports import meet
from axo_kernels import adapt
from axo_kernels.fused.strategies import FusedPlan, run_all_gather
from tests import standin
from tests.comm.test_collectives import FLOATS, INTEGERS, MOVED_ONLY, inputs, reduced, same
from tests.launcher import rank_outcomes, run_ranks


def connected(folder, grid=None, **options):
    gpu = standin.install(folder)
    comms = axo.connect(grid or f"{os.environ['WORLD_SIZE']}x1x1x1", device="standin", **options)
    assert comms.device == torch.device("standin", int(os.environ["LOCAL_RANK"])) == comms.x.device
    assert comms.x.transport == "nccl" and torch.accelerator.current_device_index() == comms.device.index
    return gpu, comms


def reductions(folder):
    gpu, comms = connected(folder)
    comm = comms.x
    for dtype in [*FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool]:
        for op in ("sum", "avg", "product", "min", "max") if dtype is torch.float32 else ("sum", "avg", "max"):
            if dtype is torch.bool and op == "avg":
                continue
            for count in (0, 1000) if dtype is torch.float32 else (37,):
                mine = [t.to(comms.device) for t in inputs(comm.size, count, dtype)]
                expected = reduced(inputs(comm.size, count, dtype), op)
                what = f"{op} of {count} {dtype}"
                same(comm.all_reduce(mine[comm.rank].clone(), op).cpu(), expected, f"all_reduce {what}")
                whole = torch.cat([expected] * comm.size)
                part = comm.reduce_scatter(torch.cat([mine[comm.rank]] * comm.size), op=op)
                same(part.cpu(), whole[:count], f"reduce_scatter {what}")
                at_root = comm.reduce(mine[comm.rank].clone(), 1, op)
                if comm.rank == 1:
                    same(at_root.cpu(), expected, f"reduce {what}")
    for scale in (0.5, -2.0):
        mine = torch.arange(6.0, device=comms.device) + comm.rank
        expected = scale * (comm.size * torch.arange(6.0) + sum(range(comm.size)))
        same(comm.all_reduce(mine.clone(), scale=scale).cpu(), expected, "scaled sum")
        same(comm.reduce_scatter(mine[: comm.size].clone(), scale=scale).cpu(), expected[comm.rank : comm.rank + 1], "")
    with pytest.raises(axo.Error, match="nccl matches messages by rank"):
        comm.recv(torch.ones(3, device=comms.device), None)
    with pytest.raises(axo.Error, match="int16"):
        comm.all_reduce(torch.ones(3, dtype=torch.int16, device=comms.device))
    assert not gpu.violations()


def moves(folder):
    gpu, comms = connected(folder)
    comm, device = comms.x, comms.device
    for dtype in [*FLOATS, *INTEGERS, torch.bool, *MOVED_ONLY]:
        for rows in (0, 1, 5):
            cpu = [t.reshape(rows, 2) for t in inputs(comm.size, 2 * rows, dtype)]
            mine = cpu[comm.rank].to(device)
            what = f"{rows} rows of {dtype}"
            same(comm.all_gather(mine).cpu(), torch.cat(cpu), f"all_gather {what}")
            same(comm.broadcast(mine.clone(), 1).cpu(), cpu[1], f"broadcast {what}")
            gathered = comm.gather(mine, 0)
            if comm.rank == 0:
                same(gathered.cpu(), torch.cat(cpu), f"gather {what}")
            whole = torch.cat(cpu).to(device)
            part = comm.scatter(
                whole if comm.rank == 0 else None, 0, None if comm.rank == 0 else torch.empty_like(mine)
            )
            same(part.cpu(), cpu[comm.rank], f"scatter {what}")
            blocks = torch.cat([cpu[comm.rank]] * comm.size).to(device)
            same(comm.all_to_all(blocks).cpu(), torch.cat(cpu), f"all_to_all {what}")
            if comm.rank == 0:
                comm.send(mine, 1)
            elif comm.rank == 1:
                same(comm.recv(torch.empty_like(mine), 0).cpu(), cpu[0], f"recv {what}")
    # Parts of any size, some of none.
    rows = [[(3 * a + b) % 4 for b in range(comm.size)] for a in range(comm.size)]
    sent = torch.cat([torch.full((rows[comm.rank][to], 3), 10.0 * comm.rank + to) for to in range(comm.size)])
    counts = [rows[source][comm.rank] for source in range(comm.size)]
    got = comm.all_to_all(sent.to(device), send_counts=rows[comm.rank], recv_counts=counts)
    expected = [torch.full((count, 3), 10.0 * source + comm.rank) for source, count in enumerate(counts)]
    same(got.cpu(), torch.cat(expected), "uneven all_to_all")
    comm.barrier()
    comm.barrier(async_op=True).synchronize(5.0)
    # What is not contiguous, and what is a DLPack array of another library.
    table = (torch.arange(12.0).reshape(3, 4) + comm.rank).to(device)
    comm.all_reduce(table.T)
    plain = comm.size * torch.arange(12.0).reshape(3, 4) + sum(range(comm.size))
    same(table.cpu(), plain, "a view")
    pending = table.to(device).T
    assert comm.all_reduce(pending, "max", async_op=True).wait() is pending
    same(pending.cpu(), plain.T, "a pending view")
    array = Array(torch.ones(4, device=device))
    assert comm.all_reduce(array) is array
    same(array.tensor.cpu(), torch.full((4,), float(comm.size)), "a DLPack array")
    gathered = comm.all_gather(array)
    assert isinstance(gathered, Array) and gathered.tensor.numel() == 4 * comm.size
    with pytest.raises(ValueError, match=r"on cpu; this communicator moves memory of standin:\d, use .to\('standin"):
        comm.all_reduce(torch.ones(3))
    assert not gpu.violations()


class Array:
    """As another library's array looks to Axo: DLPack, and the array API's namespace."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **_options):
        return torch.utils.dlpack.to_dlpack(self.tensor)

    def __dlpack_device__(self):
        return 12, self.tensor.device.index  # kDLExtDev, torch's PrivateUse1

    def __array_namespace__(self):
        return Array

    @staticmethod
    def from_dlpack(tensor):
        return Array(tensor)


def streams(folder):
    """What comes after what, seen by holding streams back; and what keeps memory alive."""
    gpu, comms = connected(folder, "2x1x1x1", device_options=axo.DeviceOptions(timing=True, max_ctas=4))
    comm, device = comms.x, comms.device
    mine = torch.full((1000,), comm.rank + 1.0, device=device)
    # The communicator's stream follows the caller's, which is held: nothing may have moved, and the host goes on.
    gpu.synchronize()
    side = torch.Stream(device=device)
    torch.accelerator.set_stream(side)
    gate = gpu.hold()
    assert comm.current_stream not in (0, comm.stream)
    work = comm.all_reduce(mine, async_op=True)
    assert not work.is_completed() and work.duration() is None and work.exception() is None
    with pytest.raises(axo.Timeout, match="still pending"):
        work.synchronize(0.01)
    for bad in (-1.0, float("nan"), "1"):
        with pytest.raises(ValueError, match="is no time"):
            work.synchronize(bad)
    gate.open()
    assert work.wait() is mine
    same(mine.cpu(), torch.full((1000,), 3.0), "after wait")
    work.synchronize(5.0)
    assert work.duration() == 0.25  # what the stand-in's clock says, in seconds
    # A work that is dropped, with tensors that nobody else holds.
    for number in range(50):
        comm.all_reduce(torch.full((1000,), float(number), device=device), async_op=True)
    last = comm.all_reduce(torch.ones(3, device=device), async_op=True).future().wait()
    same(last.cpu(), torch.full((3,), 2.0), "a future")
    # A result that is copied, on another stream than the call's: the copy's source lives until it has been read.
    strided = torch.full((40, 50), comm.rank + 1.0, device=device).T
    work = comm.all_reduce(strided, async_op=True)
    other = torch.Stream(device=device)
    with other:
        gate = gpu.hold()
        work.wait()
    del work
    for _ in range(4):
        time.sleep(0.1)
        comms.world.barrier(async_op=True)  # lets go of what works have kept
    gate.open()
    other.synchronize()
    same(strided.cpu(), torch.full((50, 40), 3.0), "copied on another stream")
    # Flags: a chunk is reduced when its flag is up, whatever the current stream is doing.
    flags = torch.zeros(2, dtype=torch.int32, device=device)
    chunks = torch.full((2, 8), comm.rank + 1.0, device=device)
    gpu.synchronize()
    comm.follow()
    with comm.signalled():
        works = []
        for number in range(2):
            comm.wait_flag(flags[number:], 7)
            works.append(comm.all_reduce(chunks[number], async_op=True))
        with pytest.raises(ValueError, match="use async_op=True"):
            comm.all_reduce(chunks[0])
    assert not works[0].is_completed()
    flags[0] = 7
    works[0].synchronize(5.0)
    assert not works[1].is_completed()
    flags[1] = 8  # cyclic: at least
    [work.wait() for work in works]
    same(chunks.cpu(), torch.full((2, 8), 3.0), "chunks behind flags")
    comm.write_flag(flags.data_ptr(), 40)
    comm.barrier(async_op=True).synchronize(5.0)
    assert flags.tolist() == [40, 8]
    for wrong, message in ((flags.float(), "4-byte integer"), (3, "4-byte aligned")):
        with pytest.raises((ValueError, axo.Error), match=message):
            comm.wait_flag(wrong, 1)
    # The same ranks on fewer thread blocks: one more communicator, which nothing else has to reserve for.
    gpu.calls()
    narrow = comm.capped(8)
    splits = [call for call in gpu.calls() if call.startswith("ncclCommSplit")]
    assert len(splits) == 1 and splits[0].endswith("maxCTAs=8"), splits
    assert comm.capped(8) is narrow and (narrow.rank, narrow.size, narrow.axis) == (comm.rank, 2, comm.axis)
    assert narrow.stream != comm.stream and narrow.reserved_ctas == comm.reserved_ctas == 8
    same(narrow.all_reduce(torch.ones(5, device=device)).cpu(), torch.full((5,), 2.0), "on fewer thread blocks")
    for wrong, kind in ((-1, axo.Error), (2.5, TypeError)):
        with pytest.raises(kind, match="max_ctas"):
            comm.capped(wrong)
    # Registered memory, and memory of the library.
    assert comm.register(mine) is not None
    shared = axo.empty_shared((100, 3), device="standin", comms=comms)
    shared.fill_(comm.rank + 1.0)
    same(comm.all_reduce(shared).cpu(), torch.full((100, 3), 3.0), "a window")
    calls = gpu.calls()
    assert sum(call.startswith("ncclCommWindowRegister") for call in calls) == 2  # x and the world
    del shared
    gpu.synchronize()
    assert any(call.startswith("ncclCommWindowDeregister") for call in gpu.calls())
    assert comm.library_version == 23203 and comm.reserved_ctas == 8
    assert comms.y.size == 1 and comms.y.all_reduce(mine) is mine
    with pytest.raises(axo.Error, match="one rank"):
        comms.y.wait_flag(flags, 1)
    assert not gpu.violations()
    comms.close()


def groups_and_graphs(folder):
    """Three communicators in one launch, and in one graph that is replayed."""
    gpu, comms = connected(folder, "2x2x1x1")
    device, rank = comms.device, comms.rank
    lines = [comms.x, comms.y, comms.world]
    tensors = [torch.full((16,), float(rank + 1), device=device) for _ in lines]
    sums = [
        sum(r + 1.0 for r in ranks) for ranks in (comms.grid.ranks("x", rank), comms.grid.ranks("y", rank), range(4))
    ]
    gpu.synchronize()
    gpu.calls()
    with axo.group():
        for line, tensor in zip(lines, tensors, strict=True):
            line.all_reduce(tensor)
    calls = [call for call in gpu.calls() if call.startswith("nccl") and "AsyncError" not in call]
    assert [call.split()[0] for call in calls] == ["ncclGroupStart"] + ["ncclAllReduce"] * 3 + ["ncclGroupEnd"], calls
    for tensor, total in zip(tensors, sums, strict=True):
        same(tensor.cpu(), torch.full((16,), total), "grouped")
    source = torch.ones(16, device=device)
    gpu.synchronize()
    with gpu.capture() as graph:
        for tensor in tensors:
            tensor.copy_(source)
        works = [line.all_reduce(tensor, async_op=True) for line, tensor in zip(lines, tensors, strict=True)]
        for work in works:
            work.wait()
        with pytest.raises(axo.Error, match="runs when the graph is replayed"):
            works[0].synchronize()
    for tensor in tensors:
        tensor.zero_()
    for round_ in range(20):
        source.fill_(float(round_))
        graph.replay()
        gpu.synchronize()
        got = [tensor[0].item() for tensor in tensors]
        assert got == [2.0 * round_, 2.0 * round_, 4.0 * round_], (round_, got)
    assert graph.nodes >= 6 and not gpu.violations()
    with pytest.raises(axo.Error, match="'world' is held by graphs that captured it; drop them first"):
        comms.world.close()
    graph.reset()
    comms.world.barrier()
    sub = comms.world.split(rank % 2, -rank, name="odd")
    assert isinstance(sub, axo.DeviceCommunicator) and (sub.size, sub.rank) == (2, 1 - rank // 2)
    same(sub.all_gather(torch.tensor([rank], device=device)).cpu(), torch.tensor([rank % 2 + 2, rank % 2]), "split")
    assert comms.world.split(-1 if rank else 0, name="alone") is None or rank == 0


def gathers_without_a_thread_block(folder):
    """A product whose operand is gathered in chunks from window to window, by a communicator that takes none."""
    gpu, comms = connected(folder)
    device, line = comms.device, comms.x

    def window(line, shape, dtype, device):
        return axo.empty_shared(shape, dtype=dtype, device=device, comms=line)

    comm = adapt(line, window=window)
    assert adapt(line).without_windows == "adapt() was given nothing that makes windows" and not comm.without_windows
    x = torch.arange(32.0).view(4, 8)
    every = torch.arange(96.0).view(2, 6, 8)
    for number in range(3):
        gpu.calls()
        shard = (every[line.rank] + number).to(device)
        way = FusedPlan("split", 2, windows=True)
        out, whole = run_all_gather(x.to(device), shard, comm, "NT", "b", way)
        same(whole.cpu(), (every + number).flatten(0, 1), "what is kept")
        same(out.cpu(), x @ (every + number).flatten(0, 1).T, "the product")
        calls = gpu.calls()
        made = [call.split()[0] for call in calls if call.startswith(("ncclCommSplit", "ncclCommWindowRegister"))]
        assert made == ([] if number else ["ncclCommSplit", *2 * ["ncclCommWindowRegister"]]), made
        assert number or any(call.endswith("CTAPolicy=2") for call in calls)
        asked = number == 0  # whether all are on one host
        assert sum(call.startswith("ncclAllGather") for call in calls) == 2 + asked
    assert comm.ran[-1].strategy == "split" and not gpu.violations()
    gpu.synchronize()
    del comm
    comms.close()


def errors(folder):
    """A mismatch that AXO_CHECK finds, an abort, and an error of the library reach Python as what they are."""
    gpu, comms = connected(folder, "2x1x1x1", device_options=axo.DeviceOptions(check=True), timeout=20)
    comm, device = comms.x, comms.device
    t = torch.ones(4, device=device)
    comm.all_reduce(t)
    with pytest.raises(axo.Mismatch, match="all_reduce"):
        comm.all_reduce(t, "sum" if comm.rank else "max")
    with pytest.raises(axo.Aborted):
        comm.all_reduce(t)
    with pytest.raises(axo.Aborted, match="axis 'x'"):  # the sum over the world was told
        comms.world.all_reduce(t)
    again = axo.connect("2x1x1x1", device="standin").x
    if again.rank == 0:
        pending = again.all_reduce(t.clone(), async_op=True)
        again.abort("enough")
        with pytest.raises(axo.Aborted, match="enough"):
            pending.synchronize(5.0)
        assert isinstance(pending.exception(), axo.Aborted)
    third = axo.connect("2x1x1x1", device="standin").x
    gpu.fail("ncclAllReduce", 6)
    with pytest.raises(axo.PeerLost, match="remote process exited"):
        third.all_reduce(t)
    assert not gpu.violations()


def test_capped_communicators_share_the_fate_of_their_parent():
    """Against a core that writes down what it is told: all are told, and all are closed though one's close fails."""
    log = []

    class Core:
        rank, size, transport = 0, 2, "nccl"

        def __init__(self, name):
            self.name = name

        def capped(self, max_ctas, name):
            return Core(str(max_ctas))

        def abort(self, reason):
            log.append((self.name, reason))

        def give_up(self, error):
            log.append((self.name, "ValueError" in error))

        def set_timeout(self, milliseconds):
            log.append((self.name, milliseconds))
            return 7000

        def shutdown(self):
            log.append((self.name, "shutdown"))
            if self.name == "8" and log.count(("8", "shutdown")) == 1:
                raise axo.PeerLost("rank 1 has died")

    comm = axo.DeviceCommunicator(Core("whole"), name="x", axis="x", device=torch.device("cpu"))
    comm.capped(4), comm.capped(8)
    assert comm.set_timeout(3.0) == 7.0
    comm.abort("enough")
    comm.give_up(ValueError("no"))
    names = ("whole", "4", "8")
    assert log == [(name, told) for told in (3000, "enough", True) for name in names]
    log.clear()
    with pytest.raises(axo.PeerLost, match="rank 1 has died"):
        comm.close()
    assert log == [("8", "shutdown"), ("4", "shutdown"), ("whole", "shutdown")]


def dying(folder):
    """A killed peer is named though nothing but its process tells of it."""
    _, comms = connected(folder, "3x1x1x1")
    comm, t = comms.x, torch.ones(4, device=comms.device)
    comm.all_reduce(t)
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    pending = comm.all_reduce(t, async_op=True)
    with pytest.raises(axo.PeerLost, match=r"all_reduce.*rank 1 \(process \d+\) died") as lost:
        pending.synchronize(60.0)
    assert lost.value.peer == 1
    return time.monotonic() - began


def differing(folder):
    """AXO_CHECK=1, as a user sets it: what each rank issued is named on both, before anything hangs."""
    gpu = standin.install(folder)
    device = torch.device("standin", int(os.environ["LOCAL_RANK"]))
    one, four = torch.ones(1, device=device), torch.ones(4, device=device)
    cases = {
        "dtype": (
            lambda c: c.all_reduce(four.double() if c.rank else four),
            ["all_reduce(float32[4], sum)", "all_reduce(float64[4], sum)"],
        ),
        "size": (
            lambda c: c.all_gather(four[: 4 - c.rank]),
            ["all_gather(float32[4])", "all_gather(float32[3])"],
        ),
        "op": (
            lambda c: c.reduce_scatter(four, op="max" if c.rank else "min"),
            ["reduce_scatter(float32[2], min)", "reduce_scatter(float32[2], max)"],
        ),
        "root": (
            lambda c: c.broadcast(four, root=c.rank),
            ["broadcast(float32[4], root 0)", "broadcast(float32[4], root 1)"],
        ),
        "kind": (
            lambda c: c.broadcast(four, root=0) if c.rank else c.all_reduce(four),
            ["all_reduce(float32[4], sum)", "broadcast(float32[4], root 0)"],
        ),
    }
    for name, (call, issued) in cases.items():
        comm = axo.connect("2x1x1x1", device="standin", timeout=60).x
        comm.all_reduce(one)  # what agrees passes
        mine, theirs = issued[comm.rank], issued[1 - comm.rank]
        issues = f"rank {comm.rank} issued {mine}, rank {1 - comm.rank} issued {theirs}"
        said = f"operation 2 of .* differs: {re.escape(issues)}"
        with pytest.raises(axo.Mismatch, match=said):
            call(comm)
        with pytest.raises(axo.Aborted, match="differs"):
            comm.barrier()
        assert not gpu.violations(), name
    comms = axo.connect("2x1x1x1", device="standin", timeout=60)
    order = [comms.x, comms.world][:: -1 if comms.rank else 1]
    with pytest.raises(axo.Mismatch, match=r"crossed order: rank . of '.*' waits in operation \d+ .* for rank"):
        for comm in order:
            comm.all_reduce(four)
    assert not gpu.violations()


def differing_under_torch(folder):
    """The same for torch.distributed on device tensors."""
    standin.install(folder)
    rank = int(os.environ["RANK"])
    torch.accelerator.set_device_index(rank)
    dist.init_process_group("cpu:axo,standin:axo", timeout=timedelta(seconds=60))
    t = torch.ones(4 + rank, device=f"standin:{rank}")
    with pytest.raises(axo.Mismatch, match=rf"rank {rank} issued all_reduce\(float32\[{4 + rank}\].* rank {1 - rank}"):
        dist.all_reduce(t)


@pytest.mark.slow
@pytest.mark.parametrize("check", [differing, differing_under_torch], ids=lambda check: check.__name__)
def test_axo_check_names_what_differs(check, tmp_path):
    standin.build()
    run_ranks(check, 2, tmp_path, env={"AXO_CHECK": "1"}, timeout=120)


CHECKS = [
    (reductions, 3),
    (moves, 3),
    (streams, 2),
    (gathers_without_a_thread_block, 2),
    (groups_and_graphs, 4),
    (errors, 2),
]


@pytest.mark.slow
def test_a_killed_peer_is_named(tmp_path):
    standin.build()
    for outcome in rank_outcomes(dying, 3, tmp_path):
        assert outcome.ok if outcome.rank != 1 else outcome.signal == "SIGKILL", outcome.describe() + outcome.traceback
        assert outcome.rank == 1 or outcome.value < 20, "the time limit of an operation is ten minutes"


@pytest.mark.slow
@pytest.mark.parametrize(("check", "world"), CHECKS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_on_ranks(check, world, tmp_path):
    standin.build()
    run_ranks(check, world, tmp_path)


def on_one_gpu(folder, own):
    """Processes with a host of their own for the library share a GPU; with the same host they are refused."""
    rank = int(os.environ["RANK"])
    os.environ |= {"LOCAL_RANK": "0", "NCCL_HOSTID": f"part {rank}" if own else "one"}
    if not own:
        with pytest.raises(axo.Error, match=r"ranks 0 and 1 are on the same GPU .*NCCL_HOSTID of their own"):
            connected(folder)
        return
    gpu, comms = connected(folder)
    assert comms.device.index == 0
    t = torch.full((5,), rank + 1.0, device=comms.device)
    same(comms.x.all_reduce(t).cpu(), torch.full((5,), 6.0), "a sum over one GPU")
    assert not gpu.violations()


@pytest.mark.slow
@pytest.mark.parametrize("own", [True, False])
def test_processes_share_a_gpu_where_the_library_takes_them_for_hosts(own, tmp_path):
    standin.build()
    run_ranks(on_one_gpu, 3, tmp_path, own)


def no_progress_engine(folder):
    """A GPU's library moves the bytes; the thread that does it on CPUs begins with torch's group, which takes both."""
    gpu = standin.install(folder)
    store, rank, size = next(dist.rendezvous("env://"))
    place = torch.device("standin", rank)
    torch.accelerator.set_device_index(rank)
    line = meet(store, "of the GPUs", rank, size, place, 60.0, DeviceOptions(), meeting=60.0)
    found = line.all_reduce(torch.ones(8, device=place), async_op=True).wait()
    same(found.cpu(), torch.full((8,), float(size)), "")
    assert "axo-progress" not in names_of_threads()
    dist.init_process_group("axo", store=dist.PrefixStore("world", store), rank=rank, world_size=size)
    assert "axo-progress" in names_of_threads()
    line.close()
    assert not gpu.violations()


def names_of_threads():
    return [Path(task, "comm").read_text().strip() for task in glob.glob("/proc/self/task/*") if Path(task).exists()]


def test_a_gpu_communicator_starts_no_progress_engine(tmp_path):
    standin.build()
    run_ranks(no_progress_engine, 2, tmp_path)


def test_a_launch_order_is_asked_for_before_the_first_communicator(monkeypatch):
    """NCCL 2.26 to 2.30 read the variable once: not set where torch's NCCL backend is there already."""
    name = "NCCL_LAUNCH_ORDER_IMPLICIT"
    monkeypatch.setenv(name, "0")
    ask_for_launch_order()
    assert os.environ[name] == "0"  # the user's word
    monkeypatch.delenv(name)
    with monkeypatch.context() as beside:
        beside.setitem(dist.distributed_c10d._world.pg_backend_config, object(), "cpu:gloo,cuda:nccl")
        ask_for_launch_order()
        assert name not in os.environ
    with monkeypatch.context() as amd:
        amd.setattr(torch.version, "hip", "7.2")
        ask_for_launch_order()
        assert name not in os.environ, "RCCL would run one operation after the other"
    ask_for_launch_order()
    assert os.environ[name] == "1"


def test_without_a_gpu(monkeypatch):
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    built = torch.device("cuda")  # for a GPU, on a machine without one
    found = torch.accelerator.current_accelerator, lambda check_available=False: None if check_available else built
    for current_accelerator in found:
        monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
        with pytest.raises(ValueError, match=r"device='cuda', and torch .* finds none here; use device='cpu'"):
            axo.connect("1x1x1x1", device="cuda")
    with pytest.raises(ValueError, match="device_options are for GPUs"):
        axo.connect("1x1x1x1", device_options=axo.DeviceOptions())
    with pytest.raises(ValueError, match="needs comms"):
        axo.empty_shared((3,), device="cuda")
