"""LayerNorm and RMSNorm over a split hidden dim against torch.nn and litgpt."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import axo
from axo.nn.replicated import replicate
from tests.launcher import run_ranks
from tests.nn.support import assert_close, assert_gradients_match, my_rows, seed_apart

LIMIT = 1e-5  # values and gradients of size 1, sums over 24 features and 40 rows in fp32


def kinds(comms):
    """(parallel layer, serial layer) for every option."""
    yield axo.nn.LayerNorm(24, comms=comms), nn.LayerNorm(24)
    yield axo.nn.LayerNorm((24,), 1e-3, bias=False, comms=comms), nn.LayerNorm((24,), 1e-3, bias=False)
    yield axo.nn.LayerNorm(24, elementwise_affine=False, comms=comms), nn.LayerNorm(24, elementwise_affine=False)
    yield axo.nn.RMSNorm(24, comms=comms), nn.RMSNorm(24)
    yield axo.nn.RMSNorm(24, 1e-3, False, comms=comms), nn.RMSNorm(24, 1e-3, False)


def compare(comms, layer, serial, x, weights, limit, what):
    with torch.no_grad():  # ones and zeros would hide a wrong slice
        for parameter in serial.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(9)))
        layer.load_serial(serial)
    axis = layer.in_axis
    x = x.clone().requires_grad_()
    expected = serial(x)
    (expected * weights).sum(-1).mean().backward()
    mine = axo.shard_input(layer, x.detach()).transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    output = layer(mine)
    my_weights = my_rows(comms, weights).chunk(comms.grid.size(axis), -1)[getattr(comms.coords, axis)]
    (output * my_weights).sum(-1).mean().backward()
    assert output.dtype == expected.dtype
    assert_close(axo.unshard_output(layer, output), expected, limit, f"{what}: output")
    parts = comms.grid.z * comms.grid.data
    assert_close(mine.grad / parts, axo.shard_input(layer, x.grad), limit, f"{what}: gradient of input")
    assert_gradients_match(layer, serial, limit, what)


def compare_with_serial(grids):
    from litgpt.model import RMSNorm as LitRMSNorm

    from axo.plans.litgpt.plan import LitRMSNorm as Parallel

    dist.init_process_group("axo")
    for grid in grids:
        comms = axo.connect(grid)
        seed_apart(comms)
        generator = torch.Generator().manual_seed(5)
        x, weights = torch.randn(8, 5, 24, generator=generator), torch.randn(8, 5, 24, generator=generator)
        pairs = [*kinds(comms), (Parallel(24, 1e-6, add_unit_offset=True, comms=comms), LitRMSNorm(24, -1, 1e-6, True))]
        for layer, serial in pairs:
            compare(comms, layer, serial, x, weights, LIMIT, f"{grid} {serial}")
        # A mean of 100 deviations: squares around anything but the mean would lose four digits.
        compare(comms, axo.nn.LayerNorm(24, comms=comms), nn.LayerNorm(24), x + 100, weights, 2e-4, f"{grid} far off")
        double = axo.nn.LayerNorm(24, dtype=torch.float64, comms=comms), nn.LayerNorm(24, dtype=torch.float64)
        compare(comms, *double, x.double(), weights.double(), 1e-14, f"{grid} fp64")
        half = axo.nn.RMSNorm(24, dtype=torch.bfloat16, comms=comms), nn.RMSNorm(24, dtype=torch.bfloat16)
        # bf16 results: an ulp of values up to 4, and of weight gradients rounded once more
        compare(comms, *half, x.bfloat16(), weights.bfloat16(), 4e-2, f"{grid} bf16")
        compare(comms, axo.nn.RMSNorm(24, axis="x", comms=comms), nn.RMSNorm(24), x, weights, LIMIT, f"{grid} over x")
        comms.close()


def test_equals_serial():
    run_ranks(compare_with_serial, 8, ["2x2x2x1", "1x4x1x2", "8x1x1x1", "1x8x1x1", "1x1x8x1"], timeout=120)


def whose_own():
    dist.init_process_group("axo")
    for grid, own in (("2x1x1x1", True), ("1x2x1x1", False), ("1x1x2x1", False)):
        comms = axo.connect(grid)
        layer = axo.nn.LayerNorm(8, comms=comms)
        output = layer(torch.randn(3, layer.local_features, requires_grad=True))
        assert ("_Normalize" not in output.grad_fn.name()) == own, grid
        comms.close()


def test_a_layer_norm_that_communicates_nothing_is_torchs_own():
    run_ranks(whose_own, 2)


def heads_over_x(grid):
    """A norm over each head, heads split over x: one weight, replicated, its gradient summed over x."""
    comms = axo.connect(grid)
    layer = axo.nn.RMSNorm(6, comms=comms, axis=None, sum_grad_over=("x",))
    serial = nn.RMSNorm(6)
    generator = torch.Generator().manual_seed(5)
    x, weights = torch.randn(4, 8, 6, generator=generator), torch.randn(4, 8, 6, generator=generator)
    (serial(x) * weights).sum((1, 2)).mean().backward()
    mine, my_weights = (my_rows(comms, t).chunk(comms.grid.x, 1)[comms.coords.x] for t in (x, weights))
    (layer(mine) * my_weights).sum((1, 2)).mean().backward()
    assert_gradients_match(layer, serial, LIMIT, grid)
    tied = nn.LayerNorm(6)
    tied.weight = replicate(nn.LayerNorm(6), comms, sum_over=("x",)).weight
    with pytest.raises(ValueError, match=r"over no axis, but another module .* summed over \('x',\); give each module"):
        replicate(tied, comms)


def test_norm_of_heads():
    run_ranks(heads_over_x, 8, "4x1x2x1")


def collectives_and_refusals():
    comms = axo.connect("2x2x2x1")
    x = torch.randn(3, 5, 8)
    for layer, forward in ((axo.nn.RMSNorm(16, comms=comms), 1), (axo.nn.LayerNorm(16, comms=comms), 2)):
        with axo.count_collectives() as counts:
            layer(x.clone().requires_grad_()).sum().backward()
        assert set(counts) == {("all_reduce", "y"), ("all_reduce", "z")}
        # one number a token and sum, in fp32, forward and backward
        assert counts["all_reduce", "y"] == (forward + 1, 15 * 2 * forward, 4 * 15 * 2 * forward)
        assert counts["all_reduce", "z"].elements == 8 * forward  # the weight, and the bias of LayerNorm
    with pytest.raises(
        ValueError, match="RMSNorm 'ln_f': normalized_shape=15 does not divide over y=2; use normalized_shape=14 or 16"
    ):
        axo.nn.RMSNorm(15, comms=comms, name="ln_f")
    with pytest.raises(ValueError, match=r"normalized_shape=\(4, 4\) has 2 dims; use one"):
        axo.nn.LayerNorm((4, 4), comms=comms)
    with pytest.raises(ValueError, match=r"must end in 8, this rank's part of 16 over y=2"):
        axo.nn.LayerNorm(16, comms=comms)(torch.zeros(2, 16))


def test_collectives_and_refusals():
    run_ranks(collectives_and_refusals, 8)
