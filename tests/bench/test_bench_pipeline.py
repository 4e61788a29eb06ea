"""axo bench pipeline: every contestant's gradients are right, and its rows say what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import pipeline


def test_every_schedule_is_measured_beside_torchs(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    given = ["--ranks", "2", "--schedules", "gpipe,zero-bubble,zbv", "--microbatches", "4", "--ms", "2"]
    assert pipeline.main([*given, "--repeats", "1", "--json", str(file)]) == 0
    _, *rows = map(json.loads, file.read_text().splitlines())
    assert [(row["schedule"], row["contestant"]) for row in rows] == [
        (name, one) for name in ("gpipe", "zero-bubble", "zbv") for one in pipeline.CONTESTANTS
    ]
    assert all(row["#wrong"] == 0 and 0 < row["model"] < 1 for row in rows)
    assert rows[0]["ideal"] == pytest.approx(1 / 5)  # gpipe: (P - 1) / (M + P - 1)
    with pytest.raises(SystemExit):
        pipeline.main(["--schedules", "2f2b"])
