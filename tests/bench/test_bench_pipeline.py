"""axo bench pipeline: every contestant's gradients are right, and its rows say what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from axo.perf.pipeline_schedule import KINDS, simulate
from axo.pipeline.actions import RecordedAction
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


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_measured_of_a_step_is_what_happened(name: str, ranks: int) -> None:
    """Oracle: the simulator's own clock, with messages, a pause before each action and passes of unlike length."""
    pause, stages = 0.25, ranks * KINDS[name].stages_per_rank
    forward = [3.0 + stage / 2 for stage in range(stages)]
    known = simulate(name, ranks, 8, forward, 2.0, 4.0, 0.5)
    every: list[tuple[float, list[RecordedAction], list[float]]] = [(known.seconds, [], []) for _ in range(ranks)]
    for rank, action, start, end in known.ran:
        every[rank][1].append(RecordedAction(*action, start + pause, end))
        every[rank][2].append(end)
    found = pipeline.bubbles(name, every, 8)
    assert found.bubble == pytest.approx(known.bubble) and found.message == pytest.approx(0.5)
    assert found.model == pytest.approx(known.bubble)
