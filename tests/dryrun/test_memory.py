"""The planner's memory against what a step allocates, and the dry run against the same.

A few of the cases of ``bench/memory.py``, which says what is measured; all of them are a long proof. The measurement is
held to real ranks in ``test_dryrun.py``, saved tensors to autograd in ``tests/perf/test_memory.py``.
"""

from pathlib import Path

import pytest

from bench import memory as bench

SAMPLE = (34, 55, 255, 321, 392, 458, 571, 632)  # eight models, all grids, precisions, recomputations and ways


@pytest.mark.slow
@pytest.mark.parametrize("number", SAMPLE)
def test_planned_memory_is_what_a_step_allocates(number: int) -> None:
    case = bench.cases()[number]
    line = bench.measure(case, dry=True)
    planned, measured, dry = bench.planned(case), line["measured"], line["dry_run"]
    for kind in ("saved", "weights", "optimizer", "gradients", "peak"):
        assert planned[kind] == pytest.approx(measured[kind], rel=bench.GOAL), (case, kind)
        assert dry[kind] == pytest.approx(measured[kind], rel=0.02), (case, kind)


def test_the_cases_are_all_of_them() -> None:
    every = bench.cases()
    assert len(set(every)) == 12 * 6 * 3 * 3
    for place in range(5):
        assert len({every[number][place] for number in SAMPLE}) >= (8, 6, 3, 3, 4)[place]


@pytest.mark.soak
def test_planned_memory_of_every_case(tmp_path: Path) -> None:
    """All but one of 50 within 5%."""
    assert bench.main(["--json", str(tmp_path / "memory.jsonl")]) <= len(bench.cases()) / 50
