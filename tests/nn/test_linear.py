"""Linear against serial nn.Linear: values, gradients, first values, collectives, and what it refuses."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

import axo
from tests.launcher import rank_outcomes, run_ranks
from tests.nn.support import assert_close, assert_gradients_match, my_rows, seed_apart, serial_seed

# fp32 with sums of at most 96 terms of size 1: rounding stays under 1e-5; a wrong term is of size 1e-2 at least.
LIMIT = 1e-5


def serial_linear(*args, **kwargs):
    """The oracle: nn.Linear under rank 0's seed, without touching this rank's generator."""
    with torch.random.fork_rng(devices=[]):
        serial_seed()
        return nn.Linear(*args, **kwargs)


@functools.cache
def serial_results(shape, grad_reduce):
    """The oracle of all grids: the layer and its input, with their gradients; what weights the output; the output."""
    k, n, batch, tokens = shape
    serial = serial_linear(k, n)
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(tokens, batch, k, generator=generator).transpose(0, 1).requires_grad_()  # not contiguous
    weights = torch.randn(batch, tokens, n, generator=generator)
    expected = serial(x)
    ((expected * weights).sum() / (batch * tokens if grad_reduce == "mean" else 1)).backward()
    return serial, x, weights, expected.detach()


def compare_with_serial(comms, transposed, grad_reduce="mean", shape=(48, 80, 32, 3), limit=LIMIT):
    k, n, _, tokens = shape
    what = f"{comms.grid} {'transposed' if transposed else 'normal'} {grad_reduce}"
    seed_apart(comms)
    layer = axo.nn.Linear(k, n, comms=comms, transposed=transposed, grad_reduce=grad_reduce)
    serial, x, weights, expected = serial_results(shape, grad_reduce)

    mine = axo.shard_input(layer, x.detach())
    mine = mine.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    output = layer(mine)
    features = output.shape[-1]
    start = features * getattr(comms.coords, layer.out_axis)
    my_weights = my_rows(comms, weights)[..., start : start + features]
    my_scale = mine.shape[0] * tokens if grad_reduce == "mean" else 1
    ((output * my_weights).sum() / my_scale).backward()

    # A serial row's gradient has the factor 1 / all rows, a rank's 1 / its rows.
    parts = comms.grid.z * comms.grid.data if grad_reduce == "mean" else 1
    assert_close(output, my_rows(comms, expected)[..., start : start + features], limit, f"{what}: output")
    assert_close(mine.grad / parts, axo.shard_input(layer, x.grad), limit, f"{what}: gradient of input")
    assert_gradients_match(layer, serial, limit, what)
    assert_close(layer.full_weight(), serial.weight, 0, f"{what}: full_weight")


def all_grids(world_size):
    dist.init_process_group("axo")  # one for all grids
    grids = list(axo.Grid.all(world_size))
    for grid in grids:
        comms = axo.connect(grid)
        for transposed in (False, True):
            compare_with_serial(comms, transposed)
        comms.close()
    return len(grids)


def test_equals_serial_on_all_grids_of_16_ranks():
    assert run_ranks(all_grids, 16, 16, timeout=240) == [35] * 16


def sums_and_odd_shapes(grid):
    comms = axo.connect(grid)
    for transposed in (False, True):
        compare_with_serial(comms, transposed, "sum", limit=1e-4)  # sums of 96 rows instead of means
        compare_with_serial(comms, transposed, shape=(8, 4, 6, 1))  # 2 rows of the block over z=3: one shard is empty


def test_gradient_sums_and_uneven_rows_over_z():
    run_ranks(sums_and_odd_shapes, 12, "2x2x3x1")


MLP = [(32, 64, False), (64, 32, True), (32, 96, False), (96, 32, True), (32, 64, False)]  # k, n, transposed
ROWS = 6


def mlp_collectives(grids):
    dist.init_process_group("axo")
    found = {}
    for grid in grids:
        comms = axo.connect(grid)
        layers = nn.Sequential(*(axo.nn.Linear(k, n, comms=comms, transposed=t) for k, n, t in MLP))
        x = torch.randn(ROWS, 32 // comms.grid.y, requires_grad=True)
        with axo.count_collectives() as counts:
            layers(x).square().mean().backward()
        found[grid] = dict(counts)
    return found


@pytest.mark.parametrize(
    "world_size, grids",
    [(16, ["2x2x2x2", "4x1x2x2", "1x4x4x1"]), (4, ["4x1x1x1", "1x4x1x1", "1x1x4x1", "1x1x1x4", "2x1x1x2"])],
)
def test_mlp_issues_the_collectives_of_the_table_and_no_other(world_size, grids):
    for found in run_ranks(mlp_collectives, world_size, grids):
        for grid in grids:
            assert found[grid] == mlp_table(axo.Grid.parse(grid)), grid


def mlp_table(g):
    """What DESIGN's table says for the MLP, line by line."""
    expected = {}

    def add(op, axis, elements):
        if g.size(axis) > 1:
            calls, before, _ = expected.get((op, axis), (0, 0, 0))
            expected[op, axis] = (calls + 1, before + elements, 4 * (before + elements))

    for k, n, transposed in MLP:
        in_axis, out_axis = ("x", "y") if transposed else ("y", "x")
        k_local, n_local = k // g.size(in_axis), n // g.size(out_axis)
        add("all_gather", "z", n_local * k_local // g.z)
        add("all_reduce", in_axis, ROWS * n_local)
        add("all_reduce", out_axis, ROWS * k_local)
        add("reduce_scatter", "z", n_local * k_local)
        add("all_reduce", "data", n_local * k_local // g.z)
        add("all_reduce", "z", n_local)  # bias
        add("all_reduce", "data", n_local)
    return expected


def what_autograd_may_ask(grid):
    comms = axo.connect(grid)
    serial = serial_linear(8, 12)
    seed_apart(comms)
    layer = axo.nn.Linear(8, 12, comms=comms)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    mine = axo.shard_input(layer, x)

    def gradient_of_weight(fn_serial, fn_parallel, what):
        serial.zero_grad()
        layer.zero_grad()
        fn_serial(serial, x)
        fn_parallel(layer, mine)
        assert_gradients_match(layer, serial, LIMIT, what)

    def twice(module, rows):
        (module(rows).square().sum(1).mean() + module(2 * rows).square().sum(1).mean()).backward()

    def accumulated(module, rows):
        for factor in (1, 3):
            module(factor * rows).square().sum(1).mean().backward()

    def again(module, rows):
        loss = module(rows).square().sum(1).mean()
        loss.backward(retain_graph=True)
        loss.backward()

    for use in (twice, accumulated, again):
        gradient_of_weight(use, use, use.__name__)

    layer.weight.requires_grad_(False)
    rows = mine.clone().requires_grad_()
    with axo.count_collectives() as counts:
        layer(rows).sum().backward()
    assert rows.grad is not None and ("reduce_scatter", "z") not in counts, counts
    layer.weight.requires_grad_(True)
    with axo.count_collectives() as counts:
        layer(mine).sum().backward()  # the input wants no gradient
    assert counts["all_reduce", "x"].calls == 0, counts

    (alone,) = torch.autograd.grad(layer(mine).square().sum(1).mean(), layer.weight)
    serial.zero_grad()
    serial(x).square().sum(1).mean().backward()
    assert_close(alone, axo.shard(serial.weight.grad, layer), LIMIT, "autograd.grad")

    with pytest.raises(RuntimeError, match="create_graph=True"):
        layer(mine).sum().backward(create_graph=True)
    layer.zero_grad()
    boom = mine.clone().requires_grad_()
    boom.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        layer(boom).sum().backward()
    gradient_of_weight(accumulated, accumulated, "after an exception in backward")

    with torch.no_grad():
        layer.weight.grad = None
        output = layer(mine)
        layer.weight.mul_(2)
        layer.weight.mul_(0.5)
    stale = layer(mine.clone().requires_grad_())
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.sum().backward()
    with torch.no_grad():
        layer.weight.sub_(1)
    assert not output.requires_grad


def test_what_autograd_may_ask():
    run_ranks(what_autograd_may_ask, 8, "2x2x2x1")


def inputs_of_any_shape(grid):
    comms = axo.connect(grid)
    for transposed in (False, True):
        seed_apart(comms)
        layer = axo.nn.Linear(8, 12, comms=comms, transposed=transposed, gather_cache="none")
        serial = serial_linear(8, 12)
        for shape in [(8,), (4, 8), (4, 2, 8), (4, 2, 1, 3, 8), (4, 0, 8), (0, 8)]:
            x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
            output = axo.unshard_output(layer, layer(axo.shard_input(layer, x)))
            assert_close(output, serial(x), LIMIT, f"{grid} {shape}")
        x = axo.shard_input(layer, torch.zeros(0, 8)).requires_grad_()
        layer(x).sum().backward()
        assert torch.equal(layer.weight.grad, torch.zeros_like(layer.weight)) and x.grad.shape == x.shape


def test_inputs_of_any_shape():
    run_ranks(inputs_of_any_shape, 8, "2x2x2x1")


def gathers_again(grid):
    comms = axo.connect(grid)
    layer = axo.nn.Linear(8, 12, comms=comms, gather_cache="none")
    with axo.count_collectives() as counts:
        layer(torch.randn(2, 8 // comms.grid.y, requires_grad=True)).sum().backward()
    return counts["all_gather", "z"].calls


def test_gather_cache_none_gathers_twice():
    assert run_ranks(gathers_again, 4, "1x2x2x1") == [2] * 4


def mixed_precision(grid):
    comms = axo.connect(grid)
    seed_apart(comms)
    layer = axo.nn.Linear(64, 32, comms=comms)
    serial = serial_linear(64, 32)
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(3))
    mine = axo.shard_input(layer, x).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16), axo.count_collectives() as counts:
        output = layer(mine)
        expected = serial(x)
    assert output.dtype == expected.dtype == torch.bfloat16
    for count in counts.values():
        assert count.bytes == 2 * count.elements, counts  # nothing goes out in fp32
    whole = axo.unshard_output(layer, output)
    assert_close(whole, expected, 2e-2, "bf16 output")  # values of size 1, 8 bits of mantissa, two roundings
    output.float().square().sum(1).mean().backward()
    expected.float().square().sum(1).mean().backward()
    assert mine.grad.dtype == layer.weight.grad.dtype == layer.bias.grad.dtype == torch.float32
    assert_gradients_match(layer, serial, 3e-2, "bf16")  # as above, and means of 16 rows


def test_autocast_computes_and_communicates_in_bf16():
    run_ranks(mixed_precision, 8, "2x2x2x1")


def uneven_outputs(grid):
    comms = axo.connect(grid)
    for n in (3, 5, 13):  # over x=4: 1 1 1 0, 2 2 1 0, 4 4 4 1
        for gather in (False, True):
            seed_apart(comms)
            layer = axo.nn.Linear(8, n, comms=comms, features=axo.nn.Features(uneven_out=True, gather_output=gather))
            serial = serial_linear(8, n)
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(5))
            weights = torch.randn(4, n, generator=torch.Generator().manual_seed(6))
            expected = serial(x)
            (expected * weights).sum(1).mean().backward()
            output = layer(axo.shard_input(layer, x))
            columns = axo.Placement((n,), ((() if gather else ("x",)),), comms=comms)
            my_weights = torch.stack([axo.shard(row, columns) for row in my_rows(comms, weights)])
            (output * my_weights).sum(1).mean().backward()
            assert_close(axo.unshard_output(layer, output), expected, LIMIT, f"{n} columns, gather={gather}")
            assert_gradients_match(layer, serial, LIMIT, f"{n} columns, gather={gather}")


def test_uneven_outputs_and_gathered_ones():
    run_ranks(uneven_outputs, 8, "4x1x2x1")


def different_inputs(case):
    comms = axo.connect("1x2x1x1")
    layer = axo.nn.Linear(8, 12, comms=comms)
    if case == "dtype" and comms.rank:
        layer.double()
    layer(torch.zeros(2 + (case == "rows" and comms.rank), 4, dtype=layer.weight.dtype))


@pytest.mark.parametrize("case", ["rows", "dtype"])
def test_inputs_that_differ_between_ranks_are_an_error_on_every_rank(case):
    for outcome in rank_outcomes(different_inputs, 2, case, timeout=30):
        assert outcome.error == "Mismatch", outcome.describe()


def stays_a_module(grid):
    comms = axo.connect(grid)
    seed_apart(comms)
    before = torch.get_rng_state()
    layer = axo.nn.Linear(8, 12, comms=comms)
    assert isinstance(layer, nn.Linear) and (layer.in_features, layer.out_features) == (8, 12)
    if comms.rank:
        assert torch.equal(torch.get_rng_state(), before), "the generator of a rank but the first has moved"
    twin = copy.deepcopy(layer)
    assert twin.comms is comms and twin.weight.placement == layer.weight.placement
    assert torch.equal(twin.weight, layer.weight) and twin.weight is not layer.weight
    full = {"weight": torch.randn(12, 8, generator=torch.Generator().manual_seed(4)), "bias": torch.zeros(12)}
    whole = dict(full)
    for strict_shape in (full, {name: axo.shard(t, getattr(layer, name).placement) for name, t in full.items()}):
        twin.load_state_dict(strict_shape)
        assert_close(twin.full_weight(), full["weight"], 0, "load_state_dict")
        twin.reset_parameters()
    twin.load_state_dict(full, assign=True)
    assert_close(twin.full_weight(), full["weight"], 0, "load_state_dict(assign=True)")
    assert whole["weight"] is full["weight"], "load_state_dict changed the caller's dictionary"
    with pytest.raises(RuntimeError, match=r"size mismatch for weight.* That is this rank's part of \[12, 8\]\."):
        twin.load_state_dict({"weight": torch.zeros(13, 8), "bias": torch.zeros(12)})
    meta = axo.nn.Linear(8, 12, device="meta", comms=comms)
    assert meta.weight.is_meta
    meta.to_empty(device="cpu")
    assert meta.weight.placement == layer.weight.placement, "the placement is lost when a layer leaves the meta device"
    assert layer.double().weight.placement is layer.placements["weight"]
    assert dict(layer.state_dict()).keys() == {"weight", "bias"} and "grid=2x2x2x1" in repr(layer)


def test_stays_a_module():
    run_ranks(stays_a_module, 8, "2x2x2x1")


BAD = [
    (
        {"in_features": 30, "name": "mlp.fc"},
        "Linear 'mlp.fc': in_features=30 does not divide over y=4; use in_features=28 or 32",
    ),
    (
        {"out_features": 31},
        "Linear: out_features=31 does not divide over x=2; use out_features=30 or 32, or a grid with x in {1}",
    ),
    ({"features": axo.nn.Features((16, 9, 7))}, "Linear: a row block of out_features=9 does not divide over x=2"),
    ({"features": axo.nn.Features((16, 9))}, "row blocks (16, 9) do not add up to dim 0"),
    ({"grad_reduce": "nonsense"}, "grad_reduce='nonsense' is not known; use 'mean' or 'sum'"),
    ({"gather_cache": "nonsense"}, "gather_cache='nonsense' is not known"),
    ({"name": "fc"}, "Linear 'fc': input of shape (2, 32) must end in 8, this rank's part of in_features=32 over y=4"),
]


def bad_input():
    comms = axo.connect("2x4x1x1")
    messages = []
    for options, _ in BAD:
        with pytest.raises(ValueError) as error:
            axo.nn.Linear(**{"in_features": 32, "out_features": 32, **options}, comms=comms)(torch.zeros(2, 32))
        messages.append(str(error.value))
    return messages


def test_bad_input_is_one_error_on_every_rank():
    for messages in run_ranks(bad_input, 8):
        for message, (_, expected) in zip(messages, BAD, strict=True):
            assert expected in message
