"""Small runs of ``axo litgpt`` that tests disturb: their command lines, their outcomes, the losses they logged."""

import csv
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import yaml

from tests.integrations.support import LLAMA
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
    (a number) tells the run to have so many ranks, or (NaN) the ranks with z = 1 get a loss that is none."""
    from axo.integrations.fabric.step_agreement import StepAgreement
    from axo.integrations.litgpt.command import run

    for name in NOT_TORCHRUN:
        os.environ.pop(name, None)
    launcher, done = os.getpid(), Path(given[given.index("--out_dir") + 1], "fault")
    note, before_step = StepAgreement.note, StepAgreement.before_step

    def faulty_note(self, loss):
        note(self, loss * torch.nan if fault == "NaN" and self.step == step and os.environ["RANK"] in "23" else loss)

    def faulty_step(self, comms):
        if fault.startswith("SIG") and os.environ["RANK"] == "1" and self.step == step and not done.exists():
            done.touch()
            os.kill(os.getpid() if fault == "SIGKILL" else launcher, getattr(signal, fault))
            time.sleep(1)
        if fault.isdecimal() and os.environ["RANK"] == "1" and self.step == step and not done.exists():
            done.touch()
            done.with_name("ranks").write_text(fault)
        before_step(self, comms)

    StepAgreement.note, StepAgreement.before_step = faulty_note, faulty_step
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
