"""shard, unshard, shard_input, unshard_output: round trips, gradients and errors."""

import re
from collections import UserDict
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

import axo
from tests.launcher import run_ranks
from tests.nn.support import my_rows

ROOT = Path(__file__).resolve().parents[1]


def round_trips(grids):
    dist.init_process_group("axo")
    for grid in grids:
        comms = axo.connect(grid)
        for shape, splits, blocks in (
            ((12, 8), (("x", "z"), ("y",)), None),
            ((7, 5), (("x", "z"), ("y",)), None),
            ((7, 5), (("y", "z"), ("x",)), None),
            ((1, 9), (("x", "z"), ("y",)), None),
            ((16, 6), (("x", "z"), ("y",)), (8, 4, 4)),
            ((9,), (("x",),), (4, 3, 2)),
            ((6, 3, 4), (("data", "z"), (), ("y",)), None),
            ((5,), (), None),
        ):
            placement = axo.Placement(shape, splits, blocks, comms)
            full = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
            local = axo.shard(full, placement)
            assert local.is_contiguous() and tuple(local.shape) == placement.local_shape()
            assert torch.equal(axo.unshard(local, placement), full), (grid, shape, blocks)
            local.requires_grad_()
            (axo.unshard(local, placement) * full).sum().backward()
            assert torch.equal(local.grad, local.detach()), "backward takes this rank's part of the gradient"
        comms.close()


def test_round_trips():
    run_ranks(round_trips, 8, ["2x2x2x1", "1x2x2x2"], timeout=120)
    run_ranks(round_trips, 6, ["3x1x2x1", "1x3x2x1"])


def dtensors():
    comms = axo.connect("2x2x2x1")
    layers = [
        axo.nn.Linear(8, 12, comms=comms),
        axo.nn.Linear(8, 12, comms=comms, transposed=True),
        axo.nn.Linear(8, 6, comms=comms),  # 3 rows of the block over z=2
        axo.nn.Embedding(9, 8, comms=comms),
        axo.nn.LayerNorm(8, comms=comms),
    ]
    for layer in layers:
        for parameter in layer.parameters():
            view = axo.to_dtensor(parameter)
            assert view.shape == parameter.placement.global_shape
            assert view.to_local().data_ptr() == parameter.data_ptr()
            assert torch.equal(view.full_tensor(), axo.unshard(parameter.detach(), parameter.placement))
    fused = axo.nn.Linear(8, 16, comms=comms, features=axo.nn.Features(out_blocks=(8, 4, 4)))
    with pytest.raises(ValueError, match=r"row blocks \(8, 4, 4\) are split one by one over x=2"):
        axo.to_dtensor(fused.weight)
    with pytest.raises(ValueError, match="has no placement on a grid"):
        axo.to_dtensor(torch.zeros(2))


def test_dtensors_describe_the_same_shards():
    run_ranks(dtensors, 8)


