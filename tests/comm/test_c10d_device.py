"""The torch.distributed backend on device tensors: ``init_process_group("cpu:axo,standin:axo")`` on the stand-in GPU.

Oracles: sums and shuffles written out. What is checked besides: nothing is read before wait (the stand-in keeps the
order of streams), tensors live until then, and the calls obey the libraries' rules. See tests/standin.py.
"""

import copy
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

import axo
from tests import standin
from tests.launcher import run_ranks


def initialised(folder, **options):
    gpu = standin.install(folder)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.accelerator.set_device_index(rank)
    dist.init_process_group("cpu:axo,standin:axo", **options)
    return gpu, rank, world, torch.device("standin", rank)


def filled(device, value, *shape, dtype=torch.float32):
    return torch.full(shape, value, dtype=dtype, device=device)


def equal(tensor, values, what=""):
    expected = torch.as_tensor(values, dtype=tensor.dtype).expand(tensor.shape) if tensor.numel() else tensor.cpu()
    assert torch.equal(tensor.cpu(), expected), (what, tensor.cpu(), values)


def collectives(folder):
    gpu, rank, world, device = initialised(folder)
    total = sum(range(1, world + 1))
    mine = filled(device, rank + 1.0, 5)
    for async_op in (False, True):

        def done(work, async_op=async_op):
            if async_op:
                work.wait()

        t = mine.clone()
        done(dist.all_reduce(t, async_op=async_op))
        equal(t, total, "all_reduce")
        t = mine.clone()
        done(dist.all_reduce(t, dist.ReduceOp.AVG, async_op=async_op))
        equal(t, total / world, "avg")
        t = mine.clone()
        done(dist.all_reduce(t, dist._make_nccl_premul_sum(0.5), async_op=async_op))
        equal(t, total / 2, "premul_sum")
        t = filled(device, rank + 1.0, 3, 4).T  # not contiguous
        done(dist.all_reduce(t, async_op=async_op))
        equal(t, total, "a view")
        t = filled(device, rank + 1j, 3, dtype=torch.complex64)
        done(dist.all_reduce(t, async_op=async_op))
        equal(t, complex(total - world, world), "complex")
        t = mine.clone()
        done(dist.broadcast(t, 1, async_op=async_op))
        equal(t, 2.0, "broadcast")
        t = mine.clone()
        done(dist.reduce(t, 0, async_op=async_op))
        equal(t, total if rank == 0 else rank + 1.0, "reduce")
        parts = [torch.empty(5, device=device) for _ in range(world)]
        done(dist.all_gather(parts, mine, async_op=async_op))
        [equal(part, source + 1.0, "all_gather") for source, part in enumerate(parts)]
        uneven = [torch.empty(source + 1, device=device) for source in range(world)]
        done(dist.all_gather(uneven, filled(device, rank + 1.0, rank + 1), async_op=async_op))
        [equal(part, source + 1.0, "uneven all_gather") for source, part in enumerate(uneven)]
        for dtype in (torch.float32, torch.float8_e4m3fn, torch.int16, torch.complex64):
            whole = torch.empty(5 * world, device=device, dtype=dtype)
            done(dist.all_gather_into_tensor(whole, mine.to(dtype), async_op=async_op))
            equal(
                whole.float() if dtype == torch.float8_e4m3fn else whole,
                torch.arange(1, world + 1).repeat_interleave(5),
            )
        part = torch.empty(5, device=device)
        done(dist.reduce_scatter_tensor(part, mine.repeat(world), async_op=async_op))
        equal(part, total, "reduce_scatter_tensor")
        done(dist.reduce_scatter_tensor(part, mine.repeat(world), dist._make_nccl_premul_sum(2.0), async_op=async_op))
        equal(part, 2 * total, "scaled reduce_scatter_tensor")
        done(dist.reduce_scatter(part, [mine + to for to in range(world)], async_op=async_op))
        equal(part, total + world * rank, "reduce_scatter")
        done(dist.gather(mine, parts if rank == 1 else None, dst=1, async_op=async_op))
        done(dist.scatter(part, [mine * (to + 1) for to in range(world)] if rank == 1 else None, 1, async_op=async_op))
        equal(part, 2.0 * (rank + 1), "scatter")
        swapped = torch.empty(world, device=device)
        done(
            dist.all_to_all_single(
                swapped, torch.arange(10.0 * rank, 10.0 * rank + world).to(device), async_op=async_op
            )
        )
        equal(swapped, [10.0 * source + rank for source in range(world)], "all_to_all_single")
        sends, receives = [rank + to for to in range(world)], [source + rank for source in range(world)]
        uneven_out = torch.empty(sum(receives), device=device)
        uneven_in = torch.cat([filled(device, 10.0 * rank + to, rank + to) for to in range(world)])
        done(dist.all_to_all_single(uneven_out, uneven_in, receives, sends, async_op=async_op))
        expected = torch.cat([torch.full((n,), 10.0 * source + rank) for source, n in enumerate(receives)])
        equal(uneven_out, expected, "uneven all_to_all_single")
        done(dist.all_to_all(parts, [mine * (to + 1) for to in range(world)], async_op=async_op))
        [equal(part, (source + 1.0) * (rank + 1), "all_to_all") for source, part in enumerate(parts)]
    with dist._coalescing_manager(device=device, async_ops=True) as manager:
        several = [filled(device, rank + float(number), 3) for number in range(3)]
        for t in several:
            dist.all_reduce(t)
    manager.wait()
    [equal(t, sum(range(world)) + world * number, "coalesced") for number, t in enumerate(several)]
    outputs = [torch.empty(3 * world, device=device) for _ in range(2)]
    with dist._coalescing_manager(device=device):
        for number, out in enumerate(outputs):
            dist.all_gather_into_tensor(out, filled(device, rank + 10.0 * number, 3))
    for number, out in enumerate(outputs):
        equal(out, [r + 10.0 * number for r in range(world) for _ in range(3)], "coalesced gathers")
    right, left = (rank + 1) % world, (rank - 1) % world
    got = torch.empty(5, device=device)
    ring = [dist.P2POp(dist.isend, mine, right), dist.P2POp(dist.irecv, got, left)]
    [work.wait() for work in dist.batch_isend_irecv(ring)]
    equal(got, left + 1.0, "batch_isend_irecv")
    dist.barrier(device_ids=[rank])
    everyone = [None] * world
    dist.all_gather_object(everyone, {"rank": rank})
    assert everyone == [{"rank": r} for r in range(world)]
    with pytest.raises(ValueError, match=r"cannot be received from any rank.*pass src"):
        dist.recv(mine)
    with pytest.raises(ValueError, match="one device"):
        dist.all_gather_into_tensor(torch.empty(5 * world), mine)
    backend = dist.distributed_c10d._get_default_group()._get_backend(device)
    assert backend._get_sequence_number_for_group() > 40
    assert not gpu.violations()
    dist.destroy_process_group()


