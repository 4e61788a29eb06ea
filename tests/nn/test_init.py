"""First values and memory: every grid starts from the serial values, and no rank holds more than its part."""

import gc
import math
from types import FunctionType, MethodType, ModuleType

import pytest
import torch
from litgpt.config import Config
from litgpt.model import GPT
from torch import nn

import axo
from tests.gpt import LLAMA, NEOX, batch
from tests.launcher import run_ranks
from tests.nn.support import assert_close, my_rows, seed_apart, serial_seed


def first_values(grid):
    comms = axo.connect(grid)
    seed_apart(comms)
    before = torch.get_rng_state()
    layers = [
        axo.nn.Linear(16, 32, comms=comms),
        axo.nn.Embedding(13, 16, 2, comms=comms),
        axo.nn.LayerNorm(16, comms=comms),
        axo.nn.Linear(32, 16, bias=False, comms=comms, transposed=True),
    ]
    after = torch.get_rng_state()
    with torch.random.fork_rng(devices=[]):
        serial_seed()
        serial = [nn.Linear(16, 32), nn.Embedding(13, 16, 2), nn.LayerNorm(16), nn.Linear(32, 16, bias=False)]
        for layer, oracle in zip(layers, serial, strict=True):
            for name, parameter in oracle.named_parameters():
                mine = layer.get_parameter(name)
                assert_close(mine, axo.shard(parameter.detach(), mine.placement), 0, f"{oracle} {name}")
        if comms.rank == 0:
            assert torch.equal(after, torch.get_rng_state()), "rank 0 does not stand where the serial program would"
        for layer in layers:  # again, from rank 0's generator as it is now
            layer.reset_parameters()
    if comms.rank:
        assert torch.equal(before, after)


def test_first_values_equal_serial():
    run_ranks(first_values, 8, "2x2x2x1")


def draws_after_a_layer(grid):
    comms = axo.connect(grid)
    for seed in (0, 7 + comms.coords.data):  # one seed for all, and one for each data rank
        torch.manual_seed(seed)
        axo.nn.Linear(16, 32, comms=comms)
        axo.nn.LayerNorm(16, comms=comms)
        drawn = torch.randn(4).repeat(comms.grid.x, 1)
        for axis in ("x", "y", "z"):
            found = comms.axis(axis).all_gather(drawn)
            assert torch.equal(found[: len(drawn)].expand_as(found[-len(drawn) :]), found[-len(drawn) :]), axis
        if seed == 0:
            torch.manual_seed(0)
            nn.Linear(16, 32)
            nn.LayerNorm(16)
            assert torch.equal(drawn[0], torch.randn(4)), "not where the serial program stands"


def test_building_a_layer_moves_generators_alike():
    """After one seed everywhere, x and y peers go on to draw the same batch."""
    run_ranks(draws_after_a_layer, 8, "2x2x1x2")


