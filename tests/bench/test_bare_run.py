"""The parts of the run on a bare machine: what is made of the verdicts.

The run itself takes minutes and wants root: ``python -m bench.tools.bare_run``.
"""

import json
from pathlib import Path

from bench.tools import bare_run


def test_the_file_is_one_run(monkeypatch, tmp_path):
    """What the run before has left is gone, and "not measured" is a verdict, whatever reason follows."""

    def runs(step, command, tree, given, table):
        assert (tree / "setup.py").exists()
        if step == "walk":
            out = Path(command[-1])
            out.mkdir()
            (out / "verdicts.txt").write_text(
                "device: right: True\ndevice: light: not measured: one rank\nkernels: shapes: 0 of 4: not measured\n"
            )
        return 0

    monkeypatch.setattr(bare_run, "_timed", runs)
    file = tmp_path / "walk.jsonl"
    file.write_text('{"bench": "of yesterday"}\n')
    assert bare_run.main(["--json", str(file)]) == 0
    first, *lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert first["bench"] == "gpu_walk"
    assert [line["verdict"] for line in lines if "verdict" in line] == ["True", "not measured", "not measured"]
