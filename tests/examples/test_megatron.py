"""Unmodified GPTModels of megatron-core on grids against the same alone: losses, and weights by Megatron's names.

megatron-core lies in a folder of its own (tests/examples/megatron.txt); where it is not there, it is fetched with pip.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from examples.megatron import __main__ as command
from examples.megatron.model import MODELS
from tests.launcher import run_ranks

GRIDS = ["2x2x1x1", "1x1x2x2", "2x1x2x1"]


@pytest.fixture(scope="module")
def folder():
    """The folder that holds megatron-core."""
    path = Path(sys.prefix, "megatron")
    if not (path / "megatron").is_dir():
        wanted = Path(__file__).with_name("megatron.txt")
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(path), "-r", str(wanted)]
        done = subprocess.run(pip, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"megatron-core cannot be fetched: {done.stderr.strip().splitlines()[-1]}")
    return path


def run_all(grids):
    """One start of the ranks serves both models and all grids."""
    from examples.megatron.training import train

    return {(name, grid): train(name, grid, steps=4) for name in MODELS for grid in grids}


def test_models_train_as_alone(folder, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    preload = ("megatron.core.models.gpt.gpt_layer_specs", "megatron.core.models.gpt.gpt_model")
    (alone,) = run_ranks(run_all, 1, [""], timeout=120, preload=preload)
    runs = run_ranks(run_all, 4, GRIDS, timeout=240, preload=preload)[0]
    for (name, grid), run in runs.items():
        serial = alone[name, ""]
        assert serial.losses[-1] < serial.losses[0]
        loss, weight = command.distance(serial, run)
        assert loss < 1e-5 and weight < 1e-5, (
            name,
            grid,
            loss,
            weight,
        )  # after four steps
