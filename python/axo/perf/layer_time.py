"""Seconds of one layer and of one block on one rank: products and collectives.

Products are the layer's own (``axo.perf.layers``). Its collectives, which come from ``axo.matmul.cost`` (so what is
timed is what the engine issues), run at the bandwidth of equation (10) with the latency of a ring, or of a tree for an
all-reduce where that is less.

Tesseract multiplies q blocks a product: of its q steps of broadcasts and a product (2 q steps with reduces in backward)
the first shows, and of the others what their products do not hide. Experts are layers one behind the other; of the rows
that travel to those of other ranks nothing hides.

It does not know what overlaps what: ``axo.perf.model`` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from axo.grid import AXES, Grid
from axo.matmul import cost
from axo.perf.flops import newton_schulz_flops
from axo.perf.layers import AttentionKind, Layer, LinearKind, RoutingKind, seen
from axo.perf.machine import Machine
from axo.perf.run_options import RunOptions
from axo.perf.workload import Block, Workload

T = TypeVar("T")
OPTIMIZER_BYTES = 32.0  # a parameter: fp32 weight, two moments and gradient read, weight and moments written, bf16 copy
HOST_BYTES = 28.0  # of an update in the host's memory: weight, gradient and two moments read, all but one written
MUON_STEPS, MUON_ITEMSIZE = 5, 2  # of Newton-Schulz, and bytes of what it multiplies
STEPS = {  # what lets steps of Tesseract hide behind the products of others
    cost.BROADCAST_BLOCK: frozenset({"oag"}),
    cost.REDUCE_BLOCK: frozenset({"oar", "ors"}),
    cost.SUM_WEIGHT_BLOCK: frozenset({"oar", "ors"}),
}
STEPS_OF = {cost.FORWARD: "steps", cost.BACKWARD: "steps of backward"}


class Network:
    """Times of collectives on one grid of one machine (bandwidth by equation (10), latency of rings and trees)."""

    def __init__(self, machine: Machine, grid: Grid, spread: int = 1) -> None:
        self.axes = {}
        for axis in AXES:
            # Neighbours between which ``spread - 1`` are left out stand as far from each other as on this grid.
            of = replace(grid, y=grid.y * spread, z=grid.z // spread) if axis == "z" else grid
            ranks = of.size(axis)
            if ranks > 1:
                ring, tree = machine.latency(of, axis)
                self.axes[axis] = (ranks, 1.0 / machine.bandwidth(of, axis), ring, tree)
        self.shared = {axis: machine.crosses_nodes(grid, axis) for axis in AXES}

    def seconds(self, op: str, axis: str, size: float, calls: float = 1.0) -> float:
        """Return the time of ``calls`` collectives, one after another, into which each rank puts ``size`` bytes.

        Over an axis of one rank nothing is sent.
        """
        if not calls or axis not in self.axes:
            return 0.0
        ranks, per_byte, ring, tree = self.axes[axis]
        ring, tree = calls * ring, calls * tree
        if op == "all_gather":
            return (ranks - 1) * size * per_byte + ring
        if op == "reduce_scatter":
            return (ranks - 1) / ranks * size * per_byte + ring
        if op in ("broadcast", "reduce"):  # in chunks, one behind the other
            return size * per_byte + min(ring, tree)
        return 2 * (ranks - 1) / ranks * size * per_byte + 2 * min(ring, tree)


def optimizer_seconds(machine: Machine, grid: Grid, run: RunOptions, workload: Workload) -> float:
    """Return the seconds of the optimizer's step on a rank.

    Offloaded, gradients come down, the host updates and parameters go up, all three at the same time in pieces. Muon's
    matrices are those of owners (``axo.optim.muon``), or every rank gathers them, whichever is faster.
    """
    mine = run.optimizer_share(grid) * run.shard(grid, workload.parameters)
    if not run.offload:
        update = OPTIMIZER_BYTES * mine / (1e9 * machine.memory_gbs)
        return update + (_orthogonalized(machine, grid, run, workload) if run.optimizer == "muon" else 0.0)
    return max(run.weights * mine / machine.host_link_gbs, HOST_BYTES * mine / machine.host_memory_gbs) / 1e9


def _orthogonalized(machine: Machine, grid: Grid, run: RunOptions, workload: Workload) -> float:
    axes = [axis for axis in AXES if grid.size(axis) > 1 and (axis != "data" or run.zero)]
    ranks = math.prod(grid.size(axis) for axis in axes)
    rate = min((machine.bandwidth(grid, axis) for axis in axes), default=math.inf)
    seconds = 0.0
    for many, one in workload.matrices:
        work = newton_schulz_flops((one.out_features, one.in_features), MUON_STEPS) / machine.gemm_flops
        travels = (ranks - 1) / ranks * MUON_ITEMSIZE * one.in_features * one.out_features / rate
        seconds += min(many * (work + travels), -(-many // ranks) * (work + 2 * travels))
    return seconds


def data_seconds(network: Network, reduced: float, shard: float, run: RunOptions, times: int = 0) -> float:
    """Return the seconds over data in a step: gradients' all-reduces, ``reduced`` for each of ``times``, and ZeRO's.

    Each micro-batch reduces its gradients, so ``times`` is their number (0); with stages it is 1. ZeRO-2
    reduce-scatters them, which is half of an all-reduce (it starts behind backward; here it counts at the end). Then
    both stages gather the updated fp32 parameters, ``shard`` values a rank.
    """
    reduced *= times or run.micro_batches
    if not run.zero or "data" not in network.axes:
        return reduced
    gather = network.seconds("all_gather", "data", 4.0 * shard / network.axes["data"][0])
    return gather + (reduced / 2 if run.zero == 2 else reduced)


class AxisCost(NamedTuple):
    """Seconds of a layer's collectives over x, or over y; of a block the sums of its layers.

    Attributes:
        output: Of the forward, which nothing hides. again: Of these, those that recomputation does once more.
        blocking: The same of backward: statistics of norms, gathered tokens.
        reduce: All-reduces of dI. shown: Of these, what the dW products beside them do not hide.
        hidden: Behind the layer's own products: steps of Tesseract. hidden_forward: Of these, those of the forward.
    """

    output: float
    again: float
    blocking: float
    reduce: float
    shown: float
    hidden: float
    hidden_forward: float


SILENT = AxisCost(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class LayerCost(NamedTuple):
    """Seconds of one layer, one micro-batch.

    Attributes:
        forward, input_grad, weight_grad: Products (input_grad: the whole backward of a layer without weights).
        again: Of these, what selective recomputation runs once more; a full one runs the forward.
        gather, scatter: Over z: all-gather of the weight; reduce-scatter of dW, all-reduce of the bias gradient.
        reduced, reduces: Bytes that are all-reduced over data, the same for any size of it, and in how many calls.
        x, y: Collectives over these axes.
        z: Keys and values among ranks that share sequences.
    """

    forward: float
    input_grad: float
    weight_grad: float
    again: float
    gather: float
    scatter: float
    reduced: float
    reduces: float
    x: AxisCost
    y: AxisCost
    z: AxisCost


def layer_cost(
    layer: Layer, grid: Grid, rows: int, run: RunOptions, machine: Machine, network: Network, seq_length: int
) -> LayerCost:
    """Return the seconds of one layer (``rows`` of one data-parallel group of ``run.held_as(grid)``)."""
    square = run.algorithm != "axonn"
    blocks = grid.x if square and isinstance(layer, LinearKind) else 1
    products = layer.seconds(run.held_as(grid), rows, machine, seen(seq_length), run.token_ranks(grid))
    forward, input_grad, weight_grad = (blocks * seconds for seconds in products)
    if isinstance(layer, LinearKind) and layer.in_chunks(run):
        forward, input_grad, weight_grad = forward + input_grad + weight_grad, 0.0, 0.0
    again = 0.0 if layer.results_stay else forward
    calls = layer.calls(grid, rows * (grid.x * grid.z if square else 1), run)
    if not calls:
        return LayerCost(forward, input_grad, weight_grad, again, 0.0, 0.0, 0.0, 0.0, SILENT, SILENT, SILENT)
    if isinstance(layer, AttentionKind):
        z = _exchange(calls, grid, run, machine, forward, input_grad)
        return LayerCost(forward, input_grad, weight_grad, again, 0.0, 0.0, 0.0, 0.0, SILENT, SILENT, z)
    if isinstance(layer, RoutingKind):
        z = _routing(calls, replace(grid, z=layer.spread), machine)
        return LayerCost(forward, input_grad, weight_grad, again, 0.0, 0.0, 0.0, 0.0, SILENT, SILENT, z)
    sums = {axis: dict.fromkeys(("output", "blocking", "reduce", *STEPS_OF.values()), 0.0) for axis in "xy"}
    gather = scatter = reduced = reduces = 0.0
    for call in calls:
        times = layer.mine * call.calls
        if call.axis == "data":
            reduced, reduces = reduced + times * call.elements * call.itemsize, reduces + times
            continue
        seconds = times * network.seconds(call.op, call.axis, call.elements * call.itemsize)
        if call.purpose == cost.REDUCE_WEIGHT_GRAD or (call.purpose == cost.SCATTER_WEIGHT_GRAD and not square):
            scatter += seconds
        elif call.purpose == cost.GATHER_WEIGHT and not square:
            gather += seconds
        elif call.purpose == cost.REDUCE_INPUT_GRAD and call.op == "all_reduce":  # not of gathered tokens
            sums[call.axis]["reduce"] += seconds
        elif call.purpose in STEPS and STEPS[call.purpose] <= run.overlap:
            sums[call.axis][STEPS_OF[call.phase]] += seconds
        else:
            sums[call.axis]["output" if call.phase == cost.FORWARD else "blocking"] += seconds
    over = list[AxisCost]()
    shown = _shown_steps(sums, cost.FORWARD, blocks, forward)
    shown_backward = _shown_steps(sums, cost.BACKWARD, 2 * blocks, input_grad + weight_grad)
    for output, blocking, reduce, steps, steps_backward in (each.values() for each in sums.values()):
        output, hidden = output + shown * steps, (1.0 - shown) * steps
        blocking += shown_backward * steps_backward
        both = hidden + (1.0 - shown_backward) * steps_backward
        over.append(AxisCost(output, output, blocking, reduce, max(0.0, reduce - weight_grad), both, hidden))
    x, y = over
    return LayerCost(forward, input_grad, weight_grad, again, gather, scatter, reduced, reduces, x, y, SILENT)


def _exchange(
    calls: list[cost.Call], grid: Grid, run: RunOptions, machine: Machine, forward: float, backward: float
) -> AxisCost:
    """The ring of keys and values: each piece is on its way while the one before it is attended to."""
    ring = run.context_grid(grid)
    crosses = machine.crosses_nodes(ring, "z")
    rate = machine.to_another_node if crosses else machine.bandwidth(ring, "z")
    latency = 1e-6 * (machine.latency_inter_us if crosses else machine.latency_intra_us)
    sent = dict.fromkeys((cost.FORWARD, cost.BACKWARD), 0.0)
    for call in calls:
        if call.op == "send":
            sent[call.phase] += call.calls * (call.elements * call.itemsize / rate + latency)
    beside = (run.context - 1) / run.context
    shown, blocking = (
        max(0.0, seconds - beside * products)
        for seconds, products in zip(sent.values(), (forward, backward), strict=True)
    )
    hidden, behind = sent[cost.FORWARD] - shown, sent[cost.BACKWARD] - blocking
    if run.selective:  # they are sent again, and attention does not run again
        return AxisCost(shown, sent[cost.FORWARD], blocking, 0.0, 0.0, hidden + behind, 0.0)
    return AxisCost(shown, shown, blocking, 0.0, 0.0, hidden + behind, hidden)


def _routing(calls: list[cost.Call], ranks: Grid, machine: Machine) -> AxisCost:
    """Rows to the experts of the z ranks of a grid and back: first those of the same node, then the others."""
    near = min(ranks.z, max(1, machine.gpus_per_node // ranks.stride("z")))
    links = [(near - 1, machine.bandwidth(replace(ranks, z=near), "z"), machine.latency_intra_us)] if near > 1 else []
    links += [(ranks.z - near, machine.to_another_node, machine.latency_inter_us)] if near < ranks.z else []
    sent = dict.fromkeys((cost.FORWARD, cost.BACKWARD), 0.0)
    for call in calls:
        size = call.elements * call.itemsize / ranks.z
        sent[call.phase] += sum(peers * size / rate + 1e-6 * latency for peers, rate, latency in links)
    forward, backward = sent.values()
    return AxisCost(forward, forward, backward, 0.0, 0.0, 0.0, 0.0)


def _shown_steps(sums: dict[str, dict[str, float]], phase: str, count: int, compute: float) -> float:
    """The share of the communication of ``count`` of Tesseract's steps that their products do not hide."""
    total = sum(each[STEPS_OF[phase]] for each in sums.values())
    return (total / count + (count - 1) * max(0.0, (total - compute) / count)) / total if total else 0.0


