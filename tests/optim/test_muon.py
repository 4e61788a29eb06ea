"""Muon on the grid: one rank's ``torch.optim.Muon``, whoever makes the products.

Oracle: torch's own optimizer on whole matrices, in bfloat16 as it is, and in fp32 with ``bfloat16`` in its module
standing for float32; where products round alike the results are the same bits. ``cost`` against what was sent.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from litgpt.config import Config
from litgpt.model import GPT
from torch import nn
from torch.optim import _muon

import axo
from axo.optim.muon import cost
from axo.optim.newton_schulz import least_moved, split_axes
from tests import gpt
from tests.launcher import run_ranks
from tests.nn.support import Largest, mean_over_data_ranks, my_rows, seed_apart, serial_seed

NORMAL, TRANSPOSED = (("x", "z"), ("y",)), (("y", "z"), ("x",))
# Wide, tall, square; sizes that do not divide; fewer rows than ranks; more matrices than ranks.
SHAPES = [((24, 40), NORMAL), ((40, 24), TRANSPOSED), ((23, 23), NORMAL), ((37, 10), NORMAL), ((3, 17), TRANSPOSED)]
SHAPES += [((16, 16), NORMAL)] * 4
GRIDS = ["1x1x2x1", "2x1x1x1", "1x2x1x2", "2x1x3x1", "2x2x2x1"]


class _Fp32:
    """``torch`` as torch's Muon sees it, with float32 in the place of bfloat16."""

    bfloat16 = torch.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def torchs_products_in(dtype: torch.dtype) -> Iterator[None]:
    stock = _muon.torch
    _muon.torch = stock if dtype is torch.bfloat16 else _Fp32()
    try:
        yield
    finally:
        _muon.torch = stock


