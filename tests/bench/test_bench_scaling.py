"""axo bench scaling: rows and efficiency, on ranks of its own and on those of torchrun."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import scaling
from tests.bench.test_bench_step import OPTIONS
from tests.launcher import Command, fork_the_ranks_of_torchrun

TINY = [f"--{name.replace('_', '-')}={OPTIONS[name]}" for name in ("hidden", "layers", "heads", "vocab", "precision")]
TINY += ["--seq-len=16", "--device=cpu"]


def rows_of(command: list[str], arguments: list[str], folder: Path) -> list[dict]:
    json_lines = folder / "scaling.jsonl"
    options = [*TINY, *arguments, f"--json={json_lines}"]
    run = Command(*command, *options, prepare=fork_the_ranks_of_torchrun)
    output = run.communicate()
    assert run.returncode == 0, output
    header, *rows = [json.loads(line) for line in json_lines.read_text().splitlines()]
    assert header["bench"] == "scaling" and header["cores"] > 0
    return rows


@pytest.mark.soak
def test_strong_scaling_shares_the_tokens_out(tmp_path: Path) -> None:
    """Oracle: the loss on one rank, where x splits the same rows; efficiency is arithmetic on the row."""
    arguments = ["--mode=strong", "--grids=1x1x1x1,2x1x1x1,1x1x2x1", "--tokens=64"]
    rows = rows_of(["bench.scaling"], arguments, tmp_path)
    assert [(row["grid"], row["tokens"]) for row in rows] == [("1x1x1x1", 64), ("2x1x1x1", 64), ("1x1x2x1", 64)]
    assert rows[1]["loss"] == pytest.approx(rows[0]["loss"], rel=1e-4)
    for row in rows:
        each = row["tokens_s"] / row["ranks"]
        assert row["efficiency"] == pytest.approx(each / rows[0]["tokens_s"])
        assert row["tokens_s"] == pytest.approx(row["tokens"] / row["ms"] * 1e3)


@pytest.mark.slow
def test_weak_scaling_under_torchrun(tmp_path: Path) -> None:
    torchrun = ["torch.distributed.run", "--nproc-per-node=2", "-m", "bench.scaling"]
    rows = rows_of(torchrun, ["--grids=2x1x1x1,1x1x2x1", "--tokens=32"], tmp_path)
    assert [(row["grid"], row["tokens"]) for row in rows] == [("2x1x1x1", 32), ("1x1x2x1", 64)]
    assert rows[0]["efficiency"] == 1


def test_tokens_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="--tokens 48 is not a multiple of --seq-len 16 times 2 data ranks"):
        scaling.main([*TINY, "--mode=strong", "--grids=1x1x2x1", "--tokens=48"])
