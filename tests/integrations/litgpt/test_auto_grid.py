"""``axo litgpt --grid auto``, against the planner asked directly and against every grid that it may not take."""

from dataclasses import replace

import pytest

from axo.grid import Grid
from axo.integrations.litgpt import auto_grid, restarts
from axo.integrations.litgpt.command import run
from axo.perf import machine, planner, readers

PLAN = ["--grid", "auto", "--machine", "perlmutter"]
BATCH = ["--train.global_batch_size", "8", "--train.micro_batch_size", "4", "--logger_name", "csv"]


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """What would be launched: (ranks, grid, stages, schedule, cuts, micro-batches). The data are there."""
    (tmp_path / "data/slimpajama/train").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    found = []

    def launch(function, ranks, name, options, *_, **__):
        found.append((ranks, str(options.grid), options.pipeline, options.schedule, options.cuts, options.microbatches))

    monkeypatch.setattr(restarts, "run", launch)
    return found


def test_the_best_grid_that_the_batch_allows(launched, capsys, tmp_path):
    """Oracle: the planner on each grid by itself. 8 rows, 4 at a time: at most two data ranks."""
    given = ["pretrain", "pythia-410m", *PLAN, "--ranks", "8", *BATCH, "--out_dir", str(tmp_path / "out")]
    run([*given, "--pipeline", "1"])
    workload = readers.read("pythia-410m")
    on, times = machine.load("perlmutter"), {}
    for grid in Grid.all(8):
        pieces = 8 // (4 * grid.z * grid.data)
        request = planner.Request(
            workload, on, 8, 8 * workload.seq_length, gather="keep", recompute="none", micro_batches=pieces
        )
        candidate = planner.consider(request, grid)
        if pieces and not candidate.reason:
            times[str(grid)] = candidate.time.total
    assert len(times) > 3 and launched == [(8, min(times, key=times.get), 1, "", "", 0)]
    said = capsys.readouterr().out
    assert f"grid {launched[0][1]}, chosen for pythia-410m on 8 ranks of perlmutter ({len(times)} grids fit" in said
    assert "do not suit the batch sizes" in said and f"{launched[0][1]}: products take" in said


def test_stages_are_chosen_where_they_are_faster(launched, capsys, tmp_path):
    """Oracle: the planner on each grid in each number of stages, as often as litgpt fills them."""
    workload = readers.read("pythia-410m")
    on, rows = machine.load("perlmutter"), 64
    two = ["--pipeline", "2", "--schedule", "gpipe", "--microbatches", "8"]
    for ranks, more, cuts in ((8, [], None), (8, two, None), (8, [*two, "--cuts", "9"], "9")):
        batch = ["--train.global_batch_size", f"{rows}", "--train.micro_batch_size", "16", "--logger_name", "csv"]
        out = ["--out_dir", str(tmp_path / "out")]
        run(["pretrain", "pythia-410m", *PLAN, "--ranks", f"{ranks}", *batch, *out, *more])
        times = {}
        for stages in (2,) if more else (1, 2, 4, 8):
            for grid in Grid.all(ranks // stages):
                pieces, rest = divmod(rows, 16 * grid.z * grid.data)
                if rest:
                    continue
                tokens = rows * workload.seq_length // (pieces if stages > 1 else 1)
                request = planner.Request(
                    workload, on, ranks, tokens, gather="keep", recompute="none",
                    micro_batches=(8 if more else 0) if stages > 1 else pieces,
                    schedules=("gpipe",) if more else planner.SEARCHED,
                )  # fmt: skip
                one = planner.consider(request, grid, stages)
                if not one.reason:
                    of_stages = ("", "", 0)
                    if stages > 1:
                        planned = ",".join(str(first) for first in one.stages.bounds[1:-1])
                        of_stages = (one.stages.schedule, cuts or planned, one.run.micro_batches)
                    seconds = one.seconds * (pieces if stages > 1 else 1)
                    times[ranks, str(grid), stages, *of_stages] = seconds
        assert launched[-1] == min(times, key=times.get)
        kinds = {key[2] > 1 for key in times}
        said = capsys.readouterr().out
        (by_hand,) = (line.split(": ")[1].split() for line in said.splitlines() if "the same by hand: " in line)
        run(["pretrain", "pythia-410m", *by_hand, *batch, *out])
        assert launched.pop() == launched.pop()
        assert len(kinds) == (1 if more else 2) and ("would take +" in said) == (not more), said


def test_a_loss_in_chunks_is_planned_where_the_run_has_one(launched, monkeypatch, tmp_path):
    planned = []

    def chosen(config, *_, **__):
        planned.append(config.chunked_loss)
        return replace(config, grid=Grid.parse("2x1x1x1")), ""

    monkeypatch.setattr(auto_grid, "chosen", chosen)
    given = ["pretrain", "pythia-14m", *PLAN, "--ranks", "2", *BATCH, "--out_dir", str(tmp_path / "out")]
    run(given)
    run([*given, "--vocab-loss"])
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    run([*given, "--vocab-loss"])
    assert planned == [False, True, False] and len(launched) == 3


def test_a_grid_of_ones_own_asks_nobody(launched, tmp_path):
    run(["pretrain", "pythia-14m", "--grid", "2x1x1x1", *BATCH, "--out_dir", str(tmp_path / "out")])
    assert launched == [(2, "2x1x1x1", 1, "", "", 0)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pretrain", "pythia-14m", "--grid", "auto", *BATCH], "how many ranks to start; add --ranks N"),
        (["pretrain", "pythia-14m", "--grid", "auto", "--ranks", "4", *BATCH], "--grid auto: no machine is named and"),
        (["pretrain", "pythia-14m", *PLAN, "--ranks", "x", *BATCH], "--ranks x is not a whole number"),
        (["pretrain", "pythia-14m", *PLAN, "--cuts", "9"], "--cuts 9 is of pipeline stages; add --pipeline N, or leav"),
        (["pretrain", "pythia-14m", *PLAN, "--schedule", "zbv"], "--schedule zbv is of pipeline stages; add --pipe"),
        (["pretrain", "pythia-14m", *PLAN, "--microbatches", "8"], "--microbatches 8 is of pipeline stages; add --p"),
        (["pretrain", "pythia-14m", *PLAN, "--cuts", "planner"], "how many ranks to start; add --ranks N"),
        (["pretrain", "pythia-14m", *PLAN, "--ranks", "7", *BATCH], "no grid of 7 GPUs can train pythia-14m"),
        (["pretrain", "Mixtral-8x7B-v0.1", *PLAN, "--ranks", "4", *BATCH], "the nearest miss is 4x1x1x1, which needs"),
        (["generate", "EleutherAI/pythia-14m", *PLAN, "--ranks", "4"], "plans training steps, and generate takes none"),
    ],
)
def test_what_the_planner_cannot_answer_is_an_error(arguments, words, launched, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # no machine.yaml here
    with pytest.raises(ValueError, match=words):
        run(arguments)
    assert not launched
