"""Ranks that own no rows of a weight, or no part of a vocabulary: values and gradients as serial PyTorch in fp32."""

import pytest
import torch
from torch import nn

import axo
from tests.launcher import run_ranks
from tests.nn.support import assert_close, assert_gradients_match, my_rows, seed_apart, serial_seed

LIMIT = 1e-5  # fp32, a few dozen terms below 1


def cases(comms):
    """(parallel layer, the serial one, its whole input); rows over z and data."""
    x, y = comms.grid.x, comms.grid.y
    rows = torch.rand(8, 4, generator=torch.Generator().manual_seed(1))
    images = torch.rand(8, 4, 3, 3, generator=torch.Generator().manual_seed(2))
    ids = torch.arange(16).view(8, 2) % 3
    yield "linear", lambda: axo.nn.Linear(4, x, comms=comms), lambda: nn.Linear(4, x), rows
    yield "linear, transposed", lambda: axo.nn.Linear(4, y, comms=comms, transposed=True), lambda: nn.Linear(4, y), rows
    yield "convolution", lambda: axo.nn.Conv2d(4, x, 3, comms=comms), lambda: nn.Conv2d(4, x, 3), images
    yield (
        "convolution without bias",
        lambda: axo.nn.Conv2d(4, 3 * x, 1, bias=False, comms=comms),
        (lambda: nn.Conv2d(4, 3 * x, 1, bias=False)),
        images,
    )
    yield "embedding", lambda: axo.nn.Embedding(3, 4, comms=comms), lambda: nn.Embedding(3, 4), ids


def compare(grid, zero):
    comms = axo.connect(grid)
    for what, build, build_serial, whole in cases(comms):
        seed_apart(comms)
        layer = build()
        with torch.random.fork_rng(devices=[]):
            serial_seed()
            serial = build_serial()
        model = nn.Sequential(layer)
        axo.overlap.attach(model, comms, zero=zero)
        is_ids = not whole.is_floating_point()
        mine = my_rows(comms, whole) if is_ids else axo.shard_input(layer, whole).requires_grad_()
        expected = serial(whole)
        expected.square().flatten(1).sum(1).mean().backward()
        for _ in range(2):  # the second pass knows the order of the first
            model.zero_grad()
            output = model(mine)
            output.square().flatten(1).sum(1).mean().backward()
        assert_close(axo.unshard_output(layer, output.detach()), expected, LIMIT, f"{grid} {what}")
        if zero < 2:
            assert_gradients_match(layer, serial, LIMIT, f"{grid} {what}")
        before = layer.full_weight()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        assert_close(before - layer.full_weight(), serial.weight.grad, LIMIT, f"{grid} {what}: step")


@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize("grid", ["1x1x8x1", "4x1x2x1", "1x1x4x2"])
def test_ranks_without_rows(grid, zero):
    run_ranks(compare, 8, grid, zero)
