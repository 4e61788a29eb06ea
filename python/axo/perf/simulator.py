"""Run one step against the clock, event by event.

Every rank has a compute stream and a stream for each axis; a stream runs its operations (``step_operations``) in order,
each as soon as what it waits for is complete. While collectives of several axes of a rank are under way they share what
they share: those that leave the node its NICs, those inside it its links, in equal parts. Products lose the machine's
``contention`` while any collective runs beside them. A collective starts when all of its ranks have come to it.

Without stragglers all ranks do the same at the same time, and one stands for all. With them, ranks differ: two stand
for each axis larger than 1 (so 16 at most), each for the slowest of its share of the machine.

Time grows with the number of operations: layers x micro-batches x representatives, not with the number of GPUs.
Not here: other jobs on the network, and pipelining inside a collective.
"""

from __future__ import annotations

import heapq
import operator
import random
from dataclasses import dataclass, field, replace
from itertools import product
from statistics import NormalDist

from axo.grid import AXES, Grid
from axo.perf.chrome_trace import COMPUTE, Span
from axo.perf.layer_time import RunOptions
from axo.perf.machine import Machine
from axo.perf.step_operations import STREAMS, StepOperations, build
from axo.perf.workload import Workload

MOST_MICRO_BATCHES = 8  # simulated one by one; further ones repeat


@dataclass
class Simulation:
    """What happened in one step.

    Args:
        seconds: From the start to the end of the optimizer.
        exposed: Seconds by axis in which the compute stream of rank 0 stood still for that axis.
        busy: Seconds by stream in which it ran something, on rank 0.
        spans: Every operation of every representative; ``rank`` is its place in ``ranks``, 0 s the start of the step.
        memory: (seconds, bytes held) on rank 0, in time order.
        ranks: Grid ranks of the representatives.
        micro_batches: How many were simulated; where there are more, ``seconds``, ``exposed`` and ``busy`` count the
            rest as the last ones simulated, and ``spans`` and ``memory`` show only these.
    """

    seconds: float
    exposed: dict[str, float]
    busy: dict[str, float]
    spans: list[Span] = field(repr=False)
    memory: list[tuple[float, float]] = field(repr=False)
    ranks: list[int] = field(default_factory=lambda: [0])
    micro_batches: int = 1

    @property
    def peak_memory(self) -> float:
        """Bytes at the fullest moment on rank 0."""
        return max(held for _, held in self.memory)


def simulate(
    workload: Workload, grid: Grid, machine: Machine, run: RunOptions, *, straggle: float = 0.0, seed: int = 0
) -> Simulation:
    """Simulate one step.

    Args:
        straggle: Standard deviation of the ranks' speeds (0.02: two percent); 0: all alike.
        seed: For drawing the ranks' speeds.

    Raises:
        ValueError: ``straggle`` is not between 0 and 1.
    """
    if not 0 <= straggle < 1:
        raise ValueError(f"simulate: straggle={straggle!r} is not between 0 and 1; 0.02 means two percent")
    if run.micro_batches > MOST_MICRO_BATCHES:
        return _extrapolate(workload, grid, machine, run, straggle, seed)
    step = build(workload, grid, machine, run)
    places = list(product(*((0, 1) if straggle and grid.size(axis) > 1 else (0,) for axis in AXES)))
    slowness = _slowness(len(places), grid.world_size / len(places), straggle, seed)
    found = _Clock(step, machine.contention, places, slowness, grid).run()
    found.micro_batches = run.micro_batches
    return found


def _extrapolate(
    workload: Workload, grid: Grid, machine: Machine, run: RunOptions, straggle: float, seed: int
) -> Simulation:
    """Simulate a few micro-batches and count the rest as the second half of them."""
    few, half = MOST_MICRO_BATCHES, MOST_MICRO_BATCHES // 2
    rows = run.group_rows(grid)
    shorter, found = (
        simulate(workload, grid, machine, replace(run, micro_batches=n, rows=rows), straggle=straggle, seed=seed)
        for n in (half, few)
    )
    more = (run.micro_batches - few) / (few - half)
    found.seconds += more * (found.seconds - shorter.seconds)
    for counted, less in ((found.exposed, shorter.exposed), (found.busy, shorter.busy)):
        for stream in counted:
            counted[stream] += more * (counted[stream] - less[stream])
    return found


