"""What a load may not do: take damage, or the state of other ranks or of other parameters, for what was saved."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import axo
from axo.checkpoint import checksum, consolidate, load, save, writer
from axo.checkpoint.folder import name_of
from axo.optim import checks
from tests.checkpoint.test_checkpoint_safety import filled, tell, value_of
from tests.launcher import run_ranks


def test_damage_never_loads_in_silence(tmp_path: Path) -> None:
    """A bit turned, or 64 bytes zeroed, at 60 places each: the error names file and entry, or nothing was changed."""
    model = filled(3.0, width=64)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    good = save(tmp_path / "good", model, optimizer).path
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    draw, found = random.Random(0), 0
    for attempt in range(120):
        bad = tmp_path / "bad"
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(good, bad)
        file = bad / ("__0_0.distcp" if attempt % 10 else ".metadata")
        data = bytearray(file.read_bytes())
        at = draw.randrange(len(data))
        if attempt % 2:
            data[at] ^= 1 << draw.randrange(8)
        else:
            data[at : at + 64] = bytes(len(data[at : at + 64]))
        file.write_bytes(data)
        other = filled(0.0, width=64)
        fresh = torch.optim.Adam(other.parameters())
        try:
            load(bad, other, fresh)
        except ValueError as error:
            message = str(error)
            assert f"{bad} is damaged: {file.name}" in message and "verify=False" in message and "\n" not in message
            assert file.name == ".metadata" or any(part in message for part in ("model/", "optimizer", "rng/", "axo"))
            found += 1
            continue
        # In what plain torch needs and Axo does not read (headers of a part), or it was zero before.
        assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())
        for one, two in zip(optimizer.state.values(), fresh.state.values(), strict=True):
            assert all(torch.equal(one[key], two[key]) for key in one)
    assert found >= 30, found


@pytest.mark.parametrize("of_isal", [True, False])
def test_checksums_are_those_of_zlib_and_others_are_refused(
    of_isal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: zlib's CRC-32, of a tensor that is hashed in several pieces."""
    if not of_isal:
        monkeypatch.setattr(checksum, "crc32", zlib.crc32)
    model = nn.Linear(3, 1_000_000)
    path = save(tmp_path, model).path
    marker = json.loads((path / "axo.json").read_text())
    metadata = (path / ".metadata").read_bytes()
    data = model.weight.detach().numpy().tobytes()
    assert marker["metadata"] == f"{zlib.crc32(metadata):08x}" and f"{zlib.crc32(data):08x}".encode() in metadata
    other = nn.Linear(3, 1_000_000)
    load(path, other)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))
    file = path / "__0_0.distcp"
    whole = file.read_bytes()
    for at in (0, len(data) - 1000):
        flip(file, data[at : at + 1000])
        assert "__0_0.distcp, model/weight: the checksum" in tell(lambda: load(path, other))
        file.write_bytes(whole)
    (path / "axo.json").write_text(json.dumps(marker | {"checksum": "sha1"}))
    unknown = f"checkpoint: {path} has checksums 'sha1', and crc32 is known here; load it with the version"
    assert tell(lambda: load(path, other)).startswith(unknown)
    assert load(path, other, verify=False).step == 0


def flip(file: Path, pattern: bytes) -> None:
    data = bytearray(file.read_bytes())
    data[data.index(pattern) + 3] ^= 0x40
    file.write_bytes(data)


