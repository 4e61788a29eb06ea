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

It measures nothing and does not know what else uses the network; ``axo.perf.replay`` looks at one grid more closely.
"""

from __future__ import annotations

import bisect
import gc
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from axo.grid import AXES, Grid
from axo.perf import flops, memory, model
from axo.perf import pipeline_schedule as schedules
from axo.perf.layer_time import Costs
from axo.perf.machine import Machine
from axo.perf.memory import Memory
from axo.perf.request import ALGORITHMS as ALGORITHMS
from axo.perf.request import Request as Request
from axo.perf.run_options import CHOICES, RunOptions
from axo.perf.stages import Stages, StageTimes, planned

DAY = 86400.0
CACHE_LIMIT = 0.9  # of a GPU's memory may be filled with weights kept for their second use
SIZES_TRIED = 2  # of micro-batches of stages, the smallest first
# Between these shares of a predicted time lay the middle four fifths of the published runs that were held out
# (``axo bench exam``): what days and prices are printed with.
INTERVAL = (0.83, 1.16)
_TRAFFIC = {
    "axonn": {
        "x": "input gradients and outputs of transposed layers",
        "y": "outputs, norms and input gradients of transposed layers",
        "z": "gathered weights and scattered gradients",
        "data": "gradients of the data-parallel groups",
    },
    "tesseract": {
        "x": "blocks of weights and of their gradients",
        "y": "blocks of activations, norms",
        "z": "weight gradients summed over depth",
        "data": "gradients of the data-parallel groups",
    },
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

    @property
    def bytes(self) -> float:
        """Memory of the fullest rank; of a candidate whose memory was counted."""
        assert self.memory is not None
        return self.memory.total


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

    def tokens_a_second(self, candidate: Candidate) -> float:
        """Tokens of the batch a second and GPU."""
        return self.request.batch_tokens / candidate.seconds / self.request.gpus

    def days(self, candidate: Candidate) -> float:
        """Return days to train ``tokens`` tokens (0 when they were not asked)."""
        return self.request.tokens / self.request.batch_tokens * candidate.seconds / DAY

    def gpu_hours(self, candidate: Candidate) -> float:
        """The same in GPU hours."""
        return 24 * self.days(candidate) * self.request.gpus

    def megawatt_hours(self, candidate: Candidate) -> float:
        """The energy of that, at the power that the machine file gives (0: it gives none)."""
        return self.gpu_hours(candidate) * self.request.machine.watts / 1e6

    def forced(self) -> str:
        """Say what the batch leaves no choice about; empty where it forces nothing."""
        gpus, sequences = self.request.gpus, self.request.sequences
        if gpus <= sequences or self.request.context != 1:
            return ""
        what = "x*y" if self.request.pipeline == (1,) else "x*y times the stages"
        return (
            f"the batch has {sequences} sequences for {gpus} GPUs, so {what} must be at least {-(-gpus // sequences)};"
            f" a batch of {gpus * self.request.workload.seq_length:,} tokens would leave the choice, and so does"
            " --context 0, which cuts sequences"
        )

    def decision(self) -> str:
        """Say in one sentence what to take: the best, that it fits, and how far the next one is behind."""
        best = self.best
        text = f"{best.name} is the fastest: {seconds_text(best.seconds)} a step; it fits"
        text += f" ({best.bytes / memory.GIB:.1f} of {self.request.machine.memory_gib:g} GiB)"
        if len(self.ranked) == 1:
            return f"{text}; nothing else does."
        second = self.ranked[1]
        return f"{text}; the runner-up, {second.name}, is {100 * (second.seconds / best.seconds - 1):.1f}% slower."

    def why(self, candidate: Candidate) -> str:
        """Say in one sentence where the time of a candidate goes and what stands between it and the best."""
        if candidate.time is None:
            return f"{candidate.name} is left out: {candidate.reason}."
        time, best = candidate.time, self.best
        worst = max(AXES, key=lambda axis: time.exposed[axis])
        text = f"{candidate.name}: products take {100 * time.compute / time.total:.0f}% of {seconds_text(time.total)}"
        if time.exposed_total > 0:
            text += f"; {seconds_text(time.exposed_total)} of communication show, most on {worst}"
            text += f" ({_TRAFFIC[candidate.algorithm][worst]})"
        if time.hidden > 0.005 * time.total:
            text += f", {seconds_text(time.hidden)} hide behind products"
        if candidate.stages is not None:
            text += f"; stages wait {seconds_text(time.bubble)} for each other ({100 * time.bubble / time.total:.0f}%)"
        if best is candidate and len(self.ranked) > 1:
            second = self.ranked[1]
            text += f"; {second.name} comes next at {100 * (second.seconds / time.total - 1):+.1f}%"
        elif best is not candidate:
            assert best.time is not None
            text += f"; {100 * (time.total / best.seconds - 1):+.1f}% against {best.name}, most of it"
            text += f" {cause(time, best.time)}"
        return text + "."


def cause(time: model.StepTime, best: model.StepTime, times: float = 1.0) -> str:
    """Name what costs most in a step that is slower than another; ``times``: how many of it make one step."""
    lost = {f"exposed {axis}": times * time.exposed[axis] - best.exposed[axis] for axis in AXES}
    for what, part in (
        ("products", "compute"),
        ("products slowed by hidden communication", "contention"),
        ("stages that wait", "bubble"),
        ("the optimizer's step", "optimizer"),
    ):
        lost[what] = times * getattr(time, part) - getattr(best, part)
    return max(lost, key=lambda name: lost[name])


def seconds_text(seconds: float) -> str:
    """A time in words: ``1.25 s``, ``3.21 ms``."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def plan(request: Request, grids: Iterable[Grid] | None = None) -> GridPlan:
    """Rank all grids of the request (or only ``grids``).

    Raises:
        ValueError: No grid is possible; the message says what would make one possible.
    """
    collects = gc.isenabled()
    gc.disable()  # nothing that is made here refers to itself, and looking through all of it takes a tenth of the time
    try:
        every = list(_considered(request, grids))
    finally:
        if collects:
            gc.enable()
    if not every and "axonn" in request.algorithms:
        raise ValueError(f"plan: pipeline={request.pipeline} stages do not divide {request.gpus} GPUs")
    if not every:
        raise ValueError(
            f"plan: {request.gpus} GPUs have no grid for tesseract, which needs x = y above 1, so a square"
        )
    ranked, left_out = ([one for one in every if bool(one.reason) == out] for out in (False, True))
    if not ranked:
        raise ValueError(_nothing_fits(request, left_out))
    ranked.sort(key=lambda candidate: (candidate.seconds, candidate.grid.x, candidate.grid.y, candidate.grid.z))
    return GridPlan(request, ranked, left_out)


