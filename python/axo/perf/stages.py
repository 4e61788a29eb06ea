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

Not here: Tesseract and ZeRO-2's early scatter under stages; recomputation where backward is split.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

from axo.grid import AXES, Grid
from axo.matmul.cost import chunk
from axo.perf import cut, memory
from axo.perf import pipeline_schedule as schedules
from axo.perf.layer_time import LayerCost, Network, Run, calls_of, data_seconds, layer_cost, optimizer_seconds
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
Blocks = tuple[tuple[int, int], ...]  # (a kind of block, how many of it)


class Part(NamedTuple):
    """What one rank does for some blocks: seconds of a micro-batch, and of what is once a step."""

    products: float
    forward: float
    inputs: float
    weights: float
    shown_x: float  # communication that nothing hides, in forward and inputs
    shown_y: float
    shown_z: float
    sent_x: float  # all communication
    sent_y: float
    sent_z: float
    once: float  # over z, once a step: what shows, and all
    once_sent: float
    reduced: float  # bytes that are all-reduced over data, once a step, and in how many calls
    reduces: float
    parameters: float  # of all ranks of x, y and z together

    @property
    def work(self) -> float:
        """Seconds of a micro-batch, there and back."""
        return self.forward + self.inputs + self.weights


class Full(NamedTuple):
    """A rank that may be the fullest: its blocks, their parameters, and how many neighbours its stages have."""

    rank: int
    blocks: Blocks
    parameters: int
    neighbours: int


class Cut(NamedTuple):
    """The blocks of each stage; how many ranks have the same blocks; the ranks of which one is the fullest."""

    stages: list[Blocks]
    groups: list[tuple[int, Blocks]]
    full: list[Full]


class Known:
    """What plans of one request share: most of a grid does not depend on data, on the stages or on ZeRO.

    Layers and blocks are known by their ``id``: they live as long as the request's workload, and a hash of all their
    fields would take longer than what it saves.
    """

    def __init__(self) -> None:
        self._parts: dict[tuple[object, ...], dict[tuple[Blocks, bool], Part]] = {}
        self._memories: dict[tuple[object, ...], Memory] = {}
        self._kept: dict[tuple[object, ...], dict[int, float]] = {}
        self._costs: dict[tuple[int, ...], dict[int, LayerCost]] = {}
        self._data: dict[tuple[int, ...], dict[int, tuple[float, float]]] = {}
        self._cuts: dict[int, tuple[Cut, Stages]] = {}
        self._networks: dict[Grid, Network] = {}
        self._planned: dict[tuple[int, str], Stages | str] = {}

    def network(self, machine: Machine, grid: Grid) -> Network:
        """The network of one grid."""
        if grid not in self._networks:
            self._networks[grid] = Network(machine, grid)
        return self._networks[grid]

    def memory(self, workload: Workload, grid: Grid, run: Run) -> Memory:
        """``memory.estimate`` of a whole model: of data it depends only where ZeRO cuts over it, or it is 1."""
        cut = (run.zero, grid.data) if run.zero else (0, grid.data > 1)
        way = (run.rows, run.micro_batches > 1, run.cached_gathers, run.selective, run.offload)
        key = (id(workload), grid.x, grid.y, grid.z, *cut, *way)
        if key not in self._memories:
            self._memories[key] = memory.estimate(workload, grid, run)
        return self._memories[key]

    def planned(self, workload: Workload, ranks: int, schedule: str) -> Stages:
        """``planned``, once for each number of ranks and schedule; see there."""
        if (ranks, schedule) not in self._planned:
            try:
                self._planned[ranks, schedule] = planned(workload, ranks, schedule)
            except ValueError as error:
                self._planned[ranks, schedule] = str(error)
        found = self._planned[ranks, schedule]
        if isinstance(found, str):
            raise ValueError(found)
        return found


