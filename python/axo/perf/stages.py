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
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from axo.grid import AXES, Grid
from axo.matmul.cost import chunk
from axo.perf import cut, memory
from axo.perf import pipeline_schedule as schedules
from axo.perf.layer_time import Costs, RunOptions, data_seconds, optimizer_seconds
from axo.perf.machine import Machine
from axo.perf.memory import Memory
from axo.perf.model import StepTime
from axo.perf.workload import Block, Workload


@dataclass(frozen=True)
class Stages:
    """How a model is cut into stages.

    Attributes:
        ranks: How many ranks the pipeline has, each of them a grid.
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
        return schedules.stages_of(rank, self.count, self.ranks, schedules.schedule_kind(self.schedule).order)


def planned(workload: Workload, ranks: int, schedule: str) -> Stages:
    """Cut a model as evenly as its flops allow.

    Raises:
        ValueError: It cannot be cut, or has fewer blocks than stages.
    """
    kind = schedules.schedule_kind(schedule)
    bounds = cut.planned(workload, ranks, ranks * kind.stages_per_rank, kind.order)
    return Stages(ranks, schedule, tuple(bounds))


BlockCounts = tuple[tuple[int, int], ...]  # (a kind of block, how many of it)


class BlockTimes(NamedTuple):
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
    once: float  # over z, once a step: what products do not hide, and all
    once_sent: float
    stream: float  # of products: what is on the residual stream
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
    blocks: BlockCounts
    parameters: int
    neighbours: int


class Cut(NamedTuple):
    """The blocks of each stage; how many ranks have the same blocks; the ranks of which one is the fullest."""

    stages: list[BlockCounts]
    groups: list[tuple[int, BlockCounts]]
    full: list[Full]


class Known(Costs):
    """What plans of one request share: costs, memory, cuts, and what stages are put together from."""

    def __init__(self, machine: Machine, workload: Workload) -> None:
        super().__init__(machine, workload.seq_length)
        self._parts: dict[tuple[object, ...], dict[tuple[BlockCounts, bool], BlockTimes]] = {}
        self._memories: dict[tuple[object, ...], Memory] = {}
        self._block_memories: memory.KnownBlocks = {}
        self._states: dict[tuple[int, bool], RunOptions] = {}
        self._kept: dict[tuple[object, ...], dict[int, float]] = {}
        self._ends: dict[Grid, dict[tuple[object, ...], tuple[float, float]]] = {}
        self._cuts: dict[tuple[Workload, Stages], Cut] = {}
        self._block_stacks: dict[Workload, cut.BlockStack] = {}
        self._workloads: dict[tuple[Workload, BlockCounts], Workload] = {}
        self._stages: dict[tuple[int, str], Stages] = {}

    def memory(self, workload: Workload, grid: Grid, run: RunOptions) -> Memory:
        """``memory.estimate`` of a whole model: of data it depends only where ZeRO cuts over it, or it is 1."""
        cut = (run.zero, grid.data) if run.zero else (0, grid.data > 1)
        way = (run.rows, run.micro_batches > 1, run.cached_gathers, run.selective, run.sequence_parallel)
        key = (workload, grid.x, grid.y, grid.z, *cut, *way, run.offload)
        if key not in self._memories:
            there = self._memories.get((*key[:-1], False)) if run.offload else None
            if there is None:
                self._memories[key] = memory.estimate(workload, grid, run, self._block_memories)
            else:
                self._memories[key] = replace(there, optimizer=0.0)
        return self._memories[key]

    def part(self, workload: Workload, blocks: BlockCounts) -> Workload:
        """The part of a model that a rank of a pipeline has."""
        key = (workload, blocks)
        if key not in self._workloads:
            kinds = self.block_stack(workload).kinds
            each = tuple(replace(kinds[kind], repeat=times) for kind, times in blocks)
            self._workloads[key] = replace(workload, blocks=each)
        return self._workloads[key]

    def state(self, run: RunOptions, zero: int, offload: bool) -> RunOptions:
        """A run with this place of the optimizer's state; all else is that of any run of the request."""
        if (zero, offload) not in self._states:
            self._states[zero, offload] = replace(run, zero=zero, offload=offload)
        return self._states[zero, offload]

    def block_stack(self, workload: Workload) -> cut.BlockStack:
        """The blocks of a model as stages see them."""
        if workload not in self._block_stacks:
            self._block_stacks[workload] = cut.BlockStack(workload)
        return self._block_stacks[workload]

    def stages(self, workload: Workload, ranks: int, schedule: str, pieces: int) -> Stages | str:
        """``planned`` stages for so many micro-batches, or why there are none."""
        try:
            schedules.check(schedule, pieces, ranks)
            if (ranks, schedule) not in self._stages:
                self._stages[ranks, schedule] = planned(workload, ranks, schedule)
        except ValueError as error:
            return str(error)
        return self._stages[ranks, schedule]


