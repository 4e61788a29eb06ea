"""What goes wrong while a checkpoint is saved or loaded: a full disk, a lost rank, SIGKILL at any moment."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import axo
from axo.checkpoint import CheckpointError, consolidate, latest, load, metadata, save
from axo.checkpoint.folder import complete, name_of
from axo.checkpoint.ranks import pending
from axo.launch import RankFailed, launch_local
from axo.train.copies import RankCopies
from tests.launcher import rank_outcomes, run_ranks


def fill_the_disk(folder: str, limit: int, async_: bool) -> tuple[str, float]:
    import resource

    comms = axo.connect("2x1x1x1")
    model = nn.Sequential(axo.nn.Linear(256, 256, comms=comms))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    save(folder, model, step=1)
    if comms.rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    with torch.no_grad():
        model[0].weight.fill_(2.0)
    message = "nothing"
    try:
        save(folder, model, step=2, async_=async_)
        if async_:
            save(folder, model, step=3)  # waits for the one before, and tells of it
    except CheckpointError as error:
        message = str(error)
    loaded = load(folder, model)
    assert loaded.step == 1
    return message, float(model[0].weight.clone().mean())


@pytest.mark.parametrize("async_", [False, True])
def test_a_full_disk_is_told_and_leaves_the_one_before(tmp_path: Path, async_: bool) -> None:
    """One rank may write no more than 10,000 bytes a file; the folder in /tmp itself is not full."""
    first, second = run_ranks(fill_the_disk, 2, str(tmp_path), 10_000, async_)
    assert first == second and first[1] == 1.0
    assert "step-00000002 was not written: rank 1: " in first[0]
    assert [path.name for path in complete(tmp_path)] == [name_of(1)]


def save_twice(folder: str) -> tuple[str, int, float]:
    comms = axo.connect("1x1x1x2")
    model = axo.parallelize(nn.Sequential(nn.Linear(128, 128)), comms, plan="auto", zero=2)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.ones(2, 128)).sum().backward()
        optimizer.step()

    step()
    save(folder, model, optimizer, step=1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step()
    with pytest.raises(CheckpointError) as error:
        save(folder, model, optimizer, step=2)
    loaded = load(folder, model, optimizer)
    far = max(float((a - b).abs().max()) for a, b in zip(before, model.parameters(), strict=True))
    return str(error.value), loaded.step, far


def test_a_disk_that_is_full_leaves_the_one_before(tmp_path: Path) -> None:
    """A file system of its own that has room for one checkpoint, of 198 kB, and not for two."""
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=320k", "tmpfs", tmp_path], capture_output=True)
    if mount.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {mount.stderr.decode().strip()}")
    try:
        first, second = run_ranks(save_twice, 2, str(tmp_path))
        assert first == second and first[1:] == (1, 0.0)
        assert "step-00000002 was not written: rank " in first[0] and "No space left on device" in first[0]
        assert [path.name for path in complete(tmp_path)] == [name_of(1)]
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def die_before_load(folder: str) -> None:
    comms = axo.connect("2x1x1x1")
    model = nn.Sequential(axo.nn.Linear(8, 8, comms=comms))
    save(folder, model)
    if comms.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    load(folder, model)


def test_a_rank_that_is_missing_at_load_is_named(tmp_path: Path) -> None:
    first, _ = rank_outcomes(die_before_load, 2, str(tmp_path))
    assert first.error == "PeerLost" and "rank 1" in first.message, first.describe()


def save_for_ever(folder: str) -> None:
    comms = axo.connect("2x1x1x1")
    model = nn.Sequential(axo.nn.Linear(512, 512, comms=comms), axo.nn.Linear(512, 512, comms=comms, transposed=True))
    if loaded := latest(folder):
        load(loaded, model)
    for step in range(load(folder, model).step + 1 if loaded else 1, 1 << 30):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(step)
        save(folder, model, step=step, keep=2, async_=step % 2 == 0)


def kill_and_load(folder: Path, rounds: int, seed: int) -> list[int]:
    """Start two ranks that save for ever, kill both at a random moment, and load; the step that was there each time."""
    draw, steps = random.Random(seed), []
    first = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    for parameter in first.parameters():
        nn.init.zeros_(parameter)
    save(folder, first)
    for _ in range(rounds):
        outcomes = rank_outcomes(save_for_ever, 2, str(folder), timeout=0.6 + draw.random())
        assert all(outcome.timed_out for outcome in outcomes), [outcome.describe() for outcome in outcomes]
        whole = torch.load(consolidate(folder, folder / "m.pth"), weights_only=True)
        steps.append(load(folder, first).step)
        assert all(tensor.eq(steps[-1]).all() for tensor in whole.values()), steps[-1]
    return steps


def test_a_complete_checkpoint_loads_after_sigkill(tmp_path: Path) -> None:
    """However far the ranks came, what is there is one step's, whole; fifty kills are in the soak."""
    kill_and_load(tmp_path, 1, 1)


