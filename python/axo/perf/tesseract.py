"""Tesseract in the planner: which grids it can use, what a rank holds there, and what a step takes.

On q x q x d x data a rank has 1/q of all features, 1/(q d data) of the rows and 1/q^2 of the weights: as much as with
axonn on the grid q x q x 1 x (q d data), of q times as many ranks, whose memory it has. It multiplies q blocks a
product. What it sends is what ``cost()`` counts for its arrangement; in time

    forward     q steps of two broadcasts and a product:  first + (q - 1) max(0, broadcasts - product)        exposed
    backward    2 q steps of a broadcast, a product and a reduce, exposed alike
    depth       sums of weight gradients over z run behind backward; what is longer than that is exposed
    end         all-reduce over data, optimizer

Without the overlap oag all broadcasts are exposed, without oar and ors all reduces. SUMMA is its case z = 1.

Experts are products one behind the other, each with its even share of the rows. It does not simulate, and knows neither
ZeRO nor convolutions: such requests leave its grids out.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple

from axo.arrangement import TESSERACT
from axo.grid import AXES, Grid
from axo.matmul import cost
from axo.perf.layer_time import Network, RunOptions, calls_of, data_seconds, optimizer_seconds, products
from axo.perf.machine import Machine
from axo.perf.model import StepTime
from axo.perf.workload import Layer, Workload

_BROADCASTS, _REDUCES = (cost.BROADCAST_BLOCK,), (cost.REDUCE_BLOCK, cost.SUM_WEIGHT_BLOCK)


def grids(ranks: int) -> list[Grid]:
    """All grids of ``ranks`` that it can use: x = y = q above 1, and z of at most q."""
    return [grid for grid in Grid.all(ranks) if grid.x == grid.y > 1 and grid.z <= grid.x]


def as_much_as(grid: Grid) -> Grid:
    """The grid on which axonn's ranks hold what Tesseract's hold on ``grid``."""
    return Grid(grid.x, grid.y, 1, grid.data * grid.z * grid.x)


def impossible(workload: Workload, grid: Grid, sequences: int, zero: int) -> str:
    """Say what stands against ``grid``; empty where nothing does."""
    if TESSERACT.row_parts(grid) > sequences:
        return f"z*data*x={TESSERACT.row_parts(grid)} is more than the {sequences} sequences of the batch"
    if zero:
        return "the planner knows no ZeRO with Tesseract"
    for block in workload.blocks:
        for layer in block.layers:
            if layer.experts == 1 and layer.rows != 1:
                return f"the planner knows no convolutions with Tesseract ({layer.name})"
    return workload.misfit(grid)


class _LayerTime(NamedTuple):
    """Seconds of one layer, one micro-batch.

    ``forward`` and ``backward`` are products, ``shown_*`` by axis the communication time that products do not hide,
    ``sent`` by axis all communication.
    """

    forward: float
    backward: float
    shown_forward: dict[str, float]
    shown_backward: dict[str, float]
    forward_sent: dict[str, float]
    sent: dict[str, float]
    depth: float  # sums over z, which wait in a queue behind backward
    data: float


def predict(workload: Workload, grid: Grid, machine: Machine, run: RunOptions) -> StepTime:
    """Predict the time of one step; ``run.rows`` are those of one rank and micro-batch (of ``as_much_as(grid)``)."""
    network, step = Network(machine, grid), StepTime()
    known: dict[Layer, _LayerTime] = {}
    queue = path = data = 0.0
    for block in workload.blocks:
        for layer in block.layers:
            if layer not in known:
                expert = replace(layer, experts=1)
                known[layer] = _layer_time(expert, grid, machine, run, network, workload.seq_length)
            one, times, again = known[layer], block.repeat * layer.experts, 1 + block.checkpointed
            step.compute += times * (again * one.forward + one.backward)
            for axis in AXES:
                shown = again * one.shown_forward.get(axis, 0.0) + one.shown_backward.get(axis, 0.0)
                step.exposed[axis] += times * shown
                sent = one.sent.get(axis, 0.0) + (again - 1) * one.forward_sent.get(axis, 0.0)
                step.communication[axis] += times * sent
            path += times * (one.backward + sum(one.shown_backward.values()))
            queue += times * one.depth
            data += times * one.data
    step.exposed["z"] += max(0.0, queue - path)
    for axis in AXES:
        step.exposed[axis] *= run.micro_batches
        step.communication[axis] *= run.micro_batches
    step.compute *= run.micro_batches
    shard = workload.parameters / (grid.x * grid.y)
    end = data_seconds(network, data, shard, run)
    step.exposed["data"] += end
    step.communication["data"] += end
    step.contend(machine)
    step.optimizer = optimizer_seconds(machine, grid, run, shard)
    return step


def _layer_time(
    layer: Layer, grid: Grid, machine: Machine, run: RunOptions, network: Network, seq_length: int
) -> _LayerTime:
    held = as_much_as(grid)
    rows = run.group_rows(held)
    forward, input_grad, weight_grad = products(layer, held, rows, machine, seq_length)
    blocks = grid.x if layer.kind == "linear" else 1
    forward, backward = blocks * forward, blocks * (input_grad + weight_grad)
    steps: dict[tuple[str, bool], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    shown: dict[str, dict[str, float]] = {cost.FORWARD: defaultdict(float), cost.BACKWARD: defaultdict(float)}
    sent: dict[str, dict[str, float]] = {cost.FORWARD: defaultdict(float), cost.BACKWARD: defaultdict(float)}
    depth = data = 0.0
    for call in calls_of(layer, grid, rows * grid.x * grid.z, run, arrangement=TESSERACT):
        seconds = call.calls * network.seconds(call.op, call.axis, call.elements * call.itemsize)
        if call.axis == "data":
            data += seconds
            continue
        sent[call.phase][call.axis] += seconds
        if call.purpose in (*_BROADCASTS, *_REDUCES):
            hides = "oag" in run.overlap if call.purpose in _BROADCASTS else {"oar", "ors"} <= run.overlap
            steps[call.phase, hides][call.axis] += seconds
        elif call.purpose == cost.REDUCE_WEIGHT_GRAD and "ors" in run.overlap:
            depth += seconds
        else:
            shown[call.phase][call.axis] += seconds
    for (phase, hides), by_axis in steps.items():
        count, compute = (blocks, forward) if phase == cost.FORWARD else (2 * blocks, backward)
        total = sum(by_axis.values())
        each = total / count
        left = each + (count - 1) * max(0.0, each - compute / count) if hides else total
        for axis, seconds in by_axis.items():
            shown[phase][axis] += left * seconds / total
    both = {axis: sent[cost.FORWARD][axis] + sent[cost.BACKWARD][axis] for axis in AXES}
    return _LayerTime(
        forward, backward, shown[cost.FORWARD], shown[cost.BACKWARD], sent[cost.FORWARD], both, depth, data
    )
