"""The fastest grid and stages for a training program: what ``--grid auto`` asks.

A program runs its batch in pieces, one after the other (accumulation). Without stages these are the planner's
micro-batches. Where there are stages each piece fills and empties the pipeline anew, so a step takes pieces * (the step
of one piece, ``axo.perf.stages``). That counts the optimizer and the reduction of gradients in each piece, and they
happen once a step. So stages are chosen only if they win clearly.

Not here: programs; what a grid costs (``axo.perf.planner``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from axo.grid import Grid
from axo.perf import cut
from axo.perf.pipeline_schedule import schedule_kind
from axo.perf.planner import SEARCHED, Candidate, GridPlan, Request, cause, plan

MOST_STAGES = 64


def stage_counts(ranks: int) -> tuple[int, ...]:
    """Return the numbers of stages that are tried: 1, and powers of two that divide."""
    return tuple(1 << n for n in range(MOST_STAGES.bit_length()) if ranks % (1 << n) == 0)


def schedules_for(schedule: str, pipeline: int, cuts: str) -> tuple[str, ...]:
    """Return the schedules to search: ``schedule``, or all; where ``cuts`` names blocks, those with as many stages.

    Args:
        schedule, cuts: As on a command line; ``""``: not given.
        pipeline: Ranks of the pipeline; 0: any number.

    Raises:
        ValueError: ``cuts`` names blocks, and no schedule has so many stages, or ``pipeline`` is 0.
    """
    tried, named = (schedule,) if schedule else SEARCHED, cut.read(cuts) if cuts else "planner"
    if isinstance(named, str):
        return tried
    suit = tuple(name for name in tried if pipeline * schedule_kind(name).stages_per_rank == len(named) + 1)
    if not suit:
        counts = " or ".join(map(str, sorted({pipeline * schedule_kind(name).stages_per_rank for name in tried})))
        other = f"pipeline={pipeline} has {counts}" if pipeline else "pipeline is not given"
        raise ValueError(f"plan: cuts={cuts} make {len(named) + 1} stages, and {other}; give both, or cuts=planner")
    return suit


@dataclass(frozen=True)
class GridChoice:
    """What is fastest.

    Attributes:
        best: The grid, and the stages if they are faster.
        seconds: How long a step of the whole batch takes.
        plan: That ``best`` is of: grids that run the batch in as many pieces.
        fit, missed: Grids that suit the batch, in as many stages: how many fit in memory, how many do not.
        others: The fastest of each other number of stages: its name, seconds of a step, and what most of the
            difference is; where nothing of it fits, its number of stages, 0 and why.
        unsuited: Grids without stages over which the batch does not divide.
    """

    best: Candidate
    seconds: float
    plan: GridPlan
    fit: int
    missed: int
    others: tuple[tuple[str, float, str], ...]
    unsuited: int

    def tell(self, machine: str) -> str:
        """Say what was chosen on the machine of that name, what it was compared with, and why it is fastest."""
        request = self.plan.request
        text = f"grid {self.best.name}, chosen for {request.workload.name} on {request.gpus} ranks of {machine}"
        text += f" ({self.fit} grids fit, {self.missed} do not"
        text += f", {self.unsuited} do not suit the batch sizes" if self.unsuited else ""
        for name, seconds, why in self.others:
            behind = f"would take {100 * (seconds / self.seconds - 1):+.1f}%, most of it {why}" if seconds else why
            text += f"; {name} {behind}"
        return f"{text})\n  {self.plan.why(self.best)}"


def choose(request: Request, pieces: Callable[[Grid], int], micro_batches: int = 0) -> GridChoice:
    """Find the fastest grid of the request's GPUs.

    Args:
        request: Asks for the whole batch; its ``micro_batches`` do not count.
        pieces: In how many pieces a step runs its batch on a grid; 0: the batch does not suit it.
        micro_batches: Of stages, in each piece; 0: those that are fastest.

    Raises:
        ValueError: Nothing fits; says why not.
    """
    plans, why = list[tuple[float, GridPlan]](), list[ValueError]()  # with the seconds of the best
    suited, unsuited = dict[int, list[Grid]](), 0  # by the number of stages
    for stages in request.pipeline:
        if request.gpus % stages:
            why.append(ValueError(f"plan: {request.gpus} ranks do not divide into pipeline={stages} stages"))
            continue
        every = list(Grid.all(request.gpus // stages))
        groups = {count: [grid for grid in every if pieces(grid) == count] for count in map(pieces, every)}
        unsuitable = groups.pop(0, [])
        unsuited = len(unsuitable) if stages == 1 else unsuited
        suited[stages] = [grid for grids in groups.values() for grid in grids]
        if not groups:
            why.append(ValueError(f"the batch sizes suit no grid of {request.gpus // stages} ranks"))
        for count, grids in groups.items():
            fills, batches = (count, micro_batches) if stages > 1 else (1, count)
            one = replace(
                request, pipeline=(stages,), batch_tokens=request.batch_tokens // fills, micro_batches=batches
            )
            try:
                ranking = plan(one, grids)
                plans.append((fills * ranking.best.seconds, ranking))
            except ValueError as error:
                why.append(error)
    if not plans:
        if suited.get(1):  # the nearest miss of all: of other pieces too
            plan(replace(request, pipeline=(1,), micro_batches=0), suited[1])
        raise why[0]
    seconds, ranking = min(plans, key=lambda each: each[0])
    ranks = ranking.best.pipeline
    fit = sum(len(one.ranked) for _, one in plans if one.best.pipeline == ranks)
    others = [_other(count, plans, seconds, ranking.best) for count in request.pipeline if count != ranks]
    return GridChoice(ranking.best, seconds, ranking, fit, len(suited[ranks]) - fit, tuple(others), unsuited)


def _other(stages: int, plans: list[tuple[float, GridPlan]], least: float, best: Candidate) -> tuple[str, float, str]:
    """The fastest of a number of stages, and what most of the difference to the best is."""
    alike = [(seconds, one.best) for seconds, one in plans if one.best.pipeline == stages]
    if not alike:
        return ("without stages" if stages == 1 else f"in {stages} stages", 0.0, "nothing fits")
    seconds, one = min(alike, key=lambda each: each[0])
    assert one.time is not None and best.time is not None
    why = cause(one.time, best.time, seconds / one.seconds / (least / best.seconds))
    return ("without stages " if stages == 1 else "") + one.name, seconds, why
