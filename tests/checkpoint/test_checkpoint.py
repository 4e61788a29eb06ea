"""Checkpoints: any grid loads any other and plain torch, to the bit; bad input is one error. See also its failures."""

from __future__ import annotations

import math
import os
import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from litgpt.config import Config
from litgpt.model import GPT
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

import axo
from axo.checkpoint import consolidate, latest, load, save
from axo.checkpoint.folder import complete, name_of
from tests import gpt
from tests.launcher import run_ranks
from tests.nn.support import mean_over_data_ranks, my_rows

# A bias, so that a fused vector is there too; 101 logits over x.
MODEL = gpt.LLAMA | {"n_layer": 1, "n_query_groups": 8, "bias": True}


def build(comms: Any, config: dict[str, Any] = MODEL) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model: nn.Module = GPT(Config(**config))
    if comms is not None:
        axo.parallelize(model, comms)
    parameters = list(model.parameters())
    groups = [{"params": parameters[:3], "weight_decay": 0.0}, {"params": parameters[3:]}]
    return model, torch.optim.AdamW(groups, lr=1e-3)


def train(comms: Any, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    config = Config(**MODEL)
    loss_fn = (
        nn.CrossEntropyLoss()
        if comms is None
        else axo.nn.CrossEntropyLoss(comms=comms, columns=config.padded_vocab_size)
    )
    losses = []
    for step in steps:
        ids, targets = gpt.batch(config, step)
        if comms is not None:
            ids, targets = my_rows(comms, ids), my_rows(comms, targets)
        loss = loss_fn(model(ids).flatten(0, 1), targets.flatten()) if comms is None else loss_fn(model(ids), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item() if comms is None else mean_over_data_ranks(comms, loss))
    return losses


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Parameters and Adam moments, gathered by ``axo.unshard``: another way than the checkpoint's."""
    found = {}
    for name, parameter in model.named_parameters():
        where = getattr(parameter, "placement", None)
        for key, value in {"": parameter.detach(), **optimizer.state[parameter]}.items():
            split = where is not None and value.shape == parameter.shape
            found[f"{name} {key}"] = axo.unshard(value, where) if split else value.clone()
    return found


def save_on(grid: str, folder: str, steps: int, more: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    comms = axo.connect(grid)
    model, optimizer = build(comms)
    train(comms, model, optimizer, range(steps))
    save(folder, model, optimizer, step=steps, extra={"position": 5}, async_=True)
    state = whole_state(model, optimizer)
    losses = train(comms, model, optimizer, range(steps, steps + more))  # while it is being written
    comms.close()
    return (state, losses) if comms.rank == 0 else ({}, losses)


def load_on(grid: str, folder: str, steps: int, more: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    comms = axo.connect(grid) if grid != "torch" else None
    model, optimizer = build(comms)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    loaded = load(folder, model, optimizer)
    assert (loaded.step, loaded.extra, loaded.grid) == (steps, {"position": 5}, "2x2x2x1")
    state = whole_state(model, optimizer)
    losses = train(comms, model, optimizer, range(steps, steps + more))
    if comms is not None:
        comms.close()
    return (state, losses) if comms is None or comms.rank == 0 else ({}, losses)


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different, different


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, torch.Tensor], list[float]]:
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    results = run_ranks(save_on, 8, "2x2x2x1", folder, 2, 3)
    return folder, results[0][0], results[0][1]


def compare_grid(saved: tuple, grid: str, steps: int) -> float:
    """Parameters and moments to the bit; losses to 1e-5, on the same grid to the bit. Returns how far they are."""
    folder, state, losses = saved
    ranks = 1 if grid == "torch" else axo.Grid.parse(grid).world_size
    results = run_ranks(load_on, ranks, grid, folder, steps, len(losses))
    equal(results[0][0], state)
    assert results[0][1] == pytest.approx(losses, abs=1e-5)
    if grid == "2x2x2x1":
        assert results[0][1] == losses
    return max(abs(a - b) for a, b in zip(results[0][1], losses, strict=True))


GRIDS = ["1x1x1x1", "4x1x2x1", "1x8x1x1", "2x2x2x1", "torch"]


@pytest.mark.parametrize("grid", [grid for grid in GRIDS if grid != "4x1x2x1"])  # the soak has it, and more
def test_any_grid_loads_what_another_saved(saved: tuple, grid: str) -> None:
    compare_grid(saved, grid, 2)


@pytest.mark.soak
def test_ten_steps_after_resuming_are_those_of_the_run_that_went_on(tmp_path: Path) -> None:
    results = run_ranks(save_on, 8, "2x2x2x1", str(tmp_path), 10, 10, timeout=120)
    for grid in [*GRIDS, "2x1x2x2", "8x1x1x1", "1x1x4x2"]:
        far = compare_grid((str(tmp_path), *results[0]), grid, 10)
        print(f"saved on 2x2x2x1 after 10 steps, resumed on {grid} for 10: losses differ by at most {far:.1e}")


def test_consolidate_is_the_serial_state(saved: tuple, tmp_path: Path) -> None:
    """Oracle: a plain GPT and AdamW that take the file with torch's own loaders, and the way back."""
    folder, state, _ = saved
    whole = torch.load(consolidate(folder, tmp_path / "all.pth", optimizer=True), weights_only=True)
    model, optimizer = build(None)
    model.load_state_dict(whole["model"])
    optimizer.load_state_dict(whole["optimizer"])
    equal(whole_state(model, optimizer), state)
    assert whole["step"] == 2 and list(tmp_path.iterdir()) == [tmp_path / "all.pth"]

    from safetensors.torch import load_file

    plain = load_file(consolidate(folder, tmp_path / "model.safetensors"))
    equal(plain, model.state_dict())
    back = consolidate(tmp_path / "model.safetensors", tmp_path / "back", step=12)
    assert back == latest(tmp_path / "back") and back.name == "step-00000012"
    again, _ = build(None)
    again.lm_head.weight.data.zero_()
    load(back, again, rng=False)
    equal(again.state_dict(), plain)


def load_file_on_grid(file: str) -> dict[str, torch.Tensor]:
    comms = axo.connect("2x2x1x1")
    model, _ = build(comms)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load(file, model)
    return {name: axo.unshard(parameter.detach(), parameter.placement) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", ["m.pth", "m.safetensors"])
def test_a_plain_file_loads_into_a_parallel_model(tmp_path: Path, name: str) -> None:
    from safetensors.torch import save_file

    model, _ = build(None)
    (torch.save if name.endswith("pth") else save_file)(model.state_dict(), tmp_path / name)
    equal(run_ranks(load_file_on_grid, 4, str(tmp_path / name))[0], model.state_dict())


class Noisy(nn.Module):
    """Uses every generator: dropout, torch, NumPy and Python; its head shares the embedding's weight."""

    def __init__(self, comms: Any) -> None:
        super().__init__()
        self.up = axo.nn.Linear(8, 12, comms=comms)
        self.down = axo.nn.Linear(12, 8, comms=comms, transposed=True)
        self.tied = self.down
        self.drop = axo.nn.Dropout(0.5, comms=comms)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        noise = np.random.rand() + random.random() + torch.rand(()).item()  # noqa: NPY002
        return self.tied(torch.relu(self.up(self.drop(x)))) * noise


def noisy_steps(model: nn.Module, optimizer: torch.optim.Optimizer, comms: Any, count: int) -> list[float]:
    losses = []
    for step in range(count):
        x = torch.arange(32.0).view(4, 8).sin() + step
        loss = model(axo.shard_input(model.up, x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def resume_noisy(folder: str, grid: str, make: str, options: dict[str, Any]) -> None:
    comms = axo.connect(grid)
    model = Noisy(comms)
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(comms.coords.data)  # peers on x compute the same, as they must
    optimizer = getattr(torch.optim, make)(model.parameters(), lr=0.01, **options)
    noisy_steps(model, optimizer, comms, 2)
    save(folder, model, optimizer, step=2)
    expected = noisy_steps(model, optimizer, comms, 3)
    other = Noisy(comms)
    optimizer = getattr(torch.optim, make)(other.parameters(), lr=0.5, **options)
    load(folder, other, optimizer)
    assert torch.equal(other.seen, torch.full((3,), 2.0))
    assert noisy_steps(other, optimizer, comms, 3) == expected
    load(folder, other, optimizer)  # into what has been used
    assert noisy_steps(other, optimizer, comms, 3) == expected
    comms.close()


def test_generators_and_dropout_resume_to_the_bit(tmp_path: Path) -> None:
    run_ranks(resume_noisy, 4, str(tmp_path), "2x1x1x2", "Adam", {"amsgrad": True})
    whole = torch.load(consolidate(tmp_path, tmp_path / "m.pth"), weights_only=True)
    assert torch.equal(whole["tied.weight"], whole["down.weight"])


@pytest.mark.parametrize(
    ("make", "options"),
    [("SGD", {"momentum": 0.9}), ("NAdam", {}), ("Rprop", {}), ("ASGD", {}), ("Adafactor", {}), ("SGD", {})],
)
def test_any_optimizer_resumes_to_the_bit(tmp_path: Path, make: str, options: dict[str, Any]) -> None:
    resume_noisy(str(tmp_path), "1x1x1x1", make, options)


class ByRows(torch.optim.Optimizer):
    """A user's own, which keeps a number a row of each weight. (Steps of torch's Adafactor are refused.)"""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["row_var"] = parameter.grad.square().mean(-1, keepdim=True)


class InGroups(torch.optim.Optimizer):
    """A user's own, which keeps its momenta in the options of its group."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters, {})
        self.param_groups[0]["momenta"] = [torch.zeros_like(parameter) for parameter in self.param_groups[0]["params"]]

    def step(self, closure: Any = None) -> None:
        for parameter, momentum in zip(*(self.param_groups[0][key] for key in ("params", "momenta")), strict=True):
            parameter.data.sub_(momentum.mul_(0.9).add_(parameter.grad))


class Counting(torch.optim.Optimizer):
    """A user's own, which counts its steps beside its parameters; its rate falls with them."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters, {})
        self.state["steps"] = 0  # type: ignore[index,assignment]

    def step(self, closure: Any = None) -> None:
        self.state["steps"] += 1  # type: ignore[index,operator,assignment]
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(parameter.grad, alpha=0.1 / self.state["steps"])  # type: ignore[index,operator]


class OfACopy(Counting):
    """Keeps state of a tensor that is no parameter."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters)
        self.state[torch.zeros(3)] = {"step": 1}


def resume_counting(folder: str) -> None:
    comms = axo.connect("2x1x1x1")
    model, other = Noisy(comms), Noisy(comms)
    optimizer, again = Counting(model.parameters()), Counting(other.parameters())
    noisy_steps(model, optimizer, comms, 3)
    save(folder, model, optimizer)
    load(folder, other, again)
    assert again.state["steps"] == 3  # type: ignore[index,comparison-overlap]
    plain = torch.load(consolidate(folder, Path(folder) / "whole.pth", optimizer=True), weights_only=True)
    assert plain["optimizer"]["state"]["steps"] == 3


def test_what_an_optimizer_keeps_beside_its_parameters_is_saved(tmp_path: Path) -> None:
    run_ranks(resume_counting, 2, str(tmp_path))


def save_rows(folder: str, make: Any) -> str:
    comms = axo.connect("2x1x1x1")
    model = Noisy(comms)
    optimizer = make(model.parameters())
    noisy_steps(model, optimizer, comms, 1)
    with pytest.raises(ValueError) as error:
        save(folder, model, optimizer)
    return str(error.value)


def test_state_of_another_shape_than_its_split_parameter_is_refused(tmp_path: Path) -> None:
    for make, said in (
        (ByRows, "keeps 'row_var' of 'up.weight' in shape (6, 1)"),
        (InGroups, "option 'momenta' of"),
        (OfACopy, "state of a tensor of shape (3,) that is in none of its groups"),
    ):
        messages = run_ranks(save_rows, 2, str(tmp_path), make)
        assert messages[0] == messages[1] and said in messages[0]


def test_the_newest_complete_one_is_found_and_old_ones_go(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    for step in (1, 2, 10, 3):
        save(tmp_path, model, step=step, keep=3)
    assert [path.name for path in complete(tmp_path)] == [name_of(step) for step in (2, 3, 10)]
    (tmp_path / ".step-00000099.part").mkdir()
    (tmp_path / "step-00000098").mkdir()  # no metadata in it
    assert latest(tmp_path) == tmp_path / name_of(10)
    with torch.no_grad():
        model.weight.fill_(5)
    save(tmp_path, model, step=10)  # replaces
    other = nn.Linear(2, 3)
    assert load(tmp_path, other).step == 10 and other.weight.eq(5).all()
    assert latest(tmp_path / "nowhere") is None


# Lacks a norm, and is narrower.
OTHER = MODEL | {"parallel_residual": True, "shared_attention_norm": True, "n_embd": 32}


def refuse(folder: str) -> list[str]:
    """What each rank is told."""
    comms = axo.connect("2x1x1x1")
    model, _ = build(comms)
    attempts = {
        "another": lambda: load(folder, build(comms, OTHER)[0]),
        "nowhere": lambda: load(f"{folder}/nowhere", model),
        "empty": lambda: load(f"{folder}/empty", model),
        "killed": lambda: load(f"{folder}/killed", model),
        "file": lambda: load(__file__, model),
        "lost": lambda: load(f"{folder}/lost", model),
        "short": lambda: load(f"{folder}/short", model),
        "extra": lambda: save(folder, model, extra={"lambda": Noisy}),
        "one rank": lambda: save(folder if comms.rank == 0 else __file__, model),
        "foreign": lambda: save(folder, model, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)),
    }
    messages = []
    for attempt in attempts.values():
        before = [parameter.clone() for parameter in model.parameters()]
        try:
            attempt()
        except ValueError as error:
            messages.append(str(error))
        assert all(map(torch.equal, before, model.parameters()))
    return messages


def test_bad_input_is_one_error_on_every_rank(saved: tuple, tmp_path: Path) -> None:
    folder = tmp_path
    shutil.copytree(saved[0], folder, dirs_exist_ok=True)
    for name in ("empty", "killed/.step-00000001.part"):
        (folder / name).mkdir(parents=True)
    for name in ("lost", "short"):
        shutil.copytree(saved[0], folder / name)
    (folder / "lost" / name_of(2) / "__3_0.distcp").unlink()
    os.truncate(folder / "short" / name_of(2) / "__5_0.distcp", 100)
    first, second = run_ranks(refuse, 2, str(folder))
    assert first == second
    for message, expected in zip(
        first,
        [
            "it has 1 that the model lacks (transformer.h.0.norm_2.weight [64])",
            "does not exist",
            "holds no checkpoint",
            "holds no complete checkpoint (a save in it was interrupted)",
            "cannot be read (torch.save did not write it)",
            "is incomplete: __3_0.distcp, the file of rank 3, is missing",
            "is damaged: __5_0.distcp has 100 bytes",
            "extra holds what cannot be read back",
            "rank 1: checkpoint: ",
            "holds parameters that are not the model's",
        ],
        strict=True,
    ):
        assert expected in message
    assert "transformer.wte.weight is [101, 64] there and [101, 32] here" in first[0]


def save_shared(folder: str) -> dict[str, torch.Tensor]:
    comms = axo.connect("2x1x2x1")
    model: Any = GPT(Config(**MODEL | {"n_query_groups": 1}))
    model.lm_head.weight = model.transformer.wte.weight
    axo.parallelize(model, comms)
    save(folder, model)
    return {name: axo.unshard(parameter.detach(), parameter.placement) for name, parameter in model.named_parameters()}


def test_shared_heads_and_tied_weights_are_written_once(tmp_path: Path) -> None:
    """One key-value head on two ranks of x; the head's weight is the embedding's."""
    state = run_ranks(save_shared, 4, str(tmp_path))[0]
    whole = torch.load(consolidate(tmp_path, tmp_path / "m.pth"), weights_only=True)
    assert whole["lm_head.weight"] is whole["transformer.wte.weight"] or torch.equal(
        whole["lm_head.weight"], whole["transformer.wte.weight"]
    )
    equal({name: whole[name] for name in state}, state)
    saved = FileSystemReader(tmp_path / name_of(0)).read_metadata().state_dict_metadata
    boxes = [chunk.sizes for entry in saved.values() for chunk in getattr(entry, "chunks", ())]
    assert sum(map(math.prod, boxes)) == sum(tensor.numel() for tensor in state.values())
