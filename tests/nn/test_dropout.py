"""Dropout: masks agree where activations are replicated, differ where they are split, and survive recomputation."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import axo
from tests.launcher import run_ranks
from tests.nn.support import seed_apart

GRID = "2x2x2x1"


def masks(split):
    comms = axo.connect(GRID)
    seed_apart(comms)
    layer = axo.nn.Dropout(0.5, comms=comms, split=split)
    other = axo.nn.Dropout(0.5, comms=comms, split=split)
    ones = torch.ones(16, 64)
    calls = [layer(ones), layer(ones), other(ones)]
    assert all(set(call.unique().tolist()) == {0.0, 2.0} for call in calls)
    layer.eval()
    assert layer(ones) is ones
    return [call != 0 for call in calls]


@pytest.mark.parametrize("split", [("y", "z", "data"), ("x", "z", "data"), ()])
def test_masks_agree_where_replicated_and_differ_where_split(split):
    grid = axo.Grid.parse(GRID)
    found = run_ranks(masks, 8, split)
    where = [tuple(getattr(grid.coords(rank), axis) for axis in split) for rank in range(8)]
    for a in range(8):
        for b in range(8):
            for i in range(3):
                for j in range(3):
                    same = torch.equal(found[a][i], found[b][j])
                    # 1,024 coin flips: two masks are equal by chance once in 2^1024
                    assert same == (i == j and where[a] == where[b]), (a, i, b, j)
    shares = torch.stack([mask.float().mean() for per_rank in found for mask in per_rank])
    assert ((shares - 0.5).abs() < 0.1).all()  # six standard deviations of 1,024 flips


def recomputation():
    comms = axo.connect(GRID)
    seed_apart(comms)
    linear, split = axo.nn.Linear(16, 32, comms=comms), ("x", "z", "data")
    block = nn.Sequential(linear, axo.nn.Dropout(0.3, comms=comms, split=split))
    x = torch.randn(4, 8)
    gradients = {}
    twin = copy.deepcopy(block)
    assert twin[1].comms is comms
    state, calls = torch.get_rng_state(), []
    for kind in ("none", "reentrant", "not reentrant"):
        torch.set_rng_state(state)
        block[1] = axo.nn.Dropout(0.3, comms=comms, split=split)
        mine = x.clone().requires_grad_()
        total = torch.zeros(())
        for _ in range(2):  # two calls before the first backward
            output = block(mine) if kind == "none" else checkpoint(block, mine, use_reentrant=kind == "reentrant")
            calls.append(output.detach())
            total = total + output.square().sum()
        total.backward()
        gradients[kind] = mine.grad
    assert not torch.equal(calls[0], calls[1])
    assert torch.equal(gradients["none"], gradients["reentrant"])
    assert torch.equal(gradients["none"], gradients["not reentrant"])


def test_recomputation_draws_the_same_mask():
    run_ranks(recomputation, 8)


def edges():
    comms = axo.connect(axo.Grid())
    ones = torch.ones(8, 8)
    assert torch.equal(axo.nn.Dropout(1.0, comms=comms)(ones), torch.zeros(8, 8))
    assert axo.nn.Dropout(0.0, comms=comms)(ones) is ones
    inplace = torch.ones(8, 8)
    assert axo.nn.Dropout(0.5, True, comms=comms)(inplace) is inplace and 0 < inplace.sum() < 128
    with pytest.raises(ValueError, match=r"Dropout: p=1.5 is not a probability"):
        axo.nn.Dropout(1.5, comms=comms)
    with pytest.raises(ValueError, match="split names 'w', which is not an axis"):
        axo.nn.Dropout(0.5, comms=comms, split=("w",))


def test_edges():
    run_ranks(edges, 1)
