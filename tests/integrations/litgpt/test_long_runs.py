"""Long runs of ``axo litgpt``: ranks that are killed, SIGTERM, losses that are not finite, errors of the data, logs."""

import importlib.util
import json
import os
import re
import shlex
import struct
import sys
from pathlib import Path

import pytest

from axo.integrations.litgpt import parsing
from axo.integrations.litgpt.command import PARALLEL
from tests.integrations.runs import STEPS, arguments, command, finish, losses_of
from tests.integrations.support import distance, installed, tensorboard_values
from tests.launcher import rank_outcomes, run_ranks


@pytest.mark.parametrize("more", [["--sharded"], pytest.param(["--pipeline", "2"], marks=pytest.mark.soak)], ids=str)
def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(folder, whole, more):
    """Oracle: the undisturbed run. Killed after 6 steps, the checkpoint is of 4; sharded ones, or of two stages."""
    out = f"killed-{len(more)}"
    outcome, _ = finish(folder, out, "--max-restarts", "2", *more, fault="SIGKILL", step=6)
    assert outcome.ok, outcome.describe() + outcome.output
    assert "rank 1 was killed by SIGKILL" in outcome.output and "starting all ranks again (1 of 2)" in outcome.output
    assert "step-00000004/lit_model.pth" in outcome.output.partition("Resuming training from")[2].splitlines()[0]
    assert losses_of(folder, out) == pytest.approx(whole[0], abs=1e-4)
    assert sorted(losses_of(folder, out)) == list(range(1, STEPS + 1))
    (asked,) = re.findall("# axo litgpt (.*)\n", (folder / out / "final" / "hyperparameters.yaml").read_text())
    assert options_of(asked.split()) == options_of(["--grid", "2x1x2x1", "--max-restarts", "2", *more])


@pytest.mark.parametrize("more", [[], pytest.param(["--sharded", "--pipeline", "2"], marks=pytest.mark.soak)], ids=str)
def test_elastic_ranks_that_die_cost_no_file_and_no_loss(folder, whole, more):
    """Oracle: the undisturbed run. Killed after 7 steps, the newest copy is of 6, or where that takes long of 3."""
    out = f"elastic-{len(more)}"
    given = ["--elastic", "4:8" if more else "2:4", "--copy-every", "3", *more]
    outcome, state = finish(folder, out, *given, fault="SIGKILL", step=7, save=100)
    assert outcome.ok, outcome.describe() + outcome.output
    assert "axo litgpt: rank 1 was killed by SIGKILL; is there enough memory?; goes on with" in outcome.output
    (start,) = map(int, re.findall(r"recovered from step (\d): agree .* s, move .* s, step .* s", outcome.output))
    assert start in (3, 6) and "Resuming training from /dev/shm/axo-ranks-" in outcome.output
    assert losses_of(folder, out) == pytest.approx(whole[0], abs=1e-4)
    assert sorted(losses_of(folder, out)) == list(range(1, STEPS + 1))
    assert more or distance(state["model"], whole[1]["model"]) < 1e-5


def test_elastic_ranks_are_as_many_as_is_told(folder, whole):
    """Oracle: the undisturbed run. No step is done twice."""
    given = ["--elastic", "1:4", "--copy-every", "2"]
    outcome, state = finish(folder, "resized", *given, fault="2", step=4, save=100)
    assert outcome.ok, outcome.describe() + outcome.output
    assert "ranks said so; goes on with 2 ranks on grid 1x1x2x1" in outcome.output.replace("\n", "")
    assert re.search(r"axo litgpt: resized from step [46]: agree", outcome.output)
    assert losses_of(folder, "resized") == pytest.approx(whole[0], abs=1e-4)
    assert sorted(losses_of(folder, "resized")) == list(range(1, STEPS + 1))
    assert distance(state["model"], whole[1]["model"]) < 1e-5


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--elastic", "2:8"], "litgpt: elastic=2:8: grid 2x1x2x1 has 4 ranks, not 8"),
        (["--elastic", "3:4"], "litgpt: elastic=3:4: no grid of 3 to 3 ranks fits"),
        (["--elastic", "four"], "litgpt: elastic='four' is not MIN:MAX; use two numbers of ranks, such as 2:4"),
    ],
)
def test_what_elastic_cannot_be(folder, more, message):
    outcome, _ = finish(folder, "none", *more)
    assert outcome.error == "ValueError" and message in outcome.message, outcome.describe()