def _slowness(count: int, each: float, straggle: float, seed: int) -> list[float]:
    """Return by how much each representative is slowed: it is the slowest of ``each`` ranks."""
    if not straggle:
        return [1.0] * count
    draw, normal = random.Random(seed), NormalDist()
    return [max(0.5, 1.0 + straggle * normal.inv_cdf(draw.random() ** (1.0 / max(1.0, each)))) for _ in range(count)]


class _Running:
    __slots__ = ("left", "number", "ranks", "rate", "since", "start", "stream", "version")

    def __init__(self, number: int, ranks: tuple[int, ...], stream: str, seconds: float, now: float) -> None:
        self.number, self.ranks, self.stream, self.left = number, ranks, stream, seconds
        self.rate, self.since, self.start, self.version = 0.0, now, now, 0


class _Clock:
    """The event loop."""

    def __init__(
        self,
        step: StepOperations,
        contention: float,
        places: list[tuple[int, ...]],
        slowness: list[float],
        grid: Grid,
    ) -> None:
        self.step, self.operations, self.contention = step, step.operations, contention
        self.places, self.slowness, self.grid = places, slowness, grid
        count = len(places)
        self.queues = {stream: [i for i, o in enumerate(self.operations) if o.stream == stream] for stream in STREAMS}
        self.next = [dict.fromkeys(STREAMS, 0) for _ in range(count)]
        self.done = [bytearray(len(self.operations)) for _ in range(count)]
        self.active: list[dict[str, _Running]] = [{} for _ in range(count)]
        self.arrived: dict[tuple[int, tuple[int, ...]], int] = {}
        self.came = [dict.fromkeys(STREAMS, -1) for _ in range(count)]
        self.heap: list[tuple[float, int, int, _Running]] = []
        self.ticket = 0
        self.now = 0.0
        self.spans: list[Span] = []
        self.peers = {axis: [self._peers(rank, i) for rank in range(count)] for i, axis in enumerate(AXES)}

    def _peers(self, rank: int, axis: int) -> tuple[int, ...]:
        """Representatives that differ from ``rank`` on this axis only."""
        here = self.places[rank]
        return tuple(
            other
            for other, place in enumerate(self.places)
            if place[:axis] + place[axis + 1 :] == here[:axis] + here[axis + 1 :]
        )

    def run(self) -> Simulation:
        for rank in range(len(self.places)):
            self._wake(rank)
        while self.heap:
            when, _, version, running = heapq.heappop(self.heap)
            if version != running.version:
                continue
            self.now = when
            self._finish(running)
        left = [o.name for rank in self.done for o, done in zip(self.operations, rank, strict=True) if not done]
        assert not left, f"simulator: {len(left)} operations never ran, the first is {left[0]}"
        return self._result()

    def _wake(self, rank: int) -> None:
        """Start what can start on ``rank``."""
        for stream in STREAMS:
            if stream in self.active[rank]:
                continue
            queue, position = self.queues[stream], self.next[rank][stream]
            if position == len(queue):
                continue
            number = queue[position]
            done = self.done[rank]
            if all(done[other] for other in self.operations[number].after):
                self._arrive(rank, stream, number)

    def _arrive(self, rank: int, stream: str, number: int) -> None:
        if self.came[rank][stream] == number:
            return
        self.came[rank][stream] = number
        ranks = (rank,) if stream == COMPUTE else self.peers[stream][rank]
        if len(ranks) > 1:
            key = (number, ranks)
            self.arrived[key] = self.arrived.get(key, 0) + 1
            if self.arrived[key] < len(ranks):
                return
        seconds = self.operations[number].seconds
        if stream == COMPUTE:
            seconds *= self.slowness[rank]
        running = _Running(number, ranks, stream, seconds, self.now)
        for member in ranks:
            self.active[member][stream] = running
        self._rates(ranks, running)

    def _rates(self, ranks: tuple[int, ...], fresh: _Running | None = None) -> None:
        """Give everything that runs on these ranks its new share; ``fresh`` has none yet."""
        seen: list[_Running] = [] if fresh is None else [fresh]
        for rank in ranks:
            seen += [running for running in self.active[rank].values() if running not in seen]
        for running in seen:
            rate = min(self._rate(rank, running.stream) for rank in running.ranks)
            if rate == running.rate:
                continue
            running.left -= running.rate * (self.now - running.since)
            running.since, running.rate = self.now, rate
            running.version += 1
            self.ticket += 1
            end = self.now + max(0.0, running.left) / rate
            heapq.heappush(self.heap, (end, self.ticket, running.version, running))

    def _rate(self, rank: int, stream: str) -> float:
        active = self.active[rank]
        if stream == COMPUTE:
            return 1.0 if len(active) == 1 else 1.0 - self.contention
        shared = self.step.shared
        return 1.0 / sum(1 for other in active if other != COMPUTE and shared[other] == shared[stream])

    def _finish(self, running: _Running) -> None:
        name = self.operations[running.number].name
        for rank in running.ranks:
            del self.active[rank][running.stream]
            self.next[rank][running.stream] += 1
            self.done[rank][running.number] = 1
            self.spans.append(Span(running.stream, name, running.start, self.now, rank))
        self._rates(running.ranks)
        for rank in running.ranks:
            self._wake(rank)

    def _result(self) -> Simulation:
        mine = [span for span in self.spans if span.rank == 0]
        busy = {s: sum(span.end - span.start for span in mine if span.stream == s) for s in STREAMS}
        ran: dict[int, Span] = {}  # by operation: both are in the order of their streams
        for stream, queue in self.queues.items():
            ran.update(zip(queue, (span for span in mine if span.stream == stream), strict=True))
        exposed = _exposed(self.step, ran, self.queues)
        last = [self.grid.size(axis) - 1 for axis in AXES]
        ranks = [self.grid.rank(*map(operator.mul, last, place)) for place in self.places]
        return Simulation(self.now, exposed, busy, self.spans, _memory(self.step, ran), ranks)