def whole(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def serial(shapes: list[Any], steps: int, dtype: torch.dtype, **options: Any) -> list[torch.Tensor]:
    parameters = [nn.Parameter(whole(shape, seed)) for seed, (shape, _) in enumerate(shapes)]
    optimizer = torch.optim.Muon(parameters, lr=0.05, **options)
    with torchs_products_in(dtype):
        for step in range(steps):
            for seed, parameter in enumerate(parameters):
                parameter.grad = whole(tuple(parameter.shape), 100 * step + seed + 50)
            optimizer.step()
    return [parameter.detach() for parameter in parameters]


def placements(comms: Any, shapes: list[Any], blocks: Any = None, copies: Any = None) -> list[axo.Placement]:
    return [axo.Placement(shape, splits, blocks, comms, copies) for shape, splits in shapes]


def sharded(comms: Any, where: list[axo.Placement], steps: int, method: str, dtype: torch.dtype, **options: Any) -> Any:
    parameters = []
    for seed, placement in enumerate(where):
        parameters.append(nn.Parameter(axo.shard(whole(placement.global_shape, seed), placement)))
        parameters[-1].placement = placement
    optimizer = axo.optim.Muon(parameters, lr=0.05, method=method, ns_dtype=dtype, **options)
    for step in range(steps):
        for seed, parameter in enumerate(parameters):
            full = whole(parameter.placement.global_shape, 100 * step + seed + 50)
            parameter.grad = axo.shard(full, parameter.placement)
        with axo.count_collectives() as counts:
            optimizer.step()
    return parameters, counts


def differences(grid: str, methods: list[str], dtype: torch.dtype, options: dict[str, Any]) -> dict[str, float]:
    """By method."""
    comms = axo.connect(grid)
    expected = serial(SHAPES, 3, dtype, **options)
    apart = {}
    for method in methods:
        parameters, _ = sharded(comms, placements(comms, SHAPES), 3, method, dtype, **options)
        pairs = zip(parameters, expected, strict=True)
        apart[method] = max(float((axo.unshard(p.detach(), p.placement) - full).abs().max()) for p, full in pairs)
    return apart


METHODS = ["gathered", "owned", "distributed", "auto"]


@pytest.mark.parametrize("grid", GRIDS)
def test_equals_torchs_in_fp32(grid: str) -> None:
    options: dict[str, Any] = {"adjust_lr_fn": "match_rms_adamw"} if grid == GRIDS[0] else {}
    options |= {"nesterov": False, "ns_steps": 3} if grid == GRIDS[1] else {}
    world = axo.Grid.parse(grid).world_size
    for apart in run_ranks(differences, world, grid, METHODS, torch.float32, options):
        assert max(apart.values()) <= 1e-5, apart


def test_equals_torchs_to_the_bit_where_one_rank_has_a_matrix_whole() -> None:
    exact = {"gathered": 0.0, "owned": 0.0}
    assert run_ranks(differences, 4, "2x1x2x1", [*exact], torch.bfloat16, {}) == [exact] * 4


def roundings() -> tuple[float, float]:
    comms = axo.connect("2x1x2x1")
    parameters, _ = sharded(comms, placements(comms, SHAPES), 3, "distributed", torch.bfloat16)
    exact, rounded = (serial(SHAPES, 3, dtype) for dtype in (torch.float32, torch.bfloat16))
    ours = [axo.unshard(p.detach(), p.placement) for p in parameters]
    return tuple(
        sum(float((a - b).square().sum()) for a, b in zip(each, exact, strict=True)) for each in (ours, rounded)
    )


def test_distributed_products_round_no_more_than_torchs_in_bfloat16() -> None:
    """Squares of the differences to fp32, beside those of torch's own; partial sums travel in bfloat16."""
    for ours, torchs in run_ranks(roundings, 4):
        assert 0 < ours <= 2 * torchs


def fused(comms: Any, method: str) -> float:
    shapes = [((24, 16), NORMAL), ((16, 16), NORMAL)]
    where = placements(comms, shapes[:1], (16, 4, 4), (1, 2, 2)) + placements(comms, shapes[1:], (8, 4, 4))
    if method == "distributed":
        with pytest.raises(axo.Refused, match=r"'distributed' and a matrix \(24, 16\) of which several ranks have"):
            sharded(comms, where, 1, method, torch.float32)
        where, shapes = where[1:], shapes[1:]
    parameters, _ = sharded(comms, where, 2, method, torch.float32)
    pairs = zip(parameters, serial(shapes, 2, torch.float32), strict=True)
    return max(float((axo.unshard(p.detach(), p.placement) - full).abs().max()) for p, full in pairs)


def fused_by_method() -> dict[str, float]:
    comms = axo.connect("2x1x2x1")
    return {method: fused(comms, method) for method in METHODS}


def test_a_fused_weight_is_the_matrix_that_the_serial_model_has() -> None:
    for apart in run_ranks(fused_by_method, 4):
        assert max(apart.values()) <= 1e-5, apart


def counted(comms: Any, grid: str, method: str) -> None:
    where = placements(comms, SHAPES)
    _, counts = sharded(comms, where, 1, method, torch.float32)
    expected = cost(where, comms.grid, method, itemsize=4, coords=comms.coords)
    assert dict(counts) == expected.sent
    least = [least_moved(each, comms.grid, 5, 4, whole=method == "gathered") for each in where]
    assert expected.moved >= sum(least)
    if method == "gathered" and grid == "1x1x2x1":  # sizes divide, up to padding: a gather is the bound
        assert expected.moved <= 1.2 * sum(least)


def counted_by_method(grid: str) -> None:
    comms = axo.connect(grid)
    for method in METHODS[:3]:
        counted(comms, grid, method)


@pytest.mark.parametrize("grid", ["1x1x2x1", "2x1x3x1", "2x2x2x1"])
def test_what_is_sent_is_what_cost_counts(grid: str) -> None:
    run_ranks(counted_by_method, axo.Grid.parse(grid).world_size, grid)


def largest(comms: Any, shape: tuple[int, int]) -> float:
    (placement,) = placements(comms, [(shape, NORMAL)])
    parameter = nn.Parameter(axo.shard(whole(shape, 0), placement))
    parameter.placement, parameter.grad = placement, axo.shard(whole(shape, 1), placement)
    optimizer = axo.optim.Muon([parameter], method="auto", memory=shape[0] * shape[1])
    with Largest() as seen:
        optimizer.step()
    return seen.elements / math.prod(placement.max_local_shape())


def largest_by_shape(grid: str) -> dict[tuple[int, int], float]:
    comms = axo.connect(grid)
    return {shape: largest(comms, shape) for shape in ((32, 64), (64, 32), (64, 64))}


@pytest.mark.parametrize("grid", ["1x1x4x1", "2x2x2x1"])
def test_a_matrix_too_large_for_a_rank_stays_on_the_grid(grid: str) -> None:
    for held in run_ranks(largest_by_shape, axo.Grid.parse(grid).world_size, grid):
        assert max(held.values()) <= 2, held


LLAMA = gpt.LLAMA | {"n_query_groups": 1}  # keys and values of one head, which both ranks of x hold
ADAMW = {"betas": (0.9, 0.95), "lr": 1e-2}
MUON = {"lr": 1e-2, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}


MIXTURE = LLAMA | {"mlp_class_name": "LLaMAMoE", "n_expert": 6, "n_expert_per_token": 2, "moe_intermediate_size": 48}


@functools.cache
def serial_losses(steps: int, experts: bool = False) -> list[float]:
    """LitGPT's model under torch's pair of optimizers, with Muon's products in fp32."""
    config = Config(**(MIXTURE if experts else LLAMA))
    serial_seed()
    model = GPT(config)
    hidden = [p for name, p in model.named_parameters() if p.dim() == 2 and "transformer.h" in name]
    tables = [model.transformer.wte.weight, model.lm_head.weight]
    vectors = {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}
    pair = [
        torch.optim.Muon(hidden, **MUON),
        torch.optim.AdamW([{"params": tables}, vectors], weight_decay=0.1, **ADAMW),
    ]
    losses = []
    for step in range(steps):
        ids, targets = gpt.batch(config, step)
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with torchs_products_in(torch.float32):
            for optimizer in pair:
                optimizer.step()
                optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def build(comms: Any, method: str, zero: int, sizes: dict[str, Any] = LLAMA) -> tuple[Any, axo.optim.Muon]:
    seed_apart(comms)
    model = axo.parallelize(GPT(Config(**sizes)), comms, zero=zero)
    groups = axo.optim.muon_groups(model, adamw=ADAMW)
    return model, axo.optim.Muon(groups, **MUON, method=method, ns_dtype=torch.float32, memory=1 << 16)


def train(comms: Any, model: Any, optimizer: axo.optim.Muon, steps: range) -> list[float]:
    losses = []
    for step in steps:
        ids, targets = (my_rows(comms, part) for part in gpt.batch(model.config, step))
        loss = axo.nn.cross_entropy(model(ids), targets, comms=comms, columns=model.config.padded_vocab_size)
        loss.backward()
        axo.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_data_ranks(comms, loss))
    return losses


