"""Weights that several ranks or several layers share: key-value heads with fewer groups than x, and tied embeddings.

Oracle: the unmodified serial litgpt.GPT with the same values, in one process.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from litgpt.config import Config
from litgpt.model import GPT

import axo
from axo.grid import Coords, Grid
from axo.matmul import cost
from axo.placement import Placement
from tests.gpt import LLAMA, NEOX, batch
from tests.launcher import run_ranks
from tests.nn.support import (
    assert_close,
    assert_gradients_match,
    gradients_of,
    mean_over_data_ranks,
    my_rows,
    once,
    seed_apart,
    serial_seed,
)

LIMIT = 1e-5  # fp32, losses of size 5 and gradients below 1: sums in another order move them by 1e-6
STEPS = 4

# Falcon's one group; two groups for four ranks; norms of queries and keys, whose gradients meet over x.
GROUPS = {
    "one group": {**NEOX, "n_query_groups": 1},
    "two groups": {**LLAMA, "n_query_groups": 2, "norm_qk": True},
}


def tie(model):
    model.lm_head.weight = model.transformer.wte.weight
    return model


def train_serial(config, tied):
    """The oracle: loss, gradients and their norm of each step, then the weights."""
    serial_seed()
    serial = GPT(config)
    if tied:
        tie(serial)
        serial.apply(serial._init_weights)  # small values, so that the losses are of size 5
    optimizer, steps = torch.optim.SGD(serial.parameters(), lr=0.5), []
    for step in range(STEPS):
        ids, targets = batch(config, step)
        loss = F.cross_entropy(serial(ids).flatten(0, 1), targets.flatten())
        loss.backward()
        gradients = gradients_of(serial)
        steps.append((loss.item(), gradients, torch.nn.utils.clip_grad_norm_(serial.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return steps, serial.state_dict(), {name: parameter.detach() for name, parameter in serial.named_parameters()}


def compare(comms, config, tied=False, meta=False):
    """Train both on the same batches with clipping; compare losses, every gradient and the final weights."""
    config = Config(**config)
    what = f"{comms.grid}{' tied' if tied else ''}"
    with torch.random.fork_rng(devices=[]):
        steps, state, weights = once(partial(train_serial, config, tied))
    seed_apart(comms)
    with torch.device("meta" if meta else "cpu"):
        model = GPT(config)
        if tied:
            tie(model)
    axo.parallelize(model, comms)
    if tied:
        if meta and comms.rank == 0:
            serial_seed()
            tie(GPT(config))  # moves the generator to where the serial program's stands
        axo.init_weights(model, model._init_weights)
    assert not tied or model.lm_head.weight is model.transformer.wte.weight, f"{what}: the tie is broken"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step, (expected, gradients, norm) in enumerate(steps):
        ids, targets = batch(config, step)
        logits = model(my_rows(comms, ids))
        loss = axo.nn.cross_entropy(logits, my_rows(comms, targets), comms=comms, columns=config.padded_vocab_size)
        loss.backward()
        found = mean_over_data_ranks(comms, loss)
        assert abs(found - expected) <= LIMIT, f"{what}: loss {found} is not {expected} at step {step}"
        assert_gradients_match(model, gradients, LIMIT, f"{what}, step {step}")
        clipped = axo.clip_grad_norm_(model.parameters(), 0.5)
        assert_close(clipped, norm, LIMIT, f"{what}: norm of the gradients at step {step}")
        optimizer.step()
        optimizer.zero_grad()
    for name, whole in weights.items():
        mine = model.get_parameter(name)
        assert_close(axo.unshard(mine.detach(), mine.placement), whole, LIMIT, f"{what}: {name} after {STEPS} steps")
    model.load_state_dict(state)
    for name, whole in weights.items():
        mine = model.get_parameter(name)
        assert_close(axo.unshard(mine.detach(), mine.placement), whole, 0, f"{what}: {name} loaded")


def key_value_heads(grids):
    dist.init_process_group("axo")
    for grid in grids:
        comms = axo.connect(grid)
        for config in GROUPS.values():
            compare(comms, config)
        comms.close()


def test_key_value_heads_shared_by_neighbours_equal_serial():
    run_ranks(key_value_heads, 8, ["4x1x2x1"])


@pytest.mark.soak
def test_key_value_heads_shared_by_neighbours_equal_serial_on_more_grids():
    run_ranks(key_value_heads, 4, ["4x1x1x1"])
    run_ranks(key_value_heads, 8, ["8x1x1x1", "4x2x1x1", "4x1x1x2", "2x2x2x1"], timeout=300)
    run_ranks(key_value_heads, 16, ["4x2x2x1", "8x1x2x1"], timeout=300)


def ties(grids, meta):
    dist.init_process_group("axo")
    for grid in grids:
        comms = axo.connect(grid)
        compare(comms, {**LLAMA, "scale_embeddings": True}, tied=True, meta=meta)
        comms.close()


def test_tied_embeddings_equal_serial():
    run_ranks(ties, 8, ["2x2x2x1"], True)


@pytest.mark.soak
@pytest.mark.parametrize("meta", [False, True])
def test_tied_embeddings_equal_serial_on_more_grids(meta):
    run_ranks(ties, 8, ["8x1x1x1", "1x8x1x1", "1x1x8x1", "1x1x1x8", "2x1x2x2", "4x2x1x1"], meta, timeout=300)


def separate_projections(grid):
    """Keys in a projection of their own, shared by pairs: gradients, bias, gathering, and the calls of cost()."""
    comms = axo.connect(grid)
    with torch.random.fork_rng(devices=[]):
        serial_seed()
        serial = torch.nn.Linear(8, 12)
    seed_apart(comms)
    layer = axo.nn.Linear(8, 12, comms=comms, features=axo.nn.Features((12,), (2,)))
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    weights = torch.randn(comms.grid.x, 8, 6, generator=torch.Generator().manual_seed(2))  # what each rank makes of it
    features = slice(6 * (comms.coords.x // 2), 6 * (comms.coords.x // 2) + 6)
    with axo.count_collectives() as counts:
        output = layer(axo.shard_input(layer, x))
        (output * my_rows(comms, weights[comms.coords.x])).sum(1).mean().backward()
    expected = cost.linear(
        comms.grid, 8, 8, 12, input_grad=False, copied_features=12, copies=2, coords=comms.coords, bias=True
    )
    assert counts == cost.total(expected), f"{counts} is not {cost.total(expected)}"
    assert_close(axo.unshard_output(layer, output.detach()), serial(x), LIMIT, "output")
    both = torch.stack([weights[0] + weights[1], weights[2] + weights[3]], 1).reshape(8, 12)
    (serial(x) * both).sum(1).mean().backward()
    assert_gradients_match(layer, serial, LIMIT, grid)
    assert features.stop <= 12 and torch.equal(layer.full_weight(), serial.weight)
    total = axo.clip_grad_norm_(layer.parameters(), 1e9)
    assert_close(total, torch.nn.utils.clip_grad_norm_(serial.parameters(), 1e9), LIMIT, "norm of the gradients")
    for p in (1.0, float("inf")):
        mine, whole = axo.clip_grad_norm_(layer.parameters(), 1e9, p), torch.nn.utils.get_total_norm
        assert_close(mine, whole([q.grad for q in serial.parameters()], p), LIMIT, f"{p}-norm")
    gathered = axo.nn.Linear(8, 12, comms=comms, features=axo.nn.Features((12,), (2,), gather_output=True))
    gathered.load_state_dict(serial.state_dict())
    serial.zero_grad()
    serial(x).square().sum(1).mean().backward()
    gathered(axo.shard_input(gathered, x)).square().sum(1).mean().backward()
    assert_gradients_match(gathered, serial, 1e-4, "gathered")


def test_a_projection_shared_by_pairs():
    run_ranks(separate_projections, 8, "4x2x1x1")
    run_ranks(separate_projections, 8, "4x1x2x1")


def test_placement_of_copies_is_exact():
    """Oracle: index arithmetic by hand. x=4 over q (8 rows), k and v (4 rows each, shared by pairs), then z=3."""
    grid = Grid(x=4, z=3)
    where = Placement((16, 2), (("x", "z"),), (8, 4, 4), None, (1, 2, 2))
    full = torch.arange(32).view(16, 2)
    counted = torch.zeros(16)
    for rank in range(grid.world_size):
        coords = grid.coords(rank)
        pair = coords.x // 2
        block = [2 * coords.x, 2 * coords.x + 1, 8 + 2 * pair, 9 + 2 * pair, 12 + 2 * pair, 13 + 2 * pair]
        rows = block[2 * coords.z : 2 * coords.z + 2]
        mine = where.take(full, grid, coords)
        assert mine[:, 0].tolist() == [2 * row for row in rows]
        assert where.copied_rows(grid, coords) == ([(0, 2)] if coords.z else [])
        for a, b in where.counted_rows(grid, coords):
            counted[rows[a:b]] += 1
    assert torch.equal(counted, torch.ones(16)), "a row is counted twice or never"
    assert where.without("z").copied_rows(grid, Coords(3, 0, 0, 0)) == [(2, 6)]
    assert where.without("x").blocks is None
    for copies in [(1, 2), (1, 2, 4), (0, 1, 1)]:
        with pytest.raises(ValueError, match="copies="):
            Placement((16,), (("x",),), (8, 4, 4), None, copies)
