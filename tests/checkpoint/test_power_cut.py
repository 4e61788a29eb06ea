"""A loss of power at any operation of a save leaves the checkpoint before or the new one, whole.

Runs are recorded below Python (see ``power_cut``). Then, for a cut after each write, sync, rename, creation and
removal, every kind of loss is put on a disk, and ``latest`` and ``load`` are asked. What a run was told is complete
(``save`` had returned) must be there, or what it was saving.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from axo.checkpoint import latest, load
from tests.checkpoint import power_cut

PROGRAM = """
import os, sys, torch, axo
from axo.checkpoint import folder, save
from tests.checkpoint.power_cut import note
run, saves, keep, options = sys.argv[1], sys.argv[2].split(","), int(sys.argv[3]), sys.argv[4:]
if "no-exchange" in options:
    folder._exchange = lambda a, b: False
out, log = os.environ["AXO_TRACE_ROOT"] + "/runs/a", os.environ["AXO_TRACE_LOG"]
comms = axo.connect("2x1x1x1") if "WORLD_SIZE" in os.environ else None
make = (lambda: axo.nn.Linear(6, 8, comms=comms)) if comms else (lambda: torch.nn.Linear(6, 8))
model = torch.nn.Sequential(make())
def tell(text):
    if comms is None or comms.rank == 0:
        note(log, text)
for version, step in enumerate(saves, 1):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(version)
    tell(f"{run} saves {version}")
    handle = save(out, model, step=int(step), extra={"version": version}, keep=keep, run=run, async_=version % 2 == 0)
    handle.wait()
    tell(f"{run} saved {version}")
if comms:
    comms.close()
"""


def start(library: Path, disk: Path, log: Path, arguments: list[str], ranks: int) -> list[subprocess.Popen]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found = []
    for rank in range(ranks):
        env = os.environ | {"AXO_TRACE_ROOT": str(disk), "AXO_TRACE_LOG": str(log), "LD_PRELOAD": str(library)}
        if ranks > 1:
            env |= {
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(ranks),
            }
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        found.append(subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], env=env))
    return found


def record(tmp_path: Path, programs: list[list[str]], ranks: int) -> list[power_cut.Operation]:
    """Run them side by side; the operations, which must account for all that is there in the end."""
    disk, log = tmp_path / "disk", tmp_path / "log"
    disk.mkdir()
    library = power_cut.build(tmp_path)
    running = [process for arguments in programs for process in start(library, disk, log, arguments, ranks)]
    assert [process.wait(timeout=240) for process in running] == [0] * len(running)
    operations = power_cut.read(log)
    whole = power_cut.Disk(disk)
    for operation in operations:
        if operation.kind != "n":
            whole.apply(operation)
    assert whole.tree(lambda folder: -1, lambda file: 0) == power_cut.take(disk)
    return operations


def version_in(path: Path) -> int:
    """Load it whole; which save's it is."""
    model = nn.Sequential(nn.Linear(6, 8))
    loaded = load(path, model, rng=False)
    assert all(bool(parameter.eq(loaded.extra["version"]).all()) for parameter in model.parameters())
    return loaded.extra["version"]


def cut_everywhere(tmp_path: Path, operations: list[power_cut.Operation], runs: list[str], draws: int | None) -> str:
    """Check each state after each cut; ``draws`` None: one state a cut, another kind each time."""
    disk, out = power_cut.Disk(tmp_path / "disk"), tmp_path / "after"
    saving, saved = dict.fromkeys(runs, 0), dict.fromkeys(runs, 0)
    seen: set[str] = set()
    cuts = states = 0
    for operation in operations:
        if operation.kind == "n":
            run, what, version = operation.path.split()
            (saving if what == "saves" else saved)[run] = int(version)
            continue
        disk.apply(operation)
        cuts += 1
        trees = list(disk.after_power_cut(draws or 1, cuts))
        for tree in trees if draws is not None else [trees[cuts % len(trees)]]:
            states += 1
            key = f"{tree} {saving} {saved}"
            if key in seen:
                continue
            seen.add(key)
            shutil.rmtree(out, ignore_errors=True)
            power_cut.put(tree, out)
            where = f"after operation {cuts} ({operation.kind} {operation.path})"
            newest = latest(out / "runs" / "a")
            assert newest is not None or not any(saved.values()), where
            if newest is not None:
                version_in(newest)
            for run in runs:
                newest = latest(out / "runs" / "a", run=run)
                version = version_in(newest) if newest else 0
                assert version in (saved[run], saving[run]), f"{where}: run {run} finds {version}, {saved} {saving}"
    return f"{cuts} cuts, {states} disks, {len(seen)} different"


def test_a_power_cut_leaves_the_checkpoint_before_or_the_new_one(tmp_path: Path) -> None:
    """New folders, a second checkpoint, a replaced one, one that pushes the oldest out; each cut with one loss."""
    operations = record(tmp_path, [["one", "1,2,2,3", "2"]], 1)
    print(cut_everywhere(tmp_path, operations, ["one"], None))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("programs", "ranks"),
    [
        ([["one", "1,2,2,3,4", "2"]], 1),
        ([["one", "1,2,2,3,3", "1", "no-exchange"]], 1),
        ([["one", "1,2,2,3", "1"]], 2),
        ([["one", "1,3,3,5", "1"], ["two", "2,4,4,6", "2"]], 1),
    ],
    ids=["one rank", "no exchange of names", "two ranks", "two runs"],
)
def test_a_power_cut_at_any_operation_with_any_loss(tmp_path: Path, programs: list[list[str]], ranks: int) -> None:
    operations = record(tmp_path, programs, ranks)
    print(cut_everywhere(tmp_path, operations, [arguments[0] for arguments in programs], 30))