def _considered(request: Request, grids: Iterable[Grid] | None) -> Iterator[Candidate]:
    costs = request.costs()
    for stages in request.pipeline if "axonn" in request.algorithms else ():
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
    costs, shared = costs or request.costs(), request.shared(grid, stages) if algorithm == "axonn" else [(1, 1)]
    if len(shared) > 1:
        requests = (replace(request, context=context, experts=experts) for context, experts in shared)
        each = [consider(one, grid, stages, costs, tried, algorithm) for one in requests]
        fits = [one for one in each if not one.reason]
        # The fewest of equals, which differ in roundings.
        return (
            min(fits, key=lambda one: one.seconds * (1 + 1e-6 * one.run.context * one.run.experts))
            if fits
            else min(each, key=_missing)
        )
    context, experts = request.context_of(grid), shared[0][1] if shared else 1
    asked = request.run_options(algorithm=algorithm, context=context or 1, experts=experts)
    if request.experts != experts:
        request = replace(request, experts=experts)
    if experts > 1:
        request = replace(request, workload=costs.once(("spread", experts), lambda: request.workload.spread(experts)))
    none = Candidate(grid, asked, stages=Stages(stages, request.schedules[0], (0, 0)) if stages > 1 else None)
    reason = request.impossible(grid, algorithm)
    sizes = reason or _sizes(request, asked.held_as(grid), stages, context)
    if isinstance(sizes, str):
        return replace(none, reason=sizes)
    if stages > 1 and not (state := _state(request, grid, stages)).fits(request.machine):
        return replace(none, memory=state, reason=_needs(request, state).replace("needs", "needs more than"))
    shapes, misfits = _shapes(request, stages, sizes, costs)
    keeps = 0.0 if request.gather == "drop" or algorithm != "axonn" else 1.0
    if grid.z == 1 and (stages > 1 or request.gather == "auto"):
        keeps = 0.0
    on, best, nearest = _Trial(request, grid, costs), none, none
    shortest, floors = math.inf, dict[tuple[object, ...], float]()  # seconds of the best; of runs without recomputation
    ways = [
        way._replace(context=context, experts=experts)
        for way in (request.ways(grid, algorithm) if tried is None else tried)
    ]
    smallest = {(way.recompute, way.sequence_parallel): way for way in ways}  # the last: its optimizer's state is
    for way in ways:
        every = [
            (way._replace(micro_batches=pieces, rows=rows, cached_gathers=keeps), cut)
            for pieces, rows, cut in shapes
            if way.recompute == "none" or cut is None or not cut.splits
        ]
        for run, cut in every if stages > 1 else on.that_fit(every):
            time, small = None, smallest[run.recompute, run.sequence_parallel]
            if best.time is None and cut is not None and small is not way and on.misses(small, run, cut):
                continue
            if best.time is not None:
                # Recomputation is not faster than none, nor a step than its stages, nor less weights kept than all.
                as_none = run._replace(recompute="none")
                of_stages = (as_none._replace(zero=0, offload=False), cut, "alone")
                if max(floors.get((as_none, cut), 0.0), floors.get(of_stages, 0.0)) >= shortest:
                    continue
                if cut is not None:
                    least = on.least(run, cut)
                    if run.recompute == "none":
                        floors[of_stages] = least
                    if least >= shortest:
                        continue
                time = on.time(run, cut)
                floors.setdefault((as_none, cut), time.total)
                if time.total >= shortest:
                    continue
            fitted, held = on.fitted(run, cut)
            if not held.fits(request.machine):
                if nearest.memory is None or held.total < nearest.memory.total:
                    nearest = replace(none, run=fitted, memory=held, stages=cut, reason=_needs(request, held))
                continue
            if time is None or fitted is not run:
                time = on.time(fitted, cut)
            if time.total < shortest:
                best, shortest = replace(none, run=fitted, time=time, memory=held, stages=cut), time.total
    if best.time is not None or nearest.memory is not None:
        return best if best.time is not None else nearest
    return replace(none, reason=misfits[-1] if misfits else "recomputation where backward is split is not planned")