def options_of(words):
    return parsing.parse("pretrain", PARALLEL["pretrain"].load(), ["pythia-14m", *words]).own


@pytest.mark.parametrize(
    "given",
    [
        "--grid 2x1x1x2 --pipeline 2 --schedule zero-bubble --cuts 1 --microbatches 4 --goldfish 2,13 --max-restarts 3",
        "--grid 2x2x1x1 --algorithm summa --vocab-loss --sharded --offload optimizer --offload-dir '/tmp/a folder'",
    ],
)
def test_options_can_be_written_as_they_were_typed(given):
    """What stands in hyperparameters.yaml; what one start was allowed does not. Oracle: the parser."""
    options = options_of(shlex.split(given))
    assert options_of([*shlex.split(given), "--allow-new-data"]).by_hand == options.by_hand
    assert sorted(shlex.split(options.by_hand)) == sorted(shlex.split(given))
    assert options_of(shlex.split(options.by_hand)) == options


def test_a_killed_rank_ends_a_run_without_restarts(folder):
    outcome, _ = finish(folder, "ended", fault="SIGKILL", step=1)
    assert outcome.error == "RankFailed" and "rank 1 was killed by SIGKILL" in outcome.message


def test_sigterm_saves_and_ends_cleanly(folder, whole):
    """Oracle: the undisturbed run, of which this is a part; the rest follows with ``--resume auto``."""
    outcome, state = finish(folder, "stopped", fault="SIGTERM", step=5)
    assert outcome.ok and state is None, outcome.describe() + outcome.output
    said = re.search(r"stopped by SIGTERM after step (\d+); saved (\S+);", outcome.output)
    assert said is not None and 5 < int(said[1]) < STEPS and Path(said[2]).is_file(), outcome.output
    assert sorted(losses_of(folder, "stopped")) == list(range(1, int(said[1]) + 1))
    outcome, _ = finish(folder, "stopped", "--max-restarts", "1")
    assert outcome.error == "ValueError" and "holds checkpoints of an earlier run" in outcome.message
    outcome, state = finish(folder, "stopped", "--resume", "auto", "--max-restarts", "1")
    assert outcome.ok, outcome.describe() + outcome.output
    assert losses_of(folder, "stopped") == pytest.approx(whole[0], abs=1e-4)
    assert distance(state["model"], whole[1]["model"]) < 1e-6


@pytest.mark.parametrize("what", ["the norm of the gradients", "the loss"])
def test_what_is_not_finite_stops_every_rank_with_one_message(folder, what):
    """An absurd learning rate, or a NaN loss at z = 1 in the fourth step. It would come again: nothing is restarted."""
    out = what.replace(" ", "-")
    if what == "the loss":
        outcome, _ = finish(folder, out, "--max-restarts", "2", fault="NaN", step=3)
    else:
        outcome, _ = finish(folder, out, "--max-restarts", "2", lr=1e30)
    assert outcome.error == "RankFailed" and outcome.message.startswith(f"{what} is not finite"), outcome.message
    step = int(re.search(r"at step (\d+) of this start", outcome.message)[1])
    assert 1 < step < 6 and len(outcome.message.splitlines()) == 1
    assert what != "the loss" or "at step 4 of this start, first on rank 2 (z=1, data=0)" in outcome.message
    assert "ranks again" not in outcome.output and sorted(losses_of(folder, out)) == list(range(1, step))


BAD_DATA = """
from axo.integrations.litgpt.text_data import LocalText, Windows

class BrokenText(LocalText):
    def setup(self, stage=""):
        super().setup(stage)
        self._train.__class__ = Broken

class Broken(Windows):
    def __getitem__(self, index):
        if index == 21:
            raise OSError("disk on fire")
        return super().__getitem__(index)
"""


