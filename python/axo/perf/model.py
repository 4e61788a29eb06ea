"""How long one training step takes on a grid: the papers' communication model, plus products, overlap and latency.

Ring collectives over G ranks, m = elements that each rank puts in, b = elements a second (equations (1)-(3)):

    t_AG = (G-1) m / b        t_RS = (G-1)/G m / b        t_AR = 2 (G-1)/G m / b

`layer_times` gives equations (4)-(9) of one layer as the papers write them. `predict` goes further: it takes the calls
of every layer from ``axo.matmul.cost`` (so padding, embeddings, norms and recomputation count), gives each axis the
bandwidth of equation (10), adds latency, and lays the schedule over the products:

    forward     a segment runs from one gathered weight to the next: max(products + blocking, next gather)      (OAG)
    backward    dI product, then max(dW product, all-reduce of dI) (OAR); reduce-scatters queue behind           (ORS)
    end         all-reduce over data, optimizer

Collectives of two axes that both leave the node share its NICs: their times add where they would overlap.
It does not simulate: ``axo.perf.simulator`` does, event by event, and is held against this closed form.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from axo.grid import AXES, Grid
from axo.perf.layer_time import LayerCost, Network, Run, data_seconds, layer_cost, optimizer_seconds
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


# ------------------------------------------------------------------------------------------- equations (1) to (9)


def ring_seconds(op: str, ranks: int, elements: float, bandwidth: float) -> float:
    """Return equations (1)-(3): time of a ring collective; ``bandwidth`` in elements (or bytes) a second.

    Raises:
        ValueError: An operation that has no ring equation.
    """
    if op not in _RING:
        raise ValueError(f"ring_seconds: op={op!r} has no ring equation; use one of {', '.join(_RING)}")
    return _RING[op](ranks) * elements / bandwidth


_RING = {
    "all_gather": lambda ranks: ranks - 1,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
}


class LayerTimes(NamedTuple):
    """Equations (4)-(8) of one layer, named as the papers name them."""

    ag_z: float
    rs_z: float
    ar_y: float
    ar_x: float
    ar_data: float

    @property
    def total(self) -> float:
        """Equation (9)."""
        return sum(self)


def layer_times(
    grid: Grid, m: float, k: float, n: float, bandwidth: dict[str, float] | float = 1.0, *, transposed: bool = False
) -> LayerTimes:
    """Return equations (4)-(8) for ``I[m, k] W[k, n]``, m = rows of one data-parallel group.

    Args:
        bandwidth: Elements a second: one figure (placement-agnostic) or one for each axis. A transposed layer swaps
            both the sizes and the bandwidths of x and y, so its ``ar_y`` runs over x.
    """
    b = dict.fromkeys(AXES, bandwidth) if not isinstance(bandwidth, dict) else bandwidth
    x, y = ("y", "x") if transposed else ("x", "y")
    gx, gy, gz, gd = grid.size(x), grid.size(y), grid.z, grid.data
    return LayerTimes(
        ag_z=ring_seconds("all_gather", gz, k * n / (gx * gy * gz), b["z"]),
        rs_z=ring_seconds("reduce_scatter", gz, k * n / (gx * gy), b["z"]),
        ar_y=ring_seconds("all_reduce", gy, m * n / (gz * gx), b[y]),
        ar_x=ring_seconds("all_reduce", gx, m * k / (gz * gy), b[x]),
        ar_data=ring_seconds("all_reduce", gd, k * n / (gx * gy * gz), b["data"]),
    )


def communication_seconds(workload: Workload, grid: Grid, machine: Machine, run: Run, *, aware: bool = True) -> float:
    """Return the papers' own figure of merit: equation (9) over all fully connected layers, seconds.

    Args:
        aware: Bandwidths by equation (10); False: one bandwidth for all axes (placement-agnostic).
    """
    on = machine if aware else machine.agnostic()
    bandwidth = {axis: on.bandwidth(grid, axis) / run.itemsize for axis in AXES}
    rows = run.batch_tokens / grid.data
    total = 0.0
    for block in workload.blocks:
        for layer in block.layers:
            if layer.kind == "linear":
                sizes = (rows * layer.rows, layer.in_features, layer.out_features)
                total += block.repeat * layer_times(grid, *sizes, bandwidth, transposed=layer.transposed).total
    return total


# ---------------------------------------------------------------------------------------------------- a whole step


def predict(
    workload: Workload,
    grid: Grid,
    machine: Machine,
    run: Run,
    known: dict[tuple[int, int], LayerCost] | None = None,
    network: Network | None = None,
) -> StepTime:
    """Predict the time of one step of ``workload`` on ``grid``.

    Args:
        known: Costs by rows of a group and ``id`` of a layer that other runs on this grid have found; more are put in.
        network: Of this grid, if it is known.

    Returns:
        Products, exposed and total communication by axis, optimizer: seconds.
    """
    network = network or Network(machine, grid)
    rows = run.group_rows(grid)
    step = StepTime()
    pieces = _Pieces(step, run, network, workload)
    known = {} if known is None else known
    for block in workload.blocks:
        costs = []
        for layer in block.layers:
            if (rows, id(layer)) not in known:
                known[rows, id(layer)] = layer_cost(layer, grid, rows, run, machine, network, workload.seq_length)
            costs.append(known[rows, id(layer)])
        pieces.block(block, costs)
    pieces.finish()
    for axis in AXES:
        step.exposed[axis] *= run.micro_batches
        step.communication[axis] *= run.micro_batches
    step.compute *= run.micro_batches
    shard = workload.parameters / (grid.x * grid.y * grid.z)
    data = data_seconds(network, pieces.data, shard, run)
    step.exposed["data"] += data
    step.communication["data"] += data
    hidden = sum(step.communication.values()) - step.exposed_total
    step.contention = machine.contention * max(0.0, min(hidden, step.compute))
    step.optimizer = optimizer_seconds(machine, grid, run, shard)
    return step


class _Pieces:
    """Adds blocks up into a StepTime, one micro-batch."""

    def __init__(self, step: StepTime, run: Run, network: Network, workload: Workload) -> None:
        self.step, self.run, self.network, self.workload = step, run, network, workload
        self.data = 0.0
        self.path = 0.0  # backward: products and blocking collectives, the time in which z may hide
        self.queue = 0.0  # backward: what waits on z
        self.shared = 0.0  # backward: blocking collectives that use the NICs too
        self.last_scatter = 0.0
        self.open: tuple[float, float] | None = None  # the last segment so far: its path, its collectives on the NICs

    def block(self, block: Block, costs: list[LayerCost]) -> None:
        """Add one block, ``repeat`` times."""
        times = block.repeat
        for one in costs:
            self.step.compute += times * (one.forward + one.input_grad + one.weight_grad)
            self.data += times * one.data
        self._forward(costs, times)
        if block.checkpointed:
            self._recompute(block, costs, times)
        elif not self.run.keeps:
            self._regather(costs, times)
        self._backward(costs, times)

    def _forward(self, costs: list[LayerCost], times: int) -> None:
        segments = _segments(costs)
        for i, (gather, path, blocking) in enumerate(segments):
            self._blocking(blocking, times)
            self.step.communication["z"] += times * gather
            if "oag" not in self.run.overlap:
                self.step.exposed["z"] += times * gather
                continue
            if i == 0:  # behind what stood before this block once, then behind the end of its own last repeat
                before = self.open or (0.0, 0.0)
                self.step.exposed["z"] += max(0.0, gather + before[1] - before[0])
                repeats, after = times - 1, segments[0][0]
                last = segments[-1]
                behind = after + self._nics(last[2]) - last[1]
                self.step.exposed["z"] += repeats * max(0.0, behind)
            if i + 1 < len(segments):
                self.step.exposed["z"] += times * max(0.0, segments[i + 1][0] + self._nics(blocking) - path)
            self.open = path, self._nics(blocking)

    def _recompute(self, block: Block, costs: list[LayerCost], times: int) -> None:
        again = self.run.run_again(block.layers, [one.forward for one in costs])
        self.step.compute += times * again
        self.path += times * again
        for one in costs:
            self._blocking(one.output, times)
            self.path += times * sum(one.output.values())
            self.shared += times * self._nics(one.output)
        self._regather(costs, times)

    def _regather(self, costs: list[LayerCost], times: int) -> None:
        gathers = times * (1.0 - self.run.cached_gathers) * sum(one.gather for one in costs)
        self.step.communication["z"] += gathers
        if "oag" in self.run.overlap:
            self.queue += gathers
        else:
            self.step.exposed["z"] += gathers

    def _backward(self, costs: list[LayerCost], times: int) -> None:
        hides = "oar" in self.run.overlap
        for one in costs:
            self._blocking(one.backward_blocking, times)
            reduce = sum(one.input_reduce.values())
            for axis, seconds in one.input_reduce.items():
                self.step.communication[axis] += times * seconds
                self.step.exposed[axis] += times * (max(0.0, seconds - one.weight_grad) if hides else seconds)
            self.path += times * (one.input_grad + sum(one.backward_blocking.values()))
            self.path += times * (max(one.weight_grad, reduce) if hides else one.weight_grad + reduce)
            self.shared += times * (self._nics(one.input_reduce) + self._nics(one.backward_blocking))
            self.step.communication["z"] += times * one.scatter
            if "ors" in self.run.overlap:
                self.queue += times * one.scatter
            else:
                self.step.exposed["z"] += times * one.scatter
            if one.scatter and not self.last_scatter:
                self.last_scatter = one.scatter

    def finish(self) -> None:
        """Close the backward: what z could not hide behind products, and the last reduce-scatter."""
        left = max(0.0, self.queue + self.shared - self.path)
        self.step.exposed["z"] += max(left, self.last_scatter) if "ors" in self.run.overlap else left

    def _blocking(self, by_axis: dict[str, float], times: int) -> None:
        for axis, seconds in by_axis.items():
            self.step.communication[axis] += times * seconds
            self.step.exposed[axis] += times * seconds

    def _nics(self, by_axis: dict[str, float]) -> float:
        """Seconds of collectives that share the NICs with z."""
        if not self.network.shared["z"]:
            return 0.0
        return sum(seconds for axis, seconds in by_axis.items() if axis != "z" and self.network.shared[axis])


def _segments(costs: Iterable[LayerCost]) -> list[tuple[float, float, dict[str, float]]]:
    """Cut layers at gathered weights: (gather, products + blocking until the next one, blocking by axis)."""
    segments: list[tuple[float, float, dict[str, float]]] = []
    gather, path, blocking = 0.0, 0.0, dict[str, float]()
    for one in costs:
        if one.gather and path:
            segments.append((gather, path, blocking))
            gather, path, blocking = 0.0, 0.0, {}
        gather += one.gather
        path += one.forward + sum(one.output.values())
        for axis, seconds in one.output.items():
            blocking[axis] = blocking.get(axis, 0.0) + seconds
    segments.append((gather, path, blocking))
    return segments
