"""What a save may not do: mix ranks, touch what is not its own, leave something over, or fail in words that mislead."""

from __future__ import annotations

import gc
import os
import resource
import shutil
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn

import axo
from axo.checkpoint import CheckpointError, consolidate, latest, load, metadata, save, storage
from axo.checkpoint.boxes import Parts
from axo.checkpoint.folder import complete, name_of, whole_file
from axo.checkpoint.ranks import Save
from tests.launcher import rank_outcomes, run_ranks


def filled(value: float, width: int = 3) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, width), nn.Linear(width, 5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def value_of(model: nn.Module) -> float:
    values = {value for parameter in model.parameters() for value in parameter.flatten().tolist()}
    assert len(values) == 1, values
    return values.pop()


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def tell(call: Any) -> str:
    """The one line that a bad call is answered with."""
    with pytest.raises((ValueError, CheckpointError)) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


# Ranks


def differ(folder: str) -> list[str]:
    comms = axo.connect("1x1x1x2")
    model, rank = filled(1.0), comms.rank
    optimizer = torch.optim.Adam(model.parameters())
    save(f"{folder}/two", model, step=1, extra={"a": [torch.ones(2), 1.5]}, comms=comms)
    save(f"{folder}/two", model, step=2, comms=comms, async_=True)
    assert load(f"{folder}/two", model, comms=comms).step == 2  # it waits for the save
    return [
        tell(lambda: save(f"{folder}/{rank}", model, step=1, comms=comms)),
        tell(lambda: save(folder, model, step=rank, comms=comms)),
        tell(lambda: save(folder, model, name=f"n{rank}", comms=comms)),
        tell(lambda: save(folder, model, extra={"loss": [torch.ones(2), rank]}, comms=comms)),
        tell(lambda: save(folder, model, async_=rank == 0, comms=comms)),
        tell(lambda: save(folder, model, optimizer if rank else None, comms=comms)),
        tell(lambda: save(folder, filled(1.0, width=3 + rank), comms=comms)),
        tell(lambda: save(folder, filled(1.0).double() if rank else model, comms=comms)),
        tell(lambda: load(f"{folder}/two", model, strict=rank == 0, comms=comms)),
        tell(lambda: load(f"{folder}/two", model, rng=rank == 0, comms=comms)),
        tell(lambda: load(f"{folder}/two/{name_of(1 + rank)}", model, comms=comms)),
        tell(lambda: (load if rank else save)(f"{folder}/two", model, comms=comms)),
    ]


def test_ranks_that_name_different_places_are_told_who_and_nothing_is_written(tmp_path: Path) -> None:
    first, second = run_ranks(differ, 2, str(tmp_path))
    assert first == second
    *others, last = first
    assert "ranks made different calls: rank 0 one with folder, name, step, " in last and "rank 1 one with path" in last
    for message, part in zip(
        others,
        (
            f"{tmp_path}/1'",
            "step: rank 0 0, rank 1 1",
            "'n1'",
            "different values of extra",
            "async_: rank 0 True, rank 1 False",
            "optimizer: rank 0 None, rank 1 'Adam'",
            "model: rank 0 '4 tensors, ",
            "model: rank 0 '4 tensors, ",
            "strict: rank 0 True, rank 1 False",
            "rng: rank 0 True, rank 1 False",
            name_of(2),
        ),
        strict=True,
    ):
        assert "ranks were given different values of" in message and "rank 1" in message and part in message
    assert names_in(tmp_path) == ["two"]


def lose_a_part(folder: str) -> str:
    comms = axo.connect("1x1x1x2")
    model = nn.Sequential(axo.nn.Linear(8, 8, comms=comms))
    save(folder, model, step=1)
    write = metadata.write

    def lose(path: Path, contents: Any) -> str:  # as where the ranks see different disks under one name
        (path / "__1_0.distcp").unlink()
        return write(path, contents)

    metadata.write = lose
    return tell(lambda: save(folder, model, step=2))


def test_a_part_that_is_missing_is_noticed_before_the_checkpoint_gets_its_name(tmp_path: Path) -> None:
    first, second = run_ranks(lose_a_part, 2, str(tmp_path))
    assert first == second and "__1_0.distcp, the file of rank 1, is missing" in first
    assert names_in(tmp_path) == [name_of(1)]


def die_before_the_first_save(folder: str, how: str) -> None:
    comms = axo.connect("2x1x1x1", timeout=4.0)
    model = nn.Sequential(axo.nn.Linear(8, 8, comms=comms))
    over = Path(folder, "over")
    if comms.rank == 1:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        while not over.exists():
            time.sleep(0.01)
        return
    try:
        save(folder, model)
    finally:
        over.touch()


@pytest.mark.parametrize(("how", "error"), [("dies", "PeerLost: barrier"), ("is late", "Timeout: barrier")])
def test_a_first_save_does_not_wait_for_ever(tmp_path: Path, how: str, error: str) -> None:
    first, _ = rank_outcomes(die_before_the_first_save, 2, str(tmp_path), how, timeout=25)
    assert error in first.describe()


# What is not its own


def test_only_what_axo_wrote_is_replaced_or_removed(tmp_path: Path) -> None:
    folder, model = tmp_path / "project", filled(1.0)
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "main.py").write_text("print()")
    foreign = folder / name_of(5)  # of plain DCP
    dcp.save({"a": torch.ones(2)}, checkpoint_id=foreign, no_dist=True)
    (folder / "link").symlink_to(folder / "src")
    for name in ("src", "link"):
        assert "did not write" in tell(lambda name=name: save(folder, model, name=name))
    assert "did not write" in tell(lambda: save(folder, model, step=5))
    for name in ("", ".", "..", "../../evil", "a/b", ".hidden", "a\0b", 5):
        assert "is not the name of a folder" in tell(lambda name=name: save(folder, model, name=name))
    for step in range(4):
        save(folder, model, step=step, keep=1)
    save(folder, model, name="best", keep=1)  # not one of those that are counted
    assert names_in(folder) == ["best", "link", "src", name_of(3), name_of(5)]
    assert (folder / "src" / "main.py").read_text() == "print()" and (foreign / ".metadata").exists()
    assert latest(folder) == folder / name_of(3)
    assert names_in(tmp_path) == ["project"]