def scaled_by_name(module, name):
    """As litgpt's pretrain: another deviation for the projections."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.01 if name.endswith("proj") else 0.02)
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)


def fill_serial(config, fill):
    with torch.random.fork_rng(devices=[]):
        serial_seed()
        with torch.device("meta"):
            serial = GPT(config)
        serial.to_empty(device="cpu")
        fill(serial)
        serial.reset_parameters()  # the rotary cache
        return serial


def by_name(model, prefix=""):
    """Children first, as Module.apply."""
    for name, child in model.named_children():
        by_name(child, f"{prefix}{name}.")
    scaled_by_name(model, prefix[:-1])


def meta_models(grid):
    comms = axo.connect(grid)
    for fields in (LLAMA, NEOX):
        config = Config(**fields)
        for names in (False, True):
            seed_apart(comms)
            before = torch.get_rng_state()
            with torch.device("meta"):
                model = axo.parallelize(GPT(config), comms)
            fill = by_name if names else lambda gpt: gpt.apply(gpt._init_weights)
            serial = fill_serial(config, fill)
            axo.init_weights(model, scaled_by_name if names else model._init_weights, with_names=names)
            for (name, mine), theirs in zip(model.named_parameters(), serial.parameters(), strict=True):
                if "norm" in name or "ln_f" in name:  # not touched: what a new norm has, not the serial's garbage
                    theirs = (torch.zeros if name.endswith("bias") else torch.ones)(theirs.shape)
                assert_close(mine, axo.shard(theirs.detach(), mine.placement), 0, name)
            assert torch.equal(model.cos, serial.cos)
            assert comms.rank == 0 or torch.equal(before, torch.get_rng_state())
            # On a real model fn changes what it touches and leaves the rest.
            norm = model.transformer.ln_f.weight
            with torch.no_grad():
                norm.fill_(3.0)
            axo.init_weights(model, model._init_weights)
            assert (norm == 3).all() and not (model.lm_head.weight == mine).all()


def test_init_weights_equals_serial_apply():
    run_ranks(meta_models, 8, "2x2x2x1")


def reachable_storage(root, skip=()):
    """Bytes of every tensor storage that can be reached from ``root`` through Python objects, gradients included."""
    seen, storages, todo = set(), {}, [root]
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, type | ModuleType | FunctionType | MethodType) or thing in skip:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor) and not thing.is_meta:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            if thing.grad is not None:
                todo.append(thing.grad)
        todo.extend(gc.get_referents(thing))
    return sum(storages.values())


class Anything:
    """Makes ``in`` compare by identity."""

    def __init__(self, *things):
        self._ids = {id(thing) for thing in things}

    def __contains__(self, thing):
        return id(thing) in self._ids


def largest_share(model, grid):
    """The bound: ceil(numel / (Gx Gy Gz)) of a matrix, a vector's split, and the rotary cache, in bytes."""
    elements = sum(buffer.numel() for buffer in model.buffers())
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            elements += math.ceil(parameter.numel() / (grid.x * grid.y * grid.z))
        else:
            over_x = any(part in name for part in ("qkv", "fc", "lm_head"))
            elements += parameter.numel() // (grid.x if over_x else grid.y)
    return 4 * elements


def held_between_steps(grid, meta):
    comms = axo.connect(grid)
    config = Config(**{**NEOX, "padded_vocab_size": 104})
    seed_apart(comms)
    gc.freeze()  # what was there before is not looked at again
    with torch.device("meta"):
        serial = GPT(config)
    bound = largest_share(serial, comms.grid)
    with torch.device("meta" if meta else "cpu"):
        model = axo.parallelize(GPT(config), comms)
    if meta:
        alive = []
        whole = 4 * max(p.numel() + p.shape[0] for p in serial.parameters())  # the largest layer with its bias

        def fill(module):
            gc.collect()
            alive.append(sum_alive())
            model._init_weights(module)

        axo.init_weights(model, fill)
        assert max(alive) <= bound + whole + 2 * 5056 + 64  # and the states of two generators
    skip = Anything(comms)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        ids, targets = batch(config, step)
        loss = axo.nn.cross_entropy(model(my_rows(comms, ids)), my_rows(comms, targets), comms=comms)
        loss.backward()
        optimizer.step()
        held = reachable_storage(model, skip)
        optimizer.zero_grad()
        del loss
        shards = reachable_storage(model, skip)
        gradients = sum(4 * parameter.numel() for parameter in model.parameters())
        assert shards <= bound, (shards, bound)
        assert shards < held <= bound + gradients, "the audit misses gradients, or something else is held"
    with torch.random.fork_rng(devices=[]):
        whole_model = reachable_storage(GPT(config))
    assert whole_model > 3 * bound, "the audit would pass a whole model"


def sum_alive():
    """Bytes of all tensor storages made since ``gc.freeze``."""
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and not thing.is_meta:
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("meta", [True, False])
def test_a_rank_holds_its_part_and_no_more(meta):
    run_ranks(held_between_steps, 8, "2x2x2x1", meta)
