"""axo train --save-every and --resume: the curve of a run that was stopped is that of one that was not."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from axo import checkpoint, launch
from axo.checkpoint.ranks import pending
from axo.grid import Grid
from axo.train import TrainConfig, loop, models, runner
from axo.train.log import TrainLog
from tests.launcher import Command, rank_outcomes, run_ranks
from tests.train.test_train import NEOX, SMALL, small, text

__all__ = ["text"]  # a fixture


def losses_of(config: TrainConfig) -> list[float]:
    outcome = runner.train_rank(config)
    return outcome.losses if outcome else []


def test_a_resumed_run_goes_on_with_the_same_batches(text: str, tmp_path: Path) -> None:
    """Six steps at once, against three and a resumed three: equal to the bit on the grid, to 1e-5 on another."""
    grid = Grid(2, 1, 2, 1)
    at_once = run_ranks(losses_of, 4, small(text, grid=grid, steps=6, out=str(tmp_path / "a")))[0]
    config = small(text, grid=grid, steps=6, save_every=3, keep=9, out=str(tmp_path / "b"))
    assert run_ranks(losses_of, 4, config)[0] == at_once
    saved = tmp_path / "b" / "checkpoints"
    assert sorted(path.name for path in saved.iterdir()) == ["step-00000003", "step-00000006"]
    with open(tmp_path / "b" / "log.jsonl", "ab") as log:  # as a loss of power may leave it
        log.write(b'[1]\n\xff\0\n{"kind"')
    third = dataclasses.replace(config, save_every=0, resume=str(saved / "step-00000003"))
    assert run_ranks(losses_of, 4, third)[0] == at_once
    other = dataclasses.replace(third, grid=Grid(1, 2, 1, 1), offload="optimizer,activations=1")
    assert run_ranks(losses_of, 2, other)[0] == pytest.approx(at_once, abs=1e-5)
    lines = [json.loads(line) for line in (tmp_path / "b" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(6))
    assert [line["start"] for line in lines if line["kind"] == "header"] == [0, 3, 3]


def options_of(config: TrainConfig) -> list[tuple[Any, ...]]:
    """What the optimizer's groups are told in the last step."""
    step, seen = loop.Trainer.step, list[tuple[Any, ...]]()

    def look(self: loop.Trainer, index: int) -> Any:
        seen[:] = [(group["betas"], group["weight_decay"]) for group in self.optimizer.param_groups]
        return step(self, index)

    loop.Trainer.step = look  # type: ignore[method-assign]
    runner.train_rank(config)
    return seen


def test_options_of_the_optimizer_are_those_of_the_command_that_resumes(text: str, tmp_path: Path) -> None:
    """Those of the checkpoint were taken, without a word."""
    config = small(text, steps=1, save_every=1)
    assert run_ranks(options_of, 1, config)[0] == [((0.9, 0.95), 0.1), ((0.9, 0.95), 0.0)]
    other = dataclasses.replace(config, steps=2, resume="auto", beta1=0.5, weight_decay=0.7)
    assert run_ranks(options_of, 1, other)[0] == [((0.5, 0.95), 0.7), ((0.5, 0.95), 0.0)]


def train_while_the_model_file_goes(config: TrainConfig) -> list[float]:
    step = loop.Trainer.step

    def removing(self: loop.Trainer, index: int) -> Any:
        Path(config.model).unlink(missing_ok=True)
        return step(self, index)

    loop.Trainer.step = removing  # type: ignore[method-assign]
    return losses_of(config)


def test_a_run_saves_when_the_file_of_its_model_has_gone(text: str, tmp_path: Path) -> None:
    """Each save read it again, and failed."""
    file = tmp_path / "model.json"
    file.write_text(json.dumps(NEOX))
    config = small(text, model=str(file), model_overrides={}, steps=2, save_every=1)
    assert len(run_ranks(train_while_the_model_file_goes, 1, config)[0]) == 2 and not file.exists()
    assert checkpoint.latest(Path(config.out, "checkpoints")).name == "step-00000002"
    file.write_text(json.dumps(NEOX))
    assert len(run_ranks(losses_of, 1, dataclasses.replace(config, steps=3, resume="auto"))[0]) == 3


def test_where_a_run_goes_on_is_said(text: str, tmp_path: Path) -> None:
    """Also that it does not: with the checkpoints gone, it began again without a word."""
    config = small(text, steps=1, save_every=1, resume="auto")
    begun, gone_on, other = (
        rank_outcomes(losses_of, 1, dataclasses.replace(config, **change))[0].output.splitlines()[0]
        for change in ({}, {"steps": 2}, {"steps": 3, "beta1": 0.5, "weight_decay": 0.7})
    )
    assert begun == f"axo train: goes on in {config.out} from the start: no checkpoint there"
    assert gone_on == f"axo train: goes on in {config.out} from {config.out}/checkpoints/step-00000001, after step 1"
    assert other.endswith("after step 2, with betas=(0.5, 0.95) (there (0.9, 0.95)), with weight_decay=0.7 (there 0.1)")


