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

It measures nothing and knows no network weather; ``axo.perf.simulator`` looks at one grid more closely.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from axo.grid import AXES, Grid
from axo.perf import flops, memory, model, tesseract
from axo.perf import pipeline_schedule as schedules
from axo.perf.layer_time import PRECISIONS, LayerCost, Run
from axo.perf.request import ALGORITHMS as ALGORITHMS
from axo.perf.request import Request as Request
from axo.perf.stages import Known, Stages, Timing
from axo.perf.workload import Workload

DAY = 86400.0
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
SIZES_TRIED = 2  # of micro-batches of stages, the smallest first
CACHE_LIMIT = 0.9  # of a GPU's memory may be filled with weights kept for their second use


@dataclass(frozen=True)
class Candidate:
    """One grid: its prediction, or the reason why it is left out. ``recompute``: blocks run again in backward."""

    grid: Grid
    run: Run
    recompute: bool
    time: model.StepTime | None = None
    memory: memory.Memory | None = None
    reason: str = ""
    algorithm: str = "axonn"
    stages: Stages | None = None

    @property
    def name(self) -> str:
        """The grid, with its stages where there are several, and the algorithm where that is not axonn."""
        if self.stages is not None:
            return f"{self.grid} x {self.stages.ranks} stages, {self.stages.schedule}"
        return str(self.grid) if self.algorithm == "axonn" else f"{self.grid} {self.algorithm}"

    @property
    def recomputes(self) -> str:
        """``"none"``, ``"selective"`` or ``"full"``."""
        return ("selective" if self.run.selective else "full") if self.recompute else "none"

    @property
    def seconds(self) -> float:
        """Predicted time of a step; of a candidate that fits."""
        assert self.time is not None
        return self.time.total

    @property
    def exposed(self) -> float:
        """Predicted time of a step in which nothing but communication happens; of a candidate that fits."""
        assert self.time is not None
        return self.time.exposed_total


@dataclass(frozen=True)
class Plan:
    """All grids, the fastest first; what is left out stands in ``left_out``."""

    request: Request
    ranked: list[Candidate]
    left_out: list[Candidate] = field(default_factory=list)

    @property
    def best(self) -> Candidate:
        return self.ranked[0]

    def workload(self, candidate: Candidate) -> Workload:
        """The model as a candidate runs it."""
        return _variant(self.request.workload, candidate.recompute)

    def step_flops(self, candidate: Candidate | None = None) -> float:
        """Hardware flops of one step (with recomputation), of the best candidate if none is given."""
        one = candidate or self.best
        again = False if one.run.selective else None
        return flops.step_flops(self.workload(one), self.request.batch_tokens, recompute=again)

    def percent_of_peak(
        self, candidate: Candidate, *, model_flops: bool = False, full_attention: bool = False
    ) -> float:
        """Return HFU in percent of the advertised peak; ``model_flops``: MFU; ``full_attention``: as in ``flops``."""
        work = flops.step_flops(
            self.workload(candidate),
            self.request.batch_tokens,
            recompute=False if model_flops or candidate.run.selective else None,
            full_attention=full_attention,
        )
        return 100 * work / candidate.seconds / (self.request.gpus * self.request.machine.peak_tflops * 1e12)

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

    def why(self, candidate: Candidate) -> str:
        """Say in one sentence where the time of a candidate goes and what stands between it and the best."""
        if candidate.time is None:
            return f"{candidate.name} is left out: {candidate.reason}."
        time = candidate.time
        worst = max(AXES, key=lambda axis: time.exposed[axis])
        hidden = sum(time.communication.values()) - time.exposed_total
        traffic = _TRAFFIC if candidate.algorithm == "axonn" else _TESSERACT_TRAFFIC
        text = f"{candidate.name}: products take {100 * time.compute / time.total:.0f}% of {seconds_text(time.total)}"
        if time.exposed_total > 0:
            text += f"; {seconds_text(time.exposed_total)} of communication show, most on {worst} ({traffic[worst]})"
        if hidden > 0.005 * time.total:
            text += f", {seconds_text(hidden)} hide behind products"
        if candidate.stages is not None:
            text += f"; stages wait {seconds_text(time.bubble)} for each other ({100 * time.bubble / time.total:.0f}%)"
        best = self.best
        if best is candidate:
            if len(self.ranked) > 1:
                second = self.ranked[1]
                text += f"; {second.name} comes next at {100 * (second.seconds / time.total - 1):+.1f}%"
            return text + "."
        assert best.time is not None
        lost = {f"exposed {axis}": time.exposed[axis] - best.time.exposed[axis] for axis in AXES}
        lost["products"] = time.compute - best.time.compute
        lost["products slowed by hidden communication"] = time.contention - best.time.contention
        lost["stages that wait"] = time.bubble - best.time.bubble
        cause = max(lost, key=lambda name: lost[name])
        return f"{text}; {100 * (time.total / best.time.total - 1):+.1f}% against {best.name}, most of it {cause}."


