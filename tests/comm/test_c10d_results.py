"""The backend ``axo`` gives the right result however it is asked for it: scaled sums, handles that nobody waits for,
memory that overlaps, inference mode, hooks of DistributedDataParallel. Oracle: the values written out.
"""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from tests.launcher import run_ranks


def start(**options):
    dist.init_process_group("axo", **options)
    return dist.get_rank(), dist.get_world_size()


def equal(got, expected):
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=got.dtype), rtol=0, atol=0)


def scaled_sums():
    """A product with the factor has the dtype and the shape of what is reduced, or is refused."""
    rank, world = start()
    for dtype in (torch.int64, torch.int8, torch.uint8, torch.bool):
        t = torch.ones(2 * world).to(dtype)
        for issue in (
            lambda t, op: dist.all_reduce(t, op),
            lambda t, op: dist.reduce(t, 0, op),
            lambda t, op: dist.reduce_scatter_tensor(t[:2].clone(), t, op),
            lambda t, op: dist.reduce_scatter(t[:2].clone(), list(t.chunk(world)), op),
            lambda t, op: dist.all_reduce_coalesced([t], op),
        ):
            with pytest.raises((ValueError, RuntimeError), match=r"floating point|not defined"):
                issue(t, dist._make_nccl_premul_sum(2.0))
        equal(t, [1] * (2 * world))
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.complex64):
        for factor in (torch.tensor(2.0, dtype=torch.float64), torch.tensor([2.0], dtype=torch.float64)):
            t = torch.full((5,), rank + 1.0).to(dtype)
            dist.all_reduce(t, dist._make_nccl_premul_sum(factor))
            equal(t, torch.full((5,), world * (world + 1.0)).to(dtype))
    with pytest.raises(ValueError, match="complex factor"):
        dist.all_reduce(torch.ones(1), dist._make_nccl_premul_sum(torch.tensor([1j])))


def nobody_waits():
    """Results come although handles are dropped; those of large lists, of views, of sparse sums."""
    rank, world = start()
    columns = torch.zeros(5, world)
    outs = [torch.zeros(300_000) for _ in range(world)]
    sparse = torch.eye(4).to_sparse() * (rank + 1)
    parts = [torch.zeros(3), torch.zeros(4)]
    dist.all_gather(outs, torch.full((300_000,), rank + 1.0), async_op=True)
    dist.all_reduce(columns.fill_(rank + 1.0).T, async_op=True)
    dist.all_reduce(sparse, async_op=True)
    dist.gather(torch.full((3,), rank + 1.0), [p[:3] for p in parts][:world] if rank == 0 else None, async_op=True)
    dist.barrier()
    [equal(out, torch.full((300_000,), r + 1.0)) for r, out in enumerate(outs)]
    equal(columns, torch.full((5, world), world * (world + 1) / 2))
    equal(sparse.to_dense(), torch.eye(4) * world * (world + 1) / 2)
    assert rank or (parts[0].sum().item(), parts[1].sum().item()) == (3.0, 6.0)
    with dist._coalescing_manager(async_ops=True):
        pieces = torch.zeros(2, 2 * world)
        for row in pieces.T.contiguous().T:
            dist.all_gather_into_tensor(row, torch.full((2,), rank + 1.0))
    late = [torch.zeros(4) for _ in range(world)]
    dist.all_gather(late, torch.full((4,), rank + 1.0), async_op=True)
    end = time.monotonic() + 60  # nothing is called any more: the thread of the futures delivers
    while any(t.sum().item() == 0 for t in late) and time.monotonic() < end:
        time.sleep(0.001)
    [equal(out, torch.full((4,), r + 1.0)) for r, out in enumerate(late)]
    dist.barrier()


def memory_overlaps():
    rank, world = start()
    for count in (2, 1 << 19):
        o = torch.zeros(world * count)
        o[:count] = 1 + rank
        dist.all_gather_into_tensor(o, o[:count])
        equal(o, torch.arange(1.0, world + 1).repeat_interleave(count))
        whole = torch.arange(world * count).float() + rank
        expected = sum(torch.arange(world * count).float() + r for r in range(world)).chunk(world)[rank]
        part = whole[1 : 1 + count]
        dist.reduce_scatter_tensor(part, whole)
        equal(part, expected)
        lists = torch.zeros(world * count)
        lists[:count] = 1 + rank
        dist.all_gather(list(lists.chunk(world)), lists[:count])
        equal(lists, o)
        swapped = torch.arange(world * count).float() + 10 * rank
        expected = torch.cat([(torch.arange(world * count).float() + 10 * r).chunk(world)[rank] for r in range(world)])
        dist.all_to_all_single(swapped, swapped)
        equal(swapped, expected)
    t = torch.ones(3)
    dist.all_reduce_coalesced([t, t])  # each from the values before
    equal(t, [world] * 3)
    for issue in (
        lambda t: dist.all_reduce(t),
        lambda t: dist.broadcast(t, 0),
        lambda t: dist.all_gather([t] * world, torch.ones(3)),
        lambda t: dist.reduce_scatter_tensor(t, torch.ones(3 * world)),
    ):
        with pytest.raises(ValueError, match="share memory"):
            issue(torch.zeros(1).expand(3))
    dist.barrier()


