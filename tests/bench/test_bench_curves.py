"""axo bench curves: one configuration file for stock LitGPT and grids."""

import json
import math
import subprocess
import sys

import pytest

from bench.curves import Curve, main


@pytest.mark.soak
def test_a_file_for_all(tmp_path):
    """Losses of stock LitGPT to 1e-4, with fewer micro-batches on each data rank; a picture of them."""
    options = ["--steps=4", "--grids=1x2x1x1,1x1x1x2", f"--json={tmp_path / 'c.jsonl'}", f"--plot={tmp_path / 'c.png'}"]
    done = subprocess.run([sys.executable, "-m", "bench.curves", *options], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "c.jsonl").read_text().splitlines()][1:]
    assert [row["run"] for row in rows] == ["litgpt", "1x2x1x1", "1x1x1x2"]
    assert all(len(row["losses"]) == 4 and row["#wrong"] == 0 for row in rows)
    assert (tmp_path / "c.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_curve_beside_stock_is_seen(monkeypatch):
    """A grid whose losses are off by 2e-4, or that logged fewer of them, counts as wrong."""
    curves = {"litgpt": [3.0, 2.0], "1x1x1x2": [3.0, 2.0002], "2x1x1x1": [3.0, 2.00005]}
    monkeypatch.setattr("bench.curves.train", lambda run, file: Curve(curves[run], []))
    monkeypatch.setattr("bench.curves.write_run", lambda folder, steps, validates: folder)
    assert main(["--steps=2", "--grids=1x1x1x2,2x1x1x1"]) == 1
    assert main(["--steps=2", "--grids=2x1x1x1"]) == 0


def test_the_noise_of_another_order_of_sums_is_the_limit(monkeypatch):
    """Twice as far from stock as the second stock run is right; farther, in losses or in validation, is wrong."""
    apart = {
        "litgpt": (0.0, 0.0),
        "litgpt, one row at a time": (2e-3, 1e-3),
        "1x1x1x2": (3e-3, 0.0),
        "2x1x1x1": (0, 5e-3),
    }
    runs = {run: Curve([3.0 - by for _ in range(100)], [2.0 + other]) for run, (by, other) in apart.items()}
    monkeypatch.setattr("bench.curves.train", lambda run, file: runs[run])
    monkeypatch.setattr("bench.curves.write_run", lambda folder, steps, validates: folder)
    assert main(["--steps=100", "--noise", "--grids=1x1x1x2"]) == 0
    assert main(["--steps=100", "--noise", "--grids=1x1x1x2,2x1x1x1"]) == 1
    runs["1x1x1x2"] = Curve([3.0] * 50 + [math.nan] * 50, [2.0])
    assert main(["--steps=100", "--noise", "--grids=1x1x1x2"]) == 1
    runs["1x1x1x2"], runs["litgpt, one row at a time"] = runs["litgpt"], Curve([4.0] * 100, [3.0])
    assert main(["--steps=100", "--noise", "--grids=1x1x1x2"]) == 1  # no rounding is so large
