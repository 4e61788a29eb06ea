"""Steps that cannot be right are refused: of an optimizer of the serial model, of one that looks at whole tensors, on
rows that differ along x or y. Those that may not be right are told.
"""

import os
import warnings
from functools import partial

import pytest
import torch
from torch import nn

import axo
from axo.settings import is_on
from tests.launcher import run_ranks


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def early_optimizer(grid):
    comms = axo.connect(grid)
    model = model_of()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    axo.parallelize(model, comms, plan="auto")
    model(torch.ones(4, 8)).sum().backward()
    with pytest.raises(RuntimeError, match=r"made before axo.parallelize.* holds 4 parameters .*'0.weight'"):
        early.step()
    del early
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    other = torch.nn.Linear(2, 2)  # an optimizer of something else is none of ours
    other(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()


@pytest.mark.parametrize("grid", ["1x1x1x1", "2x1x1x1", "1x1x2x1"])
def test_an_optimizer_made_before_parallelize_is_refused(grid):
    run_ranks(early_optimizer, axo.Grid.parse(grid).world_size, grid)


def accumulate_by_closure(grid, zero):
    """A step whose closure runs the last backward, as Lightning's do, against one after it; and a closure without."""
    comms, after = axo.connect(grid), []
    for by_closure in (True, False):
        model = axo.parallelize(model_of(), comms, plan="auto", zero=zero)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def backward(first, model=model):
            loss = model(torch.full((4, 8), first + comms.coords.z)).sum()
            loss.backward()
            return loss

        with axo.no_sync(model):
            backward(1.0)
            if by_closure:
                with pytest.raises(RuntimeError, match=r"run the last backward of the step outside of it"):
                    optimizer.step(lambda: None)
        if by_closure:
            assert optimizer.step(partial(backward, 2.0)).item() != 0
        else:
            backward(2.0)
            optimizer.step()
        after.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert torch.equal(*after)


@pytest.mark.parametrize("zero", [0, 1])
def test_the_last_micro_batch_may_be_the_closures(zero):
    """Oracle: the same step without a closure, bit by bit."""
    run_ranks(accumulate_by_closure, 2, "1x1x2x1" if zero == 0 else "1x1x1x2", zero)


class KnowsOtherParts(torch.optim.Adafactor):
    """A user's own, made for parts of tensors."""

    takes_shards = True

    def step(self, closure=None):
        return closure()


def whole_tensors(grid):
    comms = axo.connect(grid)
    split = comms.grid.x * comms.grid.z > 1
    for kind in (torch.optim.Adafactor, torch.optim.Muon, torch.optim.LBFGS):
        model = axo.parallelize(model_of(), comms, plan="auto")
        parameters = [p for p in model.parameters() if p.dim() == 2]
        before = [p.detach().clone() for p in parameters]

        def loss(model=model):
            value = model(torch.ones(4, 8)).sum()
            value.backward()
            return value

        optimizer = kind(parameters, lr=0.1)
        if split:
            instead = r"axo\.optim\.Muon" if kind is torch.optim.Muon else "an optimizer such as AdamW or SGD"
            with pytest.raises(axo.Refused, match=rf"{kind.__name__} does not .* split over ranks; use {instead}, or"):
                optimizer.step(loss)
        else:
            optimizer.step(loss)
        assert all(torch.equal(p, old) for p, old in zip(parameters, before, strict=True)) is split, kind
    KnowsOtherParts(parameters).step(loss)


@pytest.mark.parametrize("grid", ["2x1x1x1", "1x1x2x1", "1x1x1x2"])
def test_steps_that_look_at_whole_tensors_are_refused_where_they_are_split(grid):
    """In a loop of one's own, and so in Hugging Face's Trainer (optim="adafactor") and under accelerate."""
    run_ranks(whole_tensors, 2, grid)


def other_parameters(grid):
    """Of the optimizers of four models, those whose parameters are not all the grid's."""
    comms, found = axo.connect(grid), []
    for where in ("inside", "beside", "frozen", "unused", "alone"):
        model = axo.parallelize(model_of(), comms, plan="auto")
        scale = nn.Parameter(torch.ones(8), requires_grad=where != "frozen")
        if where == "inside":
            model.register_parameter("scale", scale)
        held = [*model.parameters(), *([scale] if where in ("beside", "frozen", "unused") else [])]
        optimizer = torch.optim.SGD(held, lr=0.1)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(2):
                (model(torch.ones(4, 8)) * (1 if where == "unused" else scale)).sum().backward()
                optimizer.step()
        found.append([str(each.message) for each in told])
    return found


@pytest.mark.parametrize(("grid", "told"), [("1x1x2x1", True), ("1x1x1x2", True), ("2x1x1x1", False)])
def test_parameters_that_nobody_reduces_are_told_once(grid, told):
    for inside, beside, *others in run_ranks(other_parameters, 2, grid):
        for messages in (inside, beside):
            assert len(messages) == told, messages
            assert all(
                "1 parameters of this optimizer, of shape (8,), are not the grid's. Axo does not reduce" in each
                for each in messages
            )
        assert others == [[], [], []]


def wrapped():
    comms = axo.connect("1x1x2x1")
    model = axo.parallelize(model_of(), comms, plan="auto")
    with pytest.raises(axo.Refused, match="DistributedDataParallel: it broadcasts rank 0's parameters and reduces gr"):
        nn.parallel.DistributedDataParallel(model)(torch.ones(4, 8))
    serial = nn.parallel.DistributedDataParallel(model_of())  # one beside it is none of ours
    serial(torch.ones(4, 8)).sum().backward()
    student = Distills(axo.parallelize(model_of(), comms, plan="auto").requires_grad_(False))
    nn.parallel.DistributedDataParallel(student)(torch.ones(4, 8)).sum().backward()


class Distills(nn.Module):
    """A student that asks a frozen teacher, which is none of its modules."""

    def __init__(self, teacher):
        super().__init__()
        self.student, self.teacher = model_of(), [teacher]

    def forward(self, x):
        return self.student(x) - self.teacher[0](x)


def test_a_parallel_model_in_torchs_data_parallel_is_refused():
    run_ranks(wrapped, 2)


def rows_that_differ(grid, always):
    os.environ["AXO_CHECK"] = "1" if always else "0"
    comms = axo.connect(grid)
    model = axo.parallelize(model_of(), comms, plan="auto")
    rows = comms.coords.z + 2 * comms.coords.data  # as it should be
    with axo.count_collectives() as counts:
        model(torch.full((4, 8), float(rows))).sum().backward()
    assert all(op != "all_gather" for (op, axis) in counts if axis == "x"), counts  # a check is not counted
    with torch.no_grad():
        with pytest.raises(ValueError, match=r"the input on x=1 differs from that on x=0"):
            model(torch.full((4, 8), float(comms.rank)))  # the first pass without gradients
        if not always:
            model(torch.full((4, 8), float(comms.rank)))
    wrong = torch.full((4, 8), float(comms.coords.x))
    if always:
        with pytest.raises(ValueError, match=r"the input on x=1 differs from that on x=0"):
            model(wrong)
    else:
        model(wrong).sum().backward()
        again = axo.parallelize(model_of(), comms, plan="auto")
        with pytest.raises(ValueError, match=r"the input on x=1 differs .*axo.shard_batch"):
            again(input=wrong)


@pytest.mark.parametrize("always", [False, True])
def test_rows_that_differ_along_x_are_refused(always):
    run_ranks(rows_that_differ, 4, "2x1x2x1", always)


def test_a_model_without_blocks_is_refused():
    run_ranks(without_blocks, 2, "2x1x1x1")


def without_blocks(grid):
    from litgpt.config import Config
    from litgpt.model import GPT

    comms = axo.connect(grid)
    for layers in (0, -1):
        model = GPT(Config(n_layer=layers, n_head=2, n_embd=16, vocab_size=32, padded_vocab_size=32))
        with pytest.raises(ValueError, match=f"n_layer={layers} is a model without blocks"):
            axo.parallelize(model, comms)


def layers_by_hand():
    comms = axo.connect("1x1x2x1")
    layers = nn.Sequential(*(axo.nn.Linear(8, 8, comms=comms, transposed=odd) for odd in (False, True)))
    attached = nn.Sequential(axo.nn.Linear(8, 8, comms=comms))
    axo.overlap.attach(attached, comms, axo.Overlap())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attached(torch.ones(4, 8)).sum().backward()
    with pytest.warns(UserWarning, match="call axo.overlap.attach") as hints:
        for _ in range(3):
            layers(torch.ones(4, 8)).sum().backward()
    return len(hints)


def test_layers_of_no_attached_model_hint_at_attach_once_each():
    assert run_ranks(layers_by_hand, 2) == [2, 2]


def test_a_switch_that_is_neither_on_nor_off_is_told(monkeypatch):
    for value, found in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("AXO_CHECK", value)
        assert is_on("AXO_CHECK") is found
    monkeypatch.setenv("AXO_CHECK", "true")
    with pytest.raises(ValueError, match="AXO_CHECK='true' is not known; use one of 0, 1, or unset it"):
        is_on("AXO_CHECK")


def steps_of_ones_own(grid):
    """Optimizers that take a closure by name alone, or something else first, get what they get of a serial model."""

    class ByName(torch.optim.SGD):
        def step(self, *, closure=None):
            return super().step(closure)

    class Scaled(torch.optim.SGD):
        def step(self, scale=1.0):
            self.param_groups[0]["lr"] *= scale
            super().step()

    comms = axo.connect(grid)
    model = axo.parallelize(nn.Sequential(nn.Linear(8, 8)), comms, plan="auto")
    batch = axo.shard_batch(torch.rand(4, 8), comms)

    def closure():
        loss = model(batch).sum()
        loss.backward()
        return loss

    assert ByName(model.parameters(), lr=0.1).step(closure=closure) is not None
    closure()
    scaled = Scaled(model.parameters(), lr=0.1)
    scaled.step(0.5)
    assert scaled.param_groups[0]["lr"] == 0.05


def test_a_step_may_take_what_it_likes():
    run_ranks(steps_of_ones_own, 2, "2x1x1x1")
