"""What autograd promises, kept with gradients that arrive late: hooks, accumulation, partial and failing backwards.

Oracle: the serial layer under the same calls.
"""

import warnings

import pytest
import torch
from litgpt.config import Config

import axo
from tests.gpt import LLAMA, NEOX
from tests.launcher import run_ranks
from tests.nn.support import assert_close, assert_gradients_match, serial_seed
from tests.overlap.test_overlap import LIMIT, OFF, build, loss_of


def two_layers(comms, overlap=None, zero=0):
    """A serial pair of layers, the same on the grid with one engine, and the input of both."""
    serial_seed()
    serial = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Linear(12, 8))
    pair = torch.nn.Sequential(axo.nn.Linear(8, 12, comms=comms), axo.nn.Linear(12, 8, comms=comms, transposed=True))
    pair.load_state_dict(serial.state_dict())
    axo.overlap.attach(pair, comms, overlap or axo.Overlap(), zero=zero)
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    return serial, pair, x, axo.shard_input(pair[0], x)


def loss(module, rows):
    return module(rows).square().sum(1).mean()


def collected_in_a_step():
    """A model is collected while torch goes through its hooks, before and after a step."""
    import gc
    import weakref

    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    comms = axo.connect("1x1x1x2")
    _, pair, _, mine = two_layers(comms)
    optimizer = torch.optim.SGD(pair.parameters(), lr=0.1)
    for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        for zero in (0, 2):
            handle = register(lambda *_: (gc.collect(), None)[1])  # before those of the model that goes
            gone = two_layers(comms, zero=zero)[1]
            engine = weakref.ref(gone[0].exchanges[0].engine)
            gone.itself = [gone]  # only the collector finds it
            loss(pair, mine).backward()
            gc.disable()
            del gone
            assert engine() is not None
            optimizer.step()
            assert engine() is None
            gc.enable()
            handle.remove()


def test_a_model_may_be_collected_in_another_ones_step():
    run_ranks(collected_in_a_step, 2)


def hooks(grid):
    comms = axo.connect(grid)
    serial, pair, x, mine = two_layers(comms)
    seen = []
    for module in (serial, pair):
        for name, parameter in module.named_parameters():
            parameter.register_hook(lambda grad, name=name: (seen.append((name, grad.clone())), 2 * grad)[1])
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.append((name, p.grad.clone())))
    for _ in range(2):  # the second adds to .grad
        seen.clear()
        loss(serial, x).backward()
        expected = {}
        for name, value in seen:
            expected.setdefault(name, []).append(value)
        seen.clear()
        loss(pair, mine).backward()
        assert len(seen) == 8, "each hook runs once"
        for name, parameter in pair.named_parameters():
            for (_, value), theirs in zip([entry for entry in seen if entry[0] == name], expected[name], strict=True):
                assert_close(value, axo.shard(theirs, parameter.placement), 1e-5, f"hook of {name}")
    assert_gradients_match(pair, serial, 1e-5, "after hooks")
    handle = pair[0].weight.register_hook(lambda grad: seen.append("removed"))
    handle.remove()
    loss(pair, mine).backward()
    assert "removed" not in seen
    pair.zero_grad()
    if comms.rank == 0:  # on one rank only: no rank may wait for another
        pair[0].weight.register_hook(lambda grad: seen.append(grad))
    loss(pair, mine).backward()


@pytest.mark.parametrize("grid", ["2x2x2x1", "2x1x2x2"])
def test_hooks_run_once_on_the_complete_gradient(grid):
    run_ranks(hooks, 8, grid)


