"""axo train --elastic: ranks are killed, the run goes on with fewer, and its losses are those of serial training."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import statistics
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from axo import launch
from axo.checkpoint import latest, storage
from axo.checkpoint.ranks import pending
from axo.grid import Grid
from axo.launch import RankFailed
from axo.train import TrainConfig, auto, elastic, loop, runner
from axo.train import copies as rank_copies
from axo.train.check import check_grid, check_machine, check_step, copy_bytes
from tests.launcher import Command, rank_outcomes, run_ranks
from tests.train.test_resume import losses_of
from tests.train.test_train import small, text

__all__ = ["text"]  # a fixture
COPY_EVERY = 3


def have_events() -> None:
    """What happens to a run, in order: ``EVENTS`` has the step, what, a number and seconds, ``EVENTS_AT`` the folder.

    kill    this rank (modulo their number) dies after so many seconds, where there are more than two
    ranks   the run is told this number of ranks
    full    copies from this step on find no room
    slow    a copy takes so many seconds
    term    the launcher gets SIGTERM when it has no ranks, after this rank has died
    ends    as ranks, and before the copy for it is complete SIGTERM comes
    late    as ranks, and when that is agreed on SIGTERM comes to rank 1 alone
    """
    step, begin, events = loop.Trainer.step, elastic.StateCopies.begin, json.loads(os.environ["EVENTS"])
    folder, begun, write = Path(os.environ["EVENTS_AT"]), set(), storage.write
    requested, resize = rank_copies.requested_run, rank_copies.RankCopies.after

    def resizes(self: rank_copies.RankCopies, done: int) -> bool:
        ends = resize(self, done)
        if self.resizes and os.environ["RANK"] == "1" and any(what == "late" for _, what, _, _ in events):
            os.kill(os.getpid(), signal.SIGTERM)
        return ends

    def steps(self: loop.Trainer, index: int) -> Any:
        past = (folder / "events").read_text().count("\n") if (folder / "events").exists() else 0
        world = self.comms.everyone
        if past < len(events) and index >= events[past][0] and past not in begun:
            _, what, number, seconds = events[past]
            dies = what in ("kill", "term") and world.size > 2
            if world.rank == (number % world.size if dies else 0):
                begun.add(past)
                if index % COPY_EVERY and not any(what == "slow" for _, what, _, _ in events):
                    pending.save.finish()  # the copy before this step is complete
                if what in ("ranks", "ends", "late"):
                    Path(self.config.out, "ranks").write_text(f"{number}\n")
                threading.Timer(seconds, happens, (what if dies else "none", index)).start()
        return step(self, index)

    def happens(what: str, index: int) -> None:
        with open(folder / "events", "a") as file:
            file.write(f"{what} {time.monotonic()} {index}\n")
        if what != "none":
            os.kill(os.getpid(), signal.SIGKILL)

    def begins(self: elastic.StateCopies, event: str) -> None:
        (folder / "copies").write_text(self.folder)
        begin(self, event)
        if "term" in (folder / "events").read_text():
            os.kill(os.getpid(), signal.SIGTERM)

    def requests(*arguments: Any) -> TrainConfig | None:
        if (request := requested(*arguments)) and any(what == "ends" for _, what, _, _ in events):
            os.kill(os.getppid(), signal.SIGTERM)
            while not signal.getsignal(signal.SIGTERM).__self__.asked:  # type: ignore[union-attr]
                time.sleep(0.01)
        return request

    def writes(path: Path, values: Any) -> Any:
        for first, what, _, seconds in events:
            if what == "slow" and path.is_relative_to("/dev/shm"):
                time.sleep(seconds)
            if what == "full" and path.is_relative_to("/dev/shm") and int(path.parent.name.split(".")[1][5:]) >= first:
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, values)

    loop.Trainer.step, elastic.StateCopies.begin = steps, begins  # type: ignore[method-assign]
    storage.write, rank_copies.requested_run, rank_copies.RankCopies.after = writes, requests, resizes  # type: ignore


Event = tuple[int, str, int, float]


def train(text: str, folder: Path, steps: int, events: list[Event], *options: str, serial: bool = True) -> Any:
    """A run to which something happens. Returns its exit code, output and log."""
    os.environ |= {"EVENTS": json.dumps(events), "EVENTS_AT": str(folder)}
    usual = {
        "--data": text, "--grid": "2x1x2x1", "--elastic": "2:4", "--copy-every": str(COPY_EVERY), "--steps": str(steps),
        "--batch-size": "12", "--seq-len": "32", "--precision": "32-true", "--model-override": "n_layer=1",
        "--out": str(folder / "out"),
    }  # fmt: skip
    usual |= dict(zip(options[::2], options[1::2], strict=True))
    words = [word for option in usual.items() for word in option] + ["--compare-serial"] * serial
    command = Command("axo.cli", "train", *words, prepare=have_events)
    output = command.communicate(600)
    log = [json.loads(line) for line in (folder / "out" / "log.jsonl").read_text().splitlines()]
    return command.returncode, output, log


def of_kind(log: list[dict[str, Any]], kind: str, key: str) -> list[Any]:
    return [line[key] for line in log if line["kind"] == kind]


def test_killed_ranks_cost_a_few_steps_and_no_loss(text: str, tmp_path: Path) -> None:
    """Four ranks, three, two: the last grid is the third one of the run."""
    code, output, log = train(text, tmp_path, 12, [(4, "kill", 3, 0.0), (8, "kill", 0, 0.0)])
    assert code == 0 and "over 12 steps (limit 1e-4): ok" in output, output
    assert "rank 3 was killed by SIGKILL; is there enough memory?; goes on with 3 ranks on grid 1x1x3x1" in output
    assert of_kind(log, "header", "grid") == ["2x1x2x1", "1x1x3x1", "1x1x2x1"]
    assert of_kind(log, "step", "step") == list(range(12))
    assert of_kind(log, "recovered", "start") == [3, 6]
    assert not Path((tmp_path / "copies").read_text()).exists()


@pytest.mark.parametrize(("step", "start"), [(6, 3), (7, 6)])
def test_a_death_costs_no_more_steps_than_lie_between_two_copies(
    text: str, tmp_path: Path, step: int, start: int
) -> None:
    """Copies take longer than steps. The copy of step 6 has just begun; and before it is whole seven do not count."""
    code, output, log = train(text, tmp_path, 9, [(0, "slow", 0, 0.7), (step, "kill", 3, 0.0)])
    assert code == 0 and "over 9 steps (limit 1e-4): ok" in output, output
    assert of_kind(log, "recovered", "start") == [start] and step - start <= COPY_EVERY


def test_a_run_has_the_ranks_that_it_is_told_and_loses_no_step(text: str, tmp_path: Path) -> None:
    """A rank dies, four are told again, and are as at first; then two. Nothing of it is in the losses."""
    events = [(4, "kill", 3, 0.0), (4, "ranks", 4, 0.0), (9, "ranks", 2, 0.0)]
    code, output, log = train(text, tmp_path, 15, events)
    assert code == 0 and "over 15 steps (limit 1e-4): ok" in output, output
    assert of_kind(log, "header", "grid") == ["2x1x2x1", "1x1x3x1", "2x1x2x1", "1x1x2x1"]
    assert of_kind(log, "step", "step") == list(range(15))
    assert of_kind(log, "recovered", "start") == [3] and of_kind(log, "resized", "start") == [6, 12]
    assert "out/ranks said so; goes on with 4 ranks on grid 2x1x2x1" in output.replace("\n", "")
    assert not (tmp_path / "out" / "ranks").exists()


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ("four", "out/ranks says 'four', which is no number of ranks from 2 to 4; goes on with 4 ranks"),
        ("5", "out/ranks says '5', which is no number of ranks from 2 to 4; goes on with 4 ranks"),
        ("\n", "out/ranks says '', which is no number of ranks from 2 to 4; goes on with 4 ranks"),
        ("4\n", "out/ranks says 4, and the run has 4 ranks already; goes on with 4 ranks"),
        ("9" * 100, "out/ranks is longer than 64 bytes"),
    ],
)
def test_a_number_of_ranks_that_cannot_be_is_told(
    text: str, told: str, message: str, tmp_path: Path, capsys: Any
) -> None:
    config = small(text, grid=Grid(2, 1, 2, 1), elastic="2:4", out=str(tmp_path / "out"))
    copies = elastic.StateCopies(str(tmp_path), config, partial(elastic.nearest, config))
    assert elastic.requested_run(config, copies) is None
    (tmp_path / "out").mkdir()
    (file := tmp_path / "out" / "ranks").touch()
    assert elastic.requested_run(config, copies) is None
    assert file.exists() and not capsys.readouterr().out  # it is being written
    file.write_text(told)
    assert elastic.requested_run(config, copies) is None
    assert message in capsys.readouterr().out and not file.exists()


def test_whose_file_tells_the_ranks(text: str, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """One that was there before the run, a link and a file of another user tell nothing; a folder is told once."""
    config = small(text, grid=Grid(2, 1, 2, 1), elastic="2:4", out=str(tmp_path))
    (file := tmp_path / "ranks").write_text("2")
    with elastic.copies_of_a_run(config, partial(elastic.nearest, config)) as copies:
        assert elastic.requested_run(config, copies) is None and not file.exists()
        assert "ranks was there before the run began; goes on with 4 ranks" in capsys.readouterr().out
        file.symlink_to(tmp_path / "elsewhere")
        (tmp_path / "elsewhere").write_text("2")
        assert elastic.requested_run(config, copies) is None and not file.exists()
        assert "ranks is a link" in capsys.readouterr().out
        file.mkdir()
        assert elastic.requested_run(config, copies) is elastic.requested_run(config, copies) is None
        assert capsys.readouterr().out.count("ranks is a folder") == 1
        file.rmdir()
        file.write_text("2")
        status = SimpleNamespace(st_size=1, st_mtime_ns=1, st_uid=os.getuid() + 1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fstat", lambda descriptor: status)
            patch.setattr(elastic.files, "open_regular", lambda path, follow: open(os.devnull, "rb"))
            assert elastic.requested_run(config, copies) is None and not file.exists()
        assert "ranks is a file of another user" in capsys.readouterr().out


def test_a_number_that_is_written_again_is_not_lost(text: str, tmp_path: Path, monkeypatch: Any) -> None:
    """As rank 0 opens the file, and as it removes it."""
    config = small(text, grid=Grid(2, 1, 2, 1), elastic="2:4", out=str(tmp_path))
    copies = elastic.StateCopies(str(tmp_path), config, partial(elastic.nearest, config))
    (file := tmp_path / "ranks").write_text("4")
    unlink = Path.unlink

    def unlink_late(path: Path, **options: Any) -> None:
        file.write_text("2")
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", unlink_late)
    request = elastic.requested_run(config, copies)
    assert request is not None and request.ranks == 2


def test_a_copy_that_finds_no_room_is_told_once_and_the_one_before_it_stays(text: str, tmp_path: Path) -> None:
    code, output, log = train(text, tmp_path, 15, [(6, "full", 0, 0.0), (13, "kill", 1, 0.0)])
    assert code == 0 and "over 15 steps (limit 1e-4): ok" in output, output
    assert of_kind(log, "recovered", "start") == [3] and of_kind(log, "step", "step") == list(range(15))
    assert output.count("No space left on device") == output.count("the copy before it stays") == 2  # in each world


def test_a_signal_between_two_worlds_keeps_the_newest_copy_as_a_checkpoint(text: str, tmp_path: Path) -> None:
    code, output, log = train(text, tmp_path, 9, [(4, "term", 1, 0.0)], "--save-every", "100")
    kept = tmp_path / "out" / "checkpoints" / "step-00000003"
    assert code == 128 + signal.SIGTERM and f"the newest copy is kept as {kept}, of step 3" in output, output
    assert not Path((tmp_path / "copies").read_text()).exists() and latest(kept.parent) == kept
    code, output, log = train(text, tmp_path, 9, [], "--save-every", "100", "--resume", "auto")
    assert code == 0 and "over 9 steps (limit 1e-4): ok" in output, output
    assert of_kind(log, "step", "step") == list(range(9)) and of_kind(log, "header", "start")[-1] == 3


def launches_of(config: TrainConfig, copies: elastic.StateCopies) -> elastic.Launches:
    launches = elastic.Launches(copies, None)
    assert launches.go_on() and launches.config == config
    return launches


def test_a_lack_of_memory_that_comes_again_ends_the_run(
    text: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    config, killed = small(text, grid=Grid(1, 1, 4, 1), batch_size=12, elastic="1:4"), [7]
    monkeypatch.setattr(elastic, "_killed_for_memory", lambda: killed[0])
    launches = launches_of(config, elastic.StateCopies(str(tmp_path), config, partial(elastic.nearest, config)))
    killed[0] += 1  # elsewhere: this rank crashed
    crashed = RankFailed("rank 1 was killed by SIGSEGV", rank=1, lost=True, signal=signal.SIGSEGV)
    launches.have_failed(crashed)
    assert launches.go_on() and launches.config.ranks == 3
    assert f"axo train: {crashed}; goes on with 3 ranks" in capsys.readouterr().out
    killed[0] += 1
    died = RankFailed("rank 1 was killed by SIGKILL", rank=1, lost=True, signal=signal.SIGKILL)
    launches.have_failed(died)
    assert launches.go_on() and launches.config.ranks == 2
    assert f"{died}; memory was short, and the system has killed a process; goes on" in capsys.readouterr().out
    killed[0] += 1
    launches.have_failed(died)
    with pytest.raises(RankFailed, match=r"memory was short.*; elastic=1:4 ends here: that was so before") as caught:
        launches.go_on()
    assert caught.value.lost and caught.value.rank == 1


def test_memory_is_that_of_the_runs_control_group_where_it_says(tmp_path: Path) -> None:
    for name, content in {
        "proc/vmstat": "oom_kill_x 1\noom_kill 5\n",
        "proc/self/cgroup": "1:cpu:/\n0::/jobs/one\n",
        "sys/fs/cgroup/jobs/one/memory.events": "oom 3\noom_kill 2\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert elastic._killed_for_memory(tmp_path) == 2
    (tmp_path / "sys/fs/cgroup/jobs/one/memory.events").unlink()
    assert elastic._killed_for_memory(tmp_path) == 5
    assert elastic._killed_for_memory(tmp_path / "nowhere") == 0


def test_a_signal_as_the_ranks_end_for_others_ends_the_run(text: str, tmp_path: Path, monkeypatch: Any) -> None:
    config = small(text, grid=Grid(2, 1, 2, 1), elastic="2:4", save_every=100, out=str(tmp_path))
    outcome = runner.Outcome([], 0.0, 0, tmp_path, tmp_path, next=replace(config, grid=Grid(1, 1, 2, 1)))
    launches = iter([lambda noted: noted.append(signal.SIGTERM)])

    def launched(*arguments: Any, noted: list[int], **options: Any) -> runner.Outcome:
        next(launches)(noted)
        return outcome

    monkeypatch.setattr(runner, "launch_local", launched)
    with pytest.raises(launch.Interrupted) as caught:
        runner.run(config)
    assert caught.value.signal == signal.SIGTERM


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (launch.Interrupted(signal.SIGTERM), True),
        (RankFailed("rank 1 was killed by SIGKILL", rank=1, signal=signal.SIGKILL), True),  # as it finished its step
        (RankFailed("rank 1 was killed by SIGKILL", rank=1, signal=signal.SIGKILL, lost=True), True),
        (RankFailed("rank 1: ValueError: loss is nan", rank=1, trace="..."), False),
        (OSError(errno.ENOSPC, "No space left on device"), True),
    ],
    ids=str,
)
def test_however_a_run_ends_but_by_its_own_error_its_copy_is_kept(
    error: BaseException, kept: bool, text: str, tmp_path: Path, monkeypatch: Any
) -> None:
    config, calls = small(text, elastic="1:1", save_every=100, out=str(tmp_path)), list[str]()

    def keep(copies: elastic.StateCopies) -> str:
        signal.raise_signal(signal.SIGINT)  # ends nothing
        calls.append(copies.folder)
        return "kept"

    monkeypatch.setattr(elastic.StateCopies, "keep", keep)
    expected = (type(error), launch.Interrupted)
    with pytest.raises(expected) as caught, elastic.copies_of_a_run(config, partial(elastic.nearest, config)):
        raise error
    assert caught.value is error and len(calls) == kept


def test_a_signal_while_the_copy_for_other_ranks_is_completed_ends_the_run(text: str, tmp_path: Path) -> None:
    """These ranks' next step is the last, and is saved, as they have promised."""
    code, output, log = train(text, tmp_path, 12, [(4, "ends", 2, 0.0)], "--save-every", "100", serial=False)
    assert code == 0 and "stopped by SIGTERM after 7 steps" in output, output
    assert of_kind(log, "header", "grid") == ["2x1x2x1"] and of_kind(log, "step", "step") == list(range(7))
    assert latest(tmp_path / "out" / "checkpoints") == tmp_path / "out" / "checkpoints" / "step-00000007"


