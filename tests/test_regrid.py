"""Another grid between two steps: training goes on as on one device, and no byte moves twice.

Oracles: serial training; what each rank may keep, found by numbering all elements of a tensor and cutting the numbers
as both grids cut it; and the whole tensors before and after, bit for bit.
"""

from __future__ import annotations

import random
import statistics
import time
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from litgpt.config import Config
from litgpt.model import GPT
from torch import nn

import axo
from axo.checkpoint.state import state_parts
from axo.placement import Placement, placement_of
from tests import gpt
from tests.launcher import run_ranks
from tests.nn.support import mean_over_data_ranks, my_rows, seed_apart


def loss_of(comms: Any, model: Any, step: int) -> torch.Tensor:
    ids, targets = (my_rows(comms, part) for part in gpt.batch(model.config, step))
    return axo.nn.cross_entropy(model(ids), targets, comms=comms, columns=model.config.padded_vocab_size)


def layout(model: nn.Module, optimizer: Any) -> dict[tuple[str, str], tuple[torch.Tensor, Placement | None]]:
    """Each tensor that a rank holds a part of, and how it lies."""
    tensors: dict[tuple[str, str], Any] = {}
    for name, parameter in model.named_parameters():
        tensors[name, ""] = parameter.detach(), placement_of(parameter)
        for key, value in optimizer.state[parameter].items():
            if value.dim():
                tensors[name, key] = value, state_parts(optimizer, name, key, value, parameter).placement
    return tensors


def whole(tensors: dict[Any, Any]) -> dict[Any, torch.Tensor]:
    return {name: part.clone() if lies is None else axo.unshard(part, lies) for name, (part, lies) in tensors.items()}


def mine(tensors: dict[Any, Any]) -> dict[Any, set[int]]:
    """The elements of each tensor that this rank holds, by their numbers."""
    numbers = {}
    for name, (part, lies) in tensors.items():
        shape = part.shape if lies is None else lies.global_shape
        every = torch.arange(torch.Size(shape).numel()).view(shape)
        numbers[name] = set((every if lies is None else lies.take(every)).flatten().tolist())
    return numbers