def order_and_futures(folder):
    """Pending works leave the host alone; futures are ordered; works hold their tensors; errors arrive."""
    gpu, rank, _world, device = initialised(folder)
    dist.all_reduce(torch.ones(1, device=device))
    torch.accelerator.set_stream(torch.Stream(device=device))
    t = filled(device, rank + 1.0, 100)
    gpu.synchronize()
    gate = gpu.hold()
    work = dist.all_reduce(t, async_op=True)
    future = work.get_future()
    assert not work.is_completed() and future.done()  # complete in the order of streams
    gate.open()
    equal(future.wait()[0], 3.0, "future")
    work.wait()
    equal(t, 3.0, "all_reduce")
    held = [dist.all_reduce(filled(device, float(number), 50).T, async_op=True) for number in range(30)]
    [work.wait() for work in held]
    parts = [torch.empty(4, device=device), torch.empty(4, device=device)]  # staged: the copies come with the future
    future = dist.all_gather(parts, filled(device, rank + 1.0, 4), async_op=True).get_future()
    future.wait()
    [equal(part, source + 1.0) for source, part in enumerate(parts)]
    # The same on another stream than the call's, or on the future's, held there: what the copies read lives until they
    # have.
    other = torch.Stream(device=device)
    for of_future in (False, True):
        parts = [torch.empty(4000, device=device), torch.empty(4000, device=device)]
        work = dist.all_gather(parts, filled(device, rank + 1.0, 4000), async_op=True)
        with other:
            gate = gpu.hold(pool=of_future)
            future = work.get_future() if of_future else work.wait()
        del work
        for _ in range(4):
            time.sleep(0.1)
            dist.all_reduce(filled(device, 1.0, 3), async_op=True)  # lets go of what works have kept
        gate.open()
        if of_future:
            future.wait()
        other.synchronize()
        [equal(part, source + 1.0, f"copied on another stream, {of_future}") for source, part in enumerate(parts)]
    pair = dist.new_group([0, 1])
    t = filled(device, rank + 1.0, 4)
    dist.all_reduce(t, group=pair)
    equal(t, 3.0, "new_group")
    lone = dist.new_group([rank], use_local_synchronization=True)
    dist.all_reduce(t, group=lone)
    equal(t, 3.0, "a group of one")
    gpu.fail("ncclAllReduce", 6)
    with pytest.raises(axo.PeerLost, match="remote process exited"):
        dist.all_reduce(t, group=pair)
    with pytest.raises(axo.Aborted):
        dist.all_reduce(t, group=pair)
    dist.all_reduce(t)  # another group goes on
    equal(t, 6.0)
    assert not gpu.violations()
    dist.distributed_c10d._abort_process_group()
    with pytest.raises(Exception, match=r"abort|destroyed|initialized"):
        dist.all_reduce(t)


