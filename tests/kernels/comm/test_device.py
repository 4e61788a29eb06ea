"""The adapter of a GPU communicator: what it issues, and in which order; against a recorder, since no GPU is here."""

from contextlib import contextmanager

import pytest
import torch

from axo_kernels import FusedCommunicator, SignalTimeout, adapt
from axo_kernels import device as devices
from axo_kernels.comm import adapters as module
from axo_kernels.comm import communicator
from axo_kernels.fused.chunks import chunk_order
from axo_kernels.fused.segments import programs_left
from axo_kernels.fused.workspace import Workspace
from axo_kernels.gemm.tiles import TARGETS


class Recorder:
    """Has the methods of axo's device communicator; writes down what is called, and how."""

    rank, size, reserved_ctas, stream, library_version = 0, 2, 6, 12345, 22809
    device = torch.device("cpu")

    def __init__(self):
        self.log = []
        self.after_caller = True

    def capped(self, channels):
        self.log.append(f"capped at {channels}")
        return Recorder()

    def follow(self):
        self.log.append("follow")

    @contextmanager
    def signalled(self):
        self.after_caller = False
        yield
        self.after_caller = True

    def wait_flag(self, flag, value):
        self.log.append(("wait", flag.storage_offset(), value))

    def write_flag(self, flag, value):
        self.log.append(("write", flag.storage_offset(), value))

    def _collective(self, name, *arguments, async_op):
        assert async_op
        self.log.append((name, self.after_caller, *arguments))
        return Work(self.log, name)

    def all_reduce(self, tensor, async_op=False):
        return self._collective("all_reduce", async_op=async_op)

    def all_gather(self, tensor, out, async_op=False):
        return self._collective("all_gather", async_op=async_op)

    def reduce_scatter(self, tensor, out, op="sum", async_op=False):
        return self._collective("reduce_scatter", op, async_op=async_op)

    def broadcast(self, tensor, root):
        raise AssertionError("not asked for")


class Work:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait(self):
        self.log.append(f"wait for {self.name}")


class Stream:
    def __init__(self, log):
        self.log = log

    def wait_stream(self, other):
        self.log.append(f"compute waits for stream {other}")


@pytest.fixture
def recorder(monkeypatch):
    for name in ("NCCL_MAX_CTAS", "NCCL_MIN_CTAS"):
        monkeypatch.delenv(name, raising=False)
    recorder = Recorder()
    monkeypatch.setattr(module.torch.cuda, "current_stream", lambda device: Stream(recorder.log))
    monkeypatch.setattr(module.torch.cuda, "ExternalStream", lambda handle, device: handle)
    return recorder


def test_what_a_communicator_on_gpus_lacks_is_named():
    class Half:
        rank = size = all_reduce = all_gather = reduce_scatter = broadcast = wait_flag = write_flag = stream = 1

    with pytest.raises(ValueError, match="adapt: Half has no follow, signalled, device, reserved_ctas, capped; give"):
        adapt(Half())


def test_what_the_library_may_take_is_left_to_it(recorder, monkeypatch):
    """Capped by the communicators, else by the environment, else NCCL's most."""
    comm = adapt(recorder)
    assert comm.reserved_units == 6
    recorder.reserved_ctas = 0
    assert comm.reserved_units == 32
    for named, expected in (("8", 8), ("0", 32), ("many", 32)):
        monkeypatch.setenv("NCCL_MAX_CTAS", named)
        assert comm.reserved_units == expected


def test_rccl_keeps_to_no_cap(recorder, monkeypatch):
    """Neither to an own one nor to the environment's; what it may take at most stays free."""
    recorder.reserved_ctas = 0  # as the extension says there
    monkeypatch.setattr(module.torch.version, "hip", "7.2")
    comm = adapt(recorder)
    assert comm.caps == () and comm.reserved_units == 256
    monkeypatch.setenv("NCCL_MAX_CTAS", "8")
    assert adapt(recorder).reserved_units == 256
    with pytest.raises(ValueError, match="channels=4: its operations cannot be capped; use 0"):
        comm.capped(4)
    assert recorder.log == []


