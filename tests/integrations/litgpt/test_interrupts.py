"""Ctrl-C of ``axo litgpt``: the first saves the step that runs, a second one ends at once and says what is lost."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from axo import launch
from axo.integrations.fabric.step_agreement import StepAgreement
from tests.integrations.runs import arguments, command
from tests.integrations.trainer import write_base
from tests.launcher import Command, rank_outcomes


@pytest.mark.parametrize(
    ("method", "then"), [("finetune_full", "go on with --resume auto"), ("finetune_lora", "adapters only, from which")]
)
def test_finetuning_saves_the_step_that_runs(folder, tmp_path, method, then):
    write_base(folder, tmp_path.name)
    options = {"grid": "2x1x1x1", "precision": "32-true", "out_dir": tmp_path / "out", "data": "JSON"}
    options |= {"data.json_path": folder / "samples.json", "data.val_split_fraction": 0.1, "train.max_steps": 20}
    options |= {"train.global_batch_size": 2, "train.micro_batch_size": 2, "train.save_interval": 100}
    given = [method, folder / tmp_path.name]
    for name, value in options.items():
        given += [f"--{name}", value]
    module = f"litgpt.{method.replace('_', '.')}"
    outcome = rank_outcomes(command, 1, [str(word) for word in given], "SIGINT", 3, timeout=120, preload=(module,))[0]
    assert outcome.ok, outcome.describe() + outcome.output
    said = re.search(rf"stopped by Ctrl-C after step (\d+); saved (\S+); {then}", outcome.output)
    assert said is not None and 3 <= int(said[1]) < 20 and Path(said[2]).is_file(), outcome.output


def interrupt_twice_after_five_steps():
    """Rank 1 does not end its step. The second signal comes once the launcher and rank 0 have seen the first."""
    before_step = StepAgreement.before_step

    def stopping(self, comms):
        if self.step == 5 and comms.rank == 1:
            os.kill(os.getppid(), signal.SIGINT)
            (reports,) = launch._reports
            while not (reports / launch._LOST).exists():
                time.sleep(0.01)
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(300)
        before_step(self, comms)

    StepAgreement.before_step = stopping


def test_a_second_one_says_what_is_lost(folder):
    given = arguments(folder, "interrupted-twice", grid="2x1x1x1")
    process = Command("axo.cli", "litgpt", *given, prepare=interrupt_twice_after_five_steps)
    output = process.communicate()
    assert process.returncode == 128 + signal.SIGINT, output
    last = folder / "interrupted-twice/step-00000004/lit_model.pth"
    said = output.replace("\n", "")
    assert f"the last checkpoint is {last}, of step 4" in said, output
    # rank 0 tells; where the signal comes before it has counted its fifth step, it has lost none
    assert re.search(r"interrupted; all ranks have ended; steps lost: [01]; the last", said), output
