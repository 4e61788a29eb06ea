"""algorithm="tesseract" and "summa": training of litgpt's GPT against serial PyTorch, counts, checkpoints, refusals.

Oracle: the unmodified serial model, torch's loss, clipping and AdamW.
"""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from litgpt import lora
from litgpt.config import Config
from litgpt.model import GPT

import axo
import axo.checkpoint
from axo.arrangement import arrangement_of
from axo.matmul import cost
from tests.gpt import LLAMA, NEOX, batch, serial_losses
from tests.launcher import run_ranks
from tests.nn.support import assert_close, gradients_of, my_rows, once, seed_apart, serial_seed

STEPS, LONG = 5, 20
LIMIT = 1e-4  # as for the other algorithm: tests/plans/test_litgpt_plan.py
MODELS = {"llama": (LLAMA, False), "neox": (NEOX, True)}


def mean_over_rows(comms, value):
    value = value.detach().clone().reshape(1)
    for axis in ("x", "z", "data"):
        comms.axis(axis).all_reduce(value, "avg")
    return value.item()


def build(comms, config, algorithm, meta=False, **options):
    seed_apart(comms)
    with torch.device("meta" if meta else "cpu"):
        model = GPT(config)
    axo.parallelize(model, comms, algorithm=algorithm, **options)
    return axo.init_weights(model) if meta else model