def trained(grid: str, experts: int, *options: Any) -> list[float]:
    comms = axo.connect(grid, experts=experts)
    return train(comms, *build(comms, *options), range(20))


@pytest.mark.parametrize(
    ("grid", "experts", "method", "zero", "sizes"),
    [
        ("2x2x2x1", 1, "auto", 0, LLAMA),
        ("2x1x1x2", 1, "owned", 2, LLAMA),
        ("1x1x2x2", 1, "gathered", 1, LLAMA),
        ("2x1x2x1", 1, "auto", 0, MIXTURE),
        ("2x1x2x1", 2, "auto", 0, MIXTURE),
        ("1x1x2x2", 2, "gathered", 1, MIXTURE),
        ("1x1x1x2", 2, "auto", 0, MIXTURE),
    ],
)
def test_twenty_losses_equal_serial(grid: str, experts: int, method: str, zero: int, sizes: dict[str, Any]) -> None:
    expected = serial_losses(20, sizes is MIXTURE)
    assert expected[-1] < expected[0] - 1
    for losses in run_ranks(trained, axo.Grid.parse(grid).world_size, grid, experts, method, zero, sizes, timeout=120):
        assert losses == pytest.approx(expected, abs=1e-4)


def moved(folder: str, grid: str, zero: int, first: int, last: int) -> list[float]:
    comms = axo.connect(grid)
    model, optimizer = build(comms, "auto", zero)
    if first:
        axo.checkpoint.load(f"{folder}/step-{first:08d}", model, optimizer)
    losses = train(comms, model, optimizer, range(first, last))
    axo.checkpoint.save(folder, model, optimizer, step=last)
    return losses


def test_a_checkpoint_goes_on_on_another_grid(tmp_path: Any) -> None:
    """Momentum and AdamW's moments, from rows of ZeRO to other shards and back."""
    folder, losses = str(tmp_path), list[float]()
    for step, (grid, zero) in enumerate((("2x1x1x2", 1), ("1x2x2x1", 0), ("1x1x1x4", 2))):
        losses += run_ranks(moved, 4, folder, grid, zero, 2 * step, 2 * step + 2)[0]
    assert losses == pytest.approx(serial_losses(6), abs=1e-4)


def test_where_each_way_is_the_cheapest() -> None:
    """A lone matrix is gathered, several are dealt out; to stay on the grid sends more than a gather."""
    grid = axo.Grid(z=4)
    where = axo.Placement((4096, 4096), NORMAL)
    alone = {method: cost([where], grid, method) for method in ("gathered", "owned", "distributed")}
    assert alone["gathered"].moved * 2 == alone["owned"].moved
    assert 15 < alone["distributed"].moved / alone["gathered"].moved <= 20.1
    assert alone["distributed"].flops * 4 == alone["gathered"].flops
    assert alone["distributed"].memory * 2.5 < alone["gathered"].memory
    many = {method: cost([where] * 32, grid, method) for method in alone}
    assert many["owned"].moved * 2 == many["gathered"].moved
    assert many["owned"].flops * 4 == many["gathered"].flops
    assert split_axes(where, grid) == ("z",)


def test_what_is_no_matrix_is_one_error() -> None:
    vector = nn.Parameter(torch.ones(8))
    with pytest.raises(ValueError, match=r"shape \(8,\) is no matrix; .* use_muon=False"):
        axo.optim.Muon([nn.Parameter(torch.ones(8, 8)), vector])
    adamw = axo.optim.Muon([{"params": [vector], "use_muon": False}])
    vector.grad = torch.ones(8)
    copied = copy.deepcopy(adamw)
    copied.param_groups[0]["params"][0].grad = torch.ones(8)
    for optimizer in (adamw, copied):
        optimizer.step()
        assert torch.allclose(optimizer.param_groups[0]["params"][0], torch.full((8,), 1 - 1e-3 * (1 + 0.1)))
    for option, value in (("method", "gatherd"), ("ns_steps", 0), ("lr", -1.0), ("adjust_lr_fn", "rms"), ("memory", 0)):
        with pytest.raises(ValueError, match=f"Muon: {option}="):
            axo.optim.Muon([nn.Parameter(torch.ones(8, 8))], **{option: value})
    with pytest.raises(ValueError, match="muon_groups: adamw='beta' is not known; did you mean 'betas'"):
        axo.optim.muon_groups(nn.Linear(2, 2), adamw={"beta": (0.9, 0.95)})
