"""Rank every grid of a number of GPUs by the predicted time of a step.

For each ordered grid Gx x Gy x Gz x Gdata of the GPUs (816 of 32,768): leave it out when an axis does not divide a size
of the model, when the batch has fewer sequences than z * data, or when a rank would need more memory than a GPU has;
else take the fewest micro-batches that fit, predict (``axo.perf.model``), sort. Nothing is left out in silence: every
grid keeps its reason.

With ``search`` each grid is tried without recomputation, with selective and with full, without ZeRO and with ZeRO-2,
with more micro-batches (which leave room to keep gathered weights) and with the optimizer in the host's memory, and the
fastest that fits counts.

With ``pipeline`` each number of stages is tried with all grids of its share of the GPUs, cut by flops, with each of
``schedules`` and the smallest micro-batches.

It measures nothing and does not know what else uses the network; ``axo.perf.simulator`` looks at one grid more closely.
"""

from __future__ import annotations

import bisect
import gc
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from axo.grid import AXES, Grid
from axo.perf import flops, memory, model
from axo.perf import pipeline_schedule as schedules
from axo.perf.layer_time import Costs
from axo.perf.machine import Machine
from axo.perf.memory import Memory
from axo.perf.request import ALGORITHMS as ALGORITHMS
from axo.perf.request import Request as Request
from axo.perf.run_options import RunOptions
from axo.perf.stages import Stages, StageTimes, planned

DAY = 86400.0
CACHE_LIMIT = 0.9  # of a GPU's memory may be filled with weights kept for their second use
SIZES_TRIED = 2  # of micro-batches of stages, the smallest first
# Between these shares of a predicted time lay the middle four fifths of the published runs that were held out
# (``axo bench exam``): what days and prices are printed with.
INTERVAL = (0.83, 1.16)
_TRAFFIC = {
    "x": "input gradients and outputs of transposed layers",
    "y": "outputs, norms and input gradients of transposed layers",
    "z": "gathered weights and scattered gradients",
    "data": "gradients of the data-parallel groups",
}
_TESSERACT_TRAFFIC = {
    "x": "blocks of weights and of their gradients",
    "y": "blocks of activations, norms",
    "z": "weight gradients summed over depth",
    "data": _TRAFFIC["data"],
}
SEARCHED = ("1f1b", "interleaved-1f1b", "zero-bubble")  # schedules that a search tries


@dataclass(frozen=True)
class Candidate:
    """One grid and how it is run: its prediction, or the reason why it is left out."""

    grid: Grid
    run: RunOptions
    time: model.StepTime | None = None
    memory: Memory | None = None
    reason: str = ""
    stages: Stages | None = None

    @property
    def name(self) -> str:
        """The grid, with its stages where there are several, and the algorithm where that is not axonn."""
        if self.stages is not None:
            return f"{self.grid} x {self.stages.ranks} stages, {self.stages.schedule}"
        return str(self.grid) if self.algorithm == "axonn" else f"{self.grid} {self.algorithm}"

    @property
    def algorithm(self) -> str:
        """How its products are distributed."""
        return self.run.algorithm

    @property
    def pipeline(self) -> int:
        """How many stages it has."""
        return 1 if self.stages is None else self.stages.ranks

    @property
    def seconds(self) -> float:
        """Predicted time of a step; of a candidate that fits."""
        assert self.time is not None
        return self.time.total

    def keeping(self, share: float) -> Candidate:
        """The same with another share of the gathered weights kept."""
        return replace(self, run=self.run._replace(cached_gathers=share))


