"""The engine: overlap changes when things happen, not what comes out.

Oracles: the run without any overlap, of the same model on the same grid; DESIGN's counts of gathered weights; serial
layers where modules run out of order; and the engine's record for what comes before what.
"""

import itertools
from functools import partial

import pytest
import torch
from litgpt.config import Config
from litgpt.model import GPT
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import axo
from axo.overlap.engine import Engine
from tests.gpt import LLAMA, NEOX, batch
from tests.launcher import run_ranks
from tests.nn.support import assert_close, assert_gradients_match, my_rows, seed_apart, serial_seed

OFF = axo.Overlap(False, False, False, "none", 0)
ALL = [axo.Overlap(*switches, cache) for *switches, cache in itertools.product(*[(False, True)] * 3, ("none", "all"))]
CHECKPOINTS = ("no", "reentrant", "not reentrant")
# Sums are taken in the same order with and without overlap; what may differ is how a tensor is cut for a collective.
LIMIT = 1e-6


def selective(save):
    def policy(_, op, *args, **options):
        return CheckpointPolicy.MUST_SAVE if op in save else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(create_selective_checkpoint_contexts, policy)


def build(comms, config, overlap, recompute="no"):
    seed_apart(comms)
    model = axo.parallelize(GPT(config), comms, overlap=overlap)
    options = {
        "reentrant": {"use_reentrant": True},
        "not reentrant": {"use_reentrant": False},
        "selective": {"use_reentrant": False, "context_fn": selective({torch.ops.aten.mm.default})},
    }
    for block in model.transformer.h if recompute != "no" else ():
        block.forward = partial(checkpoint, block.forward, **options[recompute])
    return model


def loss_of(comms, model, step):
    ids, targets = (my_rows(comms, part) for part in batch(model.config, step))
    return axo.nn.cross_entropy(model(ids), targets, comms=comms, columns=model.config.padded_vocab_size)


def train(comms, config, overlap, recompute, steps, optimizer=torch.optim.AdamW):
    """Losses, all gradients, and the gathers of each step."""
    model = build(comms, config, overlap, recompute)
    stepper = optimizer(model.parameters(), lr=1e-3)
    losses, gradients, gathers = [], [], []
    for step in range(steps):
        with axo.count_collectives() as counts:
            loss = loss_of(comms, model, step)
            stepper.zero_grad()
            loss.backward()
        gathers.append(counts["all_gather", "z"].calls)
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        stepper.step()
        losses.append(loss.item())
    return losses, gradients, gathers


def compare(comms, config, overlap, recompute, steps, expected):
    losses, gradients, gathers = train(comms, config, overlap, recompute, steps)
    what = f"{overlap}, checkpointing {recompute}"
    for mine, theirs in zip(gradients[:2], expected[1], strict=False):
        for a, b in zip(mine, theirs, strict=True):
            assert_close(a, b, LIMIT, what)
    assert max(abs(a - b) for a, b in zip(losses, expected[0], strict=True)) <= 1e-5, what
    return losses, gathers


def combinations(grid, cases, steps, layers=2):
    comms = axo.connect(grid)
    config = Config(**LLAMA | {"n_layer": layers})
    expected = train(comms, config, OFF, "no", steps)
    linears = 5 * config.n_layer + 1
    for overlap, recompute in cases:
        losses, gathers = compare(comms, config, overlap, recompute, steps, expected)
        assert gathers == [1 + linears * (1 if overlap.gather_cache == "all" else 2)] * steps, (overlap, recompute)
        assert losses == compare(comms, config, overlap, recompute, steps, expected)[0], "two runs differ"
    return len(cases)


def test_a_sample_of_the_combinations():
    cases = [(ALL[-2], "not reentrant"), (ALL[-1], "reentrant"), (ALL[6], "no")]
    run_ranks(combinations, 8, "2x2x2x1", cases, 3, timeout=120)


