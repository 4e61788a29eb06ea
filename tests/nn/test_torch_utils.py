"""torch's utilities on a parallel model. Oracle: the same call on the serial model; what cannot be right is refused.

Each row of the table in docs/overlap.md has its part here.
"""

import contextlib
import copy
import functools
import gc
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_ as imported_early
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import axo
from tests.launcher import run_ranks
from tests.nn.support import assert_close


def models(comms, zero=0):
    torch.manual_seed(0)
    serial = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8))
    model = axo.parallelize(copy.deepcopy(serial), comms, plan="auto", zero=zero)
    return serial, model


def backward(serial, model, comms):
    batch = torch.rand(8, 8, generator=torch.Generator().manual_seed(1))
    serial(batch).square().sum(1).mean().backward()
    model(axo.shard_batch(batch, comms)).square().sum(1).mean().backward()


def norms(grid, zero):
    comms = axo.connect(grid)
    for norm_type in (2.0, 1.0, float("inf")):
        for call in (imported_early, torch.nn.utils.clip_grad_norm_):
            serial, model = models(comms, zero)
            backward(serial, model, comms)
            expected = torch.nn.utils.get_total_norm([p.grad for p in serial.parameters()], norm_type)
            found = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()], norm_type)
            assert_close(found, expected, 1e-5, f"get_total_norm {norm_type}")
            assert_close(call(serial.parameters(), 0.1, norm_type), expected, 1e-6, "torch's own on a serial model")
            assert_close(call(model.parameters(), 0.1, norm_type), expected, 1e-5, f"clip_grad_norm_ {norm_type}")
            for parameter, oracle in zip(model.parameters(), serial.parameters(), strict=True):
                assert_close(axo.unshard_grad(parameter), oracle.grad, 1e-5, "clipped gradient")
    assert_close(
        torch.nn.utils.get_total_norm(model.parameters()),
        torch.nn.utils.get_total_norm(serial.parameters()),
        1e-4,
        "weights",
    )


@pytest.mark.parametrize(("grid", "zero"), [("2x2x1x1", 0), ("1x2x2x1", 0), ("2x1x1x2", 2)])
def test_norms_are_of_the_whole_model(grid, zero):
    run_ranks(norms, 4, grid, zero)


