"""One step of a grid, operation by operation, against the clock.

A rank has a compute stream and one stream for each axis. All ranks do the same at the same time, so one stands for all.
In the order in which the engine issues them, with every overlap on:

    forward     the first gather of a block issues those of the next block too (OAG); outputs are all-reduced at once
    backward    a checkpointed block runs forward again first; all-reduce of dI beside the dW product (OAR);
                reduce-scatters of dW follow behind on z and nothing waits for them before the end (ORS)
    end         of each micro-batch: all-reduces over data, layer by layer; then the optimizer

Switched off, each is waited for where it is issued. Times of single operations come from ``axo.perf.layer_time``; with
stages, whole micro-batches are the operations (``axo.perf.pipeline_schedule``).
Not here: other jobs on the network, and pipelining inside a collective.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from axo.grid import AXES, Grid
from axo.perf import clock
from axo.perf.chrome_trace import COMPUTE, Span
from axo.perf.clock import Operation
from axo.perf.layer_time import Costs, LayerCost, RunOptions, data_seconds, ends_block, optimizer_seconds
from axo.perf.machine import Machine
from axo.perf.workload import Block, Layer, Workload

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
    shorter, longer = (simulate(workload, grid, machine, replace(run, micro_batches=n, rows=rows)) for n in (half, few))
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
    blocks = list(enumerate(workload.unrolled()))
    for _ in range(run.micro_batches):
        step.begin_pass({number: step.gathers(block) for number, block in blocks}, "forward")
        for number, block in blocks:
            step.forward(number, block, "forward")
        step.begin_pass(
            {number: step.backward_gathers(number, block) for number, block in reversed(blocks)}, "backward"
        )
        for number, block in reversed(blocks):
            if block.checkpointed:
                step.forward(number, block, "recompute")
            step.backward(number, block)
        step.reduce()
    step.finish()
    return step.operations


class _StepBuilder:
    """Collects operations; ``path``: what the next one on the path of the step waits for."""

    def __init__(self, workload: Workload, grid: Grid, machine: Machine, run: RunOptions) -> None:
        self.workload, self.grid, self.machine, self.run = workload, grid, machine, run
        self.costs, self.rows = Costs(machine, workload.seq_length), run.group_rows(grid)
        self.network = self.costs.network(grid)
        # So many blocks keep their gathered weights, the first ones.
        self.cached = round(run.cached_gathers * sum(block.repeat for block in workload.blocks))
        self.blocks = list(workload.unrolled())
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

    def gathers(self, block: Block) -> list[int]:
        return [place for place, layer in enumerate(block.layers) if self.cost(layer).gather]

    def backward_gathers(self, number: int, block: Block) -> list[int]:
        if number < self.cached:
            return []
        if block.checkpointed:  # what it gathers again serves its backward
            return self.gathers(block)
        return [place for place in reversed(self.gathers(block)) if block.layers[place].kind == "linear"]

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
                again = self.phase == "backward" and self.blocks[key[0]].checkpointed
                name = f"{key[0]}.{layer.name} {'recompute' if again else self.phase} gather"
                self.issued[key] = self.add(name, "z", self.cost(layer).gather, self.path)
        return self.issued[number, place]

    def blocking(self, name: str, by_axis: dict[str, float]) -> None:
        for axis, seconds in by_axis.items():
            self.path = self.add(name, axis, seconds, self.path)

    def forward(self, number: int, block: Block, phase: str) -> None:
        last = ends_block(block.layers) if phase == "recompute" and self.run.sequence_parallel else None
        for place, layer in enumerate(block.layers):
            name, cost = f"{number}.{layer.name}", self.cost(layer)
            gathered = self.gathered(number, place)
            statistics = layer.kind in ("norm", "loss")
            if statistics:
                self.blocking(f"{name} {phase} statistics", cost.output)
            seconds = cost.forward if phase == "forward" else self.run.run_again([layer], [cost.forward])
            self.path = self.add(f"{name} {phase}", COMPUTE, seconds, self.path + gathered)
            if not statistics:
                output = {axis: each for axis, each in cost.output.items() if not (layer is last and axis == "x")}
                self.blocking(f"{name} {phase} output", output)

    def backward(self, number: int, block: Block) -> None:
        for place, layer in reversed(list(enumerate(block.layers))):
            name, cost = f"{number}.{layer.name}", self.cost(layer)
            gathered = () if block.checkpointed else self.gathered(number, place)
            self.blocking(f"{name} backward statistics", cost.backward_blocking)
            if not cost.weight_grad:
                if cost.input_grad:
                    self.path = self.add(f"{name} backward", COMPUTE, cost.input_grad, self.path + gathered)
                self.scatter(name, cost, self.path)
                continue
            reduced = product = self.add(f"{name} dI", COMPUTE, cost.input_grad, self.path + gathered)
            for axis, seconds in cost.input_reduce.items():
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
        if cost.reduces or cost.scatter:
            seconds = self.network.seconds("all_reduce", "data", cost.reduced, cost.reduces) if cost.reduces else 0.0
            self.gradients.append((name, seconds, done))

    def reduce(self) -> None:
        """End a backward pass: it returns when every gradient is complete."""
        end = waits = self.path
        for name, seconds, done in self.gradients:
            if seconds and self.run.zero == 2:
                done = self.add(f"{name} dW reduce-scatter over data", "data", seconds / 2, tuple({*end, *done}))
            elif seconds:
                done = self.add(f"{name} dW all-reduce", "data", seconds, tuple({*end, *done}))
            waits += done
        self.gradients = []
        self.path = tuple(dict.fromkeys(waits))

    def finish(self) -> None:
        """Add the optimizer's step, and with ZeRO the gather of what it has updated."""
        shard = self.run.shard(self.grid, self.workload.parameters)
        seconds = optimizer_seconds(self.machine, self.grid, self.run, shard)
        stepped = self.add("optimizer", COMPUTE, seconds, self.path)
        gather = data_seconds(self.network, 0.0, shard, self.run)
        if gather:
            self.add("end", COMPUTE, 0.0, self.add("parameters gather", "data", gather, stepped))