@pytest.mark.parametrize("in_main", [True, False])
@pytest.mark.parametrize("fault", [OSError(errno.EIO, "broken disk"), KeyboardInterrupt(), None])
def test_what_fails_in_one_of_the_two_threads_that_read_is_told(
    fault: BaseException | None, in_main: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk, Ctrl-C, or (None) a file that became shorter, once both have begun. The file stays open for the other."""
    real, both, seen, closed = os.preadv, threading.Barrier(2), set(), []

    def preadv(file: int, buffers: list[memoryview], position: int) -> int:
        thread = threading.current_thread()
        if len(buffers[0]) > 1 << 18 and thread not in seen:
            seen.add(thread)
            both.wait(60)
            if (thread is threading.main_thread()) == in_main:
                if fault is not None:
                    raise fault
                return 0
            time.sleep(0.1)  # the other has failed by now
        try:
            return real(file, buffers, position)
        except OSError as error:
            closed.append(error)
            raise

    def model() -> nn.Module:
        return nn.ParameterList(torch.zeros(1500, 1500) for _ in range(3))

    path = save(tmp_path, model()).path
    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(BaseException) as caught:
        load(path, model())
    assert not closed and not any(thread.is_alive() for thread in seen - {threading.main_thread()})
    if isinstance(fault, KeyboardInterrupt):
        assert caught.value is fault
    else:
        why = "cannot be read: broken disk" if fault else "is damaged: __0_0.distcp, model/"
        assert isinstance(caught.value, ValueError) and "__0_0.distcp" in str(caught.value) and why in str(caught.value)


def load_damaged(folder: str) -> tuple[str, float]:
    comms = axo.connect("2x1x1x1")
    model = nn.Sequential(axo.nn.Linear(4, 8, comms=comms))
    with torch.no_grad():
        model[0].weight.fill_(2.0 - comms.rank)
    save(folder, model, step=1)
    if comms.rank == 0:
        flip(Path(folder) / name_of(1) / "__1_0.distcp", torch.ones(4).numpy().tobytes())
    comms.world.barrier()
    message = tell(lambda: load(folder, model))
    load(folder, model, verify=False)
    return message, model[0].weight.clone().max().item()


def test_a_turned_bit_is_told_on_every_rank_with_file_and_tensor(tmp_path: Path) -> None:
    """The bit that makes 1.0 a huge number; without the checksums it is taken as it is."""
    (first, _), (second, huge) = run_ranks(load_damaged, 2, str(tmp_path))
    assert first == second and "is damaged: __1_0.distcp, model/0.weight, the part at (4, 0): the checksum" in first
    assert huge > 2.0
    message = tell(lambda: consolidate(tmp_path, tmp_path / "m.pth"))
    assert "__1_0.distcp, model/0.weight" in message


def test_plain_dcp_reads_it_and_what_has_no_checksums_is_read(tmp_path: Path) -> None:
    path = save(tmp_path / "new", filled(7.0), step=3).path
    weight = {"model/1.weight": torch.zeros(5, 3)}
    dcp.load(weight, checkpoint_id=path, no_dist=True)
    assert weight["model/1.weight"].eq(7).all()
    from axo.checkpoint.writer import head

    entries: dict[str, Any] = {f"model/{name}": value for name, value in filled(8.0).state_dict().items()}
    old = tmp_path / "old"
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.save(entries | {"axo": head(4)}, checkpoint_id=old, planner=planner, no_dist=True)
    model = filled(0.0)
    assert load(old, model).step == 4 and value_of(model) == 8.0


def test_an_asynchronous_save_holds_what_was_given_when_it_was_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses that the next step adds, and a rate in a tensor that a scheduler changes in place."""
    go, write = threading.Event(), writer.write
    monkeypatch.setattr(writer, "write", lambda *args: go.wait(60) and write(*args))
    model, losses = filled(1.0), [1.0]
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5))
    handle = save(tmp_path, model, optimizer, extra={"losses": losses}, async_=True)
    losses.append(2.0)
    optimizer.param_groups[0]["lr"].fill_(7.0)
    model[0].bias.data.fill_(7.0)
    go.set()
    handle.wait()
    other = filled(0.0)
    again = torch.optim.SGD(other.parameters(), lr=0.1)
    assert load(tmp_path, other, again).extra == {"losses": [1.0]}
    assert value_of(other) == 1.0 and again.param_groups[0]["lr"] == 0.5


def steps_after(grid: str, folder: str, source: int, by_hand: bool) -> tuple[str, list[str]]:
    """What a step says after this rank has loaded the plain state dict of rank ``source`` into a new optimizer."""
    comms = axo.connect(grid)
    torch.manual_seed(0)
    serial = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    if by_hand:
        model = nn.Sequential(axo.nn.Linear(8, 8, comms=comms), axo.nn.Linear(8, 8, comms=comms, transposed=True))
    else:
        model = axo.parallelize(serial, comms, plan="auto")

    def step(optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()

    first, second = (torch.optim.Adam(model.parameters()) for _ in range(2))
    step(first)
    torch.save(first.state_dict(), f"{folder}/{comms.rank}.pth")
    comms.world.barrier()
    second.load_state_dict(torch.load(f"{folder}/{comms.rank if source < 0 else source}.pth", weights_only=True))
    problem = ""
    try:
        step(second)
    except ValueError as error:
        problem = str(error)
    save(f"{folder}/saved", model, first)
    load(f"{folder}/saved", model, second)
    step(second)
    return problem, sorted(key for group in second.param_groups for key in group if key.startswith("axo"))


def zero_shards() -> str:
    comms = axo.connect("1x1x1x2")
    model = axo.parallelize(nn.Sequential(nn.Linear(8, 8)), comms, plan="auto", zero=1)
    return checks.shards_of(torch.optim.Adam(model.parameters()))


@pytest.mark.parametrize(
    ("grid", "by_hand", "refused"),
    [("2x1x1x1", False, "x=0 of 2"), ("2x1x1x1", True, "x=0 of 2"), ("1x1x1x2", False, "")],
)
def test_the_plain_state_of_another_ranks_optimizer_is_refused(
    tmp_path: Path, grid: str, by_hand: bool, refused: str
) -> None:
    """Its shapes fit, so torch loads it. Along an axis that splits nothing it is right, and taken."""
    first, second = run_ranks(steps_after, 2, grid, str(tmp_path), 0, by_hand)
    assert first == ("", [])
    assert second[1] == [] and (f"saved with the shards of {refused}, and this rank" in second[0]) is bool(refused)
    if by_hand:
        return
    assert run_ranks(steps_after, 2, grid, str(tmp_path), -1, by_hand) == [("", [])] * 2
    assert run_ranks(zero_shards, 2) == ["data=0 of 2", "data=1 of 2"]