def test_an_error_of_the_data_stops_every_rank_with_one_message(folder, monkeypatch):
    (folder / "modules").mkdir()
    (folder / "modules" / "broken_text.py").write_text(BAD_DATA)
    monkeypatch.syspath_prepend(folder / "modules")
    outcome, _ = finish(folder, "broken", "--data", "broken_text.BrokenText", "--max-restarts", "2")
    assert outcome.error == "RankFailed" and "ranks again" not in outcome.output
    assert outcome.message.startswith("data: OSError: disk on fire (in __getitem__, broken_text.py:")
    assert sorted(losses_of(folder, "broken")) == [1, 2]


def test_what_only_rank_0_finds_missing_is_one_message(folder):
    """It reads the text first, while the others wait in a barrier of torch's, which then fails as well."""
    outcome, _ = finish(folder, "missing", "--data.paths", '["/no/such/text"]', grid="2x1x2x1")
    assert outcome.error == "RankFailed"
    assert outcome.message == "data: /no/such/text does not exist; give files or folders of text"


def test_tensorboard_has_every_step_or_is_asked_for(folder, whole):
    """As litgpt logs, with the last steps too, and figures of all ranks. Oracle of losses: another grid's CSV files.
    Where no writer is installed: one line that says what to install."""
    outcome, _ = finish(folder, "board", "--logger_name", "tensorboard", grid="1x1x2x1")
    if not any(map(importlib.util.find_spec, ("tensorboard", "tensorboardX"))):
        assert outcome.error == "ValueError" and "pip install tensorboardX, or use --logger_name csv" in outcome.message
        return
    assert outcome.ok, outcome.describe() + outcome.output
    logged = tensorboard_values(folder / "board" / "logs" / "tensorboard")
    assert len(logged["learning_rate"]) == STEPS
    assert {step + 1: loss for step, loss in logged["loss"].items()} == pytest.approx(whole[0], abs=1e-4)
    assert all(0 < share < 1 for share in logged["comm_share/z"].values())
    assert len(logged["comm_share/z"]) == STEPS and not any(logged["comm_share/x"].values())


def log_with(packages, given):
    """``axo litgpt`` where the loggers of ``packages`` are installed and nothing is sent anywhere."""
    sys.path.append(str(packages))
    os.chdir(Path(given[given.index("--out_dir") + 1]).parent)
    os.environ |= {"WANDB_MODE": "offline", "MLFLOW_ALLOW_FILE_STORE": "true"}
    command(given)


def wandb_values(packages, file):
    """{name: {step: value}} of a run's file.

    After 7 bytes it consists of blocks of 32 KiB, and they of pieces of records: 4 bytes of checksum, 2 of length, one
    that says whether the record is whole (1) or this is its first, middle or last piece (2, 3, 4), and the piece.
    """
    sys.path.append(str(packages))
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, record, found = file.read_bytes(), 7, b"", {}
    while at < len(data):
        left = -at % 32768 or 32768
        if left < 7:  # no piece begins there
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            items = Record.FromString(record).history.item
            values = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
            for name, value in values.items():
                found.setdefault(name, {})[values.get("trainer/global_step")] = value
            record = b""
    return found


@pytest.mark.soak
@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_other_loggers_get_every_step_offline(folder, name, whole):
    """Figures of all ranks reach them as they reach the CSV file. Oracle of wandb's losses: that file."""
    packages = installed("loggers", "loggers.txt", name)
    given = arguments(folder, name, "--logger_name", name, grid="2x1x2x1")
    (outcome,) = rank_outcomes(log_with, 1, packages, given, timeout=180, preload=("litgpt.pretrain",))
    assert outcome.ok, outcome.describe() + outcome.output
    if name == "wandb":
        (file,) = folder.rglob("*.wandb")
        (logged,) = run_ranks(wandb_values, 1, packages, file)
        assert {step + 1: loss for step, loss in logged["loss"].items()} == pytest.approx(whole[0], abs=1e-4)
        assert len(logged["comm_share/x"]) == STEPS and len(logged["tokens_per_sec"]) == STEPS - 1
        return
    files = {file.name: file.read_text().split("\n") for file in folder.rglob("metrics/**/*") if file.is_file()}
    assert len(files["loss"]) == len(files["tokens_per_sec"]) + 1 == STEPS + 1
