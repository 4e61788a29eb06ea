"""Layers that take one input sum its gradient over ranks once: values against serial torch, and what travels."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import axo
from tests.launcher import run_ranks
from tests.nn.support import assert_close, assert_counted, assert_gradients_match, my_rows, seed_apart, serial_seed

# fp32 with sums of at most 96 terms of size 1: rounding stays under 1e-5; a wrong term is of size 1e-2 at least.
LIMIT = 1e-5
WIDTH, ROWS = 24, 12


class Gated(nn.Module):
    """x + down(f(a(x), b(x)) * c(y)); ``y`` is ``x`` but where told otherwise."""

    def __init__(self, build):
        super().__init__()
        self.a, self.b, self.c = build(WIDTH, 64), build(WIDTH, 64, bias=False), build(WIDTH, 64)
        self.down = build(64, WIDTH, transposed=True)

    def forward(self, x, y=None, *, recompute=None, skips_c=False):
        def inner(x, y):
            product = torch.tanh(self.a(x)) * self.b(x)
            return product if skips_c else product * torch.sigmoid(self.c(x if y is None else y))

        products = inner(x, y) if recompute is None else checkpoint(inner, x, y, use_reentrant=recompute)
        return x + self.down(products)


def serial_model():
    with torch.random.fork_rng(devices=[]):
        serial_seed()
        return Gated(lambda k, n, bias=True, transposed=False: nn.Linear(k, n, bias))


def parallel_model(comms, serial):
    def build(k, n, bias=True, transposed=False):
        return axo.nn.Linear(k, n, bias, comms=comms, transposed=transposed)

    model = Gated(build)
    for name, layer in serial.named_children():
        model.get_submodule(name).load_serial(layer)
    axo.nn.share_input(model.a, model.b, model.c)
    axo.overlap.attach(model, comms)
    return model


def rows_of(comms):
    whole = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))
    return whole, my_rows(comms, whole)


def shard(comms, x):
    return x.chunk(comms.grid.y, -1)[comms.coords.y]


def summed_over_x(counts):
    return sum(count.calls for key, count in counts.items() if key[:2] == ("all_reduce", "x"))


def passes(comms, what, run, *, sums, reference=None):
    """One backward of ``run(model, x)``, parallel against serial; ``sums``: all-reduces over x in it."""
    serial = serial_model()
    parallel = parallel_model(comms, serial)
    whole, mine = rows_of(comms)
    expected_x, x = whole.clone().requires_grad_(), shard(comms, mine).clone().requires_grad_()
    reference = reference or run
    (reference(serial, expected_x) ** 2).sum().div(ROWS).backward()
    with axo.count_collectives() as counts:
        output = run(parallel, x)
        ((output**2).sum() / len(mine)).backward()
    parts = comms.grid.z * comms.grid.data
    assert_close(x.grad / parts, shard(comms, my_rows(comms, expected_x.grad)), LIMIT, f"{what}: gradient of input")
    for name, layer in serial.named_children():
        if layer.weight.grad is not None:
            assert_gradients_match(parallel.get_submodule(name), layer, LIMIT, f"{what}: {name}")
    assert summed_over_x(counts) == sums * (comms.grid.x > 1), f"{what}: {counts}"
    return parallel, counts


def check_values(grid):
    comms = axo.connect(grid)
    seed_apart(comms)
    # The output of ``down`` is summed over x as well: one more in each forward, and in each that runs again with it.
    parallel, counts = passes(comms, "one input", lambda m, x: m(x), sums=1 + 1)
    fresh = parallel_model(comms, serial_model())  # cost() knows it before any pass
    for model in (fresh, parallel):
        assert_counted(counts, [call for layer in model.children() for call in layer.cost(ROWS // comms.grid.data)])
    doubled, counts = passes(comms, "two inputs", lambda m, x: m(x, x * 2), sums=2 + 1)
    if comms.grid.x > 1:
        assert [layer.sums_input_grad for layer in doubled.children()] == [True, False, True, True]
    assert_counted(counts, [call for layer in doubled.children() for call in layer.cost(ROWS // comms.grid.data)])
    unused, _ = passes(comms, "one layer unused", lambda m, x: m(x, skips_c=True), sums=1 + 1)
    assert grid.startswith("1x") or unused.a.shared_input._last is None  # holds no activation between steps
    for reentrant in (False, True):
        what = f"recomputed, reentrant={reentrant}"
        passes(comms, what, lambda m, x, r=reentrant: m(x, recompute=r), sums=1 + 1, reference=lambda m, x: m(x))
    passes(comms, "the same tensor twice", lambda m, x: m(x) + m(x), sums=2 + 2)
    return True


def check_passes(grid):
    """What a backward pass is asked for: inputs alone, weights alone, twice, after an error; and hooks."""
    comms = axo.connect(grid)
    seed_apart(comms)
    serial = serial_model()
    parallel = parallel_model(comms, serial)
    whole, mine = rows_of(comms)
    expected_x, x = whole.clone().requires_grad_(), shard(comms, mine).clone().requires_grad_()
    parts = comms.grid.z * comms.grid.data

    def loss(model, x, rows):
        return (model(x) ** 2).sum() / rows

    (of_input,) = torch.autograd.grad(loss(serial, expected_x, ROWS), expected_x)
    with axo.count_collectives() as counts:
        (grad,) = torch.autograd.grad(loss(parallel, x, len(mine)), x)
    assert_close(grad / parts, shard(comms, my_rows(comms, of_input)), LIMIT, "input alone")
    assert summed_over_x(counts) == 2 and all(p.grad is None for p in parallel.parameters())

    weights = [parallel.a.weight, parallel.c.weight]
    expected = torch.autograd.grad(loss(serial, expected_x, ROWS), [serial.a.weight, serial.c.weight])
    with axo.count_collectives() as counts:
        found = torch.autograd.grad(loss(parallel, x, len(mine)), weights)
    for grad, weight, whole_grad in zip(found, weights, expected, strict=True):
        assert_close(grad, axo.shard(whole_grad, weight.placement), LIMIT, "weights alone")
    assert summed_over_x(counts) == 1  # of the output: nobody wants dI

    seen = []
    parallel.a.weight.register_hook(lambda grad: seen.append("hook"))
    parallel.a.weight.register_post_accumulate_grad_hook(lambda weight: seen.append("after"))

    def broken(grad):
        raise OSError("as a user's hook may")

    once = loss(parallel, x, len(mine))
    handle = x.register_hook(broken)
    with pytest.raises(OSError, match="as a user's"):
        once.backward(retain_graph=True)
    handle.remove()
    parallel.zero_grad(), seen.clear()
    x.grad = None
    once.backward(retain_graph=True)
    once.backward()
    twice = loss(serial, expected_x, ROWS)
    twice.backward(retain_graph=True)
    twice.backward()
    assert seen == ["hook", "after"] * 2
    assert_close(x.grad / parts, shard(comms, my_rows(comms, expected_x.grad)), 2 * LIMIT, "twice")
    assert_gradients_match(parallel.a, serial.a, 2 * LIMIT, "twice")

    copied = copy.deepcopy(parallel)
    assert copied.a.shared_input is copied.c.shared_input is not parallel.a.shared_input
    with torch.no_grad(), axo.count_collectives() as counts:
        assert_close(copied(x), parallel(x), 0, "copy")
    return True


@pytest.mark.parametrize("grid", ["2x1x1x1", "2x2x1x1", "2x1x2x1", "1x2x1x1"])
def test_the_gradient_of_a_shared_input_is_summed_once(grid):
    assert all(run_ranks(check_values, axo.Grid.parse(grid).world_size, grid))


@pytest.mark.parametrize("grid", ["2x1x1x1", "2x1x1x2"])
def test_passes_that_want_a_part_and_passes_that_end_in_an_error(grid):
    assert all(run_ranks(check_passes, axo.Grid.parse(grid).world_size, grid))


def check_order(grid):
    comms = axo.connect(grid)
    parallel = parallel_model(comms, serial_model())
    x = shard(comms, rows_of(comms)[1]).requires_grad_()
    with axo.overlap.record(parallel) as events, torch.autocast("cpu", torch.bfloat16):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            output = parallel(x)
        (output.float() ** 2).sum().backward()
    inputs = {t.data_ptr() for t in saved if t.shape == x.shape and t.dtype == torch.bfloat16}
    order = [(e.what, e.op, e.layer) for e in events if e.op in ("dI", "dW", "all_reduce") and e.what != "wait"]
    return len(inputs), order[order.index(("compute", "dI", "c")) :]


def test_the_sum_is_under_way_while_the_gradient_of_the_first_weight_is_computed():
    for inputs, order in run_ranks(check_order, 2, "2x1x1x1"):
        assert inputs == 1  # cast once for all three
        first = [("compute", "dI", "a"), ("issue", "all_reduce", "a"), ("compute", "dW", "a")]
        assert order == [("compute", op, layer) for layer in "cb" for op in ("dI", "dW")] + first


def refuse():
    comms = axo.connect("2x1x1x1")
    normal = [axo.nn.Linear(size, 8, comms=comms, name=f"l{size}") for size in (8, 16)]
    with pytest.raises(ValueError, match=r"share_input: Linear 'l16' takes 16 features.*'l8' 8 over y"):
        axo.nn.share_input(*normal)
    return True


def test_layers_of_unlike_inputs_are_refused():
    assert all(run_ranks(refuse, 2))
