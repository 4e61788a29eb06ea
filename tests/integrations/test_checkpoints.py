"""Checkpoints of ``axo litgpt``: read by stock LitGPT and by other grids, resumed, and generated from."""

import pytest
import torch

from tests.integrations.support import distance
from tests.integrations.trainer import generate, ranks_of, run
from tests.launcher import run_ranks

TEN = "step-00000010/lit_model.pth"


@pytest.fixture(scope="module")
def twenty(folder):
    """An uninterrupted run of 20 steps on 2x1x2x1, which left a checkpoint after 10."""
    return run(folder, "twenty", "2x1x2x1", save_interval=10)


@pytest.mark.parametrize("grid", [pytest.param("2x1x2x1", marks=pytest.mark.soak), "1x2x1x2", None], ids=str)
def test_ten_and_ten_steps_are_twenty(folder, twenty, grid):
    """Oracle: the uninterrupted run. On the same grid, on another, and in stock LitGPT (grid None): 1e-6."""
    losses, sums, state = run(folder, f"resumed-{grid}", grid, resume=folder / "twenty" / TEN)
    assert losses == pytest.approx(twenty[0][10:], abs=1e-5)
    assert sums == twenty[1][10:]
    assert distance(state["model"], twenty[2]["model"]) < 1e-6
    for moment in ("exp_avg", "exp_avg_sq"):
        assert distance(_moments(state, moment), _moments(twenty[2], moment)) < 1e-4


def _moments(state, name):
    return {index: values[name] for index, values in state["optimizer"]["state"].items()}


@pytest.mark.soak
def test_a_stock_checkpoint_goes_on_on_a_grid(folder, twenty):
    """Oracle: the stock run itself."""
    whole = run(folder, "stock", None, save_interval=10)
    losses, sums, state = run(folder, "from-stock", "2x2x1x1", resume=folder / "stock" / TEN)
    assert losses == pytest.approx(whole[0][10:], abs=1e-5) and sums == whole[1][10:]
    assert distance(state["model"], whole[2]["model"]) < 1e-6


def save_again(source, target, grid):
    """Load a checkpoint's model on a grid and save it at once."""
    import lightning as L
    from litgpt.config import Config
    from litgpt.model import GPT

    from axo.integrations.lightning import AxoStrategy

    fabric = L.Fabric(accelerator="cpu", strategy=AxoStrategy(grid))
    fabric.launch()
    with fabric.init_module(empty_init=True):
        model = GPT(Config.from_file(source.parent / "model_config.yaml"))
    model = fabric.setup(model)
    fabric.load(source, {"model": model}, strict=False)
    fabric.save(target, {"model": model})


def test_parallel_serial_parallel_is_bit_equal(folder, twenty):
    """Whole weights -> shards of 2x2x2x1 -> whole weights."""
    source, target = folder / "twenty" / "final" / "lit_model.pth", folder / "again.pth"
    ranks, environment = ranks_of("2x2x2x1")
    run_ranks(save_again, ranks, source, target, "2x2x2x1", env=environment)
    again = torch.load(target, weights_only=True)["model"]
    assert again.keys() == twenty[2]["model"].keys()
    assert all(torch.equal(again[name], value) for name, value in twenty[2]["model"].items())


def test_generation_from_a_parallel_checkpoint(folder, twenty):
    """Forty greedy tokens of stock ``litgpt generate``, and the same on a grid; sampling agrees on all ranks."""
    checkpoint = folder / "twenty" / "final"
    stock = run_ranks(generate, 1, checkpoint)[0]
    assert len(stock) == 48
    ranks, environment = ranks_of("2x2x1x1")
    assert run_ranks(generate, ranks, checkpoint, "2x2x1x1", env=environment) == [stock] * ranks
    sampled = run_ranks(generate, ranks, checkpoint, "2x2x1x1", None, 1.0, env=environment)
    assert sampled == [sampled[0]] * ranks and sampled[0] != stock
