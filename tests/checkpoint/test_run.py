"""A run's hold on its folder: an identity, and a lock that ends with the process that took it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import axo
from axo.checkpoint import latest, save
from axo.checkpoint.folder import name_of
from tests.checkpoint.test_checkpoint_safety import filled, tell
from tests.launcher import rank_outcomes, run_ranks


def take_folder(folder: str, **options: Any) -> list[str]:
    comms = axo.connect("1x1x1x2")
    run = axo.checkpoint.Run(folder, comms)
    with pytest.raises(ValueError, match="in use by process"):
        axo.checkpoint.Run(folder, comms, resume=True)
    save(folder, filled(1.0), step=1, run=run.id, comms=comms)
    run.close()
    again = axo.checkpoint.Run(folder, comms, resume=True)
    assert again.id == run.id
    again.close()
    messages = [tell(lambda: axo.checkpoint.Run(folder, comms))]
    os.unlink(f"{folder}/axo-run.json") if comms.rank == 0 else None
    again = axo.checkpoint.Run(folder, comms, resume=True)  # known from the newest checkpoint
    assert again.id == run.id
    again.close()
    other = axo.checkpoint.Run(folder, comms, overwrite=True)
    assert latest(folder) is None
    return [*messages, run.id, other.id]


def test_a_run_has_an_identity_and_its_folder_to_itself(tmp_path: Path) -> None:
    first, second = run_ranks(take_folder, 2, str(tmp_path))
    assert first == second and first[1] != first[2]
    assert f"holds checkpoints of an earlier run, the newest {name_of(1)}; resume it" in first[0]


def make_it_alone(folder: str) -> None:
    comms = axo.connect("1x1x1x2", timeout=4.0)
    axo.checkpoint.Run(folder, comms).close()
    over = Path(folder, "over")
    while comms.rank == 1 and not over.exists():
        time.sleep(0.01)
    if comms.rank == 0:
        try:
            axo.checkpoint.Run(folder, comms)
        finally:
            over.touch()


def test_a_rank_that_makes_it_alone_is_told_within_the_limit_of_connect_who_is_missing(tmp_path: Path) -> None:
    first, second = rank_outcomes(make_it_alone, 2, str(tmp_path), timeout=25)
    assert second.ok and first.error == "Timeout" and first.seconds < 25, first.describe()
    assert "on 'checkpoints' (rank 0 of 2): timed out" in first.message and "not arrived: 1" in first.message


def ask_beside_fifos(folder: Path) -> list[str]:
    said = []
    for name in (".axo-lock", "axo-run.json"):
        os.mkfifo(folder / name)
        said.append(tell(lambda: axo.checkpoint.Run(folder, resume=True)))
        os.unlink(folder / name)
    os.unlink(save(folder, filled(1.0)).path / "axo.json")
    os.mkfifo(folder / name_of(0) / "axo.json")
    assert latest(folder) is None
    (folder / ".axo-lock").symlink_to("/dev/full")
    return [*said, tell(lambda: axo.checkpoint.Run(folder))]


def test_what_is_no_file_is_named_and_not_read(tmp_path: Path) -> None:
    for message, name in zip(
        run_ranks(ask_beside_fifos, 1, tmp_path, timeout=25)[0],
        (".axo-lock is a FIFO", "axo-run.json is a FIFO", ".axo-lock is a link"),
        strict=True,
    ):
        assert f"{name}, and a file of" in message


def test_a_folder_that_was_taken_away_is_taken_again_or_another_has_it(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    run = axo.checkpoint.Run(folder)
    run.hold()
    folder.rename(tmp_path / "moved")
    with pytest.warns(UserWarning, match="was moved or removed while a run held it"):
        run.hold()
    run.hold()
    with pytest.raises(ValueError, match=f"in use by process {os.getpid()} on"):
        axo.checkpoint.Run(folder)
    assert axo.checkpoint.Run(tmp_path / "moved", resume=True).id == run.id

    (folder / ".axo-lock").unlink()
    other = axo.checkpoint.Run(folder)
    assert "is in use by process" in tell(run.hold)
    other.close()
    run.close()

    run = axo.checkpoint.Run(folder, resume=True)
    (folder / ".axo-lock").unlink()
    axo.checkpoint.Run(folder).close()
    assert "is another run's by now" in tell(run.hold)


def hold_or_ask(folder: Path) -> str:
    """Rank 0 holds the folder until rank 1 has asked for it; then it is killed."""
    held, asked = folder.with_name("held"), folder.with_name("asked")
    if os.environ["RANK"] == "0":
        run = axo.checkpoint.Run(folder)
        held.with_suffix(".new").write_text(f"{os.getpid()} {run.id}")
        held.with_suffix(".new").rename(held)
    while not (asked if os.environ["RANK"] == "0" else held).exists():
        time.sleep(0.01)
    if os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    message = tell(lambda: axo.checkpoint.Run(folder, resume=True))
    asked.touch()
    return message


def go_on_beside_a_worker(folder: Path) -> str:
    """The run is killed; what it forked, as a DataLoader does, lives on and knows the lock's descriptor."""
    read, write = os.pipe()
    holder = os.fork()
    if holder == 0:
        try:
            run = axo.checkpoint.Run(folder, resume=True)
            if os.fork() == 0:
                os.write(write, f"{os.getpid()} {run.id}".encode())
            time.sleep(60)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.close(write)
    worker, identity = os.read(read, 100).decode().split()
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    try:
        run = axo.checkpoint.Run(folder, resume=True)
        assert run.id == identity
        return run.id
    finally:
        os.kill(int(worker), signal.SIGKILL)


