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

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from axo.grid import AXES, Grid
from axo.matmul.cost import chunk
from axo.perf import cut, memory
from axo.perf import pipeline_schedule as schedules
from axo.perf.layer_time import Costs, data_seconds, optimizer_seconds
from axo.perf.machine import Machine
from axo.perf.memory import Memory
from axo.perf.model import StepTime
from axo.perf.run_options import RunOptions
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

    @property
    def splits(self) -> bool:
        """Whether backward comes in two phases."""
        return schedules.schedule_kind(self.schedule).splits

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


class PartTimes(NamedTuple):
    """What one rank does for its part of a model: seconds of a micro-batch, and of what is once a step."""

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
    reduced: float  # bytes that are all-reduced over data, once a step, and in how many calls
    reduces: float

    @property
    def work(self) -> float:
        """Seconds of a micro-batch, there and back."""
        return self.forward + self.inputs + self.weights

    @property
    def shown(self) -> float:
        """Communication of a micro-batch that nothing hides."""
        return self.shown_x + self.shown_y + self.shown_z


class StageTimes:
    """Times and sizes of one workload on one grid with one size of micro-batch, in any stages.

    Args:
        costs: What other plans of the same request have computed; more is put in.
    """

    def __init__(
        self, workload: Workload, grid: Grid, machine: Machine, run: RunOptions, costs: Costs | None = None
    ) -> None:
        self.workload, self.grid, self.machine, self.run = workload, grid, machine, run
        self.costs = costs or Costs(machine, workload.seq_length)
        self.rows = run.group_rows(grid)

    def parts(self, stages: Stages) -> list[tuple[Workload, int, list[tuple[int, int]]]]:
        """The different parts of the model that ranks have: it, how many have it, and which of them may be the fullest.

        Among ranks with the same blocks that is the first, which has the most micro-batches in flight, or one that
        sends other messages: the second, or the last. Of each: its number, and how many stages it exchanges them with.
        """

        def cut_up() -> list[tuple[Workload, int, list[tuple[int, int]]]]:
            ranks, last = defaultdict[Workload, list[int]](list), stages.count - 1
            for rank in range(stages.ranks):
                ranks[cut.part(self.workload, stages.bounds, stages.of(rank))].append(rank)
            fullest = {part: {every[0], *({1, stages.ranks - 1} & {*every})} for part, every in ranks.items()}
            return [(part, len(ranks[part]), [(rank, sum((stage > 0) + (stage < last) for stage in stages.of(rank)))
                                              for rank in some]) for part, some in fullest.items()]  # fmt: skip

        return self.costs.once((self.workload, stages), cut_up)

    def _times(self, part: Workload, splits: bool) -> PartTimes:
        each = ([block.repeat * value for value in self._block(block, splits)] for block in part.blocks)
        return PartTimes._make(map(sum, zip(*each, strict=True)))

    def _block(self, block: Block, splits: bool) -> PartTimes:
        run, grid = self.run, self.grid
        where = (grid.x, grid.y, grid.z, self.rows, *run.of_block)
        return self.costs.once((block.once, splits, *where), lambda: self._one(block, splits))

    def _one(self, block: Block, splits: bool) -> PartTimes:
        run, again = self.run, block.reruns(self.run)
        one = self.costs.block(block, self.grid, self.rows, run).all
        axes = one.x, one.y, one.z
        shows = [of.shown if "oar" in run.overlap and not splits else of.reduce for of in axes]
        waits = [of.blocking + again * of.again for of in axes]
        rerun = again * (one.again if run.selective else one.forward)
        products, weights = one.forward + one.input_grad + one.weight_grad + rerun, one.weight_grad
        forward = ahead = one.forward + sum(of.output for of in axes)
        inputs = one.input_grad + rerun + sum(waits) + sum(shows)
        *shown, shown_z = [of.output + wait + show for of, wait, show in zip(axes, waits, shows, strict=True)]
        *sent, sent_z = [of.output + wait + of.reduce for of, wait in zip(axes, waits, strict=True)]
        sent_z += one.z.hidden + again * one.z.hidden_forward
        once = once_sent = 0.0
        if one.gather:
            dropped, oag = (1.0 - run.cached_gathers) * one.gather, "oag" in run.overlap
            before, behind = (max(0.0, dropped - path) if oag else dropped for path in (ahead, inputs + weights))
            sent_z, shown_z = sent_z + 2 * dropped, shown_z + before + behind
            forward, inputs = forward + before, inputs + behind
            kept = run.cached_gathers * one.gather
            once = max(0.0, kept - ahead) if oag else kept
            once += max(0.0, one.scatter - inputs - weights) if "ors" in run.overlap else one.scatter
            once_sent = kept + one.scatter
        z = (once, once_sent, one.reduced, one.reduces)
        return PartTimes._make([products, forward, inputs, weights, *shown, shown_z, *sent, sent_z, *z])

    def message(self) -> float:
        """Bytes of the residual stream of a micro-batch on one rank."""
        rows = chunk(self.rows, self.grid.z) // self.run.token_ranks(self.grid)
        return self.run.stream * rows * chunk(self.workload.hidden, self.grid.y)

    def message_seconds(self) -> float:
        """Seconds of one message: all ranks of a node send at the same time."""
        on, ranks = self.machine, self.grid.world_size
        if ranks < on.gpus_per_node and on.gpus_per_node % ranks == 0:
            rate, latency = 1e9 * on.intra(ranks, on.gpus_per_node // ranks), on.latency_intra_us
        else:
            rate, latency = on.to_another_node, on.latency_inter_us
        return self.message() / rate + 1e-6 * latency

    def _ranks(self, stages: Stages) -> tuple[dict[Workload, PartTimes], float]:
        """What each different part takes, and ``estimate``: the same wherever the optimizer's state is."""

        def add_up() -> tuple[dict[Workload, PartTimes], float]:
            each, groups = {}, []
            for part, count, _ in self.parts(stages):
                one = each[part] = self._times(part, stages.splits)
                groups.append((count, (one.forward, one.inputs, one.weights)))
            pieces, message = self.run.micro_batches, self.message_seconds()
            return each, schedules.estimate(stages.schedule, stages.ranks, pieces, groups, message)

        run = self.run
        how = (run.micro_batches, *run.of_block)
        return self.costs.once((self.workload, stages, self.grid, self.rows, *how), add_up)

    def estimate(self, stages: Stages) -> float:
        """Return the seconds of all micro-batches by the closed form, without what is once a step."""
        return self._ranks(stages)[1]

    def simulate(self, stages: Stages) -> schedules.Timeline:
        """Run all micro-batches against the clock, without what is once a step."""
        each = [self._times(cut.part(self.workload, stages.bounds, [stage]), stages.splits)
                for stage in range(stages.count)]  # fmt: skip
        forward, inputs, weights = zip(*((one.forward, one.inputs, one.weights) for one in each), strict=True)
        pieces, message = self.run.micro_batches, self.message_seconds()
        return schedules.simulate(stages.schedule, stages.ranks, pieces, forward, inputs, weights, message)

    def predict(self, stages: Stages) -> StepTime:
        """Return the time of one step: of the slowest rank, and what all wait for."""
        run, pieces, ends = self.run, self.run.micro_batches, list[tuple[float, float, float, PartTimes]]()
        network = self.costs.network(self.grid)
        each, seconds = self._ranks(stages)
        for part, one in each.items():
            shard = run.shard(self.grid, part.parameters)
            reduced = network.seconds("all_reduce", "data", one.reduced, one.reduces)
            data = data_seconds(network, reduced, shard, run, 1)
            steps = optimizer_seconds(self.machine, self.grid, run, part)
            ends.append((pieces * (one.products + one.shown) + one.once + data + steps, data, steps, one))
        _, data, _, one = max(ends, key=lambda end: end[0])
        exposed = (pieces * one.shown_x, pieces * one.shown_y, pieces * one.shown_z + one.once, data)
        sent = (pieces * one.sent_x, pieces * one.sent_y, pieces * one.sent_z + one.once_sent, data)
        step = StepTime(
            pieces * one.products, dict(zip(AXES, exposed, strict=True)), dict(zip(AXES, sent, strict=True))
        )
        step.optimizer = max(steps for _, _, steps, _ in ends)
        step.bubble = seconds - pieces * max(one.work for one in each.values())
        step.contend(self.machine)
        return step

    def memory(self, stages: Stages) -> Memory:
        """Return the memory of the fullest rank."""
        run, grid, held = self.run, self.grid, list[Memory]()
        messages, reduces = run.micro_batches * self.message(), grid.z * grid.data > 1
        for part, _, ranks in self.parts(stages):
            one = memory.of_model(self.costs, part, grid, run)
            unreduced = run.itemsize * part.parameters / (grid.x * grid.y)
            under_way = max(one.under_way, unreduced) if reduces else one.under_way
            for rank, neighbours in ranks:
                kept = one.kept * schedules.in_flight(stages.schedule, stages.ranks, run.micro_batches, rank)
                held.append(one._replace(
                    kept=kept, messages=messages * neighbours, under_way=under_way, accumulates=not reduces,
                ))  # fmt: skip
        return max(held, key=lambda each: each.total)
