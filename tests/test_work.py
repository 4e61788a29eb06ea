"""Work beyond waiting: futures, durations, and the scaled sum. Oracles: the sums written out, and the host's clock."""

import time

import pytest
import torch

import axo
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
        time.sleep(0.2)


def durations_are_seconds():
    comm = axo.connect("2x1x1x1").x
    comm.barrier()
    start = time.perf_counter()
    work = comm.all_reduce(torch.ones(10), async_op=True) if comm.rank == 0 else None
    if work is None:
        time.sleep(0.3)
        comm.all_reduce(torch.ones(10))
        return
    assert work.duration() is None
    work.wait()
    passed = time.perf_counter() - start
    assert 0.1 < work.duration() <= passed, (work.duration(), passed)


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


@pytest.mark.parametrize("check", [futures_tell, durations_are_seconds, scaled_sums], ids=lambda check: check.__name__)
def test_on_ranks(check):
    run_ranks(check, world_size=2)


def test_one_rank():
    comm = axo.connect("1x1x1x1").x
    work = comm.all_reduce(torch.ones(3), async_op=True, scale=3.0)
    assert torch.equal(work.future().wait(), torch.full((3,), 3.0)) and work.duration() is None