@pytest.mark.soak
@pytest.mark.parametrize("cache", ["none", "all"])
@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("recompute", CHECKPOINTS)
def test_all_sixteen_combinations_for_fifty_steps(recompute, scatter, cache):
    wanted = [overlap for overlap in ALL if (overlap.gather_cache, overlap.reduce_scatter) == (cache, scatter)]
    cases = [(overlap, recompute) for overlap in wanted]
    assert run_ranks(combinations, 8, "2x2x2x1", cases, 50, 1, timeout=1800) == [4] * 8


def cache_sizes(grid):
    comms = axo.connect(grid)
    config = Config(**NEOX)
    linears = 4 * config.n_layer + 1
    block = 4 * config.n_embd // comms.grid.x * config.n_embd // comms.grid.y * 4  # bytes of a gathered MLP weight
    found = {}
    for recompute in CHECKPOINTS:
        for cache, kept in (("none", 0), (3, 3), ("all", linears), (f"{2 * block}B", None)):
            _, _, gathers = train(comms, config, axo.Overlap(gather_cache=cache), recompute, 2)
            assert len(set(gathers)) == 1, (cache, gathers)
            if kept is not None:
                assert gathers[0] == 1 + 2 * linears - kept, (cache, recompute, gathers)
            found[cache] = gathers[0]
        assert 1 + linears < found[f"{2 * block}B"] < 1 + 2 * linears
    return True


def engines_made():
    """How many engines two layers make: by themselves, once one is asked for, and for a model of both."""
    made, init = [], Engine.__init__

    def counted(self, *args):
        made.append(1)
        init(self, *args)

    Engine.__init__ = counted
    comms = axo.connect("2x1x1x1")
    layers = [axo.nn.Linear(8, 8, comms=comms, transposed=bool(i)) for i in range(2)]
    alone = len(made)
    axo.overlap.attach(torch.nn.Sequential(*layers), comms)
    attached = len(made)
    axo.nn.Linear(8, 8, comms=comms)(torch.ones(2, 8))
    return alone, attached, len(made)


def test_a_model_makes_one_engine():
    assert run_ranks(engines_made, 2) == [(0, 1, 2)] * 2


def test_gathers_a_step_for_every_cache():
    assert all(run_ranks(cache_sizes, 4, "1x2x2x1", timeout=120))


def buckets(grid):
    comms = axo.connect(grid)
    config = Config(**NEOX)
    expected = train(comms, config, OFF, "no", 3)
    calls = {}
    for size in (0, 1 << 13, 1 << 20):
        overlap = axo.Overlap(bucket_bytes=size)
        compare(comms, config, overlap, "no", 3, expected)
        model = build(comms, config, overlap)
        with axo.count_collectives() as counts:
            loss_of(comms, model, 0).backward()
        calls[size] = counts["all_reduce", "data"].calls, counts["all_reduce", "data"].elements
    assert calls[0][0] == len(list(model.parameters())) > calls[1 << 13][0] > calls[1 << 20][0], calls
    assert len({elements for _, elements in calls.values()}) == 1, calls
    return calls


@pytest.mark.parametrize("grid", ["1x1x1x4", "1x1x2x2"])
def test_gradients_travel_over_data_in_buckets(grid):
    run_ranks(buckets, 4, grid, timeout=90)


