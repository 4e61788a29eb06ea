"""clip_grad_norm_ against torch.nn.utils on the serial model: every norm, every placement, the same bits everywhere."""

import math

import pytest
import torch
from torch import nn

import axo
from tests.launcher import run_ranks
from tests.nn.support import assert_close

NORMS = [1.0, 2.0, 3.0, math.inf]


def parallel_and_serial(comms):
    """Weights over x, y and z; biases over x or y; a norm over y, one over nothing; one parameter outside Axo."""
    layers = nn.ModuleList(
        [
            axo.nn.Linear(16, 24, comms=comms),
            axo.nn.Linear(24, 16, comms=comms, transposed=True),
            axo.nn.Embedding(13, 16, comms=comms),
            axo.nn.LayerNorm(16, comms=comms),
            axo.nn.RMSNorm(6, comms=comms, axis=None),
        ]
    )
    serial = nn.ModuleList(
        [nn.Linear(16, 24), nn.Linear(24, 16), nn.Embedding(13, 16), nn.LayerNorm(16), nn.RMSNorm(6)]
    )
    layers.register_parameter("scale", nn.Parameter(torch.ones(5)))
    serial.register_parameter("scale", nn.Parameter(torch.ones(5)))
    return layers, serial


def give_gradients(layers, serial):
    generator = torch.Generator().manual_seed(4)
    for mine, theirs in zip(layers.parameters(), serial.parameters(), strict=True):
        theirs.grad = torch.randn(theirs.shape, generator=generator)
        placement = getattr(mine, "placement", None)
        mine.grad = theirs.grad.clone() if placement is None else axo.shard(theirs.grad, placement)


def clip(grid):
    comms = axo.connect(grid)
    layers, serial = parallel_and_serial(comms)
    found = []
    for norm_type in NORMS:
        for max_norm in (1.0, 1e6):
            give_gradients(layers, serial)
            expected = torch.nn.utils.clip_grad_norm_(serial.parameters(), max_norm, norm_type)
            norm = axo.clip_grad_norm_(layers.parameters(), max_norm, norm_type)
            found.append(norm.item())
            assert_close(norm, expected, 1e-5 * float(expected), f"{norm_type}-norm")  # fp32 sums of 1,100 squares
            for (name, mine), theirs in zip(layers.named_parameters(), serial.parameters(), strict=True):
                placement = getattr(mine, "placement", None)
                part = theirs.grad if placement is None else axo.shard(theirs.grad, placement)
                assert_close(mine.grad, part, 1e-6, f"{name} clipped by its {norm_type}-norm to {max_norm}")
    for bad in (math.inf, math.nan):
        for norm_type in NORMS:
            give_gradients(layers, serial)
            if comms.rank == comms.grid.x * comms.grid.y * comms.grid.z - 1:  # one rank's shard only
                layers[0].weight.grad.view(-1)[0] = bad
            with pytest.raises(RuntimeError, match="cannot be clipped"):
                axo.clip_grad_norm_(layers.parameters(), 1.0, norm_type, error_if_nonfinite=True)
    give_gradients(layers, serial)
    layers[0].bias.grad = None
    serial[0].bias.grad = None
    expected = torch.nn.utils.clip_grad_norm_(serial.parameters(), 1.0)
    norm = axo.clip_grad_norm_(list(layers.parameters()), 1.0)
    assert_close(norm, expected, 1e-5 * float(expected), "a parameter without a gradient")
    with pytest.raises(ValueError, match=r"norm_type=0.0 is not supported; use a positive number or inf"):
        axo.clip_grad_norm_(layers.parameters(), 1.0, 0)
    return found


@pytest.mark.parametrize("grid", ["2x2x2x1", "1x2x2x2"])
def test_equals_torch_and_has_the_same_bits_on_every_rank(grid):
    found = run_ranks(clip, 8, grid)
    assert all(per_rank == found[0] for per_rank in found)
