"""What torch builds on a process group, over the backend ``axo``: pipelining, DTensor, DCP, split groups, hooks of DDP.

Oracles: the same model trained in one process; the full tensor that was sharded; Gloo. DDP and FSDP2 are in
test_c10d.py.
"""

import copy
import datetime

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, quantization_hooks
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.launcher import run_ranks


def equal(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def pipeline_equals_serial():
    """1F1B over all ranks, a layer a rank: losses, gradients and weights of two steps."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(world)]
    serial = nn.Sequential(*copy.deepcopy(layers))
    stage = PipelineStage(layers[rank], rank, world, torch.device("cpu"))
    micro = 2 * world
    schedule = Schedule1F1B(stage, micro, loss_fn=nn.functional.mse_loss)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (layers[rank], serial)]
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(2 * micro, 8, generator=generator), torch.randn(2 * micro, 8, generator=generator)
        losses: list = []
        for optimizer in optimizers:
            optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        elif rank == world - 1:
            schedule.step(target=y, losses=losses)
        else:
            schedule.step()
        loss = nn.functional.mse_loss(serial(x), y)
        loss.backward()
        if losses:
            torch.testing.assert_close(torch.stack(losses).mean(), loss, rtol=1e-6, atol=0)  # another order of sums
        for got, expected in zip(layers[rank].parameters(), serial[rank].parameters(), strict=True):
            # fp32 sums over micro-batches of two rows instead of all rows at once
            torch.testing.assert_close(got.grad, expected.grad, rtol=1e-4, atol=1e-7)
        for optimizer in optimizers:
            optimizer.step()


def redistribute():
    """Every placement of a 2-d mesh into every other; sizes that do not divide."""
    world = dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (2, world // 2))
    full = torch.arange(7.0 * 5).view(7, 5)
    kinds = [(a, b) for a in (Shard(0), Shard(1), Replicate()) for b in (Shard(0), Shard(1), Replicate())]
    for before in kinds:
        sharded = distribute_tensor(full, mesh, before)
        for after in kinds:
            moved = sharded.redistribute(mesh, after)
            equal(moved.to_local(), distribute_tensor(full, mesh, after).to_local())
            equal(moved.full_tensor(), full)
    partial = DTensor.from_local(full, mesh, [Partial(), Replicate()])
    equal(partial.redistribute(mesh, [Shard(0), Shard(1)]).full_tensor(), 2 * full)


def save_and_load(folder):
    """DCP: what one mesh saved, another loads, values exact."""
    world = dist.get_world_size()
    full = {"weight": torch.arange(11.0 * 6).view(11, 6), "bias": torch.arange(13.0).bfloat16()}
    lines = dist.init_device_mesh("cpu", (world,))
    dcp.save({name: distribute_tensor(t, lines, [Shard(0)]) for name, t in full.items()}, checkpoint_id=folder)
    square = dist.init_device_mesh("cpu", (2, world // 2))
    state = {
        "weight": distribute_tensor(torch.zeros(11, 6), square, [Shard(1), Shard(0)]),
        "bias": distribute_tensor(torch.zeros(13, dtype=torch.bfloat16), square, [Replicate(), Shard(0)]),
    }
    dcp.load(state, checkpoint_id=folder)
    for name, expected in full.items():
        equal(state[name].full_tensor(), expected)


def split_of_a_group():
    """The group's own split_group, and torch.distributed's: before 2.14 it wants an accelerator, and says so."""
    rank, world = dist.get_rank(), dist.get_world_size()
    members = [r for r in range(world) if r % 2 == rank % 2]
    part = dist.group.WORLD.split_group(
        members, timeout=datetime.timedelta(seconds=30), group_name=f"parity{rank % 2}", group_desc="parity"
    )
    assert part.size() == len(members) and part.rank() == members.index(rank)
    t = torch.tensor([float(rank)])
    part.allreduce(t).wait()
    assert t.item() == sum(members)
    if torch.accelerator.is_available() or not torch.__version__.startswith(("2.11.", "2.12.", "2.13.")):
        part = dist.split_group(split_ranks=[[0, 1], [2, 3]])
        dist.all_reduce(t.fill_(rank), group=part)
        assert t.item() == (1 if rank < 2 else 5) and dist.get_rank(part) == rank % 2
        part = dist.split_group(split_ranks=[[0, 1]])
        assert (part == dist.GroupMember.NON_GROUP_MEMBER) == (rank > 1)
    else:
        with pytest.raises(RuntimeError, match=r"split"):
            dist.split_group(split_ranks=[members])
    none = dist.group.WORLD.split_group([0, 1], group_name="pair")
    assert (none is None) == (rank > 1)


def everything(folder):
    dist.init_process_group("axo")
    pipeline_equals_serial()
    redistribute()
    save_and_load(folder)
    split_of_a_group()


def test_what_torch_builds_on_a_group(tmp_path):
    run_ranks(everything, 4, str(tmp_path / "checkpoint"))


def hooks_of_ddp(backend):
    """The weights that each hook of torch's trains, but PowerSGD (test_c10d_results.py), which Gloo mixes up."""
    dist.init_process_group(backend)
    rank, weights = dist.get_rank(), []
    alone, _ = dist.new_subgroups(group_size=1)
    for state, hook in (
        (None, default_hooks.allreduce_hook),
        (None, default_hooks.fp16_compress_hook),
        (None, default_hooks.bf16_compress_hook),
        (post_localSGD_hook.PostLocalSGDState(None, alone, 3), post_localSGD_hook.post_localSGD_hook),
    ):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8))
        model = nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=0.001)
        model.register_comm_hook(state, hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(6):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * step + rank))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        weights.append([p.detach().clone() for p in model.parameters()])
    return weights


