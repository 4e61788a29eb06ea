"""Long runs of ``axo litgpt``: ranks that are killed, SIGTERM, losses that are not finite, errors of the data, logs."""

import csv
import importlib.util
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import yaml

from tests.integrations.support import LLAMA, distance
from tests.launcher import rank_outcomes

STEPS = 12
NOT_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE")


def arguments(folder, out, *more, grid="2x1x2x1", steps=STEPS, save=4, lr=4e-4):
    """The command line of a small run, its options in a file as a user's would be."""
    options = {
        "model_name": "small",
        "model_config": LLAMA,
        "precision": "32-true",
        "data": {
            "class_path": "LocalText",
            "init_args": {"paths": [str(folder / "text.txt")], "cache_dir": str(folder / "cache")},
        },
        "tokenizer_dir": str(folder / "tokenizer"),
        "train": {
            "global_batch_size": 8, "micro_batch_size": 4, "max_tokens": steps * 8 * 32, "max_seq_length": 32,
            "max_norm": 1.0, "lr_warmup_steps": 2, "save_interval": save, "min_lr": 4e-5,
        },
        "eval": {"interval": 1000, "max_iters": 2},
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": lr}},
        "logger_name": "csv",
    }  # fmt: skip
    file = folder / f"{out}.yaml"
    file.write_text(yaml.safe_dump(options))
    return ["pretrain", "--config", str(file), "--out_dir", str(folder / out), "--grid", grid, *more]


def command(given, fault="", step=-1):
    """``axo litgpt`` with its local ranks. After ``step`` steps rank 1 kills itself once, or sends all SIGTERM, or
    (NaN) the ranks with z = 1 get a loss that is none."""
    from axo.integrations import guard
    from axo.integrations.litgpt import run

    for name in NOT_TORCHRUN:
        os.environ.pop(name, None)
    launcher, done = os.getpid(), Path(given[given.index("--out_dir") + 1], "fault")
    note, before_step = guard.Guard.note, guard.Guard.before_step

    def faulty_note(self, loss):
        note(self, loss * torch.nan if fault == "NaN" and self._step == step and os.environ["RANK"] in "23" else loss)

    def faulty_step(self, comms):
        if fault.startswith("SIG") and comms.rank == 1 and self._step == step and not done.exists():
            done.touch()
            os.kill(os.getpid() if fault == "SIGKILL" else launcher, getattr(signal, fault))
            time.sleep(1)
        before_step(self, comms)

    guard.Guard.note, guard.Guard.before_step = faulty_note, faulty_step
    run(given)


def finish(folder, out, *more, fault="", step=-1, **options):
    """Run the command; its outcome, and the final state if there is one."""
    given = arguments(folder, out, *more, **options)
    outcome = rank_outcomes(command, 1, given, fault, step, timeout=120, preload=("litgpt.pretrain",))[0]
    final = folder / out / "final" / "lit_model.pth"
    return outcome, torch.load(final, weights_only=True) if final.is_file() else None


def losses_of(folder, out):
    """Step -> loss from the CSV logs of all starts; a step that was done twice must have given the same loss."""
    found = {}
    for file in sorted((folder / out / "logs" / "csv").glob("*/metrics.csv")):
        for row in csv.DictReader(file.open()):
            if row["loss"]:
                step, loss = int(row["step"]) + 1, float(row["loss"])
                assert found.setdefault(step, loss) == pytest.approx(loss, abs=1e-4)
    return found


@pytest.fixture(scope="module")
def whole(folder):
    """A run that nothing disturbs."""
    outcome, state = finish(folder, "whole")
    assert outcome.ok, outcome.describe() + outcome.output
    return losses_of(folder, "whole"), state


def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(folder, whole):
    """Oracle: the undisturbed run. Killed after 6 steps, the checkpoint is of 4; sharded ones this time."""
    outcome, _ = finish(folder, "killed", "--max-restarts", "2", "--sharded", fault="SIGKILL", step=6)
    assert outcome.ok, outcome.describe() + outcome.output
    assert "rank 1 was killed by SIGKILL" in outcome.output and "starting all ranks again (1 of 2)" in outcome.output
    assert "step-00000004/lit_model.pth" in outcome.output.partition("Resuming training from")[2].splitlines()[0]
    assert losses_of(folder, "killed") == pytest.approx(whole[0], abs=1e-4)
    assert sorted(losses_of(folder, "killed")) == list(range(1, STEPS + 1))


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
    assert "again" not in outcome.output and sorted(losses_of(folder, out)) == list(range(1, step))


