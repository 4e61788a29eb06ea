"""Embedding against serial nn.Embedding, uneven vocabularies and padding included."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import axo
from tests.launcher import run_ranks
from tests.nn.support import assert_close, assert_gradients_match, my_rows, seed_apart, serial_seed

LIMIT = 1e-6  # look-ups are exact; gradients are means of 24 rows of size 1


def compare_with_serial(grids):
    dist.init_process_group("axo")
    for grid in grids:
        comms = axo.connect(grid)
        # 64 divides, 13 does not, and with 3 entries some ranks hold none
        for vocabulary, padding_idx in ((64, None), (13, 5), (3, -1)):
            what = f"{grid}, vocabulary {vocabulary}"
            seed_apart(comms)
            layer = axo.nn.Embedding(vocabulary, 8, padding_idx, comms=comms)
            with torch.random.fork_rng(devices=[]):
                serial_seed()
                serial = nn.Embedding(vocabulary, 8, padding_idx)
            assert_close(layer.full_weight(), serial.weight, 0, f"{what}: first values")
            generator = torch.Generator().manual_seed(3)
            ids = torch.randint(vocabulary, (24, 5), generator=generator)
            weights = torch.randn(24, 5, 8, generator=generator)
            expected = serial(ids)
            (expected * weights).sum(-1).mean().backward()
            output = layer(axo.shard_input(layer, ids))
            my_weights = my_rows(comms, weights).chunk(comms.grid.y, -1)[comms.coords.y]
            (output * my_weights).sum(-1).mean().backward()
            assert_close(axo.unshard_output(layer, output), expected, 0, f"{what}: output")
            assert_gradients_match(layer, serial, LIMIT, what)
        comms.close()


def test_equals_serial():
    run_ranks(compare_with_serial, 8, ["2x2x2x1", "8x1x1x1", "1x8x1x1", "1x1x8x1", "1x1x1x8", "4x1x2x1"], timeout=120)


def collectives_and_refusals():
    comms = axo.connect("2x2x2x1")
    layer = axo.nn.Embedding(64, 8, comms=comms, name="wte")
    ids = torch.randint(64, (3, 5))
    with axo.count_collectives() as counts:
        layer(ids).sum().backward()
    rows, columns = 64 // 2, 8 // 2
    assert counts == {
        ("all_gather", "z"): (1, rows * columns // 2, 4 * rows * columns // 2),
        ("all_reduce", "x"): (1, 15 * columns, 4 * 15 * columns),
        ("reduce_scatter", "z"): (1, rows * columns, 4 * rows * columns),
    }
    for ids, bad in ((torch.tensor([0, 64]), 64), (torch.tensor([-1]), -1)):
        with pytest.raises(IndexError, match=f"Embedding 'wte': id {bad} is out of range; num_embeddings=64"):
            layer(ids)
    for option in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}):
        with pytest.raises(ValueError, match=f"Embedding: {next(iter(option))}=.* is not supported"):
            axo.nn.Embedding(64, 8, **option, comms=comms)
    with pytest.raises(ValueError, match="embedding_dim=9 does not divide over y=2"):
        axo.nn.Embedding(64, 9, comms=comms)
    with pytest.raises(ValueError, match="padding_idx=64 is not of num_embeddings=64"):
        axo.nn.Embedding(64, 8, 64, comms=comms)
    assert layer(torch.zeros(0, 4, dtype=torch.long)).shape == (0, 4, 4)
    for ids in (torch.ones(2, dtype=torch.bool), torch.ones(2), torch.ones(2, dtype=torch.uint8), [1, 2]):
        with pytest.raises(RuntimeError, match=r"Embedding .wte.: ids are .*; pass a tensor of int64 or int32"):
            layer(ids)
    with pytest.raises(TypeError, match="Linear: the input is a ndarray; pass a tensor"):
        axo.nn.Linear(8, 8, comms=comms)(np.ones((2, 4)))


def test_collectives_and_refusals():
    run_ranks(collectives_and_refusals, 8)