def hooks_that_quantize():
    """Each bucket's mean of what the ranks' eight bits stand for. Over Gloo these hooks hang."""
    dist.init_process_group("axo")
    rank, world = dist.get_rank(), dist.get_world_size()

    def rounded(buffer, channels):
        rows = nn.functional.pad(buffer, (0, 512 - len(buffer) % 512)).view(-1, 512) if channels else buffer[None]
        low, high = rows.amin(1).clamp(max=0), rows.amax(1).clamp(min=0)
        scale = ((high - low) / 255).clamp(min=torch.finfo(torch.float32).eps)[:, None]
        zero = (-(low[:, None] / scale).round()).clamp(0, 255).int()
        return (((rows / scale).round() + zero).clamp(0, 255) - zero).mul(scale).flatten()[: len(buffer)]

    for hook in (quantization_hooks.quantization_pertensor_hook, quantization_hooks.quantization_perchannel_hook):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 40), nn.GELU(), nn.Linear(40, 8))
        model = nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=0.004)
        given, means = [], []

        def noted(group, bucket, hook=hook, given=given, means=means):
            given.append(bucket.buffer().clone())
            return hook(group, bucket).then(lambda future: means.append(future.value()) or means[-1])

        model.register_comm_hook(dist.group.WORLD, noted)
        for step in range(3):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * step + rank))
            model(x).square().mean().backward()
        assert len(given) == len(means) > 4
        for mine, mean in zip(given, means, strict=True):
            parts = [torch.zeros_like(mine) for _ in range(world)]
            dist.all_gather(parts, mine)
            expected = sum(rounded(part, "channel" in hook.__name__) for part in parts) / world
            torch.testing.assert_close(mean, expected, rtol=1e-5, atol=1e-6)


def test_hooks_of_ddp_that_quantize():
    run_ranks(hooks_that_quantize, 2)


def test_hooks_of_ddp_train_as_over_gloo():
    """Sums of two numbers have one order: equal to the bit."""
    for got, expected in zip(run_ranks(hooks_of_ddp, 2, "axo"), run_ranks(hooks_of_ddp, 2, "gloo"), strict=True):
        equal(got, expected)