def test_a_name_that_stays_listed_and_is_never_there_ends_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system that is broken: the folder was read for ever."""
    save(tmp_path, filled(1.0), step=1)
    (tmp_path / name_of(2)).mkdir()
    there = os.path.lexists
    monkeypatch.setattr(os.path, "lexists", lambda path: Path(path).name != name_of(2) and there(path))
    assert complete(tmp_path) == [tmp_path / name_of(1)]


def test_an_interrupted_wait_does_not_forget_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise CheckpointError("disk full")

    handle, times = Save(Path("a")), iter([KeyboardInterrupt, None, None])
    finish = handle.finish

    def interrupted() -> None:
        if error := next(times):
            raise error
        finish()

    monkeypatch.setattr(handle, "finish", interrupted)
    handle.begin(fail)
    for expected in (KeyboardInterrupt, CheckpointError):
        with pytest.raises(expected):
            handle.wait()
    handle.wait()  # the error was told, once


def test_runs_in_one_folder_keep_to_their_own(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, filled(1.0), step=step, run="one")
    for step in (4, 5, 6):
        save(tmp_path, filled(2.0), step=step, run="two", keep=1)
    save(tmp_path, filled(3.0), step=7, keep=1)
    assert [path.name for path in complete(tmp_path)] == [name_of(step) for step in (1, 2, 3, 6, 7)]
    assert latest(tmp_path, run="one") == tmp_path / name_of(3) and latest(tmp_path, run="none") is None
    assert "is a checkpoint of run one, and this is run two" in tell(
        lambda: save(tmp_path, filled(1.0), step=3, run="two")
    )
    assert "a run without identity" in tell(lambda: save(tmp_path, filled(1.0), step=7, run="two"))
    save(tmp_path, filled(4.0), step=3, run="one")
    model = filled(0.0)
    load(tmp_path / name_of(3), model)
    assert value_of(model) == 4.0


# Left over


def die_in_a_save(folder: Path) -> None:
    os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)
    save(folder, filled(2.0), step=2)


def test_a_failed_save_leaves_nothing_and_the_next_removes_what_a_dead_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, filled(1.0), step=1)
    of_torch = torch.save

    def full(value: Any, file: Any) -> None:
        if isinstance(value, torch.Tensor) or value == "large":
            raise OSError(28, "No space left on device")
        of_torch(value, file)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        for async_ in (False, True):
            message = tell(lambda flag=async_: save(tmp_path, filled(2.0), step=2, async_=flag).wait())
            assert f"{name_of(2)} was not written: rank 0: [Errno 28] No space left" in message
        message = tell(lambda: save(tmp_path, filled(2.0), step=2, extra="large"))  # type: ignore[arg-type]
        assert message == f"checkpoint: {tmp_path} cannot be used: No space left on device"
    assert names_in(tmp_path) == [name_of(1)]
    assert rank_outcomes(die_in_a_save, 1, tmp_path)[0].signal == "SIGKILL"
    assert [Path(name).suffix for name in names_in(tmp_path)] == [".new", ".part", ""]
    save(tmp_path, filled(3.0), step=3)
    assert names_in(tmp_path) == [name_of(1), name_of(3)]


class Interrupted:
    """A file in whose ``at``-th write Ctrl-C is pressed."""

    def __init__(self, path: Path, at: int) -> None:
        self.file, self.left = open(path, "wb"), at

    def __enter__(self) -> Interrupted:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, data: Any) -> int:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return self.file.write(data)


def press_ctrl_c(folder: Path) -> int:
    real, pressed = getattr(storage, "open", open), 0
    for at in range(1, 31):  # of some forty writes
        storage.open = lambda path, mode, at=at: Interrupted(path, at)  # type: ignore[attr-defined]
        try:
            save(folder, filled(2.0), step=2)
        except KeyboardInterrupt:
            pressed += 1
        gc.collect()  # torch's writers that were interrupted are freed here
    storage.open = real  # type: ignore[attr-defined]
    save(folder, filled(3.0), step=3)
    return pressed


def test_ctrl_c_in_a_save_is_ctrl_c_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_ranks(press_ctrl_c, 1, tmp_path)[0] == 30
    assert names_in(tmp_path) == [name_of(3)]

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "rename", interrupt)
        save(tmp_path, filled(1.0), step=4)
    assert names_in(tmp_path) == [name_of(3)]


def test_without_a_thread_an_asynchronous_save_writes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert save(tmp_path, filled(1.0), async_=True).wait().name == name_of(0)
        big, other = nn.Linear(1500, 1500), nn.Linear(1500, 1500)  # a program that ends has no thread for half of it
        assert save(tmp_path, big, step=1, async_=True).wait().name == name_of(1)
        load(tmp_path, other)
    assert torch.equal(big.weight, other.weight)


def die_in_consolidate(folder: Path) -> None:
    torch.save = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    consolidate(folder / "a", folder / "m.pth")


def test_a_killed_consolidate_leaves_no_tensors_and_the_next_removes_the_rest(tmp_path: Path) -> None:
    save(tmp_path / "a", filled(1.0))
    assert rank_outcomes(die_in_consolidate, 1, tmp_path)[0].signal == "SIGKILL"
    left, _ = names_in(tmp_path)
    assert left.startswith(".m.pth.") and (tmp_path / left).stat().st_size == 0
    consolidate(tmp_path / "a", tmp_path / "m.pth")
    assert names_in(tmp_path) == ["a", "m.pth"]


def test_copies_and_links_of_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy without its hidden files is named; a link stays, and what it points at too."""
    for step in (1, 2):
        save(tmp_path / "a", filled(float(step)), step=step)
    (tmp_path / "a" / name_of(2) / ".metadata").unlink()
    assert "has no .metadata (was it copied without" in tell(lambda: load(tmp_path / "a" / name_of(2), filled(0.0)))
    with pytest.warns(UserWarning, match=f"{name_of(2)} has no .metadata .*, and is passed over"):
        assert load(tmp_path / "a", filled(0.0)).step == 1
    save(tmp_path / "c", filled(1.0))
    (tmp_path / "c" / name_of(0) / ".metadata").unlink()
    with pytest.warns(UserWarning, match=f"{name_of(0)} has no .metadata"):
        assert latest(tmp_path / "c") is None
    shutil.rmtree(tmp_path / "c")
    save(tmp_path / "c", filled(1.0), step=1, run="r")
    (tmp_path / "c" / name_of(1) / "axo.json").write_text('{"step"')
    with pytest.warns(UserWarning, match=f"{name_of(1)} has an axo.json that cannot be read, and is passed over"):
        assert latest(tmp_path / "c", run="r") is None
    assert "(it has an axo.json that cannot be read)" in tell(lambda: save(tmp_path / "c", filled(2.0), step=1))
    (tmp_path / "a" / name_of(1)).rename(tmp_path / "elsewhere")
    (tmp_path / "a" / name_of(1)).symlink_to(tmp_path / "elsewhere")
    assert "is a link that axo.checkpoint.save did not" in tell(lambda: save(tmp_path / "a", filled(3.0), step=1))
    for step in (3, 4):
        save(tmp_path / "a", filled(float(step)), step=step, keep=1)
    assert names_in(tmp_path / "a") == [name_of(1), name_of(2), name_of(4)]
    axo.checkpoint.Run(tmp_path / "a", overwrite=True).close()
    assert complete(tmp_path / "a") == [] and load(tmp_path / "elsewhere", filled(0.0)).step == 1
    save(tmp_path / "b", filled(1.0), step=1)
    with monkeypatch.context() as patch:  # another user's files
        patch.setattr(shutil, "rmtree", lambda *args, **options: None)
        with pytest.warns(UserWarning, match="removed cannot be removed"):
            save(tmp_path / "b", filled(2.0), step=2, keep=1)
    real = os.rename

    def refuse(old: Path, new: Path) -> None:  # in a folder with the sticky bit
        if str(new).endswith(".removed") and os.path.exists(old):
            raise PermissionError(1, "Operation not permitted")
        real(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        with pytest.warns(UserWarning, match=rf"{name_of(2)} cannot be removed \(Operation not permitted\)"):
            save(tmp_path / "b", filled(3.0), step=3, keep=1)
    assert load(tmp_path / "b", filled(0.0)).step == 3


def test_loading_does_not_depend_on_the_default_device_or_on_likeness_of_names(tmp_path: Path) -> None:
    model = nn.ParameterDict({"a": nn.Parameter(torch.ones(2)), "a/b": nn.Parameter(torch.ones(2))})
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.values():
        parameter.grad = torch.ones(2)
    optimizer.step()
    save(tmp_path, model, optimizer)
    model.double()
    with torch.device("meta"):
        load(tmp_path, model, optimizer)
    assert [sorted(state) for state in optimizer.state.values()] == [["exp_avg", "exp_avg_sq", "step"]] * 2


# Words


def test_bad_arguments_of_save_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    model, itself = filled(1.0), dict[str, Any]()
    itself["it"] = itself
    for call, part in {
        lambda: save("", model): "names no folder",
        lambda: save(None, model): "names no folder",  # type: ignore[arg-type]
        lambda: save("a", model, step="5"): "step='5' is not a step",  # type: ignore[arg-type]
        lambda: save("a", model, step=-1): "step=-1 is not a step",
        lambda: save("a", model, step=True): "step=True is not a step",
        lambda: save("a", model, keep=True): "keep=True is out of range",
        lambda: save("a", model, run=""): "run='' is not an identity",
        lambda: save("a", model, comms=5): "comms=5 is not what axo.connect returned",  # type: ignore[arg-type]
        lambda: save("file", model): "is a file; give a folder",
        lambda: save("file/below/it", model): "file is a file",
        lambda: save("x" * 300, model): "File name too long",
        lambda: save("s3://bucket/run", model): "s3://bucket/run is an address, not a folder; mount it",
        lambda: axo.checkpoint.Run("gs://bucket/run"): "is an address",
        lambda: save("a", model, extra=itself): "extra holds itself",
    }.items():
        assert part in tell(call)
    assert names_in(tmp_path) == ["file"]


def test_bad_paths_of_load_and_consolidate_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    (tmp_path / "empty.pth").write_bytes(b"")
    (tmp_path / "readme").write_text("not a state_dict")
    good = save(tmp_path / "good", filled(1.0)).path
    model = filled(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for call, part in {
        lambda: load("", model): "the path is empty",
        lambda: load(tmp_path / "fifo", model): "fifo is a FIFO;",
        lambda: load("/dev/null", model): "/dev/null is a device;",
        lambda: load(tmp_path / "dangling", model): f"is a link to {tmp_path}/nothing, which does not exist",
        lambda: load(tmp_path / "empty.pth", model): "cannot be read (",
        lambda: load(tmp_path / "readme", model, optimizer): "cannot be read (",
        lambda: consolidate(tmp_path / "empty.pth", tmp_path / "out"): "cannot be read (",
        lambda: consolidate(good, tmp_path / "readme" / "m.pth"): "cannot be written: ",
        lambda: consolidate(good, tmp_path / "fifo"): "is a FIFO; name a file",
        lambda: consolidate(good, "/dev/null"): "is a device; name a file",
        lambda: consolidate(good, good / "__0_0.distcp"): f"would lie in a checkpoint, {good}; name a file elsewhere",
        lambda: consolidate(good, good / "m.pth"): "would lie in a checkpoint",
        lambda: consolidate(good, ""): "out is empty",
        lambda: consolidate("", tmp_path / "m.pth"): "source is empty",
        lambda: consolidate(good, tmp_path / ("x" * 300)): "cannot be written: File name too long",
        lambda: consolidate(good, tmp_path / ("x" * 300) / "m.pth"): "cannot be written: File name too long",
        lambda: consolidate(good, "/proc/m.pth"): "/proc/m.pth cannot be written: ",
        lambda: consolidate(good, "s3://bucket/m.pth"): "is an address",
        lambda: load("s3://bucket/run", model): "is an address",
        lambda: load(tmp_path, model): "holds no checkpoint (good/ in it does); give",
        lambda: load(good / ".metadata", model): f"is a file of a checkpoint; give the folder, {good}",
        lambda: load(good, nn.Linear(2, 3), strict=False): "it has no tensor of the model",
        lambda: load(good, nn.ModuleDict({"_orig_mod": model})): "'_orig_mod.' of torch.compile; save and load",
    }.items():
        assert part in tell(call)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", lambda *args: os.open(good / "none", os.O_RDONLY))
        for call in (lambda: load(good, model), lambda: consolidate(good, tmp_path / "m.pth")):
            assert tell(call) == f"checkpoint: {good}/__0_0.distcp cannot be read: No such file or directory"
    consolidate(good, tmp_path / "m.pth")
    assert "is a file; give a folder" in tell(lambda: consolidate(tmp_path / "m.pth", tmp_path / "readme"))
    assert names_in(tmp_path) == ["dangling", "empty.pth", "fifo", "good", "m.pth", "readme"]


def run_out_of_memory(folder: str) -> str:
    comms = axo.connect("1x1x2x1")
    model = nn.Sequential(axo.nn.Linear(8, 8, comms=comms))
    if comms.rank == 1:

        def fail(self: Any) -> Any:
            raise RuntimeError("[enforce fail] can't allocate memory: 12 bytes\nframe #0")

        Parts.staged = fail  # type: ignore[method-assign]
    return tell(lambda: save(folder, model, async_=True))


def test_a_rank_without_memory_for_its_copy_is_told_on_every_rank(tmp_path: Path) -> None:
    first, second = run_ranks(run_out_of_memory, 2, str(tmp_path))
    assert first == second and first.startswith("rank 1: checkpoint: async_=True has no memory for a copy ("), first
    assert names_in(tmp_path) == []


def test_what_fails_half_way_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = save(tmp_path / "good", filled(1.0)).path
    before = sorted(tmp_path.rglob("*"))

    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", full)
        assert "No space left" in tell(lambda: save(tmp_path / "good", filled(2.0), step=2))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            with whole_file(tmp_path / "small.json") as unfinished:
                unfinished.write_bytes(b"{}")
        for name in ("m.pth", "m.safetensors"):
            assert "No space left" in tell(lambda name=name: consolidate(good, tmp_path / name))
    assert sorted(tmp_path.rglob("*")) == before


def test_what_is_no_model_or_optimizer_or_cannot_be_written_is_named_before_anything_is(tmp_path: Path) -> None:
    model, other = filled(1.0), nn.Module()
    other.register_buffer("s", torch.eye(3).to_sparse())
    quantized = nn.Module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized.register_buffer("q", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))
    with torch.device("meta"):
        empty = filled(1.0)
    optimizer, keyed = (torch.optim.Adam(model.parameters()) for _ in range(2))
    keyed.state[model[0].weight] = {"exp/avg": torch.zeros_like(model[0].weight)}
    numbered = torch.optim.Adam(model.parameters())
    numbered.state[model[0].weight] = {0: torch.zeros(())}
    for call, part in {
        lambda: save(tmp_path, None): "model is a NoneType, not an nn.Module",  # type: ignore[arg-type]
        lambda: load(tmp_path, model.state_dict()): "model is a OrderedDict, not",  # type: ignore[arg-type]
        lambda: save(tmp_path, model, 5): "optimizer is a int, not a torch.optim.Optimizer",  # type: ignore[arg-type]
        lambda: save(tmp_path, model, keyed): "Adam keeps a tensor of '0.weight' as 'exp/avg'; only one whose key is",
        lambda: save(tmp_path, model, numbered): "Adam keeps a tensor of '0.weight' as 0; only one",
        lambda: save(tmp_path, model, [optimizer]): "optimizer is a list, not",  # type: ignore[arg-type]
        lambda: save(tmp_path, empty): "'0.weight' has no storage (meta device) and cannot be saved",
        lambda: save(tmp_path, nn.LazyLinear(3)): "'weight' has no shape yet and cannot be saved",
        lambda: save(tmp_path, other): "'s' is sparse_coo and cannot be saved; use .to_dense()",
        lambda: save(tmp_path, quantized): "'q' is quantized (torch.qint8) and cannot be saved",
        lambda: save(tmp_path, model, extra={"p": tmp_path}): "(it holds a pathlib.PosixPath); use numbers",
        lambda: save(tmp_path, model, extra={"p": lambda: 1}): "(Can't pickle local object",
        lambda: save(tmp_path, model, name="a\nb"): "signs that cannot be printed",
        lambda: save(tmp_path, model, name=name_of(5), step=7): "is that of another step than 7",
        lambda: save("a\0b", model): "names no folder",
        lambda: load(None, model): "path=None: the path is empty",  # type: ignore[arg-type]
        lambda: consolidate(None, tmp_path): "source=None is no path",  # type: ignore[arg-type]
        lambda: axo.checkpoint.Run(""): "folder='' names no folder",
    }.items():
        assert part in tell(call), part
    assert names_in(tmp_path) == []
    save(tmp_path, model, name=name_of(7), step=7)
    torch.save(model.state_dict(), tmp_path / "m.pth")
    assert "step=-1 is not a step" in tell(lambda: consolidate(tmp_path / "m.pth", tmp_path / "b", step=-1))
    with axo.checkpoint.Run(tmp_path, resume=True):
        assert "is in use by process" in tell(lambda: axo.checkpoint.Run(tmp_path, resume=True))
    axo.checkpoint.Run(tmp_path, resume=True).close()


def test_a_folder_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert tell(lambda: save("runs", filled(1.0))) == "checkpoint: runs cannot be used: No such file or directory"
    assert "checkpoint: runs cannot be read: " in tell(lambda: load("runs", filled(1.0)))


def test_what_is_read_is_of_the_same_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer format, another optimizer, and dtypes that would cut values off; Lightning's files are taken."""
    model = filled(1.5)
    with monkeypatch.context() as patch:
        patch.setattr("axo.checkpoint.state.FORMAT", 99)
        newer = save(tmp_path / "newer", model).path
    for call in (lambda: load(newer, model), lambda: consolidate(newer, tmp_path / "m.pth")):
        assert "was written by a newer Axo (format 99, this one reads up to 2)" in tell(call)

    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), torch.optim.Adam(model.parameters())]
    for optimizer, other in (optimizers, reversed(optimizers)):
        path = save(tmp_path / type(optimizer).__name__, model, optimizer).path
        kinds = f"that was saved is {type(optimizer).__name__}, and this is {type(other).__name__} (it lacks "
        assert kinds in tell(lambda path=path, other=other: load(path, model, other))
    adamw = torch.optim.AdamW(model.parameters())
    load(tmp_path / "Adam", model, adamw)  # the same options and state
    assert adamw.param_groups[0]["betas"] == (0.9, 0.999)

    floats, whole = nn.Module(), nn.Module()
    floats.register_buffer("b", torch.tensor([1.5]))
    whole.register_buffer("b", torch.tensor([1]))
    path = save(tmp_path / "floats", floats).path
    torch.save({"state_dict": floats.state_dict()}, tmp_path / "lightning.ckpt")
    for source in (path, tmp_path / "lightning.ckpt"):
        message = tell(lambda source=source: load(source, whole))
        assert "1 tensors would be lost (b is torch.float32 there and torch.int64 here)" in message, message
        floats.b.zero_()
        load(source, floats)
        assert floats.b.item() == 1.5
    load(save(tmp_path / "whole", whole).path, floats)
    assert floats.b.item() == 1.0

    rare = nn.Module()
    for dtype in (torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2):
        rare.register_buffer(str(dtype)[6:], torch.arange(3.0).to(dtype))
    found = load_file(consolidate(save(tmp_path / "rare", rare).path, tmp_path / "rare.safetensors"))
    for name, value in rare.named_buffers():
        assert found[name].dtype == value.dtype and found[name].tolist() == [0, 1, 2]


def consolidate_on_a_full_disk(folder: Path) -> list[str]:
    save(folder / "a", torch.nn.Linear(1000, 500))
    resource.setrlimit(resource.RLIMIT_FSIZE, (200000, 200000))
    return [tell(lambda name=name: consolidate(folder / "a", folder / name)) for name in ("m.pth", "m.safetensors")]


def test_consolidate_says_that_the_disk_is_full(tmp_path: Path) -> None:
    for line in run_ranks(consolidate_on_a_full_disk, 1, tmp_path)[0]:
        assert "cannot be written: " in line and "File too large" in line
    assert names_in(tmp_path) == ["a"]
