"""For one grid with stages: the fastest schedule, micro-batches and recomputation that fit into memory.

Times are cheap and are computed for every choice; memory is computed only for choices that are fast.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from axo.grid import Grid
from axo.perf import memory
from axo.perf import pipeline_schedule as schedules
from axo.perf.candidate import Candidate, MemoryOptions, impossible, needs, run_options, share_that_fits, variant
from axo.perf.layer_time import PRECISIONS
from axo.perf.request import Request
from axo.perf.stages import Known, Stages, StageTimes

SIZES_TRIED = 2  # of micro-batches, the smallest first


class Staged(NamedTuple):
    """One way to run a grid with stages, and how long a step takes if it fits as it is."""

    seconds: float
    timing: StageTimes
    stages: Stages
    zero: int
    offload: bool

    def least(self) -> float:
        """Bytes that it needs at least."""
        return self.timing.least(self.stages, self.zero, self.offload)

    def sized(self, request: Request) -> tuple[StageTimes, memory.Memory]:
        """Its memory, and where that is too much, with as many gathered weights kept as fit."""
        timing = self.timing.with_state(self.zero, offload=self.offload)
        held = timing.memory(self.stages)
        if not held.fits(request.machine) and request.gather == "auto" and timing.run.cached_gathers:
            none = timing.keeping(0.0).memory(self.stages)
            timing = timing.keeping(share_that_fits(request, held, none))
            held = timing.memory(self.stages)
        return timing, held

    def candidate(self, timing: StageTimes, held: memory.Memory, reason: str = "") -> Candidate:
        """Predict it; where there is a ``reason`` to leave it out, without its time."""
        time = None if reason else timing.predict(self.stages)
        checkpointed = timing.workload.checkpointed
        return Candidate(timing.grid, timing.run, checkpointed, time, held, reason, stages=self.stages)


def consider_stages(request: Request, grid: Grid, ranks: int, known: Known, tried: list[MemoryOptions]) -> Candidate:
    """Predict one grid with ``ranks`` stages of it: the fastest of its ways, schedules and micro-batches that fits."""
    none = Candidate(
        grid, run_options(request), request.workload.checkpointed, stages=Stages(ranks, request.schedules[0], (0, 0))
    )
    reason, sizes = impossible(request, grid), list[int]()
    if not reason:
        reason, sizes = _pieces(request, grid, ranks)
    if reason:
        return replace(none, reason=reason)
    least = _state(request, grid, ranks)
    if not least.fits(request.machine):
        return replace(none, memory=least, reason=needs(request, least.total).replace("needs", "needs more than"))
    share = 0.0 if request.gather == "drop" or grid.z == 1 else 1.0
    best: Candidate | None = None
    every: list[Staged] = []
    # What a step takes at least: recomputation is not faster than none, and splitting tokens saves no more than what is
    # spent on them.
    bounds: dict[tuple[bool, int, str], float] = {}
    for recompute, splits in sorted({(way.recompute, way.sequence_parallel) for way in tried}, key=_order):
        states = [way[1:3] for way in tried if (way.recompute, way.sequence_parallel) == (recompute, splits)]
        workload, found = variant(request.workload, recompute != "none"), list[Staged]()
        for pieces in sizes:
            wanted = [name for name in request.schedules if best is None
                      or bounds.get((splits, pieces, name), 0.0) < best.seconds]  # fmt: skip
            if not wanted:
                continue
            rows = request.sequences // pieces // grid.data * workload.seq_length
            way = MemoryOptions(recompute, request.zero, request.offload, splits)
            run = run_options(request, way, micro_batches=pieces, rows=rows, cached_gathers=share)
            timing = StageTimes(workload, grid, request.machine, run, known)
            for schedule in wanted:
                if recompute != "none" and schedules.schedule_kind(schedule).splits:
                    continue
                stages = known.stages(workload, ranks, schedule, pieces)
                if isinstance(stages, str):
                    reason = stages
                    continue
                seconds = timing.seconds(stages, states)
                found += [Staged(time, timing, stages, *state) for time, state in zip(seconds, states, strict=True)]
                if recompute == "none":
                    bounds[splits, pieces, schedule] = min(seconds)
                    if not splits:
                        bounds[True, pieces, schedule] = min(seconds) - timing.saved_by_splitting(stages)
        best = _fastest(request, found, best)
        every += found
    if best is None and not every:
        return replace(none, reason=reason or "recomputation where backward is split is not planned")
    return best or _lacks_least(request, every)


def _order(way: tuple[str, bool]) -> tuple[int, bool]:
    return ("none", "selective", "full").index(way[0]), way[1]


def _fastest(request: Request, found: list[Staged], best: Candidate | None) -> Candidate | None:
    """The fastest that fits, with as many gathered weights kept as fit; ``best`` where none is faster."""
    room = request.machine.memory_gib * memory.GIB
    for one in sorted(found, key=lambda one: one.seconds):
        if best is not None and one.seconds >= best.seconds:
            break
        if one.least() <= room:
            timing, held = one.sized(request)
            if held.fits(request.machine):
                fitted = one.candidate(timing, held)
                best = fitted if best is None or fitted.seconds < best.seconds else best
    return best


def _lacks_least(request: Request, every: list[Staged]) -> Candidate:
    """The way that needs the least memory, if none fits; if several need the same, the fastest of them."""
    nearest: tuple[float, float, int] | None = None
    sized: dict[int, tuple[StageTimes, memory.Memory]] = {}
    for size, number in sorted((one.least(), number) for number, one in enumerate(every)):
        if nearest is not None and size > nearest[0]:
            break
        sized[number] = every[number].sized(request)
        found = (sized[number][1].total, every[number].seconds, number)
        nearest = found if nearest is None else min(nearest, found)
    assert nearest is not None
    return every[nearest[2]].candidate(*sized[nearest[2]], needs(request, nearest[0]))


def _state(request: Request, grid: Grid, ranks: int) -> memory.Memory:
    """The least that a rank holds whatever the micro-batches: its share of weights and of the optimizer's state."""
    each = PRECISIONS[request.precision]["weights"] * request.workload.parameters / (grid.x * grid.y * grid.z * ranks)
    cut = grid.data if request.zero else 1
    moments = 0.0 if request.search or request.offload else 2 * each / cut
    return memory.Memory(each, 0.0, moments, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def _pieces(request: Request, grid: Grid, ranks: int) -> tuple[str, list[int]]:
    """Why stages cannot have micro-batches, or how many: of the fewest sequences first."""
    data = grid.z * grid.data
    if request.sequences % data:
        return f"z*data={data} does not divide the {request.sequences} sequences, as stages want", []
    mine = request.sequences // data
    least = ranks * max(2 if name == "dualpipev" else 1 for name in request.schedules)
    if mine < least:
        return f"a rank has {mine} sequences for {ranks} stages, which want {least} micro-batches", []
    if request.micro_batches:
        if mine % request.micro_batches:
            return f"micro_batches={request.micro_batches} do not divide the {mine} sequences of a rank", []
        return "", [request.micro_batches]
    sizes = [mine // size for size in range(1, mine // least + 1) if mine % size == 0]
    return "", sizes[:SIZES_TRIED]
