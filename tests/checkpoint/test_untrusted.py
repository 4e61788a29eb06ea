"""Checkpoints of others: none runs code, none is read from outside of its folder, none leaves a tensor as it was."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

import axo
from axo.checkpoint import consolidate, load, mirrors
from axo.checkpoint.folder import METADATA
from axo.checkpoint.ranks import checkpoint_group, share
from axo.errors import Error
from axo.integrations.fabric import sharded_checkpoint, whole_checkpoint
from tests.checkpoint import hostile
from tests.checkpoint.hostile import Bomb, model, rewrite
from tests.launcher import rank_outcomes, run_ranks


def tell(call: Callable[[], Any]) -> str:
    with pytest.raises(ValueError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


def bombs(folder: Path, flag: Path) -> dict[str, Callable[[], Any]]:
    """Each way in -> a call that reads a checkpoint with a bomb in it. Those of LitGPT's have a test of their own."""
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

    made = {name: hostile.write(folder / name) for name in ("whole pickle", "extra field", "key", "entry", "bare")}
    (made["whole pickle"] / METADATA).write_bytes(pickle.dumps(Bomb(flag)))
    hostile.seal(made["whole pickle"])
    rewrite(made["extra field"], lambda metadata: vars(metadata).update(planner_data=Bomb(flag)))
    rewrite(made["key"], lambda metadata: metadata.state_dict_metadata.update({"x": Bomb(flag)}))
    hostile.put_entry(made["entry"], "axo", Bomb(flag))
    (made["bare"] / METADATA).write_bytes(pickle.dumps([Bomb(flag)]))
    (made["bare"] / "axo.json").unlink()
    run = folder / "run"
    hostile.write(run).rename(run / "lit_model.pth")
    rewrite(run / "lit_model.pth", lambda metadata: Bomb(flag))
    plain = hostile.pth(folder / "plain.pth", {"weight": torch.ones(2), "x": Bomb(flag)})
    torch.save({"weight": Bomb(flag)}, folder / "old.pth", _use_new_zipfile_serialization=False)
    calls: dict[str, Callable[[], Any]] = {
        f"load {name}": (lambda path=path: load(path, model())) for name, path in made.items()
    }
    calls |= {f"consolidate {name}": (lambda path=path: consolidate(path, folder / "o")) for name, path in made.items()}
    return calls | {
        "load the parent": lambda: load(folder / "whole pickle", model()),
        "consolidate a run of litgpt's": lambda: sharded_checkpoint.consolidate(run, folder / "o"),
        "fabric, a run of litgpt's": lambda: load(run / "lit_model.pth", model()),
        "load a file": lambda: load(plain, model()),
        "load an old file": lambda: load(folder / "old.pth", model()),
        "consolidate a file": lambda: consolidate(plain, folder / "out"),
        "fabric": lambda: whole_checkpoint.load(plain, TorchCheckpointIO(), None),
        "an unverified one": lambda: load(made["whole pickle"], model(), verify=False),
    }


def test_no_way_in_runs_what_a_checkpoint_says(tmp_path: Path) -> None:
    flag = tmp_path / "it ran"
    calls = bombs(tmp_path, flag)
    for name, call in calls.items():
        message = tell(call)
        assert not flag.exists(), name
        assert str(tmp_path) in message, (name, message)
    assert len(calls) == 18
    pickle.loads(pickle.dumps(Bomb(flag)))
    assert flag.exists()  # it would have


class Words(dict):
    """A class that torch does not make unasked."""


def test_who_trusts_a_file_says_so(tmp_path: Path) -> None:
    one = model()
    path = hostile.pth(tmp_path / "model.pth", {"state_dict": dict(one.state_dict()), "config": Words(a=1)})
    assert "trust=True" in tell(lambda: load(path, model())) and "Words" in tell(lambda: load(path, model()))
    other = model()
    load(path, other, trust=True)
    assert torch.equal(other.weight, one.weight)
    assert consolidate(path, tmp_path / "out", trust=True).is_dir()


def test_a_compressed_file_is_refused_before_it_grows(tmp_path: Path) -> None:
    path = hostile.compressed(hostile.pth(tmp_path / "model.pth", {"weight": torch.zeros(1 << 20)}))
    assert path.stat().st_size < 1 << 16
    assert tell(lambda: load(path, model())).startswith(f"checkpoint: {path} cannot be read (it is compressed): ")


def weight_of(metadata: Any) -> Any:
    return metadata.state_dict_metadata["model/weight"]


