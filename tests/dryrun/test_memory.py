"""The planner's memory against what a step allocates, and the dry run against the same.

A few of the cases of ``bench/memory.py``, which says what is measured; all of them are a long proof. The measurement is
held to real ranks in ``test_dryrun.py``, saved tensors to autograd in ``tests/perf/test_memory.py``.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from axo import dryrun
from axo.grid import Grid
from axo.perf import machine, memory, readers
from axo.perf.run_options import RunOptions
from axo.train.config import TrainConfig
from bench import memory as bench

SAMPLE = (34, 55, 255, 321, 392, 458, 571, 632)  # eight models, all grids, precisions, recomputations and ways
SPLIT = (655, 771, 904)  # the same with sequence parallelism


@pytest.mark.slow
@pytest.mark.parametrize("number", SAMPLE + SPLIT)
def test_planned_memory_is_what_a_step_allocates(number: int) -> None:
    case = bench.cases()[number]
    case = case._replace(chunks=number % 2 == 0 and not case.split)  # a loss without logits, which is the default
    line = bench.measure(case, dry=True)
    planned, measured, dry = bench.planned(case), line["measured"], line["dry_run"]
    for kind in ("saved", "weights", "optimizer", "gradients", "peak"):
        assert planned[kind] == pytest.approx(measured[kind], rel=bench.GOAL), (case, kind)
        assert dry[kind] == pytest.approx(measured[kind], rel=0.02), (case, kind)


def test_the_cases_are_all_of_them() -> None:
    every = bench.cases()
    assert len(set(every)) == 12 * (6 + 3) * 3 * 3  # three grids with x above 1 have split tokens too
    assert all(every[number].split == (number in SPLIT) for number in SAMPLE + SPLIT)
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


REAL = [  # plans of docs/notes/planner.md, with at most two of their micro-batches: more need no more memory
    {"model": "Llama-2-7b-hf", "grid": "1x1x8x1", "batch_size": 32, "accumulate": 2, "gather_cache": "43"},
    {"model": "Llama-3-70B", "grid": "1x1x64x1", "batch_size": 512, "accumulate": 2, "recompute": True},
    {"model": "Llama-3-70B", "grid": "2x1x32x1", "batch_size": 64, "accumulate": 2, "recompute": True,
     "recompute_keeps": "products", "gather_cache": "28"},
    {"model": "Llama-2-7b-hf", "grid": "2x1x4x1", "batch_size": 32, "accumulate": 2, "sequence_parallel": True},
    {"model": "Llama-3-70B", "grid": "2x1x32x1", "batch_size": 64, "accumulate": 2, "recompute": True,
     "recompute_keeps": "products", "gather_cache": "60", "sequence_parallel": True},
    {"model": "Llama-3.1-405B", "grid": "2x1x64x8", "batch_size": 1024, "accumulate": 2, "recompute": True, "zero": 2,
     "seq_len": 8192, "sequence_parallel": True},
]  # fmt: skip


@pytest.mark.soak
@pytest.mark.parametrize("options", REAL)
def test_a_plan_of_a_large_model_is_what_a_dry_run_holds(options: dict[str, Any]) -> None:
    """Nearly 80 GiB a rank: within 2%, and what a plan asks for holds it."""
    options = {"gather_cache": "none", "recompute": False, "seq_len": 4096} | options
    config = TrainConfig(**options | {"grid": Grid.parse(options["grid"])})
    workload = readers.read(config.model, seq_length=config.seq_len)
    layers = 0 if config.gather_cache == "none" else int(config.gather_cache)
    tokens = config.batch_size * config.seq_len
    run = RunOptions(
        tokens,
        cached_gathers=layers / workload.linears,
        micro_batches=config.accumulate,
        recompute="none" if not config.recompute else "full" if config.recompute_keeps == "nothing" else "selective",
        zero=config.zero,
        sequence_parallel=config.sequence_parallel,
    )
    held, found = memory.estimate(workload, config.grid, run), dryrun.run(config)
    assert max(held.moments.values()) == pytest.approx(found.peak.total, rel=0.02)
    assert found.peak.total + memory.RESERVED <= held.total


@pytest.mark.soak
def test_planned_memory_of_every_case(tmp_path: Path) -> None:
    """Within 5%."""
    assert bench.main(["--json", str(tmp_path / "memory.jsonl")]) == 0