class Timing:
    """Times and sizes of one workload on one grid with one size of micro-batch; stages are put together from them.

    Args:
        known: What earlier timings of the same request found; more is put in.
    """

    def __init__(self, workload: Workload, grid: Grid, machine: Machine, run: Run, known: Known | None = None) -> None:
        self.workload, self.grid, self.machine, self.run = workload, grid, machine, run
        known = known or Known()
        self.network = known.network(machine, grid)
        self.layout = cut.layout(workload)
        self.rows = run.group_rows(grid)
        self._cuts = known._cuts
        here = (grid.x, grid.y, grid.z, self.rows)
        way = (*here, workload.checkpointed, run.selective)
        self._costs = known._costs.setdefault(here, {})
        self._data = known._data.setdefault(here[:3], {})
        self._parts = known._parts.setdefault((*way, run.cached_gathers), {})
        self._kept_of = known._kept.setdefault(way, {})
        self._message_bytes, self._message = self.message(), self.message_seconds()

    def with_state(self, zero: int, *, offload: bool) -> Timing:
        """The same with another place for the optimizer's state, on which blocks do not depend."""
        if (self.run.zero, self.run.offload) == (zero, offload):
            return self
        other = copy.copy(self)
        other.run = replace(self.run, zero=zero, offload=offload)
        return other

    def _cut(self, stages: Stages) -> Cut:
        found, _ = self._cuts.get(id(stages), (None, None))
        if found is None:
            of_stage = [self._blocks(stages, [stage]) for stage in range(stages.count)]
            of_rank = [self._blocks(stages, stages.of(rank)) for rank in range(stages.ranks)]
            groups = [(count, blocks) for blocks, count in Counter(of_rank).items()]
            full = []
            # Of ranks with the same blocks the first has the most in flight.
            firsts = {blocks: rank for rank, blocks in reversed(list(enumerate(of_rank)))}.values()
            for rank in sorted({*firsts, min(1, stages.ranks - 1), stages.ranks - 1}):
                parameters = sum(times * self.layout.parameters[kind] for kind, times in of_rank[rank])
                neighbours = sum((one > 0) + (one < stages.count - 1) for one in stages.of(rank))
                full.append(Full(rank, of_rank[rank], parameters, neighbours))
            found = Cut(of_stage, groups, full)
            self._cuts[id(stages)] = found, stages  # which so keeps its id
        return found

    def _blocks(self, stages: Stages, which: list[int]) -> Blocks:
        return tuple(self.layout.composed(stages.bounds, tuple(which)).items())

    def part(self, blocks: Blocks, splits: bool) -> Part:
        """What one rank does for some blocks."""
        if (blocks, splits) not in self._parts:
            if len(blocks) == 1 and blocks[0][1] == 1:
                found = self._one(self.layout.kinds[blocks[0][0]], splits)
            else:
                each = [(times, self.part(((kind, 1),), splits)) for kind, times in blocks]
                scaled = [[times * value for value in part] for times, part in each]
                found = Part._make(map(sum, zip(*scaled, strict=True)))
            self._parts[blocks, splits] = found
        return self._parts[blocks, splits]

    def _cost(self, layer: Layer) -> LayerCost:
        if id(layer) not in self._costs:
            grid = Grid(self.grid.x, self.grid.y, self.grid.z)  # without data: see _over_data
            self._costs[id(layer)] = layer_cost(
                layer, grid, self.rows, self.run, self.machine, self.network, self.workload.seq_length
            )
        return self._costs[id(layer)]

    def _over_data(self, layer: Layer) -> tuple[float, float]:
        """Bytes of all all-reduces over data, and how many there are; the same for any size of data."""
        if id(layer) not in self._data:
            grid = Grid(self.grid.x, self.grid.y, self.grid.z, 2)
            calls = [call for call in calls_of(layer, grid, self.rows, self.run) if call.axis == "data"]
            assert all(call.op == "all_reduce" for call in calls)
            each = [layer.experts * call.calls for call in calls]
            sizes = [times * call.elements * call.itemsize for times, call in zip(each, calls, strict=True)]
            self._data[id(layer)] = sum(sizes), sum(each)
        return self._data[id(layer)]

    def _one(self, block: Block, splits: bool) -> Part:
        run = self.run
        costs = [self._cost(layer) for layer in block.layers]
        shown, sent = dict.fromkeys(AXES, 0.0), dict.fromkeys(AXES, 0.0)
        once = once_sent = 0.0

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
            once = max(0.0, kept - ahead) if oag else kept
            once += max(0.0, scatter - inputs - weights) if "ors" in run.overlap else scatter
            once_sent = kept + scatter
        reduced, reduces = map(sum, zip(*(self._over_data(layer) for layer in block.layers), strict=True))
        parameters = sum(layer.parameters for layer in block.layers)
        seconds = [products, forward, inputs, weights, *(each[axis] for each in (shown, sent) for axis in "xyz")]
        return Part._make([*seconds, once, once_sent, reduced, reduces, parameters])

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

    def estimate(self, stages: Stages) -> float:
        """Return the seconds of all micro-batches by the closed form, without what is once a step."""
        splits = schedules.known(stages.schedule).splits
        parts = [(count, self.part(blocks, splits)) for count, blocks in self._cut(stages).groups]
        return self._estimate(stages, parts)

    def _estimate(self, stages: Stages, parts: list[tuple[int, Part]]) -> float:
        groups = [(count, (part.forward, part.inputs, part.weights)) for count, part in parts]
        pieces = self.run.micro_batches
        return schedules.estimate_of_ranks(stages.schedule, stages.ranks, pieces, groups, self._message)

    def simulate(self, stages: Stages) -> schedules.Timeline:
        """Run all micro-batches against the clock, without what is once a step."""
        splits = schedules.known(stages.schedule).splits
        parts = [self.part(blocks, splits) for blocks in self._cut(stages).stages]
        seconds: Times = (
            tuple(part.forward for part in parts),
            tuple(part.inputs for part in parts),
            tuple(part.weights for part in parts),
        )
        return schedules.simulate(stages.schedule, stages.ranks, self.run.micro_batches, *seconds, self._message)

    def predict(self, stages: Stages) -> StepTime:
        """Return the time of one step: of the slowest rank, and what all wait for."""
        splits = schedules.known(stages.schedule).splits
        parts = [(count, self.part(blocks, splits)) for count, blocks in self._cut(stages).groups]
        seconds = self._estimate(stages, parts)
        ends = [self._end(part) for _, part in parts]
        slowest = max(range(len(parts)), key=lambda i: self._alone(parts[i][1]) + sum(ends[i]))
        part, data, pieces = parts[slowest][1], ends[slowest][0], self.run.micro_batches
        exposed = (pieces * part.shown_x, pieces * part.shown_y, pieces * part.shown_z + part.once, data)
        sent = (pieces * part.sent_x, pieces * part.sent_y, pieces * part.sent_z + part.once_sent, data)
        step = StepTime(
            pieces * part.products, dict(zip(AXES, exposed, strict=True)), dict(zip(AXES, sent, strict=True))
        )
        step.optimizer = max(optimizer for _, optimizer in ends)
        step.bubble = seconds - pieces * max(part.work for _, part in parts)
        hidden = sum(sent) - step.exposed_total
        step.contention = self.machine.contention * max(0.0, min(hidden, step.compute))
        return step

    def _alone(self, part: Part) -> float:
        """Seconds of one rank until its last backward, without waiting for others."""
        return self.run.micro_batches * (part.products + part.shown_x + part.shown_y + part.shown_z) + part.once

    def _end(self, part: Part) -> tuple[float, float]:
        """Seconds over data, and of the optimizer, of one rank."""
        shard = part.parameters / (self.grid.x * self.grid.y * self.grid.z)
        sends = self.grid.data > 1 and part.reduces
        reduced = self.network.seconds("all_reduce", "data", part.reduced, part.reduces) if sends else 0.0
        optimizer = optimizer_seconds(self.machine, self.grid, self.run, shard)
        return data_seconds(self.network, reduced, shard, self.run, 1), optimizer

    def memory(self, stages: Stages) -> Memory:
        """Return the memory of the fullest rank."""
        return max((self._memory(stages, one) for one in self._cut(stages).full), key=lambda held: held.total)

    def least(self, stages: Stages) -> float:
        """Return bytes that ``memory`` is never below, whatever share of gathered weights is kept: a quick look."""
        most, ranks = 0.0, self.grid.x * self.grid.y * self.grid.z
        state = self.run.weights * (1 + 2 * self.run.optimizer_share(self.grid) * (not self.run.offload)) / ranks
        buffer = self.run.micro_batches * self._message_bytes
        for one in self._cut(stages).full:
            kept = sum(times * self._kept(kind) for kind, times in one.blocks)
            held = state * one.parameters + self._in_flight(stages, one.rank) * kept + buffer * one.neighbours
            most = max(most, held)
        return most * (1 + memory.SLACK) + memory.RESERVED

    def _in_flight(self, stages: Stages, rank: int) -> float:
        return schedules.in_flight(stages.schedule, stages.ranks, self.run.micro_batches, rank)

    def _kept(self, kind: int) -> float:
        """Bytes that one block of a kind keeps until its backward."""
        if kind not in self._kept_of:
            block, rows = self.layout.kinds[kind], chunk(self.rows, self.grid.z)
            kept = memory.products_kept if block.checkpointed else memory.saved
            layers = block.layers if self.run.selective or not block.checkpointed else ()
            found = sum(kept(layer, self.grid, rows, self.run) for layer in layers)
            ends = any(layer.kind == "loss" for layer in block.layers)  # what a head saves is gone before the others'
            through = memory.block_input(block, self.grid, rows, self.run) if block.checkpointed else 0.0
            self._kept_of[kind] = 0.0 if ends else found + through
        return self._kept_of[kind]

    def _memory(self, stages: Stages, one: Full) -> Memory:
        run, grid = self.run, self.grid
        each = tuple(replace(self.layout.kinds[kind], repeat=times) for kind, times in one.blocks)
        held = memory.estimate(replace(self.workload, blocks=each), grid, run)
        reduces = grid.z * grid.data > 1
        unreduced = run.itemsize * one.parameters / (grid.x * grid.y)
        return replace(
            held,
            kept=held.kept * self._in_flight(stages, one.rank),
            messages=run.micro_batches * one.neighbours * self._message_bytes,
            under_way=max(held.under_way, unreduced) if reduces else held.under_way,
            accumulates=not reduces,
        )
