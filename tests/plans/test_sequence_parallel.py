"""Tokens split over x between layers: training equals serial, the bytes stay, the activations of norms shrink.

Oracles: the serial litgpt.GPT; ``axo.matmul.cost``; and the same model without sequence parallelism.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from litgpt.config import Config
from litgpt.model import GPT

import axo
from axo.matmul import cost
from tests.gpt import BATCH, LLAMA, NEOX, TOKENS, batch
from tests.launcher import run_ranks
from tests.nn.support import (
    assert_close,
    assert_gradients_match,
    mean_over_data_ranks,
    my_rows,
    seed_apart,
    serial_seed,
)

LIMIT = 1e-5
FIELDS = {"llama": LLAMA, "neox": NEOX}


def build(comms, fields, **options):
    seed_apart(comms)
    config = Config(**fields)
    return config, axo.parallelize(GPT(config), comms, **options)


def step(comms, model, config, number=0):
    ids, targets = batch(config, number)
    logits = model(my_rows(comms, ids))
    assert logits.shape[1] == TOKENS
    loss = axo.nn.cross_entropy(logits, my_rows(comms, targets), comms=comms, columns=config.padded_vocab_size)
    loss.backward()
    return loss


def train(grids, steps, models=tuple(FIELDS)):
    dist.init_process_group("axo")
    for grid in grids:
        comms = axo.connect(grid)
        for name in models:
            fields = FIELDS[name]
            config, model = build(comms, fields, sequence_parallel=True)
            with torch.random.fork_rng(devices=[]):
                serial_seed()
                serial = GPT(config)
            optimizers = [torch.optim.AdamW(gpt.parameters(), lr=4e-4) for gpt in (model, serial)]
            for number in range(steps):
                ids, targets = batch(config, number)
                expected = F.cross_entropy(serial(ids).flatten(0, 1), targets.flatten())
                expected.backward()
                found = mean_over_data_ranks(comms, step(comms, model, config, number))
                assert abs(found - expected.item()) <= LIMIT, f"{grid} {name}: loss {found} is not {expected}"
                if number == 0:
                    assert_gradients_match(model, serial, LIMIT, f"{grid} {name}")
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        comms.close()


def test_losses_and_gradients_equal_serial():
    run_ranks(train, 8, ["2x2x2x1"], 2, ["neox"])


@pytest.mark.soak
def test_twenty_losses_equal_serial_on_more_grids():
    run_ranks(train, 8, ["8x1x1x1", "4x1x1x2", "2x4x1x1", "1x2x2x2", "4x1x2x1"], 20, timeout=300)


def on_a_ring(counts, grid):
    """Bytes that a rank sends over x: 2 (G-1)/G of an all-reduce's, half of it for the other two."""
    g = grid.x
    return (
        2 * (g - 1) / g * counts["all_reduce", "x"].bytes
        + (g - 1) / g * counts["reduce_scatter", "x"].bytes
        + (g - 1) * counts["all_gather", "x"].bytes
    )


def predicted(grid, config, coords):
    """The calls of one step of a NeoX-like model, from the cost of each layer."""
    rows, h, f = BATCH * TOKENS // grid.data, config.n_embd, config.intermediate_size
    options = {"sequence_parallel": True, "coords": coords}
    block = [
        *cost.norm(grid, rows, h, **options) * 2,
        *cost.gather_sequence(grid, rows, h, coords=coords) * 2,
        *cost.linear(grid, rows, h, 3 * h, **options),
        *cost.linear(grid, rows, h, h, transposed=True, **options),
        *cost.linear(grid, rows, h, f, **options),
        *cost.linear(grid, rows, f, h, transposed=True, **options),
    ]
    return cost.total(
        [
            *cost.embedding(grid, rows, config.padded_vocab_size, h, **options),
            *block * config.n_layer,
            *cost.norm(grid, rows, h, **options),
            *cost.gather_sequence(grid, rows, h, coords=coords),
            *cost.linear(grid, rows, h, config.padded_vocab_size, False, **options),
            *cost.cross_entropy(grid, rows, coords=coords),
        ]
    )


def bytes_and_activations(grid):
    comms = axo.connect(grid)
    found, saved = {}, {}
    for split in (False, True):
        config, model = build(comms, {**NEOX, "parallel_residual": False}, sequence_parallel=split)
        seen = []
        for module in model.modules():
            if isinstance(module, axo.nn.LayerNorm):
                module.register_forward_hook(lambda module, args, output, seen=seen: seen.append(args[0].numel()))
        with axo.count_collectives() as counts:
            step(comms, model, config)
        found[split], saved[split] = counts, seen
    assert found[True] == predicted(comms.grid, config, comms.coords), "cost() is not what was counted"
    assert [comms.grid.x * size for size in saved[True]] == saved[False], "norms do not keep 1/Gx of the activations"
    # What is new: the gradients of the weights of norms and of the biases of transposed layers are summed over x.
    vectors = config.n_embd // comms.grid.y * (2 * (2 * config.n_layer + 1) + 2 * config.n_layer)
    extra = 2 * (comms.grid.x - 1) / comms.grid.x * 4 * vectors
    assert on_a_ring(found[True], comms.grid) == on_a_ring(found[False], comms.grid) + extra
    for axis in ("z", "data"):
        assert found[True].total(axis=axis) == found[False].total(axis=axis)
    messages = []
    ids = my_rows(comms, batch(config, 0)[0])[:, :-1]
    with pytest.raises(ValueError) as error:
        model(ids)
    messages.append(str(error.value))
    return messages


def test_the_same_bytes_and_a_part_of_the_activations():
    for grid in ("4x2x1x1", "2x2x2x1"):
        for (message,) in run_ranks(bytes_and_activations, 8, grid):
            assert f"Embedding 'transformer.wte': sequence length={TOKENS - 1} does not divide over x=" in message


def layers_and_dropout(grid):
    """A block by hand: gather, normal, transposed, dropout, norm; masks differ over x and the sums are right."""
    comms = axo.connect(grid)
    torch.manual_seed(5)
    dropout = axo.nn.Dropout(0.5, comms=comms, split=("x", "y", "z", "data"))
    masks = comms.x.all_gather((dropout(torch.ones(4, 8)) > 0).float())
    assert not torch.equal(masks[:4], masks[4:8]), "tokens of different ranks are dropped alike"
    with torch.autocast("cpu", torch.bfloat16):
        x = torch.randn(3, 4, 8 // comms.grid.y, requires_grad=True)
        whole = axo.nn.sequence.gather_sequence(x, comms)
        assert whole.dtype == torch.bfloat16 and whole.shape[1] == 4 * comms.grid.x
        layer = axo.nn.Linear(8, 8, comms=comms, transposed=True, features=axo.nn.Features(sequence_parallel=True))
        out = layer(torch.randn(3, 4 * comms.grid.x, 8 // comms.grid.x))
        out.float().sum().backward()
    assert out.dtype == torch.bfloat16 and layer.bias.grad.dtype == torch.float32
    assert_close(layer.bias.grad, torch.full_like(layer.bias, 3 * 4 * comms.grid.x), 0, "gradient of the bias")
    whole = axo.nn.sequence.scatter_sequence(axo.nn.sequence.gather_sequence(x, comms) / comms.grid.x, comms)
    assert_close(whole, x, 1e-6, "gather, then scatter")
    with pytest.raises(ValueError, match="sequence parallelism needs"):
        layer(torch.zeros(8 // comms.grid.x))


def test_layers_by_hand():
    run_ranks(layers_and_dropout, 4, "2x2x1x1")
