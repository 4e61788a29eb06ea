"""Layers in a chain: features must be split as the next layer takes them, also where shapes do not tell (Gx == Gy).

Oracle: the error names both layers, on every rank; a chain that fits equals serial PyTorch (``test_linear``) and is
looked at in its first pass only.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import axo
from tests.launcher import run_ranks


class Mlp(nn.Module):
    def __init__(self, comms, transposed):
        super().__init__()
        self.up = axo.nn.Linear(8, 16, comms=comms)
        self.gate = axo.nn.Linear(8, 16, comms=comms)
        self.norm = axo.nn.LayerNorm(16, comms=comms, axis="x")
        self.down = axo.nn.Linear(16, 8, comms=comms, transposed=transposed)

    def forward(self, x):
        return x + self.down(F.dropout(F.silu(self.gate(x)), 0.1) * self.norm(F.gelu(self.up(x))))


def wrong_chains(grid):
    comms = axo.connect(grid)
    x = torch.rand(4, 8 // comms.grid.y)
    model = Mlp(comms, transposed=False)
    axo.overlap.attach(model, comms)
    with pytest.raises(ValueError) as error:
        model(x)
    for word in ("Linear 'down'", "split over y", "its input comes from", "split over x"):
        assert word in str(error.value)
    pairs = {
        "two normal": (axo.nn.Linear(8, 8, comms=comms, name="a"), axo.nn.Linear(8, 8, comms=comms, name="b")),
        "two transposed": [axo.nn.Linear(8, 8, comms=comms, transposed=True, name=name) for name in "ab"],
        "norm over y": (axo.nn.Linear(8, 8, comms=comms, name="a"), axo.nn.LayerNorm(8, comms=comms, name="b")),
        "rms norm": (axo.nn.Linear(8, 8, comms=comms, name="a"), axo.nn.RMSNorm(8, comms=comms, name="b")),
    }
    for what, (first, second) in pairs.items():
        with pytest.raises(ValueError, match=r"'b' .*comes from .*'a'"):
            second(F.relu(first(x)) + 1)
            pytest.fail(what)
    convolutions = [axo.nn.Conv2d(8, 8, 1, comms=comms, name=name) for name in "ab"]
    with pytest.raises(ValueError, match=r"Conv2d 'b' .*comes from Conv2d 'a'"):
        convolutions[1](convolutions[0](torch.rand(2, 8 // comms.grid.y, 3, 3)).relu())
    table = axo.nn.Embedding(16, 8, comms=comms, name="wte")
    with pytest.raises(ValueError, match=r"Linear 'b' .*comes from Embedding 'wte'"):
        axo.nn.Linear(8, 8, comms=comms, transposed=True, name="b")(table(torch.arange(4)))


def right_chains(grid):
    comms = axo.connect(grid)
    model = Mlp(comms, transposed=True)
    axo.overlap.attach(model, comms)
    x = torch.rand(4, 8 // comms.grid.y, requires_grad=True)
    with torch.no_grad():
        model(x)  # has no history
    layers = (model.norm, model.down)
    assert all(layer.first_pass for layer in layers)
    model(x).sum().backward()
    assert not any(layer.first_pass for layer in layers)
    model(x).sum().backward()
    # what reshapes ends the walk: nothing is claimed
    first, second = (axo.nn.Linear(8, 8, comms=comms) for _ in range(2))
    second(first(x).flip(-1))


def test_wrong_chains_are_refused():
    run_ranks(wrong_chains, 4, "2x2x1x1")


def test_right_chains_run():
    run_ranks(right_chains, 4, "2x2x1x1")