def _exposed(step: StepOperations, ran: dict[int, Span], queues: dict[str, list[int]]) -> dict[str, float]:
    """Charge every gap of the compute stream to the axes on its critical path, going back from the end of the gap.

    What made an operation wait is the latest of what it waits for and of what stood before it in its stream; from there
    to its start it waited for other ranks.
    """
    previous = {queue[i]: queue[i - 1] for queue in queues.values() for i in range(1, len(queue))}
    exposed = dict.fromkeys(AXES, 0.0)
    before = 0.0
    for number in queues[COMPUTE]:
        current, end = number, ran[number].start
        while end > before:
            waits = step.operations[current].after
            if current in previous:
                waits += (previous[current],)
            if not waits:
                break
            current = max(waits, key=lambda other: ran[other].end)
            span = ran[current]
            if span.stream == COMPUTE:
                break
            start = max(before, min(end, span.start))
            exposed[span.stream] += end - start
            end = start
        before = max(before, ran[number].end)
    return exposed


def _memory(step: StepOperations, ran: dict[int, Span]) -> list[tuple[float, float]]:
    """Add up what operations take when they start and free when they end."""
    changes = []
    for number, operation in enumerate(step.operations):
        if operation.takes:
            changes.append((ran[number].start, operation.takes))
        if operation.frees:
            changes.append((ran[number].end, -operation.frees))
    held = step.held
    curve = [(0.0, held)]
    for when, change in sorted(changes, key=lambda entry: entry[0]):
        held += change
        curve.append((when, held))
    return curve