def chunks(*boxes: tuple[tuple[int, int], tuple[int, int]]) -> Callable[[Any], None]:
    """The weight of (5, 3) in these boxes, all of which lie where the whole of it does."""

    def change(metadata: Any) -> None:
        index = MetadataIndex("model/weight", torch.Size([0, 0]))
        info = metadata.storage_data.pop(index)
        weight_of(metadata).chunks = []
        for offset, size in boxes:
            weight_of(metadata).chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(size)))
            metadata.storage_data[MetadataIndex("model/weight", torch.Size(offset))] = info

    return change


def infos(**fields: Any) -> Callable[[Any], None]:
    """These in the last part of the file."""
    return lambda metadata: vars(max(metadata.storage_data.values(), key=lambda info: info.offset)).update(fields)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (chunks(), "the 0 chunks of model/weight (5, 3) do not cover it exactly once"),
        (chunks(((0, 0), (4, 3))), "the 1 chunks of model/weight"),
        (chunks(((0, 0), (3, 3)), ((3, 0), (2, 2))), "the 2 chunks of model/weight"),
        (chunks(((0, 0), (3, 3)), ((2, 0), (3, 3))), "the 2 chunks of model/weight"),  # as many elements and more
        (chunks(((0, 0), (3, 3)), ((4, 0), (2, 3))), "the 2 chunks of model/weight"),  # beyond the end
        (chunks(((0, 0), (5, 3)), ((0, 0), (0, 3))), "the 2 chunks of model/weight"),
        (chunks(((0, 0), (3, 3)), ((3, 0), (2, 3))), "lie in the same bytes"),
        (infos(relative_path="../secret.bin"), "lies in '../secret.bin', which is no file of the folder"),
        (infos(relative_path="/etc/passwd"), "which is no file of the folder"),
        (infos(relative_path=".."), "which is no file of the folder"),
        (infos(relative_path="link.bin"), "link.bin is a link, and a file of its own is wanted there; copy the file"),
        (infos(relative_path="pipe"), "pipe is a FIFO"),
        (infos(relative_path="gone"), "is incomplete: gone, the file of rank gone, is missing"),
        (infos(offset=-1), "is -1"),
        (infos(length=1 << 62), "bytes, not "),
        (infos(length=1 << 70), "a length is 1180591620717411303424"),
        (infos(checked=(0, 10**12, "x")), "lie outside of its part"),
        (infos(checked="x"), "the checksum of "),
        (infos(transform_descriptors=["zstd"]), "is transformed"),
        (lambda metadata: vars(weight_of(metadata)).update(size=torch.Size([5, 30])), "do not cover it"),
        (lambda metadata: vars(weight_of(metadata)).update(size=[5, 3]), "the size of model/weight is [5, 3]"),
        (lambda metadata: vars(weight_of(metadata).properties).update(dtype=torch.float64), "are not as many"),
        (lambda metadata: metadata.storage_data.clear(), "it does not say where"),
        (lambda metadata: vars(metadata).update(storage_data=None), "storage_data is None"),
        (lambda metadata: {}, "a Metadata is expected, not {}"),
        (lambda metadata: [] or 7, "a Metadata is expected, not 7"),
    ],
)
def test_metadata_that_is_not_true_is_one_error(tmp_path: Path, change: Callable[[Any], Any], said: str) -> None:
    """The checksum is right: whoever wrote it wanted it read. The model is left as it was, with ``strict`` or not."""
    path = hostile.write(tmp_path / "runs")
    for place in (tmp_path / "secret.bin", tmp_path / "runs" / "secret.bin"):
        place.write_bytes((path / "__0_0.distcp").read_bytes())
    (path / "link.bin").symlink_to("../secret.bin")
    os.mkfifo(path / "pipe")
    rewrite(path, change)
    one = model()
    before = one.weight.clone()
    for call in (
        lambda: load(path, one),
        lambda: load(path, one, strict=False),
        lambda: consolidate(path, tmp_path / "o"),
    ):
        message = tell(call)
        assert message.startswith(f"checkpoint: {path} is ") and said in message, message
    assert torch.equal(one.weight, before) and not (tmp_path / "o").exists()