def test_a_signal_to_one_rank_as_ranks_end_for_others_is_obeyed(text: str, tmp_path: Path) -> None:
    code, output, _ = train(text, tmp_path, 12, [(4, "late", 2, 0.0)], "--save-every", "100", serial=False)
    kept = tmp_path / "out" / "checkpoints" / "step-00000006"
    assert code == 128 + signal.SIGTERM and f"the newest copy is kept as {kept}, of step 6" in output, output


def test_a_run_whose_grid_is_the_planners_has_the_planners_grid_on_fewer_ranks(tmp_path: Path) -> None:
    given = frozenset({"pipeline"})
    config = TrainConfig(model="pythia-1b", batch_size=64, seq_len=512, elastic="2:8", out=str(tmp_path))
    on_ranks = partial(auto.planned, config, "perlmutter", given)
    copies = elastic.StateCopies(str(tmp_path), on_ranks(8), on_ranks)
    launches = launches_of(copies.original, copies)
    launches.have_failed(RankFailed("rank 1 was killed", rank=1, lost=True))
    assert launches.go_on() and launches.config.ranks < 8
    assert launches.config == auto.chosen(config, None, launches.config.ranks, "perlmutter", given)[0]


def test_a_death_below_the_least_number_of_ranks_ends_the_run(text: str, tmp_path: Path) -> None:
    code, output, _ = train(text, tmp_path, 12, [(4, "kill", 1, 0.0)], "--elastic", "4:4")
    assert code == 1 and "rank 1 was killed by SIGKILL" in output, output
    assert "elastic=4:4 ends here: 3 ranks are left, and MIN is 4" in output.replace("\n", " ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"elastic": "4"}, r"elastic='4' is not MIN:MAX; use two numbers of ranks, such as 2:4"),
        ({"elastic": "4:2"}, "is not MIN:MAX"),
        ({"elastic": "0:4"}, "is not MIN:MAX"),
        ({"elastic": "2:8"}, r"elastic=2:8: grid 2x1x2x1 has 4 ranks, not 8"),
        ({"hosts": "a,b"}, "hosts=a,b is of --elastic MIN:MAX; say that too"),
        ({"elastic": "2:4", "hosts": "a,b,c"}, r"elastic=2:4: 4 ranks do not divide over 3 hosts"),
        ({"elastic": "2:4", "hosts": "a,,c"}, r"hosts='a,,c' is not HOST"),
        ({"elastic": "3:4"}, r"no grid of 3 to 3 ranks fits \(.* divide.*; use a smaller MIN, or another batch-size"),
    ],
)
def test_what_elastic_cannot_be(text: str, options: dict[str, Any], message: str) -> None:
    config = small(text, grid=Grid(2, 1, 2, 1), **options)
    with pytest.raises(ValueError, match=message):
        check_step(config)
        elastic.check(config, partial(elastic.nearest, config), 0)


