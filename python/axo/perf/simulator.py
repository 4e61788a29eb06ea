"""One step of a grid, operation by operation, against the clock.

A rank has a compute stream and one stream for each axis. All ranks do the same at the same time, so one stands for all.
In the order in which the engine issues them, with every overlap on:

    forward     the first gather of a block issues those of the next block too (OAG); outputs are all-reduced at once
    backward    a recomputed block runs forward again first; all-reduce of dI beside the dW product (OAR);
                reduce-scatters of dW follow behind on z and nothing waits for them before the end (ORS)
    end         of each micro-batch: all-reduces over data, layer by layer; then the optimizer

Switched off, each is waited for where it is issued. Times of single operations come from ``axo.perf.layer_time``; with
stages, whole micro-batches are the operations (``axo.perf.pipeline_schedule``).
Not here: other jobs on the network, and pipelining inside a collective.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from axo.grid import AXES, Grid
from axo.perf import clock
from axo.perf.chrome_trace import COMPUTE, Span
from axo.perf.clock import Operation
from axo.perf.layer_time import Costs, LayerCost, data_seconds, optimizer_seconds
from axo.perf.layers import Layer, LinearKind, LossKind, NormKind
from axo.perf.machine import Machine
from axo.perf.run_options import RunOptions
from axo.perf.workload import Workload

MOST_MICRO_BATCHES = 8  # simulated one by one; further ones repeat


@dataclass
class Simulation:
    """What happened in one step.

    Args:
        seconds: From the start to the end of the optimizer.
        exposed: Seconds by axis in which the compute stream stood still for that axis.
        busy: Seconds by stream in which it ran something.
        spans: Every operation, 0 s the start of the step.
        micro_batches: How many were simulated; where there are more, ``seconds``, ``exposed`` and ``busy`` count the
            rest as the last ones simulated, and ``spans`` show only these.
    """

    seconds: float
    exposed: dict[str, float]
    busy: dict[str, float]
    spans: list[Span] = field(repr=False)
    micro_batches: int = 1


def simulate(workload: Workload, grid: Grid, machine: Machine, run: RunOptions) -> Simulation:
    """Simulate one step."""
    if run.micro_batches > MOST_MICRO_BATCHES:
        return _extrapolate(workload, grid, machine, run)
    step = operations(workload, grid, machine, run)
    spans = clock.run(step, {axis: machine.crosses_nodes(grid, axis) for axis in AXES}, machine.contention)
    busy = {s: sum(span.end - span.start for span in spans if span.stream == s) for s in (COMPUTE, *AXES)}
    return Simulation(max(span.end for span in spans), _exposed(step, spans), busy, spans, run.micro_batches)


def _extrapolate(workload: Workload, grid: Grid, machine: Machine, run: RunOptions) -> Simulation:
    """Simulate a few micro-batches and count the rest as the second half of them."""
    few, half, rows = MOST_MICRO_BATCHES, MOST_MICRO_BATCHES // 2, run.group_rows(grid)
    shorter, longer = (simulate(workload, grid, machine, run._replace(micro_batches=n, rows=rows)) for n in (half, few))
    more = (run.micro_batches - few) / (few - half)
    longer.seconds += more * (longer.seconds - shorter.seconds)
    for counted, less in ((longer.exposed, shorter.exposed), (longer.busy, shorter.busy)):
        for stream in counted:
            counted[stream] += more * (counted[stream] - less[stream])
    return longer


def _exposed(step: list[Operation], spans: list[Span]) -> dict[str, float]:
    """Charge every gap of the compute stream to the axes on its critical path, going back from the end of the gap.

    What made an operation wait is the latest of what it waits for and of what stood before it in its stream.
    """
    before: dict[int, int] = {}  # of each operation: the one before it in its stream
    last: dict[str, int] = {}
    for number, operation in enumerate(step):
        if operation.stream in last:
            before[number] = last[operation.stream]
        last[operation.stream] = number
    exposed, done = dict.fromkeys(AXES, 0.0), 0.0
    for number, operation in enumerate(step):
        if operation.stream != COMPUTE:
            continue
        current, end = number, spans[number].start
        while end > done:
            waits = [*step[current].after, *([before[current]] if current in before else [])]
            current = max(waits, key=lambda other: spans[other].end)
            span = spans[current]
            if span.stream == COMPUTE:
                break
            start = max(done, min(end, span.start))
            exposed[span.stream] += end - start
            end = start
        done = max(done, spans[number].end)
    return exposed


def operations(workload: Workload, grid: Grid, machine: Machine, run: RunOptions) -> list[Operation]:
    """Return the operations of one step of ``workload`` on ``grid``, in the order in which they are issued."""
    step = _StepBuilder(workload, grid, machine, run)
    numbers = range(len(step.blocks))
    for _ in range(run.micro_batches):
        step.begin_pass({number: step.gathers(number) for number in numbers}, "forward")
        for number in numbers:
            step.forward(number, "forward")
        step.begin_pass({number: step.backward_gathers(number) for number in reversed(numbers)}, "backward")
        for number in reversed(numbers):
            if step.blocks[number].reruns(run):
                step.forward(number, "recompute")
            step.backward(number)
        step.reduce()
    step.finish()
    return step.operations


class _StepBuilder:
    """Collects operations; ``path``: what the next one on the path of the step waits for."""

    def __init__(self, workload: Workload, grid: Grid, machine: Machine, run: RunOptions) -> None:
        self.workload, self.grid, self.machine, self.run = workload, grid, machine, run
        self.costs, self.rows = Costs(machine, workload.seq_length), run.group_rows(grid)
        self.network, self.blocks = self.costs.network(grid), list(workload.unrolled())
        self.cached = round(run.cached_gathers * len(self.blocks))  # the first ones keep their gathered weights
        self.operations: list[Operation] = []
        self.path: tuple[int, ...] = ()
        self.asked: dict[int, list[int]] = {}  # in this pass: by block, the layers whose weights are gathered, in order
        self.phase = ""
        self.issued: dict[tuple[int, int], tuple[int, ...]] = {}
        self.gradients: list[tuple[str, float, tuple[int, ...]]] = []  # name, seconds over data, what they wait for

    def add(self, name: str, stream: str, seconds: float, after: tuple[int, ...]) -> tuple[int, ...]:
        self.operations.append(Operation(name, stream, seconds, after))
        return (len(self.operations) - 1,)

    def cost(self, layer: Layer) -> LayerCost:
        return self.costs.layer(layer, self.grid, self.rows, self.run)

    def gathers(self, number: int) -> list[int]:
        return [place for place, layer in enumerate(self.blocks[number].layers) if self.cost(layer).gather]

    def backward_gathers(self, number: int) -> list[int]:
        block = self.blocks[number]
        if number < self.cached:
            return []
        if block.reruns(self.run):  # what it gathers again serves its backward
            return self.gathers(number)
        return [place for place in reversed(self.gathers(number)) if isinstance(block.layers[place], LinearKind)]

    def begin_pass(self, asked: dict[int, list[int]], phase: str) -> None:
        self.asked, self.phase, self.issued = {number: places for number, places in asked.items() if places}, phase, {}

    def gathered(self, number: int, place: int) -> tuple[int, ...]:
        """Wait for the gather of a weight. With OAG it is issued with the block before, whose first gather does it."""
        wanted = [(number, place)]
        if place not in self.asked.get(number, ()):
            return ()
        if "oag" in self.run.overlap:
            order = list(self.asked)
            for block in order[order.index(number) :][:2]:
                wanted += [(block, other) for other in self.asked[block]]
        for key in wanted:
            if key not in self.issued:
                layer = self.blocks[key[0]].layers[key[1]]
                again = self.phase == "backward" and self.blocks[key[0]].reruns(self.run)
                name = f"{key[0]}.{layer.name} {'recompute' if again else self.phase} gather"
                self.issued[key] = self.add(name, "z", self.cost(layer).gather, self.path)
        return self.issued[number, place]

    def blocking(self, name: str, x: float, y: float) -> None:
        for axis, seconds in (("x", x), ("y", y)):
            if seconds:
                self.path = self.add(name, axis, seconds, self.path)

    def forward(self, number: int, phase: str) -> None:
        block, rerun = self.blocks[number], phase == "recompute"
        last = block.unsummed(self.grid, self.run) if rerun else None
        for place, layer in enumerate(block.layers):
            name, cost = f"{number}.{layer.name}", self.cost(layer)
            gathered, output = self.gathered(number, place), (0.0 if layer is last else cost.x.output, cost.y.output)
            if isinstance(layer, (NormKind, LossKind)):
                self.blocking(f"{name} {phase} statistics", *output)
            seconds = cost.again if rerun and self.run.selective else cost.forward
            self.path = self.add(f"{name} {phase}", COMPUTE, seconds, self.path + gathered)
            if not isinstance(layer, (NormKind, LossKind)):
                self.blocking(f"{name} {phase} output", *output)

    def backward(self, number: int) -> None:
        block = self.blocks[number]
        for place, layer in reversed(list(enumerate(block.layers))):
            name, cost = f"{number}.{layer.name}", self.cost(layer)
            gathered = () if block.reruns(self.run) else self.gathered(number, place)
            self.blocking(f"{name} backward statistics", cost.x.blocking, cost.y.blocking)
            if not cost.weight_grad:
                self.blocking(f"{name} dI all-reduce", cost.x.reduce, cost.y.reduce)
                if cost.input_grad:
                    self.path = self.add(f"{name} backward", COMPUTE, cost.input_grad, self.path + gathered)
                self.scatter(name, cost, self.path)
                continue
            reduced = product = self.add(f"{name} dI", COMPUTE, cost.input_grad, self.path + gathered)
            for axis, seconds in (("x", cost.x.reduce), ("y", cost.y.reduce)):
                if seconds:
                    reduced = self.add(f"{name} dI all-reduce", axis, seconds, reduced)
            waits = product if "oar" in self.run.overlap else reduced
            weight = self.add(f"{name} dW", COMPUTE, cost.weight_grad, waits)
            self.path = tuple(dict.fromkeys(reduced + weight))
            self.scatter(name, cost, weight)

    def scatter(self, name: str, cost: LayerCost, after: tuple[int, ...]) -> None:
        done = after
        if cost.scatter:
            done = self.add(f"{name} dW reduce-scatter", "z", cost.scatter, after)
            if "ors" not in self.run.overlap:
                self.path = tuple(dict.fromkeys(self.path + done))
        reduced = self.network.seconds("all_reduce", "data", cost.reduced, cost.reduces)
        if reduced or cost.scatter:
            self.gradients.append((name, reduced, done))

    def reduce(self) -> None:
        """End a backward pass: it returns when every gradient is complete."""
        end = waits = self.path
        what, share = ("reduce-scatter over data", 0.5) if self.run.zero == 2 else ("all-reduce", 1.0)
        for name, seconds, done in self.gradients:
            if seconds:
                done = self.add(f"{name} dW {what}", "data", share * seconds, tuple({*end, *done}))
            waits += done
        self.gradients = []
        self.path = tuple(dict.fromkeys(waits))

    def finish(self) -> None:
        """Add the optimizer's step, and with ZeRO the gather of what it has updated."""
        shard = self.run.shard(self.grid, self.workload.parameters)
        seconds = optimizer_seconds(self.machine, self.grid, self.run, self.workload)
        stepped = self.add("optimizer", COMPUTE, seconds, self.path)
        gather = data_seconds(self.network, 0.0, shard, self.run)
        if gather:
            self.add("end", COMPUTE, 0.0, self.add("parameters gather", "data", gather, stepped))
