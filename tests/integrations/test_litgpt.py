"""``axo litgpt``: LitGPT's own pretraining on grids, against LitGPT as it is on one device."""

import pytest

from tests.integrations.support import distance
from tests.integrations.trainer import STEPS, run


@pytest.fixture(scope="module")
def serial(folder):
    return run(folder, "serial")


@pytest.mark.parametrize("grid", ["2x1x1x1", "1x2x1x1", "1x1x2x1", "2x2x1x1", "2x1x1x2", "2x2x2x1"])
def test_pretraining_equals_stock_litgpt(folder, serial, grid):
    """Oracle: ``litgpt pretrain``, one device, fp32. Losses to 1e-4, the model after 20 steps to 1e-5 (both summation
    order only), the same tokens."""
    losses, sums, state = run(folder, grid, grid)
    assert len(losses) == STEPS and serial[0][-1] < serial[0][0] - 0.3
    assert losses == pytest.approx(serial[0], abs=1e-4)
    assert sums == serial[1]
    assert distance(state["model"], serial[2]["model"]) < 1e-5
