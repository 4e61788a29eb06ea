"""Training runs in stages: losses equal the serial run's; checkpoints load on other stages, other grids and on none."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import axo
from axo import checkpoint
from axo.grid import Grid
from axo.optim.scaler import GradScaler
from axo.pipeline import SCHEDULES
from axo.train import TrainConfig, models, runner
from axo.train.check import check, open_batches
from axo.train.serial import compare, train_serial
from tests.launcher import run_ranks
from tests.train.test_train import SMALL, small, text

__all__ = ["text"]  # a fixture

TIED = {**SMALL, "n_layer": 4}
FIGURE_6 = {"algorithm": "tesseract", "model_overrides": SMALL, "steps": 10, "microbatches": 2, "threads": 1}


def losses_of(config: TrainConfig) -> list[float]:
    outcome = runner.train_rank(config)
    return outcome.losses if outcome else []


# The last of a rank's two stages has a configuration of its own, without the scale.
CAPPED = TIED | {"scale_embeddings": True, "final_logit_softcapping": 2.0}


def staged(text: str, **options: Any) -> TrainConfig:
    usual = {"model_overrides": TIED, "batch_size": 16, "seq_len": 16, "steps": 4, "microbatches": 4}
    return small(text, **(usual | options))


@pytest.mark.parametrize(
    ("grid", "schedule", "options"),
    [
        ("2x1x2x1", "zero-bubble", {"recompute": True, "sequence_parallel": True}),
        ("1x2x1x1", "1f1b", {"accumulate": 2, "goldfish_k": 4, "microbatches": 3}),  # of 3, 3 and 2 rows
        ("2x2x1x1", "1f1b", {"algorithm": "tesseract"}),
        ("1x1x2x2", "1f1b", {"optimizer": "muon", "zero": 2, "microbatches": 2, "steps": 20}),
        ("1x1x1x1", "1f1b", {"precision": "16-mixed"}),  # the last stage alone scales a loss
        ("1x1x2x1", "interleaved-1f1b", {"chunked_loss": True, "context": 2, "model_overrides": CAPPED, "steps": 20}),
        pytest.param("2x2x2x2", "1f1b", FIGURE_6, marks=pytest.mark.soak),
    ],
)
def test_losses_equal_serial(text: str, grid: str, schedule: str, options: dict[str, Any]) -> None:
    """Oracle: the serial run. The last is Tesseract's figure 6: data 2 x pipeline 2 x [2, 2, 2] = 32 ranks."""
    config = staged(text, grid=Grid.parse(grid), pipeline=2, schedule=schedule, **options)
    found = run_ranks(losses_of, config.ranks, config, timeout=180)[0]
    expected = list(train_serial(config, open_batches(config)))
    print(f"{grid} in 2 stages: losses differ by {max(map(abs, map(float.__sub__, found, expected))):.1e}")
    assert found == pytest.approx(expected, abs=1e-4) and len(found) == config.steps
    header = json.loads((Path(config.out) / "log.jsonl").read_text().splitlines()[0])
    assert (header["ranks"], header["pipeline"]) == (config.ranks, 2)


class Scaler(torch.amp.GradScaler):
    """Begins far above what fp16 takes, backs off by 2^-11, and grows after three good steps; ``scales``: its way."""

    scales: list[float]

    def __init__(self, *args: Any, **options: Any) -> None:
        way = {"init_scale": 2.0**36, "backoff_factor": 2.0**-11, "growth_interval": 3}
        super().__init__(*args, **(options | way))
        type(self).scales = []

    def update(self, *args: Any) -> None:
        super().update(*args)
        self.scales.append(self.get_scale())


def losses_and_scales(config: TrainConfig, serial: bool) -> tuple[list[float], list[float]]:
    if serial:
        torch.amp.GradScaler = Scaler  # type: ignore[misc]
        return list(train_serial(config, open_batches(config))), Scaler.scales
    of_grid = type("OfGrid", (Scaler, GradScaler), {})
    axo.GradScaler = of_grid  # type: ignore[misc]
    return losses_of(config), of_grid.scales


@pytest.mark.parametrize(
    ("grid", "schedule", "zero"),
    [("1x1x1x2", "zbv", 2), *(pytest.param("1x1x2x1", name, 0, marks=pytest.mark.soak) for name in SCHEDULES)],
)
def test_the_scale_grows_and_backs_off_on_all_stages_as_on_one_device(
    text: str, grid: str, schedule: str, zero: int
) -> None:
    """Oracle: torch's scaler in the serial run; two steps overflow, and are left out on every rank."""
    config = staged(
        text, grid=Grid.parse(grid), pipeline=2, schedule=schedule, zero=zero, steps=8, precision="16-mixed", lr=3e-4
    )
    (expected, scales), *_ = run_ranks(losses_and_scales, 1, config, True)
    assert [math.log2(scale) for scale in scales] == [25, 14, 14, 14, 15, 15, 15, 16]
    ranks = run_ranks(losses_and_scales, config.ranks, config, False, timeout=120)
    assert [scales for _, scales in ranks] == [scales] * config.ranks
    assert ranks[0][0] == pytest.approx(expected, abs=1e-4)