class StageTimes:
    """Times and sizes of one workload on one grid with one size of micro-batch; stages are put together from them.

    Args:
        known: What earlier timings of the same request found; more is put in.
    """

    def __init__(
        self, workload: Workload, grid: Grid, machine: Machine, run: RunOptions, known: Known | None = None
    ) -> None:
        self.workload, self.grid, self.machine, self.run = workload, grid, machine, run
        self.known = known = known or Known(machine, workload)
        self.network, self.rows = known.network(grid), run.group_rows(grid)
        self.block_stack = known.block_stack(workload)
        here = (grid.x, grid.y, grid.z, grid.data > 1, self.rows, run.sequence_parallel)
        self._way = way = (*here, workload.checkpointed, run.selective)
        self._parts = known._parts.setdefault((*way, run.cached_gathers), {})
        self._kept_of = known._kept.setdefault(way, {})
        self._ends = known._ends.setdefault(grid, {})
        self._message_bytes, self._message = self.message(), self.message_seconds()
        self._least: dict[Stages, list[tuple[int, float]]] = {}  # by stages: parameters, and what does not go with them

    def with_state(self, zero: int, *, offload: bool) -> StageTimes:
        """The same with another place for the optimizer's state, on which blocks do not depend."""
        if (self.run.zero, self.run.offload) == (zero, offload):
            return self
        other = copy.copy(self)
        other.run = replace(self.run, zero=zero, offload=offload)
        return other

    def keeping(self, share: float) -> StageTimes:
        """The same with another share of gathered weights that are kept."""
        other = copy.copy(self)
        other.run = replace(self.run, cached_gathers=share)
        other._parts = self.known._parts.setdefault((*self._way, share), {})
        return other

    def _cut(self, stages: Stages) -> Cut:
        found = self.known._cuts.get((self.workload, stages))
        if found is None:
            of_stage = [self._blocks(stages, [stage]) for stage in range(stages.count)]
            of_rank = [self._blocks(stages, stages.of(rank)) for rank in range(stages.ranks)]
            groups = [(count, blocks) for blocks, count in Counter(of_rank).items()]
            full = []
            # Among ranks with the same blocks, the first has the most micro-batches in flight.
            firsts = {blocks: rank for rank, blocks in reversed(list(enumerate(of_rank)))}.values()
            for rank in sorted({*firsts, min(1, stages.ranks - 1), stages.ranks - 1}):
                parameters = sum(times * self.block_stack.parameters[kind] for kind, times in of_rank[rank])
                neighbours = sum((one > 0) + (one < stages.count - 1) for one in stages.of(rank))
                full.append(Full(rank, of_rank[rank], parameters, neighbours))
            found = Cut(of_stage, groups, full)
            self.known._cuts[self.workload, stages] = found
        return found

    def _blocks(self, stages: Stages, which: list[int]) -> BlockCounts:
        return tuple(self.block_stack.composed(stages.bounds, tuple(which)).items())

    def part(self, blocks: BlockCounts, splits: bool) -> BlockTimes:
        """What one rank does for some blocks."""
        found = self._parts.get((blocks, splits))
        if found is None:
            each = []
            for kind, times in blocks:
                one = self._parts.get((((kind, 1),), splits))
                if one is None:
                    one = self._parts[((kind, 1),), splits] = self._one(self.block_stack.kinds[kind], splits)
                each.append(one if times == 1 else [times * value for value in one])
            found = self._parts[blocks, splits] = BlockTimes._make(map(sum, zip(*each, strict=True)))
        return found

    def _one(self, block: Block, splits: bool) -> BlockTimes:
        run = self.run
        one = self.known.block(block, self.grid, self.rows, run)
        shows = one.shown_reduce if "oar" in run.overlap and not splits else one.reduce
        again = one.again_kept if run.selective else one.again
        products, weights = one.forward + one.input_grad + one.weight_grad, one.weight_grad
        forward = ahead = one.forward + sum(one.output)
        inputs = one.input_grad + sum(one.blocking) + sum(shows)
        if block.checkpointed:
            products, inputs = products + again, inputs + again + sum(one.again_output)
        twice = one.again_output if block.checkpointed else (0.0, 0.0)
        waits = [sum(each) for each in zip(one.output, twice, one.blocking, strict=True)]
        shown_x, shown_y = (waits[0] + shows[0], waits[1] + shows[1])
        sent_x, sent_y = (waits[0] + one.reduce[0], waits[1] + one.reduce[1])
        shown_z = sent_z = once = once_sent = 0.0
        if one.gather:
            dropped, oag = (1.0 - run.cached_gathers) * one.gather, "oag" in run.overlap
            for path, forwards in ((ahead, True), (inputs + weights, False)):
                shown = max(0.0, dropped - path) if oag else dropped
                sent_z, shown_z = sent_z + dropped, shown_z + shown
                forward, inputs = forward + shown * forwards, inputs + shown * (not forwards)
            kept = run.cached_gathers * one.gather
            once = max(0.0, kept - ahead) if oag else kept
            once += max(0.0, one.scatter - inputs - weights) if "ors" in run.overlap else one.scatter
            once_sent = kept + one.scatter
        z = (shown_z, sent_x, sent_y, sent_z, once, once_sent, one.stream)
        return BlockTimes(
            products, forward, inputs, weights, shown_x, shown_y, *z, one.reduced, one.reduces, one.parameters
        )

    def message(self) -> float:
        """Bytes of the residual stream of a micro-batch on one rank."""
        rows = chunk(self.rows, self.grid.z) // self.run.token_ranks(self.grid)
        return self.run.stream * rows * chunk(self.workload.hidden, self.grid.y)

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
        return self._estimate(stages, self._ranks(stages))

    def _ranks(self, stages: Stages) -> list[tuple[int, BlockCounts, BlockTimes]]:
        """How many ranks have the same blocks, these, and what they do."""
        splits = schedules.schedule_kind(stages.schedule).splits
        return [(count, blocks, self.part(blocks, splits)) for count, blocks in self._cut(stages).groups]

    def _estimate(self, stages: Stages, ranks: list[tuple[int, BlockCounts, BlockTimes]]) -> float:
        groups = [(count, (part.forward, part.inputs, part.weights)) for count, _, part in ranks]
        pieces = self.run.micro_batches
        return schedules.estimate(stages.schedule, stages.ranks, pieces, groups, self._message)

    def simulate(self, stages: Stages) -> schedules.Timeline:
        """Run all micro-batches against the clock, without what is once a step."""
        splits = schedules.schedule_kind(stages.schedule).splits
        parts = [self.part(blocks, splits) for blocks in self._cut(stages).stages]
        forward, inputs, weights = zip(*((part.forward, part.inputs, part.weights) for part in parts), strict=True)
        pieces = self.run.micro_batches
        return schedules.simulate(stages.schedule, stages.ranks, pieces, forward, inputs, weights, self._message)

    def predict(self, stages: Stages) -> StepTime:
        """Return the time of one step: of the slowest rank, and what all wait for."""
        ranks = self._ranks(stages)
        ends = [self._end(blocks, part) for _, blocks, part in ranks]
        slowest = max(range(len(ranks)), key=lambda i: self._alone(ranks[i][2]) + sum(ends[i]))
        part, data, pieces = ranks[slowest][2], ends[slowest][0], self.run.micro_batches
        exposed = (pieces * part.shown_x, pieces * part.shown_y, pieces * part.shown_z + part.once, data)
        sent = (pieces * part.sent_x, pieces * part.sent_y, pieces * part.sent_z + part.once_sent, data)
        step = StepTime(
            pieces * part.products, dict(zip(AXES, exposed, strict=True)), dict(zip(AXES, sent, strict=True))
        )
        step.optimizer = max(optimizer for _, optimizer in ends)
        step.bubble = self._estimate(stages, ranks) - pieces * max(part.work for *_, part in ranks)
        step.contend(self.machine)
        return step

    def seconds(self, stages: Stages, states: Iterable[tuple[int, bool]]) -> list[float]:
        """Return what ``predict`` gives in all for each (ZeRO, offload) of the optimizer's state: a quick look."""
        ranks, pieces, slows = self._ranks(stages), self.run.micro_batches, self.machine.contention
        waits = self._estimate(stages, ranks) - pieces * max([part.work for *_, part in ranks])
        times = []  # of each rank: seconds until its last backward, and with all that is not in states
        for *_, part in ranks:
            alone, products = self._alone(part), pieces * part.products
            hidden = pieces * (part.sent_x + part.sent_y + part.sent_z) + part.once_sent - (alone - products)
            times.append((alone, alone + waits + slows * max(0.0, min(hidden, products))))
        found = []
        for zero, offload in states:
            ends = [self._end(blocks, part, zero, offload) for _, blocks, part in ranks]
            ended = [alone + data + steps for (alone, _), (data, steps) in zip(times, ends, strict=True)]
            slowest = ended.index(max(ended))
            found.append(times[slowest][1] + ends[slowest][0] + max([steps for _, steps in ends]))
        return found

    def saved_by_splitting(self, stages: Stages) -> float:
        """Return seconds of which sequence parallelism saves no more.

        What ranks spend on the stream, on x (layers that share their input share the sum of its gradient) and messages.
        """
        most = max(part.stream + part.shown_x for *_, part in self._ranks(stages))
        saved = (self.run.micro_batches + stages.ranks) * most
        return saved + self._message * schedules.messages(stages.schedule, stages.ranks, self.run.micro_batches)

    def _alone(self, part: BlockTimes) -> float:
        """Seconds of one rank until its last backward, without waiting for others."""
        return self.run.micro_batches * (part.products + part.shown_x + part.shown_y + part.shown_z) + part.once

    def _end(
        self, blocks: BlockCounts, part: BlockTimes, zero: int | None = None, offload: bool | None = None
    ) -> tuple[float, float]:
        """Seconds over data, and of the optimizer, of one rank; with another place of its state if that is given."""
        run, grid = self.run, self.grid
        key = (blocks, run.zero if zero is None else zero, run.offload if offload is None else offload)
        if key not in self._ends:
            run = self.known.state(run, key[1], key[2])
            shard = part.parameters / (grid.x * grid.y * grid.z)
            sends = grid.data > 1 and part.reduces
            reduced = self.network.seconds("all_reduce", "data", part.reduced, part.reduces) if sends else 0.0
            self._ends[key] = (
                data_seconds(self.network, reduced, shard, run, 1),
                optimizer_seconds(self.machine, grid, run, shard),
            )
        return self._ends[key]

    def memory(self, stages: Stages) -> Memory:
        """Return the memory of the fullest rank."""
        return max((self._memory(stages, one) for one in self._cut(stages).full), key=lambda held: held.total)

    def least(self, stages: Stages, zero: int, offload: bool) -> float:
        """Return bytes that ``memory`` is never below, whatever share of gathered weights is kept: a quick look."""
        if stages not in self._least:
            buffer = self.run.micro_batches * self._message_bytes
            self._least[stages] = [
                (one.parameters, self._in_flight(stages, one.rank) * sum(times * self._kept(kind) for kind, times
                 in one.blocks) + buffer * one.neighbours) for one in self._cut(stages).full]  # fmt: skip
        ranks = self.grid.x * self.grid.y * self.grid.z
        state = self.run.weights * (1 + 2 / (self.grid.data if zero else 1) * (not offload)) / ranks
        most = max([state * parameters + held for parameters, held in self._least[stages]])
        return most * (1 + memory.SLACK) + memory.RESERVED

    def _in_flight(self, stages: Stages, rank: int) -> float:
        return schedules.in_flight(stages.schedule, stages.ranks, self.run.micro_batches, rank)

    def _kept(self, kind: int) -> float:
        """Bytes that one block of a kind keeps until its backward."""
        if kind not in self._kept_of:
            block, rows = self.block_stack.kinds[kind], chunk(self.rows, self.grid.z)
            kept = memory.products_kept if block.checkpointed else memory.saved
            layers = block.layers if self.run.selective or not block.checkpointed else ()
            found = sum(kept(layer, self.grid, rows, self.run) for layer in layers)
            ends = any(layer.kind == "loss" for layer in block.layers)  # what a head saves is gone before the others'
            through = memory.block_input(block, self.grid, rows, self.run) if block.checkpointed else 0.0
            self._kept_of[kind] = 0.0 if ends else found + through
        return self._kept_of[kind]

    def _memory(self, stages: Stages, one: Full) -> Memory:
        run, grid = self.run, self.grid
        held = self.known.memory(self.known.part(self.workload, one.blocks), grid, run)
        reduces = grid.z * grid.data > 1
        unreduced = run.itemsize * one.parameters / (grid.x * grid.y)
        return replace(
            held,
            kept=held.kept * self._in_flight(stages, one.rank),
            messages=run.micro_batches * one.neighbours * self._message_bytes,
            under_way=max(held.under_way, unreduced) if reduces else held.under_way,
            accumulates=not reduces,
        )
