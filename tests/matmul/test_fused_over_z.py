"""Gathers of weights and reduce-scatters of dW that run chunk by chunk with their products: where, and what comes out.

Oracle: the same model with torch's own products on the same grid (held to serial training elsewhere), for losses and
gradients; the bytes that it moves over each axis, exactly. The tuner's clock is replaced, so that chunks win.
"""

import os

import pytest
import torch
from litgpt.config import Config
from litgpt.model import GPT

import axo
from axo.matmul.products import products_of
from tests.gpt import LLAMA, batch
from tests.launcher import run_ranks
from tests.matmul.test_products import LAYERS, LIMIT, fused_wins, rigged
from tests.nn.support import assert_close, my_rows, seed_apart

OFF = {"all_gather": False, "reduce_scatter": False}
EVEN = LAYERS - 1  # 101 rows of the head do not divide


def step(comms, overlap, no_sync=False):
    """Two steps of a GPT (the second knows the order of gathers): gradients, bytes by collective and axis."""
    config = Config(**LLAMA)
    seed_apart(comms)
    model = axo.parallelize(GPT(config), comms, overlap=axo.Overlap(**overlap))
    found = []
    for number in range(2):
        model.zero_grad()
        ids, _ = batch(config, number)
        if no_sync:
            with axo.no_sync(model):
                model(my_rows(comms, ids)).float().square().mean().backward()
        with axo.count_collectives() as counts:
            model(my_rows(comms, ids)).float().square().mean().backward()
        found.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    moved = {key: count.bytes for key, count in counts.items()}
    shards = {
        name: (module.weight.shape[0], module.matmul.in_axis)
        for name, module in model.named_modules()
        if isinstance(module, axo.nn.Linear)
    }
    return found, moved, {key: count.calls for key, count in counts.items()}, products_of(comms), shards


def with_and_without(grid, overlap, no_sync=False):
    os.environ["AXO_TUNE"] = "off"
    expected, bytes_expected, *_ = step(axo.connect(grid), overlap, no_sync)
    rigged(clock=fused_wins)
    got, moved, calls, products, shards = step(axo.connect(grid), overlap, no_sync)
    assert moved == bytes_expected
    for one, other in zip(got, expected, strict=True):
        for name, gradient in one.items():
            assert_close(gradient, other[name], LIMIT, name)
    over_z = [each for op in ("sum", "avg") for each in products.fused.on("z", op).ran]
    ran = [(each.operation, each.strategy, each.chunks) for each in over_z]
    return calls, {operation for operation, _, _ in ran}, shards


@pytest.mark.parametrize("grid", ["1x1x2x1", "2x1x2x1", "1x1x2x2"])
def test_layers_that_would_wait_run_in_chunks(grid):
    for calls, _, shards in run_ranks(with_and_without, axo.Grid.parse(grid).world_size, grid, OFF):
        # four chunks are tried from 8 rows each on; the head's 101 rows do not divide; the embedding has no product
        scatters = [name for name, (rows, _) in shards.items() if rows >= 32 and name != "lm_head"]
        # a product that sums over x in chunks gathers whole
        gathers = [name for name in scatters if grid[0] == "1" or shards[name][1] != "x"]
        assert len(shards) == LAYERS and gathers
        assert calls["reduce_scatter", "z"] == LAYERS + 1 + 3 * len(scatters)
        assert calls["all_gather", "z"] == LAYERS + 1 + 3 * len(gathers)


def test_what_the_engine_hides_is_not_fused():
    for calls, ran, _ in run_ranks(with_and_without, 2, "1x1x2x1", {}):
        assert not ran
        assert calls["all_gather", "z"] == LAYERS + 1 and calls["reduce_scatter", "z"] == LAYERS + 1


def test_gradients_of_micro_batches_go_with_what_is_there():
    """After ``no_sync`` whole blocks are waiting: the last micro-batch adds to them and scatters the sum."""
    for calls, ran, _ in run_ranks(with_and_without, 2, "1x1x2x1", OFF, True):
        assert calls["reduce_scatter", "z"] == LAYERS + 1
        assert "matmul_reduce_scatter" not in ran


def layer_by_hand(grad_reduce):
    """A layer with an engine of its own: it gathers for itself; autograd.grad wants the gradient at once."""
    comms = axo.connect("1x1x2x2")
    x = torch.randn(12, 24, generator=torch.Generator().manual_seed(comms.rank))
    found = []
    for mode in ("off", "first-step"):
        rigged(mode, clock=fused_wins)
        tuned = axo.connect("1x1x2x2")
        seed_apart(tuned)
        layer = axo.nn.Linear(24, 64, comms=tuned, grad_reduce=grad_reduce)
        with axo.count_collectives() as counts:
            output = layer(x)
            (grad,) = torch.autograd.grad(output.square().sum(), layer.weight)
        found.append((output.detach(), grad, counts["all_gather", "z"], counts["reduce_scatter", "z"]))
        with torch.no_grad():
            assert_close(layer(x), output, LIMIT, "inference")
        fused, report = products_of(tuned).fused.calls, products_of(tuned).fused.report
        assert ["split/" in how for how in report.values()] == (2 * [True] if mode == "first-step" else [])
    (output, grad, gather, scatter), (again, gradient, gathers, scatters) = found
    assert_close(again, output, LIMIT, "output")
    assert_close(gradient, grad, LIMIT, "gradient")
    assert fused == 3 and gather.calls == scatter.calls == 1
    assert gathers.bytes >= gather.bytes and scatters.bytes >= scatter.bytes, "measuring moves bytes too"


@pytest.mark.parametrize("grad_reduce", ["mean", "sum"])
def test_a_layer_by_hand_and_a_gradient_wanted_at_once(grad_reduce):
    run_ranks(layer_by_hand, 4, grad_reduce)


def from_disk(folder):
    """Measured once; a later process finds on rank 0's disk what all ranks then run."""
    os.environ["AXO_TUNE_CACHE"] = f"{folder}/{os.environ['RANK']}"
    found = []
    for mode in ("first-step", "cached"):
        rigged(mode, clock=fused_wins)
        _, _, calls, products, _ = step(axo.connect("1x1x2x1"), OFF)
        found.append((calls["all_gather", "z"], calls["reduce_scatter", "z"], products.tuner.measured))
    return found


def test_choices_are_kept_on_disk(tmp_path):
    for (gathers, scatters, measured), (later, after, none) in run_ranks(from_disk, 2, str(tmp_path)):
        assert later == gathers == 4 * EVEN + 2 and after == scatters == 4 * EVEN + 2
        assert measured > 0 and none == 0


def uneven_from_disk(folder):
    """Ranks of z have 5 and 4 rows; what was measured was for 5."""
    os.environ["AXO_TUNE_CACHE"] = f"{folder}/{os.environ['RANK']}"
    found = []
    for mode in ("first-step", "cached"):
        rigged(mode, clock=fused_wins)
        comms = axo.connect("1x1x2x1")
        seed_apart(comms)
        layer = axo.nn.Linear(48, 64, comms=comms)
        mine = my_rows(comms, torch.randn(9, 48, generator=torch.Generator().manual_seed(0)))
        output = layer(mine)
        output.square().sum().backward()
        assert_close(output, torch.nn.functional.linear(mine, layer.full_weight()) + layer.bias, LIMIT, mode)
        found.append([each.chunks for each in products_of(comms).fused.on("z").ran])
    return found


def test_kept_choices_hold_for_unequal_shares(tmp_path):
    first, second = run_ranks(uneven_from_disk, 2, str(tmp_path))
    assert first == second and first[0][-1:] == [4] and first[1] == [4]
