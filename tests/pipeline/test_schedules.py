"""Schedules over stages on grids: gradients of accumulated steps equal serial torch; what each phase issues is counted.

The oracle is litgpt's own model in one process, in plain torch. Gradients come out of the parallel stages as whole
tensors, under the names of the whole model.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from litgpt.config import Config
from litgpt.model import GPT
from torch.utils.checkpoint import checkpoint

import axo
from axo.nn.placeholder import Placeholder, renamed
from axo.overlap import record
from axo.overlap.events import TracedWork
from axo.overlap.weight_phase import WeightPhase
from axo.perf import machine
from axo.perf.run_options import RunOptions
from axo.perf.stages import StageTimes
from axo.pipeline.cut import workload_of
from tests.gpt import LLAMA, NEOX
from tests.launcher import run_ranks
from tests.nn.support import my_rows, serial_seed

ROWS, TOKENS, STEPS = 16, 8, 2
FOUR = {**LLAMA, "n_layer": 4, "n_embd": 32, "intermediate_size": 48, "n_head": 4, "n_query_groups": 2}
EIGHT = {**FOUR, "n_layer": 8}
# Sums in another order, in fp32: within 1e-6 of the largest gradient here. A wrong weight of a step is off by a half.
LIMIT = 1e-5


def batch(step):
    generator = torch.Generator().manual_seed(40 + step)
    return tuple(torch.randint(100, (ROWS, TOKENS), generator=generator) for _ in range(2))


def serial_gradients(config, tie=False):
    """Gradients of two accumulated steps, and the mean loss of each."""
    model = GPT(Config(**config))
    if tie:
        model.lm_head.weight = model.transformer.wte.weight
    serial_seed()
    model.apply(model._init_weights)
    losses = []
    for step in range(STEPS):
        ids, targets = batch(step)
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        loss.backward()
        losses.append(loss.item())
    return {name: parameter.grad for name, parameter in model.named_parameters()}, losses


def build(comms, name, config, *, microbatches=8, cuts="even", tie=False, recompute=False, **options):
    """(this rank's part of the model, the schedule); ``options`` are of ``axo.parallelize``."""
    config = Config(**config)
    with torch.device("meta"):
        model = GPT(config)
    if tie:
        model.lm_head.weight = model.transformer.wte.weight
    axo.parallelize(model, comms, **options)
    modules = axo.pipeline.split(model, comms, cuts, **axo.pipeline.layout(name))
    serial_seed()
    axo.init_weights(model, model._init_weights)
    for block in model.transformer.h if recompute else ():
        if not isinstance(block, Placeholder):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    rows = ROWS // comms.data_ranks
    stages = axo.pipeline.stages(modules, comms, rows=-(-rows // microbatches), tokens=TOKENS)
    of_rows = axo.nn.CrossEntropyLoss(comms=comms, columns=config.padded_vocab_size)
    loss = lambda logits, targets: of_rows(logits.flatten(0, 1), targets.flatten())  # noqa: E731
    return model, axo.pipeline.schedule(name, stages, microbatches=microbatches, loss=loss, rows=rows)


def accumulate(comms, schedule):
    """Two steps into the same gradients; this rank's mean loss of each, where it has the last stage."""
    found = []
    for step in range(STEPS):
        ids, targets = (my_rows(comms, tensor) for tensor in batch(step))
        losses = []
        schedule.step(ids, target=targets, losses=losses)
        if losses:
            found.append(torch.stack(losses).sum().item())
    return found


def compare(comms, model, expected, label):
    """Each gradient of this stage, whole, against the serial one."""
    seen, in_whole = set(), renamed(model)
    for own, parameter in model.named_parameters():
        name = in_whole.get(own, own)
        assert parameter.grad is not None, f"{label}: {name} has no gradient"
        whole = axo.unshard_grad(parameter)
        scale = expected[name].abs().max().item() + 1e-12
        worst = (whole - expected[name]).abs().max().item() / scale
        assert worst <= LIMIT, f"{label}: {name} is off by {worst:.1e} of its largest gradient"
        seen.add(name)
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, seen)
    assert set().union(*everywhere) == set(expected), f"{label}: some gradients are on no stage"


def messages(schedule):
    """A list that gets the bytes of each message that this rank's stages will send."""
    sent = []

    def noted(send_ops):
        def note(microbatch):
            operations = send_ops(microbatch)
            sent.extend(one.tensor.nbytes for one in operations)
            return operations

        return note

    for stage in schedule.axo_stages:
        stage.get_fwd_send_ops, stage.get_bwd_send_ops = noted(stage.get_fwd_send_ops), noted(stage.get_bwd_send_ops)
    return sent


def check_messages(sent, comms, schedule, model, microbatches):
    """Each micro-batch goes over each border of stages on two ranks, there and back; bytes as the planner counts."""
    workload = replace(workload_of(model), seq_length=TOKENS)
    all_rows = StageTimes(workload, comms.grid, machine.load("perlmutter"), RunOptions(ROWS * TOKENS)).message()
    row = all_rows // (ROWS // (comms.grid.z * comms.grid.data))
    costs = [row * part.numel() for part in torch.arange(ROWS // comms.data_ranks).tensor_split(microbatches)]
    mine = {stage.stage_index for stage in schedule.axo_stages}
    count = schedule.axo_stages[0].num_stages
    neighbours = [near for stage in mine for near in (stage - 1, stage + 1) if 0 <= near < count]
    wanted = STEPS * sum(near not in mine for near in neighbours) * costs
    assert sorted(sent) == sorted(wanted), f"{len(sent)} messages of {set(sent)} bytes; planned {wanted}"


def schedules_on(grid, stages, names, config, options):
    dist.init_process_group("axo")
    comms = axo.connect(grid, pipeline=stages)
    torch.manual_seed(1000 + comms.rank)  # of no consequence: first values are those of the first rank of all
    expected, losses = serial_gradients(config, options.get("tie", False))
    unequal = options.get("unequal", ())  # rows that six micro-batches do not divide
    options = {key: value for key, value in options.items() if key != "unequal"}
    for name, options in [(name, options) for name in names] + [(name, {"microbatches": 6}) for name in unequal]:
        model, schedule = build(comms, name, config, **options)
        order = getattr(schedule, "pipeline_order_with_comms", {})
        assert not any(one.sub_actions for one in order.get(comms.stage, ())), f"{name}: results wait for a pair"
        sent = messages(schedule)
        mine = accumulate(comms, schedule)
        check_messages(sent, comms, schedule, model, options.get("microbatches", 8))
        compare(comms, model, expected, f"{name} on {grid}")
        if mine and comms.data_ranks == 1:
            assert mine == pytest.approx(losses, abs=1e-5), f"{name}: losses {mine} against {losses}"
        norm = axo.clip_grad_norm_(model.parameters(), 1.0)
        total = torch.stack([grad.double().square().sum() for grad in expected.values()]).sum().sqrt().item()
        assert norm.item() == pytest.approx(total, rel=1e-5), f"{name}: norm {norm.item()} against {total}"
        if options.get("zero"):
            torch.optim.SGD(model.parameters(), 0.1).step()
    comms.close()


@pytest.mark.parametrize(
    ("grid", "names", "config", "options"),
    [
        ("1x1x1x1", axo.pipeline.SCHEDULES, FOUR, {"unequal": ["gpipe", "interleaved-1f1b", "dualpipev"]}),
        ("2x1x1x1", ["1f1b", "zero-bubble"], {**NEOX, "n_layer": 4, "n_embd": 32, "n_head": 4}, {}),
        ("1x2x1x1", ["gpipe", "zbv"], FOUR, {"tie": True}),
        ("1x1x2x1", ["interleaved-1f1b", "zbv"], FOUR, {"unequal": ["1f1b", "looped-bfs", "zero-bubble", "zbv"]}),
        ("1x1x1x2", ["looped-bfs", "dualpipev"], FOUR, {"zero": 1}),
        ("1x1x1x2", ["1f1b", "zbv", "dualpipev"], FOUR, {"tie": True, "zero": 2}),
        ("2x2x1x1", ["1f1b"], FOUR, {"tie": True, "algorithm": "tesseract"}),
    ],
)
def test_gradients_of_accumulated_steps_equal_serial(grid, names, config, options):
    run_ranks(schedules_on, 2 * axo.Grid.parse(grid).world_size, grid, 2, names, config, options, timeout=120)


def whole_gradient_of_a_table():
    """What somebody has put into ``.grad`` is whole; ZeRO-2 keeps rows, and adds up those of it."""
    dist.init_process_group("axo")
    comms = axo.connect("1x1x1x2", pipeline=2)
    expected, _ = serial_gradients(FOUR, True)
    model, schedule = build(comms, "1f1b", FOUR, tie=True, zero=2)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    accumulate(comms, schedule)
    compare(comms, model, {name: grad + 1 for name, grad in expected.items()}, "gradients of ones before")
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters() if "lm_head" in name}
    assert all(shape[0] > 64 for shape in shapes.values()), f"a table that is left cut: {shapes}"


def test_a_whole_gradient_of_a_table_that_two_stages_hold():
    run_ranks(whole_gradient_of_a_table, 4, timeout=120)


def test_each_stage_may_be_a_host_of_its_own():
    hosts = {"ranks_per_host": 2}
    run_ranks(schedules_on, 4, "2x1x1x1", 2, ["1f1b", "zbv"], FOUR, {}, timeout=120, hosts=hosts)


@pytest.mark.soak
@pytest.mark.parametrize("config", [FOUR, {**NEOX, "n_layer": 4, "n_embd": 32, "n_head": 4}], ids=["llama", "neox"])
@pytest.mark.parametrize("grid", ["1x1x1x1", "2x1x1x1", "1x2x1x1", "1x1x2x1", "1x1x1x2"])
def test_every_schedule_on_every_axis(grid, config):
    for options in ({}, {"recompute": True}, {"gather_cache": "none", "microbatches": 4}):
        world = 2 * axo.Grid.parse(grid).world_size
        run_ranks(schedules_on, world, grid, 2, axo.pipeline.SCHEDULES, config, options, timeout=240)


@pytest.mark.soak
def test_every_schedule_on_four_stages():
    for options in ({"tie": True}, {"cuts": [1, 2, 5]}):
        names = axo.pipeline.SCHEDULES if "tie" in options else ["gpipe", "1f1b"]
        run_ranks(schedules_on, 4, "1x1x1x1", 4, names, EIGHT, options, timeout=240)


# --- what is issued, and when -------------------------------------------------------------------------------------


def phases(recompute):
    """Counts of one step of zero bubble: (collectives of the weight phases, products by phase and layer)."""
    dist.init_process_group("axo")
    comms = axo.connect("2x1x2x1", pipeline=2)
    model, schedule = build(comms, "zero-bubble", FOUR, recompute=recompute)
    weights = [name for name, parameter in model.named_parameters() if parameter.dim() == 2]
    ids, targets = (my_rows(comms, tensor) for tensor in batch(0))
    run, inside, products, events = WeightPhase.run, [], Counter(), []

    def counted(work):
        before = len(events)
        with axo.count_collectives() as counts:
            run(work)
        inside.append(counts.total().calls)
        products.update(event.op for event in events[before:] if event.what == "compute")

    for _ in range(2):
        inside.clear()
        products.clear()
        WeightPhase.run = staticmethod(counted)
        try:
            with axo.count_collectives() as counts, record(model) as events:
                schedule.step(ids, target=targets)
        finally:
            WeightPhase.run = staticmethod(run)
        assert sum(inside) == 0, f"{sum(inside)} collectives in {len(inside)} weight phases"
        layers = sum("wte" not in name for name in weights)  # the embedding has no product
        assert products == {"dW": 8 * layers}, products
        of_step = Counter(event.op for event in events if event.what == "compute")
        forward = of_step.pop("forward")
        assert of_step == {"dW": 8 * layers, "dI": 8 * layers} and forward >= 8 * layers, of_step
        gathers, scatters = counts["all_gather", "z"].calls, counts["reduce_scatter", "z"].calls
        assert gathers == scatters == len(weights), f"{gathers} gathers, {scatters} scatters, {len(weights)} weights"
        torch.optim.SGD(model.parameters(), 0.1).step()


def test_zero_bubbles_weight_phase_computes_and_nothing_else():
    run_ranks(phases, 8, False, timeout=120)


@pytest.mark.soak
def test_zero_bubble_with_recomputation():
    run_ranks(phases, 8, True, timeout=240)


def messages_and_waits(names):
    """Of the last step of each schedule: what this rank did, in order: sent a gradient, waited for a reduction."""
    dist.init_process_group("axo")
    comms = axo.connect("1x1x1x2", pipeline=2)
    found = []
    for name in names:
        _, schedule = build(comms, name, FOUR)
        ids, targets = (my_rows(comms, tensor) for tensor in batch(0))
        done = []
        send, wait = axo.pipeline.Stage.get_bwd_send_ops, TracedWork.wait

        def sending(stage, number, send=send, done=done):
            done.append("message")
            return send(stage, number)

        def waiting(pending, wait=wait, done=done):
            if pending._work is not None:  # a sum over an axis of one rank is complete
                done.append("wait")
            return wait(pending)

        with patch.object(axo.pipeline.Stage, "get_bwd_send_ops", sending), patch.object(TracedWork, "wait", waiting):
            schedule.step(ids, target=targets)
        found.append(done)
    return found


def test_no_message_waits_for_the_reduction_of_gradients():
    """Else the stages of a pipeline would reduce one after the other."""
    for done in itertools.chain(*run_ranks(messages_and_waits, 4, ["1f1b", "interleaved-1f1b", "zero-bubble"])):
        assert "message" in done and "wait" in done and done == sorted(done)


def gathers_by_cache(name):
    dist.init_process_group("axo")
    comms = axo.connect("1x1x2x1", pipeline=2)
    found = []
    for cache in ("all", "none", 3):
        model, schedule = build(comms, name, FOUR, gather_cache=cache)
        ids, targets = (my_rows(comms, tensor) for tensor in batch(0))
        weights = sum(parameter.dim() == 2 for parameter in model.parameters())
        table = hasattr(model.transformer.wte, "weight")
        kept = {"all": weights, "none": 0, 3: 3 * len(schedule.axo_stages)}[cache]
        # The table is not wanted in backward; it is among the first three.
        gathers = kept + 8 * (2 * (weights - kept) - (table and not kept))
        for step in range(2):
            ahead = []

            def noted(method, ahead=ahead):
                def note(*args, **named):
                    ahead.append(counts["all_gather", "z"].calls)
                    return method(*args, **named)

                return note

            first = {
                name: noted(getattr(axo.pipeline.Stage, name)) for name in ("get_fwd_recv_ops", "forward_one_chunk")
            }
            with axo.count_collectives() as counts, patch.multiple(axo.pipeline.Stage, **first):
                schedule.step(ids, target=targets)
            assert counts["all_gather", "z"].calls == gathers, f"a cache of {cache} in step {step}"
            assert counts["reduce_scatter", "z"].calls == weights
            found.append((step, ahead[0], kept))
            torch.optim.SGD(model.parameters(), 0.1).step()
    return found


@pytest.mark.parametrize("name", ["1f1b", pytest.param("interleaved-1f1b", marks=pytest.mark.soak)])
def test_weights_are_gathered_once_a_step_before_its_first_micro_batch_comes(name):
    """Else a stage would gather when the stage before it has gathered; gradients are reduced once too."""
    for step, ahead, kept in itertools.chain(*run_ranks(gathers_by_cache, 4, name)):
        assert ahead == (kept if step else 0)


# --- what is refused ----------------------------------------------------------------------------------------------


def wrong(comms, case):
    config = {**FOUR, "n_layer": 1} if case == "too few blocks" else FOUR
    options = {
        "few": {"microbatches": 1},
        "uneven rounds": {"microbatches": 5},
        "too few cuts": {"cuts": []},
        "beyond": {"cuts": [4]},
        "words": {"cuts": "best"},
    }
    if case == "again":
        model, _ = build(comms, "1f1b", FOUR)
        axo.pipeline.split(model, comms)
    elif case == "other model":
        axo.pipeline.split(axo.parallelize(torch.nn.Sequential(torch.nn.Linear(4, 4)), comms, plan="auto"), comms)
    elif case == "serial":
        axo.pipeline.split(GPT(Config(**FOUR)), comms)
    elif case == "rows":
        _, schedule = build(comms, "1f1b", FOUR)
        schedule.step(batch(0)[0][:7], target=batch(0)[1][:7])
    elif case == "compiled":
        module, like = torch.compile(torch.nn.Linear(4, 4), backend="eager"), torch.empty(2, 4)
        stages = [axo.pipeline.Stage(module, comms, like, like, index=n, num_stages=4) for n in (comms.stage, 3)]
        axo.pipeline.schedule("zero-bubble", stages, microbatches=4, loss=F.mse_loss)
    elif case == "more rows":
        _, schedule = build(comms, "1f1b", FOUR)
        axo.pipeline.schedule("1f1b", schedule.axo_stages, microbatches=6, loss=F.mse_loss, rows=16)
    elif case == "scaled":
        model, schedule = build(comms, "1f1b", FOUR)
        schedule.scale_grads = True
        accumulate(comms, schedule)
    else:
        name = {"uneven rounds": "interleaved-1f1b", "name": "2f2b"}.get(case, "1f1b")
        build(comms, name, config, **options.get(case, {}))


def errors_of(cases):
    found = []
    for case in cases:
        comms = axo.connect("1x1x1x1", pipeline=2, timeout=20)
        with pytest.raises(Exception) as error:
            wrong(comms, case)
        found.append((error.type.__name__, str(error.value)))
        comms.close()
    return found


MESSAGES = {
    "few": "microbatches=1 are fewer than the 2 stages that '1f1b' must fill; use at least 2",
    "uneven rounds": "microbatches=5 do not divide into 2; use a multiple of 2",
    "name": "schedule='2f2b' is not known; use one of gpipe, 1f1b",
    "too few blocks": "1 blocks over 2 stages leave a stage without layers; use at most 1 stages",
    "too few cuts": "cuts=[] must be 1 whole numbers for 2 stages",
    "beyond": "cuts=[4] leave a stage without layers, or go beyond the 4 blocks; they must rise from 1 to 3",
    "words": "cuts='best' is not known; use 'even'",
    "again": "the model has been split already",
    "other model": "a Sequential cannot be cut into stages by itself: known are litgpt.GPT",
    "serial": "the model holds no layer of this grid; call axo.parallelize(model, comms) first",
    "rows": "inputs have 7 rows, and 8 micro-batches of 2 rows were announced; pass 16",
    "compiled": "torch refuses 'zero-bubble' with stages from torch.compile",
    "more rows": "rows=16 in 6 micro-batches are not up to 2 rows each, which the stages were made for; make them",
    "scaled": "scale_grads=True divides .grad at the end of every step",
}


def test_bad_input_is_one_error_on_every_rank():
    for found in run_ranks(errors_of, 2, list(MESSAGES)):
        for (error, text), (case, message) in zip(found, MESSAGES.items(), strict=True):
            assert error in ("ValueError", "Refused") and message in text, (case, error, text)
