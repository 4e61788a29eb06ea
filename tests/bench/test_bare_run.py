"""The parts of the run on a bare machine: how long each unit of the build takes, and what is made of the verdicts.

Oracle: what a compiler of the test does, which works for a known while or fails. The run itself takes minutes and wants
root: ``python -m bench.tools.bare_run``.
"""

import json
import shlex
import subprocess
from functools import partial
from pathlib import Path

import pytest

from bench.lib.table import Table
from bench.tools import bare_run

WORKS = """#!/bin/sh
echo "$@" >> said
i=0
while [ "$2" = long.cpp ] && [ $i -lt 300000 ]; do i=$((i + 1)); done
[ "$2" != bad.cpp ]
"""


def test_units_of_the_build_are_timed(tmp_path):
    """Each by itself, with its name; a compiler that fails still fails."""
    worker = tmp_path / "works"
    worker.write_text(WORKS)
    worker.chmod(0o755)
    compiler = bare_run.timed_compiler(tmp_path / "units", shlex.quote(str(worker)))
    commands = ["-c short.cpp -o short.o", "-c long.cpp -o long.o", "-shared short.o long.o -o all.so"]
    for command in commands:
        subprocess.run([compiler, *command.split()], cwd=tmp_path, check=True)
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.run([compiler, "-c", "bad.cpp"], cwd=tmp_path, check=True)
    assert (tmp_path / "said").read_text().splitlines() == [*commands, "-c bad.cpp"]
    found = bare_run.units(tmp_path / "units")
    assert next(iter(found)) == "long.cpp" and found.keys() == {"long.cpp", "short.cpp", "bad.cpp", "link"}
    assert found["long.cpp"] > 0


def test_what_the_build_cannot_be_quicker_than(tmp_path):
    table = Table({}, tmp_path / "lines.jsonl")
    bare_run.tell_units({"c.cpp": 30.0, "a.cpp": 9.0, "link": 2.0, "b.cpp": 1.0}, table)
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert lines[-1]["note"] == "3 units: longest 30.0 s, together 40.0 s, then the link 2.0 s"
    assert [line["unit"] for line in lines if "unit" in line] == ["c.cpp", "a.cpp", "b.cpp"]


def test_the_file_is_one_run(monkeypatch, tmp_path):
    """What the run before has left is gone, and "not measured" is a verdict, whatever reason follows."""

    def runs(step, command, tree, given, table):
        assert (tree / "setup.py").exists()
        if step == "build":
            for arguments in (["-c", "one.cpp"], ["one.o", "-o", "one.so"]):
                subprocess.run([given["CXX"], *arguments], check=True)
        if step == "walk":
            out = Path(command[-1])
            out.mkdir()
            (out / "verdicts.txt").write_text(
                "device: right: True\ndevice: light: not measured: one rank\nkernels: shapes: 0 of 4: not measured\n"
            )
        return 0

    monkeypatch.setattr(bare_run, "_timed", runs)
    monkeypatch.setattr(bare_run, "timed_compiler", partial(bare_run.timed_compiler, compiler="true"))
    file = tmp_path / "walk.jsonl"
    file.write_text('{"bench": "of yesterday"}\n')
    assert bare_run.main(["--json", str(file)]) == 0
    first, *lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert first["bench"] == "gpu_walk"
    assert [line["verdict"] for line in lines if "verdict" in line] == ["True", "not measured", "not measured"]
    assert [line["units"] for line in lines if "units" in line] == [1]
