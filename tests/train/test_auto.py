"""``axo train --grid auto`` against the planner, asked about each grid in each number of stages by itself."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from axo.grid import Grid
from axo.perf import machine, planner, readers
from axo.train import TrainConfig
from axo.train.auto import chosen
from tests.cli.test_cli import run_axo

LLAMA = TrainConfig(model="Llama-3.2-1B", batch_size=64, seq_len=2048, recompute=True)
ON = "perlmutter"


@pytest.mark.parametrize(
    ("accumulate", "given"), [(1, {}), (2, {}), (1, {"pipeline": 4, "schedule": "gpipe", "microbatches": 4})]
)
def test_the_fastest_of_all(accumulate: int, given: dict) -> None:
    config = dataclasses.replace(LLAMA, accumulate=accumulate, **given)
    found, why = chosen(config, None, 16, ON, set(given))
    workload = readers.read("Llama-3.2-1B", seq_length=2048)
    best = (float("inf"), "", 0, "", 0, "")
    for stages in [4] if given else [1, 2, 4, 8, 16]:
        for grid in Grid.all(16 // stages):
            if 64 % (grid.z * grid.data * accumulate):
                continue
            pieces = accumulate if stages > 1 else 1
            request = planner.Request(
                workload, machine.load(ON), 16, 64 * 2048 // pieces, gather="keep",
                micro_batches=given.get("microbatches", 0) if stages > 1 else accumulate,
                schedules=("gpipe",) if given else planner.SEARCHED,
            )  # fmt: skip
            one = planner.consider(request, grid, stages)
            if not one.reason:
                schedule = one.stages.schedule if one.stages else found.schedule
                micro = one.run.micro_batches if one.stages else found.microbatches
                cuts = ",".join(map(str, one.stages.bounds[1:-1])) if one.stages else "even"
                best = min(best, (one.seconds * pieces, str(grid), stages, schedule, micro, cuts))
    assert (str(found.grid), found.pipeline, found.schedule, found.microbatches, found.cuts) == best[1:]
    assert f"grid {best[1]}" in why and "on 16 ranks of" in why and "products take" in why
    assert ("would take +" in why) == (not given), why


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"pipeline": 2, "cuts": "9"}, "1f1b"),
        ({"pipeline": 2, "cuts": "4,8,12"}, "interleaved-1f1b"),
        ({"cuts": "9"}, "cuts=9 make 2 stages, and pipeline is not given; give both"),
        ({"pipeline": 4, "cuts": "9", "schedule": "gpipe"}, "cuts=9 make 2 stages, and pipeline=4 has 4; give both"),
    ],
)
def test_named_cuts_are_of_the_chosen_schedule(given: dict[str, Any], found: str) -> None:
    config = dataclasses.replace(LLAMA, **given)
    if " " in found:
        with pytest.raises(ValueError, match=re.escape(found)):
            chosen(config, None, 16, ON, set(given))
        return
    config, _ = chosen(config, None, 16, ON, set(given))
    assert config.schedule == found and config.cuts == given["cuts"]


def test_what_is_chosen_trains(tmp_path: Path) -> None:
    options = ["--machine", ON, "--ranks", "2", "--pipeline", "2", "--steps", "2", "--out", str(tmp_path / "out")]
    code, lines = run_axo("train", "--grid", "auto", *options, "--seq-len", "32", "--log-every", "2")
    assert code == 0 and re.match(r"grid 1x1x1x1 x 2 stages, .*, chosen for tiny on 2 ranks of", lines[0]), lines
    assert any("2/2: loss" in line and "in 2 stages" in line for line in lines), lines
