"""``axo litgpt --grid auto``, against the planner asked directly and against every grid that it may not take."""

import pytest

from axo.grid import Grid
from axo.integrations.litgpt import restarts
from axo.integrations.litgpt.command import run
from axo.perf import machine, planner, readers

PLAN = ["--grid", "auto", "--machine", "perlmutter"]
BATCH = ["--train.global_batch_size", "8", "--train.micro_batch_size", "4", "--logger_name", "csv"]


@pytest.fixture
def launched(monkeypatch):
    """What would be launched: (ranks, grid)."""
    found = []
    monkeypatch.setattr(
        restarts, "run", lambda function, ranks, start, name, grid, *_, **__: found.append((ranks, str(grid)))
    )
    return found


def test_the_best_grid_that_the_batch_allows(launched, capsys, tmp_path):
    """Oracle: the planner on each grid by itself. 8 rows, 4 at a time: at most two data ranks."""
    run(["pretrain", "pythia-410m", *PLAN, "--ranks", "8", *BATCH, "--out_dir", str(tmp_path / "out")])
    workload = readers.read("pythia-410m", checkpointed=False)
    request = planner.Request(workload, machine.load("perlmutter"), 8, 8 * workload.seq_length, gather="keep")
    times = {}
    for grid in Grid.all(8):
        candidate = planner.consider(request, grid)
        if not candidate.reason and grid.z * grid.data <= 2:
            times[str(grid)] = candidate.time.total
    assert len(times) > 3 and launched == [(8, min(times, key=times.get))]
    said = capsys.readouterr().out
    assert f"grid {launched[0][1]}, chosen for pythia-410m on 8 ranks of perlmutter ({len(times)} grids fit" in said
    assert "do not suit the batch sizes" in said and f"{launched[0][1]}: products take" in said


def test_a_grid_of_ones_own_asks_nobody(launched, tmp_path):
    run(["pretrain", "pythia-14m", "--grid", "2x1x1x1", *BATCH, "--out_dir", str(tmp_path / "out")])
    assert launched == [(2, "2x1x1x1")]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pretrain", "pythia-14m", "--grid", "auto", *BATCH], "how many ranks to start; add --ranks N"),
        (["pretrain", "pythia-14m", "--grid", "auto", "--ranks", "4", *BATCH], "does not know the machine; add --mach"),
        (["pretrain", "pythia-14m", *PLAN, "--ranks", "x", *BATCH], "--ranks x is not a whole number"),
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
