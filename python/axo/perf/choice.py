"""The fastest grid and stages for a training program: what ``--grid auto`` asks.

A program runs its batch in pieces, one after the other (accumulation). Without stages these are the planner's
micro-batches. Where there are stages each piece fills and empties the pipeline anew, so a step takes pieces * (the step
of one piece, ``axo.perf.stages``). That counts optimizer and reduction of gradients once too often for each further
piece: stages have to win clearly.

Not here: programs; what a grid costs (``axo.perf.planner``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from axo.grid import Grid
from axo.perf.planner import Candidate, Plan, Request, plan

MOST_STAGES = 64


def stage_counts(ranks: int) -> tuple[int, ...]:
    """Return the numbers of stages that are tried: 1, and powers of two that divide."""
    return tuple(1 << n for n in range(MOST_STAGES.bit_length()) if ranks % (1 << n) == 0)


@dataclass(frozen=True)
class Choice:
    """What is fastest.

    Attributes:
        best: The grid, and the stages if they are faster.
        seconds: Of a step of the whole batch.
        plan: That ``best`` is of: grids that run the batch in as many pieces.
        fit, missed: Grids that suit the batch, in as many stages: how many fit in memory, how many do not.
        against: The fastest with stages where ``best`` has none, without where it has some: its name, seconds of a
            step; None where nothing of the kind fits.
        unsuited: Grids without stages over which the batch does not divide.
    """

    best: Candidate
    seconds: float
    plan: Plan
    fit: int
    missed: int
    against: tuple[str, float] | None
    unsuited: int

    def tell(self) -> str:
        """Say what was compared: ``12 grids fit, 3 do not; in stages ... would take ...``."""
        text = f"{self.fit} grids fit, {self.missed} do not"
        text += f", {self.unsuited} do not suit the batch sizes" if self.unsuited else ""
        if self.against is None:
            return text
        name, seconds = self.against
        kind = "without stages" if self.best.stages is not None else "in stages"
        return f"{text}; {kind} {name} would take {100 * (seconds / self.seconds - 1):+.1f}%"


def choose(request: Request, pieces: Callable[[Grid], int], micro_batches: int = 0) -> Choice:
    """Find the fastest grid of the request's GPUs.

    Args:
        request: Of the whole batch; its ``micro_batches`` do not count.
        pieces: In how many pieces a step runs its batch on a grid; 0: the batch does not suit it.
        micro_batches: Of stages, in each piece; 0: those that are fastest.

    Raises:
        ValueError: Nothing fits; says why not.
    """
    found: list[tuple[float, Plan, Candidate]] = []
    why: list[ValueError] = []
    unsuited = 0
    suited: dict[int, list[Grid]] = {}  # by the number of stages
    for stages in request.pipeline:
        if request.gpus % stages:
            why.append(ValueError(f"plan: {request.gpus} ranks do not divide into pipeline={stages} stages"))
            continue
        groups: dict[int, list[Grid]] = {}
        for grid in Grid.all(request.gpus // stages):
            groups.setdefault(pieces(grid), []).append(grid)
        unsuitable = groups.pop(0, [])
        if not groups:
            why.append(ValueError(f"the batch sizes suit no grid of {request.gpus // stages} ranks"))
        if stages == 1:
            unsuited = len(unsuitable)
        suited[stages] = [grid for grids in groups.values() for grid in grids]
        for count, grids in groups.items():
            fills, batches = (count, micro_batches) if stages > 1 else (1, count)
            tokens = request.batch_tokens // fills
            try:
                made = plan(replace(request, pipeline=(stages,), batch_tokens=tokens, micro_batches=batches), grids)
            except ValueError as error:
                why.append(error)
            else:
                found.append((fills * made.best.seconds, made, made.best))
    if not found:
        if suited.get(1):  # the nearest miss of all: of other pieces too
            plan(replace(request, pipeline=(1,), micro_batches=0), suited[1])
        raise why[0]
    seconds, made, best = min(found, key=lambda one: one[0])
    others = [(time, one.name) for time, _, one in found if (one.stages is None) != (best.stages is None)]
    against = min(others)[::-1] if others else None
    ranks = best.stages.ranks if best.stages is not None else 1
    fit = sum(len(one.ranked) for _, one, _ in found if one.request.pipeline == (ranks,))
    return Choice(best, seconds, made, fit, len(suited[ranks]) - fit, against, unsuited)
