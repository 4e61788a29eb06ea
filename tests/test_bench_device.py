"""The device script, end to end on stand-ins: ``python -m bench.device --standin``.

Oracle: the sums written out in the script, on collectives that the stand-in really reduces and moves.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_runs_end_to_end_on_the_stand_in(tmp_path):
    command = [sys.executable, "-m", "bench.device", "--standin", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    header, *rows = [json.loads(line) for line in (tmp_path / "device.jsonl").read_text().splitlines()]
    assert {"bench", "device", "torch", "commit", "date"} <= header.keys() and header["kind"] == "standin"
    for ranks in (1, 2, 4):
        checks = {row["check"]: row["wrong"] for row in rows if row.get("ranks") == ranks}
        assert {"all_reduce sum", "reduce_scatter max", "scatter", "scaled all_reduce"} <= checks.keys()
        assert ("uneven all_to_all" in checks) == (ranks > 1)
        assert any(name.startswith("graph of 3 communicators") for name in checks)
        assert not any(checks.values()), checks
    assert "overhead over torch's NCCL backend under 3 us a call: not measured" in done.stdout