@dataclass(frozen=True)
class GridPlan:
    """All grids, the fastest first; what is left out stands in ``left_out``."""

    request: Request
    ranked: list[Candidate]
    left_out: list[Candidate] = field(default_factory=list)

    @property
    def best(self) -> Candidate:
        return self.ranked[0]

    def step_flops(
        self, candidate: Candidate | None = None, *, model_flops: bool = False, full_attention: bool = False
    ) -> float:
        """Hardware flops of one step (with recomputation), of the best candidate if none is given; or its model's."""
        again = (candidate or self.best).run.recompute == "full" and not model_flops
        workload, tokens = self.request.workload, self.request.batch_tokens
        return flops.step_flops(workload, tokens, recompute=again, full_attention=full_attention)

    def percent_of_peak(
        self, candidate: Candidate, *, seconds: float = 0.0, model_flops: bool = False, full_attention: bool = False
    ) -> float:
        """Return HFU in percent of the advertised peak; ``model_flops``: MFU; ``full_attention``: as in ``flops``.

        ``seconds``: of a step, where they are not the predicted ones.
        """
        work = self.step_flops(candidate, model_flops=model_flops, full_attention=full_attention)
        peak = self.request.gpus * self.request.machine.peak_tflops * 1e12
        return 100 * work / (seconds or candidate.seconds) / peak

    def days(self, candidate: Candidate) -> float:
        """Return days to train ``tokens`` tokens (0 when they were not asked)."""
        return self.request.tokens / self.request.batch_tokens * candidate.seconds / DAY

    def gpu_hours(self, candidate: Candidate) -> float:
        """Return GPU hours to train ``tokens`` tokens (0 when they were not asked)."""
        return 24 * self.days(candidate) * self.request.gpus

    def megawatt_hours(self, candidate: Candidate) -> float:
        """Return the energy of that, MWh, at the power that the machine file gives (0: it gives none)."""
        return self.gpu_hours(candidate) * self.request.machine.watts / 1e6

    def forced(self) -> str:
        """Say what the batch leaves no choice about; empty where it forces nothing."""
        gpus, sequences = self.request.gpus, self.request.sequences
        if gpus <= sequences:
            return ""
        what = "x*y" if self.request.pipeline == (1,) else "x*y times the stages"
        return (
            f"the batch has {sequences} sequences for {gpus} GPUs, so {what} must be at least {-(-gpus // sequences)};"
            f" a batch of {gpus * self.request.workload.seq_length:,} tokens would leave the choice"
        )

    def decision(self) -> str:
        """Say in one sentence what to take: the best, that it fits, and how far the next one is behind."""
        best, gpu = self.best, self.request.machine.memory_gib
        assert best.memory is not None
        text = f"{best.name} is the fastest: {seconds_text(best.seconds)} a step"
        text += f"; it fits ({best.memory.total / memory.GIB:.1f} of {gpu:g} GiB)"
        if len(self.ranked) == 1:
            return f"{text}; nothing else does."
        second = self.ranked[1]
        return f"{text}; the runner-up, {second.name}, is {100 * (second.seconds / best.seconds - 1):.1f}% slower."

    def tokens_a_second(self, candidate: Candidate) -> float:
        """Tokens of the batch a second and GPU."""
        return self.request.batch_tokens / candidate.seconds / self.request.gpus

    def why(self, candidate: Candidate) -> str:
        """Say in one sentence where the time of a candidate goes and what stands between it and the best."""
        if candidate.time is None:
            return f"{candidate.name} is left out: {candidate.reason}."
        time = candidate.time
        worst = max(AXES, key=lambda axis: time.exposed[axis])
        traffic = _TRAFFIC if candidate.algorithm == "axonn" else _TESSERACT_TRAFFIC
        text = f"{candidate.name}: products take {100 * time.compute / time.total:.0f}% of {seconds_text(time.total)}"
        if time.exposed_total > 0:
            text += f"; {seconds_text(time.exposed_total)} of communication show, most on {worst} ({traffic[worst]})"
        if time.hidden > 0.005 * time.total:
            text += f", {seconds_text(time.hidden)} hide behind products"
        if candidate.stages is not None:
            text += f"; stages wait {seconds_text(time.bubble)} for each other ({100 * time.bubble / time.total:.0f}%)"
        best = self.best
        if best is candidate:
            if len(self.ranked) > 1:
                second = self.ranked[1]
                text += f"; {second.name} comes next at {100 * (second.seconds / time.total - 1):+.1f}%"
            return text + "."
        assert best.time is not None
        behind = f"{100 * (time.total / best.time.total - 1):+.1f}% against {best.name}"
        return f"{text}; {behind}, most of it {cause(time, best.time)}."


def cause(time: model.StepTime, best: model.StepTime, times: float = 1.0) -> str:
    """Name what costs most in a step that is slower than another; ``times``: how many of it make one step."""
    lost = {f"exposed {axis}": times * time.exposed[axis] - best.exposed[axis] for axis in AXES}
    lost["products"] = times * time.compute - best.compute
    lost["products slowed by hidden communication"] = times * time.contention - best.contention
    lost["stages that wait"] = times * time.bubble - best.bubble
    lost["the optimizer's step"] = times * time.optimizer - best.optimizer
    return max(lost, key=lambda name: lost[name])