def inference_mode():
    rank, world = start()
    total = torch.full((3, 4), world * (world + 1) / 2)
    for get in (lambda work: work.wait(), lambda work: work.get_future().wait()):
        for after in (True, False):
            with torch.inference_mode():
                view = torch.full((4, 3), rank + 1.0).T
                work = dist.all_reduce(view, async_op=True)
            with torch.inference_mode(after):
                get(work)
            equal(view, total)
        normal = torch.full((4, 3), rank + 1.0).T
        work = dist.all_reduce(normal, async_op=True)
        with torch.inference_mode():
            get(work)
        equal(normal, total)
        assert not normal.is_inference()
    with torch.inference_mode():
        view = torch.full((4, 3), rank + 1.0).T
    dist.all_reduce(view)
    equal(view, total)


def any_byte_is_true():
    rank, _ = start()
    raw = torch.tensor([[0, 2, 16, 0, 8], [1, 1, 16, 2, 0]], dtype=torch.uint8)
    for op, expected in (
        ("MIN", [0, 1, 1, 0, 0]),
        ("PRODUCT", [0, 1, 1, 0, 0]),
        ("BAND", [0, 1, 1, 0, 0]),
        ("MAX", [1, 1, 1, 1, 1]),
        ("SUM", [1, 1, 1, 1, 1]),
        ("BXOR", [1, 0, 0, 1, 1]),
    ):
        t = raw[rank].clone().view(torch.bool)
        dist.all_reduce(t, getattr(dist.ReduceOp, op))
        assert t.view(torch.uint8).tolist() == expected, op


def time_limits():
    """A part's limit is its own, on every torch; a Work says which it has, where torch asks."""
    rank, world = start(timeout=timedelta(seconds=50))
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    names = [f"part{number}" for number in range(2)]
    for name in names:  # ranks outside get None, and are asked as often as those inside
        part = dist.group.WORLD.split_group([2, 0], timeout=timedelta(seconds=77), group_name=name)
        assert (part is None) == (rank in (1, 3))
        if part is not None:
            t = torch.tensor([float(rank)])
            part.allreduce(t).wait()
            equal(t, [2.0])
            assert part._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)
        assert backend.options._timeout == timedelta(seconds=50)
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()
    if hasattr(work, "timeout"):
        assert work.timeout == timedelta(seconds=50)
    if hasattr(dist, "gather_single"):
        out = torch.zeros(2, world).T if rank == 1 else None
        dist.gather_single(torch.full((1, 2), rank + 1.0), out, dst=1)
        assert rank != 1 or torch.equal(out, torch.arange(1.0, world + 1)[:, None].expand(world, 2))


class Branches(nn.Module):
    """Two layers, of which every step uses one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(6)])

    def forward(self, x, step):
        for number, layer in enumerate(self.layers):
            x = layer(x) if number % 2 == step % 2 or number == 5 else x
        return x


def power_sgd_with_unused_parameters():
    """Its sums come from callbacks, the reducer's map of unused parameters from autograd: one order on all ranks.

    Without a warm start its last callback clears what the next bucket's hook has put there.
    """
    rank, world = start()
    for warm in (True, False):
        torch.manual_seed(0)
        model = DistributedDataParallel(Branches(), find_unused_parameters=True, bucket_cap_mb=0.0003)
        options = {"start_powerSGD_iter": 2, "warm_start": warm, "use_error_feedback": warm}
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, **options)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        for step in range(8):
            model.zero_grad(set_to_none=True)
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))
            model(x, step).square().mean().backward()
            for p in model.parameters():
                if p.grad is not None:
                    others = [torch.empty_like(p.grad) for _ in range(world)]
                    dist.all_gather(others, p.grad)
                    assert all(torch.equal(others[0], other) for other in others)


CASES = [
    (scaled_sums, 2),
    (nobody_waits, 2),
    (memory_overlaps, 3),
    (inference_mode, 2),
    (any_byte_is_true, 2),
    (time_limits, 4),
    (power_sgd_with_unused_parameters, 2),
]


@pytest.mark.parametrize(("check", "world"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_results(check, world):
    run_ranks(check, world)
