"""Training on GPUs, on the stand-in GPU: ``axo train --device`` and a parallelized model over a device's communicators.

Oracle: the same run on CPU ranks, step by step, and serial training by plain torch. A tensor operation on the stand-in
computes on the CPU, so equal runs give equal losses but for the order of sums. See tests/standin.py.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import axo
from axo.train import TrainConfig, runner
from axo.train.check import check, open_batches
from axo.train.serial import train_serial
from tests import standin
from tests.launcher import Command, run_ranks
from tests.train.test_train import SMALL, TEXT


@pytest.fixture()
def text(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text(TEXT)
    return str(tmp_path / "text.txt")


def options(text: str, device: str, **more: Any) -> TrainConfig:
    usual: dict[str, Any] = {
        "model_overrides": SMALL, "data": (text,), "steps": 3, "batch_size": 4, "seq_len": 16, "lr": 2e-3, "warmup": 2,
        "precision": "32-true", "seed": 5, "device": device, "out": str(Path(text).parent / f"out-{device}"),
    }  # fmt: skip
    return TrainConfig(**(usual | more))


def with_fsdp_and_dtensor(folder: Path) -> None:
    """FSDP2 and DTensor over the backend, and axo.parallelize(plan="auto"), all on the device."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    gpu = standin.install(folder)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    comms = axo.connect("1x1x2x1", device="standin")
    device = comms.device
    mesh = dist.init_device_mesh("standin", (world,))
    whole = torch.arange(24.0).view(6, 4)
    part = distribute_tensor(whole.to(device), mesh, [Shard(0)])
    assert isinstance(part, DTensor) and torch.equal(part.to_local().cpu(), whole.chunk(world)[rank])
    assert torch.equal(part.redistribute(mesh, [Shard(1)]).to_local().cpu(), whole.chunk(world, dim=1)[rank])
    assert torch.equal(part.redistribute(mesh, [Replicate()]).to_local().cpu(), whole)

    def network() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4))

    x = torch.randn(4 * world, 8, generator=torch.Generator().manual_seed(0))
    serial = network()
    serial(x).square().mean().backward()
    sharded = network().to(device)
    for module in (sharded[0], sharded[2], sharded):
        fully_shard(module, mesh=mesh)
    sharded(x.chunk(world)[rank].to(device)).square().mean().backward()
    parallel = axo.parallelize(network(), comms, plan="auto")
    parallel(x.chunk(world)[rank].to(device)).square().mean().backward()
    for name, expected in serial.named_parameters():
        # fp32 sums over the rows in another order
        got = sharded.get_parameter(name).grad.full_tensor().cpu()
        torch.testing.assert_close(got, expected.grad, rtol=1e-5, atol=1e-6)
        own = parallel.get_parameter(name)
        assert own.device == device
        if name.endswith("weight"):
            whole_gradient = axo.unshard(own.grad, parallel.get_submodule(name.split(".")[0])).cpu()
            torch.testing.assert_close(whole_gradient, expected.grad, rtol=1e-5, atol=1e-6)
    assert not gpu.violations()


def train_on_standin(folder: Path, text: str, grid: str, offloads: list[str]) -> list[list[float]]:
    gpu = standin.install(folder)
    losses = []
    for offload in offloads:
        out = f"{text}-{offload}"
        given = options(text, "standin", grid=axo.Grid.parse(grid), save_every=3, offload=offload, out=out)
        outcome = runner.train_rank(given)
        calls = [call.split()[0] for call in gpu.calls()]
        assert "ncclAllReduce" in calls or int(os.environ["WORLD_SIZE"]) == 1
        assert not gpu.violations()
        losses.append(outcome.losses if outcome is not None else [])
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(("grid", "offloads"), [("2x2x1x1", ["none"]), ("1x1x2x2", ["none", "optimizer,parameters"])])
def test_training_on_a_device_equals_serial_training(grid: str, offloads: list[str], text: str, tmp_path: Path) -> None:
    standin.build()
    config = options(text, "cpu")
    serial = list(train_serial(config, open_batches(config)))
    for losses in run_ranks(train_on_standin, 4, tmp_path, text, grid, offloads, timeout=150)[0]:
        # fp32: sums in another order, and three steps of AdamW
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(serial), rtol=2e-5, atol=0)


@pytest.mark.slow
def test_models_on_a_device_get_serial_gradients(tmp_path: Path) -> None:
    standin.build()
    run_ranks(with_fsdp_and_dtensor, 2, tmp_path, timeout=120)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_without_a_gpu_the_command_says_so_in_one_line(tmp_path: Path) -> None:
    command = Command("axo.cli", "train", "--device", "cuda", "--grid", "2x1x1x1", "--out", str(tmp_path))
    output = command.communicate()
    assert command.returncode != 0 and "Traceback" not in output
    lines = [line for line in output.splitlines() if line.strip()]
    assert len(" ".join(lines)) < 300 and "device='cuda', and torch" in " ".join(lines), output


def test_one_device_does_not_serve_two_ranks(text: str) -> None:
    with pytest.raises(ValueError, match=r"device='cpu:0' is one device, and grid 2x1x1x1 has 2 ranks"):
        check(options(text, "cpu:0", grid=axo.Grid(2, 1, 1, 1)))
    with pytest.raises(ValueError, match=r"device='gpu' is not known; use cpu, or cuda"):
        check(options(text, "gpu"))