def test_memory_for_the_copies_is_checked_alone_and_beside_the_ranks_own(text: str, monkeypatch: Any) -> None:
    config = small(text, grid=Grid(2, 1, 2, 1), elastic="2:4")
    model = check_grid(config)[1]
    own, state = 16 * sum(each.numel() for each in model.parameters()), copy_bytes(config, model)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 2 * state))
    elastic.check(config, partial(elastic.nearest, config), state)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 2 * state - 1))
    with pytest.raises(ValueError, match=r"two copies of the run's state take .* GiB, and /dev/shm has"):
        elastic.check(config, partial(elastic.nearest, config), state)
    memory = {"SC_PHYS_PAGES": own + 3 * state, "SC_PAGE_SIZE": 1}
    monkeypatch.setattr(os, "sysconf", memory.get)
    check_machine(config, model)
    memory["SC_PHYS_PAGES"] -= 1
    check_machine(replace(config, elastic=None), model)
    with pytest.raises(ValueError, match=r"state, with the copies of elastic=2:4, take at least .* GiB"):
        check_machine(config, model)


def test_ranks_of_torchrun_are_refused(text: str) -> None:
    for outcome in rank_outcomes(losses_of, 2, small(text, grid=Grid(2), elastic="1:2")):
        assert (
            outcome.error == "ValueError"
            and "elastic=1:2 starts its own ranks; leave torchrun or srun out" in outcome.message
        )