def order(grid):
    comms = axo.connect(grid)
    model = build(comms, Config(**LLAMA), axo.Overlap(gather_cache="none"))
    for step in range(2):
        with axo.overlap.record(model) as events:
            loss_of(comms, model, step).backward()
    names = [(e.what, e.op, e.axis, e.layer) for e in events]

    def at(*name):
        return names.index(name)

    forward = [e.layer for e in events if (e.what, e.op) == ("compute", "forward")]
    assert len(forward) == 11
    for layer, following in itertools.pairwise(forward):
        issued = at("issue", "all_gather", "z", following)
        assert issued < at("compute", "forward", "", layer), f"{following} is gathered behind {layer}"
    backward = [e.layer for e in events if (e.what, e.op) == ("compute", "dI")]
    assert backward == forward[::-1]
    for layer in backward:
        axis = "y" if layer.endswith("proj") else "x"
        if layer.endswith("fc_2"):  # it takes what fc_1 takes: their gradients are summed as one
            assert ("issue", "all_reduce", axis, layer) not in names
            continue
        issued = at("issue", "all_reduce", axis, layer)
        assert at("compute", "dI", "", layer) < issued < at("compute", "dW", "", layer), layer
        waited = [n for n, e in enumerate(names) if e == ("wait", "all_reduce", axis, layer) and n > issued]
        assert all(wait > at("compute", "dW", "", layer) for wait in waited), layer
    last_product = max(n for n, e in enumerate(names) if e[0] == "compute")
    assert sum(e[:2] == ("issue", "reduce_scatter") for e in names) == 12
    assert all(n > last_product for n, e in enumerate(names) if e[:2] == ("wait", "reduce_scatter"))
    return True


def test_the_record_shows_the_order():
    assert all(run_ranks(order, 8, "2x2x2x1"))


def groups(grid):
    comms = axo.connect(grid)
    model = build(comms, Config(**LLAMA), axo.Overlap(gather_cache="none"))
    opened = []
    enter = axo.group.__enter__
    axo.group.__enter__ = lambda self: (opened.append(self), enter(self))[1]
    for step in range(3):
        opened.clear()
        loss_of(comms, model, step).backward()
    return len(opened)


def test_a_block_is_gathered_as_one_group():
    assert run_ranks(groups, 2, "1x1x2x1") == [4] * 2  # two blocks, forward and backward


def routes(grid):
    """Modules used twice, skipped, and out of order; a pass in evaluation between. One rank keeps what passes without
    backward gave, and so their nodes: such a pass comes before the forward pass, or between it and its backward."""
    comms = axo.connect(grid)

    class Net(torch.nn.Module):
        def __init__(self, make):
            super().__init__()
            self.layers = torch.nn.ModuleList(make(8, 8) for _ in range(4))

        def forward(self, x, route, recompute=False):
            for number in route:
                run = self.layers[number]
                x = (checkpoint(run, x, use_reentrant=False) if recompute else run(x)).tanh()
            return x

    serial_seed()
    serial = Net(torch.nn.Linear)
    x, kept = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)), []

    def keep_passes(net, *how):
        rows = my_rows(comms, x).requires_grad_()
        passes = [net(rows, *how), net.layers[0](rows)]
        kept.extend(passes if comms.rank == 0 else [])

    for cache, recompute in (("all", False), ("all", True), ("none", True), (2, False)):
        overlap = axo.Overlap(gather_cache=cache)
        net = Net(partial(axo.nn.Linear, comms=comms))
        for mine, theirs in zip(net.layers, serial.layers, strict=True):
            mine.load_state_dict(theirs.state_dict())
        axo.overlap.attach(net, comms, overlap)
        for route in ([0, 1, 2, 3], [0, 1, 2, 3], [0, 2, 2, 3], [3, 2, 1, 0], [1], [0, 1, 2, 3], [0, 0, 1, 1]):
            for module, rows in ((serial, x), (net, my_rows(comms, x))):
                module.zero_grad()
                keep_passes(net, route, recompute)
                loss = module(rows, route, recompute).square().sum(1).mean()
                keep_passes(net, route, recompute)
                loss.backward()
            for mine, theirs in zip(net.layers, serial.layers, strict=True):
                assert (mine.weight.grad is None) == (theirs.weight.grad is None), route
                if theirs.weight.grad is not None:
                    assert_gradients_match(mine, theirs, 1e-6, f"{overlap}, {route}")
            with torch.no_grad():
                assert_close(net(my_rows(comms, x), route), my_rows(comms, serial(x, route)), 1e-6, str(route))
                for each in (serial, net):  # what an optimizer does; then nothing gathered before may be used
                    for parameter in each.parameters():
                        parameter.mul_(0.9)
    return True


