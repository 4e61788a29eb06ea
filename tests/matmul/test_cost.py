"""``cost()`` of every layer: what ``axo.count_collectives`` saw, and equations (4) to (8) of the papers.

The convolution's is compared in ``test_conv``; a whole model's, with buckets, in ``tests/perf/test_counted.py``.
"""

import pytest
import torch
from torch import nn

import axo
from axo.matmul import cost
from bench.papers.equations import layer_times, ring_seconds
from tests.launcher import run_ranks

ROWS = 16  # of one data-parallel group


def layers(comms):
    """(name, layer, input of this rank, options of cost) of each kind, with what changes their cost."""
    grid = comms.grid
    mine, x, y = ROWS // grid.z, grid.x, grid.y

    def rows(width):
        return torch.randn(mine, width, requires_grad=True)

    def linear(*sizes, transposed=False, gather_cache="all", **features):
        features = axo.nn.Features(**features)
        return axo.nn.Linear(*sizes, comms=comms, transposed=transposed, gather_cache=gather_cache, features=features)

    ids = torch.randint(26, (mine,))
    yield "linear", linear(24, 32), rows(24 // y), {}
    yield "transposed, without bias", linear(24, 32, False, transposed=True), rows(24 // x), {}
    yield "uneven", linear(24, 37, uneven_out=True), rows(24 // y), {}
    yield "without cache", linear(24, 32, gather_cache="none"), rows(24 // y), {}
    yield "first", linear(24, 32, gather_cache="none"), rows(24 // y).detach(), {"input_grad": False}
    yield "whole activations", linear(24, 32, scatter_input=True, gather_output=True), rows(24), {}
    shared = {"out_blocks": (32, 8, 8), "out_copies": (1, x, x)}
    yield "shared heads", linear(24, 48, **shared), rows(24 // y), {}
    yield "sequence parallel", linear(24, 32, sequence_parallel=True), rows(24 // y), {}
    yield "sequence parallel, transposed", linear(24, 32, transposed=True, sequence_parallel=True), rows(24 // x), {}
    yield "embedding", axo.nn.Embedding(26, 8, comms=comms), ids, {}
    yield "embedding, uneven", axo.nn.Embedding(27, 8, comms=comms, gather_output=True), ids, {}
    yield "embedding, sequence parallel", axo.nn.Embedding(26, 8, comms=comms, sequence_parallel=True), ids, {}
    yield "layer norm", axo.nn.LayerNorm(16, comms=comms), rows(16 // y), {}
    yield "layer norm, no bias", axo.nn.LayerNorm(16, bias=False, comms=comms), rows(16 // y), {}
    yield "RMS norm, no weight", axo.nn.RMSNorm(16, elementwise_affine=False, comms=comms), rows(16 // y), {}
    yield "of heads", axo.nn.RMSNorm(16, comms=comms, axis=None, sum_grad_over=("x",)), rows(16), {}


def count(grid):
    comms = axo.connect(grid)
    torch.manual_seed(2)
    found = 0
    for name, layer, given, options in layers(comms):
        for dtype in (None, torch.bfloat16):
            takes_dtype = isinstance(layer, nn.Linear)
            if dtype is not None and not takes_dtype:
                continue
            with axo.count_collectives() as counts, torch.autocast("cpu", dtype, enabled=dtype is not None):
                layer(given).float().sum().backward()
            size = {"itemsize": 2 if dtype else 4, "input_itemsize": 4} if takes_dtype else {}
            expected = cost.total(layer.cost(ROWS, **size, **options))
            assert counts == expected, f"{name}, {dtype}, rank {comms.rank}: {counts} is not {expected}"
            found += len(counts)
    for smoothing in (0.0, 0.1):
        loss = axo.nn.CrossEntropyLoss(comms=comms, columns=32, label_smoothing=smoothing)
        logits = torch.randn(ROWS // comms.grid.z, 32 // comms.grid.x, requires_grad=True)
        with axo.count_collectives() as counts:
            loss(logits, torch.zeros(len(logits), dtype=torch.long)).backward()
        assert counts == cost.total(loss.cost(ROWS)), "cross-entropy"
    return found


@pytest.mark.parametrize("grid", ["2x2x2x1", "1x2x2x2"])
def test_is_what_was_counted(grid):
    assert all(run_ranks(count, 8, grid))


@pytest.mark.soak
@pytest.mark.parametrize("grid", ["8x1x1x1", "4x2x1x1", "2x1x2x2", "1x1x8x1", "1x1x1x8", "1x4x1x2", "2x1x4x1"])
def test_is_what_was_counted_on_more_grids(grid):
    assert all(run_ranks(count, 8, grid))


def attached(grid):
    """Layers of one engine: the reductions of another dtype, and what stays whole on every rank."""
    comms = axo.connect(grid)
    found = []
    for dtype in (None, torch.bfloat16):
        torch.manual_seed(2)
        net = axo.parallelize(
            nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(32, 4)),
            comms,
            plan="auto",
            reduce_dtype=dtype,
            overlap=axo.Overlap(bucket_bytes=0),
        )
        images = torch.randn(ROWS // comms.grid.z, 3, 4, 4)
        net(images)  # ranks compare something once
        with axo.count_collectives() as counts:
            net(images).sum().backward()
        calls = [*net[0].cost(ROWS, 4, 4, input_grad=False), *net[1].cost(), *net[3].cost(ROWS)]
        assert counts == cost.total(calls), f"{dtype}: {counts} is not {cost.total(calls)}"
        found.append(sum(call.bytes for call in calls if call.phase == cost.BACKWARD))
    return found


@pytest.mark.parametrize("grid", ["2x1x2x2", "1x2x1x4"])
def test_of_an_engine_that_reduces_in_another_dtype(grid):
    for plain, half in run_ranks(attached, 8, grid):
        assert half < plain


def equations(grid):
    """Seconds of a bias-less layer's cost() by the ring formulas against the equations, with sizes that divide."""
    comms = axo.connect(grid)
    for transposed in (False, True):
        layer = axo.nn.Linear(32, 48, bias=False, comms=comms, transposed=transposed)
        calls = layer.cost(64, itemsize=1)
        found = sum(ring_seconds(c.op, comms.grid.size(c.axis), c.elements, 1.0) for c in calls)
        expected = layer_times(comms.grid, 64, 32, 48, 1.0, transposed=transposed).total
        assert found == pytest.approx(expected, rel=1e-12)
    return True


@pytest.mark.parametrize("grid", ["2x2x2x1", "1x2x2x2"])
def test_is_equations_4_to_8(grid):
    run_ranks(equations, 8, grid)