def others(grid):
    comms = axo.connect(grid)
    serial, model = models(comms)
    for call in (
        lambda: nn.utils.parameters_to_vector(model.parameters()),
        lambda: nn.utils.vector_to_parameters(torch.zeros(8 * 16), model.parameters()),
    ):
        with pytest.raises(ValueError, match=r"axo.unshard\(p, p.placement\)"):
            call()
    assert nn.utils.parameters_to_vector(serial.parameters()).numel() == sum(p.numel() for p in serial.parameters())
    averages = [AveragedModel(each, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for each in (serial, model)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (serial, model)]
    for _ in range(3):
        backward(serial, model, comms)
        for optimizer, average, each in zip(optimizers, averages, (serial, model), strict=True):
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(each)
    for oracle, parameter in zip(averages[0].module.parameters(), averages[1].module.parameters(), strict=True):
        assert_close(axo.unshard(parameter.detach(), parameter.placement), oracle, 1e-5, "moving average")
    x = torch.rand(8, 8, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = axo.shard_batch(averages[0](x), comms)
        assert_close(averages[1](axo.shard_batch(x, comms)), expected, 1e-5, "forward of the average")


def test_vectors_are_refused_and_averages_are_right():
    run_ranks(others, 4, "2x1x2x1")


def one_parameter(grid):
    """Norms and penalties by hand."""
    comms = axo.connect(grid)
    serial, model = models(comms)
    weight = model[0].weight
    shard = model[0].placements["weight"].take(serial[0].weight)
    assert shard.norm() < 0.9 * serial[0].weight.norm(), "nothing to tell apart"
    assert_close(weight.clone().std(), shard.std(), 1e-6, "as the table says: of the shard")
    backward(serial, model, comms)
    for own in (weight, weight.detach(), weight.data, weight.grad, weight.grad.data):
        with pytest.raises(axo.Refused, match=r"of which this rank holds .* of \(16, 8\).*get_total_norm.*axo.unshard"):
            own.norm(2)
    own = [shard, weight.detach().clone(), axo.unshard_grad(weight)]  # memory of their own
    assert_close(torch.stack([each.norm() for each in own[:2]]), shard.norm().expand(2), 1e-6, "a copy")
    assert_close(own[2].norm(), serial[0].weight.grad.norm(), 1e-5, "norm of the whole gradient")
    assert_close(torch.nn.utils.get_total_norm([weight.grad]), own[2].norm(), 1e-6, "get_total_norm of a gradient")
    assert_close(torch.nn.utils.get_total_norm([weight]), serial[0].weight.norm(), 1e-6, "get_total_norm of one")
    assert_close(axo.unshard(weight, weight.placement).norm(), serial[0].weight.norm(), 1e-6, "norm of the whole")
    whole = [whole_norm, lambda p: axo.unshard(p, p.placement).abs().max()]
    for penalty, oracle in (
        (whole[0], lambda p: p.norm()),
        (whole[1], lambda p: p.abs().max()),
        (lambda p: p.square().sum(), lambda p: p.square().sum()),
    ):
        serial, model = models(comms)
        for each, term in ((serial, oracle), (model, penalty)):
            sum(term(p) for p in each.parameters()).backward()
        backward(serial, model, comms)
        for parameter, each in zip(model.parameters(), serial.parameters(), strict=True):
            assert_close(axo.unshard_grad(parameter), each.grad, 1e-5, "gradient of a penalty")
    # elementwise: clipping by value, and the decay of an optimizer
    serial, model = models(comms)
    backward(serial, model, comms)
    for each in (serial, model):
        nn.utils.clip_grad_value_(each.parameters(), 0.01)
        nn.utils.clip_grads_with_norm_(each.parameters(), 0.1, torch.tensor(0.5))
        torch.optim.AdamW(each.parameters(), lr=0.1, weight_decay=0.5).step()
    for parameter, each in zip(model.parameters(), serial.parameters(), strict=True):
        assert_close(axo.unshard_grad(parameter), each.grad, 1e-5, "clipped by value")
        assert_close(axo.unshard(parameter.detach(), parameter.placement), each, 1e-4, "decayed")


def whole_norm(parameter):
    return axo.unshard(parameter, parameter.placement).norm()


READS = {
    "mean": lambda p: p.mean(), "std": lambda p: p.std(False), "both": lambda p: p.amax(dim=()),
    "quantile": lambda p: p.quantile(0.5), "norm": lambda p: p.norm(),
    "norm of data": lambda p: p.data.flatten().norm(),
    "norm of a gradient": lambda p: p.grad.norm(), "histc": lambda p: p.histc(4), "mask": lambda p: p[p > 0],
    "whole data": lambda p: setattr(p, "data", torch.ones(16, 8)),
}  # fmt: skip
BY_NUMBER = (
    {"row": lambda p: p[7], "write": lambda p: p.__setitem__((0, slice(None)), 0.0)},
    {"column": lambda p: p[:, 3], "write": lambda p: p.__setitem__((slice(None), 0), 0.0)},
)
READS_OF_THE_PART = {
    "clone": lambda p: p.clone().mean(), "elementwise": lambda p: torch.max(p, p), "all": lambda p: p[:, None],
    "slices": lambda p: p[:2, 1:], "function": lambda p: torch.std(p), "gradient": lambda p: p.grad.abs().max(),
    "printed": repr, "part of data": lambda p: setattr(p, "data", p.detach() * 1), "a loss's": lambda p: p.sum(),
    "shape": lambda p: p.detach().numpy().shape, "another's": lambda p: torch.rand(p.shape).mean(),
    "copy": copy.deepcopy,
}  # fmt: skip


def reads(grid):
    """What a program reads of a split weight, before and after a step; whole ones are torch's business."""
    comms = axo.connect(grid)
    serial, model = models(comms)
    backward(serial, model, comms)
    weight, along = model[0].weight, {"2x1x1x1": 0, "1x2x1x1": 1}[grid]
    for what, read in (READS | BY_NUMBER[along]).items():
        with pytest.raises(axo.Refused, match=r"'weight' of Linear '0', of which .* of \(16, 8\).*axo\."):
            read(weight)
            pytest.fail(what)
        with torch.no_grad():
            read(serial[0].weight)
    assert_close(weight.mean(1 - along), weight.clone().mean(1 - along), 1e-6, "along a dim that is whole")
    with pytest.raises(axo.Refused):
        weight.mean(along)
    for read in (*READS_OF_THE_PART.values(), next(iter(BY_NUMBER[1 - along].values()))):
        read(weight)
    torch.optim.AdamW(model.parameters(), lr=0.1).step()
    with pytest.raises(axo.Refused, match=r"Linear '3': weight is tied .* of \(16, 8\).*before axo.parallelize"):
        model[3].weight = weight


@pytest.mark.parametrize("grid", ["2x1x1x1", "1x2x1x1"])
def test_reads_of_a_part_are_refused(grid):
    run_ranks(reads, 2, grid)


def traced(grid):
    """What compilers make of functions that look at their tensor."""
    comms = axo.connect(grid)
    serial, model = models(comms)
    x = torch.rand(8, 8)
    same = torch.compile(lambda x: torch.mean(x) + x.max() + x.norm() + x.std(), backend="eager", fullgraph=True)
    assert_close(same(x), x.mean() + x.max() + x.norm() + x.std(), 1e-6, "compiled")
    both = torch.vmap(lambda x: x.mean() + torch.linalg.norm(x))(x[None])
    assert_close(both[0], x.mean() + x.norm(), 1e-6, "vmap")
    backward(serial, model, comms)


def test_functions_that_look_at_parts_are_traced():
    run_ranks(traced, 2, "2x1x1x1")


PENALTIES = {
    "norm": torch.norm, "square": lambda p: torch.norm(p) ** 2, "method": lambda p: p.norm(),
    "mean": lambda p: p.abs().mean(), "root": lambda p: 0.1 * p.square().sum().sqrt(),
    "largest": lambda p: p.abs().max(), "spectral": lambda p: torch.linalg.svdvals(p.flatten(1)).max(),
    "mse": lambda p: nn.functional.mse_loss(p, torch.zeros_like(p)), "foreach": lambda p: torch._foreach_norm([p])[0],
}  # fmt: skip
PENALTIES_OF_ELEMENTS = {
    "sum": lambda p: 0.1 * p.square().sum() / 3,
    "mean of sums": lambda p: torch.stack([p.square().sum(), p.abs().sum()]).mean(),
    "sum of sizes": lambda p: p.norm(1) + torch.norm(p, 1),
    "mean of one": lambda p: 0.1 * (p.reshape(1, -1) @ p.reshape(-1, 1)).squeeze().mean(),
    "mean of dots": lambda p: 0.1 * torch.stack([torch.dot(p.flatten(), p.flatten())]).mean(),
    "mean of torch's": lambda p: torch.stack([nn.functional.mse_loss(p, torch.zeros_like(p), reduction="sum")]).mean(),
}


def penalties(grid):
    """Refused, warned of once, or right without a word; after steps too, and for as long as there is a model."""
    comms = axo.connect(grid)
    split = comms.grid.data == 1
    batch = torch.rand(8, 8, generator=torch.Generator().manual_seed(1))
    engine, hidden = torch.autograd._engine_run_backward, []

    def loss(model, penalty):
        model[2].register_forward_hook(lambda *call: hidden.append(call[-1]))
        rows = axo.shard_batch(batch, comms) if axo.nn.layer.is_parallel(model) else batch
        return model(rows).square().sum(1).mean() + penalty(model[0].weight)

    for name, penalty in PENALTIES.items():
        serial, model = models(comms)
        if name == "norm":
            backward(serial, model, comms)
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            losses = [loss(model, lambda p: 0) for _ in range(40)]  # whose backward is still to come
            (looks,) = [each for each in torch.autograd._engine_run_backward.watched if each._model() is model]
            assert any(hidden[0].grad_fn._sequence_nr() in numbers for numbers in looks.passes)
            assert len(looks.passes) < 20
            sum(losses).backward()
        with (
            pytest.raises(
                axo.Refused, match=r"of ('weight' of Linear '0'|'0.weight').*of which.*axo.unshard.*take p.square"
            )
            if split
            else Silence()
        ):
            loss(model, penalty).backward()
            assert not split, name
    for name, penalty in PENALTIES_OF_ELEMENTS.items():
        serial, model = models(comms)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for each in (serial, model, model):
                loss(each, penalty).backward()
        assert ["the loss takes '0.weight'" in str(one.message) for one in said] == [True] * split, name
        assert_close(axo.unshard_grad(model[0].weight), 2 * serial[0].weight.grad, 1e-5, name)
    _, model = models(comms)
    right = (
        lambda p: axo.unshard(p, p.placement).norm(),
        lambda p: hidden[-1].norm(),
        lambda p: p.detach().clone().std(),
    )
    with Silence():
        for penalty in right:
            loss(model, penalty).backward()
    del serial, model, each, losses, looks
    hidden.clear()
    gc.collect()
    torch.ones(1, requires_grad=True).backward()
    assert torch.autograd._engine_run_backward is engine


class Deep(nn.Module):
    """More nodes than a loss may have."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        x = self.layer(x)
        for _ in range(2100):
            x = x * 1.0
        return x


def deep(grid):
    comms = axo.connect(grid)
    model = axo.parallelize(Deep(), comms, plan="auto")
    x = axo.shard_batch(torch.ones(8, 8), comms)
    model(x).mean().backward()
    loss = model.layer.weight.square().mean() + model(x).mean()
    with pytest.raises(axo.Refused, match=r"the loss takes Mean of 'layer\.weight'"):
        loss.backward()


def test_a_pass_is_no_part_of_its_loss():
    run_ranks(deep, 2, "2x1x1x1")


class Silence(warnings.catch_warnings):
    def __enter__(self):
        super().__enter__()
        warnings.simplefilter("error")


@pytest.mark.parametrize("grid", ["2x1x1x1", "1x2x1x1", "1x1x2x1", "1x1x1x2"])
def test_a_loss_of_a_part_is_refused_and_a_sum_of_elements_is_not(grid):
    run_ranks(penalties, 2, grid)


def scaler_and_first_values(grid):
    comms = axo.connect(grid)
    serial, model = models(comms)
    split = comms.grid.x * comms.grid.z > 1
    refused = pytest.raises(ValueError, match=r"axo\.GradScaler") if split else contextlib.nullcontext()
    backward(serial, model, comms)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    with refused:
        scaler.step(optimizer)
    own = axo.GradScaler(init_scale=1.0, comms=comms)
    own.scale(torch.ones(()))
    own.step(optimizer)
    sparse = functools.partial(nn.init.sparse_, sparsity=0.5)
    fans = (nn.init.xavier_uniform_, nn.init.xavier_normal_, nn.init.kaiming_uniform_, nn.init.kaiming_normal_)
    for draw in (*fans, nn.init.orthogonal_, nn.init.eye_, sparse):
        with pytest.raises(ValueError, match=r"shape \(16, 8\) is split .*axo.init_weights") if split else refused:
            draw(model[0].weight)

    def fill(module):
        if isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight)
            nn.init.orthogonal_(module.weight)

    torch.manual_seed(3)
    serial.apply(fill)
    torch.manual_seed(3)
    axo.init_weights(model, fill)
    assert_close(axo.unshard(model[0].weight.detach(), model[0].weight.placement), serial[0].weight, 1e-6, "as told")


def gradients_in_parts(pipeline):
    """No parameter is split, but ZeRO-2's gradients are, or stages have others: an overflow may show on one rank."""
    comms = axo.connect("1x1x1x1", pipeline=2) if pipeline else axo.connect("1x1x1x2")
    model = axo.parallelize(nn.Sequential(nn.Linear(8, 8)), comms, plan="auto", zero=0 if pipeline else 2)
    model(torch.ones(2, 8)).sum().backward()
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    with pytest.raises(ValueError, match=r"gradients are split over ranks.* axo\.GradScaler"):
        scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("pipeline", [False, True])
def test_torchs_scaler_is_refused_where_gradients_alone_are_in_parts(pipeline):
    run_ranks(gradients_in_parts, 2, pipeline)


@pytest.mark.parametrize("grid", ["2x1x1x1", "1x1x2x1", "1x1x1x2"])
def test_torchs_scaler_and_fans_of_shards_are_refused(grid):
    run_ranks(scaler_and_first_values, 2, grid)


class Double(nn.Module):
    def forward(self, weight):
        return weight * 2


DERIVED = {
    "parametrize": lambda layer: parametrize.register_parametrization(layer, "weight", Double()),
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "old weight_norm": nn.utils.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "l1_unstructured": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "ln_structured": lambda layer: prune.ln_structured(layer, "weight", 0.5, 2, 0),
    "random_unstructured": lambda layer: prune.random_unstructured(layer, "weight", 0.5),
    "custom_from_mask": lambda layer: prune.custom_from_mask(layer, "weight", torch.ones_like(layer.weight)),
    "global_unstructured": lambda layer: prune.global_unstructured(
        [(layer, "weight")], prune.L1Unstructured, amount=0.5
    ),
}


def derived(grid):
    """Weights that are computed from a parameter."""
    comms = axo.connect(grid)
    batch = torch.rand(8, 8, generator=torch.Generator().manual_seed(1))
    for what, derive in DERIVED.items():
        _, model = models(comms)
        with pytest.raises(ValueError, match="is split over ranks"):
            derive(model[0])
            pytest.fail(what)
    for what in ("parametrize", "weight_norm", "old weight_norm", "l1_unstructured"):
        torch.manual_seed(0)
        serial = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        DERIVED[what](serial[0])
        state, expected = {name: each.clone() for name, each in serial.state_dict().items()}, serial(batch).detach()
        model = axo.parallelize(serial, comms, plan="auto")
        assert not isinstance(model[0], axo.nn.Linear) and isinstance(model[2], axo.nn.Linear), what
        assert_close(model(axo.shard_batch(batch, comms)), axo.shard_batch(expected, comms), 1e-5, what)
        found = model.state_dict()
        assert list(found) == list(state), what
        for name, each in state.items():
            assert_close(found[name], each, 1e-6, name)


def transforms(grid):
    """torch.func."""
    comms = axo.connect(grid)
    serial, model = models(comms)
    x = torch.rand(8, 8, generator=torch.Generator().manual_seed(1))
    mine = axo.shard_batch(x, comms)
    call = torch.func.functional_call
    doubled = [{name: 2 * p for name, p in each.named_parameters()} for each in (serial, model)]
    expected = axo.shard_batch(call(serial, doubled[0], (x,)), comms)
    assert_close(call(model, doubled[1], (mine,)), expected, 1e-5, "functional_call")
    own = {name: p.detach() for name, p in model.named_parameters()}
    for transform in (
        lambda: torch.func.grad(lambda p: call(model, p, (mine,)).sum())(own),
        lambda: torch.func.vjp(model, mine),
        lambda: torch.func.jvp(model, (mine,), (mine,)),
        lambda: torch.func.jacrev(model)(mine),
    ):
        with pytest.raises(RuntimeError):
            transform()


def batch_norm(grid):
    comms = axo.connect(grid)
    torch.manual_seed(0)
    serial = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4))
    model = axo.parallelize(copy.deepcopy(serial), comms, plan="auto")
    images = torch.rand(8, 4, 4, 4, generator=torch.Generator().manual_seed(1))
    update_bn([images], serial)
    update_bn([axo.shard_batch(images, comms)], model)
    found = model.state_dict()
    for name, expected in serial.state_dict().items():
        assert_close(found[name].float(), expected.float(), 1e-5, name)


@pytest.mark.parametrize("grid", ["2x2x1x1", "2x1x2x1"])
def test_norms_and_penalties_of_one_parameter(grid):
    run_ranks(one_parameter, 4, grid)


@pytest.mark.parametrize("grid", ["2x2x1x1", "1x2x1x2"])
def test_weights_that_are_computed_are_refused_or_stay_serial(grid):
    run_ranks(derived, 4, grid)


def test_transforms_are_right_or_refused():
    run_ranks(transforms, 4, "2x2x1x1")


def test_batch_norm_is_updated_as_in_torch():
    run_ranks(batch_norm, 4, "2x2x1x1")


def names_of_ones_own(grid):
    class Scaled(axo.nn.Linear):
        def __init__(self, *sizes, comms):
            super().__init__(*sizes, comms=comms)
            self.weight_gain = nn.Parameter(torch.ones(()))
            self.register_parameter("bias_g", None)

    assert dict(Scaled(8, 8, comms=axo.connect(grid)).named_parameters()).keys() == {"weight", "bias", "weight_gain"}


def test_a_name_alone_makes_no_parameter_a_derived_one():
    run_ranks(names_of_ones_own, 4, "2x2x1x1")
