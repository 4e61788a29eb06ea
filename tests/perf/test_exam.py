"""The planner's exam on published runs: its own arithmetic, and that it stays as good as docs/notes/planner.md says.

The oracle is bench/papers/published_runs.yaml: seconds that others measured and published.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from axo.perf import machine
from axo_bench import exam


@pytest.fixture(scope="module")
def every() -> list[exam.Run]:
    return exam.runs()


def test_the_rows_held_out_are_predicted_and_the_null_model_is_not_as_good(every: list[exam.Run]) -> None:
    lines = list(exam.lines(every))
    held = [line for line in lines if line["standing"] == "held out"]
    mean = statistics.fmean(abs(line["error"]) for line in held)
    assert len(lines) == 24 and len(held) == 15 and mean < exam.GOAL
    assert statistics.fmean(abs(line["null_error"]) for line in held) > 2 * mean
    for line in held:  # whoever is far off says why
        key = line["source"], line["model"], line["seq"]
        assert (abs(line["error"]) > exam.EXPLAIN) == (key in exam.WHY), line


def test_four_named_rows_are_fitted_and_no_constant_is_of_a_machine(every: list[exam.Run]) -> None:
    assert len(exam.FITTED) == len([run for run in every if run.standing == "fitted"]) == 4
    for run in every:
        on = machine.load(run.row["machine"])
        assert "gemm_fraction" in on.assumed and not on.calibrated_on and not on.attention_tflops


def test_the_constants_are_the_best_of_the_fitted_rows(every: list[exam.Run]) -> None:
    """Beside them both ways the squares of the four rows' errors are larger: the fit's own grid, near its least."""
    rows = [run for run in every if run.standing == "fitted"]
    gemm, intensity = machine.ASSUMED["gemm_fraction"], machine.ATTENTION_INTENSITY

    def squares(gemm: float, intensity: float) -> float:
        rates = [intensity * machine.load(run.row["machine"]).memory_gbs / 1e3 for run in rows]
        errors = [run.error(gemm_fraction=gemm, attention_tflops=rate) for run, rate in zip(rows, rates, strict=True)]
        return sum(error**2 for error in errors)

    least = squares(gemm, intensity)
    assert all(squares(gemm + x, intensity) > least for x in (-0.03, 0.03))
    assert all(squares(gemm, intensity + x) > least for x in (-3, 3))


def test_a_row_without_a_layout_is_listed_and_context_parallelism_stands_apart(every: list[exam.Run]) -> None:
    standings = [run.standing for run in every]
    assert standings.count("no layout") == 2 and standings.count("context parallel") == 3
    assert exam.main([]) == 0


def test_memory_chooses_nothing_here(every: list[exam.Run]) -> None:
    run = next(run for run in every if run.row["model"] == "mpt-13b" and run.row["seq_length"] == 2048)
    asked = run.request(replace(machine.load("dgx-a100-40"), memory_gib=1.0))
    assert asked.machine.memory_gib > 1e5