def test_a_capped_communicator_leaves_free_what_it_takes(recorder):
    """One for each cap; the record is the first one's, and so is what kernels have reported."""
    comm = adapt(recorder)
    assert comm.caps == (4, 8, 16) and comm.capped(0) is comm
    eight = comm.capped(8)
    assert comm.capped(8) is eight and eight.capped(8) is eight and recorder.log == ["capped at 8"]
    assert (eight.reserved_units, comm.reserved_units) == (8 + 6, 6) and eight.ran is comm.ran
    eight.communicator.reserved_ctas = 0  # as where nobody has capped the axes
    assert eight.reserved_units == 8
    workspace = eight.workspaces.get("op", chunk_order("all_reduce", 8, 2, 0, 2), "key", torch.device("cpu"))
    workspace.status.copy_(torch.tensor([1, 0, 3, 2], dtype=torch.int32))
    with pytest.raises(SignalTimeout, match="waited 60 s for chunk 0 of epoch 3"):
        comm.poll()
    with pytest.raises(ValueError, match="SoloCommunicator: channels=8: its operations cannot be capped; use 0"):
        adapt(None).capped(8)


def test_gathers_in_windows_leave_the_product_all_but_one(recorder, monkeypatch):
    """On one host, where copy engines move them. One is for kernels that set flags, and for a gather that the library
    gives a thread block after all: a product that waits for it on all of them would wait for ever."""
    monkeypatch.setattr(devices, "target_of", lambda device: TARGETS["sm_90"])
    for hosts, expected in (([1.0, -1.0], 1), ([2.0, -1.0], 32)):
        comm = adapt(recorder, window=lambda line, *like: torch.empty(like[0]))
        comm.maximum = lambda values, hosts=hosts: hosts
        twin = comm.windowed()
        assert twin.reserved_units == 7 or expected > 1
        twin.communicator.reserved_ctas = 0  # nobody has capped the axes
        assert twin.reserved_units == expected
        assert programs_left(twin, torch.device("cuda", 0)) == 132 - expected


@pytest.mark.parametrize("name", ["NCCL_MAX_CTAS", "NCCL_MIN_CTAS"])
def test_no_cap_is_tried_where_the_environment_overrides_it(recorder, monkeypatch, name):
    comm = adapt(recorder)
    monkeypatch.setenv(name, "8")
    assert comm.caps == () and comm.capped(0) is comm
    with pytest.raises(ValueError, match="channels=4: its operations cannot be capped; use 0"):
        comm.capped(4)
    assert recorder.log == []


def test_the_stream_waits_for_flags_and_compute_for_the_works(recorder):
    comm = adapt(recorder)
    assert isinstance(comm, module.DeviceAxoCommunicator) and comm.reserved_units == 6
    workspace = Workspace("op", chunk_order("all_reduce", 8, 2, 0, 2), torch.device("cpu"), first_epoch=2**31 - 1)
    workspace.advance()
    assert workspace.epoch.counted == workspace.epoch.read() == -(2**31), "the host's epoch wraps as the device's does"
    tensor = torch.zeros(4)
    comm.all_reduce(tensor)  # outside: follows the compute stream
    comm.fork(torch.device("cuda", 0))
    for chunk in (0, 1):
        comm.wait_flag(workspace, chunk)
        comm.all_reduce(tensor)
    comm.join()
    expected = [("all_reduce", True), "follow"]
    for chunk in (0, 1):
        expected += [("wait", chunk, -(2**31)), ("all_reduce", False)]
    expected += ["wait for all_reduce"] * 2 + ["compute waits for stream 12345"]
    assert recorder.log == expected


def test_flags_are_written_after_the_collective_and_means_stay_means(recorder):
    comm = module.DeviceAxoCommunicator(recorder, op="avg")
    workspace = Workspace("op", chunk_order("all_gather", 4, 1, 0, 2), torch.device("cpu"))
    workspace.advance()
    comm.fork(torch.device("cuda", 0))
    comm.all_gather(torch.zeros(8), torch.zeros(4))
    comm.write_flag(workspace, 0)
    comm.reduce_scatter(torch.zeros(4), torch.zeros(8))
    comm.join()
    assert recorder.log[1:4] == [("all_gather", False), ("write", 0, 1), ("reduce_scatter", False, "avg")]


