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

import gc
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from axo.grid import AXES, Grid
from axo.perf import flops, memory, model, tesseract
from axo.perf.candidate import Candidate as Candidate
from axo.perf.candidate import MemoryOptions, impossible, needs, run_options, share_that_fits, variant, ways
from axo.perf.layer_time import RunOptions
from axo.perf.request import ALGORITHMS as ALGORITHMS
from axo.perf.request import Request as Request
from axo.perf.stage_search import consider_stages
from axo.perf.stages import Known
from axo.perf.workload import Workload

DAY = 86400.0
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
class GridPlan:
    """All grids, the fastest first; what is left out stands in ``left_out``."""

    request: Request
    ranked: list[Candidate]
    left_out: list[Candidate] = field(default_factory=list)

    @property
    def best(self) -> Candidate:
        return self.ranked[0]

    def workload(self, candidate: Candidate) -> Workload:
        """The model as a candidate runs it."""
        return variant(self.request.workload, candidate.recompute)

    def step_flops(
        self, candidate: Candidate | None = None, *, model_flops: bool = False, full_attention: bool = False
    ) -> float:
        """Hardware flops of one step (with recomputation), of the best candidate if none is given; or its model's."""
        one = candidate or self.best
        again = False if model_flops or one.run.selective else None
        workload, tokens = self.workload(one), self.request.batch_tokens
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
    known = Known(request.machine, request.workload)
    if "axonn" in request.algorithms:
        for stages in request.pipeline:
            if request.gpus % stages == 0:
                for grid in Grid.all(request.gpus // stages) if grids is None else grids:
                    yield consider(request, grid, stages, known)
    if "tesseract" in request.algorithms:
        for grid in tesseract.grids(request.gpus) if grids is None else grids:
            yield consider_tesseract(request, grid)


def consider(
    request: Request, grid: Grid, stages: int = 1, known: Known | None = None, tried: list[MemoryOptions] | None = None
) -> Candidate:
    """Predict one grid, or say why it is left out; with ``search`` the fastest way to run it.

    Args:
        stages: So many of these grids, one behind the other.
        known: What other grids of this request share with it; more is put in.
        tried: The ways that are tried; None: all of the request.
    """
    known = known or Known(request.machine, request.workload)
    tried = ways(request, grid) if tried is None else tried
    if stages > 1:
        return consider_stages(request, grid, stages, known, tried)
    reason = impossible(request, grid)
    if reason:
        return Candidate(grid, run_options(request), request.workload.checkpointed, reason=reason)
    best: Candidate | None = None
    nearest: Candidate | None = None
    sizes = _sizes(request, grid)
    floors: dict[tuple[object, ...], float] = {}  # what ways take at least: nothing is run again
    for way in tried:
        if best is not None and way[1:] not in floors:
            floors[way[1:]] = _floor(request, grid, way, sizes[0], known)
        found = None
        if best is None or floors[way[1:]] < best.seconds:
            found = _consider(request, grid, way, sizes, known, best)
        if found is None:
            continue
        assert found.memory is not None
        if not found.reason:
            best = found
        elif nearest is None or nearest.memory is None or found.memory.total < nearest.memory.total:
            nearest = found
    found = best or nearest
    assert found is not None
    return found


def _consider(
    request: Request, grid: Grid, way: MemoryOptions, sizes: list[tuple[int, int]], known: Known, best: Candidate | None
) -> Candidate | None:
    """Predict one way to run a grid with the fewest micro-batches that fit; with ``search`` with the fastest number.

    None: it is not faster than ``best``. What it takes at least is asked before what it needs: with all gathered
    weights kept. More micro-batches take no less than that, unless the rows of all of them are fewer: rows are
    rounded up, so 33 sequences are 64 in 32 micro-batches and 33 in 33.
    """
    workload = variant(request.workload, way.recompute != "none")
    share, most = _shares(request, grid)
    plain = run_options(request, way, cached_gathers=share)
    room = request.machine.memory_gib * memory.GIB
    limit, found, held = best, None, None
    run, rows = plain, 1
    slow = math.inf  # so many rows in all are not faster in more micro-batches
    for pieces, next_rows in sizes:
        if pieces * next_rows >= slow:
            continue
        if held is not None and (pieces, next_rows) != sizes[-1]:  # what is kept for backward goes with the rows
            kept = 0.999 * held.kept * next_rows / rows
            if (held.weights + held.optimizer + kept) * (1 + memory.SLACK) + memory.RESERVED > room:
                continue
        run, rows = replace(plain, micro_batches=pieces, rows=next_rows), next_rows
        if limit is not None and _seconds(request, workload, grid, run, most, known) >= limit.seconds:
            slow = pieces * rows
            continue
        held = known.memory(workload, grid, run)
        if not held.fits(request.machine):
            if held.state > room:  # nor will any other
                run = replace(plain, micro_batches=sizes[-1][0], rows=sizes[-1][1])
                held = known.memory(workload, grid, run)
                break
            continue
        if request.gather == "auto" and grid.z > 1:
            full = known.memory(workload, grid, replace(run, cached_gathers=1.0))
            run = replace(run, cached_gathers=share_that_fits(request, full, held))
            held = known.memory(workload, grid, run)
        time = model.predict(workload, grid, request.machine, run, known)
        if limit is None or time.total < limit.seconds:
            limit = found = Candidate(grid, run, workload.checkpointed, time, held)
        if not request.search:
            return found
        if run.cached_gathers == most:
            slow = pieces * rows
    if limit is not None:
        return found
    assert held is not None
    return Candidate(grid, run, workload.checkpointed, memory=held, reason=needs(request, held.total))


def _shares(request: Request, grid: Grid) -> tuple[float, float]:
    """The least and the most of the gathered weights that may be kept."""
    share = 1.0 if request.gather == "keep" else 0.0
    return share, 1.0 if request.gather == "auto" and grid.z > 1 else share


def _floor(request: Request, grid: Grid, way: MemoryOptions, size: tuple[int, int], known: Known) -> float:
    """Seconds that a way to run a grid takes at least: without recomputation, with the fewest micro-batches."""
    run = run_options(request, way._replace(recompute="none"), micro_batches=size[0], rows=size[1])
    return _seconds(request, variant(request.workload, False), grid, run, _shares(request, grid)[1], known)


def _seconds(request: Request, workload: Workload, grid: Grid, run: RunOptions, share: float, known: Known) -> float:
    if request.machine.gemms:  # a smaller product may have been measured at a higher rate: nothing is known
        return 0.0
    return model.predict(workload, grid, request.machine, replace(run, cached_gathers=share), known).total


def consider_tesseract(request: Request, grid: Grid) -> Candidate:
    """Predict one grid of Tesseract, with the fewest micro-batches that fit; or say why it is left out."""
    run = replace(run_options(request), zero=0, selective=False)
    found = Candidate(grid, run, request.workload.checkpointed, algorithm="tesseract")
    reason = tesseract.impossible(request.workload, grid, request.sequences, request.zero)
    if reason:
        return replace(found, reason=reason)
    held, sizes = None, tesseract.as_much_as(grid)
    for pieces, rows in _sizes(request, sizes):
        run = replace(run, micro_batches=pieces, rows=rows)
        held = memory.estimate(request.workload, sizes, run)
        if held.fits(request.machine):
            time = tesseract.predict(request.workload, grid, request.machine, run)
            return replace(found, run=run, time=time, memory=held)
    assert held is not None
    return replace(found, run=run, memory=held, reason=needs(request, held.total))


def _sizes(request: Request, grid: Grid) -> list[tuple[int, int]]:
    """Return 1, 2, 4, ... micro-batches, down to one sequence a rank; or the number that is asked for.

    Each with the rows of one data-parallel group and micro-batch.
    """
    sequences = -(-request.sequences // (grid.z * grid.data))
    counts = [max(1, min(request.micro_batches, sequences))]
    while counts[-1] < sequences and not request.micro_batches:
        counts.append(min(2 * counts[-1], sequences))
    return [(pieces, -(-sequences // pieces) * grid.z * request.workload.seq_length) for pieces in counts]


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
            if any(not impossible(request, grid) for grid in Grid.all(gpus)):
                found.append(gpus)
                break
            gpus += step
    biggest = 2 ** (request.sequences.bit_length() - 1)
    return found or [biggest]