class _Trial:
    """Times and sizes of one grid, in stages or not."""

    def __init__(self, request: Request, grid: Grid, costs: Costs) -> None:
        self.request, self.grid, self.costs = request, grid, costs
        self.workload, self.machine = request.workload, request.machine
        self.keeps = request.gather != "auto"  # weights that are gathered, whatever fits
        self.missed: dict[tuple[RunOptions, Stages], bool] = {}

    def stages(self, run: RunOptions) -> StageTimes:
        return StageTimes(self.workload, self.grid, self.machine, run, self.costs)

    def time(self, run: RunOptions, cut: Stages | None) -> model.StepTime:
        if cut is None:
            return model.predict(self.workload, self.grid, self.machine, run, self.costs)
        return self.stages(run).predict(cut)

    def least(self, run: RunOptions, cut: Stages) -> float:
        """Seconds that no step takes less than: of its micro-batches alone."""
        return self.stages(run).estimate(cut)

    def memory(self, run: RunOptions, cut: Stages | None) -> Memory:
        """What the fullest rank holds."""
        if cut is None:
            return memory.of_model(self.costs, self.workload, self.grid, run)
        return self.stages(run).memory(cut)

    def misses(self, way: RunOptions, run: RunOptions, cut: Stages) -> bool:
        """Whether a way to run the same micro-batches needs too much."""
        same = way._replace(
            micro_batches=run.micro_batches, rows=run.rows, cached_gathers=run.cached_gathers * self.keeps
        )
        if (same, cut) not in self.missed:
            self.missed[same, cut] = not self.memory(same, cut).fits(self.machine)
        return self.missed[same, cut]

    def fitted(self, run: RunOptions, cut: Stages | None) -> tuple[RunOptions, Memory]:
        """The same with as many gathered weights kept as fit, where the request leaves that open; and its memory."""
        if self.request.gather != "auto" or not run.cached_gathers:
            return run, self.memory(run, cut)
        none = run._replace(cached_gathers=0.0)
        least = self.memory(none, cut)
        if not least.fits(self.machine):
            return none, least
        full = self.memory(run, cut)
        if cut is not None and full.fits(self.machine):
            return run, full
        some = run._replace(cached_gathers=share_that_fits(self.machine, full, least))
        return some, self.memory(some, cut)

    def that_fit(self, every: list[tuple[RunOptions, Stages | None]]) -> list[tuple[RunOptions, Stages | None]]:
        """Of one way in more and more micro-batches, those from the fewest that fit on; without search this one alone.

        None fits: the last. Smaller micro-batches need less, but that from the second on gradients are added up.
        """

        def fits(one: tuple[RunOptions, Stages | None]) -> bool:
            run, cut = one
            least = run if self.request.gather != "auto" else run._replace(cached_gathers=0.0)
            return self.memory(least, cut).fits(self.machine)

        first = 0 if fits(every[0]) else bisect.bisect_left(every, True, 1, key=fits)
        if first == len(every):
            return every[-1:]
        return every[first:] if self.request.search else every[first : first + 1]


