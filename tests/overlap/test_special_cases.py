"""Grids that are known schemes, beside PyTorch's own: z = FSDP2, data = DDP, x = tensor parallelism, z and data = HSDP.

Oracle: torch's implementation of the scheme, over the same runtime (backend axo), with the same initial weights and
rows: losses of 8 SGD steps and the weights after them to 1e-5. And the bytes: what Axo's layers issue for the weights
equals what the rival hands to c10d, counted where torch dispatches its collectives.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import axo
from tests.launcher import run_ranks
from tests.nn.support import my_rows

WIDTH, INNER, BLOCKS, ROWS, STEPS = 16, 32, 2, 16, 8
WEIGHTS = 2 * BLOCKS * WIDTH * INNER * 4  # bytes of all weights


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, INNER, bias=False)
        self.proj = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.proj(F.gelu(self.fc(x)))


def serial() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def rows(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return x, x.roll(1, 1)


KINDS = {"allgather": "all_gather", "reducescatter": "reduce_scatter", "allreduce": "all_reduce"}


class CountC10d(TorchDispatchMode):
    """Bytes that this rank puts into each collective of torch.distributed, as ``axo.count_collectives`` counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.split("::")[1].strip("_")
            for kind, ours in KINDS.items():
                if name.replace("_", "").startswith(kind):
                    # (output, input, ...) of gathers and scatters, (tensors, ...) of all-reduces
                    base = name.endswith("base") and func.namespace == "c10d"
                    self.bytes[ours] += sum(t.nbytes for t in _tensors(args[1] if base else args[0]))
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


def train(model: nn.Module, mine: Any, comms: Any, count: Any) -> tuple[list[float], Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses, found = [], None
    for step in range(STEPS):
        x, y = (mine(part) for part in rows(step))
        with count() as counted:
            loss = F.mse_loss(model(x.requires_grad_()), y)  # so that the first layer, too, has a gradient to pass on
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found = counted if step == STEPS - 1 else None
        total = loss.detach().reshape(1)
        for axis in ("z", "data"):
            total = comms.axis(axis).all_reduce(total, "avg") if comms.grid.size(axis) > 1 else total
        losses.append(total.item())
    return losses, found


def ours(comms: Any, cache: str) -> tuple[list[float], Any, list[torch.Tensor]]:
    """The same model of Axo's layers: fc normal, proj transposed."""
    model = serial()
    for block in model:
        for name in ("fc", "proj"):
            old = getattr(block, name)
            options: dict[str, Any] = {"transposed": name == "proj", "gather_cache": cache}
            new = axo.nn.Linear(old.in_features, old.out_features, bias=False, comms=comms, **options)
            new.load_serial(old)
            setattr(block, name, new)
    losses, counts = train(model, lambda part: my_rows(comms, part), comms, axo.count_collectives)
    weights = [layer.full_weight() for block in model for layer in (block.fc, block.proj)]
    return losses, counts, weights


def fully_shard_model(comms: Any, cache: str) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = serial()
    grid = comms.grid
    mesh = comms.device_mesh["data", "z"] if grid.data > 1 else comms.device_mesh["z"]
    for block in model:
        for layer in (block.fc, block.proj):
            fully_shard(layer, mesh=mesh, reshard_after_forward=cache == "none")
    return model


def tensor_parallel_model(comms: Any, cache: str) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = serial()
    for block in model:
        parallelize_module(block, comms.device_mesh["x"], {"fc": ColwiseParallel(), "proj": RowwiseParallel()})
    return model


def ddp_model(comms: Any, cache: str) -> nn.Module:
    return nn.parallel.DistributedDataParallel(serial())


def beside(grid: str, rival: str, cache: str) -> dict[str, Any]:
    comms = axo.connect(grid)
    losses, counts, weights = ours(comms, cache)
    model = globals()[rival](comms, cache)
    rival_losses, counter = train(model, lambda part: my_rows(comms, part), comms, CountC10d)
    rival_weights = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]
    for weight, other in zip(weights, rival_weights, strict=True):
        torch.testing.assert_close(weight, other, atol=1e-5, rtol=0)
    comms.close()
    mine = {kind: counts.total(kind).bytes for kind in ("all_gather", "reduce_scatter", "all_reduce")}
    return {"losses": losses, "rival": rival_losses, "bytes": mine, "rival bytes": dict(counter.bytes)}


CASES = {
    "z=4 and FSDP2, weights kept": ("1x1x4x1", "fully_shard_model", "all", (WEIGHTS // 4, WEIGHTS, 0)),
    "z=4 and FSDP2, gathered twice": ("1x1x4x1", "fully_shard_model", "none", (WEIGHTS // 2, WEIGHTS, 0)),
    "z=2 data=2 and HSDP": ("1x1x2x2", "fully_shard_model", "none", (WEIGHTS, WEIGHTS, WEIGHTS // 2)),
    "data=4 and DDP": ("1x1x1x4", "ddp_model", "all", (0, 0, WEIGHTS)),
    # One all-reduce of all rows a block in forward, and one in backward.
    "x=4 and DTensor": ("4x1x1x1", "tensor_parallel_model", "all", (0, 0, 2 * BLOCKS * ROWS * WIDTH * 4)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_grid_is_the_scheme_that_torch_has(case: str) -> None:
    grid, rival, cache, expected = CASES[case]
    for result in run_ranks(beside, 4, grid, rival, cache):
        assert result["losses"] == pytest.approx(result["rival"], abs=1e-5)
        assert result["losses"][-1] < 0.9 * result["losses"][0]
        bytes_ = dict(zip(("all_gather", "reduce_scatter", "all_reduce"), expected, strict=True))
        assert result["bytes"] == bytes_, "Axo"
        assert {kind: result["rival bytes"].get(kind, 0) for kind in bytes_} == bytes_, "the rival"
