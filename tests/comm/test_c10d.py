"""torch.distributed over the backend ``axo``: every collective and its forms, and what torch builds on them."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import axo
from tests.launcher import run_ranks


def start(**options):
    dist.init_process_group("axo", **options)
    return dist.get_rank(), dist.get_world_size()


def equal(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def tensor_forms():
    rank, world = start()
    every = [torch.arange(6.0).view(3, 2) + 10 * r for r in range(world)]
    mine, total = every[rank], sum(every)
    for async_op in (False, True):

        def done(work):
            assert (work is not None) == async_op  # noqa: B023
            if work is not None:
                work.wait()
                assert work.is_completed() and work.is_success()

        t = mine.clone()
        done(dist.all_reduce(t, async_op=async_op))
        equal(t, total)
        t = mine.clone()
        done(dist.all_reduce(t, op=dist.ReduceOp.AVG, async_op=async_op))
        equal(t, total / world)
        t = mine.clone()
        done(dist.broadcast(t, src=1, async_op=async_op))
        equal(t, every[1])
        t = mine.clone()
        done(dist.reduce(t, dst=1, op=dist.ReduceOp.MAX, async_op=async_op))
        equal(t, every[-1] if rank == 1 else mine)
        t = torch.empty(3 * world, 2)
        done(dist.all_gather_into_tensor(t, mine, async_op=async_op))
        equal(t, torch.cat(every))
        t = torch.empty(3, 2)
        done(dist.reduce_scatter_tensor(t, torch.cat([mine + p for p in range(world)]), async_op=async_op))
        equal(t, total + world * rank)
        t = torch.empty(world)
        done(dist.all_to_all_single(t, 10.0 * rank + torch.arange(world), async_op=async_op))
        equal(t, 10.0 * torch.arange(world) + rank)
        done(dist.barrier(async_op=async_op))
    sends, receives = [rank + p for p in range(world)], [p + rank for p in range(world)]
    t = torch.empty(sum(receives), 2)
    dist.all_to_all_single(t, torch.full((sum(sends), 2), float(rank)), receives, sends)
    equal(t, torch.cat([torch.full((n, 2), float(p)) for p, n in enumerate(receives)]))


def list_forms():
    rank, world = start()
    every = [torch.arange(4.0) + 10 * r for r in range(world)]
    uneven = [torch.full((r + 1, 2), float(r)) for r in range(world)]
    for async_op in (False, True):

        def done(work):
            if work is not None:
                work.wait()

        for parts in (every, uneven):
            outs = [torch.empty_like(part) for part in parts]
            done(dist.all_gather(outs, parts[rank], async_op=async_op))
            equal(outs, parts)
            outs = [torch.empty_like(part) for part in parts] if rank == 1 else None
            done(dist.gather(parts[rank], outs, dst=1, async_op=async_op))
            if rank == 1:
                equal(outs, parts)
            out = torch.empty_like(parts[rank])
            done(dist.scatter(out, parts if rank == 0 else None, src=0, async_op=async_op))
            equal(out, parts[rank])
            out = torch.empty_like(parts[rank])
            done(dist.reduce_scatter(out, [part + rank for part in parts], async_op=async_op))
            equal(out, world * parts[rank] + sum(range(world)))
        flat = torch.empty(4 * world)  # outputs that lie in one tensor need no staging
        done(dist.all_gather(list(flat.chunk(world)), every[rank], async_op=async_op))
        equal(flat, torch.cat(every))
        columns = torch.empty(4, world)  # outputs that are not contiguous
        done(dist.all_gather(list(columns.unbind(1)), every[rank], async_op=async_op))
        equal(columns.t(), torch.stack(every))
        ins = [torch.full((p + 1, rank + 1), float(rank)) for p in range(world)]
        outs = [torch.empty(rank + 1, p + 1) for p in range(world)]
        done(dist.all_to_all(outs, ins, async_op=async_op))
        equal(outs, [torch.full((rank + 1, p + 1), float(p)) for p in range(world)])
    tensors = [torch.ones(3) + rank, torch.ones(2), torch.ones(0)]
    dist.all_reduce_coalesced(tensors)
    sums = torch.full((3,), world + sum(range(world)) * 1.0), torch.full((2,), 1.0 * world), torch.ones(0)
    equal(tensors, list(sums))
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    equal(tensors[1], torch.full((2,), 1.0 * world * world))


def odd_dtypes_and_views():
    rank, world = start()
    for dtype in (torch.float8_e4m3fn, torch.complex64, torch.uint16, torch.bool):
        mine = torch.arange(5).add(rank).remainder(2).to(dtype)
        out = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(out, mine)
        for r, got in enumerate(out):
            assert torch.equal(got.to(torch.complex64), torch.arange(5).add(r).remainder(2).to(torch.complex64)), dtype
    z = torch.tensor([1 + 2j]) * (rank + 1)
    dist.all_reduce(z)
    equal(z, torch.tensor([1 + 2j]) * sum(range(1, world + 1)))
    part = torch.empty(1, dtype=torch.complex64)
    dist.reduce_scatter_tensor(part, torch.ones(world, dtype=torch.complex64) * 1j)
    equal(part, torch.tensor([1j * world]))
    grid = torch.zeros(4, 4)
    view = grid[1:3, ::2]
    view.fill_(rank + 1.0)
    dist.all_reduce(view)
    assert grid.sum() == 4 * sum(range(1, world + 1)) and grid[0].sum() == 0
    dist.broadcast(grid.t(), src=0)
    scaled = torch.ones(2)
    dist.all_reduce(scaled, op=dist._make_nccl_premul_sum(0.5))
    equal(scaled, torch.full((2,), 0.5 * world))
    with pytest.raises(RuntimeError, match="not defined on"):
        dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND)


def sparse_sums():
    """COO tensors: unequal numbers of elements, repeated ones, none at all, dense dims. Oracle: dense sums."""
    rank, world = start()
    dist.barrier()

    def of_rank(r, dtype=torch.float32):
        rows = torch.tensor([[0] * r + list(range(r)), list(range(r)) + [3] * r])  # rank 0 has none
        return torch.sparse_coo_tensor(rows, torch.arange(2.0 * r).to(dtype) + r, (5, 4), dtype=dtype)

    total = sum(of_rank(r).to_dense() for r in range(world))
    for async_op in (False, True):
        t = of_rank(rank)
        work = dist.all_reduce(t, async_op=async_op)
        if work is not None:
            work.wait()
        equal(t.to_dense(), total)
        assert t.is_coalesced()
    t = of_rank(rank, torch.float64)
    equal(dist.all_reduce(t, async_op=True).get_future().wait()[0].to_dense(), total.double())
    t = of_rank(rank)
    dist.all_reduce(t, op=dist.ReduceOp.AVG)
    equal(t.to_dense(), total / world)
    hybrid = torch.sparse_coo_tensor(torch.tensor([[rank, 6]]), torch.ones(2, 3) + rank, (7, 3))
    dist.all_reduce(hybrid)
    dense = torch.zeros(7, 3)
    for r in range(world):
        dense[[r, 6]] += 1.0 + r
    equal(hybrid.to_dense(), dense)
    with pytest.raises(ValueError, match="max is not defined on sparse tensors"):
        dist.all_reduce(t, op=dist.ReduceOp.MAX)
    with pytest.raises(ValueError, match="have different shapes"):
        dist.all_reduce(torch.zeros(5 + rank % 2, 4).to_sparse())
    dist.barrier()


def objects_and_groups():
    rank, world = start()
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * (100 * rank)})
    assert [o["rank"] for o in objects] == list(range(world)) and len(objects[-1]["text"]) == 100 * (world - 1)
    items = ["a", {2: 3}] if rank == 1 else [None, None]
    dist.broadcast_object_list(items, src=1)
    assert items == ["a", {2: 3}]
    got = [None]
    dist.scatter_object_list(got, [f"for {r}" for r in range(world)] if rank == 0 else None, src=0)
    assert got == [f"for {rank}"]
    gathered = [None] * world if rank == 0 else None
    dist.gather_object(rank * rank, gathered, dst=0)
    assert rank != 0 or gathered == [r * r for r in range(world)]
    evens, odds = dist.new_group(list(range(0, world, 2))), dist.new_group(list(range(1, world, 2)))
    group = odds if rank % 2 else evens
    t = torch.tensor([float(rank)])
    dist.all_reduce(t, group=group)
    assert t.item() == sum(range(rank % 2, world, 2))
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.name() == "axo" and dist.get_backend() == "axo"
    before = backend._get_sequence_number_for_group() if hasattr(backend, "_get_sequence_number_for_group") else None
    dist.barrier()
    assert before is None or backend._get_sequence_number_for_group() == before + 1
    dist.destroy_process_group(group)
    dist.destroy_process_group()
    assert not dist.is_initialized()


def point_to_point():
    rank, world = start()
    right, left = (rank + 1) % world, (rank - 1) % world
    got = torch.empty(1000)
    requests = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, torch.full((1000,), float(rank)), right), dist.P2POp(dist.irecv, got, left)]
    )
    for request in requests:
        request.wait()
    equal(got, torch.full((1000,), float(left)))
    if rank == 0:
        for tag in (1, 2):
            dist.send(torch.tensor([float(tag)]), dst=1, tag=tag)
    if rank == 1:
        second, first = torch.empty(1), torch.empty(1)
        dist.recv(second, src=0, tag=2)
        dist.recv(first, src=0, tag=1)
        assert (first.item(), second.item()) == (1.0, 2.0)


def from_any_rank(backend):
    """Messages to rank 0 from all others, of which rank 0 does not say whose comes when; the same on Gloo."""
    dist.init_process_group(backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    evens = dist.new_group([0, 2])
    if rank:
        letters = [torch.full((5 + 40_000 * (number % 2),), 10.0 * rank + number) for number in range(3)]
        pending = [dist.isend(letter, dst=0, tag=number) for number, letter in enumerate(letters)]
        [work.wait() for work in pending]
        dist.barrier()
        if rank == 2:
            dist.send(torch.tensor([7.0]), dst=0, group=evens)
        return None
    came = []
    for number in (0, 2, 1):  # by tag, not as they were sent
        sources = set()
        for turn in range(world - 1):
            got = torch.empty(2, 5 + 40_000 * (number % 2)).T[:, 0] if turn else torch.empty(5 + 40_000 * (number % 2))
            sender = dist.recv(got, tag=number)
            equal(got, torch.full_like(got, 10.0 * sender + number))
            sources.add(sender)
        came.append(sorted(sources))
    dist.barrier()
    got = torch.empty(1)
    came.append([dist.recv(got, group=evens), got.item()])
    late = torch.empty(1)
    work = dist.irecv(late)
    if backend == "axo":
        assert not work.is_completed()
        with pytest.raises(RuntimeError, match="sourceRank"):
            work._source_rank()
        with pytest.raises(axo.PeerLost, match=r"recv.*from any rank, tag 0"):  # all others leave
            work.wait()
    return came


def test_receive_from_any_rank_as_gloo_does():
    ours, theirs = (run_ranks(from_any_rank, 4, backend)[0] for backend in ("axo", "gloo"))
    assert ours == theirs == [[1, 2, 3]] * 3 + [[2, 7.0]]


def futures():
    rank, world = start()
    t = torch.full((100_000,), float(rank))
    future = dist.all_reduce(t, async_op=True).get_future()
    doubled = future.then(lambda f: f.value()[0] * 2)
    equal(doubled.wait(), torch.full((100_000,), 2.0 * sum(range(world))))
    outs = [torch.empty(3) for _ in range(world)]
    values = dist.all_gather(outs, torch.full((3,), float(rank)), async_op=True).get_future().wait()
    equal(values, [torch.full((3,), float(r)) for r in range(world)])

    def again(f):  # a callback that issues a collective itself
        value = f.value()[0]
        return dist.all_reduce(value, async_op=True).get_future().wait()[0]

    chained = dist.all_reduce(torch.ones(4), async_op=True).get_future().then(again)
    equal(chained.wait(), torch.full((4,), float(world * world)))


def functional_collectives():
    rank, world = start()
    group = dist.group.WORLD
    equal(functional.all_reduce(torch.ones(3), "sum", group) + 0, torch.full((3,), 1.0 * world))
    equal(
        functional.all_gather_tensor(torch.full((2,), 1.0 * rank), 0, group) + 0,
        torch.arange(world).repeat_interleave(2).float(),
    )
    equal(functional.reduce_scatter_tensor(torch.ones(2 * world), "avg", 0, group) + 0, torch.ones(2))
    mesh = dist.init_device_mesh("cpu", (world,))
    full = torch.arange(40.0).view(10, 4)
    sharded = distribute_tensor(full, mesh, [Shard(0)])
    equal(sharded.redistribute(mesh, [Replicate()]).to_local(), full)
    equal(sharded.redistribute(mesh, [Shard(1)]).full_tensor(), full)
    equal(DTensor.from_local(torch.ones(2, 2), mesh, [Replicate()]).full_tensor(), torch.ones(2, 2))


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def serial_gradients(x, y):
    model = network()
    nn.functional.mse_loss(model(x), y).backward()
    return [p.grad for p in model.parameters()]


def ddp_equals_serial():
    rank, world = start()
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(4 * world, 8, generator=generator), torch.randn(4 * world, 4, generator=generator)
    model = DistributedDataParallel(network(), bucket_cap_mb=0.0005)  # several buckets
    for _ in range(2):
        model.zero_grad()
        nn.functional.mse_loss(model(x[4 * rank : 4 * rank + 4]), y[4 * rank : 4 * rank + 4]).backward()
    for p, expected in zip(model.parameters(), serial_gradients(x, y), strict=True):
        # fp32 sums over 4 * world rows in another order
        torch.testing.assert_close(p.grad, expected, rtol=1e-5, atol=1e-6)


def ddp_of_a_sparse_embedding_equals_serial():
    rank, world = start()
    words = torch.arange(6 * world).mul(7).remainder(11).view(world, 6)
    torch.manual_seed(0)
    serial = nn.Sequential(nn.Embedding(11, 4, sparse=True), nn.Linear(4, 2))
    model = DistributedDataParallel(copy.deepcopy(serial))
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.5) for module in (model, serial)]
    for _ in range(2):
        for module, batch, optimizer in ((model, words[rank], optimizers[0]), (serial, words, optimizers[1])):
            optimizer.zero_grad()
            module(batch).square().mean().backward()
            optimizer.step()
    assert model.module[0].weight.grad.is_sparse
    for p, expected in zip(model.module.parameters(), serial.parameters(), strict=True):
        torch.testing.assert_close(p, expected, rtol=1e-5, atol=1e-6)  # sums in another order


def fsdp2_equals_serial():
    from torch.distributed.fsdp import fully_shard

    rank, world = start()
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(4 * world, 8, generator=generator), torch.randn(4 * world, 4, generator=generator)
    model = network()
    mesh = dist.init_device_mesh("cpu", (world,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    nn.functional.mse_loss(model(x[4 * rank : 4 * rank + 4]), y[4 * rank : 4 * rank + 4]).backward()
    for p, expected in zip(model.parameters(), serial_gradients(x, y), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), expected, rtol=1e-5, atol=1e-6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer.step()


def zero_redundancy_and_join():
    rank, world = start()
    from torch.distributed.algorithms.join import Join

    model = DistributedDataParallel(network())
    with Join([model]):
        for _ in range(rank + 1):  # ranks with unequal numbers of batches
            model(torch.ones(2, 8)).sum().backward()
    state = copy.deepcopy(model.module.state_dict())
    objects = [None] * world
    dist.all_gather_object(objects, state["0.weight"].sum().item())
    assert len(set(objects)) == 1


CHECKS = [tensor_forms, list_forms, odd_dtypes_and_views, objects_and_groups, point_to_point, futures]
CHECKS += [
    sparse_sums,
    ddp_of_a_sparse_embedding_equals_serial,
    functional_collectives,
    ddp_equals_serial,
    fsdp2_equals_serial,
    zero_redundancy_and_join,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_four_ranks(check):
    run_ranks(check, 4)


@pytest.mark.parametrize(
    "check", [tensor_forms, list_forms, point_to_point, ddp_equals_serial], ids=lambda c: c.__name__
)
def test_on_two_ranks(check):
    run_ranks(check, 2)


def test_one_rank():
    run_ranks(tensor_forms_of_one, 1)


def tensor_forms_of_one():
    assert start() == (0, 1)
    t = torch.arange(3.0)
    dist.all_reduce(t, op=dist.ReduceOp.AVG)
    outs = [torch.empty(3)]
    dist.all_gather(outs, t)
    equal(outs[0], torch.arange(3.0))
    dist.barrier()
