"""axo bench parity: a run that goes on from its checkpoints, beside the serial one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.soak
def test_a_run_beside_the_serial_one(tmp_path: Path) -> None:
    """Given again for more steps, the command goes on; the curves lie on each other."""
    for steps in (3, 5):
        options = ["--grid=2x1x1x1", f"--steps={steps}", "--precision=32-true", f"--out={tmp_path / 'run'}"]
        options += [f"--json={tmp_path / 'parity.jsonl'}", f"--plot={tmp_path / 'parity.png'}"]
        command = [sys.executable, "-m", "bench.parity", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "parity.jsonl").read_text().splitlines()]
    assert [line["steps"] for line in lines if "steps" in line] == [3, 5]
    row = lines[-1]
    assert len(row["losses"]) == len(row["serial_losses"]) == 5
    assert row["difference"] <= row["limit"] == 1e-4 and row["#wrong"] == 0
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [line["start"] for line in log if line["kind"] == "header"] == [0, 3]
    assert (tmp_path / "parity.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
