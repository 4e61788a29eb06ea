"""A step of a model that is cut into stages: its time and the memory of its fullest rank.

P pipeline ranks, each a grid of Gx Gy Gz Gdata; every rank of the grid exchanges messages with the rank that stands in
the same place of the next grid. M micro-batches a step. As Axo's stages do it (``axo.pipeline.Stage``):

    products, x, y       of each micro-batch; where backward is split no product hides the all-reduce of dI
    weights over z       gathered once a step as far as they are kept (``cached_gathers``), else by each micro-batch
    gradients            added up on the rank, unreduced over z; scattered and reduced over data once a step
    messages             the residual stream of a micro-batch: s r h / Gy bytes, s as in ``axo.perf.memory``

    step = M (f + b + w) of the slowest rank + bubble (``pipeline_schedule.estimate``) + what is once a step

Memory is that of ``axo.perf.memory`` for the layers of a rank, but that it keeps the activations of all micro-batches
that are in flight, gradients unreduced over z, and, as torch does, a buffer for each message of the step.

Not here: offload, Tesseract and ZeRO-2's early scatter under stages; recomputation where backward is split.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import NamedTuple

from axo.grid import AXES, Grid
from axo.matmul.cost import chunk
from axo.perf import cut, memory
from axo.perf import pipeline_schedule as schedules
from axo.perf.layer_time import OPTIMIZER_BYTES, LayerCost, Network, Run, data_seconds, layer_cost
from axo.perf.machine import Machine
from axo.perf.memory import Memory
from axo.perf.model import StepTime
from axo.perf.workload import Block, Layer, Workload


@dataclass(frozen=True)
class Stages:
    """How a model is cut into stages.

    Attributes:
        ranks: Of the pipeline, each of them a grid.
        schedule: One of ``pipeline_schedule.KINDS``.
        bounds: The first block of each stage, and how many there are.
    """

    ranks: int
    schedule: str
    bounds: tuple[int, ...]

    @property
    def count(self) -> int:
        """All stages."""
        return len(self.bounds) - 1

    @property
    def even(self) -> bool:
        """Whether each stage has as many blocks as any other, as far as they go."""
        blocks = self.bounds[-1]
        return all(self.bounds[i] == round(blocks * i / self.count) for i in range(self.count))

    def of(self, rank: int) -> list[int]:
        """The stages of one rank."""
        if schedules.known(self.schedule).order == schedules.V:
            return [rank, self.count - 1 - rank]
        return list(range(rank, self.count, self.ranks))


def planned(workload: Workload, ranks: int, schedule: str) -> Stages:
    """Cut a model as evenly as its flops allow.

    Raises:
        ValueError: It cannot be cut, or has fewer blocks than stages.
    """
    kind = schedules.known(schedule)
    bounds = cut.planned(workload, ranks, ranks * kind.stages_per_rank, kind.order)
    return Stages(ranks, schedule, tuple(bounds))


Times = tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]  # of F, I and W, each of every stage


class Part(NamedTuple):
    """Seconds of one block, or of what stands before or behind the blocks, on one rank."""

    products: float  # of a micro-batch
    forward: float
    inputs: float
    weights: float
    shown: dict[str, float]  # communication of a micro-batch that nothing hides, in forward and inputs
    sent: dict[str, float]  # all communication of a micro-batch
    once: dict[str, float]  # communication over z that shows once a step
    once_sent: dict[str, float]
    reduced: float  # all-reduces over data, once a step


class Timing:
    """Times and sizes of one workload on one grid with one size of micro-batch; stages are put together from them.

    Args:
        costs: Of layers on this grid with micro-batches of this size, as far as they are known; more are put in.
    """

    def __init__(
        self, workload: Workload, grid: Grid, machine: Machine, run: Run, costs: dict[Layer, LayerCost] | None = None
    ) -> None:
        self._costs = {} if costs is None else costs
        self.workload, self.grid, self.machine, self.run = workload, grid, machine, run
        self.network = Network(machine, grid)
        self.layout = cut.layout(workload)
        self.rows = run.group_rows(grid)
        self._parts: dict[tuple[int, bool], Part] = {}
        self._memories: dict[tuple[tuple[int, int], ...], Memory] = {}

    def part(self, kind: int, splits: bool) -> Part:
        """The times of one kind of block."""
        if (kind, splits) not in self._parts:
            self._parts[kind, splits] = self._part(self.layout.kinds[kind], splits)
        return self._parts[kind, splits]

    def with_zero(self, zero: int) -> Timing:
        """The same with another stage of ZeRO, on which blocks do not depend."""
        other = copy.copy(self)
        other.run, other._memories = replace(self.run, zero=zero), {}
        return other

    def _cost(self, layer: Layer) -> LayerCost:
        if layer not in self._costs:
            self._costs[layer] = layer_cost(
                layer, self.grid, self.rows, self.run, self.machine, self.network, self.workload.seq_length
            )
        return self._costs[layer]

    def _part(self, block: Block, splits: bool) -> Part:
        run = self.run
        costs = [self._cost(layer) for layer in block.layers]
        shown, sent = dict.fromkeys(AXES, 0.0), dict.fromkeys(AXES, 0.0)
        once, once_sent = {"z": 0.0}, {"z": 0.0}

        def wait(by_axis: dict[str, float], hidden: float = 0.0) -> float:
            total = 0.0
            for axis, seconds in by_axis.items():
                sent[axis] += seconds
                shows = max(0.0, seconds - hidden)
                shown[axis] += shows
                total += shows
            return total

        forward = products = sum(one.forward for one in costs)
        forward += sum(wait(one.output) for one in costs)
        ahead = forward
        inputs = weights = 0.0
        if block.checkpointed:
            again = run.run_again(block.layers, [one.forward for one in costs])
            products += again
            inputs += again + sum(wait(one.output) for one in costs)
        hides = "oar" in run.overlap and not splits
        for one in costs:
            products += one.input_grad + one.weight_grad
            weights += one.weight_grad
            inputs += one.input_grad + wait(one.backward_blocking)
            inputs += wait(one.input_reduce, one.weight_grad if hides else 0.0)
        gather = sum(one.gather for one in costs)
        if gather:
            dropped, oag = (1.0 - run.cached_gathers) * gather, "oag" in run.overlap
            for path, forwards in ((ahead, True), (inputs + weights, False)):
                shows = max(0.0, dropped - path) if oag else dropped
                sent["z"] += dropped
                shown["z"] += shows
                forward, inputs = forward + shows * forwards, inputs + shows * (not forwards)
            kept = run.cached_gathers * gather
            scatter = sum(one.scatter for one in costs)
            once["z"] = max(0.0, kept - ahead) if oag else kept
            once["z"] += max(0.0, scatter - inputs - weights) if "ors" in run.overlap else scatter
            once_sent["z"] = kept + scatter
        reduced = sum(one.data for one in costs)
        return Part(products, forward, inputs, weights, shown, sent, once, once_sent, reduced)

    def message(self) -> float:
        """Bytes of the residual stream of a micro-batch on one rank."""
        return self.run.stream * chunk(self.rows, self.grid.z) * chunk(self.workload.hidden, self.grid.y)

    def message_seconds(self) -> float:
        """Seconds of one message: all ranks of a node send at the same time."""
        on, ranks = self.machine, self.grid.world_size
        if ranks < on.gpus_per_node and on.gpus_per_node % ranks == 0:
            rate, latency = on.intra(ranks, on.gpus_per_node // ranks), on.latency_intra_us
        else:
            rate, latency = on.inter_gbs * on.network_fraction / on.gpus_per_node, on.latency_inter_us
        return self.message() / (1e9 * rate) + 1e-6 * latency

    def _seconds(self, stages: Stages) -> Times:
        """Of F, I and W of each stage."""
        splits = schedules.known(stages.schedule).splits
        known: dict[int, tuple[float, float, float]] = {}  # the same layers are the same object
        times = []
        for stage in range(stages.count):
            blocks = self._of(stages, [stage])
            if id(blocks) not in known:
                known[id(blocks)] = self._times(blocks, splits)
            times.append(known[id(blocks)])
        forward, inputs, weights = zip(*times, strict=True)
        return forward, inputs, weights

    def estimate(self, stages: Stages) -> float:
        """Return the seconds of all micro-batches by the closed form, without what is once a step."""
        return self._estimate(stages, self._seconds(stages))

    def _estimate(self, stages: Stages, seconds: Times) -> float:
        pieces, message = self.run.micro_batches, self.message_seconds()
        return schedules.estimate(stages.schedule, stages.ranks, pieces, *seconds, message)

    def simulate(self, stages: Stages) -> schedules.Timeline:
        """Run all micro-batches against the clock, without what is once a step."""
        pieces, message = self.run.micro_batches, self.message_seconds()
        return schedules.simulate(stages.schedule, stages.ranks, pieces, *self._seconds(stages), message)

    def predict(self, stages: Stages) -> StepTime:
        """Return the time of one step: of the slowest rank, and what all wait for."""
        run, splits = self.run, schedules.known(stages.schedule).splits
        pieces = run.micro_batches
        each_stage = self._seconds(stages)
        times, seconds = list(zip(*each_stage, strict=True)), self._estimate(stages, each_stage)
        mine = [stages.of(rank) for rank in range(stages.ranks)]
        kinds = {tuple(self._of(stages, each).items()) for each in mine}
        ranks = [self._rank(dict(each), splits) for each in kinds]
        slowest = max(ranks, key=lambda one: one.total)
        step = StepTime(
            compute=slowest.compute, exposed=dict(slowest.exposed), communication=dict(slowest.communication)
        )
        work = max(sum(sum(times[stage]) for stage in each) for each in mine)
        step.bubble = seconds - pieces * work
        step.optimizer = max(one.optimizer for one in ranks)
        hidden = sum(step.communication.values()) - step.exposed_total
        step.contention = self.machine.contention * max(0.0, min(hidden, step.compute))
        return step

    def _of(self, stages: Stages, which: list[int]) -> dict[int, int]:
        return self.layout.composed(stages.bounds, tuple(which))

    def _times(self, blocks: dict[int, int], splits: bool) -> tuple[float, float, float]:
        forward = inputs = weights = 0.0
        for kind, times in blocks.items():
            part = self.part(kind, splits)
            forward += times * part.forward
            inputs += times * part.inputs
            weights += times * part.weights
        return forward, inputs, weights

    def _rank(self, blocks: dict[int, int], splits: bool) -> StepTime:
        """What one rank does in a step, without waiting for others."""
        run, step, reduced = self.run, StepTime(), 0.0
        for kind, times in blocks.items():
            part = self.part(kind, splits)
            step.compute += times * run.micro_batches * part.products
            for axis in AXES:
                step.exposed[axis] += times * run.micro_batches * part.shown[axis]
                step.communication[axis] += times * run.micro_batches * part.sent[axis]
            step.exposed["z"] += times * part.once["z"]
            step.communication["z"] += times * part.once_sent["z"]
            reduced += times * part.reduced
        shard = self._parameters(blocks) / (self.grid.x * self.grid.y * self.grid.z)
        data = data_seconds(self.network, reduced, shard, replace(run, micro_batches=1))
        step.exposed["data"] += data
        step.communication["data"] += data
        step.optimizer = OPTIMIZER_BYTES * run.optimizer_share(self.grid) * shard / (1e9 * self.machine.memory_gbs)
        return step

    def _parameters(self, blocks: dict[int, int]) -> int:
        return sum(times * self.layout.parameters[kind] for kind, times in blocks.items())

    def memory(self, stages: Stages) -> Memory:
        """Return the memory of the fullest rank."""
        ranks = dict.fromkeys((0, min(1, stages.ranks - 1), stages.ranks - 1))
        return max((self._memory(stages, rank) for rank in ranks), key=lambda held: held.total)

    def _estimated(self, blocks: dict[int, int]) -> Memory:
        key = tuple(blocks.items())
        if key not in self._memories:
            each = tuple(replace(self.layout.kinds[kind], repeat=times) for kind, times in key)
            self._memories[key] = memory.estimate(replace(self.workload, blocks=each), self.grid, self.run)
        return self._memories[key]

    def _memory(self, stages: Stages, rank: int) -> Memory:
        mine, run, grid = stages.of(rank), self.run, self.grid
        blocks = self._of(stages, mine)
        held = self._estimated(blocks)
        flying = schedules.in_flight(stages.schedule, stages.ranks, run.micro_batches, rank)
        buffers = run.micro_batches * sum((one > 0) + (one < stages.count - 1) for one in mine) * self.message()
        reduces = grid.z * grid.data > 1
        unreduced = run.itemsize * self._parameters(blocks) / (grid.x * grid.y)
        return replace(
            held,
            kept=held.kept * flying,
            messages=buffers,
            under_way=max(held.under_way, unreduced) if reduces else held.under_way,
            accumulates=not reduces,
        )