def pairs_and_splits(folder):
    """A send before any collective meets its peer alone; split_group; models that others distribute."""
    gpu, rank, world, device = initialised(folder, device_id=None)
    if rank == 0:
        dist.send(filled(device, 7.0, 3), 1)
    elif rank == 1:
        got = torch.empty(3, device=device)
        dist.recv(got, 0)
        equal(got, 7.0, "recv in a pair")
    dist.barrier()
    inits = [call for call in gpu.calls() if call.startswith("ncclCommInitRankConfig")]
    assert ["size=2" in call for call in inits] == ([True] if rank < 2 else []), inits
    dist.destroy_process_group()
    dist.init_process_group("cpu:axo,standin:axo", device_id=device)
    assert any("size=4" in call for call in gpu.calls()), "device_id connects at once"
    part = dist.split_group(split_ranks=[[0, 1], [2, 3]])
    t = filled(device, rank + 1.0, 3)
    dist.all_reduce(t, group=part)
    equal(t, 3.0 if rank < 2 else 7.0, "split_group")
    torch.manual_seed(0)
    serial = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    data = torch.randn(4 * world, 6)
    model = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(serial).to(device))
    model(data.chunk(world)[rank].to(device)).square().mean().backward()
    serial(data).square().mean().backward()
    for mine, other in zip(model.parameters(), serial.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), other.grad, rtol=1e-5, atol=1e-6)
    assert not gpu.violations()
    dist.destroy_process_group()


def abort_while_meeting(folder):
    """A rank inside its first connection of a GPU, where nobody else will come, is freed by an abort."""
    _, rank, _, device = initialised(folder, device_id=None)
    if rank == 0:
        backend = dist.group.WORLD._get_backend(device)
        assert backend.get_error().name == "SUCCESS"
        with ThreadPoolExecutor() as pool:
            stuck = pool.submit(dist.all_reduce, filled(device, 1.0, 3))
            time.sleep(0.5)
            assert not stuck.done()
            backend.abort()
            with pytest.raises(axo.Aborted, match="aborted while its ranks met"):
                stuck.result(timeout=20)
        assert backend.get_error().name == "COMM_ERROR"
        with pytest.raises(axo.Aborted):
            dist.all_reduce(filled(device, 1.0, 3))
    dist.distributed_c10d._get_default_store().set(f"done{rank}", "")
    dist.distributed_c10d._get_default_store().wait(["done0"])


CHECKS = [(collectives, 3), (order_and_futures, 2), (pairs_and_splits, 4), (abort_while_meeting, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("check", "world"), CHECKS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_on_ranks(check, world, tmp_path):
    standin.build()
    run_ranks(check, world, tmp_path)
