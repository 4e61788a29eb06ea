"""Inputs of a dtype that torch's layers refuse are refused. Oracle: the layers of torch.nn."""

import pytest
import torch
from torch import nn

import axo
from tests.launcher import run_ranks


def refused(layer, x):
    try:
        layer(x)
    except RuntimeError:  # NotImplementedError among them
        return True
    return False


def compare(grid):
    comms = axo.connect(grid)
    y = comms.grid.y
    cases = [
        (axo.nn.Linear(8, 8, comms=comms), nn.Linear(8, 8), (2, 8)),
        (axo.nn.Conv2d(8, 8, 1, comms=comms), nn.Conv2d(8, 8, 1), (2, 8, 3, 3)),
        (axo.nn.LayerNorm(8, comms=comms), nn.LayerNorm(8), (2, 8)),
        (axo.nn.RMSNorm(8, comms=comms), nn.RMSNorm(8), (2, 8)),
    ]
    for layer, serial, shape in cases:
        local = (shape[0], shape[1] // y, *shape[2:])
        for dtype in (torch.int64, torch.float64, torch.bfloat16, torch.float32):
            for autocast in (False, True):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    expected = refused(serial, torch.ones(shape, dtype=dtype))
                    found = refused(layer, torch.ones(local, dtype=dtype))
                assert found == expected, (layer, dtype, autocast)
    with pytest.raises(RuntimeError, match=r"the input is torch.int64 and the weight torch.float32"):
        cases[0][0](torch.ones(2, 8 // y, dtype=torch.int64))
    with pytest.raises(RuntimeError, match=r"the logits are torch.int64"):
        axo.nn.cross_entropy(torch.ones(2, 4, dtype=torch.int64), torch.tensor([0, 1]), comms=comms)


@pytest.mark.parametrize("grid", ["1x1x1x1", "1x2x1x1"])
def test_dtypes_are_refused_as_torch_does(grid):
    run_ranks(compare, 2 if "2" in grid else 1, grid)