def all_losses(configs: list[TrainConfig]) -> list[list[float]]:
    return [losses_of(config) for config in configs]


@pytest.mark.soak
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("grid", ["1x1x1x1", "2x1x1x1", "1x2x1x1", "1x1x2x1", "1x1x1x2"])
def test_twenty_steps_of_every_schedule(text: str, grid: str, precision: str) -> None:
    """Oracle: the serial run of the same precision. fp32 to 1e-4; bf16-mixed to 4 times what serial runs differ by that
    cut a batch into other pieces, which round at other places. Each schedule checkpoints activations in one of both."""
    configs = [
        staged(text, grid=Grid.parse(grid), pipeline=2, schedule=schedule, steps=20, precision=precision,
               recompute=bool((number + (precision == "32-true")) % 2), out=f"{text}-{schedule}")
        for number, schedule in enumerate(SCHEDULES)
    ]  # fmt: skip
    found = run_ranks(all_losses, configs[0].ranks, configs, timeout=300)[0]
    pieces = (1, 2, 4, 8) if precision == "bf16-mixed" else (1,)
    alone = [dataclasses.replace(configs[0], recompute=False, accumulate=count) for count in pieces]
    serial = [list(train_serial(one, open_batches(one))) for one in alone]
    noise = max(compare(one, other, precision).difference for one in serial for other in serial)
    for config, losses in zip(configs, found, strict=True):
        verdict = compare(losses, serial[0], precision)
        print(f"{grid}, {config.schedule}, recompute={config.recompute}: {verdict}; serial runs differ by {noise:.1e}")
        assert verdict.ok and (precision == "32-true" or verdict.difference <= 4 * noise), config.schedule


def test_offload_in_stages(text: str) -> None:
    """Oracle: the run whose optimizer does the same arithmetic, on the lower tier, and keeps all else in memory."""
    options = {"pipeline": 2, "schedule": "interleaved-1f1b", "seq_len": 64, "batch_size": 32}
    plain, offloaded = (
        run_ranks(losses_of, 2, staged(text, offload=offload, out=f"{text}-{offload}", **options))[0]
        for offload in ("optimizer", "optimizer,parameters,activations")
    )
    assert offloaded == plain


def test_any_stages_load_what_any_stages_saved(text: str, tmp_path: Path) -> None:
    """Three steps in two stages; then three more in one stage, in stages in a V, and on another grid: one curve."""
    at_once = run_ranks(losses_of, 1, staged(text, steps=6, out=str(tmp_path / "a")))[0]
    out = tmp_path / "b"
    config = staged(text, steps=6, save_every=3, keep=9, out=str(out), pipeline=2, grid=Grid(1, 1, 2, 1))
    assert run_ranks(losses_of, 4, config)[0] == pytest.approx(at_once, abs=1e-4)
    saved = out / "checkpoints" / "step-00000003"
    again = dataclasses.replace(config, save_every=0, resume=str(saved))
    curves = {
        "one stage": (2, {"pipeline": 1, "grid": Grid(2, 1, 1, 1)}),
        "in a V": (2, {"schedule": "zbv", "grid": Grid()}),
    }
    for what, (ranks, options) in curves.items():
        assert run_ranks(losses_of, ranks, dataclasses.replace(again, **options))[0] == pytest.approx(
            at_once, abs=1e-4
        ), what
    whole = checkpoint.consolidate(saved, tmp_path / "whole.pth")
    values = torch.load(whole)
    serial = models.build_empty(models.resolve(config.model, config.model_overrides)).state_dict()
    assert {name: value.shape for name, value in values.items()} == {name: each.shape for name, each in serial.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"schedule": "zbv", "algorithm": "tesseract", "grid": Grid(2, 2)},
            r"with algorithm='tesseract' these communic",
        ),
        ({"schedule": "2f2b"}, r"schedule='2f2b' is not known; use one of gpipe"),
        ({"microbatches": 1}, r"microbatches=1 are fewer than the 2 stages"),
        ({"microbatches": 9, "accumulate": 2}, r"microbatches=9 are more than the 8 rows of a rank in a piece"),
        ({"schedule": "zbv", "pipeline": 4}, r"4 blocks over 8 stages leave a stage without layers; use at most 4"),
    ],
)
def test_options_are_checked_before_ranks_start(text: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(staged(text, **({"pipeline": 2} | change)))
