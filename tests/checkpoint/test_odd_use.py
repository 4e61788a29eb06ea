"""Saves and loads at odd moments, of odd things, into odd places: what was meant comes of it, or one line."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import axo
from axo.checkpoint import consolidate, load, save
from axo.checkpoint.state import reason
from tests.checkpoint.test_checkpoint_safety import filled, names_in, tell, value_of
from tests.launcher import run_ranks


def test_an_asynchronous_save_takes_a_loss_that_still_knows_its_graph(tmp_path: Path) -> None:
    """It was told that there is no memory for a copy."""
    model = filled(1.0)
    loss = model(torch.ones(1, 2)).sum()
    save(tmp_path, model, extra={"losses": [(loss, 1.0)], "best": loss}, async_=True).wait()
    extra = load(tmp_path, model).extra
    assert extra["losses"][0][0].item() == extra["best"].item() == loss.item()


def test_a_backward_of_weights_that_a_load_has_replaced_is_refused(tmp_path: Path) -> None:
    """As after load_state_dict: the gradient would be that of neither."""
    save(tmp_path, filled(5.0))
    model = filled(1.0)
    loss = model(torch.ones(1, 2)).sum()
    load(tmp_path, model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        counted_by_nobody = filled(1.0)
        load(tmp_path, counted_by_nobody)
    assert value_of(counted_by_nobody) == 5.0


@pytest.mark.parametrize("sign", ["n", "ü"])
def test_a_name_as_long_as_the_file_system_takes(sign: str, tmp_path: Path) -> None:
    longest = 240 // len(sign.encode())  # 255 bytes, less what stands around it while the save is under way
    for value in (1.0, 2.0):
        save(tmp_path, filled(value), name=sign * longest)
    model = filled(0.0)
    load(tmp_path / (sign * longest), model)
    assert value_of(model) == 2.0 and names_in(tmp_path) == [sign * longest]
    assert "File name too long" in tell(lambda: save(tmp_path, model, name=sign * (longest + 1)))
    assert names_in(tmp_path) == [sign * longest]


def consolidate_into_too_small_a_file(folder: Path) -> str:
    """Each tensor fits under the limit, the file does not."""
    save(folder / "a", nn.Sequential(nn.Linear(100, 1000), nn.Linear(1000, 100)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, resource.RLIM_INFINITY))
    return tell(lambda: consolidate(folder / "a", folder / "m.pth"))


def test_a_disk_that_is_full_at_the_end_of_consolidate_is_called_so(tmp_path: Path) -> None:
    (line,) = run_ranks(consolidate_into_too_small_a_file, 1, tmp_path)
    assert line == f"consolidate: {tmp_path}/m.pth cannot be written: File too large"
    assert names_in(tmp_path) == ["a"]


def test_torch_without_memory_says_that_and_not_where() -> None:
    why = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 16 bytes"
    text = f"[enforce fail at alloc_cpu.cpp:127] err == 0. {why}. Error code 12 (Cannot allocate memory)\n"
    assert reason(RuntimeError(text)) == why
    assert reason(RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64")) == "unexpected pos 64"


def end_during_a_save(folder: str) -> list[str]:
    dist.init_process_group("axo")
    comms = axo.connect("2x1x1x1")
    model = nn.Sequential(axo.nn.Linear(1024, 1024, comms=comms))
    for step in (1, 2):
        handle = save(folder, model, step=step, async_=True)
    dist.destroy_process_group()
    return [handle.wait().name, load(folder, nn.Sequential(nn.Linear(1024, 1024))).path.name]


def test_a_save_under_way_ends_before_the_process_group_does(tmp_path: Path) -> None:
    """A program that ends with destroy_process_group lost its last checkpoint."""
    assert run_ranks(end_during_a_save, 2, str(tmp_path)) == [["step-00000002"] * 2] * 2


def save_a_model_of_fsdp2(folder: str) -> list[str]:
    dist.init_process_group("axo")
    model = fully_shard(nn.Linear(4, 4))
    comms = axo.connect("1x1x1x2")
    return [tell(lambda: save(folder, model, comms=comms)), tell(lambda: axo.checkpoint.save_pretrained(model, folder))]


def test_dtensors_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    first, second = run_ranks(save_a_model_of_fsdp2, 2, str(tmp_path / "a"))
    assert first == second
    assert first[0].startswith(
        "checkpoint: 'weight' is a DTensor and cannot be saved; use torch.distributed.checkpoint"
    )
    assert not (tmp_path / "a").exists()


def in_inference_mode(grid: str, other: str, folder: str) -> None:
    """A model that is split, loaded, and moved to another grid in inference mode is trained. Oracle: the same outside
    of it, to the bit. One that is made in that mode is filled."""
    comms, results = axo.connect(grid), []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(axo.shard_batch(torch.ones(4, 8), comms)).square().mean().backward()
        optimizer.step()

    for mode in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        with torch.inference_mode(mode):
            axo.parallelize(model, comms, plan="auto")
        optimizer = torch.optim.AdamW(model.parameters())
        if not mode:
            step(model, optimizer)
            save(folder, model, optimizer)
        with torch.inference_mode(mode):
            load(folder, model, optimizer)
        step(model, optimizer)
        with torch.inference_mode(mode):
            axo.regrid(model, optimizer, other)
        step(model, optimizer)
        results.append([p.detach() for p in model.parameters()])
        axo.regrid(model, optimizer, grid)  # where the next one begins
    assert all(map(torch.equal, *results))
    with torch.inference_mode():
        whole = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        load(folder, whole, comms=comms)
    assert whole[0].weight.is_inference() and whole[0].weight.shape == (16, 8)


@pytest.mark.parametrize(("grid", "other"), [("2x1x1x1", "1x1x2x1"), ("1x1x2x1", "2x1x1x1")])
def test_what_is_split_or_loaded_in_inference_mode_is_trained(tmp_path: Path, grid: str, other: str) -> None:
    run_ranks(in_inference_mode, 2, grid, other, str(tmp_path))