class BlockCost(NamedTuple):
    """Seconds of one block, one micro-batch.

    Attributes:
        all: The sums of its layers.
        last_scatter: Of the layer whose backward comes last.
        segments: From one gathered weight to the next: its gather, products and outputs, outputs over x and y, and
            what goes round over z.
    """

    all: LayerCost
    last_scatter: float
    segments: list[tuple[float, ...]]


def block_cost(costs: list[LayerCost], unsummed: int | None) -> BlockCost:
    """Add up the layers of a block; ``unsummed``: the place of one whose output recomputation does not sum again."""
    if unsummed is not None:
        costs[unsummed] = costs[unsummed]._replace(x=costs[unsummed].x._replace(again=0.0))
    *columns, x, y, z = zip(*costs, strict=True)
    over = (AxisCost._make(map(sum, zip(*axis, strict=True))) for axis in (x, y, z))
    segments, gather, path, sums = list[tuple[float, ...]](), 0.0, 0.0, (0.0, 0.0, 0.0)
    for one in costs:
        if one.gather and path:
            segments.append((gather, path, *sums))
            gather, path, sums = 0.0, 0.0, (0.0, 0.0, 0.0)
        outputs = one.x.output, one.y.output, one.z.output
        gather, path = gather + one.gather, path + one.forward + outputs[0] + outputs[1] + outputs[2]
        sums = sums[0] + outputs[0], sums[1] + outputs[1], sums[2] + outputs[2] + one.z.hidden_forward
    segments.append((gather, path, *sums))
    last_scatter = next((one.scatter for one in costs if one.scatter), 0.0)
    return BlockCost(LayerCost._make([*map(sum, columns), *over]), last_scatter, segments)


