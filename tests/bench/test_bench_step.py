"""axo bench step: its contestants train the same model, and its rows say what was measured."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from bench import step
from bench.lib import step_models
from tests.launcher import run_ranks

OPTIONS: dict[str, Any] = {
    "hidden": 32, "layers": 1, "heads": 4, "vocab": 64, "seq_len": 16, "tokens": 32, "precision": "32-true",
    "recompute": False, "repeats": 1, "device": "cpu", "peak_tflops": 0.1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        ("z", 2),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in (("serial", 1), ("x", 2), ("data", 2), ("pipeline", 2))
        ),
    ],
)
def test_contestants_agree_on_the_loss(case: str, ranks: int) -> None:
    """Oracle: torch's own schemes, which start from the same weights: the loss after ten AdamW steps, to 1e-3."""
    rows = run_ranks(step.measure, ranks, case, argparse.Namespace(**OPTIONS))[0]
    assert all(row["right"] for row in rows), rows
    names = [row["contestant"] for row in rows]
    assert names[0].startswith("Axo ") and len(set(names)) == len(names)
    if case != "serial":
        rival = step_models.RIVALS[case][0] if case in step_models.RIVALS else "stages"
        assert {f"{rival} gloo", f"{rival} axo"} <= set(names) and names[-1] == "no communication"
    for row in rows:
        assert len(row["all_ms"]) == 8 and row["mfu"] == row["hfu"] > 0
        assert row["tokens_s"] == pytest.approx(32 * (ranks if case in ("z", "data") else 1) / row["ms"] * 1e3)


@pytest.mark.soak
def test_recomputation_counts_as_hardware_flops_only() -> None:
    rows = run_ranks(step.measure, 1, "serial", argparse.Namespace(**OPTIONS | {"recompute": True}))[0]
    assert all(row["right"] and row["hfu"] > 1.2 * row["mfu"] for row in rows)
