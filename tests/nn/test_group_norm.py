"""GroupNorm over split channels against torch.nn."""

import pytest
import torch
from torch import nn

import axo
from axo.matmul import cost
from tests.launcher import run_ranks
from tests.nn.support import assert_close, assert_gradients_match, my_rows, seed_apart

LIMIT = 1e-5  # values and gradients of size 1, sums over 40 pixels and 8 images in fp32


def equals_serial(grid):
    comms = axo.connect(grid)
    seed_apart(comms)
    generator = torch.Generator().manual_seed(5)
    x, weights = torch.randn(8, 16, 5, 2, generator=generator) + 3, torch.randn(8, 16, 5, 2, generator=generator)
    for axis, dtype, affine in (("x", None, True), ("y", torch.float64, True), (None, None, True), ("x", None, False)):
        what, limit = f"{grid} {axis} {dtype} {affine}", LIMIT if dtype is None else 1e-13
        serial = nn.GroupNorm(4, 16, 1e-3, affine, dtype=dtype)
        layer = axo.nn.GroupNorm(4, 16, 1e-3, affine, dtype=dtype, comms=comms, axis=axis)
        with torch.no_grad():  # ones and zeros would hide a wrong slice
            for parameter in serial.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(9)))
            layer.load_serial(serial)
        whole = x.to(dtype).requires_grad_() if dtype else x.clone().requires_grad_()
        expected = serial(whole)
        (expected * weights).flatten(1).sum(1).mean().backward()
        mine = axo.shard_input(layer, whole.detach()).to(memory_format=torch.channels_last).requires_grad_()
        with axo.count_collectives() as counts:
            output = layer(mine)
            my_weights = my_rows(comms, weights).chunk(comms.grid.size(axis) if axis else 1, 1)
            part = getattr(comms.coords, axis) if axis else 0
            (output * my_weights[part]).flatten(1).sum(1).mean().backward()
        assert_close(axo.unshard_output(layer, output.detach()), expected, limit, f"{what}: output")
        parts = comms.grid.z * comms.grid.data
        assert_close(mine.grad / parts, axo.shard_input(layer, whole.grad), limit, f"{what}: gradient of input")
        assert_gradients_match(layer, serial, limit, what)
        if dtype is None:
            assert counts == cost.total(layer.cost()), f"{what}: {counts}"
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(axo.shard_input(layer, x).bfloat16()).dtype == torch.bfloat16
    if comms.grid.x > 1:
        with pytest.raises(ValueError, match="GroupNorm 'norm': num_groups=1 does not divide over x=2"):
            axo.nn.GroupNorm(1, 16, comms=comms, name="norm")
        with pytest.raises(ValueError, match=r"must be \(N, 8, H, W\), with this rank's part of num_channels=16"):
            axo.nn.GroupNorm(4, 16, comms=comms)(torch.zeros(1, 16, 2, 2))
    comms.close()


def on_grids(*grids):
    torch.distributed.init_process_group("axo")
    for grid in grids:
        equals_serial(grid)


def test_equals_serial():
    run_ranks(on_grids, 4, "2x2x1x1", "1x1x2x2", "2x1x2x1")
