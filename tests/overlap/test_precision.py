"""Mixed precision: in what gradients are reduced, fp16 with a scaler, and updates that bf16 alone would lose.

Oracles: closed formulas of numbers that bf16 cannot hold; counted bytes; serial training by plain torch.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import axo
from axo.grid import Grid
from axo.train.check import open_batches
from axo.train.serial import train_serial
from tests.launcher import run_ranks
from tests.nn.support import assert_close
from tests.train.test_resume import losses_of
from tests.train.test_train import SMALL, small, text

__all__ = ["text"]  # a fixture


def one_layer(comms: Any, **options: Any) -> Any:
    """A weight and a bias whose gradient on data rank r (of 4) is 1 + r/128: bf16 holds it, but not their mean."""
    model = nn.Sequential(axo.nn.Linear(1, 4, comms=comms))
    axo.overlap.attach(model, comms, **options)
    return model


def reduce_dtypes(grid: str) -> list[int]:
    comms = axo.connect(grid)
    place = comms.coords.z + comms.grid.z * comms.coords.data
    x = torch.full((1, 1), 1 + place / 128)
    exact, found = 1 + 1.5 / 128, []
    for dtype in (None, torch.float32, torch.bfloat16):
        for stage in (0, 2):
            for unsynchronised in (False, True):
                model = one_layer(comms, reduce_dtype=dtype, zero=stage)

                def backward(model: Any = model) -> None:
                    with torch.autocast("cpu", torch.bfloat16):
                        model(x).sum().backward()

                if unsynchronised:
                    with axo.no_sync(model):
                        backward()
                with axo.count_collectives() as counts:
                    backward()
                weight = model[0].weight.grad / (1 + unsynchronised)
                assert weight.dtype == torch.float32 and model[0].bias.grad.eq(1 + unsynchronised).all()
                assert (weight == exact).all() if dtype == torch.float32 else (weight - exact).abs().max() > 1e-3
                ops = [counts[op, axis] for op in ("reduce_scatter", "all_reduce") for axis in ("z", "data")]
                found.append(sum(count.bytes for count in ops))
        # The weight: bf16 unless fp32 is asked for; the bias: fp32 unless bf16 is asked for.
    layer = one_layer(comms, reduce_dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        (weight,) = torch.autograd.grad(layer(x).sum(), [layer[0].weight])
    assert (weight == exact).all(), "autograd.grad too"
    return found


@pytest.mark.parametrize(("grid", "sent"), [("1x1x1x4", 4), ("1x1x2x2", 6)])
def test_gradients_are_reduced_in_the_dtype_asked_for(grid: str, sent: int) -> None:
    found = run_ranks(reduce_dtypes, 4, grid)[0]
    # elements of the weight (over z and data; over data alone) and of the bias, times bytes
    weight, bias = sent, 4 * (2 if grid == "1x1x2x2" else 1)
    assert found[:4] == [2 * weight + 4 * bias] * 4
    assert found[4:8] == [4 * weight + 4 * bias] * 4
    assert found[8:] == [2 * weight + 2 * bias] * 4


def overflow(grid: str, stage: int) -> tuple[float, float]:
    """Two fp16 steps, in the first of which one rank's shard alone has an infinite gradient."""
    comms = axo.connect(grid)
    torch.manual_seed(3)
    model = axo.parallelize(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), comms, plan="auto", zero=stage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = axo.GradScaler(init_scale=64.0, comms=comms)
    rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(comms.coords.z + 10 * comms.coords.data))
    last = comms.grid.world_size - 1 if stage == 2 else comms.grid.x * comms.grid.y * comms.grid.z - 1
    for step in range(2):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.autocast("cpu", torch.float16):
            loss = model(rows).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if step == 0 and comms.rank == last:
            first = next(parameter for parameter in model.parameters() if parameter.grad is not None)
            first.grad.view(-1)[:1] = torch.inf
        scaler.unscale_(optimizer)
        norm = axo.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        same = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert all(same) if step == 0 else not any(same), f"step {step}, rank {comms.rank}"
        assert bool(norm.isinf()) is (step == 0)
    return scaler.get_scale(), float(norm)