def seconds_text(seconds: float) -> str:
    """A time in words: ``1.25 s``, ``3.21 ms``."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def plan(request: Request, grids: Iterable[Grid] | None = None) -> GridPlan:
    """Rank all grids of the request (or only ``grids``).

    Raises:
        ValueError: No grid is possible; the message says what would make one possible.
    """
    ranked: list[Candidate] = []
    left_out: list[Candidate] = []
    collects = gc.isenabled()
    gc.disable()  # nothing that is made here refers to itself, and looking through all of it takes a tenth of the time
    try:
        for candidate in _considered(request, grids):
            (left_out if candidate.reason else ranked).append(candidate)
    finally:
        if collects:
            gc.enable()
    if not ranked and not left_out and "axonn" in request.algorithms:
        raise ValueError(f"plan: pipeline={request.pipeline} stages do not divide {request.gpus} GPUs")
    if not ranked and not left_out:
        raise ValueError(
            f"plan: {request.gpus} GPUs have no grid for tesseract, which needs x = y above 1, so a square"
        )
    if not ranked:
        raise ValueError(_nothing_fits(request, left_out))
    ranked.sort(key=lambda candidate: (candidate.seconds, candidate.grid.x, candidate.grid.y, candidate.grid.z))
    return GridPlan(request, ranked, left_out)


def _considered(request: Request, grids: Iterable[Grid] | None) -> Iterator[Candidate]:
    costs = request.costs()
    if "axonn" in request.algorithms:
        for stages in request.pipeline:
            if request.gpus % stages == 0:
                for grid in Grid.all(request.gpus // stages) if grids is None else grids:
                    yield consider(request, grid, stages, costs)
    if "tesseract" in request.algorithms:
        for grid in tesseract_grids(request.gpus) if grids is None else grids:
            yield consider(request, grid, 1, costs, algorithm="tesseract")


def tesseract_grids(ranks: int) -> list[Grid]:
    """All grids of ``ranks`` that Tesseract can use: x = y = q above 1, and z of at most q; SUMMA is z = 1."""
    return [grid for grid in Grid.all(ranks) if grid.x == grid.y > 1 and grid.z <= grid.x]


def consider(
    request: Request,
    grid: Grid,
    stages: int = 1,
    costs: Costs | None = None,
    tried: Sequence[RunOptions] | None = None,
    algorithm: str = "axonn",
) -> Candidate:
    """Predict one grid, or say why it is left out; with ``search`` or stages the fastest way to run it.

    Args:
        stages: So many of these grids, one behind the other.
        costs: What other grids of this request share with it; more is put in.
        tried: The ways that are tried; None: all of the request.
        algorithm: One of ``ALGORITHMS``.
    """
    costs = costs or request.costs()
    none = Candidate(grid, request.run_options(algorithm=algorithm),
                     stages=Stages(stages, request.schedules[0], (0, 0)) if stages > 1 else None)  # fmt: skip
    reason, sizes = request.impossible(grid, algorithm), list[tuple[int, int]]()
    if not reason:
        reason, sizes = _sizes(request, none.run.held_as(grid), stages)
    if reason:
        return replace(none, reason=reason)
    if stages > 1 and not (least := _state(request, grid, stages)).fits(request.machine):
        return replace(none, memory=least, reason=_needs(request, least).replace("needs", "needs more than"))
    best: Candidate | None = None
    shortest, nearest = math.inf, list[Candidate]()  # seconds of the best; those that need too much
    floors: dict[tuple[object, ...], float] = {}
    for run in request.ways(grid, algorithm) if tried is None else tried:
        every = _sized(request, replace(none, run=run), sizes, costs)
        for one in every if stages > 1 else _that_fit(request, every, costs):
            time = None
            if best is not None:
                as_none = (one.run._replace(recompute="none"), one.stages)
                if floors.get(as_none, 0.0) >= shortest:  # recomputation is not faster than none
                    continue
                time = _time(request, one, costs)
                total = time.total
                floors.setdefault(as_none, total)
                if total >= shortest:
                    continue  # nor is it faster with less weights kept
            fitted = _fitted(request, one, costs)
            assert fitted.memory is not None
            if not fitted.memory.fits(request.machine):
                nearest.append(fitted)
                continue
            if time is None or fitted.run is not one.run:
                time = _time(request, fitted, costs)
            if time.total < shortest:
                best, shortest = replace(fitted, time=time), time.total
    if best is None and nearest:
        best = min(nearest, key=lambda one: one.memory.total if one.memory is not None else math.inf)
        best = replace(best, reason=_needs(request, best.memory))
    return best or replace(none, reason=_no_stages(request, stages, sizes))


def _time(request: Request, one: Candidate, costs: Costs) -> model.StepTime:
    """Predict a step."""
    if one.stages is None:
        return model.predict(request.workload, one.grid, request.machine, one.run, costs)
    return StageTimes(request.workload, one.grid, request.machine, one.run, costs).predict(one.stages)


def _memory(request: Request, one: Candidate, costs: Costs) -> Memory:
    """What the fullest rank holds."""
    if one.stages is None:
        return memory.of_model(costs, request.workload, one.grid, one.run)
    return StageTimes(request.workload, one.grid, request.machine, one.run, costs).memory(one.stages)


def _fitted(request: Request, one: Candidate, costs: Costs) -> Candidate:
    """The same with as many gathered weights kept as fit, where the request leaves that open; and its memory."""
    full = _memory(request, one, costs)
    settled = request.gather != "auto" or not one.run.cached_gathers
    if settled or (one.stages is not None and full.fits(request.machine)):
        return replace(one, memory=full)
    none = one.keeping(0.0)
    least = _memory(request, none, costs)
    if not least.fits(request.machine):
        return replace(none, memory=least)
    some = one.keeping(share_that_fits(request.machine, full, least))
    return replace(some, memory=_memory(request, some, costs))


def _needs(request: Request, held: Memory | None) -> str:
    """The reason of a grid that needs too much."""
    assert held is not None
    return f"needs {held.total / memory.GIB:.1f} of {request.machine.memory_gib:g} GiB a GPU"


def _state(request: Request, grid: Grid, ranks: int) -> Memory:
    """The least that a rank holds in so many stages: its share of weights and of the optimizer's state."""
    each = request.run_options().weights * request.workload.parameters / (grid.x * grid.y * grid.z * ranks)
    moments = 0.0 if request.search or request.offload else 2 * each / (grid.data if request.zero else 1)
    return Memory(each, 0.0, moments, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def _sized(request: Request, one: Candidate, sizes: list[tuple[int, int]], costs: Costs) -> list[Candidate]:
    """The micro-batches and stages in which a way to run a grid is tried, with all weights kept that may be kept."""
    ranks, run = one.pipeline, one.run
    share = 0.0 if request.gather == "drop" or one.algorithm != "axonn" else 1.0
    if one.grid.z == 1 and (ranks > 1 or request.gather == "auto"):
        share = 0.0
    every = []
    for pieces, rows in sizes:
        sized = run._replace(micro_batches=pieces, rows=rows, cached_gathers=share)
        for schedule in request.schedules if ranks > 1 else ():
            stages = _stages(request, ranks, schedule, pieces, costs)
            splits = schedules.schedule_kind(schedule).splits
            if isinstance(stages, Stages) and not (run.recompute != "none" and splits):
                every.append(Candidate(one.grid, sized, stages=stages))
        if ranks == 1:
            every.append(Candidate(one.grid, sized))
    return every


def _that_fit(request: Request, every: list[Candidate], costs: Costs) -> list[Candidate]:
    """Of one way in more and more micro-batches, those from the fewest that fit on; without search this one alone.

    None fits: the last. Smaller micro-batches need less, but that from the second on gradients are added up.
    """

    def fits(one: Candidate) -> bool:
        least = one if request.gather != "auto" else one.keeping(0.0)
        return _memory(request, least, costs).fits(request.machine)

    first = 0 if fits(every[0]) else bisect.bisect_left(every, True, 1, key=fits)
    if first == len(every):
        return every[-1:]
    return every[first:] if request.search else every[first : first + 1]


def _sizes(request: Request, grid: Grid, stages: int) -> tuple[str, list[tuple[int, int]]]:
    """Why there can be no micro-batches; or their numbers to try, each with the rows of one data-parallel group.

    1, 2, 4, ... down to one sequence a rank, or the number that is asked for; of stages those of the fewest sequences.
    """
    data, asked = grid.z * grid.data, request.micro_batches
    if stages == 1:
        mine = -(-request.sequences // data)
        counts = [max(1, min(asked, mine))]
        while counts[-1] < mine and not asked:
            counts.append(min(2 * counts[-1], mine))
    else:
        mine, rest = divmod(request.sequences, data)
        least = stages * max(2 if name == "dualpipev" else 1 for name in request.schedules)
        if rest:
            return f"z*data={data} does not divide the {request.sequences} sequences, as stages want", []
        if mine < least:
            return f"a rank has {mine} sequences for {stages} stages, which want {least} micro-batches", []
        if asked and mine % asked:
            return f"micro_batches={asked} do not divide the {mine} sequences of a rank", []
        every = (mine // size for size in range(1, mine // least + 1) if mine % size == 0)
        counts = [asked] if asked else list(itertools.islice(every, SIZES_TRIED))
    return "", [(pieces, -(-mine // pieces) * grid.z * request.workload.seq_length) for pieces in counts]


def _stages(request: Request, ranks: int, schedule: str, pieces: int, costs: Costs) -> Stages | str:
    """The stages of so many micro-batches, or why there are none."""
    try:
        schedules.check(schedule, pieces, ranks)
        return costs.once((ranks, schedule), lambda: planned(request.workload, ranks, schedule))
    except ValueError as error:
        return str(error)


def _no_stages(request: Request, ranks: int, sizes: list[tuple[int, int]]) -> str:
    """Why none of the schedules suits."""
    costs = request.costs()
    tried = [_stages(request, ranks, name, pieces, costs) for pieces, _ in sizes for name in request.schedules]
    wrong = [stages for stages in tried if isinstance(stages, str)]
    return wrong[-1] if wrong else "recomputation where backward is split is not planned"


def share_that_fits(machine: Machine, full: Memory, held: Memory) -> float:
    """Which share of gathered weights can be kept, in hundredths, when all need ``full`` and none ``held``."""
    extra, free = full.total - held.total, CACHE_LIMIT * machine.memory_gib * memory.GIB - held.total
    return 1.0 if extra <= max(0.0, free) else max(0, int(100 * free / extra)) / 100


def _nothing_fits(request: Request, left_out: list[Candidate]) -> str:
    """Say what stood in the way of every grid, and the nearest way out."""
    head = f"plan: no grid of {request.gpus} GPUs can train {request.workload.name} on {request.machine.name}"
    short = [candidate for candidate in left_out if candidate.memory is not None]
    if short:
        nearest = min(short, key=lambda candidate: candidate.memory.total if candidate.memory else 0.0)
        needed = nearest.memory.total / memory.GIB if nearest.memory else 0.0
        return (
            f"{head}: not enough memory; the nearest miss is {nearest.grid}, which {nearest.reason}; use"
            f" {_more_gpus(request)}GPUs of at least {math.ceil(needed)} GiB"
        )
    why = Counter(_kind(candidate.reason) for candidate in left_out).most_common(1)[0][0]
    example = next(candidate for candidate in left_out if _kind(candidate.reason) == why)
    counts = _possible_counts(request)
    fits = f"; counts near it that work: {', '.join(map(str, counts))}" if counts else ""
    return f"{head}: {example.reason} (grid {example.grid}; {len(left_out)} grids tried){fits}"


def _kind(reason: str) -> str:
    return "batch" if reason.startswith("z*data") else "sizes"


def _more_gpus(request: Request) -> str:
    """Name the smallest doubling of the GPUs on which some grid fits, as 'N GPUs, or '."""
    doublings = (request.gpus << n for n in range(1, 18) if request.gpus << n < 2**18)
    larger = (replace(request, gpus=gpus) for gpus in doublings)
    fits = (one.gpus for one in larger if any(not consider(one, grid).reason for grid in Grid.all(one.gpus)))
    return next((f"{gpus} GPUs, or " for gpus in fits), "")


def _possible_counts(request: Request) -> list[int]:
    """Return the nearest numbers of GPUs below and above that divide the model and the batch."""

    def nearest(step: int) -> list[int]:
        counts = (gpus for gpus in range(request.gpus + step, request.gpus + 65 * step, step) if gpus > 0)
        fits = (gpus for gpus in counts if any(not request.impossible(grid) for grid in Grid.all(gpus)))
        return list(itertools.islice(fits, 1))

    return nearest(-1) + nearest(1) or [2 ** (request.sequences.bit_length() - 1)]
