"""axo train --elastic: ranks are killed, the run goes on with fewer, and its losses are those of serial training."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from axo import launch
from axo.checkpoint.ranks import pending
from axo.grid import Grid
from axo.launch import RankFailed
from axo.train import elastic, loop
from tests.launcher import Command, rank_outcomes, run_ranks
from tests.train.test_resume import losses_of
from tests.train.test_train import small, text

__all__ = ["text"]  # a fixture
COPY_EVERY = 3


def be_killed() -> None:
    """Of so many ranks, in this step, this rank dies after so many seconds: ``KILLS`` says where."""
    step, kills = loop.Trainer.step, json.loads(os.environ["KILLS"])

    def dies(self: loop.Trainer, index: int) -> Any:
        for size, in_step, rank, seconds in kills:
            if (size, in_step, rank) == (self.comms.everyone.size, index, self.comms.everyone.rank):
                if index % COPY_EVERY:
                    pending.save.wait()  # the copy before this step is complete
                threading.Timer(seconds, die).start()
        return step(self, index)

    def die() -> None:
        with open(os.environ["KILLS_AT"], "a") as file:
            file.write(f"{time.monotonic()}\n")
        os.kill(os.getpid(), signal.SIGKILL)

    loop.Trainer.step = dies  # type: ignore[method-assign]


def train(text: str, folder: Path, steps: int, kills: list[tuple[int, int, int, float]], bounds: str = "2:4") -> Any:
    """A run in which ranks are killed. Returns its exit code and output, and for each death how long each part took."""
    os.environ |= {"KILLS": json.dumps(kills), "KILLS_AT": str(folder / "kills")}
    command = Command(
        "axo.cli", "train", "--data", text, "--grid", "2x1x2x1", "--elastic", bounds, "--copy-every", str(COPY_EVERY),
        "--steps", str(steps), "--batch-size", "12", "--seq-len", "32", "--precision", "32-true", "--compare-serial",
        "--model-override", "n_layer=1", "--out", str(folder / "out"), prepare=be_killed,
    )  # fmt: skip
    output = command.communicate()
    log = [json.loads(line) for line in (folder / "out" / "log.jsonl").read_text().splitlines()]
    deaths = (folder / "kills").read_text().split() if (folder / "kills").exists() else []
    parts = []
    for line, died in zip((line for line in log if line["kind"] == "recovered"), deaths, strict=False):
        parts.append({"start": line["start"], "detect": line["noticed"] - float(died), **line["seconds"]})
    return command.returncode, output, log, parts


def test_killed_ranks_cost_a_few_steps_and_no_loss(text: str, tmp_path: Path) -> None:
    """Four ranks, three, two: the last grid is the third one of the run."""
    code, output, log, parts = train(text, tmp_path, 12, [(4, 4, 3, 0.0), (3, 8, 0, 0.0)])
    assert code == 0 and "over 12 steps (limit 1e-4): ok" in output, output
    assert "rank 3 was killed by SIGKILL; is there enough memory?; goes on with 3 ranks on grid 1x1x3x1" in output
    assert [line["grid"] for line in log if line["kind"] == "header"] == ["2x1x2x1", "1x1x3x1", "1x1x2x1"]
    assert [line["step"] for line in log if line["kind"] == "step"] == list(range(12))
    assert [part["start"] for part in parts] == [3, 6]
    assert not list(Path("/dev/shm").glob("axo-ranks-*/step-*"))


def test_a_death_below_the_least_number_of_ranks_ends_the_run(text: str, tmp_path: Path) -> None:
    code, output, _, _ = train(text, tmp_path, 12, [(4, 4, 1, 0.0)], "4:4")
    assert code == 1 and "rank 1 was killed by SIGKILL" in output, output
    assert "elastic=4:4 ends here: there are 4 ranks, and MIN is 4" in output.replace("\n", " ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"elastic": "4"}, r"elastic='4' is not MIN:MAX; use two numbers of ranks, such as 2:4"),
        ({"elastic": "4:2"}, "is not MIN:MAX"),
        ({"elastic": "0:4"}, "is not MIN:MAX"),
        ({"elastic": "2:8"}, r"elastic=2:8: grid 2x1x2x1 has 4 ranks, not 8"),
        ({"elastic": "3:4"}, r"no grid of 3 to 3 ranks fits \(.* divide.*; use a smaller MIN, or another batch-size"),
        ({"elastic": "2:4", "n_embd": 1 << 20}, r"two copies of the run's state take .* GiB, and /dev/shm has"),
    ],
)
def test_what_elastic_cannot_be(text: str, options: dict[str, Any], message: str, monkeypatch: Any) -> None:
    if options.pop("n_embd", None):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 1000))
    with pytest.raises(ValueError, match=message):
        elastic.check_elastic(small(text, grid=Grid(2, 1, 2, 1), **options))


def test_ranks_of_torchrun_are_refused(text: str) -> None:
    for outcome in rank_outcomes(losses_of, 2, small(text, grid=Grid(2), elastic="1:2")):
        assert outcome.error == "ValueError" and "elastic=1:2 starts its own ranks, on one host" in outcome.message


def test_a_run_goes_on_from_what_is_newer_its_copy_or_its_checkpoint(text: str, tmp_path: Path) -> None:
    config = small(text, grid=Grid(2), save_every=2, keep=2, elastic="1:2", out=str(tmp_path / "out"))
    run_ranks(losses_of_own, 2, config)
    saved, copies = tmp_path / "out" / "checkpoints", elastic.StateCopies(str(tmp_path / "copies"))
    error = RankFailed("rank 1 was killed", rank=1, lost=True)
    assert elastic.after_a_death(config, copies, error).resume is None
    shutil.copytree(saved / "step-00000002", tmp_path / "copies" / "step-00000002")
    again = elastic.after_a_death(config, copies, error)
    assert (again.grid, again.resume) == (Grid(), str(saved / "step-00000004"))
    shutil.move(saved / "step-00000004", tmp_path / "copies")
    assert elastic.after_a_death(config, copies, error).resume == str(tmp_path / "copies" / "step-00000004")


def losses_of_own(config: Any) -> list[float]:
    """As ``losses_of``, of ranks that the launcher has started."""
    from axo.train import data, runner
    from axo.train.check import check

    batches: data.Batches = check(config)
    outcome = runner.train_rank(config, batches)
    return outcome.losses if outcome else []


def be_killed_as_a_launcher(told: str) -> None:
    with elastic.copies_of_a_run() as copies:
        Path(told).write_text(copies.folder)
        os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_launcher_left_in_memory_is_removed_by_the_next(tmp_path: Path) -> None:
    rank_outcomes(be_killed_as_a_launcher, 1, str(tmp_path / "folder"))
    with launch.own_folder():
        assert not Path((tmp_path / "folder").read_text()).exists()


@pytest.mark.soak
@pytest.mark.timeout(4000)
def test_many_runs_with_deaths_at_any_time(text: str, tmp_path: Path) -> None:
    """Twenty runs of which each loses two ranks, which die anywhere in a step."""
    draw, seen = random.Random(11), []
    for trial in range(20):
        (folder := tmp_path / str(trial)).mkdir()
        kills = [(size, draw.randint(*of), draw.randrange(size), draw.uniform(0, 0.05)) for size, of in
                 ((4, (3, 12)), (3, (14, 26)))]  # fmt: skip
        code, output, log, parts = train(text, folder, 30, kills)
        assert code == 0 and "over 30 steps (limit 1e-4): ok" in output, output
        assert [line["step"] for line in log if line["kind"] == "step"] == list(range(30))
        for (_, step, _, _), part in zip(kills, parts, strict=True):
            assert 0 <= step + 1 - part.pop("start") <= 2 * COPY_EVERY, (kills, parts)
        seen += parts
    parts = {name: statistics.median(each[name] for each in seen) for name in seen[0]}
    total = statistics.median(sum(each.values()) for each in seen)
    print(f"\n{len(seen)} deaths: {total:.2f} s to the next finished step, medians of the parts: {parts}")
    assert total < 5
