"""Work beyond waiting: futures, durations, and the scaled sum. Oracles: the sums written out, and the host's clock."""

import math
import os
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

import axo
from axo.comm.extension import _C
from axo.comm.work import undelivered
from tests.launcher import run_ranks


def futures_tell():
    comm = axo.connect("2x1x1x1").x
    work = comm.all_reduce(torch.full((1000,), comm.rank + 1.0), async_op=True)
    future = work.future()
    doubled = future.then(lambda done: 2 * done.value())
    assert torch.equal(future.wait(), torch.full((1000,), 3.0))
    assert torch.equal(doubled.wait(), torch.full((1000,), 6.0))
    # A result that is not contiguous is complete in the future, too.
    table = torch.arange(12.0).reshape(3, 4) * (comm.rank + 1)
    got = comm.all_reduce(table.T, async_op=True).future().wait()
    assert got.data_ptr() == table.data_ptr() and torch.equal(table, 3 * torch.arange(12.0).reshape(3, 4))
    # Hundreds at once, in the order of completion, with collectives issued from the callbacks.
    chained = []
    for number in range(200):
        work = comm.all_reduce(torch.tensor([float(number)]), async_op=True)
        chained.append(work.future().then(lambda done: done.value().item()))
    assert [future.wait() for future in chained] == [2.0 * number for number in range(200)]
    with axo.group():
        inside = comm.all_reduce(torch.ones(3), async_op=True)
        with pytest.raises(axo.Error, match="still open"):
            inside.future()
    assert torch.equal(inside.future().wait(), torch.full((3,), 2.0))
    if comm.rank == 0:
        lost = comm.all_reduce(torch.ones(3), async_op=True).future()
        time.sleep(0.05)
        comm.abort("enough")
        with pytest.raises(axo.Aborted, match="enough"):
            lost.wait()
    else:
        with pytest.raises(axo.Aborted, match="enough"):
            comm.recv(torch.ones(1), peer=0)


def results_come_whoever_waits():
    """A view's result is copied although its Work is dropped, polled, or only a later one is waited for."""
    comm = axo.connect("2x1x1x1").x
    total = torch.full((4, 300), 3.0)

    def begin():
        table = torch.full((300, 4), comm.rank + 1.0)
        return table, comm.all_reduce(table.T, async_op=True)

    table, work = begin()
    del work
    comm.barrier()
    assert torch.equal(table.T, total)
    table, work = begin()
    comm.all_reduce(torch.ones(1), async_op=True).wait()
    assert torch.equal(table.T, total)
    table, work = begin()
    comm.all_reduce(torch.ones(1))
    assert torch.equal(table.T, total)
    table, work = begin()
    while not work.is_completed():
        pass
    assert torch.equal(table.T, total)
    table, work = begin()
    del work
    end = time.monotonic() + 60
    while not torch.equal(table.T, total) and time.monotonic() < end:  # nothing is called any more
        time.sleep(0.001)
    assert torch.equal(table.T, total)
    for after in (False, True):  # what was made in inference mode may be waited for outside of it
        with torch.inference_mode():
            table, work = begin()
        with torch.inference_mode(after):
            work.future().wait() if after else work.wait()
        assert torch.equal(table.T, total)
    assert not undelivered


def durations_are_seconds():
    comms = axo.connect("2x1x1x1")
    if comms.rank == 1:
        comms.world.recv(torch.ones(1), peer=0)
        time.sleep(0.3)
        comms.x.all_reduce(torch.ones(10))
        return
    start = time.perf_counter()
    work = comms.x.all_reduce(torch.ones(10), async_op=True)
    assert work.duration() is None
    comms.world.send(torch.ones(1), peer=1)
    work.wait()
    passed = time.perf_counter() - start
    assert 0.3 < work.duration() <= passed, (work.duration(), passed)


def scaled_sums():
    comm = axo.connect("2x1x1x1").x
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        mine = torch.arange(8, dtype=dtype) + comm.rank
        expected = 0.5 * (2 * torch.arange(8, dtype=dtype) + 1)
        kept = mine.clone()
        assert torch.equal(comm.all_reduce(kept, scale=0.5), expected) and torch.equal(kept, expected)
        out = comm.all_reduce(mine, out=torch.empty_like(mine), scale=0.5, async_op=True).wait()
        assert torch.equal(out, expected) and torch.equal(mine, torch.arange(8, dtype=dtype) + comm.rank)
        part = comm.reduce_scatter(mine, scale=0.5)
        assert torch.equal(part, expected.chunk(2)[comm.rank])
    with pytest.raises(ValueError, match="goes with op='sum' on floating point"):
        comm.all_reduce(mine, "max", scale=2.0)
    with pytest.raises(ValueError, match="goes with op='sum' on floating point"):
        comm.all_reduce(torch.ones(3, dtype=torch.int32), scale=2.0)