def go_on_with_a_full_disk(config: TrainConfig) -> list[str]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, resource.RLIM_INFINITY))
    model = models.resolve(config.model, config.model_overrides)
    said = []
    for start, out in ((2, config.out), (0, f"{config.out}/new")):
        try:
            TrainLog(dataclasses.replace(config, out=out), model, 1, "none", ["a"], start=start)
        except OSError as error:
            said.append(f"{error.filename}: {error.strerror}")
    return said


def test_a_run_that_cannot_go_on_keeps_its_log(text: str, tmp_path: Path) -> None:
    log = tmp_path / "out" / "log.jsonl"
    log.parent.mkdir()
    log.write_text("".join(f'{{"kind": "step", "step": {step}, "loss": 0.25}}\n' for step in range(3)))
    before = log.read_text()
    said = run_ranks(go_on_with_a_full_disk, 1, small(text, out=str(log.parent)))[0]
    assert said == [f"{log.parent}/{name}: File too large" for name in ("log.jsonl", "new/log.jsonl")]
    assert log.read_text() == before and sorted(path.name for path in log.parent.iterdir()) == ["log.jsonl", "new"]


def lose_the_folder(config: TrainConfig) -> list[str]:
    step = loop.Trainer.step

    def moving(self: loop.Trainer, index: int) -> Any:
        if index == 2:
            assert pending.save is not None
            pending.save.finish()
            os.rename(config.out, f"{config.out}.moved")
        return step(self, index)

    loop.Trainer.step = moving  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        runner.train_rank(config)
    return [str(one.message) for one in warned if "moved" in str(one.message)]


def test_a_run_whose_folder_is_moved_holds_the_new_one_and_says_so(text: str, tmp_path: Path) -> None:
    out, moved = tmp_path / "out", tmp_path / "out.moved"
    (warning,) = run_ranks(lose_the_folder, 1, small(text, out=str(out), steps=4, save_every=2))[0]
    assert f"{out}, or its .axo-lock, was moved or removed while a run held it" in warning
    assert (out / "axo-run.json").read_text() == (moved / "axo-run.json").read_text() and (out / ".axo-lock").exists()
    steps = [
        [line["step"] for line in map(json.loads, (each / "log.jsonl").read_text().splitlines()) if "step" in line]
        for each in (moved, out)
    ]
    assert steps == [[0, 1], [2, 3]]
    assert checkpoint.latest(out / "checkpoints").name == "step-00000004"
    assert checkpoint.latest(moved / "checkpoints").name == "step-00000002"


def errors_of(configs: list[TrainConfig], by_hand: str) -> list[str]:
    """The first saves; and once more into ``by_hand``, without what a run keeps beside the model."""
    messages, save = [], checkpoint.save
    checkpoint.save = lambda *args, **options: save(*args, **options | {"extra": 5})  # type: ignore[assignment]
    runner.train_rank(dataclasses.replace(configs[0], out=by_hand))
    checkpoint.save = save
    renamed = Path(by_hand).with_name("renamed")
    runner.train_rank(dataclasses.replace(configs[0], out=str(renamed)))
    (renamed / "checkpoints" / "step-00000002").rename(renamed / "checkpoints" / "step-00000009")
    damaged = Path(configs[0].out, "checkpoints", "step-00000004")
    damaged.mkdir(parents=True)
    for name in ("axo.json", ".metadata"):
        (damaged / name).touch()
    for config in configs:
        try:
            runner.train_rank(config)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_what_cannot_be_resumed_is_named(text: str, tmp_path: Path) -> None:
    config, by_hand = small(text, steps=2, save_every=1), str(tmp_path / "by_hand")
    expected = {
        "was saved with seed=5, now it is 6": {"seed": 6},
        "is of step 2, beyond steps=1": {"steps": 1},
        "checkpoint: /nowhere does not exist": {"resume": "/nowhere"},
        "was not saved by axo train: of its 2 steps it has 0 losses": {"resume": f"{by_hand}/checkpoints"},
        "is of another model": {"model_overrides": SMALL | {"n_layer": 1}},
        "was saved with n_head=8, now it is 4, and the model would be": {
            "model_overrides": SMALL | {"n_head": 4, "n_query_groups": 2}  # of the same shapes
        },
        "checkpoints/step-00000009 is of step 2; rename it to step-00000002": {"out": f"{tmp_path}/renamed"},
        "this run has later checkpoints than": {"resume": f"{Path(text).parent}/out/checkpoints/step-00000001"},
        "that axo.checkpoint.save did not write (it has an axo.json that cannot be read)": {"steps": 4},
        "keep=0 is out of range": {"keep": 0},
        "trace=. is a folder": {"trace": "."},
    }
    configs = [dataclasses.replace(config, **({"resume": "auto"} | change)) for change in expected.values()]
    for message, part in zip(run_ranks(errors_of, 1, [config, *configs], by_hand)[0], expected, strict=True):
        assert part in message


