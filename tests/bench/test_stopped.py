"""Ctrl-C of a bench that takes minutes: it ends, and the rows so far are in the file and on the screen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.lib.table import read_rows
from tests.launcher import Command

WHOLE = {  # benches that write a row when it is whole, with what makes a row small
    "memory": "--dry 0",
    "overlap": "--shapes 64x64x64 --dtype float32 --chunks 2 --shares " + ",".join(f"0.{n}" for n in range(1, 1000)),
    "pipeline": "--ranks 2 --ms 2 --microbatches 4 --repeats 40 --contestants axo",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_rows_that_are_there_stay(name: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    command = Command("axo.cli", "bench", name, *WHOLE[name].split(), "--json", str(file))
    while len(rows := read_rows(file)[1:]) < 2:
        assert command.poll() is None, command.communicate()
        time.sleep(0.05)
    os.killpg(command.pid, signal.SIGINT)  # what a terminal does
    said = command.communicate()
    assert command.returncode == 130 and "Traceback" not in said, said
    assert said.splitlines()[-1] == "axo bench: interrupted; all ranks have ended"
    assert read_rows(file)[1 : 1 + len(rows)] == rows


@pytest.mark.slow
def test_the_steps_so_far_become_rows(tmp_path: Path) -> None:
    """Oracle: what it told of its progress: three rounds that count, at least."""
    file = tmp_path / "rows.jsonl"
    sizes = "--hidden 32 --layers 1 --heads 4 --vocab 64 --seq-len 16 --tokens 32 --repeats 100000 --cases serial"
    command = [sys.executable, "-m", "axo.cli", "bench", "step", *sizes.split(), "--json", str(file)]
    path = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True, env=path) as process:
        assert process.stderr is not None
        told = next(line for line in process.stderr if "serial: step " in line and int(line.split()[2]) > 5)
        os.killpg(process.pid, signal.SIGINT)  # what a terminal does
        rest = process.stderr.read()
    assert process.returncode == 130 and "axo bench: interrupted; all ranks have ended" in rest, (told, rest)
    assert "Traceback" not in rest
    rows = [row for row in read_rows(file) if "contestant" in row]
    assert [row["contestant"] for row in rows] == ["Axo 1x1x1x1", "nn.Linear"]
    assert all(row["right"] and len(row["all_ms"]) >= 3 for row in rows)
