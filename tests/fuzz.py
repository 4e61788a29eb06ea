"""Damaged files by the thousand: each kind of file that Axo reads, changed at random, ends in ValueError or is read.

    python -m tests.fuzz --seed 0 --cases 10000      # or --minutes 30; says which case failed, with its seed

A case is a kind and a seed: the same case is the same file. A reader may take what it is given, or raise ValueError
that names the file, within 10 seconds, and the process may not grow beyond 1 GiB. ``tests/test_fuzz.py`` runs some of
them in the suite, and 10,000 in ``soak``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from axo.checkpoint import consolidate, load
from axo.checkpoint.folder import MARKER, METADATA
from axo.comm import flight
from axo.integrations.litgpt import run_folder
from axo.perf import machine, readers
from axo.train import models, slow
from axo.train.log import _lines_before
from axo_kernels.tune.cache import Cache
from axo_kernels.tune.choice import from_json
from tests.checkpoint import hostile

SECONDS, GROWTH = 10, 1 << 30
_NUMBER = re.compile(rb"-?\d+(\.\d+)?([eE][+-]?\d+)?")
_WORDS = [b"1e400", b"-1", b"0", b"null", b"true", b"[]", b"{}", b'"x"', b"1" * 400, b"9" * 5000, b"1e-400", b".nan"]
_WORDS += [b"&a", b"*a", b"!!int ''", b"!!python/object/apply:os.mkdir [x]", b"[" * 500, b"\xff\xfe", b"1" + b"0" * 19]
_BYTES = [b"\x00", b"\xff", b"\xff\xff\xff\x7f", b"\x00" * 8, b"\xff" * 8, b"\x80\x04", b"r\xff\xff\xff\x7f", b"\x94"]
_BYTES += [b"R", b"b"]


def mutate(data: bytes, draw: random.Random, text: bool) -> bytes:
    """``data`` with one to four changes."""
    for _ in range(draw.randint(1, 4)):
        at, size = draw.randrange(len(data) + 1), draw.choice([1, 1, 2, 4, 8, 64, 1000])
        numbers = list(_NUMBER.finditer(data)) if text else []
        match draw.randrange(7):
            case 0:
                data = data[:at] + data[at + size :]
            case 1:
                data = data[:at] + bytes(draw.randrange(256) for _ in range(size)) + data[at + size :]
            case 2:
                data = data[:at] + data[at : at + size] * draw.choice([2, 3, 50]) + data[at + size :]
            case 3:
                data = data[:at] + draw.choice(_WORDS if text else _BYTES) + data[at:]
            case 4 if numbers:
                number = draw.choice(numbers)
                data = data[: number.start()] + draw.choice(_WORDS) + data[number.end() :]
            case 5 if at < len(data):
                data = data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :]
            case 6:
                data = data[:at] if draw.random() < 0.2 else data
    return data


def _change_metadata(metadata: Any, draw: random.Random) -> None:
    """Another value somewhere in the metadata's objects."""
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for key, inner in value.items() if isinstance(value, dict) else list(enumerate(value)):
            places.append((value, key))
            if isinstance(inner, dict | list):
                walk(inner)
            elif type(inner).__module__.startswith("torch.distributed") and not isinstance(inner, tuple):
                walk(vars(inner))

    walk(vars(metadata))
    values = [
        -1,
        0,
        1,
        5,
        1 << 40,
        1 << 70,
        None,
        "",
        "../x",
        "axo",
        "model/weight",
        [],
        {},
        (),
        (0, 0, "x"),
        1.5,
        True,
    ]
    values += [torch.Size([]), torch.Size([5, 3]), torch.Size([1 << 40]), torch.Size([-1]), torch.float64]
    for _ in range(draw.randint(1, 3)):
        place, key = draw.choice(places)
        if draw.random() < 0.1 and isinstance(place, dict):
            place.pop(key, None)
        elif draw.random() < 0.3:
            other, name = draw.choice(places)
            with contextlib.suppress(LookupError):
                place[key] = other[name]
        else:
            place[key] = draw.choice(values)


