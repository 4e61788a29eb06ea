"""The planner: what it ranks, leaves out and says.

Oracles: counts of ordered grids; memory and batch limits by hand; the cold process's own clock (CPU seconds, since the
machine is shared).
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from axo.grid import Grid
from axo.perf import machine, memory, model, planner, readers
from axo.perf.layer_time import Costs
from axo.perf.run_options import OPTIMIZERS, OVERLAPS, RunOptions
from axo.perf.workload import gpt

COLD = """
import sys, time
from axo.perf import machine, planner, readers
request = planner.Request(readers.read("gpt-320b"), machine.load("frontier"), 32768, 2**24, 2e12)
started = time.process_time()
made = planner.plan(request)
assert len(made.ranked) + len(made.left_out) == 816, (len(made.ranked), len(made.left_out))
spent = time.process_time() - started, time.process_time()
assert readers.read("Llama-3-8B").parameters > 8e9
assert not {"torch", "numpy", "axo._C", "matplotlib", "litgpt"} & set(sys.modules), "planning imported too much"
print(*spent)
"""


def request(**changes: object) -> planner.Request:
    made = planner.Request(readers.read("gpt-20b"), machine.load("perlmutter"), 64, 2**20, 1e12)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_32768_gpus_in_a_cold_process_without_torch() -> None:
    """All 816 ordered grids in 0.7 s of CPU time, and nothing heavy imported, nor to read LitGPT's list."""
    done = subprocess.run([sys.executable, "-c", COLD], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    planning, whole = map(float, done.stdout.split())
    assert planning < 3.0 and whole < 4.0, done.stdout  # on any processor


@pytest.mark.soak
@pytest.mark.parametrize(
    ("what", "pipeline", "grids", "most"),
    [("grids", (1,), 816, 10), ("grids and stages", tuple(2**i for i in range(7)), 3381, 15)],
)
def test_how_long_the_search_of_32768_gpus_takes(what: str, pipeline: tuple[int, ...], grids: int, most: int) -> None:
    asked = planner.Request(readers.read("gpt-320b"), machine.load("frontier"), 32768, 2**24, 2e12, search=True)
    started = time.process_time()
    made = planner.plan(replace(asked, pipeline=pipeline, schedules=planner.SEARCHED))
    seconds = time.process_time() - started
    line = {"proof": f"search of recomputation, ZeRO, micro-batches and {what}", "grids": grids}
    print("\n" + json.dumps(line | {"seconds": round(seconds, 1), "best": made.best.name}))
    slowness = 1.0 if pipeline == (1,) else float(os.environ.get("AXO_TEST_SLOWNESS", "1"))
    assert len(made.ranked) + len(made.left_out) == grids and seconds < most * slowness


@pytest.mark.parametrize(
    ("model", "gpus", "sequences", "gibibytes"),
    [("gpt-20b", 32, 128, 16), ("gpt-20b", 32, 128, 40), ("gpt-5b", 4, 33, 16), ("gpt-5b", 4, 88, 16)],
)
def test_bounds_leave_nothing_out_that_is_faster(model: str, gpus: int, sequences: int, gibibytes: int) -> None:
    """Oracle: every way to run a grid by itself, with each number of micro-batches by itself; 33 sequences in 32
    micro-batches are 64 rows, in 33 of them 33."""
    on, workload = replace(machine.load("h100"), memory_gib=gibibytes), readers.read(model)
    asked = planner.Request(workload, on, gpus, sequences * workload.seq_length, search=True)
    made, costs = planner.plan(asked), Costs(on, workload.seq_length)
    for one in (*made.ranked, *made.left_out):
        mine = -(-sequences // (one.grid.z * one.grid.data))
        counts = sorted({min(2**i, mine) for i in range(sequences.bit_length() + 1)})
        each = [planner.consider(replace(asked, micro_batches=count), one.grid, 1, costs, [way])
                for way in asked.ways(one.grid) for count in counts]  # fmt: skip
        fits = [other for other in each if not other.reason]
        assert (one == min(fits, key=lambda other: other.seconds)) if fits else one.reason, one
    assert all(one.candidate.time is None or one.candidate.seconds >= made.best.seconds for one in planner.others(made))
    split = {one.run.sequence_parallel for one in made.ranked if one.grid.x > 1}
    offloaded = {one.run.offload for one in made.ranked}
    assert True in split and (gpus == 4 or False in split)
    assert True in offloaded and (gibibytes == 16 or False in offloaded)


def test_the_best_of_each_other_choice() -> None:
    """Oracle: each kind alone on every grid."""
    made = planner.plan(request(search=True, pipeline=(1, 2), machine=machine.load("h100")))
    found = {one.kind: one.candidate for one in planner.others(made)}
    assert {"with stages", "sequence parallelism"} <= set(found) or {"without stages"} <= set(found)
    for kind, belongs in planner.KINDS.items():
        every = [planner.consider(made.request, grid, count, None, tried) for count in (1, 2)
                 for grid in Grid.all(64 // count) if (tried := [way for way in made.request.ways(grid)
                                                                 if belongs(count, way)])]  # fmt: skip
        fitting = [one.seconds for one in every if not one.reason]
        best = made.best if belongs(made.best.pipeline, made.best.run) else found.get(kind)
        assert (best is None) == (not every), kind
        if best is not None and best.time is not None:
            assert best.seconds == pytest.approx(min(fitting)), kind
        elif best is not None:
            assert not fitting, kind


def test_offload_by_hand() -> None:
    """AdamW's moments are not there; 4 bytes a value up and down at 25 GB/s, or 28 in the host's memory at 25 GB/s."""
    asked, grid = request(), Grid(z=16, data=4)
    shard = asked.workload.parameters / 16
    for zero, mine in ((0, shard), (2, shard / 4)):
        run = RunOptions(2**20, zero=zero, offload=True)
        there = memory.estimate(asked.workload, grid, run._replace(offload=False))
        assert memory.estimate(asked.workload, grid, run) == there._replace(optimizer=0.0)
        step = model.predict(asked.workload, grid, asked.machine, run)
        assert step.optimizer == pytest.approx(28 * mine / 25e9)
        fast = replace(asked.machine, host_memory_gbs=1e6)
        assert model.predict(asked.workload, grid, fast, run).optimizer == pytest.approx(4 * mine / 25e9)
    with pytest.raises(ValueError, match="no offload with Tesseract"):
        request(offload=True, algorithms=("tesseract",))


def test_muon_by_hand() -> None:
    """One moment of the 4 matrices of each of 32 blocks; each of 16 owners has two of a kind: 5 steps of Newton-Schulz
    on each, and all parts but its own come and go in bf16."""
    asked, grid, (adamw, muon) = request(), Grid(z=16, data=4), (RunOptions(2**20, optimizer=o) for o in OPTIMIZERS)
    h, on = asked.workload.hidden, asked.machine
    held, less = (memory.estimate(asked.workload, grid, run) for run in (adamw, muon))
    assert held.optimizer - less.optimizer == pytest.approx(4 * 32 * 12 * h**2 / 16)
    seconds = 0.0
    for m, k in ((h, 3 * h), (h, h), (h, 4 * h), (h, 4 * h)):
        work, sent = 5 * (4 * m * m * k + 2 * m**3) / on.gemm_flops, 15 / 16 * 2 * m * k / on.bandwidth(grid, "z")
        seconds += 2 * (work + 2 * sent)
    plain, step = (model.predict(asked.workload, grid, on, run).optimizer for run in (adamw, muon))
    assert step - plain == pytest.approx(seconds)
    assert planner.plan(request(optimizer="muon", search=True)).best.run.optimizer == "muon"
    with pytest.raises(ValueError, match="no Muon with offload"):
        request(optimizer="muon", offload=True)


def test_every_grid_is_ranked_or_has_a_reason() -> None:
    made = planner.plan(request())
    assert len(made.ranked) + len(made.left_out) == len(list(Grid.all(64)))
    assert all(candidate.reason for candidate in made.left_out)
    times = [candidate.time.total for candidate in made.ranked if candidate.time]
    assert times == sorted(times) and len(times) == len(made.ranked)
    assert all(c.memory and c.memory.fits(made.request.machine) for c in made.ranked)


def test_heads_and_sequences_limit_grids() -> None:
    made = planner.plan(request())
    reasons = {candidate.grid: candidate.reason for candidate in made.left_out}
    assert reasons[Grid(16, 1, 1, 4)] == "x=16 does not divide heads=56"
    few = planner.plan(request(batch_tokens=2**16))  # 32 sequences
    assert {c.grid: c.reason for c in few.left_out}[Grid(1, 1, 64, 1)] == (
        "z*data=64 is more than the 32 sequences of the batch"
    )


def test_memory_is_what_its_parts_are_by_hand() -> None:
    """20B on 1x1x64x1, 8 sequences a rank: 16 bytes a parameter over 64 ranks; 32 blocks keep their inputs in fp32, the
    residual stream's dtype; the last norm its own with two statistics a row, the head its in bf16; logits in bf16 with
    two statistics and an id; ids of the embedding. Gradients travel in bf16, two blocks' weights are gathered."""
    asked = request()
    held = memory.estimate(asked.workload, Grid(z=64), RunOptions(2**20))
    shard = asked.workload.parameters / 64
    assert (held.weights, held.gradients, held.optimizer) == (4 * shard, 4 * shard, 8 * shard)
    assert held.buckets == 2 * shard
    assert held.gathered == pytest.approx(2 * 2 * 12 * 7168**2, rel=1e-3)  # biases are not gathered with them
    rows, h = 8 * 2048, 7168
    last = 4 * rows * h + 8 * rows + 2 * rows * h + 2 * rows * 50304 + (8 + 8) * rows
    assert held.kept == 32 * 4 * rows * h + 8 * rows
    assert held.logits == last and held.saved == held.kept + last
    head = 2 * rows * h - 16 * rows + 2 * 50304 * h - held.gathered / 2
    assert held.head == head, "its input's gradient and the gathered weight; no statistics, and one block is gathered"
    early = held.weights + held.optimizer + held.gathered + held.kept
    ends = pytest.approx(18 * shard)
    at_loss = early + held.logits + held.head
    moments = {"at the loss": at_loss, "blocks run backward": early + held.working, "backward ends": ends}
    assert held.moments == moments
    assert held.total == max(held.moments.values()) * (1 + memory.SLACK) + memory.RESERVED
    several = memory.estimate(asked.workload, Grid(z=64), RunOptions(2**20, micro_batches=2))
    assert several.accumulates and several.kept < held.kept, "gradients of the first micro-batch are there too"
    for stage in (0, 1, 2):
        cut = memory.estimate(asked.workload, Grid(z=16, data=4), RunOptions(2**20, zero=stage))
        assert cut.gradients == 4 * 4 * shard / (4 if stage == 2 else 1)
        assert cut.optimizer == 8 * 4 * shard / (4 if stage else 1)


def test_zero_cuts_state_over_data_and_costs_a_gather() -> None:
    """Bytes by hand: state and gradients over 16 data ranks; updated fp32 parameters gathered over data after the step,
    gradients' all-reduce (ring: 2 (G-1)/G) halved to a reduce-scatter by stage 2."""
    workload, grid, on = readers.read("gpt-5b"), Grid(z=4, data=16), replace(machine.load("frontier"), contention=0.0)
    shard = workload.parameters / 4
    held = [memory.estimate(workload, grid, RunOptions(2**20, zero=stage)) for stage in (0, 1, 2)]
    assert [one.optimizer for one in held] == [8 * shard, 8 * shard / 16, 8 * shard / 16]
    assert [one.gradients for one in held] == [4 * shard, 4 * shard, 4 * shard / 16]
    plain, first, second = (model.predict(workload, grid, on, RunOptions(2**20, zero=stage)) for stage in (0, 1, 2))
    ring, _ = on.latency(grid, "data")
    gather = 15 / 16 * 4 * shard / on.bandwidth(grid, "data") + ring
    reduce = plain.exposed["data"]
    assert first.exposed["data"] == pytest.approx(reduce + gather)
    assert second.exposed["data"] == pytest.approx(reduce / 2 + gather)
    assert first.optimizer == second.optimizer == pytest.approx(plain.optimizer / 16)
    assert planner.plan(request(zero=2)).best.run.zero == 2


def test_a_search_finds_at_least_what_each_way_alone_finds() -> None:
    """Oracle: the same request with each way fixed. Each row runs as it says."""
    searched = planner.plan(request(search=True))
    for recompute in ("none", "full"):
        for zero in (0, 1, 2):
            fixed = {c.grid: c for c in planner.plan(request(recompute=recompute, zero=zero)).ranked}
            for one in searched.ranked:
                if one.grid in fixed:
                    assert one.seconds <= fixed[one.grid].seconds
    best, workload = searched.best, readers.read("gpt-20b")
    assert model.predict(workload, best.grid, searched.request.machine, best.run).total == best.seconds
    assert {one.run.recompute != "none" for one in searched.ranked} == {False, True}


def test_a_batch_too_small_for_the_gpus_forces_x_or_y() -> None:
    few = planner.plan(request(batch_tokens=2**16))  # 32 sequences for 64 GPUs
    assert few.forced().startswith("the batch has 32 sequences for 64 GPUs, so x*y must be at least 2; a batch of 131")
    assert all(one.grid.x * one.grid.y >= 2 for one in few.ranked) and planner.plan(request()).forced() == ""


def test_hours_and_energy_of_a_training() -> None:
    made = planner.plan(request(machine=machine.load("h100")))
    hours = 1e12 / 2**20 * made.best.seconds / 3600 * 64
    assert made.gpu_hours(made.best) == pytest.approx(hours)
    assert made.megawatt_hours(made.best) == pytest.approx(hours * 1275 / 1e6)


def test_micro_batches_reduce_their_gradients_each() -> None:
    """As ``axo train`` runs them: four micro-batches cost four all-reduces over data."""
    workload, grid, on = readers.read("gpt-5b"), Grid(z=4, data=16), replace(machine.load("frontier"), contention=0.0)
    one, four = (model.predict(workload, grid, on, RunOptions(2**20, micro_batches=n)).exposed["data"] for n in (1, 4))
    assert four == pytest.approx(4 * one)


@pytest.mark.parametrize("name", ["gpt-20b", "Mixtral-8x7B-v0.1"])
def test_what_a_layer_takes_beside_its_products_counts_for_each_micro_batch(name: str) -> None:
    """By hand: 20 microseconds a layer there and back, and half of it where the blocks run again.

    Each expert is a layer of its own.
    """
    made = request(workload=readers.read(name), gather="drop")
    slow = replace(made.machine, layer_us=20.0)
    each = [(block.stacked, sum(layer.experts for layer in block.layers)) for block in made.workload.unrolled()]
    seconds = 4 * 20e-6 * sum(layers * (1.5 if again else 1) for again, layers in each)
    grid, run = Grid(data=64), made.run_options(micro_batches=4)
    before, after = (model.predict(made.workload, grid, on, run) for on in (made.machine, slow))
    assert after.compute - before.compute == pytest.approx(seconds)


def test_x_above_the_groups_of_keys_and_values() -> None:
    """Llama-3-8B has 8 groups: x=16 holds each twice (and counts them), x=12 is refused."""
    workload = readers.read("Llama-3-8B")
    assert workload.misfit(Grid(x=16)) == "" and workload.misfit(Grid(x=8)) == ""
    assert workload.misfit(Grid(x=3)) == "x=3 does not divide heads=32"
    odd = gpt("odd", layers=1, hidden=96, heads=12, n_query_groups=4)
    assert odd.misfit(Grid(x=6)) == "x=6 neither divides kv_heads=4 nor is a multiple of it"
    weights = memory.estimate(workload, Grid(x=16), RunOptions(2**16)).weights
    copied = 16 * (weights / 4 - workload.tables) - workload.parameters
    assert copied == 32 * 2 * 8 * 128 * 4096, "keys and values once more in each of 32 blocks"
    asked = request(workload=workload, machine=machine.load("frontier"), gpus=64, batch_tokens=2**17)
    assert any(candidate.grid.x == 16 for candidate in planner.plan(asked).ranked)
    norms = readers.read("OLMo-2-1124-7B")
    assert norms.misfit(Grid(x=8)) == ""
    few = gpt("few", layers=1, hidden=64, heads=8, n_query_groups=2, norm_qk=True, norm_qk_type="olmo2")
    assert few.misfit(Grid(x=4)) == "x=4 is more than kv_heads=2, whose keys are normalised together"


def test_more_sharding_never_needs_more_memory_for_weights() -> None:
    workload = readers.read("gpt-20b")
    runs = [memory.estimate(workload, Grid(z=z, data=64 // z), RunOptions(2**20)) for z in (1, 2, 4, 8, 16, 32, 64)]
    weights = [held.weights + held.gradients + held.optimizer for held in runs]
    assert weights == sorted(weights, reverse=True) and weights[0] == pytest.approx(64 * weights[-1])


def test_checkpointing_saves_memory_and_costs_time() -> None:
    workload, grid, on = readers.read("gpt-5b"), Grid(z=64), machine.load("perlmutter")
    plain, again = (RunOptions(2**20, recompute=how) for how in ("none", "full"))
    assert memory.estimate(workload, grid, again).kept < memory.estimate(workload, grid, plain).kept / 5
    assert model.predict(workload, grid, on, again).compute > 1.2 * model.predict(workload, grid, on, plain).compute


def test_overlap_and_cache_only_help() -> None:
    asked = request()
    grid = Grid(2, 2, 4, 4)
    times = []
    for overlap in ((), ("oar",), ("oar", "ors"), OVERLAPS):
        run = RunOptions(2**20, overlap=frozenset(overlap))
        times.append(model.predict(asked.workload, grid, asked.machine, run).exposed_total)
    assert times == sorted(times, reverse=True) and times[-1] < times[0]
    without, kept = (
        model.predict(asked.workload, grid, asked.machine, RunOptions(2**20, cached_gathers=share)).communication["z"]
        for share in (0.0, 1.0)
    )
    assert kept < without


def test_micro_batches_make_a_large_batch_fit() -> None:
    small = replace(machine.load("perlmutter"), memory_gib=24)
    made = planner.plan(request(machine=small, gather="drop"))
    assert any(candidate.run.micro_batches > 1 for candidate in made.ranked)


def test_what_fits_is_right_at_the_boundary() -> None:
    """A GPU with exactly the bytes of a plan takes it; with one byte less the plan is left out, and says why."""
    fixed = request(gather="drop", micro_batches=4)
    for candidate in planner.plan(fixed).ranked[:6]:
        assert candidate.memory is not None
        for less, fits in ((0, True), (1, False)):
            on = replace(fixed.machine, memory_gib=(candidate.memory.total - less) / memory.GIB)
            made = planner.plan(replace(fixed, machine=on))
            assert (candidate.grid in {other.grid for other in made.ranked}) == fits
            reasons = {other.grid: other.reason for other in made.left_out}
            assert fits or "GiB" in reasons[candidate.grid]


def test_a_number_of_micro_batches_may_be_asked_for() -> None:
    asked = request(gather="drop", micro_batches=4)
    made = planner.plan(asked)
    assert all(c.run.micro_batches == min(4, 512 // (c.grid.z * c.grid.data)) for c in made.ranked)


def test_gathered_weights_are_kept_as_far_as_they_fit() -> None:
    made = planner.plan(request(gather="auto"))
    shares = {candidate.run.cached_gathers for candidate in made.ranked if candidate.grid.z > 1}
    assert 1.0 in shares
    assert all(c.memory and c.memory.fits(made.request.machine) for c in made.ranked)


def test_why_names_what_costs() -> None:
    made = planner.plan(request())
    assert str(made.best.grid) in made.why(made.best) and "products take" in made.why(made.best)
    worst = made.ranked[-1]
    assert f"against {made.best.grid}" in made.why(worst) and "most of it" in made.why(worst)
    assert "is left out: x=" in made.why(next(c for c in made.left_out if c.reason.startswith("x=")))


def test_days() -> None:
    made = planner.plan(request())
    assert made.best.time is not None
    assert made.days(made.best) == pytest.approx(1e12 / 2**20 * made.best.time.total / 86400)


def test_a_model_that_fits_nowhere_says_what_would_help() -> None:
    with pytest.raises(ValueError) as caught:
        planner.plan(request(workload=readers.read("gpt-80b"), gpus=8))
    message = str(caught.value)
    assert "no grid of 8 GPUs can train gpt-80b on perlmutter: not enough memory; the nearest miss is" in message
    assert "of 40 GiB a GPU; use " in message and " GPUs, or GPUs of at least " in message
    count = int(message.split("use ")[1].split()[0])
    planner.plan(request(workload=readers.read("gpt-80b"), gpus=count))  # and that is true


def test_a_count_that_no_grid_fits_says_which_would() -> None:
    with pytest.raises(ValueError, match=r"no grid of 67 GPUs .* counts near it that work: \d+") as caught:
        planner.plan(request(gpus=67, batch_tokens=2**16))
    near = [int(count) for count in str(caught.value).rsplit("work: ", 1)[1].split(", ")]
    for count in near:
        assert any(not request(gpus=count, batch_tokens=2**16).impossible(grid) for grid in Grid.all(count))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus": 0}, "gpus=0 is not a count"),
        ({"batch_tokens": 100}, "a batch of 100 tokens is less than one sequence of 2048"),
        ({"zero": 3}, "zero=3 is not a stage; use 0, 1 or 2"),
        ({"micro_batches": -2}, "micro_batches=-2 is not a count; use 0 for as few as fit"),
        ({"precision": "32-true"}, "precision='32-true' is not planned; use one of bf16-mixed, bf16-true"),
        ({"gather": "some"}, "gather='some' is not known; use one of auto, keep, drop"),
        ({"overlap": frozenset({"all"})}, "overlap all is not known; use oar, ors, oag"),
    ],
)
def test_bad_requests(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        request(**changes)
