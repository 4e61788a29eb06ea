"""clip_grad_norm_ against torch.nn.utils on the serial model: every norm, every placement, the same bits everywhere."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from litgpt.config import Config
from litgpt.model import GPT
from torch import nn

import axo
from tests.gpt import LLAMA, batch
from tests.launcher import run_ranks
from tests.nn.support import assert_close, my_rows, serial_seed

NORMS = [1.0, 2.0, 3.0, math.inf]


def parallel_and_serial(comms):
    """Weights over x, y and z; biases over x or y; a norm over y, one over nothing; one parameter outside Axo."""
    layers = nn.ModuleList(
        [
            axo.nn.Linear(16, 24, comms=comms),
            axo.nn.Linear(24, 16, comms=comms, transposed=True),
            axo.nn.Embedding(13, 16, comms=comms),
            axo.nn.LayerNorm(16, comms=comms),
            axo.nn.RMSNorm(6, comms=comms, axis=None),
        ]
    )
    serial = nn.ModuleList(
        [nn.Linear(16, 24), nn.Linear(24, 16), nn.Embedding(13, 16), nn.LayerNorm(16), nn.RMSNorm(6)]
    )
    layers.register_parameter("scale", nn.Parameter(torch.ones(5)))
    serial.register_parameter("scale", nn.Parameter(torch.ones(5)))
    return layers, serial


def give_gradients(layers, serial):
    generator = torch.Generator().manual_seed(4)
    for mine, theirs in zip(layers.parameters(), serial.parameters(), strict=True):
        theirs.grad = torch.randn(theirs.shape, generator=generator)
        placement = getattr(mine, "placement", None)
        mine.grad = theirs.grad.clone() if placement is None else axo.shard(theirs.grad, placement)


def clip(grid):
    comms = axo.connect(grid)
    layers, serial = parallel_and_serial(comms)
    found = []
    for norm_type in NORMS:
        for max_norm in (1.0, 1e6):
            give_gradients(layers, serial)
            expected = torch.nn.utils.clip_grad_norm_(serial.parameters(), max_norm, norm_type)
            norm = axo.clip_grad_norm_(layers.parameters(), max_norm, norm_type)
            found.append(norm.item())
            assert_close(norm, expected, 1e-5, f"{norm_type}-norm")  # fp32 sums of 1,100 squares
            for (name, mine), theirs in zip(layers.named_parameters(), serial.parameters(), strict=True):
                placement = getattr(mine, "placement", None)
                part = theirs.grad if placement is None else axo.shard(theirs.grad, placement)
                assert_close(mine.grad, part, 1e-6, f"{name} clipped by its {norm_type}-norm to {max_norm}")
    for bad in (math.inf, math.nan):
        for norm_type in NORMS:
            give_gradients(layers, serial)
            if comms.rank == comms.grid.x * comms.grid.y * comms.grid.z - 1:  # one rank's shard only
                layers[0].weight.grad.view(-1)[0] = bad
            with pytest.raises(RuntimeError, match="cannot be clipped"):
                axo.clip_grad_norm_(layers.parameters(), 1.0, norm_type, error_if_nonfinite=True)
            serial[0].weight.grad.fill_(bad)
            expected = torch.nn.utils.clip_grad_norm_(serial.parameters(), 1.0, norm_type)
            assert str(axo.clip_grad_norm_(layers.parameters(), 1.0, norm_type).item()) == str(expected.item()), bad
            assert str(layers[1].bias.grad.sum().item()) == str(serial[1].bias.grad.sum().item()), "nan spreads"
    give_gradients(layers, serial)
    layers[0].bias.grad = None
    serial[0].bias.grad = None
    expected = torch.nn.utils.clip_grad_norm_(serial.parameters(), 1.0)
    norm = axo.clip_grad_norm_(list(layers.parameters()), 1.0)
    assert_close(norm, expected, 1e-5, "a parameter without a gradient")
    with pytest.raises(ValueError, match=r"norm_type=0 is not supported; use a positive number or inf"):
        axo.clip_grad_norm_(layers.parameters(), 1.0, 0)
    for wrong in ("x", None):
        with pytest.raises(ValueError, match=rf"norm_type={wrong!r} is not supported; use a positive number or inf"):
            axo.clip_grad_norm_(layers.parameters(), 1.0, wrong)
    as_tensors = torch.tensor(-1.0), torch.tensor(math.nan), torch.ones(2)
    for wrong in (math.nan, -1.0, "1", None, *as_tensors):  # nan and -1 would go into every gradient
        with pytest.raises(ValueError, match=r"max_norm=.* is not a number of at least 0; inf measures"):
            axo.clip_grad_norm_(layers.parameters(), wrong)
    taken = axo.clip_grad_norm_(layers.parameters(), torch.tensor([1.0]))
    assert float(taken) == pytest.approx(1.0, rel=1e-4) and taken.shape == (), "clipped above"
    for wrong in (layers, layers.named_parameters(), layers[0]):
        with pytest.raises(ValueError, match=r"is no parameter; pass model.parameters\(\)"):
            axo.clip_grad_norm_(wrong, 1.0)
    table = torch.nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="a gradient is sparse, and only dense ones are clipped"):  # on every rank
        axo.clip_grad_norm_([*layers.parameters(), *table.parameters()], 1.0)
    return found


@pytest.mark.parametrize("grid", ["2x2x2x1", "1x2x2x2"])
def test_equals_torch_and_has_the_same_bits_on_every_rank(grid):
    found = run_ranks(clip, 8, grid)
    assert all(per_rank == found[0] for per_rank in found)


def clip_apart(norm_type, given):
    comms = axo.connect("2x1x1x2")
    layer = axo.nn.Linear(8, 8, comms=comms)
    errors = []
    for each in given:
        layer.weight.grad = torch.ones_like(layer.weight)
        before = layer.weight.grad.clone()
        try:
            axo.clip_grad_norm_(layer.parameters(), each[comms.rank], norm_type)
            errors.append("")
        except ValueError as error:
            errors.append(str(error))
            assert torch.equal(layer.weight.grad, before), "nothing is scaled"
    return errors


@pytest.mark.parametrize("norm_type", NORMS)
def test_ranks_with_different_limits_are_an_error_on_every_rank(norm_type):
    apart = [(1.0, 1.0, 1.0, 1.000001), (0.5, 1.0, 1.0, 1.5), (1.0, math.inf, 1.0, 1.0), (0.0, 0.0, 1e-5, 0.0)]
    alike = [(each,) * 4 for each in (0.0, 1e-9, 0.1, 1.0, 7.0, 1e9, math.inf)]
    for found in run_ranks(clip_apart, 4, norm_type, [*apart, *alike]):
        for error in found[: len(apart)]:
            assert error.startswith("clip_grad_norm_: ranks were given different values of max_norm (this one: "), found
        assert found[len(apart) :] == [""] * len(alike)


class Images(nn.Module):
    """Convolutions of the grid, and modules that every rank keeps whole."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, bias=False)
        self.norm, self.gate, self.head = nn.GroupNorm(2, 8), nn.PReLU(8), nn.Linear(16, 6)

    def forward(self, x):
        return self.head(self.second(self.gate(self.norm(self.first(x)))).flatten(1))