def train(grid, algorithm, config, meta, steps=STEPS, **options):
    """Losses of the whole batch."""
    comms, config = axo.connect(grid), Config(**config)
    model = build(comms, config, algorithm, meta, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_fn = axo.nn.CrossEntropyLoss(comms=comms, columns=config.padded_vocab_size)
    losses = []
    for step in range(steps):
        ids, targets = batch(config, step)
        assert torch.equal(axo.shard_batch(ids, comms), my_rows(comms, ids))
        loss = loss_fn(model(my_rows(comms, ids)), my_rows(comms, targets))
        optimizer.zero_grad()
        loss.backward()
        axo.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(mean_over_rows(comms, loss))
    return losses


def train_all(runs, steps):
    dist.init_process_group("axo")
    return [train(*run[:2], *MODELS[run[2]], steps, **run[3]) for run in runs]


def check_losses(runs, steps):
    found = run_ranks(train_all, axo.Grid.parse(runs[0][0]).world_size, runs, steps, timeout=300)
    for number, (grid, algorithm, name, _) in enumerate(runs):
        expected = serial_losses(MODELS[name][0], steps, MODELS[name][1])
        assert expected[-1] < expected[0] - 0.2, "the serial run learns nothing, so it proves nothing"
        for losses in (rank[number] for rank in found):
            worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
            assert worst <= LIMIT, f"{algorithm} on {grid}, {name}: losses differ by {worst:.1e}"


ON_4 = [("2x2x1x1", "tesseract", "neox", {}), ("2x2x1x1", "summa", "llama", {})]
ON_8 = [("2x2x2x1", "tesseract", name, {}) for name in MODELS] + [("2x2x1x2", "summa", "llama", {"zero": 2})]
ON_16 = [("2x2x2x2", "tesseract", name, {}) for name in MODELS] + [("4x4x1x1", "summa", "neox", {})]


@pytest.mark.parametrize("runs", [ON_4, ON_8], ids=["4 ranks", "8 ranks"])
def test_losses_equal_serial(runs):
    check_losses(runs, STEPS)


@pytest.mark.soak
def test_losses_equal_serial_on_16_ranks():
    check_losses(ON_16, LONG)


Q = 2  # of the grids below
STEP_ROWS = 16  # of one data-parallel group


def linear_counts(comms):
    """A layer's collectives, by name and against its cost; dW the same bits along z, and wrong without its sum."""
    for in_features, out_features, bias in ((24, 32, False), (8, 22, True)):
        layer = axo.nn.Linear(in_features, out_features, bias, comms=comms)
        assert layer.weight.shape == (out_features // Q, in_features // Q)
        given = my_rows(comms, torch.randn(STEP_ROWS, in_features // Q)).requires_grad_()
        for itemsize in (4, 2):
            with torch.autocast("cpu", torch.bfloat16, enabled=itemsize == 2), axo.count_collectives() as forward:
                output = layer(given)
            assert {key: count.calls for key, count in forward.items()} == {
                ("broadcast", "y"): Q,
                ("broadcast", "x"): Q,
            }
            layer.zero_grad()
            with axo.count_collectives() as backward:
                output.float().square().sum().backward()
            calls = {key: count.calls for key, count in backward.items()}
            blocks = {(op, axis): Q for op in ("broadcast", "reduce") for axis in ("x", "y")}
            vectors = {("all_reduce", "x"): 1} if bias else {}
            assert calls == blocks | vectors | {("all_reduce", "z"): 1 + bias}
            expected = layer.cost(STEP_ROWS, itemsize=itemsize)
            both = {key: (c.calls, c.elements, c.bytes) for key, c in cost.total(expected).items()}
            assert both == {key: tuple(forward[key].plus(*backward[key])) for key in {*forward, *backward}}
        along_z = comms.z.all_gather(layer.weight.grad.unsqueeze(0))
        assert torch.equal(along_z[0], along_z[1])
    whole = axo.unshard_grad(layer.weight)
    layer.exchanges[0].weight_reductions = ()  # without the sum over depth
    layer.zero_grad()
    layer(given).square().sum().backward()
    assert not torch.allclose(axo.unshard_grad(layer.weight), whole, rtol=1e-2, atol=1e-2)


def head_of_a_table(comms):
    """A head that lies as the embedding does: the uneven vocabulary is gathered over x; counted against its cost."""
    features = axo.nn.Features(as_table=True, uneven_out=True)
    layer = axo.nn.Linear(8, 23, False, comms=comms, features=features)
    assert layer.weight.shape == ((12, 11)[comms.coords.x], 4)
    given = my_rows(comms, torch.randn(STEP_ROWS, 4)).requires_grad_()
    with axo.count_collectives() as counts:
        output = layer(given)
        output.square().sum().backward()
    assert output.shape[1] == (12, 11)[comms.coords.y]
    expected = {key: (c.calls, c.elements) for key, c in cost.total(layer.cost(STEP_ROWS)).items()}
    assert {key: (c.calls, c.elements) for key, c in counts.items()} == expected


def serial_step(make, ids, targets):
    """The oracle: logits and gradients of a serial model, and how many elements its products' weights have."""
    serial = make()
    logits = serial(ids)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    weights = sum(m.weight.numel() for m in serial.modules() if isinstance(m, torch.nn.Linear))
    return logits.detach(), gradients_of(serial), weights


def compare(comms, serial, model, ids, targets, whole=False):
    """Logits and every gradient that serial has, after one loss of the whole batch. ``whole``: logits are."""
    expected, gradients, _ = once(partial(serial_step, partial(copy.deepcopy, serial), ids, targets))
    logits = model(my_rows(comms, ids))
    mine = my_rows(comms, targets)
    if whole:
        assert_close(logits, my_rows(comms, expected), 1e-5, "logits")
        F.cross_entropy(logits.flatten(0, 1), mine.flatten()).backward()
    else:
        assert_close(axo.unshard_output(model.lm_head, logits), expected, 1e-5, "logits")
        axo.nn.CrossEntropyLoss(comms=comms, columns=serial.config.padded_vocab_size)(logits, mine).backward()
    for name, _ in serial.named_parameters():
        mine = model.get_parameter(name)
        assert (mine.grad is None) == (name not in gradients), name
        if name in gradients:
            assert_close(axo.unshard_grad(mine), gradients[name], 1e-5, name)


def tied_heads_and_adapters(comms, ids, targets):
    for tied in (True, False):
        with torch.random.fork_rng(devices=[]):
            serial_seed()
            flags = {f"lora_{part}": True for part in ("query", "value", "projection", "mlp", "head")}
            serial = GPT(Config(**LLAMA)) if tied else lora.GPT(lora.Config(**LLAMA, **flags, lora_r=3, lora_alpha=6))
            if tied:
                serial.lm_head.weight = serial.transformer.wte.weight
                serial.apply(serial._init_weights)
            else:
                for name, parameter in serial.named_parameters():
                    if name.endswith("lora_B"):
                        torch.nn.init.normal_(parameter, std=0.1)
                lora.mark_only_lora_as_trainable(serial)
        for plan in ("litgpt", "auto") if tied else ("litgpt",):
            model = copy.deepcopy(serial)
            seed_apart(comms)
            axo.parallelize(model, comms, plan=plan, algorithm="tesseract")
            assert not tied or (model.lm_head.as_table and model.lm_head.weight is model.transformer.wte.weight)
            compare(comms, serial, model, ids, targets, whole=plan == "auto")


def whole_gradients(model):
    return {name: axo.unshard_grad(parameter) for name, parameter in model.named_parameters()}


def gradients(comms, config, overlap=None, pieces=1, reduce_dtype=None):
    model = build(comms, config, "tesseract", overlap=overlap, reduce_dtype=reduce_dtype)
    ids, targets = (my_rows(comms, part) for part in batch(config, 0))
    loss_fn = axo.nn.CrossEntropyLoss(comms=comms, columns=config.padded_vocab_size)
    for number, (inputs, wanted) in enumerate(zip(ids.chunk(pieces), targets.chunk(pieces), strict=True)):
        with axo.no_sync(model) if number + 1 < pieces else nullcontext():
            (loss_fn(model(inputs), wanted) / pieces).backward()
    return model, whole_gradients(model)


def one_step(grid):
    comms = axo.connect(grid)
    comms.arrange(arrangement_of("test", "tesseract"))
    assert (comms.data_ranks, comms.grid.x) == (4, Q)
    linear_counts(comms)
    head_of_a_table(comms)
    ids, targets = batch(Config(**LLAMA), 0)
    tied_heads_and_adapters(comms, ids, targets)
    for fields in (LLAMA | {"n_query_groups": 1, "norm_qk": True}, NEOX):  # a head of keys that two ranks share
        config = Config(**fields)
        with torch.random.fork_rng(devices=[]):
            serial_seed()
            expected, wanted, whole = once(partial(serial_step, partial(GPT, config), ids, targets))
        model, found = gradients(comms, config)
        assert_close(axo.unshard_output(model.lm_head, model(my_rows(comms, ids))), expected, 1e-5, "logits")
        for name, gradient in wanted.items():
            assert_close(found[name], gradient, 1e-5, name)
        held = sum(module.weight.numel() for module in model.modules() if isinstance(module, axo.nn.Linear))
        assert held <= whole // Q**2 + config.n_embd * (config.n_embd // Q)  # the uneven head, keys that ranks share
    off = axo.Overlap(all_reduce=False, reduce_scatter=False, all_gather=False, gather_cache="none", bucket_bytes=0)
    for options in ({"overlap": off}, {"pieces": 2}, {"reduce_dtype": torch.float32}):
        for name, gradient in gradients(comms, config, **options)[1].items():
            if "overlap" in options:
                assert torch.equal(gradient, found[name]), f"{name}: overlap changes bits"
            assert_close(gradient, found[name], 1e-6, f"{name}, {options}")
    with pytest.raises(ValueError, match=r"arranged for 'tesseract' already; call axo.connect again"):
        build(comms, config, "axonn")


def test_one_step_is_exact_and_counted():
    run_ranks(one_step, 8, "2x2x2x1", timeout=120)


def continued(grid, algorithm, folder, load, steps):
    """Load or begin, train, save; the losses and the whole state."""
    comms, config = axo.connect(grid), Config(**NEOX | {"n_layer": 1})
    model = build(comms, config, algorithm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if load:
        axo.checkpoint.load(folder, model, optimizer)
    state = [axo.unshard(p.detach(), p.placement) for p in model.parameters()]
    moments = [axo.unshard(optimizer.state[p]["exp_avg"], p.placement) for p in model.parameters() if load]
    loss_fn = axo.nn.CrossEntropyLoss(comms=comms, columns=config.padded_vocab_size)
    losses = []
    for step in steps:
        inputs, targets = (axo.shard_batch(part, comms) for part in batch(config, step))
        loss = loss_fn(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value = loss.detach().reshape(1)
        losses.append(comms.world.all_reduce(value, "avg").item())
        if step == 1:
            axo.checkpoint.save(folder, model, optimizer, step=2)
            state = [axo.unshard(p.detach(), p.placement) for p in model.parameters()]
            moments = [axo.unshard(optimizer.state[p]["exp_avg"], p.placement) for p in model.parameters()]
    comms.close()
    return state, moments, losses[-2:]


@pytest.mark.parametrize(
    "saved, loaded",
    [(("2x2x2x1", "tesseract"), ("4x1x2x1", "axonn")), (("2x1x2x2", "axonn"), ("2x2x2x1", "tesseract"))],
    ids=["to axonn", "from axonn"],
)
def test_other_algorithms_and_grids_load_a_checkpoint(tmp_path, saved, loaded):
    before = run_ranks(continued, 8, *saved, str(tmp_path), False, range(4))[0]
    after = run_ranks(continued, 8, *loaded, str(tmp_path), True, range(2, 4))[0]
    for one, other in zip(before[0] + before[1], after[0] + after[1], strict=True):
        assert torch.equal(one, other)
    assert after[2] == pytest.approx(before[2], abs=1e-5)


def test_grids_that_do_not_fit_and_those_too_deep():
    tesseract, summa = (arrangement_of("test", name) for name in ("tesseract", "summa"))
    for grid, such in (("2x1x2x2", "2x2x2x1, 2x2x1x2"), ("4x1x1x4", "4x4x1x1, 2x2x2x2, 2x2x1x4")):
        with pytest.raises(ValueError, match=rf"'tesseract' cannot use grid {grid}; it needs x = y .* such as {such}"):
            tesseract.check(axo.Grid.parse(grid))
    with pytest.raises(ValueError, match=r"'summa' cannot use grid 2x2x2x1; it needs x = y and z = 1, such as 2x2x1x2"):
        summa.check(axo.Grid.parse("2x2x2x1"))
    with pytest.warns(UserWarning, match=r"a depth z=4 above q=2"):
        tesseract.check(axo.Grid(2, 2, 4))
    with pytest.raises(ValueError, match=r"algorithm='cannon' is not known; use one of axonn, tesseract, summa"):
        arrangement_of("test", "cannon")


def refused(grid):
    comms = axo.connect(grid)
    gpt = GPT(Config(**LLAMA))
    only = r"is not supported by algorithm 'summa'; use algorithm='axonn'"
    with pytest.raises(ValueError, match=rf"sequence_parallel=True {only}"):
        axo.parallelize(gpt, comms, algorithm="summa", sequence_parallel=True)
    axo.parallelize(gpt, comms, algorithm="summa")
    with pytest.raises(ValueError, match=r"Conv2d is not supported by algorithm 'summa'"):
        axo.nn.Conv2d(4, 4, 1, comms=comms)


def test_what_only_axonn_can_do_is_refused():
    run_ranks(refused, 4, "2x2x1x1")