def test_a_kernel_that_gave_up_tells_more_than_the_transport(recorder):
    """Its report lies in host memory, where it can be read while streams stand still."""
    comm = adapt(recorder, 9.0)
    order = chunk_order("all_gather", 4, 2, 0, 2)
    workspace = comm.workspaces.get("all_gather_matmul", order, None, torch.device("cpu"))

    def lost():
        raise RuntimeError("rank 1 has died")

    for reported in (False, True):
        comm.fork(torch.device("cuda", 0))
        comm.all_gather(torch.zeros(8), torch.zeros(4)).wait = lost
        if reported:
            workspace.status.copy_(torch.tensor([1, 1, 17, 16]))  # as signal_kernels.report
        told = r"rank 0 of 2 waited 9 s for chunk 1 \(rows of rank 1\) of epoch 17" if reported else "rank 1 has died"
        with pytest.raises(SignalTimeout if reported else RuntimeError, match=told) as caught:
            comm.join()
    assert "rank 1 has died" in str(caught.value.__context__)


def test_a_process_group_on_gpus_has_a_stream_of_its_own(monkeypatch):
    """The base of the adapters, whose flags are kernels: everything between fork and join is on the side stream."""
    log, current = [], []

    class Side:
        device = torch.device("cuda", 0)

        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            log.append(f"{self.name} waits for {other.name}")

    compute, side = Side("compute"), Side("side")

    @contextmanager
    def on(stream):
        current.append(stream.name)
        yield
        current.pop()

    def launched(name):
        class Kernel:
            def __getitem__(self, grid):
                return lambda flags, *rest, **options: log.append((current[-1], name, flags.storage_offset()))

        return Kernel()

    class Kernels:
        wait_flag_kernel, write_flag_kernel = launched("wait"), launched("write")

    class Pending:
        def wait(self):
            log.append((current[-1] if current else "compute", "waits for the collective"))

    class Group(FusedCommunicator):
        def _all_reduce(self, tensor):
            log.append((current[-1] if current else "compute", "all_reduce"))
            return Pending()

        def _all_gather(self, out, tensor):
            return self._all_reduce(out)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(communicator.devices, "signal_kernels", lambda: Kernels)
    comm = Group(0, 2)
    workspace = Workspace("op", chunk_order("all_reduce", 8, 2, 0, 2), torch.device("cpu"))
    comm.all_reduce(torch.zeros(4))
    assert log == [("compute", "all_reduce")], "outside: whoever asked waits for the work"
    log.clear()
    comm.fork(side.device)
    comm.wait_flag(workspace, 1)
    comm.all_reduce(torch.zeros(4))
    comm.all_gather(torch.zeros(8), torch.zeros(4))
    comm.write_flag(workspace, 0)
    comm.join()
    collective = [("side", "all_reduce"), ("side", "waits for the collective")]
    expected = ["side waits for compute", ("side", "wait", 1), *collective, *collective, ("side", "write", 0)]
    assert log == [*expected, "compute waits for side"]


def test_slots_are_taken_in_turn():
    """What an operation has packed must outlast the next one: a reader of epoch e may be late by one."""
    workspace = Workspace("op", chunk_order("all_gather", 4, 1, 0, 2), torch.device("cpu"))
    seen = []
    for _ in range(4):
        workspace.advance()
        seen.append(workspace.buffer((8, 3), torch.float32, torch.device("cpu")).data_ptr())
    assert seen[0] == seen[2] != seen[1] == seen[3]


def test_after_a_capture_the_epoch_is_read_on_the_device(recorder, monkeypatch):
    """A replayed graph advances the epoch behind the host's back: the driver must not be given the host's."""
    launched = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **options: launched.append(arguments[1:3])

    class Kernels:
        wait_flag_kernel = write_flag_kernel = Kernel()

    monkeypatch.setattr(communicator.devices, "signal_kernels", lambda: Kernels)
    monkeypatch.setattr(module.torch.cuda, "stream", lambda stream: contextmanager(lambda: iter([None]))())
    comm = adapt(recorder)
    workspace = Workspace("op", chunk_order("all_reduce", 8, 2, 0, 2), torch.device("cpu"))
    workspace.advance()
    workspace.epoch.captured = True  # what advance() does in a capture
    workspace.advance()
    assert (workspace.epoch.counted, workspace.epoch.read()) == (1, 2)
    comm.fork(torch.device("cuda", 0))
    comm.wait_flag(workspace, 0)
    comm.write_flag(workspace, 1)
    assert launched == [(workspace.epoch.word, 1)] * 2 and recorder.log == ["follow"]