def activations(grid):
    comms = axo.connect(grid)
    normal = axo.nn.Linear(8, 12, comms=comms)
    fused = axo.nn.Linear(8, 16, comms=comms, features=axo.nn.Features(out_blocks=(8, 4, 4)))
    wte = axo.nn.Embedding(9, 8, comms=comms)
    x = torch.randn(8, 3, 8, generator=torch.Generator().manual_seed(1))
    mine = axo.shard_input(normal, x)
    rows, columns = 8 // (comms.grid.z * comms.grid.data), 8 // comms.grid.y
    assert mine.shape == (rows, 3, columns) and mine.is_contiguous()
    for layer in (normal, fused):
        whole = axo.unshard_output(layer, layer(mine))
        expected = torch.nn.functional.linear(x, layer.full_weight(), axo.unshard(layer.bias, layer.bias.placement))
        assert torch.allclose(whole, expected, atol=1e-6)
    ids = torch.arange(8).view(8, 1) % 9
    assert axo.shard_input(wte, ids).shape == (rows, 1)
    assert torch.equal(axo.unshard_output(wte, wte(axo.shard_input(wte, ids))), wte.full_weight()[ids])
    uneven = torch.full((1 + comms.coords.z, 12 // comms.grid.x), float(comms.coords.z))  # any number of rows a rank
    assert axo.unshard_output(normal, uneven)[:, 0].tolist() == [0.0, 1.0, 1.0]
    with pytest.raises(ValueError, match=r"Linear: shard_input needs a last dim of 8, got \(8, 7\)"):
        axo.shard_input(normal, torch.zeros(8, 7))
    with pytest.raises(ValueError, match=r"the tensor has shape \(3, 3\), its placement says \(12, 8\)"):
        axo.shard(torch.zeros(3, 3), normal)
    with pytest.raises(ValueError, match=r"this rank's part has shape \(3, 3\), its placement says"):
        axo.unshard(torch.zeros(3, 3), normal)
    with pytest.raises(ValueError, match="int is neither a placement nor a parallel layer"):
        axo.shard(x, 3)


def test_activations_and_errors():
    run_ranks(activations, 8, "2x2x2x1")


@dataclass(frozen=True)
class Rows:
    ids: torch.Tensor
    names: list[str]


def batches(grid):
    comms = axo.connect(grid)
    batch = {"ids": torch.arange(8), "pair": (torch.arange(16).view(8, 2), ["a"]), "name": "x"}
    mine = axo.shard_batch(batch, comms)
    expected = my_rows(comms, batch["ids"])
    assert torch.equal(mine["ids"], expected) and torch.equal(mine["pair"][0], my_rows(comms, batch["pair"][0]))
    assert mine["pair"][1] == ["a"] and mine["name"] == "x"
    mapping = axo.shard_batch(UserDict(batch), comms)  # as the BatchEncoding of Hugging Face is
    assert torch.equal(mapping["ids"], expected) and mapping["name"] == "x"
    whole = Rows(batch["ids"], ["a"])
    assert torch.equal(axo.shard_batch(whole, comms).ids, expected) and torch.equal(whole.ids, batch["ids"])
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(2)])
    nested = torch.nested.nested_tensor([torch.ones(2)] * 4, layout=torch.jagged)
    for odd in (packed, nested, torch.eye(4).to_sparse()):
        with pytest.raises(ValueError, match="rows of a packed, nested or sparse batch"):
            axo.shard_batch(odd, comms)
    with pytest.raises(ValueError, match=r"is not what axo\.connect returns"):
        axo.shard_batch(batch, comms.grid)
    with pytest.raises(ValueError, match=r"a Linear is no parameter; pass one, such as layer\.weight"):
        axo.unshard_grad(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"use a multiple of 4 rows"):
        axo.shard_batch(torch.zeros(6, 2), comms)
    layer = axo.nn.Linear(8, 8, comms=comms)
    with pytest.raises(ValueError, match=r"Parameter is neither .*pass its .placement"):
        axo.unshard(layer.weight, layer.weight)
    with pytest.raises(ValueError, match="no gradient"):
        axo.unshard_grad(layer.weight)
    with pytest.warns(UserWarning, match=r"call axo.overlap.attach\(model, comms\)"):
        layer(torch.ones(2, 8 // comms.grid.y)).sum().backward()
    assert axo.unshard_grad(layer.weight).shape == (8, 8)
    follow_the_recipe(comms)


def follow_the_recipe(comms):
    """What docs/plans.md says of batches: every row is read once, by all ranks along x and y."""
    (recipe,) = re.findall(r"## Batches\n.*?```python\n(.*?)```", (ROOT / "docs" / "plans.md").read_text(), re.DOTALL)
    imports = {"DataLoader": DataLoader, "DistributedSampler": DistributedSampler}
    given = {"axo": axo, "comms": comms, "batch": torch.arange(8), "data": torch.arange(8), "rows_of_a_rank": 2}
    exec(recipe, given | imports, found := {})
    assert torch.equal(found["rows"], my_rows(comms, torch.arange(8)))
    (mine,) = found["loader"]
    times = comms.grid.x * comms.grid.y
    read = torch.stack(
        [mine if rank == comms.rank else torch.zeros_like(mine) for rank in range(comms.grid.world_size)]
    )
    assert comms.world.all_reduce(read).flatten().sort().values.tolist() == sorted([*range(8)] * times)


def test_a_batch_is_cut_over_data_and_z():
    run_ranks(batches, 8, "2x1x2x2")