@pytest.mark.soak
def test_a_complete_checkpoint_loads_after_each_of_fifty_kills(tmp_path: Path) -> None:
    steps = kill_and_load(tmp_path, 50, 2)
    parts = len(list(tmp_path.glob(".step-*")))
    print(f"50 kills while saving: every newest checkpoint loaded, steps {steps[0]} to {steps[-1]}, {parts} left over")
    assert steps == sorted(steps)


END = """
import atexit, resource, signal, sys
import torch
from axo.checkpoint import save

atexit.register(print, "the others' end")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
if sys.argv[2] == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
save(sys.argv[1], torch.nn.Linear(100, 100), async_=True)
print("trained")
"""


@pytest.mark.parametrize("disk", ["empty", "full"])
def test_a_program_whose_last_save_fails_says_so(tmp_path: Path, disk: str) -> None:
    """Nobody waits for the save. Oracle: the exit code, and what is there."""
    program = [sys.executable, "-c", END, str(tmp_path), disk]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert ended.stdout.splitlines() == ["trained", "the others' end"], ended
    found = [path.name for path in tmp_path.iterdir() if path.name.startswith("step-")]
    if disk == "full":
        assert (ended.returncode, found) == (1, []) and "was not written" in ended.stderr, ended
    else:
        assert (ended.returncode, found) == (0, [name_of(0)]), ended


def copy_and_save(folder: Path) -> tuple[Path, bool, bool]:
    """A copy in memory fails while a checkpoint is saved: what was saved, and what the copy says."""
    comms, model, write = axo.connect("2x1x1x1"), nn.Linear(4, 4), metadata.write
    config: Any = SimpleNamespace(hosts=None, copy_every=1, owner="train")
    state: Any = SimpleNamespace(folder=folder / "memory")
    copies = RankCopies(
        config, state, comms, lambda place, _: save(place, model, comms=comms, async_=True), lambda: False
    )
    metadata.write = breaks  # type: ignore[assignment]
    copies.begin()
    pending.save.finish()
    metadata.write = write
    saved = save(folder, model, step=1, comms=comms).path
    return saved, copies.wait(), copies.wait()


def test_a_copy_that_fails_is_its_owners_and_not_the_next_saves(tmp_path: Path) -> None:
    ranks = run_ranks(copy_and_save, 2, tmp_path)
    assert ranks == [(tmp_path / name_of(1), False, False)] * 2 and complete(tmp_path)


def fail_last(folder: str) -> None:
    comms = axo.connect("2x1x1x1")
    metadata.write = breaks  # type: ignore[assignment]
    save(folder, nn.Linear(4, 4), comms=comms, async_=True)


def breaks(*_: object) -> None:
    raise OSError("no space left")


def test_local_ranks_whose_last_save_fails_say_so(tmp_path: Path) -> None:
    """launch_local forks its ranks, where atexit runs nothing."""
    with pytest.raises(RankFailed, match="step-00000000 was not written: rank 0: no space left"):
        launch_local(fail_last, 2, str(tmp_path))
    assert not complete(tmp_path)