@pytest.mark.parametrize(("grid", "stage"), [("2x1x1x2", 0), ("1x1x2x2", 2), ("1x2x1x2", 1)])
def test_an_overflow_on_one_rank_skips_the_step_on_all(grid: str, stage: int) -> None:
    results = run_ranks(overflow, 4, grid, stage)
    assert results == [results[0]] * 4 and results[0][0] == 32.0


def tiny_updates(grid: str, stage: int) -> bool:
    """A hundred updates of 2**-13, each smaller than half a bf16 ulp of 1 (2**-9), in bf16-mixed."""
    comms = axo.connect(grid)
    model = nn.Sequential(axo.nn.Linear(4, 4, bias=False, comms=comms))
    axo.overlap.attach(model, comms, zero=stage)
    nn.init.ones_(model[0].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-13)
    for _ in range(100):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.ones(1, 4 // comms.grid.y)).sum().backward()
        optimizer.step()
    assert model[0].weight.dtype == torch.float32
    assert model[0].weight.eq(1 - 100 * 2.0**-13).all(), "updates got lost"
    seen = model[0].weight.to(torch.bfloat16).float()
    assert seen.ne(1).all()
    with torch.autocast("cpu", torch.bfloat16):  # and products use what has become of it
        output = model(torch.ones(1, 4 // comms.grid.y)).float()
    assert_close(output, torch.full_like(output, 4 * float(seen[0, 0])), 2.0**-6, "output")
    return True


@pytest.mark.parametrize(("grid", "stage"), [("2x1x2x1", 0), ("1x1x2x2", 2)])
def test_an_update_below_a_bf16_ulp_reaches_the_master_weight(grid: str, stage: int) -> None:
    run_ranks(tiny_updates, 4, grid, stage)


@pytest.mark.parametrize(("precision", "zero"), [("16-mixed", 2), ("bf16-true", 1)])
def test_training_follows_serial(text: str, precision: str, zero: int) -> None:
    """Within 1%: the two round at other places. In fp16 ranks and serial begin with the scale that overflows."""
    config = small(text, grid=Grid(2, 1, 1, 2), precision=precision, zero=zero, model_overrides=SMALL | {"n_layer": 1})
    losses = run_ranks(losses_of, 4, config)[0]
    serial = list(train_serial(config, open_batches(config)))
    assert losses == pytest.approx(serial, rel=1e-2)
    assert losses[-1] < losses[0]


def test_a_resumed_fp16_run_goes_on_with_its_scale(text: str, tmp_path: Path) -> None:
    config = small(
        text, grid=Grid(1, 1, 1, 2), precision="16-mixed", zero=2, steps=4, save_every=2, keep=9,
        model_overrides=SMALL | {"n_layer": 1},
    )  # fmt: skip
    at_once = run_ranks(losses_of, 2, config)[0]
    second = str(tmp_path / "out" / "checkpoints" / "step-00000002")
    assert run_ranks(losses_of, 2, dataclasses.replace(config, save_every=0, resume=second))[0] == at_once
    saved = axo.checkpoint.load(second, nn.Module(), strict=False, rng=False).extra
    assert saved["scaler"]["scale"] > 0


def refused(grid: str) -> str:
    comms = axo.connect(grid)
    with pytest.raises(ValueError, match=r"reduce_dtype=torch\.float16") as error:
        axo.parallelize(nn.Sequential(nn.Linear(2, 2)), comms, plan="auto", reduce_dtype=torch.float16)
    return str(error.value)


def test_other_dtypes_are_refused() -> None:
    assert "use one of (None, torch.float32, torch.bfloat16)" in run_ranks(refused, 1, "1x1x1x1")[0]


def test_what_is_no_grid_and_no_model_is_named() -> None:
    with pytest.raises(ValueError, match=r"GradScaler: comms=None is not what axo.connect returns"):
        axo.GradScaler(comms=None)  # type: ignore[arg-type]
    for wrong in (None, nn.Linear(2, 2).parameters()):
        with pytest.raises(ValueError, match=r"no_sync: a .* is no model; pass the model that axo.para"):
            with axo.no_sync(wrong):  # type: ignore[arg-type]
                pass