def nonsense_is_refused():
    """Before anything is sent: the ranks are still together afterwards."""
    comm = axo.connect("2x1x1x1").x
    one = torch.ones(1)
    work = comm.all_reduce(one.clone(), async_op=True)
    for bad in (-1.0, math.nan):
        with pytest.raises(ValueError, match="is no time"):
            work.synchronize(bad)
    with pytest.raises(ValueError, match="is no time"):
        work.synchronize(timedelta(seconds=1))
    work.synchronize(math.inf)
    for bad in (-1.0, 0.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"connect: timeout=.* is not a number of seconds"):
            axo.connect("2x1x1x1", timeout=bad)
    numbers = {
        "root=0.5": lambda: comm.broadcast(one, root=0.5),
        "peer='1'": lambda: comm.send(one, peer="1"),
        "tag=1099511627776": lambda: comm.recv(one, peer=1 - comm.rank, tag=2**40),
        "color=4294967296": lambda: comm.split(2**32),
        "send_counts=1.0": lambda: comm.all_to_all(torch.ones(2), send_counts=[1.0, 1.0], recv_counts=[1, 1]),
    }
    for message, call in numbers.items():
        with pytest.raises(TypeError, match=f"{message} is not a whole number of"):
            call()
    pair = torch.ones(2)
    for counts in ([-2, 2], [2], [1, 1, 1]):
        with pytest.raises(ValueError, match=r"recv_counts=.* has no number of at least 0 for each of 2 ranks"):
            comm.all_to_all(pair, send_counts=[1, 1], recv_counts=counts)
    with pytest.raises(TypeError, match="recv_counts=None is not a whole number of"):
        comm.all_to_all(pair, send_counts=[1, 1], recv_counts=[None, 1])
    with pytest.raises(ValueError, match=r"op=\['sum'\] is not an operation"):
        comm.all_reduce(pair, op=["sum"])
    with pytest.raises(TypeError, match="scale='2' is not a number"):
        comm.all_reduce(pair, scale="2")
    for array, error in ((np.ones(4)[::-1], ValueError), (np.array([one, one], dtype=object), TypeError)):
        with pytest.raises(error, match="all_reduce: torch cannot view the NumPy array, pass a plain copy"):
            comm.all_reduce(array)
    mesh = dist.init_device_mesh("cpu", (2,))
    with pytest.raises(ValueError, match="DTensor has no memory of its own"):
        comm.all_reduce(DTensor.from_local(one, mesh, [Replicate()]))

    class NoDevice:
        def __dlpack__(self, **_):
            return one.__dlpack__()

    with pytest.raises(TypeError, match="cannot read the DLPack of NoDevice"):
        comm.all_reduce(NoDevice())
    memory = {
        "has a negative size": lambda: axo.empty_shared((-1, 2)),
        "more memory than": lambda: axo.empty_shared((2**62, 8)),
        "dtype torch.qint8 is not supported": lambda: axo.empty_shared((3,), dtype=torch.qint8),
    }
    for message, call in memory.items():
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(axo.Error, match="no room"):
        axo.empty_shared((2**50,))
    assert comm.all_reduce(one).item() == 2.0


def futures_of_a_forked_child():
    """The thread that completes futures stays with the parent; a child has its own."""
    comm = axo.connect("2x1x1x1").x
    comm.all_reduce(torch.ones(1), async_op=True).future().wait()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            core = _C.create_host_communicator(None, "", 0, 1, "child", 5000)
            child = axo.Communicator(core, name="child", axis="child")
            futures = [child.all_reduce(torch.ones(1), async_op=True).future() for _ in range(3)]
            end = time.monotonic() + 10
            while time.monotonic() < end and not all(future.done() for future in futures):
                time.sleep(0.005)
            status = 0 if all(future.done() for future in futures) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert comm.all_reduce(torch.ones(1), async_op=True).future().wait().item() == 2.0


def torch_futures_of_a_forked_child():
    """The same for those of torch.distributed, which another thread completes."""

    def complete_one():
        # A group of one rank, and a message to itself: pending when its future is asked for.
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("axo", store=dist.HashStore(), rank=0, world_size=1)
        group, got = dist.group.WORLD, torch.zeros(3)
        future = group.recv([got], 0, 0).get_future()
        group.send([torch.ones(3)], 0, 0).wait()
        end = time.monotonic() + 10
        while time.monotonic() < end and not future.done():
            time.sleep(0.005)
        return future.done() and got.sum().item() == 3.0

    assert complete_one()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if complete_one() else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


CHECKS = [
    futures_tell, results_come_whoever_waits, durations_are_seconds, scaled_sums, nonsense_is_refused,
    futures_of_a_forked_child, torch_futures_of_a_forked_child,
]  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_ranks(check):
    run_ranks(check, world_size=2)


def test_one_rank():
    comm = axo.connect("1x1x1x1").x
    work = comm.all_reduce(torch.ones(3), async_op=True, scale=3.0)
    assert torch.equal(work.future().wait(), torch.full((3,), 3.0)) and work.duration() is None