BAD_DATA = """
from axo.integrations.text_data import LocalText, Windows

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
    assert outcome.error == "RankFailed" and "again" not in outcome.output
    assert outcome.message.startswith("data: OSError: disk on fire (in __getitem__, broken_text.py:")
    assert sorted(losses_of(folder, "broken")) == [1, 2]


def test_tensorboard_has_every_step_or_is_asked_for(folder):
    """As litgpt logs, with the last steps too. Where no writer is installed: one line that says what to install."""
    outcome, _ = finish(folder, "board", "--logger_name", "tensorboard", grid="1x1x1x1")
    if not any(map(importlib.util.find_spec, ("tensorboard", "tensorboardX"))):
        assert outcome.error == "ValueError" and "pip install tensorboardX, or use --logger_name csv" in outcome.message
        return
    assert outcome.ok, outcome.describe() + outcome.output
    (file,) = (folder / "board" / "logs" / "tensorboard").rglob("events.out.tfevents.*")
    assert file.read_bytes().count(b"learning_rate") == STEPS  # a record a value, its name in plain bytes


# --- the proof with processes of its own, as a user starts them -------------------------------------------------------


def start(folder, given, *, torchrun=0):
    """``axo litgpt`` as a process; with ``torchrun``, this many ranks of it."""
    launcher = [sys.executable, "-m"]
    if torchrun:
        launcher += ["torch.distributed.run", f"--nproc-per-node={torchrun}", "--max-restarts=9", "--standalone", "-m"]
    environment = {name: value for name, value in os.environ.items() if name not in NOT_TORCHRUN}
    log = (folder / f"{time.monotonic_ns()}.log").open("w+")
    return subprocess.Popen([*launcher, "axo.cli", "litgpt", *given], stdout=log, stderr=log, env=environment), log


def children(pid):
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def kill_ranks(process, times, generator, most_seconds):
    """Kill a random rank ``times`` times, each a random while after the ranks were started."""
    killed = []
    while len(killed) < times and process.poll() is None:
        ranks = [pid for pid in children(process.pid) if pid not in killed]
        if len(ranks) < 4:
            time.sleep(0.02)
            continue
        time.sleep(generator.uniform(0, most_seconds))
        victim = generator.choice(ranks)
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            continue
        killed.append(victim)
        while process.poll() is None and set(children(process.pid)) & set(ranks):
            time.sleep(0.02)
    return len(killed)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(4))
def test_killed_at_random_moments_a_run_ends_where_the_undisturbed_one_does(folder, part):
    """20 kills in four parts of five; the first part under torchrun. Oracle: the undisturbed run, losses to 1e-4."""
    undisturbed, state = finish(folder, "undisturbed", steps=60, save=5)
    assert undisturbed.ok, undisturbed.output
    torchrun = 4 if part == 0 else 0
    given = arguments(folder, f"killed-{part}", *([] if torchrun else ["--max-restarts", "9"]), steps=60, save=5)
    process, log = start(folder, given, torchrun=torchrun)
    kills = []
    seconds = undisturbed.seconds
    killer = threading.Thread(
        target=lambda: kills.append(kill_ranks(process, 5, random.Random(part), 12 if torchrun else seconds * 0.6))
    )
    killer.start()
    code = process.wait(timeout=280)
    killer.join()
    log.seek(0)
    output = log.read()
    assert code == 0, output[-4000:]
    assert kills == [5], output[-4000:]
    assert losses_of(folder, f"killed-{part}") == pytest.approx(losses_of(folder, "undisturbed"), abs=1e-4)
    final = torch.load(folder / f"killed-{part}" / "final" / "lit_model.pth", weights_only=True)
    assert distance(final["model"], state["model"]) < 1e-5
    resumed = re.findall(r"Resuming training from \S+step-(\d+)", output)
    under = " under torchrun" if torchrun else ""
    print(f"\n{kills[0]} kills{under}: went on from steps {sorted(set(map(int, resumed)))}")
