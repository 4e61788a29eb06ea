"""Plans with stages: where a model is cut, how long a step takes, what the fullest rank holds, what runs it.

Oracles: every cut of a small stack; the model of one grid, where nothing is sent; sums by hand; the command's own
configuration.
"""

import itertools
import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from axo.cli import main as cli
from axo.grid import Grid
from axo.perf import cut, machine, memory, model, output, planner, plots, readers
from axo.perf import pipeline_schedule as schedules
from axo.perf.command import command_line
from axo.perf.planner import share_that_fits
from axo.perf.run_options import RunOptions
from axo.perf.stages import Stages, StageTimes, planned
from axo.train.config import TrainConfig


def request(**changes: object) -> planner.Request:
    made = planner.Request(readers.read("gpt-20b"), machine.load("h100"), 64, 2**18, gather="keep")
    return replace(made, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.0), (0.0, 2.2), (0.5, 1.3), (3.0, 0.1)])
@pytest.mark.parametrize(("stages", "ranks", "order"), [(3, 3, "loop"), (4, 2, "loop"), (4, 2, "v")])
def test_cuts_are_the_best_of_all(before: float, after: float, stages: int, ranks: int, order: str) -> None:
    def busiest(bounds: list[int], blocks: list[float]) -> float:
        loads = [0.0] * ranks
        for stage, (low, high) in enumerate(itertools.pairwise(bounds)):
            work = sum(blocks[low:high]) + before * (stage == 0) + after * (stage == stages - 1)
            loads[schedules.rank_of(stage, stages, ranks, order)] += work
        return max(loads)

    every = [[0, *inner, 11] for inner in itertools.combinations(range(1, 11), stages - 1)]
    for blocks, near in (([1.0] * 11, 1.0), ([1.0] * 9 + [1.5] * 2, 1.1)):  # unlike blocks: moves may end early
        found = cut.best(before, blocks, after, ranks=ranks, stages=stages, order=order)
        least = min(busiest(one, blocks) for one in every)
        assert found in every and busiest(found, blocks) <= near * least + 1e-9
    with pytest.raises(ValueError, match="11 blocks over 12 stages leave a stage without layers"):
        cut.best(0, [1.0] * 11, 0, ranks=12, stages=12)


def test_the_head_weighs() -> None:
    """Llama-3-8B's head is 2.4 of its 32 blocks: the last of 8 stages has fewer of them."""
    stages = planned(readers.read("Llama-3-8B", seq_length=4096), 8, "1f1b")
    sizes = [high - low for low, high in itertools.pairwise(stages.bounds)]
    assert sum(sizes) == 32 and sizes[-1] == min(sizes) < max(sizes) == 5 and not stages.even


def test_one_stage_takes_what_the_grid_takes() -> None:
    """Oracle: the model of one grid with as many micro-batches, on axes whose traffic does not depend on them."""
    asked = request()
    for grid, overlap in ((Grid(2, 2, 1, 1), {"oar"}), (Grid(4, 1, 1, 2), set())):
        run = RunOptions(2**18, micro_batches=4, overlap=frozenset(overlap))
        alone = model.predict(asked.workload, grid, asked.machine, run)
        timing = StageTimes(asked.workload, grid, asked.machine, run)
        found = timing.predict(Stages(1, "1f1b", (0, 32)))
        assert found.compute == pytest.approx(alone.compute) and found.bubble == pytest.approx(0, abs=1e-9)
        for axis in "xy":
            assert found.exposed[axis] == pytest.approx(alone.exposed[axis])
        assert found.optimizer == pytest.approx(alone.optimizer)


def test_time_and_memory_of_stages_by_hand() -> None:
    """gpt-20b, 4 stages of 8 blocks on 1x1x2x2: gradients once a step, micro-batches in flight, buffers of messages."""
    asked = request(gpus=16)
    workload, grid = asked.workload, Grid(z=2, data=2)
    run = RunOptions(2**18, micro_batches=8, rows=2 * 4 * 2048, cached_gathers=1.0)
    timing, stages = StageTimes(workload, grid, asked.machine, run), Stages(4, "1f1b", (0, 8, 16, 24, 32))
    step, found = timing.predict(stages), timing.simulate(stages)
    assert step.bubble == pytest.approx(found.seconds - max(found.busy), rel=0.05)
    message = 4 * 4 * 2048 * workload.hidden  # fp32, four sequences
    assert timing.message() == message
    crosses = asked.machine.inter_gbs * asked.machine.network_fraction / 8
    seconds = 1e-6 * asked.machine.latency_intra_us + message / (1e9 * asked.machine.intra(4, 2))
    assert timing.message_seconds() == pytest.approx(seconds)
    wide = StageTimes(workload, Grid(z=8), asked.machine, run._replace(rows=8 * 4 * 2048))
    assert wide.message_seconds() == pytest.approx(1e-6 * asked.machine.latency_inter_us + message / (1e9 * crosses))
    held = timing.memory(stages)
    block = 12 * workload.hidden**2 + 13 * workload.hidden
    first = 8 * block + workload.vocab * workload.hidden
    assert held.weights == pytest.approx(4 * first / 2)
    assert held.kept == pytest.approx(4 * (8 * message + 8 * 4 * 2048)), "4 micro-batches: inputs of 8 blocks, ids"
    assert held.messages == 8 * message and held.under_way == pytest.approx(2 * first)
    assert not held.accumulates
    uneven = timing.memory(Stages(4, "1f1b", (0, 4, 8, 28, 32)))
    assert uneven.weights == pytest.approx(4 * 20 * block / 2), "a rank in the middle may be the fullest"