class Kinds:
    """The kinds of files; each is made once in ``folder`` and changed in each case.

    Attributes:
        readers: Kind -> a function of the random numbers of a case that writes a damaged file, and returns its name and
            what reads it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.whole = hostile.write(folder / "whole")
        one = hostile.model()
        self.pth = hostile.pth(folder / "model.pth", one.state_dict()).read_bytes()
        self.safetensors = consolidate(self.whole, folder / "model.safetensors").read_bytes()
        self.machine = (Path(machine.__file__).parent / "data" / "machines" / "perlmutter.yaml").read_bytes()
        self.model = json.dumps(
            {
                "hidden_size": 64,
                "num_attention_heads": 4,
                "num_hidden_layers": 2,
                "vocab_size": 100,
                "model_type": "llama",
            }
        ).encode()
        self.config = (Path(__file__).parent / "checkpoint/data/litgpt/whole/model_config.yaml").read_bytes()
        record = {
            "communicator": "world", "id": "1", "rank": 0, "size": 2, "world_rank": 0, "host": "a", "pid": 1,
            "op": "all_reduce", "sequence": 0, "dtype": "float32", "count": 4, "reduce": "sum", "root": None, "tag": 0,
            "state": "running", "issued": 1.0, "started": 1.5, "ended": None, "written": 2.0, "epoch": 0.0,
            "failure": None,
        }  # fmt: skip
        self.flight = "\n".join(json.dumps(record | {"rank": n % 2, "sequence": n // 2}) for n in range(6)).encode()
        self.cache = Cache("cpu", {"torch": "1"}, folder)
        config = {"block_m": 1, "block_n": 1, "block_k": 1}
        self.cache.put({"a": {"backend": "triton", "layout": "NN", "strategy": "plain", "config": config, "chunks": 1}})
        self.entries = self.cache.path.read_bytes()
        self.log = b'{"kind": "header", "hosts": ["a", "b"], "grid": "2x1x1x1"}\n{"kind": "step", "step": 1}\n'
        self.log += b'{"kind": "step", "step": 5, "seconds": 2.5, "worked": [1.5, 2.5], "spread": {"x": 0.5}}\n'
        self.log += b'{"kind": "slow", "step": 5, "rank": 1, "host": "b", "times": 1.5, "steps": 20}\n'
        self.run = b'{"run": "ab", "left behind": {"step-1": 5}}'
        self.hyper = b"seed: 42\ndata:\n  class_path: a.B\n  init_args: {x: 1}\ntrain:\n  max_seq_length: 5\n"
        self.kinds: dict[str, Callable[[random.Random], tuple[Path, Callable[[], Any]]]] = {
            "metadata": self._metadata,
            "metadata objects": self._objects,
            "checkpoint file": self._entry,
            "marker": self._marker,
            "pth": lambda draw: self._plain(draw, "m.pth", self.pth),
            "safetensors": lambda draw: self._plain(draw, "m.safetensors", self.safetensors),
            "machine": lambda draw: self._text(draw, "machine.yaml", self.machine, self._read_machine),
            "model": lambda draw: self._text(draw, "config.json", self.model, lambda path: readers.read(str(path))),
            "litgpt model": lambda draw: self._text(draw, "m.yaml", self.config, lambda path: readers.read(str(path))),
            "training model": lambda draw: self._text(draw, "t.yaml", self.config, models._from_file),
            "flight": lambda draw: self._text(draw, "axo-flight-1.jsonl", self.flight, self._render),
            "tuner cache": lambda draw: self._text(draw, self.cache.path.name, self.entries, self._read_cache),
            "log": lambda draw: self._text(draw, "log.jsonl", self.log, self._read_log),
            "run": lambda draw: self._text(draw, "axo-run.json", self.run, lambda path: run_folder._left(path.parent)),
            "hyperparameters": lambda draw: self._hyperparameters(draw),
        }

    def _copy(self) -> Path:
        path = self.folder / "damaged"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(self.whole, path)
        return path

    def _read(self, path: Path, draw: random.Random, verify: bool = True) -> tuple[Path, Callable[[], Any]]:
        one = hostile.model()
        optimizer = torch.optim.Adam(one.parameters()) if draw.random() < 0.5 else None
        if draw.random() < 0.3:
            return path, lambda: consolidate(path, self.folder / "out.pth", optimizer=optimizer is not None)
        return path, lambda: load(path, one, optimizer, strict=draw.random() < 0.7, verify=verify)

    def _metadata(self, draw: random.Random) -> tuple[Path, Callable[[], Any]]:
        path = self._copy()
        (path / METADATA).write_bytes(mutate((path / METADATA).read_bytes(), draw, False))
        hostile.seal(path)
        return self._read(path, draw)

    def _objects(self, draw: random.Random) -> tuple[Path, Callable[[], Any]]:
        while True:
            path = self._copy()
            try:
                hostile.rewrite(path, lambda metadata: _change_metadata(metadata, draw))
            except Exception:  # what torch's classes do not write
                continue
            return self._read(path, draw)

    def _entry(self, draw: random.Random) -> tuple[Path, Callable[[], Any]]:
        path = self._copy()
        (path / "__0_0.distcp").write_bytes(mutate((path / "__0_0.distcp").read_bytes(), draw, False))
        return self._read(path, draw, verify=False)

    def _marker(self, draw: random.Random) -> tuple[Path, Callable[[], Any]]:
        path = self._copy()
        (path / MARKER).write_bytes(mutate((path / MARKER).read_bytes(), draw, True))
        return self._read(path, draw)

    def _plain(self, draw: random.Random, name: str, data: bytes) -> tuple[Path, Callable[[], Any]]:
        path = self.folder / name
        path.unlink(missing_ok=True)  # not in place: the case before may have mapped it
        path.write_bytes(mutate(data, draw, False))
        return path, lambda: load(path, hostile.model())

    def _text(
        self, draw: random.Random, name: str, data: bytes, read: Callable[[Path], Any]
    ) -> tuple[Path, Callable[[], Any]]:
        path = self.folder / name
        path.write_bytes(mutate(data, draw, True))
        return path, lambda: read(path)

    def _read_machine(self, path: Path) -> None:
        machine._read.cache_clear()
        machine.load(str(path))

    def _read_log(self, path: Path) -> None:
        _lines_before(path, 3)
        slow.live(path)

    def _render(self, path: Path) -> None:
        from rich.console import Console

        flight.render([path], Console(file=io.StringIO()))

    def _read_cache(self, path: Path) -> None:
        for entry in Cache("cpu", {"torch": "1"}, path.parent).all().values():
            from_json(entry)

    def _hyperparameters(self, draw: random.Random) -> tuple[Path, Callable[[], Any]]:
        (self.folder / "hyperparameters.yaml").write_bytes(mutate(self.hyper, draw, True))
        source = self.folder / "lit_model.pth"
        return self.folder, lambda: run_folder._refuse_new_data(source, self.hyper.decode)


def _late(number: int, frame: Any) -> None:
    raise TimeoutError(f"it took more than {SECONDS} s")


def cases(folder: Path, seed: int, count: int, minutes: float = 0) -> Iterator[tuple[str, str]]:
    """Run ``count`` cases, or for some minutes; yield the kind of each, and what its reader did that it may not."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    kinds = Kinds(folder)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    end = time.monotonic() + 60 * minutes if minutes else float("inf")
    before = signal.signal(signal.SIGALRM, _late)
    try:
        for number in range(seed, seed + count):
            if time.monotonic() > end:
                return
            kind = list(kinds.kinds)[number % len(kinds.kinds)]
            path, read = kinds.kinds[kind](random.Random(number))
            signal.alarm(SECONDS)
            try:
                read()
            except ValueError as error:
                problem = "" if path.name in str(error) or str(path) in str(error) else f"names no file: {error}"
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                problem = ""
            finally:
                signal.alarm(0)
            size = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown) << 10
            problem = problem or (f"the process grew by {size >> 20} MiB" if size > GROWTH else "")
            yield kind, problem and f"case {number} ({kind}): {problem[:300]}"
    finally:
        signal.signal(signal.SIGALRM, before)


def run(folder: str, seed: int, count: int, minutes: float = 0) -> dict[str, int]:
    """How many cases of each kind were run.

    Raises:
        AssertionError: Readers did what they may not; names the first of the cases.
    """
    done: dict[str, int] = {}
    problems: list[str] = []
    for kind, problem in cases(Path(folder), seed, count, minutes):
        done[kind] = done.get(kind, 0) + 1
        problems += [problem] if problem else []
    assert not problems, f"{len(problems)} of {sum(done.values())} cases:\n" + "\n".join(problems[:40])
    return done


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=0.0)
    given = parser.parse_args()
    os.umask(0o077)
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(run(scratch, given.seed, given.cases if not given.minutes else 1 << 62, given.minutes)))
