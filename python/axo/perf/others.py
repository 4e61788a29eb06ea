"""The best plan without what the best plan has (stages, ZeRO, recomputation, ...), and why it is slower.

No way to run a grid is faster than the time that the plan has for it. So grids are asked in the order of the plan, and
the search ends at the first whose time is longer than what was found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from axo.perf.layer_time import Costs
from axo.perf.planner import Candidate, GridPlan, cause, consider
from axo.perf.request import MemoryOptions

MOST_ASKED = 100  # grids; where nothing of a kind fits on the fastest, it is not of use
EXPLAINED = ("without stages", "with stages", "axonn", "tesseract")  # kinds of which a sentence says more
Predicate = Callable[[int, str, MemoryOptions], bool]  # of stages, algorithm and way
KINDS: dict[str, Predicate] = {
    "without stages": lambda stages, algorithm, way: stages == 1,
    "with stages": lambda stages, algorithm, way: stages > 1,
    "axonn": lambda stages, algorithm, way: algorithm == "axonn",
    "tesseract": lambda stages, algorithm, way: algorithm == "tesseract",
    "no recomputation": lambda stages, algorithm, way: way.recompute == "none",
    "selective recomputation": lambda stages, algorithm, way: way.recompute == "selective",
    "full recomputation": lambda stages, algorithm, way: way.recompute == "full",
    "no ZeRO": lambda stages, algorithm, way: not way.zero,
    "ZeRO-2": lambda stages, algorithm, way: way.zero == 2,
    "optimizer on the GPU": lambda stages, algorithm, way: not way.offload,
    "optimizer in the host's memory": lambda stages, algorithm, way: way.offload,
    "no sequence parallelism": lambda stages, algorithm, way: not way.sequence_parallel,
    "sequence parallelism": lambda stages, algorithm, way: way.sequence_parallel,
}


class Alternative(NamedTuple):
    """The fastest plan of a kind; where none fits, of the grids that were asked the one that needs least."""

    kind: str
    candidate: Candidate
    why: str


def others(made: GridPlan) -> list[Alternative]:
    """Return the best of each kind that was tried and that ``made.best`` is not of."""
    costs, found = Costs(made.request.machine, made.request.workload.seq_length), list[Alternative]()
    for kind, belongs in KINDS.items():
        if _is(belongs, made.best):
            continue
        one, stopped = _best(made, belongs, costs)
        if one is not None:
            where = f" on the {MOST_ASKED} fastest grids" if stopped else ""
            if one.time is None or made.best.time is None:
                why = f"does not fit{where}: {one.reason}"
            else:
                why = f"most of it {cause(one.time, made.best.time)}" + (f"; the best{where}" if stopped else "")
            found.append(Alternative(kind, one, why))
    return found


def _is(belongs: Predicate, one: Candidate) -> bool:
    return belongs(one.pipeline, one.algorithm, one.way)


def _best(made: GridPlan, belongs: Predicate, costs: Costs) -> tuple[Candidate | None, bool]:
    """The best of a kind, and whether grids were left unasked that might have been better."""
    best: Candidate | None = None
    nearest: Candidate | None = None
    asked, stopped = 0, False
    for candidate in made.ranked:
        if best is not None and candidate.seconds >= best.seconds:
            break
        if _is(belongs, candidate):
            best = candidate
            break
        tried = [way for way in made.request.ways(candidate.grid)
                 if belongs(candidate.pipeline, candidate.algorithm, way)]  # fmt: skip
        if candidate.algorithm != "axonn" or not tried:
            continue
        if asked == MOST_ASKED:
            stopped = True
            continue
        asked += 1
        one = consider(made.request, candidate.grid, candidate.pipeline, costs, tried)
        if not one.reason and (best is None or one.seconds < best.seconds):
            best = one
        if one.memory is not None and (nearest is None or nearest.memory is None
                                       or one.memory.total < nearest.memory.total):  # fmt: skip
            nearest = one
    return best or nearest, stopped
