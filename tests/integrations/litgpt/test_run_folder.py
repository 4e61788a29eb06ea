"""The folder of a training command: one process at a time, and the checkpoints of one run."""

import json
import os
import re
import socket
import time

import pytest
import yaml

import axo
from axo.integrations.fabric.step_agreement import StepAgreement
from axo.integrations.litgpt import run_folder
from axo.integrations.litgpt.restarts import Launch
from axo.launch import Rank
from tests.integrations.runs import arguments, command, finish, losses_of
from tests.launcher import run_ranks

ALONE = {"grid": "1x1x1x1", "steps": 4, "save": 2}
ONCE = ["--train.micro_batch_size", "8"]  # an iteration is a step


@pytest.fixture(scope="session")
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


def steps_in(folder, *steps):
    """Checkpoints of steps, as far as the folder's rules look at them."""
    paths = [folder / f"step-{step:08d}" / "lit_model.pth" for step in steps]
    for number, path in enumerate(paths):
        path.parent.mkdir(parents=True)
        path.touch()
        os.utime(path, (number, number))
    return paths


def begin(folder, resume=False, *, again=False, said=None):
    """What the start of a run does with its folder; the checkpoint that a start again would take."""
    values = {"out_dir": folder, "resume": resume}
    run_folder.hold(values, lambda: yaml.safe_dump(said), resumes=True, again=again, allow_new_data=False).close()
    return run_folder.newest(folder)


def test_only_checkpoints_of_steps_directly_in_the_folder_are_the_runs(tmp_path):
    """Not the folders of runs below it, nor what somebody has named as he liked."""
    steps_in(tmp_path / "run", 7)
    for name in ("step-best", "step-", "step-3-old"):
        steps_in(tmp_path / name)
        (tmp_path / name).mkdir()
        (tmp_path / name / "lit_model.pth").touch()
    assert begin(tmp_path) is None
    with pytest.raises(ValueError, match=r"--resume true, and .* has no step-. checkpoint; use --resume auto"):
        begin(tmp_path, True)
    _, ten = steps_in(tmp_path, 2, 10)
    assert run_folder.newest(tmp_path) == ten == begin(tmp_path, "auto")


def test_a_run_goes_back_to_an_earlier_checkpoint_of_its_folder(tmp_path, capsys):
    """The later ones are not the newest until they are written again; and one of them may be gone on from after all."""
    two, four, six = steps_in(tmp_path, 2, 4, 6)
    begin(tmp_path, "auto")
    identity = json.loads((tmp_path / "axo-run.json").read_text())["run"]
    assert not capsys.readouterr().out
    assert begin(tmp_path, two) == two
    said = capsys.readouterr().out
    assert f"going back to {two}; step-00000004, step-00000006 in {tmp_path} will be replaced" in said
    assert begin(tmp_path, "auto") == two == begin(tmp_path, again=True) and not capsys.readouterr().out
    with pytest.raises(ValueError, match=r"holds checkpoints of an earlier run .the newest .*step-00000002"):
        begin(tmp_path)
    four.write_text("new")
    assert run_folder.newest(tmp_path) == four
    assert begin(tmp_path, six) == six
    assert json.loads((tmp_path / "axo-run.json").read_text())["run"] == identity
    assert begin(tmp_path, two) == two
    two.unlink()
    with pytest.raises(ValueError, match=f"or a restart, would go on; add --resume {six} to go on"):
        begin(tmp_path, "auto")


def test_a_run_that_went_back_is_restarted_and_stopped_on_its_own_branch(folder):
    """It loses a rank before it has saved anything; then Ctrl-C comes at a step of which an older checkpoint lies."""
    outcome, _ = finish(folder, "back", *ONCE, **ALONE | {"steps": 6, "save": 1})
    assert outcome.ok, outcome.describe() + outcome.output
    two = folder / "back" / "step-00000002" / "lit_model.pth"
    lost = {"grid": "1x1x2x1", "steps": 12, "save": 1000}
    outcome, _ = finish(folder, "back", "--resume", str(two), "--max-restarts", "1", fault="SIGKILL", step=1, **lost)
    assert outcome.ok and "going back to" in outcome.output, outcome.describe() + outcome.output
    assert re.findall("Resuming training from .*step-(.*)/", outcome.output) == ["00000002"] * 2
    assert run_folder.newest(folder / "back") == two
    (folder / "back" / "fault").unlink()
    outcome, _ = finish(folder, "back", "--resume", "auto", fault="SIGINT", step=1, **lost)
    saved = re.search(r"stopped by Ctrl-C after step (\d+); saved (\S+);", outcome.output)
    assert outcome.ok and saved is not None, outcome.describe() + outcome.output
    assert str(run_folder.newest(folder / "back")) == saved[2] and f"step-{int(saved[1]):08d}" in saved[2]