def test_a_run_goes_on_from_what_is_newer_its_copy_or_its_checkpoint(text: str, tmp_path: Path) -> None:
    config = small(text, grid=Grid(2), save_every=2, keep=2, elastic="1:2", out=str(tmp_path / "out"))
    run_ranks(losses_of_own, 2, config)
    saved = tmp_path / "out" / "checkpoints"
    copies = elastic.StateCopies(str(tmp_path / "copies"), config, partial(elastic.nearest, config))

    def resumed() -> TrainConfig:
        launches = elastic.Launches(copies, None)
        launches.go_on()
        launches.have_failed(RankFailed("rank 1 was killed", rank=1, lost=True))
        launches.go_on()
        return launches.config

    assert resumed().resume is None
    shutil.copytree(saved / "step-00000002", tmp_path / "copies" / "step-00000002")
    assert ((again := resumed()).grid, again.resume) == (Grid(), str(saved / "step-00000004"))
    shutil.move(saved / "step-00000004", tmp_path / "copies")
    assert resumed().resume == str(tmp_path / "copies" / "step-00000004")


def losses_of_own(config: Any) -> list[float]:
    """As ``losses_of``, of ranks that the launcher has started."""
    from axo.train import data, runner
    from axo.train.check import check

    batches: data.Batches = check(config)
    outcome = runner.train_rank(config, batches)
    return outcome.losses if outcome else []


