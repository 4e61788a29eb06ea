"""The planner's memory against what a step allocates, and the dry run against the same.

A few of the cases of ``bench/memory.py``, which says what is measured; all of them are a long proof. The measurement is
held to real ranks in ``test_dryrun.py``, saved tensors to autograd in ``tests/perf/test_memory.py``.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from axo.perf import machine, memory
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


def test_a_plan_that_fits_does() -> None:
    """At the boundary, in all cases as they were measured: a GPU that has what the plan counts holds the step and the
    reserve, and of one with a byte less the plan says that it does not."""
    lines = bench.read(Path(bench.__file__).parent / "results" / "memory.jsonl")
    assert {bench.case_of(line) for line in lines} == set(bench.cases())
    for line in lines:
        case, measured = bench.case_of(line), line["measured"]["peak"]
        held = bench.estimate(case)[2]
        assert measured + memory.RESERVED <= held.total, case
        assert max(held.moments.values()) <= measured * (1 + bench.GOAL), case
        for less, fits in ((0, True), (1, False)):
            on = replace(machine.load("h100"), memory_gib=(held.total - less) / memory.GIB)
            assert held.fits(on) == fits, case


@pytest.mark.soak
def test_planned_memory_of_every_case(tmp_path: Path) -> None:
    """Within 5%."""
    assert bench.main(["--json", str(tmp_path / "memory.jsonl")]) == 0