def along(grids: list[str], config: dict[str, Any], steps: int, options: dict[str, Any]) -> list[float]:
    comms = axo.connect(grids[0])
    seed_apart(comms)
    model: Any = axo.parallelize(GPT(Config(**config)), comms, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    losses = []
    for step in range(steps * len(grids)):
        if step and step % steps == 0:
            grid = grids[step // steps]
            tensors = layout(model, optimizer)
            before, had = whole(tensors), mine(tensors)
            with axo.count_collectives() as counts:
                assert axo.regrid(model, optimizer, grid) is model
            assert str(comms.grid) == grid
            sent = torch.tensor([counts["all_to_all", "world"].bytes])
            now = layout(model, optimizer)
            assert now.keys() == before.keys()
            for name, tensor in whole(now).items():
                assert torch.equal(tensor, before[name]), f"{name} is another tensor on {grid}"
            wanted = sum(len(have - had[name]) * now[name][0].itemsize for name, have in mine(now).items())
            bound = comms.world.all_reduce(torch.tensor([wanted]))
            assert comms.world.all_reduce(sent) == bound, f"{int(sent)} bytes for {int(bound)}"
        loss = loss_of(comms, model, step)
        optimizer.zero_grad()
        loss.backward()
        axo.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(mean_over_data_ranks(comms, loss))
    return losses


@pytest.mark.parametrize(
    ("grids", "config", "options"),
    [
        (["2x2x1x1", "1x1x4x1", "1x1x2x2", "2x1x1x2"], gpt.LLAMA, {"zero": 2}),
        (["1x1x1x4", "4x1x1x1", "1x2x2x1"], gpt.NEOX, {"zero": 1, "gather_cache": "none"}),
    ],
)
def test_losses_are_those_of_one_device_and_bytes_the_least(grids, config, options):
    serial = gpt.serial_losses(config, 2 * len(grids), False)
    for losses in run_ranks(along, 4, grids, config, 2, options):
        assert losses == pytest.approx(serial, abs=1e-4)


def paused(grids: list[str], config: dict[str, Any]) -> tuple[float, float]:
    """Median seconds of a step, and of a change of grid."""
    comms = axo.connect(grids[0])
    model: Any = axo.parallelize(GPT(Config(**config)), comms)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps, pauses = [], []
    for grid in grids:
        comms.world.barrier()
        start = time.perf_counter()
        axo.regrid(model, optimizer, grid)
        comms.world.barrier()
        pauses.append(time.perf_counter() - start)
        for step in range(3):
            start = time.perf_counter()
            loss_of(comms, model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.append(time.perf_counter() - start)
    return statistics.median(steps), statistics.median(pauses[1:])


@pytest.mark.soak
def test_twenty_changes_of_grid():
    every = [str(grid) for grid in axo.Grid.all(4)]
    grids = ["1x1x1x4", *random.Random(3).choices([grid for grid in every if grid != "1x1x1x4"], k=20)]
    serial = gpt.serial_losses(gpt.LLAMA, len(grids), False)
    for losses in run_ranks(along, 4, grids, gpt.LLAMA, 1, {}):
        assert losses == pytest.approx(serial, abs=1e-4)
    large = gpt.LLAMA | {"n_layer": 8, "n_embd": 512, "intermediate_size": 1376}
    step, pause = run_ranks(paused, 4, grids, large, timeout=240)[0]
    print(f"a step takes {step:.3f} s, a change of grid {pause:.3f} s: {pause / step:.2f} steps")


def hugging_face() -> None:
    """Tied tables, split attention, replicated norms, a frozen layer, other dtypes and modes than at the beginning."""
    import transformers

    comms = axo.connect("2x2x1x1")
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=64, n_positions=16)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    torch.manual_seed(0)
    model: Any = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(64, (8, 12), generator=torch.Generator().manual_seed(1))
    axo.parallelize(model, comms, plan="auto").double()
    model.transformer.h[0].mlp.c_fc.weight.requires_grad_(False)
    model.transformer.h[1].eval()
    optimizer = torch.optim.AdamW(
        [{"params": list(model.transformer.parameters()), "weight_decay": 0.0, "lr": 1e-2}], lr=1e-3
    )
    results = []
    for grid in ("2x2x1x1", "1x2x2x1", "1x1x1x4"):
        axo.regrid(model, optimizer, grid)
        assert not model.transformer.h[1].training and model.transformer.h[0].training
        assert not model.transformer.h[0].mlp.c_fc.weight.requires_grad
        assert model.lm_head.weight is model.transformer.wte.weight
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
        assert optimizer.param_groups[0]["lr"] == 1e-2
        held = {id(parameter) for parameter in optimizer.param_groups[0]["params"]}
        assert held == {id(parameter) for parameter in model.parameters()}
        model.zero_grad()
        loss = F.cross_entropy(model(my_rows(comms, ids)).logits.flatten(0, 1), my_rows(comms, ids).flatten())
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a transposed weight has no .grad to look at
            loss.backward()
        results.append((mean_over_data_ranks(comms, loss), [axo.unshard_grad(p) for p in held_gradients(model)]))
    for loss_value, gradients in results[1:]:
        assert loss_value == pytest.approx(results[0][0], abs=1e-12)
        for own, first in zip(gradients, results[0][1], strict=True):
            torch.testing.assert_close(own, first, rtol=0, atol=1e-12)


def held_gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter for parameter in model.parameters() if parameter.grad is not None]


def test_any_model_keeps_dtypes_modes_and_ties():
    run_ranks(hugging_face, 4)


def refusals() -> None:
    comms = axo.connect("1x1x1x4")
    model: Any = axo.parallelize(GPT(Config(**gpt.LLAMA | {"n_head": 2, "n_query_groups": 1})), comms)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = loss_of(comms, model, 0)
    first.backward()
    optimizer.step()
    parameters = list(model.parameters())

    def refused(words: str, *args: Any) -> None:
        with pytest.raises(ValueError, match=words):
            axo.regrid(*args)
        assert str(comms.grid) == "1x1x1x4"
        assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
        loss_of(comms, model, 1).backward()  # all is as before
        optimizer.zero_grad()

    refused("n_head=2 does not divide", model, optimizer, "4x1x1x1")
    refused("has 2 ranks", model, optimizer, "2x1x1x1")
    refused("ask for another grid", model, optimizer, "1x1x4x1" if comms.rank == 2 else "1x1x2x2")
    refused("not what axo.parallelize returned", nn.Linear(2, 2), None, "1x1x4x1")
    refused("not the model's", model, torch.optim.SGD([nn.Parameter(torch.ones(2))]), "1x1x4x1")
    with axo.no_sync(model):
        loss_of(comms, model, 1).backward()
    with pytest.raises(ValueError, match=r"axo\.no_sync wait"):
        axo.regrid(model, optimizer, "1x1x4x1")


def mixed() -> None:
    """Two dtypes in a bucket; an optimizer that is not given; an update that is wrong on shards; buffers of a rank."""
    comms = axo.connect("1x1x1x4")
    torch.manual_seed(0)
    odd, wide = nn.Linear(3, 3, dtype=torch.bfloat16), nn.Linear(5, 7)
    model: Any = nn.ModuleDict({"odd": odd, "wide": wide})
    model.register_buffer("own", torch.tensor(float(comms.rank)))
    model.register_buffer("grown", torch.zeros(2))
    axo.parallelize(model, comms, plan="auto")
    model.own.fill_(comms.rank)
    model.grown = torch.arange(5.0)
    values = [axo.unshard(parameter, placement_of(parameter)) for parameter in model.parameters()]
    optimizer = torch.optim.Muon([model.odd.weight, model.wide.weight])
    other = torch.optim.SGD([model.odd.bias, model.wide.bias])
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    other.step()
    moved = [axo.unshard(parameter, placement_of(parameter)) for parameter in model.parameters()]
    axo.regrid(model, optimizer, "2x1x2x1")
    assert model.own == comms.rank and torch.equal(model.grown, torch.arange(5.0))
    for parameter, before in zip(model.parameters(), moved, strict=True):
        assert torch.equal(axo.unshard(parameter, placement_of(parameter)), before)
    assert not torch.equal(values[1], moved[1])
    with pytest.raises(RuntimeError, match=r"not given to axo\.regrid"):
        other.step()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(axo.Refused, match="Muon does not update element by element"):
        optimizer.step()
    with pytest.raises(ValueError):  # on every rank, though one alone is wrong
        axo.regrid(model, optimizer, "four along z" if comms.rank == 2 else "1x1x4x1")


def test_dtypes_other_optimizers_and_buffers():
    run_ranks(mixed, 4)


def test_what_cannot_move_is_refused_and_nothing_has_changed():
    run_ranks(refusals, 4)


class Scaled(nn.Module):
    """A root with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.body(rows) * self.scale


def scaled() -> None:
    comms = axo.connect("2x1x2x1")
    torch.manual_seed(0)
    serial = Scaled()
    rows = torch.randn(8, 4)
    serial(rows).square().mean().backward()
    torch.manual_seed(0)
    model: Any = axo.parallelize(Scaled(), comms, plan="auto")
    for grid in ("1x1x4x1", "1x2x1x2", "2x2x1x1"):
        axo.regrid(model, None, grid)
        model(my_rows(comms, rows)).square().mean().backward()
        for parameter, whole in zip(model.parameters(), serial.parameters(), strict=True):
            torch.testing.assert_close(axo.unshard_grad(parameter), whole.grad, rtol=1e-5, atol=1e-6)


def test_a_root_with_parameters_of_its_own():
    run_ranks(scaled, 4)