def be_killed_as_a_launcher(told: str) -> None:
    with elastic.copies_of_a_run(config := TrainConfig(), partial(elastic.nearest, config)) as copies:
        Path(told).write_text(copies.folder)
        os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_launcher_left_in_memory_is_removed_by_the_next(tmp_path: Path) -> None:
    rank_outcomes(be_killed_as_a_launcher, 1, str(tmp_path / "folder"))
    with launch.own_folder():
        assert not Path((tmp_path / "folder").read_text()).exists()


@pytest.mark.soak
@pytest.mark.timeout(14400)
def test_many_runs_with_deaths_and_joins_at_any_time(text: str, tmp_path: Path) -> None:
    """200 steps on two to eight ranks, that die anywhere in a step and come again; ``AXO_ELASTIC_RUNS``: which runs."""
    options = ("--grid", "2x2x2x1", "--elastic", "2:8", "--copy-every", "10", "--batch-size", "24")
    (folder := tmp_path / "undisturbed").mkdir()
    code, output, log = train(text, folder, 200, [], *options)
    assert code == 0 and "over 200 steps (limit 1e-4): ok" in output, output
    undisturbed, deaths, joins, lost = of_kind(log, "step", "loss"), [], [], []
    first, _, end = os.environ.get("AXO_ELASTIC_RUNS", "0:50").partition(":")
    for trial in range(int(first), int(end)):
        draw, folder = random.Random(trial), tmp_path / str(trial)
        folder.mkdir()
        events: list[Event] = []
        for step in range(draw.randint(5, 25), 185, 23):
            what, number = ("kill", draw.randrange(8)) if draw.random() < 0.6 else ("ranks", draw.randint(2, 8))
            events.append((step + draw.randrange(12), what, number, draw.uniform(0, 0.05)))
        code, output, log = train(text, folder, 200, events, *options, serial=False)
        assert code == 0 and of_kind(log, "step", "step") == list(range(200)), (events, output)
        apart = max(abs(a - b) for a, b in zip(of_kind(log, "step", "loss"), undisturbed, strict=True))
        happened = [line.split() for line in (folder / "events").read_text().splitlines()]
        kills = [(float(at), int(step)) for what, at, step in happened if what == "kill"]
        assert len(kills) == len(of_kind(log, "recovered", "start")) and apart < 1e-4, (events, apart, output)
        for line in (line for line in log if line["kind"] in ("recovered", "resized")):
            died, step = max(kill for kill in [(0.0, 0), *kills] if kill[0] <= line["noticed"])
            if line["kind"] == "resized":
                joins.append(line["seconds"])
            else:
                deaths.append({"detect": line["noticed"] - died, **line["seconds"]})
                lost.append(step - line["start"])
            print(
                "\nelastic", line["kind"], json.dumps((joins if line["kind"] == "resized" else deaths)[-1]), flush=True
            )
        print(f"\nrun {trial}: ranks {of_kind(log, 'header', 'grid')}, apart {apart:.1e}, lost {lost}", flush=True)
        shutil.rmtree(folder)
    for name, parts in (("deaths", deaths), ("joins and leaves", joins)):
        medians = {part: round(statistics.median(each[part] for each in parts), 2) for part in parts[0]}
        total = statistics.median(sum(each.values()) for each in parts)
        print(f"\n{len(parts)} {name}: {total:.2f} s to the next finished step, medians of the parts: {medians}")
        assert total < 5
    assert max(lost) <= 10, lost
