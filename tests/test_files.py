"""Opening and parsing what others wrote: no wait, no end of memory, no link followed where Axo writes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from axo import files
from axo.checkpoint import Run
from axo.checkpoint.folder import UnfinishedCheckpoint, whole_file
from axo.cli.errors import complain
from axo.comm import flight
from axo.perf import machine, readers
from axo.train import log, models
from axo_kernels.tune.cache import Cache
from tests.launcher import run_ranks

NINE_LEVELS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]" for before, name in pairwise("abcdefghi")
)


def tell(call: Callable[[], Any]) -> str:
    before = time.monotonic()
    with pytest.raises(ValueError) as error:
        call()
    assert time.monotonic() - before < 10
    assert "\n" not in str(error.value) and len(str(error.value)) < 2000
    return str(error.value)


def odd(folder: Path) -> list[Path]:
    """What is no file to read."""
    os.mkfifo(folder / "pipe.yaml")
    (folder / "folder.yaml").mkdir()
    (folder / "zero.yaml").symlink_to("/dev/zero")
    with open(folder / "long.yaml", "wb") as file:
        file.truncate(1 << 40)  # a hole
    return [folder / f"{name}.yaml" for name in ("pipe", "folder", "zero", "long")]


READERS: dict[str, Callable[[Path], Any]] = {
    "machine": lambda path: machine.load(str(path)),
    "model": lambda path: readers.read(str(path)),
    "training model": lambda path: models._from_file(path),
    "flight": lambda path: flight.read([path]),
    "text": files.read_text,
}


@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, reader: str) -> None:
    for path in odd(tmp_path):
        assert path.name in tell(lambda path=path: READERS[reader](path))


def test_a_tuners_cache_that_is_no_file_is_a_miss(tmp_path: Path) -> None:
    cache = Cache("cpu", {}, tmp_path)
    for path in odd(tmp_path):
        cache.path.unlink(missing_ok=True)
        cache.path.symlink_to(path)
        assert Cache("cpu", {}, tmp_path).all() == {}
    cache.path.unlink()
    cache.path.write_text("[" * 100_000)
    assert Cache("cpu", {}, tmp_path).all() == {}


@pytest.mark.parametrize("field", ["description", "peak_tflops", "calibrated_on", "gemms", "name"])
def test_aliases_do_not_multiply_a_machine_file(tmp_path: Path, field: str) -> None:
    """Nine levels of nine stand for 387 million texts."""
    path = tmp_path / "machine.yaml"
    path.write_text(f"{NINE_LEVELS}\n{field}: *i\n")
    assert "machine.yaml: line 6: aliases stand for too much" in tell(lambda: machine.load(str(path)))
    path.write_text(f"{field}: &x [*x]\n")
    assert "line 1: aliases stand for too much" in tell(lambda: machine.load(str(path)))


def test_aliases_do_not_multiply_a_model_file(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text(f"{NINE_LEVELS}\nn_embd: *i\n")
    for reader in ("model", "training model"):
        message = tell(lambda reader=reader: READERS[reader](path))
        assert "model.yaml" in message and "line 6: aliases stand for too much" in message
    path.write_text("a: &a {b: [1, 2]}\nc: *a\n")  # a few are fine
    assert files.parse_yaml(path.read_text()) == {"a": {"b": [1, 2]}, "c": {"b": [1, 2]}}


def test_depth_is_bounded() -> None:
    assert "nested" in tell(lambda: files.parse_json("[" * 100_000 + "]" * 100_000))
    assert "nested more than 100 deep" in tell(lambda: files.parse_yaml("[" * 1000 + "]" * 1000))
    assert files.parse_yaml("[" * 90 + "]" * 90) == files.parse_json("[" * 90 + "]" * 90)
    for text in ('!!int ""', "!!timestamp x", "? {a: 1}\n: 2"):
        with pytest.raises((ValueError, yaml.YAMLError)):
            files.parse_yaml(text)


def test_values_are_cut_before_they_are_written_out() -> None:
    nested: Any = ["x"]
    for _ in range(40):
        nested = [nested] * 9
    for value in (nested, "x" * (1 << 28), 1 << 100_000, {"a": nested}):
        before = time.process_time()
        assert len(files.shown(value)) <= 60 and time.process_time() - before < 1
    assert files.shown([1, "two", {"a": 3.5}]) == repr([1, "two", {"a": 3.5}])


# Flight files

RECORD = {
    "communicator": "world", "id": "1", "rank": 0, "size": 2, "host": "a", "pid": 1, "op": "all_reduce", "sequence": 0,
    "dtype": "float32", "count": 4, "state": "running", "issued": 1.0, "written": 2.0, "epoch": 0.0,
}  # fmt: skip


def render(path: Path) -> str:
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as shown:
        flight.render([path], console)
    return shown.get()


def test_a_flight_file_claims_no_more_than_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "axo-flight-1.jsonl"
    for fields, said in (
        ({"size": 10**12}, "rank 0 of 1000000000000 cannot be"),
        ({"size": 10**400}, "cannot be"),
        ({"root": {}}, "root={} cannot be"),
        ({"failure": ["x" * 10**6]}, "failure=["),
        ({"issued": 10**300}, "a time of it is not one"),
        ({"world_rank": True}, "world_rank=True cannot be"),
    ):
        path.write_text(json.dumps(RECORD | fields))
        assert f"flight file {path}, line 1: " in (message := tell(lambda: render(path))) and said in message
    path.write_text("[" * 100_000)
    assert f"flight file {path}, line 1: " in tell(lambda: render(path))
    path.write_text("\n".join(json.dumps(RECORD | {"rank": n, "sequence": n, "size": 10_000}) for n in range(5000)))
    assert "5000 collectives of 5000 ranks" in tell(lambda: render(path))


def test_ranks_without_records_cost_nothing(tmp_path: Path) -> None:
    path = tmp_path / "axo-flight-1.jsonl"
    path.write_text("\n".join(json.dumps(RECORD | {"size": 1 << 20, "sequence": n}) for n in range(2000)))
    before = time.monotonic()
    assert "63, 64, ..." in "".join(render(path).split("\n")) or "..." in render(path)
    assert time.monotonic() - before < 10
    path.write_text(json.dumps(RECORD | {"op": "send"}))  # without root and tag
    assert "send with any rank, tag None" in render(path)


# What Axo writes into


def victims(folder: Path) -> tuple[Path, list[Callable[[Path], None]]]:
    """A file with something in it, and ways to let another name stand for it, or for what is no file."""
    victim = folder / "precious"
    victim.write_text("precious")
    return victim, [lambda path: path.symlink_to(victim), lambda path: path.hardlink_to(victim), os.mkfifo]


def test_a_lock_is_no_link_to_a_file_elsewhere(tmp_path: Path) -> None:
    victim, ways = victims(tmp_path)
    for number, way in enumerate(ways):
        folder = tmp_path / str(number)
        folder.mkdir()
        way(folder / ".axo-lock")
        assert str(folder / ".axo-lock") in tell(lambda folder=folder: Run(folder))
        assert victim.read_text() == "precious"


def test_a_runs_log_is_no_link_to_a_file_elsewhere(tmp_path: Path) -> None:
    victim, ways = victims(tmp_path)
    for number, way in enumerate(ways):
        path = tmp_path / f"{number}.jsonl"
        way(path)
        for anew in (True, False):
            assert str(path) in tell(lambda path=path, anew=anew: log._open(path, anew=anew))
        assert victim.read_text() == "precious"
    with log._open(tmp_path / "own.jsonl", anew=True) as file:
        file.write("a")
    with log._open(tmp_path / "own.jsonl", anew=False) as file:
        file.write("b")
    assert (tmp_path / "own.jsonl").read_text() == "ab"


def test_messages_hold_no_signs_that_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    complain("model file m\x1b[31mred\x07\x9b.json · 1 × 2")
    assert capsys.readouterr().err == "model file m\\x1b[31mred\\x07\\x9b.json · 1 × 2\n"


def test_leftovers_that_are_links_are_left(tmp_path: Path) -> None:
    victim, ways = victims(tmp_path)
    for number, way in enumerate(ways):
        for name in ("step-00000001", "file"):
            way(tmp_path / f".{name}.{number:08x}.part")
            (tmp_path / f".{name}.{number:08x}.new").symlink_to(tmp_path)
    UnfinishedCheckpoint(tmp_path / "step-00000002", None).close()
    with whole_file(tmp_path / "file") as unfinished:
        unfinished.write_text("new")
    assert victim.read_text() == "precious" and (tmp_path / "file").read_text() == "new"


def write_flight_file(folder: str) -> str:
    import axo

    with axo.connect("1x1x1x2") as comms:
        victim = Path(folder, f"precious-{comms.rank}")
        victim.write_text("precious")
        for name in (f"axo-flight-{os.getpid()}.jsonl.part", f"axo-flight-{os.getpid()}.jsonl"):
            Path(folder, name).symlink_to(victim)
        comms.world.barrier()
        written = flight.write()
        assert victim.read_text() == "precious" and not Path(written).is_symlink()
        assert flight.read([Path(written)])
        return Path(written).name


def test_the_flight_recorder_follows_no_link(tmp_path: Path) -> None:
    names = run_ranks(write_flight_file, 2, str(tmp_path), env={"AXO_FLIGHT_DIR": str(tmp_path)})
    assert len(set(names)) == 2
