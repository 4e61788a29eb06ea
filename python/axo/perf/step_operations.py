"""The operations of one training step, in the order in which a rank issues them, with what each waits for.

A rank has a compute stream and one stream for each axis; operations of a stream run in order. With every overlap on:

    forward     the first gather of a block issues those of the next block too (OAG); outputs are all-reduced at once
    backward    a checkpointed block runs forward again first; all-reduce of dI beside the dW product (OAR);
                reduce-scatters of dW follow behind on z and nothing waits for them before the end (ORS)
    end         of each micro-batch: all-reduces over data, layer by layer; then the optimizer

Switched off, each is waited for where it is issued. Times of single operations come from ``axo.perf.layer_time``.
This file lays out operations; ``axo.perf.simulator`` runs them against the clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from axo.grid import AXES, Grid
from axo.matmul.cost import chunk
from axo.perf import memory
from axo.perf.chrome_trace import COMPUTE
from axo.perf.layer_time import LayerCost, Network, RunOptions, data_seconds, ends_block, layer_cost, optimizer_seconds
from axo.perf.machine import Machine
from axo.perf.workload import Block, Layer, Workload

STREAMS = (COMPUTE, *AXES)
Gather = tuple[int, int, str]  # number of the block, place of the layer in it, phase


@dataclass(slots=True)
class Operation:
    """One operation of one rank.

    Args:
        name: Layer and what is done.
        stream: "compute" or an axis.
        seconds: Time when nothing else runs.
        after: Numbers of the operations that must be complete first (its stream's order comes on top).
        takes: Bytes that are allocated when it starts.
        frees: Bytes that are free when it is complete.
    """

    name: str
    stream: str
    seconds: float
    after: tuple[int, ...]
    takes: float = 0.0
    frees: float = 0.0


@dataclass
class StepOperations:
    """All operations of one step on one rank; ``shared`` says which axes leave the node (and so share its NICs)."""

    operations: list[Operation] = field(default_factory=list)
    shared: dict[str, bool] = field(default_factory=dict)
    held: float = 0.0  # bytes of weights, gradients and optimizer, always there


def build(workload: Workload, grid: Grid, machine: Machine, run: RunOptions) -> StepOperations:
    """Lay out one step of ``workload`` on ``grid``."""
    return _Builder(workload, grid, machine, run).build()


class _Builder:
    def __init__(self, workload: Workload, grid: Grid, machine: Machine, run: RunOptions) -> None:
        self.workload, self.grid, self.machine, self.run = workload, grid, machine, run
        self.network = Network(machine, grid)
        self.rows = run.group_rows(grid)
        self.my_rows = chunk(self.rows, grid.z)
        repeats = sum(block.repeat for block in workload.blocks)
        self.cached = round(run.cached_gathers * repeats)  # so many keep their gathered weights, the first ones
        held = memory.estimate(workload, grid, run)
        self.step = StepOperations(
            shared=self.network.shared, held=held.weights + held.gradients + held.optimizer + memory.RESERVED
        )
        self.operations = self.step.operations
        self.costs: dict[Layer, LayerCost] = {}
        self.path: tuple[int, ...] = ()  # what the next operation on the path of the step waits for
        self.asked: list[Gather] = []  # of this pass: the gathers that layers wait for, in order
        self.position = 0  # of the next one to be waited for
        self.ahead: dict[Gather, tuple[int, ...]] = {}  # those that are issued already
        self.scattered: list[tuple[str, float, tuple[int, ...]]] = []

    def build(self) -> StepOperations:
        blocks = list(enumerate(self.workload.unrolled()))
        self.layers = [block.layers for _, block in blocks]
        for _ in range(self.run.micro_batches):
            self.scattered = []
            self._begin([gather for number, block in blocks for gather in self._gathers(number, block, "forward")])
            for number, block in blocks:
                self._forward(number, block, kept=not block.checkpointed)
            self._begin(
                [gather for number, block in reversed(blocks) for gather in self._backward_gathers(number, block)]
            )
            for number, block in reversed(blocks):
                if block.checkpointed:
                    self._forward(number, block, kept=True, again=True)
                self._backward(number, block)
            self._reduce()
        self._finish()
        return self.step

    def _add(
        self, name: str, stream: str, seconds: float, after: tuple[int, ...], takes: float = 0.0, frees: float = 0.0
    ) -> tuple[int, ...]:
        self.operations.append(Operation(name, stream, seconds, after, takes, frees))
        return (len(self.operations) - 1,)

    def _cost(self, layer: Layer) -> LayerCost:
        if layer not in self.costs:
            self.costs[layer] = layer_cost(
                layer, self.grid, self.rows, self.run, self.machine, self.network, self.workload.seq_length
            )
        return self.costs[layer]

    def _begin(self, asked: list[Gather]) -> None:
        self.asked, self.position, self.ahead = asked, 0, {}

    def _gathers(self, number: int, block: Block, phase: str) -> list[Gather]:
        """The gathers that a forward of ``block`` waits for."""
        if phase == "recompute" and number < self.cached:
            return []
        return [(number, place, phase) for place, layer in enumerate(block.layers) if self._cost(layer).gather]

    def _backward_gathers(self, number: int, block: Block) -> list[Gather]:
        if block.checkpointed:  # what it gathers again serves its backward
            return self._gathers(number, block, "recompute")
        if number < self.cached:
            return []
        linears = [place for place, layer in enumerate(block.layers) if layer.kind == "linear"]
        return [(number, place, "backward") for place in reversed(linears) if self._cost(block.layers[place]).gather]

    def _gather(self, number: int, place: int, phase: str) -> tuple[int, ...]:
        """Wait for the gather of a weight. With OAG it is issued with the block before, whose first gather does it."""
        wanted = (number, place, phase)
        if wanted not in self.ahead:
            self._issue(wanted)
        self.position = self.asked.index(wanted, self.position) + 1
        if "oag" in self.run.overlap:
            following = next((other[0] for other in self.asked[self.position :] if other[0] != number), number)
            for other in self.asked[self.position :]:
                if other[0] not in (number, following):
                    break
                if other not in self.ahead:
                    self._issue(other)
        return self.ahead[wanted]

    def _issue(self, gather: Gather) -> None:
        number, place, phase = gather
        layer = self.layers[number][place]
        name = f"{number}.{layer.name} {phase} gather"
        takes = memory.read(layer, self.grid, self.run)
        self.ahead[gather] = self._add(name, "z", self._cost(layer).gather, self.path, takes)

    def _blocking(self, name: str, what: str, by_axis: dict[str, float]) -> None:
        for axis, seconds in by_axis.items():
            self.path = self._add(f"{name} {what}", axis, seconds, self.path)

    def _forward(self, number: int, block: Block, *, kept: bool, again: bool = False) -> None:
        phase = "recompute" if again else "forward"
        cached = number < self.cached
        if not kept:
            size = memory.block_input(block, self.grid, self.my_rows, self.run)
            self.path = self._add(f"{number} checkpoint", COMPUTE, 0.0, self.path, size)
        for place, layer in enumerate(block.layers):
            name, cost = f"{number}.{layer.name}", self._cost(layer)
            gathered: tuple[int, ...] = ()
            if cost.gather and not (again and cached):
                gathered = self._gather(number, place, phase)
            if layer.kind in ("norm", "loss"):
                self._blocking(name, f"{phase} statistics", cost.output)
            saved = memory.saved(layer, self.grid, self.my_rows, self.run) if kept else 0.0
            used_up = layer.kind != "linear" or not (again or cached)
            drop = memory.read(layer, self.grid, self.run) if gathered and used_up else 0.0
            seconds = self.run.run_again([layer], [cost.forward]) if again else cost.forward
            self.path = self._add(f"{name} {phase}", COMPUTE, seconds, self.path + gathered, saved, drop)
            ends = again and self.run.sequence_parallel and layer is ends_block(block.layers)
            if layer.kind not in ("norm", "loss"):
                output = {axis: seconds for axis, seconds in cost.output.items() if not (ends and axis == "x")}
                self._blocking(name, f"{phase} output", output)

    def _backward(self, number: int, block: Block) -> None:
        cached = block.checkpointed or number < self.cached
        for place, layer in reversed(list(enumerate(block.layers))):
            name, cost = f"{number}.{layer.name}", self._cost(layer)
            gathered: tuple[int, ...] = ()
            if cost.gather and layer.kind == "linear" and not cached:
                gathered = self._gather(number, place, "backward")
            # Taken by the forward, or by the recomputation.
            frees = memory.saved(layer, self.grid, self.my_rows, self.run)
            if cost.gather and layer.kind == "linear":
                frees += memory.read(layer, self.grid, self.run)
            self._blocking(name, "backward statistics", cost.backward_blocking)
            if not cost.weight_grad:
                if cost.input_grad or frees:
                    self.path = self._add(
                        f"{name} backward", COMPUTE, cost.input_grad, self.path + gathered, 0.0, frees
                    )
                self._scatter(name, cost, self.path)
                continue
            product = self._add(f"{name} dI", COMPUTE, cost.input_grad, self.path + gathered)
            reduced = product
            for axis, seconds in cost.input_reduce.items():
                reduced = self._add(f"{name} dI all-reduce", axis, seconds, reduced)
            waits = product if "oar" in self.run.overlap else reduced
            weight = self._add(f"{name} dW", COMPUTE, cost.weight_grad, waits, 0.0, frees)
            self.path = tuple(dict.fromkeys(reduced + weight))
            self._scatter(name, cost, weight)
        if block.checkpointed:
            size = memory.block_input(block, self.grid, self.my_rows, self.run)
            self.path = self._add(f"{number} drop checkpoint", COMPUTE, 0.0, self.path, 0.0, size)

    def _scatter(self, name: str, cost: LayerCost, after: tuple[int, ...]) -> None:
        done = after
        if cost.scatter:
            done = self._add(f"{name} dW reduce-scatter", "z", cost.scatter, after)
            if "ors" not in self.run.overlap:
                self.path = tuple(dict.fromkeys(self.path + done))
        if cost.reduces or cost.scatter:
            seconds = self.network.seconds("all_reduce", "data", cost.reduced, cost.reduces) if cost.reduces else 0.0
            self.scattered.append((name, seconds, done))

    def _reduce(self) -> None:
        """End a backward pass: it returns when every gradient is complete."""
        end = self.path
        waits: tuple[int, ...] = end
        scatters = self.run.zero == 2
        for name, seconds, done in self.scattered:
            if seconds:
                op = "reduce-scatter over data" if scatters else "all-reduce"
                seconds /= 1 + scatters
                done = self._add(f"{name} dW {op}", "data", seconds, tuple(dict.fromkeys(end + done)))
            waits += done
        self.path = tuple(dict.fromkeys(waits))

    def _finish(self) -> None:
        shard = self.workload.parameters / (self.grid.x * self.grid.y * self.grid.z)
        seconds = optimizer_seconds(self.machine, self.grid, self.run, shard)
        stepped = self._add("optimizer", COMPUTE, seconds, self.path)
        gather = data_seconds(self.network, 0.0, shard, self.run)
        if gather:
            gathered = self._add("parameters gather", "data", gather, stepped)
            self._add("end", COMPUTE, 0.0, gathered)