def test_modules_used_twice_skipped_and_out_of_order():
    assert all(run_ranks(routes, 4, "1x1x4x1"))


def repeats(grid):
    """Of each weight asked for, whether it was on its way: layers of one block in turn, three passes in evaluation."""
    from axo.overlap.gathers import Gathers

    comms = axo.connect(grid)
    layers = torch.nn.ModuleList(axo.nn.Linear(8, 8, comms=comms) for _ in range(2))
    net = torch.nn.ModuleList([layers])
    x, first, steps, found, ask = torch.randn(4, 8), layers[0], False, [], Gathers._ask

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = net

        def forward(self, x):
            x = layers[1](first(x))
            if steps:
                first.matmul.exchange.engine.gathers.outdate()
            return layers[1](first(layers[1](first(x))))

    model = Net()
    axo.overlap.attach(model, comms, axo.Overlap(gather_cache="none"))
    Gathers._ask = lambda self, route, *args: (found.append(route in self._ahead), ask(self, route, *args))[1]
    with torch.no_grad():
        model(x)
        model(x)
        steps = True
        model(x)
    return found


def test_layers_that_repeat_in_a_block_are_gathered_ahead_each_time():
    first, known = [False] * 6, [False] + [True] * 5
    after_a_step = [False, True, False, True, True, True]
    assert run_ranks(repeats, 2, "1x1x2x1") == [first + known + after_a_step] * 2


def selective_checkpoints(grid):
    comms = axo.connect(grid)
    config = Config(**LLAMA)
    expected = train(comms, config, OFF, "no", 2)
    for cache in ("none", "all"):
        compare(comms, config, axo.Overlap(gather_cache=cache), "selective", 2, expected)
    return True


def test_selective_checkpointing():
    assert all(run_ranks(selective_checkpoints, 8, "2x2x2x1"))


def copies_and_changes(grid):
    """Nothing gathered is ever stale: load_state_dict, changes in place, another tensor, another dtype, evaluation."""
    comms = axo.connect(grid)
    model = build(comms, Config(**LLAMA), axo.Overlap())
    ids = my_rows(comms, batch(model.config, 0)[0])

    def fresh():
        twin = build(comms, model.config, OFF)
        twin.load_state_dict(model.state_dict())
        with torch.no_grad():
            return twin(ids)

    state = {name: value + 0.01 for name, value in model.state_dict().items()}
    for change in (
        lambda: model.load_state_dict(state),
        lambda: model.load_state_dict({n: v * 0.9 for n, v in state.items()}, assign=True),
        lambda: [p.data.mul_(1.1) for p in model.parameters()],
        lambda: [setattr(p, "data", p.data * 0.9) for p in model.parameters()],
        lambda: torch._foreach_mul_([p.data for p in model.parameters()], 1.05),
    ):
        loss_of(comms, model, 0).backward()
        change()
        with torch.no_grad():
            assert_close(model(ids), fresh(), 0, "after a change")
        assert_close(model(ids), fresh(), 0, "after a change, recording")
    kept = [loss_of(comms, model, 0)]  # a graph that lives on, with its gathered weights

    class Growing(torch.optim.Optimizer):
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                parameter.data.mul_(1.02)  # as many optimizers outside of torch: no version counts it

    loss_of(comms, model, 1).backward()
    Growing(model.parameters(), {}).step()
    assert_close(model(ids), fresh(), 0, f"after a step, {len(kept)} graph alive")
    loss_of(comms, model, 0).backward()
    model.eval()
    with torch.inference_mode():
        assert_close(model(ids), fresh(), 0, "inference")
    return True


def test_nothing_gathered_is_stale():
    assert all(run_ranks(copies_and_changes, 4, "1x2x2x1"))