def seconds_text(seconds: float) -> str:
    """A time in words: ``1.25 s``, ``3.21 ms``."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def plan(request: Request, grids: Iterable[Grid] | None = None) -> Plan:
    """Rank all grids of the request (or only ``grids``).

    Raises:
        ValueError: No grid is possible; the message says what would make one possible.
    """
    ranked: list[Candidate] = []
    left_out: list[Candidate] = []
    known = Known()
    if "axonn" in request.algorithms:
        for stages in request.pipeline:
            if request.gpus % stages:
                continue
            for grid in Grid.all(request.gpus // stages) if grids is None else grids:
                candidate = consider(request, grid, stages, known)
                (left_out if candidate.reason else ranked).append(candidate)
    if "tesseract" in request.algorithms:
        for grid in tesseract.grids(request.gpus) if grids is None else grids:
            candidate = consider_tesseract(request, grid)
            (left_out if candidate.reason else ranked).append(candidate)
    if not ranked and not left_out and "axonn" in request.algorithms:
        raise ValueError(f"plan: pipeline={request.pipeline} stages do not divide {request.gpus} GPUs")
    if not ranked and not left_out:
        raise ValueError(
            f"plan: {request.gpus} GPUs have no grid for tesseract, which needs x = y above 1, so a square"
        )
    if not ranked:
        raise ValueError(_nothing_fits(request, left_out))
    ranked.sort(key=lambda candidate: (candidate.seconds, candidate.grid.x, candidate.grid.y, candidate.grid.z))
    return Plan(request, ranked, left_out)


def _variant(workload: Workload, recompute: bool) -> Workload:
    return workload if workload.checkpointed == recompute else workload.otherwise


def consider(request: Request, grid: Grid, stages: int = 1, known: Known | None = None) -> Candidate:
    """Predict one grid, or say why it is left out; with ``search`` the fastest way to run it.

    Args:
        stages: So many of these grids, one behind the other.
        known: What other grids of this request share with it; more is put in.
    """
    known = known or Known()
    if stages > 1:
        return _consider_stages(request, grid, stages, known)
    if not request.search:
        return _consider(request, grid, known)
    costs: dict[tuple[int, int], LayerCost] = {}
    found = _ways(request, grid, known, costs)
    fitting = [one for one in found if not one.reason]
    best = min(fitting, key=lambda one: one.seconds, default=None)
    if best is None and found[0].memory is None:  # neither memory nor speed: the grid itself is impossible
        return found[0]
    if not request.offload and _offload_may_win(request, grid, best, costs):
        found += _ways(replace(request, offload=True), grid, known, costs)
        best = min((one for one in found if not one.reason), key=lambda one: one.seconds, default=None)
    return best or min(found, key=lambda one: one.memory.total if one.memory else 0.0)


def _ways(request: Request, grid: Grid, known: Known, costs: dict[tuple[int, int], LayerCost]) -> list[Candidate]:
    """Every way of recomputation and ZeRO to run one grid, each with its best micro-batches."""
    found: list[Candidate] = []
    for recompute, selective in ((False, False), (True, True), (True, False)):
        for zero in _stages_of_zero(request, grid):
            workload = _variant(request.workload, recompute)
            asked = replace(request, workload=workload, zero=zero, search=False, selective=selective)
            found.append(_consider(asked, grid, known, further=2, costs=costs))
            if found[-1].reason and found[-1].memory is None:
                return found
    return found


def _offload_may_win(
    request: Request, grid: Grid, best: Candidate | None, costs: dict[tuple[int, int], LayerCost]
) -> bool:
    """Whether a step with the optimizer in the host's memory may be faster than ``best``, which has it on the GPU.

    All else alike it is slower, so it has to save recomputation, gathers or micro-batches: it takes no less than a step
    of one micro-batch without recomputation that keeps every gathered weight.
    """
    if best is None:
        return True
    workload = _variant(request.workload, False)
    zero = 2 if grid.data > 1 else 0
    run = next(_runs(replace(request, offload=True, zero=zero, gather="keep", micro_batches=1), grid))
    return model.predict(workload, grid, request.machine, run, costs).total < best.seconds


def _stages_of_zero(request: Request, grid: Grid) -> tuple[int, ...]:
    """Those that a search tries: 2 takes no longer than 1, and less memory; what the host updates is always cut."""
    if grid.data == 1:
        return (0,)
    return (2,) if request.offload else (0, 2)


def _consider(
    request: Request,
    grid: Grid,
    known: Known,
    further: int = 0,
    costs: dict[tuple[int, int], LayerCost] | None = None,
) -> Candidate:
    """Predict one grid with the fewest micro-batches that fit, or the best of up to ``further`` more doublings."""
    recompute = request.workload.checkpointed
    run = _run(request)
    reason = _impossible(request, grid)
    if reason:
        return Candidate(grid, run, recompute, reason=reason)
    held, best, rows = None, None, 1
    runs = list(_runs(request, grid))
    room = request.machine.memory_gib * memory.GIB
    for run in runs:
        if held is not None and run is not runs[-1]:  # what is kept for backward goes with the rows
            kept = 0.999 * held.kept * run.rows / rows
            if (held.weights + held.optimizer + kept) * (1 + memory.SLACK) + memory.RESERVED > room:
                continue
        held, rows = known.memory(request.workload, grid, run), run.rows
        if not held.fits(request.machine):
            if held.state > room:  # nor will any other
                run = runs[-1]
                held = known.memory(request.workload, grid, run)
                break
            continue
        if request.gather == "auto" and grid.z > 1:
            full = known.memory(request.workload, grid, replace(run, cached_gathers=1.0))
            run = replace(run, cached_gathers=_share_that_fits(request, full, held))
            held = known.memory(request.workload, grid, run)
        network = known.network(request.machine, grid)
        time = model.predict(request.workload, grid, request.machine, run, costs, network)
        if best is None or time.total < best.seconds:
            best = Candidate(grid, run, recompute, time, held)
        if further == 0 or run.cached_gathers == 1.0 or grid.z == 1:
            return best
        further -= 1
    if best is not None:
        return best
    assert held is not None
    need = f"needs {held.total / memory.GIB:.1f} of {request.machine.memory_gib:g} GiB a GPU"
    return Candidate(grid, run, recompute, memory=held, reason=need)


def _consider_stages(request: Request, grid: Grid, ranks: int, known: Known) -> Candidate:
    """Predict one grid with ``ranks`` stages of it: the fastest of its schedules and micro-batches that fits."""
    run = _run(request)
    none = Candidate(grid, run, request.workload.checkpointed, stages=Stages(ranks, request.schedules[0], (0, 0)))
    reason, sizes = _impossible(request, grid), list[int]()
    if not reason:
        reason, sizes = _pieces(request, grid, ranks)
    if reason:
        return replace(none, reason=reason)
    least = _state(request, grid, ranks)
    if not least.fits(request.machine):
        need = f"needs more than {least.total / memory.GIB:.1f} of {request.machine.memory_gib:g} GiB a GPU"
        return replace(none, memory=least, reason=need)
    tried: list[Way] = []
    ways = ((False, False), (True, True), (True, False)) if request.search else None
    for recompute, selective in ways or ((request.workload.checkpointed, request.selective),):
        workload = _variant(request.workload, recompute)
        for pieces in sizes:
            share = 0.0 if request.gather == "drop" or grid.z == 1 else 1.0
            rows = request.sequences // pieces // grid.data * workload.seq_length
            run = replace(run, selective=selective, micro_batches=pieces, rows=rows, cached_gathers=share)
            timing = Timing(workload, grid, request.machine, run, known)
            for zero in _stages_of_zero(request, grid) if request.search else (request.zero,):
                timing = timing.with_state(zero, offload=request.offload)
                for schedule in request.schedules:
                    if recompute and schedules.known(schedule).splits:
                        continue
                    try:
                        schedules.check(schedule, pieces, ranks)
                        tried.append(Way(timing, known.planned(workload, ranks, schedule)))
                    except ValueError as error:
                        reason = str(error)
    if not tried:
        return replace(none, reason=reason or "recomputation where backward is split is not planned")
    seconds: dict[int, float] = {}
    fastest = _fastest_that_fits(request, tried, known, seconds)
    if request.search and not request.offload:
        zero, every = (2 if grid.data > 1 else 0), list[Way]()
        for number, way in enumerate(tried):  # all else alike a step is slower when the host updates
            slower = fastest is not None and seconds.get(number, 0.0) >= fastest.seconds
            if way.timing.run.zero == zero and not slower:
                every.append(Way(way.timing.with_state(zero, offload=True), way.stages))
        other = _fastest_that_fits(request, every, known, {})
        fastest = min((one for one in (fastest, other) if one), key=lambda one: one.seconds, default=None)
        tried += every
    return fastest or _lacks_least(request, tried, known)


class Way(NamedTuple):
    """One way to run a grid with stages."""

    timing: Timing
    stages: Stages

    def candidate(self) -> Candidate:
        """Predict it."""
        timing = self.timing
        time = timing.predict(self.stages)
        return Candidate(timing.grid, timing.run, timing.workload.checkpointed, time, stages=self.stages)

    def fitted(self, request: Request, one: Candidate, known: Known) -> Candidate:
        """``one``, its candidate, with its memory; where that is too much, with as many gathered weights as fit."""
        held = self.timing.memory(self.stages)
        if held.fits(request.machine) or request.gather != "auto" or not one.run.cached_gathers:
            return replace(one, memory=held)

        def keeping(share: float) -> tuple[Timing, memory.Memory]:
            run = replace(one.run, cached_gathers=share)
            timing = Timing(self.timing.workload, one.grid, request.machine, run, known)
            return timing, timing.memory(self.stages)

        timing, none = keeping(0.0)
        share = _share_that_fits(request, held, none)
        timing, held = keeping(share) if share else (timing, none)
        return replace(one, run=timing.run, time=timing.predict(self.stages), memory=held)


def _fastest_that_fits(request: Request, tried: list[Way], known: Known, seconds: dict[int, float]) -> Candidate | None:
    """The fastest that fits, with as many gathered weights kept as fit. None: none does.

    What cannot fit by ``Timing.least`` is not looked at closely; of the others, by their place in ``tried``, the
    predicted times are put into ``seconds``.
    """
    room = request.machine.memory_gib * memory.GIB
    may = {i: way.candidate() for i, way in enumerate(tried) if way.timing.least(way.stages) <= room}
    seconds.update((number, one.seconds) for number, one in may.items())
    for number, one in sorted(may.items(), key=lambda each: each[1].seconds):
        way = tried[number]
        found = way.fitted(request, one, known)
        assert found.memory is not None
        if found.memory.fits(request.machine):
            return found
    return None


def _lacks_least(request: Request, tried: list[Way], known: Known) -> Candidate:
    """Of ways that do not fit the one that needs least, and of those that need the same the fastest."""
    every = [(way.timing.least(way.stages), way, way.candidate()) for way in tried]
    every.sort(key=lambda each: each[2].seconds)
    nearest: tuple[float, int, Candidate] | None = None
    for number, (size, way, one) in sorted(enumerate(every), key=lambda each: each[1][0]):
        if nearest is not None and size > nearest[0]:
            break
        found = way.fitted(request, one, known)
        assert found.memory is not None
        if nearest is None or (found.memory.total, number) < nearest[:2]:
            nearest = found.memory.total, number, found
    assert nearest is not None
    need = f"needs {nearest[0] / memory.GIB:.1f} of {request.machine.memory_gib:g} GiB a GPU"
    return replace(nearest[2], time=None, reason=need)


def _run(request: Request) -> Run:
    """The options of a request that hold for every grid."""
    sizes, overlap = PRECISIONS[request.precision], request.overlap
    run = Run(request.batch_tokens, sizes["itemsize"], sizes["stream"], sizes["weights"], overlap, zero=request.zero)
    return replace(run, selective=request.selective, offload=request.offload)


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


def _share_that_fits(request: Request, full: memory.Memory, held: memory.Memory) -> float:
    """Which share of gathered weights can be kept, in hundredths, when all need ``full`` and none ``held``."""
    extra, free = full.total - held.total, CACHE_LIMIT * request.machine.memory_gib * memory.GIB - held.total
    return 1.0 if extra <= max(0.0, free) else max(0, int(100 * free / extra)) / 100


def consider_tesseract(request: Request, grid: Grid) -> Candidate:
    """Predict one grid of Tesseract, with the fewest micro-batches that fit; or say why it is left out."""
    run = replace(_run(request), zero=0, selective=False)
    found = Candidate(grid, run, request.workload.checkpointed, algorithm="tesseract")
    reason = tesseract.impossible(request.workload, grid, request.sequences, request.zero)
    if reason:
        return replace(found, reason=reason)
    held, sizes = None, tesseract.as_much_as(grid)
    for run in _runs(replace(request, gather="drop"), sizes):
        held = memory.estimate(request.workload, sizes, run)
        if held.fits(request.machine):
            time = tesseract.predict(request.workload, grid, request.machine, run)
            return replace(found, run=run, time=time, memory=held)
    assert held is not None
    need = f"needs {held.total / memory.GIB:.1f} of {request.machine.memory_gib:g} GiB a GPU"
    return replace(found, run=run, memory=held, reason=need)


def _impossible(request: Request, grid: Grid) -> str:
    if grid.z * grid.data > request.sequences:
        return f"z*data={grid.z * grid.data} is more than the {request.sequences} sequences of the batch"
    return request.workload.misfit(grid)


def _runs(request: Request, grid: Grid) -> Iterator[Run]:
    """Yield runs of 1, 2, 4, ... micro-batches, down to one sequence a rank; or of the number that is asked for."""
    share = 1.0 if request.gather == "keep" else 0.0
    sequences = -(-request.sequences // (grid.z * grid.data))
    pieces, run = max(1, min(request.micro_batches, sequences)), _run(request)
    while True:
        rows = -(-sequences // pieces) * grid.z * request.workload.seq_length
        yield replace(run, cached_gathers=share, micro_batches=pieces, rows=rows)
        if pieces >= sequences or request.micro_batches:
            return
        pieces = min(2 * pieces, sequences)


def _nothing_fits(request: Request, left_out: list[Candidate]) -> str:
    """Say what stood in the way of every grid, and the nearest way out."""
    head = f"plan: no grid of {request.gpus} GPUs can train {request.workload.name} on {request.machine.name}"
    short = [candidate for candidate in left_out if candidate.memory is not None]
    if short:
        nearest = min(short, key=lambda candidate: candidate.memory.total if candidate.memory else 0.0)
        needed = nearest.memory.total / memory.GIB if nearest.memory else 0.0
        return (
            f"{head}: not enough memory; the nearest miss is {nearest.grid}, which {nearest.reason}; use"
            f" {_more_gpus(request)}GPUs of at least {needed:.0f} GiB"
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
    gpus = request.gpus
    while gpus < 2**17:
        gpus *= 2
        larger = replace(request, gpus=gpus)
        if any(not consider(larger, grid).reason for grid in Grid.all(gpus)):
            return f"{gpus} GPUs, or "
    return ""


def _possible_counts(request: Request) -> list[int]:
    """Return the nearest numbers of GPUs below and above that divide the model and the batch."""
    found = []
    for step in (-1, 1):
        gpus = request.gpus + step
        for _ in range(64):
            if gpus < 1:
                break
            if any(not _impossible(request, grid) for grid in Grid.all(gpus)):
                found.append(gpus)
                break
            gpus += step
    biggest = 2 ** (request.sequences.bit_length() - 1)
    return found or [biggest]
