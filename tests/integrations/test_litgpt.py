"""``axo litgpt``: LitGPT's own pretraining on grids, against LitGPT as it is on one device."""

import pytest

from tests.integrations.support import distance
from tests.integrations.trainer import STEPS, finetune, ranks_of, run, write_base
from tests.launcher import run_ranks


@pytest.fixture(scope="module")
def serial(folder):
    return run(folder, "serial")


@pytest.mark.parametrize(
    "grid",
    [
        "2x1x1x1",
        "1x2x1x1",
        "1x1x2x1",
        pytest.param("2x2x1x1", marks=pytest.mark.soak),
        pytest.param("2x1x1x2", marks=pytest.mark.soak),
        "2x2x2x1",
    ],
)
def test_pretraining_equals_stock_litgpt(folder, serial, grid):
    """Oracle: ``litgpt pretrain``, one device, fp32. Losses to 1e-4, the model after 20 steps to 1e-5 (both summation
    order only), the same tokens."""
    losses, sums, state = run(folder, grid, grid)
    assert len(losses) == STEPS and serial[0][-1] < serial[0][0] - 0.3
    assert losses == pytest.approx(serial[0], abs=1e-4)
    assert sums == serial[1]
    assert distance(state["model"], serial[2]["model"]) < 1e-5


def test_the_vocabulary_parallel_loss_equals_stock_litgpt(folder, serial):
    losses, _, state = run(folder, "vocabulary", "2x1x1x2", env={"AXO_VOCAB_LOSS": "1"})
    assert losses == pytest.approx(serial[0], abs=1e-4)
    assert distance(state["model"], serial[2]["model"]) < 1e-5


@pytest.mark.soak
def test_accumulation_equals_stock_litgpt(folder):
    """Oracle: stock LitGPT that accumulates too (its learning rate counts micro-batches)."""
    stock = run(folder, "stock-accumulation", None, accumulate=2)
    losses, sums, state = run(folder, "accumulation", "1x2x2x1", accumulate=2)
    assert len(losses) == 2 * STEPS and losses == pytest.approx(stock[0], abs=1e-4) and sums == stock[1]
    assert distance(state["model"], stock[2]["model"]) < 1e-5


def test_bf16_mixed_is_close_to_stock_litgpt(folder, serial):
    """Oracle: the fp32 run, within 1% at each step."""
    assert run(folder, "bf16", "2x1x2x1", precision="bf16-mixed")[0] == pytest.approx(serial[0], rel=0.01)


def test_full_finetuning_equals_stock_litgpt(folder):
    """Oracle: ``litgpt finetune_full`` on one rank. 40 samples in 20 steps, one at a time: losses to 1e-4."""
    write_base(folder)
    stock = run_ranks(finetune, 1, folder, "stock-full", env={"TORCHELASTIC_RUN_ID": "test"})[0]
    ranks, environment = ranks_of("2x1x2x1")
    results = run_ranks(finetune, ranks, folder, "full", "2x1x2x1", env=environment, timeout=120)
    assert len(stock) == 40 and stock[-1] < stock[0] - 0.3
    both = [loss for pair in zip(results[0], results[2], strict=True) for loss in pair]
    assert both == pytest.approx(stock, abs=1e-4)
    assert results[1] == pytest.approx(results[0], abs=1e-6) and results[3] == pytest.approx(results[2], abs=1e-6)
