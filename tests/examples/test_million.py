"""``examples/million`` at a toy size: the command, its losses and its picture. Oracle of its memory: ``-m soak``."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from examples.million.__main__ import main


@pytest.mark.slow
def test_the_command_runs_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--tokens", "512", "--window", "64", "--steps", "1", "--out", str(tmp_path)])
    row = json.loads((tmp_path / "million.json").read_text())
    (loss,) = row["losses"]
    assert abs(loss - math.log(256)) < 0.5 and row["predicted_MiB"] > 0, row
    assert code == (abs(row["held_MiB"] / row["predicted_MiB"] - 1) > 0.05)
    assert (tmp_path / "memory.png").stat().st_size > 10_000
    assert "512 tokens on 8 ranks: a dry run" in capsys.readouterr().out


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("options", ["--tokens 131072", "--tokens 1048576 --window 4096"])
def test_a_dry_run_predicts_the_memory(options: str, tmp_path: Path) -> None:
    assert main([*options.split(), "--out", str(tmp_path)]) == 0
