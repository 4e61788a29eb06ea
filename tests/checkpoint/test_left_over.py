"""What a writer that died has left, and writers that meet: none takes another's file, and nothing stays for good."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from axo import files
from axo.checkpoint import folder, latest, load, save, storage
from axo.checkpoint.folder import name_of, whole_file
from tests.checkpoint.test_checkpoint_safety import filled, names_in, value_of
from tests.launcher import rank_outcomes


def die_before_the_lock(folder: Path) -> None:
    files.lock = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    save(folder, filled(2.0), step=2)


def test_what_a_save_leaves_that_dies_before_it_holds_its_lock_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rank_outcomes(die_before_the_lock, 1, tmp_path)[0].signal == "SIGKILL"
    assert [name.endswith(".part") for name in names_in(tmp_path)] == [True]
    save(tmp_path, filled(1.0), step=3)
    assert names_in(tmp_path) == [name_of(3)]

    real, lost = files.lock, []

    def clean_before_the_lock(descriptor: int) -> bool:
        if not lost:
            lost.append(descriptor)
            save(tmp_path, filled(4.0), step=4)  # removes the file, which nobody has locked
        return real(descriptor)

    monkeypatch.setattr(files, "lock", clean_before_the_lock)
    save(tmp_path, filled(5.0), step=5)
    assert names_in(tmp_path) == [name_of(3), name_of(4), name_of(5)] and len(lost) == 1


def die_while_it_removes(folder: Path) -> None:
    shutil.rmtree = lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    save(folder, filled(4.0), step=4, keep=1)


def test_what_was_being_removed_is_removed_by_the_next_save(tmp_path: Path) -> None:
    save(tmp_path, filled(3.0), step=3)
    assert rank_outcomes(die_while_it_removes, 1, tmp_path)[0].signal == "SIGKILL"
    assert any(name.endswith(".removed") for name in names_in(tmp_path)) and latest(tmp_path) == tmp_path / name_of(4)
    save(tmp_path, filled(5.0), step=5)
    assert names_in(tmp_path) == [name_of(4), name_of(5)]


@pytest.mark.parametrize("how", ["moved", "removed"])
def test_a_save_whose_folder_is_taken_away_is_whole_in_the_one_that_its_writers_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The data went into a new folder of the same name; it was without the marker, and latest knew nothing of it."""
    folder, real = tmp_path / "a", storage.write

    def take_away(*args: Any, **options: Any) -> Any:
        if how == "moved":
            folder.rename(tmp_path / "moved")
        else:
            shutil.rmtree(folder)
        return real(*args, **options)

    monkeypatch.setattr(storage, "write", take_away)
    save(folder, filled(1.0), step=1)
    model = filled(0.0)
    assert latest(folder) == folder / name_of(1) and load(folder, model).step == 1 and value_of(model) == 1.0


def test_a_save_that_is_about_to_begin_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread saves, too, just before the thread of the first one begins."""
    start = threading.Thread.start

    def save_beside(thread: threading.Thread) -> None:
        if thread.name.startswith("axo "):
            save(tmp_path / "b", filled(2.0))
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", save_beside)
    save(tmp_path / "a", filled(1.0), async_=True).wait()
    for name, value in (("a", 1.0), ("b", 2.0)):
        model = filled(0.0)
        load(tmp_path / name, model)
        assert value_of(model) == value


def test_a_look_into_a_folder_that_a_save_prunes_meanwhile_finds_what_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With keep=1 it found none: the newer was not listed yet, and the older was there no more."""
    looked, real = [], folder.is_checkpoint
    save(tmp_path, filled(1.0), step=1)

    def save_before_the_look(path: Path) -> bool:
        if not looked:
            looked.append(path)
            save(tmp_path, filled(2.0), step=2, keep=1)
        return real(path)

    monkeypatch.setattr(folder, "is_checkpoint", save_before_the_look)
    assert latest(tmp_path) == tmp_path / name_of(2) and looked == [tmp_path / name_of(1)]


def die_in_a_file(path: Path) -> None:
    with whole_file(path) as unfinished:
        unfinished.write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)


def test_two_writers_of_one_file_do_not_share_a_file_and_what_a_dead_one_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "m.pth"
    assert rank_outcomes(die_in_a_file, 1, path)[0].signal == "SIGKILL"
    (dead,) = names_in(tmp_path)
    (tmp_path / ".m.pth.mine.part").touch()
    with whole_file(path) as first, open(first, "wb", buffering=0) as file:
        file.write(b"first, ")
        with whole_file(path) as second:
            second.write_text("second")
        assert path.read_text() == "second"
        file.write(b"whole")
    assert path.read_text() == "first, whole"
    assert names_in(tmp_path) == [".m.pth.mine.part", "m.pth"] and dead.startswith(".m.pth.")