class Costs:
    """What plans of one request share, each computed once: networks, layers, blocks and more of one machine."""

    def __init__(self, machine: Machine, seq_length: int) -> None:
        self.machine, self.seq_length = machine, seq_length
        self._values: dict[object, Any] = {}

    def once(self, key: object, compute: Callable[[], T]) -> T:
        """What ``compute`` returns, or has returned for this key."""
        value: Any = self._values.get(key, self)  # a key is hashed once: that takes as long as some of what is kept
        if value is self:
            value = self._values[key] = compute()
        return value  # type: ignore[no-any-return]

    def network(self, grid: Grid, spread: int = 1) -> Network:
        """The network of one grid; of the ``spread``-th neighbours along z alone, and of the other axes."""
        return self.once((grid, spread), lambda: Network(self.machine, grid, spread))

    def layer(self, layer: Layer, grid: Grid, rows: int, run: RunOptions) -> LayerCost:
        """The cost of a layer; ``rows`` of one data-parallel group."""
        return self.once(
            (layer, grid.data > 1, *_where(grid, rows, run)),
            lambda: layer_cost(layer, grid, rows, run, self.machine, self.network(grid, layer.spread), self.seq_length),
        )

    def block(self, block: Block, grid: Grid, rows: int, run: RunOptions) -> BlockCost:
        """The cost of a block; ``rows`` of one data-parallel group. It is the same for any number of them."""

        def add_up() -> BlockCost:
            last, on = block.unsummed(grid, run), replace(grid, data=2)
            costs = [self.layer(one, on, rows, run) for one in block.layers]
            return block_cost(costs, None if last is None else block.layers.index(last))

        return self.once((block.once, *_where(grid, rows, run)), add_up)


def _where(grid: Grid, rows: int, run: RunOptions) -> tuple[object, ...]:
    """What the cost of a block depends on beside the block."""
    return grid.x, grid.y, grid.z, rows, *run.of_layer
