"""The best plan without what the best plan has (stages, ZeRO, recomputation, ...), and why it is slower.

No way to run a grid is faster than the time that the plan has for it. So grids are asked in the order of the plan, and
the search ends at the first whose time is longer than the best of the kind so far.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from axo.perf.layer_time import Costs
from axo.perf.planner import Candidate, GridPlan, cause, consider
from axo.perf.run_options import RunOptions

MOST_ASKED = 100  # grids; where nothing of a kind fits on the fastest, it is not of use
EXPLAINED = ("without stages", "with stages", "axonn", "tesseract")  # kinds of which a sentence says more
Predicate = Callable[[int, RunOptions], bool]  # of stages, and how it is run
KINDS: dict[str, Predicate] = {
    "without stages": lambda stages, run: stages == 1,
    "with stages": lambda stages, run: stages > 1,
    "axonn": lambda stages, run: run.algorithm == "axonn",
    "tesseract": lambda stages, run: run.algorithm == "tesseract",
    "no recomputation": lambda stages, run: run.recompute == "none",
    "selective recomputation": lambda stages, run: run.recompute == "selective",
    "full recomputation": lambda stages, run: run.recompute == "full",
    "no ZeRO": lambda stages, run: not run.zero,
    "ZeRO-2": lambda stages, run: run.zero == 2,
    "optimizer on the GPU": lambda stages, run: not run.offload,
    "optimizer in the host's memory": lambda stages, run: run.offload,
    "no sequence parallelism": lambda stages, run: not run.sequence_parallel,
    "sequence parallelism": lambda stages, run: run.sequence_parallel,
}


class Alternative(NamedTuple):
    """The fastest plan of a kind; where none fits, of the grids that were asked the one that needs least."""

    kind: str
    candidate: Candidate
    why: str


def others(plan: GridPlan) -> list[Alternative]:
    """Return the best of each kind that was tried and that ``plan.best`` is not of."""
    costs, alternatives = plan.request.costs(), list[Alternative]()
    for kind, belongs in KINDS.items():
        one, stopped = None, False
        if not belongs(plan.best.pipeline, plan.best.run):
            one, stopped = _best(plan, belongs, costs)
        if one is None:
            continue
        where = f" on the {MOST_ASKED} fastest grids" if stopped else ""
        if one.time is None or plan.best.time is None:
            why = f"does not fit{where}: {one.reason}"
        else:
            why = f"most of it {cause(one.time, plan.best.time)}" + (f"; the best{where}" if stopped else "")
        alternatives.append(Alternative(kind, one, why))
    return alternatives


def _best(plan: GridPlan, belongs: Predicate, costs: Costs) -> tuple[Candidate | None, bool]:
    """The best of a kind, and whether grids were left unasked that might have been better."""
    best: Candidate | None = None
    short = list[tuple[float, Candidate]]()  # bytes that they need
    asked, stopped = 0, False
    for candidate in plan.ranked:
        if best is not None and candidate.seconds >= best.seconds:
            break
        if belongs(candidate.pipeline, candidate.run):
            return candidate, stopped
        tried = [run for run in plan.request.ways(candidate.grid) if belongs(candidate.pipeline, run)]
        if candidate.algorithm != "axonn" or not tried:
            continue
        if asked == MOST_ASKED:
            stopped = True
            continue
        asked += 1
        one = consider(plan.request, candidate.grid, candidate.pipeline, costs, tried)
        if not one.reason and (best is None or one.seconds < best.seconds):
            best = one
        if one.memory is not None:
            short.append((one.memory.total, one))
    return best or min(short, key=lambda each: each[0], default=(0.0, None))[1], stopped