def leave_in_a_child(folder: Path) -> tuple[int, str, str]:
    """A forked child leaves the run's block, and its own file has the number that the lock had."""
    with axo.checkpoint.Run(folder) as run:
        child = os.fork()
        if child == 0:
            try:
                with open(folder / "results", "w") as results:
                    assert results.fileno() == run._lock
                    results.write("results")
                    results.flush()
                    run.close()
                os._exit(0)
            finally:
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return code, (folder / "results").read_text(), tell(lambda: axo.checkpoint.Run(folder, resume=True))


def test_a_child_that_leaves_the_run_touches_no_other_file(tmp_path: Path) -> None:
    """It had truncated its own results."""
    code, results, message = run_ranks(leave_in_a_child, 1, tmp_path)[0]
    assert (code, results) == (0, "results") and "is in use by process" in message


def test_the_lock_on_a_folder_names_its_holder_and_ends_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    holder, other = rank_outcomes(hold_or_ask, 2, folder)
    process, identity = (tmp_path / "held").read_text().split()
    assert holder.signal == "SIGKILL" and other.ok, other.describe()
    assert f"{folder} is in use by process {process} on {os.uname().nodename}" in other.value
    with axo.checkpoint.Run(folder, resume=True) as run:
        assert run.id == identity
    assert run_ranks(go_on_beside_a_worker, 1, folder) == [identity]


def test_without_locks_a_run_of_this_host_is_refused_and_others_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system such as Lustre without -o flock."""

    def none(descriptor: int) -> bool:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("axo.files.lock", none)
    with pytest.warns(UserWarning, match=r"has no locks \(Function not implemented\).*last taken by nobody"):
        run = axo.checkpoint.Run(tmp_path)
    assert f"in use by process {os.getpid()} on" in tell(lambda: axo.checkpoint.Run(tmp_path, resume=True))
    run.close()
    (tmp_path / ".axo-lock").write_text("process 1 on elsewhere\n")
    with pytest.warns(UserWarning, match="last taken by process 1 on elsewhere"):
        assert axo.checkpoint.Run(tmp_path, resume=True).id == run.id
