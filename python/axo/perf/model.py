"""How long one training step takes on a grid: the papers' communication model, plus products, overlap and latency.

`predict` takes the calls of every layer from ``axo.matmul.cost`` (so padding, embeddings, norms and recomputation
count), gives each axis the bandwidth of equation (10), adds latency, and lays them over the products:

    forward     a segment runs from one gathered weight to the next: max(products + blocking, next gather)      (OAG)
    backward    dI product, then max(dW product, all-reduce of dI) (OAR); reduce-scatters queue behind           (ORS)
    end         all-reduce over data, optimizer

Collectives of two axes that both leave the node share its NICs: their times add where they would overlap.
It does not simulate: ``axo.perf.simulator`` does, event by event, and is held against this closed form.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import NamedTuple

from axo.grid import AXES, Grid
from axo.perf.layer_time import AxisSeconds, BlockCost, Costs, Network, RunOptions, data_seconds, optimizer_seconds
from axo.perf.machine import Machine
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
    reduced = network.seconds("all_reduce", "data", one.reduced, one.reduces) if one.reduces else 0.0
    shard = run.shard(grid, workload.parameters)
    data = data_seconds(network, reduced, shard, run)
    exposed = {axis: pieces * seconds for axis, seconds in zip("xyz", one.exposed, strict=True)} | {"data": data}
    sent = {axis: pieces * seconds for axis, seconds in zip("xyz", one.communication, strict=True)} | {"data": data}
    step = StepTime(pieces * one.compute, exposed, sent)
    step.contend(machine)
    step.optimizer = optimizer_seconds(machine, grid, run, shard)
    return step


def micro_batch(workload: Workload, grid: Grid, run: RunOptions, costs: Costs) -> MicroBatch:
    """Lay the collectives of one micro-batch over its products."""
    rows = run.group_rows(grid)

    def lay() -> MicroBatch:
        pieces = _Pieces(run, costs.network(grid))
        for block in workload.blocks:
            pieces.block(block, costs.block(block, grid, rows, run))
        return pieces.finish()

    way = (workload, run.selective, run.cached_gathers, run.sequence_parallel, run.algorithm)
    return costs.once((grid.x, grid.y, grid.z, grid.data > 1, rows, *way), lay)


class _Pieces:
    """Adds blocks up, one micro-batch."""

    def __init__(self, run: RunOptions, network: Network) -> None:
        self.run = run
        self.shared = [network.shared["z"] and network.shared[axis] for axis in "xy"]  # who shares the NICs with z
        self.compute = self.reduced = self.reduces = 0.0
        self.exposed, self.sent = [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]
        self.path = 0.0  # backward: products and blocking collectives, the time in which z may hide
        self.queue = 0.0  # backward: what waits on z
        self.on_nics = 0.0  # backward: blocking collectives that use the NICs too
        self.last_scatter = 0.0
        self.open: tuple[float, float] | None = None  # the last segment so far: its path, its collectives on the NICs

    def block(self, block: Block, one: BlockCost) -> None:
        """Add one block, ``repeat`` times."""
        times = block.repeat
        self.compute += times * (one.forward + one.input_grad + one.weight_grad)
        self.reduced, self.reduces = self.reduced + times * one.reduced, self.reduces + times * one.reduces
        for axis in (0, 1):
            self.sent[axis] += times * (one.hidden[axis] + block.checkpointed * one.hidden_forward[axis])
        self._forward(one, times)
        if block.checkpointed:
            again = one.again_kept if self.run.selective else one.again
            self.compute += times * again
            self.path += times * again
            self._backward_waits(one.again_output, one.again_output, times)
        if block.checkpointed or not self.run.keeps:
            self._queue((1.0 - self.run.cached_gathers) * one.gather, times, "oag")
        shows = one.shown_reduce if "oar" in self.run.overlap else one.reduce
        self._backward_waits(one.blocking, one.blocking, times)
        self._backward_waits(one.reduce, shows, times)
        self.path += times * (one.input_grad + one.weight_grad)
        self._queue(one.scatter, times, "ors")
        self.last_scatter = self.last_scatter or one.last_scatter

    def _forward(self, one: BlockCost, times: int) -> None:
        self._waits(one.output, one.output, times)
        self.sent[2] += times * one.gather
        if "oag" not in self.run.overlap:
            self.exposed[2] += times * one.gather
            return
        # The first gather stands behind what was before this block once, then behind the end of its own last repeat.
        first, last = one.segments[0], one.segments[-1]
        before = self.open or (0.0, 0.0)
        self.exposed[2] += max(0.0, first[0] + before[1] - before[0])
        self.exposed[2] += (times - 1) * max(0.0, first[0] + self._nics(last[2]) - last[1])
        for (_, path, blocking), (gather, _, _) in itertools.pairwise(one.segments):
            self.exposed[2] += times * max(0.0, gather + self._nics(blocking) - path)
        self.open = last[1], self._nics(last[2])

    def finish(self) -> MicroBatch:
        """Close the backward: what z could not hide behind products, and the last reduce-scatter."""
        left = max(0.0, self.queue + self.on_nics - self.path)
        self.exposed[2] += max(left, self.last_scatter) if "ors" in self.run.overlap else left
        return MicroBatch(self.compute, tuple(self.exposed), tuple(self.sent), self.reduced, self.reduces)

    def _waits(self, every: AxisSeconds, shows: AxisSeconds, times: int) -> None:
        for axis in (0, 1):
            self.sent[axis] += times * every[axis]
            self.exposed[axis] += times * shows[axis]

    def _backward_waits(self, every: AxisSeconds, shows: AxisSeconds, times: int) -> None:
        self._waits(every, shows, times)
        self.path += times * sum(shows)
        self.on_nics += times * self._nics(every)

    def _queue(self, seconds: float, times: int, overlap: str) -> None:
        """Put something on z, which waits in a queue or, with that overlap off, at once."""
        self.sent[2] += times * seconds
        if overlap in self.run.overlap:
            self.queue += times * seconds
        else:
            self.exposed[2] += times * seconds

    def _nics(self, pair: AxisSeconds) -> float:
        """Seconds of collectives that share the NICs with z."""
        return pair[0] * self.shared[0] + pair[1] * self.shared[1]