def images(comms, stage):
    serial_seed()
    serial = Images()
    model = axo.parallelize(copy.deepcopy(serial), comms, plan="auto", zero=stage)
    x = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    return serial, model, lambda: serial(x).square().mean(), lambda: model(my_rows(comms, x)).square().mean()


def shared(comms, stage):
    """A head tied to the embedding, one key-value head for all ranks of x, norms of tokens that are split over x."""
    serial_seed()
    config = Config(**LLAMA | {"n_layer": 1, "n_query_groups": 1, "bias": True})
    serial = GPT(config)
    serial.lm_head.weight = serial.transformer.wte.weight
    model = axo.parallelize(copy.deepcopy(serial), comms, sequence_parallel=True, zero=stage)
    ids, targets = batch(config, 0)

    def parallel_loss():
        logits = model(my_rows(comms, ids))
        return axo.nn.cross_entropy(logits, my_rows(comms, targets), comms=comms, columns=config.padded_vocab_size)

    return serial, model, lambda: F.cross_entropy(serial(ids).flatten(0, 1), targets.flatten()), parallel_loss


def placed(parameter, tensor):
    """This rank's part of a whole gradient, as ZeRO-2 leaves it where it does."""
    placement = parameter.placement
    return axo.shard(tensor, placement if parameter.grad.shape == parameter.shape else placement.state)


def clip_models(grid, kind, stage):
    comms = axo.connect(grid)
    serial, model, serial_loss, parallel_loss = kind(comms, stage)
    serial_loss().backward()
    parallel_loss().backward()
    whole = [parameter.grad.clone() for parameter in serial.parameters()]
    found = []
    for norm_type in (1.0, 2.0, math.inf):
        for parameter, theirs, grad in zip(model.parameters(), serial.parameters(), whole, strict=True):
            parameter.grad.copy_(placed(parameter, grad))
            theirs.grad.copy_(grad)
        expected = torch.nn.utils.clip_grad_norm_(serial.parameters(), 1e-2, norm_type)
        norm = axo.clip_grad_norm_(model.parameters(), 1e-2, norm_type)
        assert_close(norm, expected, 1e-5, f"{norm_type}-norm")
        for (name, parameter), theirs in zip(model.named_parameters(), serial.parameters(), strict=True):
            assert_close(
                parameter.grad, placed(parameter, theirs.grad), 1e-6, f"{name} clipped by its {norm_type}-norm"
            )
        found.append(norm.item())
    last = [parameter for parameter in model.parameters() if parameter.grad.numel()][-1]
    for bad in (math.inf, math.nan):
        for norm_type in (1.0, 2.0, math.inf):
            if comms.rank == 0:
                last.grad.view(-1)[-1] = bad
            with pytest.raises(RuntimeError, match="cannot be clipped"):
                axo.clip_grad_norm_(model.parameters(), 1.0, norm_type, error_if_nonfinite=True)
    return found


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("kind", [images, shared], ids=["images", "shared"])
def test_every_placement_with_zero_and_without(kind, stage):
    """Oracle: torch on the serial model, its gradients given to both."""
    found = run_ranks(clip_models, 4, "2x1x1x2", kind, stage)
    assert all(per_rank == found[0] for per_rank in found)


@pytest.mark.soak
@pytest.mark.parametrize("grid", ["2x2x1x2", "1x2x2x2", "2x1x2x2", "1x1x1x8", "8x1x1x1"])
@pytest.mark.parametrize("kind", [images, shared], ids=["images", "shared"])
def test_every_placement_on_more_grids(kind, grid):
    for stage in (0, 1, 2):
        found = run_ranks(clip_models, 8, grid, kind, stage)
        assert all(per_rank == found[0] for per_rank in found)