def partial_backwards(grid):
    comms = axo.connect(grid)
    serial, pair, x, mine = two_layers(comms)
    wanted = [parameter.clone() for parameter in torch.autograd.grad(loss(serial, x), list(serial.parameters()))]
    found = torch.autograd.grad(loss(pair, mine), list(pair.parameters()))
    for mine_, theirs, parameter in zip(found, wanted, pair.parameters(), strict=True):
        assert_close(mine_, axo.shard(theirs, parameter.placement), 1e-5, "autograd.grad")
        assert parameter.grad is None
    (alone,) = torch.autograd.grad(loss(pair, mine), pair[1].weight)
    assert_close(alone, found[2], LIMIT, "autograd.grad of one")
    loss(pair, mine).backward(inputs=[pair[0].weight, pair[1].bias])
    assert_close(pair[0].weight.grad, found[0], LIMIT, "backward(inputs=)")
    assert_close(pair[1].bias.grad, found[3], LIMIT, "backward(inputs=)")
    assert pair[0].bias.grad is None and pair[1].weight.grad is None
    pair.zero_grad()
    total = loss(pair, mine)
    total.backward(retain_graph=True)
    total.backward()
    assert_close(pair[0].weight.grad, 2 * found[0], 1e-5, "retain_graph")
    with pytest.raises(RuntimeError, match="second time"):
        total.backward()
    pair.zero_grad()
    scaled = {name: parameter * 1 for name, parameter in pair.named_parameters()}  # no leaves
    torch.func.functional_call(pair, scaled, mine).square().sum(1).mean().backward()
    for parameter, theirs in zip(pair.parameters(), found, strict=True):
        assert_close(parameter.grad, theirs, LIMIT, "weights that are no leaves")
    pair.zero_grad()
    pair[0].weight.requires_grad_(False)
    with axo.count_collectives() as counts:
        loss(pair, mine).backward()
    assert pair[0].weight.grad is None and counts["reduce_scatter", "z"].calls == (1 if comms.grid.z > 1 else 0)
    assert_close(pair[1].weight.grad, found[2], LIMIT, "beside a frozen weight")
    with pytest.raises(RuntimeError, match="create_graph=True"):
        loss(pair, mine).backward(create_graph=True)


@pytest.mark.parametrize("grid", ["2x2x2x1", "1x2x2x2"])
def test_partial_backwards(grid):
    run_ranks(partial_backwards, 8, grid)


def accumulation(grid):
    comms = axo.connect(grid)
    model = build(comms, Config(**NEOX), axo.Overlap(gather_cache="all"))
    plain = build(comms, Config(**NEOX), OFF)
    for step in range(2):
        for micro in range(3):
            loss_of(comms, plain, 3 * step + micro).backward()
        with axo.count_collectives() as counts:
            for micro in range(2):
                with axo.no_sync(model):
                    loss_of(comms, model, 3 * step + micro).backward()
            if step == 0:
                assert not any(p.grad is not None and p.grad.any() for p in model.parameters()), "no_sync gives"
            loss_of(comms, model, 3 * step + 2).backward()
        layers = 4 * model.config.n_layer + 2
        if comms.grid.z > 1:
            assert counts["reduce_scatter", "z"].calls == layers, "no_sync reduces"
            assert counts["all_gather", "z"].calls == layers + 2, counts  # the embedding's is not kept
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert_close(mine.grad, theirs.grad, 1e-6, "accumulated")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with axo.no_sync(model):
        loss_of(comms, model, 0).backward()
    with pytest.raises(RuntimeError, match="no_sync"):
        optimizer.step()
    loss_of(comms, model, 1).backward()  # brings them along
    optimizer.step()


@pytest.mark.parametrize("grid", ["1x2x2x1", "1x1x2x2", "1x1x1x4"])
def test_accumulation_without_synchronisation(grid):
    run_ranks(accumulation, 4, grid)