def test_plans_with_stages() -> None:
    """Every number of stages with every grid of its share; times sorted; the search no worse than each way alone."""
    made = planner.plan(request(pipeline=(1, 2, 4), schedules=("1f1b", "interleaved-1f1b"), search=True, gather="auto"))
    counts = sum(len(list(Grid.all(64 // n))) for n in (1, 2, 4))
    assert len(made.ranked) + len(made.left_out) == counts and all(c.reason for c in made.left_out)
    staged = [c for c in made.ranked if c.stages is not None]
    assert {c.stages.ranks for c in staged} == {2, 4} and {c.run.recompute for c in staged} >= {"none"}
    assert [c.seconds for c in made.ranked] == sorted(c.seconds for c in made.ranked)
    assert all(c.memory.fits(made.request.machine) for c in made.ranked)
    for name in ("1f1b", "interleaved-1f1b"):
        fixed = planner.plan(request(pipeline=(4,), schedules=(name,), gather="auto"))
        searched = {c.grid: c.seconds for c in staged if c.stages.ranks == 4}
        assert all(searched[c.grid] <= c.seconds + 1e-12 for c in fixed.ranked)
    assert "x*y times the stages must be at least" in planner.plan(request(gpus=256, pipeline=(1, 4))).forced()
    header, rows = output.plan_table(made, 5)
    assert len(header) == len(rows[0]) and header[-3:] == ["stages", "schedule", "blocks of stages"]
    assert "stages wait" in made.why(staged[0])
    few = planner.plan(request(gpus=256, pipeline=(1, 32)))
    reasons = {c.name: c.reason for c in few.left_out}
    assert reasons["1x1x8x1 x 32 stages, 1f1b"] == (
        "a rank has 16 sequences for 32 stages, which want 32 micro-batches"
    )


@pytest.mark.parametrize(
    ("model", "gpus", "gather", "gibibytes"),
    [("gpt-20b", 16, "keep", 80.0), ("gpt-10b", 8, "auto", 30.0), ("Llama-3-8B", 8, "keep", 80.0)],
)
def test_the_search_leaves_out_only_what_cannot_win(model: str, gpus: int, gather: str, gibibytes: float) -> None:
    """Oracle: every way to run every grid by itself, all memories counted in full. Llama's MLP has a gate, whose
    product has the same input as another: with split tokens they share one sum of its gradient."""
    on = replace(machine.load("h100"), memory_gib=gibibytes)
    asked = request(workload=readers.read(model, seq_length=2048), machine=on, gpus=gpus, search=True,
                    pipeline=(1, 2, 4), gather=gather, schedules=("1f1b", "zero-bubble", "gpipe"))  # fmt: skip
    made = planner.plan(asked)
    staged = [one for one in made.ranked if one.stages is not None]
    assert len(staged) > 5
    for one in staged:
        other = planner.consider(replace(asked, offload=True), one.grid, one.stages.ranks)
        assert other.reason or (one.seconds <= other.seconds and (other.seconds > one.seconds or one.run.offload))
    for one in (*made.ranked, *made.left_out):
        each = [planner.consider(asked, one.grid, one.pipeline, None, [way]) for way in asked.ways(one.grid)]
        fits = [other.seconds for other in each if not other.reason]
        assert one in each, one
        if fits:
            assert one.seconds == min(fits)
        elif one.memory is not None:
            assert one.memory.total == min(other.memory.total for other in each if other.memory is not None)


def test_memory_that_gathered_weights_do_not_change() -> None:
    """The fullest moment may be the end of backward, when no gathered weight is left: all of them can be kept."""
    asked = request()
    held = memory.Memory(1e9, 5e9, 1e9, 5e9, 0.0, 0.0, 0.0, 0.0, 0.0)
    tight = replace(asked.machine, memory_gib=held.total / memory.GIB / 0.95)
    assert share_that_fits(tight, held._replace(gathered=1e9), held) == 1.0


def test_selective_recomputation_stands_between_none_and_full() -> None:
    """Products are run once, so flops are those without recomputation; norms and activations, and traffic, twice."""
    asked, grid, on = request(), Grid(2, 1, 4, 1), machine.load("h100")
    runs = [RunOptions(2**18, micro_batches=4, recompute=how) for how in ("none", "selective", "full")]
    none, some, full = (
        (memory.estimate(asked.workload, grid, run), model.predict(asked.workload, grid, on, run)) for run in runs
    )
    assert none[0].kept > some[0].kept > full[0].kept and none[1].compute < some[1].compute < full[1].compute
    assert some[1].communication["x"] == full[1].communication["x"] > none[1].communication["x"]
    made = planner.plan(request(recompute="selective"), [grid])
    assert made.step_flops() < planner.plan(request(), [grid]).step_flops()
    assert made.best.run.recompute == "selective"


def test_a_row_with_stages_runs_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = readers.read("pythia-14m", seq_length=128)
    asked = planner.Request(workload, machine.load("rtx-4090"), 8, 64 * 128, search=True, pipeline=(2, 3, 4),
                            schedules=("1f1b", "zero-bubble"))  # fmt: skip
    made = planner.plan(asked)
    configs: list[TrainConfig] = []
    monkeypatch.setattr("axo.train.runner.launch_local", lambda _, ranks, config, *args, **more: configs.append(config))
    monkeypatch.setattr("axo.train.check.check_machine", lambda config, model: None)
    monkeypatch.setattr("axo.train.check.check_device", lambda what, device: (device, None))  # as if it were here
    for one in made.ranked[:6]:
        assert one.stages is not None
        words = command_line(made, one).replace(" DATA ", f" {__file__} ").split()
        done = CliRunner().invoke(cli.app, words[words.index("axo") + 1 :])
        assert done.exit_code == 0, done.output
        config = configs.pop()
        assert (config.grid, config.pipeline, config.schedule) == (one.grid, one.stages.ranks, one.stages.schedule)
        assert (config.microbatches, config.accumulate) == (one.run.micro_batches, 1)
        assert (config.zero, config.sequence_parallel) == (one.run.zero, one.run.sequence_parallel)
        assert config.recompute_keeps == ("products" if one.run.selective else "nothing")
        assert config.cuts == ("even" if one.stages.even else "planner")
    simulated = planner.plan(request(pipeline=(4,), schedules=("interleaved-1f1b",)))
    words = command_line(simulated, simulated.best).split()
    done = CliRunner().invoke(cli.app, [*words[1:], "--json", "-"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.output)
    assert said["closed_form_s"] == pytest.approx(simulated.best.seconds) and said["schedule"] == "interleaved-1f1b"
    assert said["seconds"] == pytest.approx(said["closed_form_s"], rel=0.05) and 0 < said["bubble"] < 1
    drawn = plots.pipeline_timeline(schedules.simulate("zbv", 4, 8, 1.0, 1.0, 1.0), "zbv")
    assert drawn.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("plan --model gpt-5b --gpus 8 --machine h100 --pipeline 0", "pipeline='0' is not a number of stages"),
        ("plan --model gpt-5b --gpus 8 --machine h100 --pipeline 1,3", "pipeline=(3,) stages do not divide 8 GPUs"),
        (
            "plan --model gpt-5b --gpus 8 --machine h100 --sequence-parallel --algorithm all",
            "no sequence_parallel with",
        ),
        ("plan --model unet-1b --gpus 8 --machine h100 --sequence-parallel", "its tokens cannot be split over x"),
        ("plan --model gpt-5b --gpus 8 --machine h100 --pipeline 2 --schedule 2f2b", "schedule='2f2b' is not known"),
        ("plan --model gpt-5b --gpus 8 --machine h100 --recompute-keeps all", "recompute-keeps='all' is not one of"),
        ("plan --model gpt-5b --gpus 8 --machine h100 --offload all", "offload='all' is not planned; use none, or"),
        ("plan --model unet-1b --gpus 8 --machine h100 --pipeline 2", "is not an embedding, blocks and a head"),
        ("simulate --model gpt-5b --grid 1x1x4x1 --machine h100 --pipeline 2 --trace t.json", "is of one grid"),
        ("train --model tiny --grid 1x1x1x1 --pipeline 2 --cuts middle", "cuts='middle' is not even, planner, or"),
    ],
)
def test_mistakes_end_in_one_line(words: str, message: str) -> None:
    done = CliRunner().invoke(cli.app, words.split())
    assert done.exit_code == 2 and message in " ".join(done.output.split()), done.output
