"""Layers whose products are in fp8. Oracle: axo_kernels' product of the rank's own operands, which its own tests hold
against fp64, and sums over ranks written out; the exact product within the formats' precision.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import axo
from axo.matmul.cost import total
from axo_kernels.fused import fp8
from axo_kernels.fused.fp8 import matmul_fp8
from tests.kernels.fused.test_fp8 import BACKWARD, FORWARD, error
from tests.launcher import run_ranks


def gathered(weight: torch.Tensor, x: torch.Tensor, grad: torch.Tensor, scaling: str, z: int) -> tuple:
    """The product, and the gradient of ``x`` before its sum, with a weight whose ``z`` shards are rounded apart."""
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    parts = [fp8.rounded(shard, e4m3, scaling, 1) for shard in weight.detach().chunk(z)]
    data = torch.cat([part.data for part in parts])
    scale = torch.cat([part.scale.expand(len(part.data), 1) for part in parts])
    left = fp8.rounded(x.detach(), e4m3, scaling, 1)
    behind = fp8.rounded(grad * scale.T, e5m2, scaling, 1)
    dense = data.double() * scale
    assert error(dense, weight.detach()) < FORWARD
    out = fp8.multiply(left, fp8.Rounded(data.T, scale.T), torch.float32)
    assert error(out, left.data.double() * left.scale @ dense.T) < 1e-6
    return out, fp8.multiply(behind, fp8.Rounded(data, torch.ones(())), torch.float32)


def products_in_fp8(grid: str) -> None:
    comms = axo.connect(grid)
    (x, _, z, _), shards = comms.coords, comms.grid.z
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
        with axo.count_collectives() as counts:
            found = layer(mine)
            found.backward(grads[z][:, block])
        assert counts == total(layer.cost(shards * 32))
        if shards > 1:  # half of bf16's bytes, and 16 a row
            assert counts["all_gather", "z"] == (1, 24 * 80, 24 * 80)
        expected = matmul_fp8(own, weight, "NT", scaling=scaling)
        expected.backward(grads[z][:, block])
        assert own.grad is not None and weight.grad is not None
        if shards > 1:
            out, own.grad = gathered(weight, own, grads[z][:, block], scaling, shards)
            assert scaling == "tensor" or torch.equal(out, expected)  # a row's scale is the same wherever it is
            expected = out
        assert torch.equal(found, expected + serial.bias.detach()[block])
        assert torch.equal(mine.grad, comms.x.all_reduce(own.grad))
        torch.testing.assert_close(layer.weight.grad, comms.z.reduce_scatter(weight.grad, op="avg"))  # transposed there
        assert torch.equal(layer.bias.grad, comms.z.all_reduce(grads[z][:, block].sum(0), "avg"))
        exact = torch.nn.functional.linear(rows[z].double(), *(p.detach().double()[block] for p in serial.parameters()))
        for dtype, bits in ((torch.bfloat16, 8), (torch.float16, 11)):
            with torch.autocast("cpu", dtype):
                half = layer(mine)
            assert half.dtype == dtype and 0.01 < error(half.detach(), exact) < FORWARD + 2**-bits
        if shards > 1:  # some rank has no rows, as experts may
            layer.zero_grad()
            few = rows[z][: 16 * z].clone().requires_grad_()
            found = layer(few)
            found.backward(grads[z][: 16 * z, block])
            assert few.grad is not None and found.shape == (16 * z, 48) and few.grad.shape == few.shape
            mean = grads[1][:16, block].T @ rows[1][:16] / shards
            assert error(layer.weight.grad, mean.chunk(shards)[z]) < 2 * BACKWARD
    whole = nn.Sequential(serial, nn.Tanh(), nn.Linear(96, 64))
    exact = copy.deepcopy(whole).double()(rows[z].double())
    model = axo.parallelize(whole, comms, "auto", fp8="row", gather_cache="none")
    for _ in range(2):  # the second gathers ahead
        with axo.count_collectives() as counts:
            out = model(rows[z])
            out.sum().backward()
        assert 0.01 < error(out.detach(), exact) < 2 * FORWARD
        if shards > 1:  # forward and backward; the first layer's input wants no gradient
            assert counts["all_gather", "z"].bytes == 24 * 80 + 2 * 32 * (48 + 16)
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

    def multiply(a: fp8.Rounded, b: fp8.Rounded, out_dtype: torch.dtype, *, fast: bool = False) -> torch.Tensor:
        sums.append(a.data.shape[1])
        return plain(a, b, out_dtype, fast=fast)

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
