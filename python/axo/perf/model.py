"""How long one training step takes on a grid: the papers' communication model, plus products, overlap and latency.

`predict` takes the calls of every layer from ``axo.matmul.cost`` (so padding, embeddings, norms and recomputation
count), gives each axis the bandwidth of equation (10), adds latency, and lays them over the products:

    forward     a segment runs from one gathered weight to the next: max(products + blocking, next gather)      (OAG)
    backward    dI product, then max(dW product, all-reduce of dI) (OAR); reduce-scatters queue behind           (ORS)
    end         all-reduce over data, optimizer

Collectives of two axes that both leave the node share its NICs: their times add where they would overlap.
Event by event ``axo.perf.replay`` runs what the engine does, and this form is held against that.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import NamedTuple

from axo.grid import AXES, Grid
from axo.perf.layer_time import BlockCost, Costs, Network, data_seconds, optimizer_seconds
from axo.perf.machine import Machine
from axo.perf.run_options import RunOptions
from axo.perf.workload import Block, Workload


@dataclass
class StepTime:
    """Seconds of one step on one rank."""

    compute: float = 0.0
    exposed: dict[str, float] = field(default_factory=lambda: dict.fromkeys(AXES, 0.0))
    communication: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(AXES, 0.0)
    )  # as if nothing overlapped
    contention: float = 0.0  # products slowed by collectives that run beside them
    optimizer: float = 0.0
    bubble: float = 0.0  # of stages: waiting for others, and messages

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return self.compute + self.contention + self.exposed_total + self.optimizer + self.bubble

    @property
    def exposed_total(self) -> float:
        """Seconds in which nothing but communication happens."""
        return sum(self.exposed.values())

    @property
    def hidden(self) -> float:
        """Seconds of communication behind products."""
        return sum(self.communication.values()) - self.exposed_total

    def contend(self, machine: Machine) -> None:
        """Set by how much hidden communication slows products."""
        self.contention = machine.contention * max(0.0, min(self.hidden, self.compute))


class MicroBatch(NamedTuple):
    """Seconds of one micro-batch, without data and the optimizer.

    Attributes:
        compute: Products. exposed: Over x, y, z, the communication time that products do not hide.
        communication: All of it.
    """

    compute: float
    exposed: tuple[float, ...]
    communication: tuple[float, ...]
    reduced: float  # bytes over data, and calls
    reduces: float


def predict(workload: Workload, grid: Grid, machine: Machine, run: RunOptions, costs: Costs | None = None) -> StepTime:
    """Predict the time of one step of ``workload`` on ``grid``.

    Args:
        costs: What other predictions of this workload on this machine have computed; more is put in.

    Returns:
        Products, exposed and total communication by axis, optimizer: seconds.
    """
    costs = costs or Costs(machine, workload.seq_length)
    network, pieces = costs.network(grid), run.micro_batches
    one = micro_batch(workload, grid, run, costs)
    shard = run.shard(grid, workload.parameters)
    data = data_seconds(network, network.seconds("all_reduce", "data", one.reduced, one.reduces), shard, run)
    exposed, sent = (
        {axis: pieces * seconds for axis, seconds in zip("xyz", each, strict=True)} | {"data": data}
        for each in (one.exposed, one.communication)
    )
    step = StepTime(pieces * one.compute, exposed, sent)
    step.contend(machine)
    step.optimizer = optimizer_seconds(machine, grid, run, workload)
    return step


def micro_batch(workload: Workload, grid: Grid, run: RunOptions, costs: Costs) -> MicroBatch:
    """Lay the collectives of one micro-batch over its products."""
    rows = run.group_rows(grid)

    def lay() -> MicroBatch:
        crosses = costs.machine.crosses_nodes(run.context_grid(grid), "z")
        overlay = _Overlay(run, costs.network(grid), crosses)
        for block in workload.blocks:
            overlay.add(block, costs.block(block, grid, rows, run))
        return overlay.finish()

    return costs.once((workload, grid.x, grid.y, grid.z, rows, *run.of_block), lay)


class _Overlay:
    """Blocks of one micro-batch, added up in forward order."""

    def __init__(self, run: RunOptions, network: Network, context_crosses: bool) -> None:
        self.run = run
        self.shared = [network.shared["z"] and network.shared[axis] for axis in "xy"] + [
            context_crosses
        ]  # who shares the NICs with z
        self.compute = self.reduced = self.reduces = 0.0
        self.exposed, self.sent = [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]
        self.path = 0.0  # backward: products and blocking collectives, the time in which z may hide
        self.queue = 0.0  # backward: what waits on z
        self.on_nics = 0.0  # backward: blocking collectives that use the NICs too
        self.last_scatter = 0.0
        self.ahead: tuple[float, float] | None = None  # the last segment so far: its path, its collectives on the NICs

    def add(self, block: Block, one: BlockCost) -> None:
        """Add one block, ``repeat`` times."""
        run, times, again, cost = self.run, block.repeat, block.reruns(self.run), one.all
        backward = cost.input_grad + cost.weight_grad + again * (cost.again if run.selective else cost.forward)
        self.compute += times * (cost.forward + backward)
        self.reduced, self.reduces = self.reduced + times * cost.reduced, self.reduces + times * cost.reduces
        self._forward(one, times)
        for axis, of in enumerate((cost.x, cost.y, cost.z)):
            shows = of.shown if "oar" in run.overlap else of.reduce
            waits = again * of.again + of.blocking
            backward += waits + shows
            self.exposed[axis] += times * (of.output + waits + shows)
            self.sent[axis] += times * (of.output + waits + of.reduce + of.hidden + again * of.hidden_forward)
            beside = of.hidden - of.hidden_forward if axis == 2 else 0.0  # of x and y that is not modelled
            self.on_nics += times * self.shared[axis] * (waits + of.reduce + beside)
        self.path += times * backward
        self._queue((1.0 - run.cached_gathers) * cost.gather, times, "oag")
        self._queue(cost.scatter, times, "ors")
        self.last_scatter = self.last_scatter or one.last_scatter

    def _forward(self, one: BlockCost, times: int) -> None:
        """The gathers of the forward, which it does not hide."""
        self.sent[2] += times * one.all.gather
        if "oag" not in self.run.overlap:
            self.exposed[2] += times * one.all.gather
            return
        # The first gather stands behind what was before this block once, then behind the end of its own last repeat.
        segments = [
            (gather, path, x * self.shared[0] + y * self.shared[1] + z * self.shared[2])
            for gather, path, x, y, z in one.segments
        ]
        (first, _, _), (_, path, nics) = segments[0], segments[-1]
        before = self.ahead or (0.0, 0.0)
        self.exposed[2] += max(0.0, first + before[1] - before[0])
        self.exposed[2] += (times - 1) * max(0.0, first + nics - path)
        for (_, busy, blocking), (gather, _, _) in itertools.pairwise(segments):
            self.exposed[2] += times * max(0.0, gather + blocking - busy)
        self.ahead = path, nics

    def finish(self) -> MicroBatch:
        """Close the backward: what z could not hide behind products, and the last reduce-scatter."""
        left = max(0.0, self.queue + self.on_nics - self.path)
        self.exposed[2] += max(left, self.last_scatter) if "ors" in self.run.overlap else left
        return MicroBatch(self.compute, tuple(self.exposed), tuple(self.sent), self.reduced, self.reduces)

    def _queue(self, seconds: float, times: int, overlap: str) -> None:
        """Put something on z, which waits in a queue or, with that overlap off, at once."""
        self.sent[2] += times * seconds
        if overlap in self.run.overlap:
            self.queue += times * seconds
        else:
            self.exposed[2] += times * seconds
