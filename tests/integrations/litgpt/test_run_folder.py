"""The folder of a training command: one process at a time, and the checkpoints of one run."""

import os
import socket
import time

import pytest

from axo.integrations.fabric.step_agreement import StepAgreement
from tests.integrations.runs import arguments, command, finish, losses_of
from tests.launcher import run_ranks

ALONE = {"grid": "1x1x1x1", "steps": 4, "save": 2}
ONCE = ["--train.micro_batch_size", "8"]  # an iteration is a step


@pytest.fixture(scope="module")
def earlier(folder):
    """The folder of a run that has ended, with checkpoints after 2 and 4 steps."""
    outcome, _ = finish(folder, "earlier", *ONCE, **ALONE)
    assert outcome.ok, outcome.describe() + outcome.output
    return folder / "earlier"


def two_runs(given, begun):
    """Rank 0 is ``axo litgpt``, which waits after two steps; meanwhile rank 1 is told what three others are told."""
    if os.environ["RANK"] == "0":
        return _paused(given, begun)
    while not begun.exists():
        time.sleep(0.01)
    said = []
    for more in ([], ["--resume", "auto"], ["--max-restarts", "1"]):
        try:
            command([*given, *more])
            said.append("done")
        except ValueError as error:
            said.append(str(error))
    begun.unlink()
    return said


def _paused(given, begun):
    launcher, before_step = os.getpid(), StepAgreement.before_step

    def wait(self, comms):
        if self.step == 2:
            StepAgreement.before_step = before_step
            begun.touch()
            while begun.exists():
                time.sleep(0.01)
        before_step(self, comms)

    StepAgreement.before_step = wait
    command(given)
    return launcher


def test_a_second_run_in_the_folder_of_a_live_one_is_refused(folder):
    """Whether or not it would go on from its checkpoints. The first knows nothing of it."""
    given = arguments(folder, "held", *ONCE, **ALONE)
    launcher, said = run_ranks(two_runs, 2, given, folder / "begun", timeout=120, preload=("litgpt.pretrain",))
    holder = f"process {launcher} on {socket.gethostname()}"
    assert said == [
        f"checkpoint: {folder / 'held'} is in use by {holder}; wait until it ends, or give another folder"
    ] * 3  # fmt: skip
    assert sorted(losses_of(folder, "held")) == [1, 2, 3, 4]


def test_checkpoints_of_an_earlier_run_are_gone_on_from_or_refused(folder, earlier):
    """Beside LitGPT's files lie the lock and the identity, which a refused run leaves as they were."""
    assert {path.name for path in earlier.iterdir()} == {
        "step-00000002", "step-00000004", "final", "logs", "axo-run.json", ".axo-lock",
    }  # fmt: skip
    identity = (earlier / "axo-run.json").read_text()
    for more in ([], ["--resume", str(earlier / "step-00000002" / "lit_model.pth")]):
        outcome, _ = finish(folder, "earlier", *more, **ALONE)
        assert outcome.error == "ValueError", outcome.describe() + outcome.output
        assert f"{earlier} holds checkpoints of an earlier run (the newest {earlier}/step-00000004/" in outcome.message
        assert "add --resume auto" in outcome.message and "another --out_dir" in outcome.message
    assert (earlier / "axo-run.json").read_text() == identity
    outcome, _ = finish(folder, "earlier", "--resume", "auto", *ONCE, **ALONE | {"steps": 5})
    assert outcome.ok and "step-00000004/lit_model.pth" in outcome.output.partition("Resuming training from")[2]
    assert (earlier / "axo-run.json").read_text() == identity
    assert sorted(losses_of(folder, "earlier")) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("change", "was"),
    [
        (["--seed", "9"], "seed=42, now it is seed=9,"),
        (["--train.global_batch_size", "4"], "train.global_batch_size=8, now it is train.global_batch_size=4,"),
        (["--data.paths", '["{other}"]'], "data.paths=['{text}'], now it is data.paths=['{other}'],"),
        (["--data", "Alpaca"], "now it is data=litgpt.data.Alpaca,"),
    ],
    ids=["seed", "batch", "files", "module"],
)
def test_another_order_of_the_data_is_refused_at_resume(folder, earlier, change, was):
    other = folder / "other.txt"
    other.write_text((folder / "text.txt").read_text())
    names = {"other": other, "text": folder / "text.txt"}
    change = [argument.format(**names) for argument in change]
    outcome, _ = finish(folder, "earlier", "--resume", "auto", *change, **ALONE)
    assert outcome.error == "ValueError", outcome.describe() + outcome.output
    assert "lit_model.pth was saved with " in outcome.message and was.format(**names) in outcome.message
    assert outcome.message.endswith("use the same, or say --allow-new-data")


def test_another_order_of_the_data_is_taken_when_asked_for(folder, earlier):
    """In a folder of its own. What is not the order, and another name of the same place, need not be asked for."""
    source = str(next(earlier.glob("step-00000004/*.pth")))
    for number, changed in enumerate(
        (["--seed", "9", "--allow-new-data"], ["--data.cache_dir", str(folder / "elsewhere")])
    ):
        outcome, _ = finish(
            folder, f"from-earlier-{number}", "--resume", source, *ONCE, *changed, **ALONE | {"steps": 5}
        )
        assert outcome.ok, outcome.describe() + outcome.output
        assert list(losses_of(folder, f"from-earlier-{number}")) == [5]


def test_a_run_without_checkpoints_of_steps_may_be_done_again(folder):
    """As with stock LitGPT, which writes ``final`` again."""
    for _ in range(2):
        outcome, state = finish(folder, "again", **ALONE | {"steps": 1, "save": 1000})
        assert outcome.ok and state is not None, outcome.describe() + outcome.output