def test_what_an_entry_holds_is_looked_at(tmp_path: Path) -> None:
    for number, (entry, value) in enumerate(
        [
            ("axo", 5),
            ("axo", {"format": 2}),
            ("axo", {"format": 2, "step": 1, "ranks": 0, "aliases": {}, "dropout": {}, "extra": None, "grid": ""}),
            ("axo", {"format": 2, "step": 1, "ranks": 1, "aliases": {}, "dropout": {"a": "b"}, "grid": ""}),
            ("optimizer", {"groups": 5}),
            ("optimizer", [1]),
            ("rng/0", {"torch": 5}),
            ("rng/0", {"torch": torch.get_rng_state(), "python": (1, 2), "numpy": ()}),
        ]
    ):
        path = hostile.write(tmp_path / str(number))
        hostile.put_entry(path, entry, value)
        one = model()
        message = tell(lambda path=path, one=one: load(path, one, torch.optim.Adam(one.parameters())))
        assert str(path) in message


def test_links_are_followed_for_who_trusts_them(tmp_path: Path) -> None:
    path = hostile.write(tmp_path)
    (path / "__0_0.distcp").rename(tmp_path / "blob")
    (path / "__0_0.distcp").symlink_to("../blob")
    assert "load with trust=True" in tell(lambda: load(path, model()))
    assert load(path, model(), trust=True).step == 1


def test_tuples_that_stand_twice_end_the_reading(tmp_path: Path) -> None:
    """Thirty levels of ``t = (t, t)`` as a key: its hash would take a thousand million steps."""
    path = hostile.write(tmp_path)
    key: Any = "x"
    for _ in range(30):
        key = (key, key)
    (path / METADATA).write_bytes(b"\x80\x04}" + pickle.dumps(key, 4)[11:-1] + b"Ns.")  # without its frame
    hostile.seal(path)
    assert "stands in two places" in tell(lambda: load(path, model()))


def send(what: str, flag: str) -> Any:
    comms = axo.connect("1x1x1x2")
    group = checkpoint_group(comms)
    plain = (1, [None, True, 0.5], {"a": torch.ones(2, 3), ("b", 2): {"ä"}, 3: torch.empty(0, 4).half()})
    if what == "plain values" or comms.rank == 0:
        return [str(each) for each in share(group, plain)]
    if what == "an object":
        return share(group, Bomb(Path(flag)))
    buffer = io.BytesIO()
    torch.save(plain, buffer)  # as torch reads with weights_only=True
    data = buffer.getvalue() if what == "a file of torch's" else pickle.dumps(Bomb(Path(flag)))
    message = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(sizes, torch.tensor([len(message)]), group=group)
    message = torch.nn.functional.pad(message, (0, int(max(sizes)) - len(message)))
    dist.all_gather([torch.empty_like(message) for _ in range(2)], message, group=group)
    return None


@pytest.mark.parametrize("what", ["an object", "a pickle", "a file of torch's"])
def test_what_a_peer_sends_is_not_unpickled(tmp_path: Path, what: str) -> None:
    first, second = rank_outcomes(send, 2, what, str(tmp_path / "it ran"))
    assert first.error == "Error" and "rank 1 sent what is no plain value" in first.message
    assert what != "an object" or second.message == first.message
    assert not (tmp_path / "it ran").exists()


def test_plain_values_come_as_they_were_sent() -> None:
    first, second = run_ranks(send, 2, "plain values", "")
    assert first == second and first[0] == first[1]
    assert first[0].startswith("(1, [None, True, 0.5], {'a': tensor([[1., 1., 1.],") and "size=(0, 4)" in first[0]


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *(("name", 4), ("../name", 4), ("a/name", 4), ("..", 4), ("", 4), ("a\0", 4), (5, 4)),
        *(("file", -1), ("file", 1 << 60), ("file", "4"), ("file", True), ("file", 4.0)),
    ],
    ids=repr,
)  # fmt: skip
def test_a_file_that_another_host_names_lies_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: Any, size: Any
) -> None:
    """The other of two hosts has such a file to give; nothing is written, in the folder or elsewhere."""
    if name == "name":
        name = str(tmp_path / name)  # joined to a folder it is itself
    told = iter(["another host", (name, size), {name: size}])
    monkeypatch.setattr(mirrors, "share", lambda group, value: [value, next(told)])
    folder, both = tmp_path / "folder", mirrors.Mirrors(None)
    (folder / "a").mkdir(parents=True)
    (folder / "own").write_bytes(b"1234")
    before = {path: path.stat().st_size for path in tmp_path.rglob("*")}
    with pytest.raises(Error, match=r"rank 1 names .* which is no file of the folder and its bytes"):
        both.exchange(folder, "own")
    with pytest.raises(Error, match=r"rank 1 names .* which is no file of the folder and its bytes"):
        both.complete(folder)
    assert before == {path: path.stat().st_size for path in tmp_path.rglob("*")}