def test_relative_names_of_data_are_those_of_their_working_directory(tmp_path, monkeypatch):
    """The same folder, named otherwise from elsewhere, is the same; another one of that name is not."""
    for place in ("then", "now"):
        (tmp_path / place / "texts").mkdir(parents=True)
    out, order = tmp_path / "out", {"seed": 1, "tokenizer_dir": "gone"}

    def run_on(*paths):
        return order | {"data": {"class_path": "LocalText", "init_args": {"paths": list(paths)}}}

    (path,) = steps_in(out, 1)
    monkeypatch.chdir(tmp_path / "then")
    said = path.parent / "hyperparameters.yaml"
    said.write_text(run_folder.comment("--grid 1x1x1x1") + yaml.safe_dump(run_on("texts")))
    monkeypatch.chdir(tmp_path / "now")
    for same in (str(tmp_path / "then" / "texts"), "../then/texts"):
        assert begin(out, "auto", said=run_on(same)) == path
    with pytest.raises(ValueError, match=f"saved with data.paths=.*then/texts'], now it is .*{tmp_path}/now/texts"):
        begin(out, "auto", said=run_on("texts"))
    (tmp_path / "then" / "texts").rmdir()  # the project has moved
    assert begin(out, "auto", said=run_on("texts")) == path


def launches(folder, given, steps, counting):
    """Starts of one torchrun, which the host of rank ``counting`` counts; each ends after so many of its steps."""
    before_step, codes = StepAgreement.before_step, []

    def failing(last):
        def step(self, comms):
            if self.step == last:
                raise RuntimeError("an error")
            before_step(self, comms)

        return step

    for start, last in enumerate(steps):
        child = os.fork()
        if not child:
            StepAgreement.before_step = failing(last)
            os.environ |= {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RUN_ID": "none"}
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(start if os.environ["RANK"] == counting else 0)
            code = 1
            try:
                from axo.integrations.litgpt.command import run

                run(given)
                code = 0
            except (RuntimeError, ValueError) as error:
                (folder / f"said-{start}-{os.environ['RANK']}").write_text(str(error))
            finally:
                os._exit(code)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return codes


def test_ranks_of_several_hosts_agree_that_they_are_started_again(folder):
    """Rank 0's host counts no start, the other's does. Both go on after two steps; a launch of its own is refused."""
    given = arguments(folder, "hosts", *ONCE, **ALONE | {"grid": "1x1x2x1"})
    given[given.index("8")] = "4"
    (folder / "hosts").mkdir()
    codes = run_ranks(launches, 2, folder / "hosts", given, (3, -1), "1", timeout=120, preload=("litgpt.pretrain",))
    assert codes == [[1, 0]] * 2, [path.read_text() for path in (folder / "hosts").glob("said-*")]
    assert "an error" in (folder / "hosts" / "said-0-0").read_text()
    assert sorted(losses_of(folder, "hosts")) == [1, 2, 3, 4]


def agree(port):
    """Where torchrun keeps no store; what the ranks then open is still there for others."""
    os.environ |= {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RESTART_COUNT": os.environ["RANK"]}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(port)}
    launch = Launch(Rank.from_environment())
    return launch.again, axo.connect("1x1x2x1").everyone.size


def test_without_a_store_of_torchruns_the_largest_count_of_all_ranks_holds():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert run_ranks(agree, 2, port) == [(True, 2)] * 2


def test_a_start_that_was_refused_its_folder_is_refused_again(folder, earlier):
    """torchrun starts it once more, which counts as a start; the folder is the earlier run's all the same."""
    given = arguments(folder, "earlier", *ONCE, **ALONE)
    said = folder / "refused"
    said.mkdir()
    (codes,) = run_ranks(launches, 1, said, given, (-1, -1), "0", timeout=120, preload=("litgpt.pretrain",))
    assert codes == [1, 1]
    for start in range(2):
        assert "holds checkpoints of an earlier run" in (said / f"said-{start}-0").read_text()


def test_checkpoints_of_an_earlier_run_are_gone_on_from_or_refused(folder, earlier):
    """Beside LitGPT's files lie the lock and the identity, which a refused run leaves as they were."""
    assert {path.name for path in earlier.iterdir()} == {
        "step-00000002", "step-00000004", "final", "logs", "axo-run.json", ".axo-lock",
    }  # fmt: skip
    identity = (earlier / "axo-run.json").read_text()
    (another_runs,) = steps_in(folder / "another", 2)
    for more in ([], ["--resume", str(another_runs)]):
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
