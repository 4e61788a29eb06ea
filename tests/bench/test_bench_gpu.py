"""The command for a machine with a GPU, end to end on stand-ins and the CPU: ``python -m bench.gpu --walk``.

Oracles are in the scripts: sums written out, on collectives that the stand-in really reduces and moves; fp64 products.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import gpu

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_walks_through_without_a_gpu(tmp_path):
    """The same code as on a GPU, at toy sizes: every check right, every verdict a line."""
    command = [sys.executable, "-m", "bench.gpu", "--walk", "--seconds", "900", "--out", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "0 of 2 parts failed" in done.stdout
    header, *rows = [json.loads(line) for line in (tmp_path / "device.jsonl").read_text().splitlines()]
    assert {"bench", "device", "torch", "commit", "date"} <= header.keys() and header["kind"] == "standin"
    for ranks in (1, 2, 4):
        checks = {row["check"]: row["wrong"] for row in rows if row.get("ranks") == ranks}
        assert {"all_reduce sum", "reduce_scatter max", "scatter", "scaled all_reduce"} <= checks.keys()
        assert ("uneven all_to_all" in checks) == (ranks > 1)
        assert any(name.startswith("graph of 3 communicators") for name in checks)
        assert not any(checks.values()), checks
    assert "overhead over torch's NCCL backend under 3 us a call: not measured" in done.stdout
    lines = [json.loads(line) for line in (tmp_path / "kernels.jsonl").read_text().splitlines()]
    verdicts = [line["note"] for line in lines if "verdict" in line]
    assert "all results right: True" in verdicts and "tuned, of torch (goal: at least 1): not measured" in verdicts
    assert sum(verdict.endswith("not measured") for verdict in verdicts) == 1 + 8 + 3 * 3 * 2 * 2, (
        "the number of GPT shapes; error, Triton and tuned; shares x operations x shapes, hidden and against serial"
    )
    checks = [line for line in lines if "check" in line]
    assert len(checks) == 3 * 3 * (3 * 2 + 3) + 3 * 2 * 4 + 1, (
        "dtypes x layouts x (sizes, epilogues), strategies, rounds"
    )


def test_fits_into_eight_minutes_and_survives_a_part_that_fails(monkeypatch, capsys):
    """A part that runs past its share, and one that dies: reported, and the other still runs in its own time."""
    given = {}

    def run(command, timeout):
        given[command[2]] = (command[3:], timeout)
        if command[2] == "bench.device":
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, 3)

    with pytest.raises(SystemExit):
        gpu.main(["--out", "o"])
    assert "no GPU is visible, so nothing is measured; --walk" in capsys.readouterr().err
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(subprocess, "run", run)
    assert gpu.main(["--out", "o"]) == 2
    said = capsys.readouterr().out
    assert "device: stopped after 112 s" in said and "kernels: 3 verdicts failed" in said
    (_, first), (arguments, second) = given["bench.device"], given["bench.kernels"]
    assert first + second < 8 * 60 + first and second <= gpu.SECONDS < 8 * 60
    assert float(arguments[arguments.index("--seconds") + 1]) < second
    with pytest.raises(SystemExit):
        gpu.main(["--seconds", "10"])