def stop_in_the_third_step() -> None:
    step = loop.Trainer.step

    def stopping(self: loop.Trainer, index: int) -> Any:
        if index == 2 and self.comms.rank == 1:
            to, number = os.environ["SIGNAL_TO"].split(", ")
            if to == "group":
                os.killpg(0, getattr(signal, number))  # as timeout, batch systems and terminals do
            else:
                os.kill(os.getppid(), getattr(signal, number))  # as an operator would: to the command
            while not self.asked_to_stop():
                pass
        return step(self, index)

    loop.Trainer.step = stopping  # type: ignore[method-assign]


@pytest.mark.parametrize("to", ["command, SIGTERM", "group, SIGTERM", "group, SIGINT", "command, SIGUSR1"])
def test_sigterm_and_ctrl_c_save_and_end_cleanly(
    text: str, tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command gets the signal in its third step, saves it, exits with 0, and goes on where it stopped."""
    monkeypatch.setenv("SIGNAL_TO", to)
    arguments = stopped_run(text, tmp_path, 100)
    first = Command("axo.cli", *arguments, prepare=stop_in_the_third_step)
    output = first.communicate()
    assert first.returncode == 0, output
    by = "Ctrl-C" if "SIGINT" in to else to.partition(", ")[2]
    assert f"{by}: this step is finished and saved first; Ctrl-C again ends at once" in output
    assert f"stopped by {by} after 3 steps; go on with --resume auto" in output
    assert checkpoint.latest(tmp_path / "out" / "checkpoints").name == "step-00000003"
    if to in ("group, SIGTERM", "command, SIGUSR1"):
        return
    again = Command("axo.cli", *arguments, "--resume", "--compare-serial")
    output = again.communicate()
    assert again.returncode == 0 and "over 5 steps (limit 1e-4): ok" in output, output


def stopped_run(text: str, folder: Path, save_every: int) -> list[str]:
    arguments = ["train", "--data", text, "--grid", "2x1x1x1", "--steps", "5", "--batch-size", "4", "--seq-len", "32"]
    arguments += ["--save-every", str(save_every), "--out", str(folder / "out"), "--precision", "32-true"]
    return [*arguments, "--model-override", "n_layer=1"]


def interrupt_twice_in_the_fourth_step() -> None:
    """Rank 1 does not end its step. The second signal comes once the launcher and rank 0 have seen the first."""
    step, folder = loop.Trainer.step, Path(os.environ["CHECKPOINTS"])

    def stopping(self: loop.Trainer, index: int) -> Any:
        if index == 3 and self.comms.rank == 0:
            (folder.parent / "fourth").touch()
        if index == 3 and self.comms.rank == 1:
            while not (folder.parent / "fourth").exists():
                time.sleep(0.01)
            while os.environ["SAVES"] == "2" and checkpoint.latest(folder) is None:
                time.sleep(0.01)  # it is written while the next steps run
            os.killpg(0, signal.SIGINT)
            (reports,) = launch._reports
            while not ((reports / launch._ASKED).exists() and (reports / launch._LOST).exists()):
                time.sleep(0.01)
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(300)
        return step(self, index)

    loop.Trainer.step = stopping  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("save_every", "lost"), [(2, "1; the last checkpoint is {}, of step 2"), (100, "3, all of them")]
)
def test_a_second_ctrl_c_ends_at_once_and_says_what_is_lost(
    text: str, tmp_path: Path, save_every: int, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out/checkpoints"
    monkeypatch.setenv("CHECKPOINTS", str(folder))
    monkeypatch.setenv("SAVES", str(save_every))
    command = Command("axo.cli", *stopped_run(text, tmp_path, save_every), prepare=interrupt_twice_in_the_fourth_step)
    output = command.communicate()
    assert command.returncode == 128 + signal.SIGINT, output
    lost = lost.format(folder / "step-00000002")
    assert f"axo train: interrupted; all ranks have ended; steps lost: {lost}" in output.replace("\n", "")
