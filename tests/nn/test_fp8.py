"""Layers whose products are in fp8. Oracle: axo_kernels' product of the rank's own operands, which its own tests hold
against fp64, and sums over ranks written out; the exact product within the formats' precision.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import axo
from axo_kernels.fused import fp8
from axo_kernels.fused.fp8 import matmul_fp8
from tests.kernels.fused.test_fp8 import FORWARD, error
from tests.launcher import run_ranks


def products_in_fp8(grid: str) -> None:
    comms = axo.connect(grid)
    x, z = comms.coords.x, comms.coords.z
    torch.manual_seed(0)
    serial = nn.Linear(64, 96)
    rows, grads = torch.randn(comms.grid.z, 32, 64), torch.randn(comms.grid.z, 32, 96)
    block = slice(96 // comms.grid.x * x, 96 // comms.grid.x * (x + 1))
    for scaling in ("row", "tensor"):
        layer = axo.nn.Linear(64, 96, comms=comms)
        layer.load_serial(serial)
        layer.use_fp8(scaling)
        mine, own = (rows[z].clone().requires_grad_() for _ in range(2))
        weight = serial.weight.detach()[block].clone().requires_grad_()
        found, expected = layer(mine), matmul_fp8(own, weight, "NT", scaling=scaling) + serial.bias.detach()[block]
        assert torch.equal(found, expected)
        found.backward(grads[z][:, block])
        expected.backward(grads[z][:, block])
        assert own.grad is not None and weight.grad is not None
        assert torch.equal(mine.grad, comms.x.all_reduce(own.grad))
        torch.testing.assert_close(layer.weight.grad, comms.z.reduce_scatter(weight.grad, op="avg"))  # transposed there
        assert torch.equal(layer.bias.grad, comms.z.all_reduce(grads[z][:, block].sum(0), "avg"))
        exact = torch.nn.functional.linear(rows[z].double(), *(p.detach().double()[block] for p in serial.parameters()))
        for dtype, bits in ((torch.bfloat16, 8), (torch.float16, 11)):
            with torch.autocast("cpu", dtype):
                half = layer(mine)
            assert half.dtype == dtype and 0.01 < error(half.detach(), exact) < FORWARD + 2**-bits
    whole = nn.Sequential(serial, nn.Tanh(), nn.Linear(96, 64))
    exact = copy.deepcopy(whole).double()(rows[z].double())
    model = axo.parallelize(whole, comms, "auto", fp8="row")
    assert 0.01 < error(model(rows[z]), exact) < 2 * FORWARD
    for options, message in (
        ({"fp8": "block"}, r"fp8='block' is not known; use one of \(None, 'tensor', 'row'\)"),
        ({"fp8": "row"}, "Linear.*: fp8='row' with .* of .*_features on a rank .*, no multiple of 16; pad the model"),
    ):
        with pytest.raises(ValueError, match=message):
            axo.parallelize(nn.Sequential(nn.Linear(24, 40)), comms, "auto", **options)
    comms.close()


@pytest.mark.parametrize("grid", ["2x1x2x1", "1x1x1x1"])
def test_products_in_fp8(grid: str) -> None:
    run_ranks(products_in_fp8, axo.Grid.parse(grid).world_size, grid)


def rows_of_any_number() -> None:
    comms = axo.connect("1x1x1x1")
    torch.manual_seed(0)
    sums = []

    def multiply(a: fp8.Rounded, b: fp8.Rounded, out_dtype: torch.dtype) -> torch.Tensor:
        sums.append(a.data.shape[1])
        return plain(a, b, out_dtype)

    plain, fp8.multiply = fp8.multiply, multiply
    for scaling in ("row", "tensor"):
        for rows in (1, 13, 16, 33):
            layer = axo.nn.Linear(32, 48, comms=comms)
            layer.use_fp8(scaling)
            x, grad = torch.randn(rows, 32), torch.randn(rows, 48)
            weight = layer.weight.detach().clone().requires_grad_()
            matmul_fp8(x, weight, "NT", scaling=scaling).backward(grad)
            sums.clear()
            layer(x).backward(grad)
            assert sums == [32, -(-rows // 16) * 16]  # no gradient of x is wanted
            torch.testing.assert_close(layer.weight.grad, weight.grad)  # zeros may change the order of the sum
    fp8.multiply = plain
    comms.close()


def test_rows_of_any_number() -> None:
    """The gradient of the weight sums over rows: what reaches the GPU's product must be a multiple of 16."""
    run_ranks(rows_of_any_number, 1)