def _missing(one: Candidate) -> float:
    """Bytes of a candidate that does not fit; infinite where they were not counted."""
    return math.inf if one.memory is None else one.bytes


def _needs(request: Request, held: Memory) -> str:
    """The reason of a grid that needs too much."""
    return f"needs {held.total / memory.GIB:.1f} of {request.machine.memory_gib:g} GiB a GPU"


def _state(request: Request, grid: Grid, ranks: int) -> Memory:
    """The least that a rank holds in so many stages: its share of weights and of the optimizer's state."""
    each = request.run_options().weights * request.workload.parameters / (grid.x * grid.y * grid.z * ranks)
    least = 0 if request.search or request.offload else 1 if request.optimizer == "muon" else 2  # moments
    moments = least * each / (grid.data if request.zero else 1)
    return Memory(each, 0.0, moments, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def _sizes(request: Request, grid: Grid, stages: int, context: int) -> list[tuple[int, int]] | str:
    """The numbers of micro-batches to try, each with the rows of one data-parallel group; or why there are none.

    1, 2, 4, ... down to one sequence a rank, or the number that is asked for; of stages those of the fewest sequences.
    """
    data, asked = grid.z * grid.data // context, request.micro_batches
    if stages == 1:
        mine = -(-request.sequences // data)
        counts = [max(1, min(asked, mine))]
        while counts[-1] < mine and not asked:
            counts.append(min(2 * counts[-1], mine))
    else:
        mine, rest = divmod(request.sequences, data)
        least = stages * max(2 if name == "dualpipev" else 1 for name in request.schedules)
        if rest:
            what = "z*data" + "/context" * (context > 1)
            return f"{what}={data} does not divide the {request.sequences} sequences, as stages want"
        if mine < least:
            return f"a rank has {mine} sequences for {stages} stages, which want {least} micro-batches"
        if asked and mine % asked:
            return f"micro_batches={asked} do not divide the {mine} sequences of a rank"
        every = (mine // size for size in range(1, mine // least + 1) if mine % size == 0)
        counts = [asked] if asked else list(itertools.islice(every, SIZES_TRIED))
    return [(pieces, -(-mine // pieces) * (grid.z // context) * request.workload.seq_length) for pieces in counts]


def _shapes(
    request: Request, ranks: int, sizes: list[tuple[int, int]], costs: Costs
) -> tuple[list[tuple[int, int, Stages | None]], list[str]]:
    """Each size in the stages of each schedule, or in none; and why schedules do not suit."""
    if ranks == 1:
        return [(*size, None) for size in sizes], []
    shapes, wrong = list[tuple[int, int, Stages | None]](), list[str]()
    for (pieces, rows), name in itertools.product(sizes, request.schedules):
        try:
            schedules.check(name, pieces, ranks)
            cut = costs.once((ranks, name), partial(planned, request.workload, ranks, name))
            shapes.append((pieces, rows, cut))
        except ValueError as error:
            wrong.append(str(error))
    return shapes, wrong


def share_that_fits(machine: Machine, full: Memory, held: Memory) -> float:
    """Which share of gathered weights can be kept, in hundredths, when all need ``full`` and none ``held``."""
    extra, free = full.total - held.total, CACHE_LIMIT * machine.memory_gib * memory.GIB - held.total
    return 1.0 if extra <= max(0.0, free) else max(0, int(100 * free / extra)) / 100


def _nothing_fits(request: Request, left_out: list[Candidate]) -> str:
    """Say what stood in the way of every grid, and the nearest way out."""
    head = f"plan: no grid of {request.gpus} GPUs can train {request.workload.name} on {request.machine.name}"
    if short := [candidate for candidate in left_out if candidate.memory is not None]:
        nearest = min(short, key=lambda candidate: candidate.bytes)
        return (
            f"{head}: not enough memory; the nearest miss is {nearest.grid}, which {nearest.reason}; use"
            f" {_more_gpus(request)}GPUs of at least {math.ceil(nearest.bytes / memory.GIB)} GiB"
        )
    of_batch = [candidate.reason.startswith("z*data") for candidate in left_out]
    example = left_out[of_batch.index(2 * sum(of_batch) > len(of_batch))]  # of the more frequent of two kinds
    counts = _possible_counts(request)
    fits = f"; counts near it that work: {', '.join(map(str, counts))}" if counts else ""
    return f"{head}: {example.reason} (grid {example.grid}; {len(left_out)} grids tried){fits}"


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


MOST_ASKED = 100  # grids; where nothing of a kind fits on the fastest, it is not of use
EXPLAINED = ("without stages", "with stages", "axonn", "tesseract")  # kinds of which a sentence says more
Predicate = Callable[[int, RunOptions], bool]  # of stages, and how it is run


def _has(option: str, value: object) -> Predicate:
    return lambda _, run: getattr(run, option) == value


KINDS: dict[str, Predicate] = {
    "without stages": lambda stages, run: stages == 1,
    "with stages": lambda stages, run: stages > 1,
    **{kind: _has(option, value) for option, values in CHOICES.items() for value, kind in values.items()},
}


class Alternative(NamedTuple):
    """The fastest plan of a kind; where none fits, of the grids that were asked the one that needs least."""

    kind: str
    candidate: Candidate
    why: str


def others(plan: GridPlan) -> list[Alternative]:
    """Return the best of each kind that was tried and that ``plan.best`` is not of, and why it is slower.

    No way to run a grid is faster than the time that the plan has for it. So grids are asked in the order of the plan,
    and the search ends at the first whose time is longer than the best of the kind so far.
    """
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
    asked, best, stopped = list[Candidate](), None, False
    for candidate in plan.ranked:
        if best is not None and candidate.seconds >= best.seconds:
            break
        if belongs(candidate.pipeline, candidate.run):
            return candidate, stopped
        tried = [run for run in plan.request.ways(candidate.grid) if belongs(candidate.pipeline, run)]
        if candidate.algorithm != "axonn" or not tried:
            continue
        if len(asked) == MOST_ASKED:
            stopped = True
            continue
        asked.append(consider(plan.request, candidate.grid, candidate.pipeline, costs, tried))
        best = min((one for one in asked if not one.reason), key=lambda one: one.seconds, default=None)
    short = (one for one in asked if one.memory is not None)
    return best or min(short, key=lambda one: one.bytes, default=None), stopped