def abandoned(grid, zero):
    """Micro-batches whose gradients the user throws away, or whose backward fails, leave nothing behind."""
    comms = axo.connect(grid)
    serial, pair, x, mine = two_layers(comms, zero=zero)
    optimizer = torch.optim.SGD(pair.parameters(), lr=0.0)

    def check(what, times=1):
        serial.zero_grad()
        for _ in range(times):
            loss(serial, x).backward()
        for mine_, theirs in zip(pair.parameters(), serial.parameters(), strict=True):
            if mine_.grad.shape == mine_.shape:  # not rows
                assert_close(mine_.grad, axo.shard(theirs.grad, mine_.placement), 1e-5, what)
        pair.zero_grad()

    for set_to_none in (True, False):
        for before in (False, True):  # whether .grad holds something when the micro-batch comes
            if before:
                loss(pair, mine).backward()
            for _ in range(2):
                with axo.no_sync(pair):
                    loss(pair, mine).backward()
            optimizer.zero_grad(set_to_none=set_to_none)
            loss(pair, mine).backward()
            check(f"zero_grad(set_to_none={set_to_none}) after no_sync, {before}")
    with axo.no_sync(pair):
        loss(pair, mine).backward()
    pair.zero_grad()
    loss(pair, mine)  # without backward: nothing waits any more, so this is the error
    with pytest.raises(RuntimeError, match="without backward"):
        optimizer.step()
    with axo.no_sync(pair):
        loss(pair, mine).backward()
        torch._foreach_mul_([p.grad for p in pair.parameters() if p.grad is not None], torch.tensor(0.5))
    loss(pair, mine).backward()
    check("scaled in between, not thrown away", 2)

    boom = pair[0].register_full_backward_pre_hook(lambda *_: 1 / 0)
    with (
        pytest.warns(RuntimeWarning, match="backward raised with"),
        pytest.raises(ZeroDivisionError),
        axo.no_sync(pair),
    ):
        loss(pair, mine).backward()
    boom.remove()
    loss(pair, mine).backward()
    check("a backward that failed in no_sync")


@pytest.mark.parametrize(("grid", "zero"), [("1x2x2x1", 0), ("1x1x2x2", 2)])
def test_abandoned_micro_batches_leave_nothing(grid, zero):
    run_ranks(abandoned, 4, grid, zero)


def failures(grid):
    comms = axo.connect(grid)
    model = build(comms, Config(**LLAMA), axo.Overlap())
    loss_of(comms, model, 0).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    boom = model.transformer.h[0].register_full_backward_pre_hook(lambda *_: 1 / 0)
    with pytest.warns(RuntimeWarning, match="backward raised with"), pytest.raises(ZeroDivisionError) as held:
        loss_of(comms, model, 1).backward()
    boom.remove()
    assert all(parameter.grad is None for parameter in model.parameters()), "a failed backward leaves gradients"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_of(comms, model, 0).backward()
    for parameter, theirs in zip(model.parameters(), expected, strict=True):
        assert_close(parameter.grad, theirs, 0, "after an exception")
    assert held.value is not None  # its traceback was alive all the time

    total = loss_of(comms, model, 0)
    with torch.no_grad():
        model.transformer.h[1].mlp.proj.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"transformer.h.1.mlp.proj.*modified by an inplace operation"):
        total.backward()
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(comms, model, 0)
    with pytest.raises(RuntimeError, match="step\\(\\) without backward"):
        optimizer.step()
    loss_of(comms, model, 0).backward()
    optimizer.step()


def test_failures_carry_nothing_over():
    run_ranks(failures, 8, "2x2x2x1")


def weights_of_tokens(grid):
    comms = axo.connect(grid)
    serial, pair, _, _ = two_layers(comms)
    me = comms.coords.z + comms.grid.z * comms.coords.data
    rows = torch.randn(1 + 2 + 3 + 4, 8, generator=torch.Generator().manual_seed(2))
    first = sum(range(1, me + 1))
    mine = rows[first : first + me + 1]
    loss(serial, rows).backward()
    (axo.token_weight(len(mine), comms) * loss(pair, mine)).backward()
    assert_gradients_match(pair, serial, 1e-5, "unequal batches")


def test_unequal_batches_weighted_by_tokens():
    run_ranks(weights_of_tokens, 4, "1x1x2x2")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"gather_cache": "some"}, "gather_cache='some' is not known"),
        ({"gather_cache": -1}, "gather_cache=-1 is not known"),
        ({"gather_cache": True}, "gather_cache=True is not known"),
        ({"all_gather": "yes"}, "all_gather='yes' is not a switch"),
        ({"bucket_bytes": -1}, "bucket_bytes=-1 is negative"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        axo.Overlap(**options)
