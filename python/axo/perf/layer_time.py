"""Seconds of one layer on one rank: its products and its collectives.

Collectives come from ``axo.matmul.cost`` (so what is timed is what the engine issues) and run at the bandwidth of
equation (10) with the latency of a ring, or of a tree for an all-reduce where that is less. Products run at the
machine's GEMM rate; what only moves memory (norms, activations, residual sums) runs at its memory bandwidth.
It does not know what overlaps what: ``axo.perf.model`` and ``axo.perf.simulator`` do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from axo.arrangement import AXONN, Arrangement
from axo.grid import AXES, Coords, Grid
from axo.matmul import cost
from axo.perf.flops import seen
from axo.perf.machine import Machine
from axo.perf.workload import NORM, Layer, Workload

OVERLAPS = ("oar", "ors", "oag")
PRECISIONS = {  # bytes of Run.itemsize, stream and weights
    "bf16-mixed": {"itemsize": 2, "stream": 4, "weights": 4},
    "bf16-true": {"itemsize": 2, "stream": 2, "weights": 2},
    "32-true": {"itemsize": 4, "stream": 4, "weights": 4},
}
OPTIMIZER_BYTES = 32.0  # a parameter: fp32 weight, two moments and gradient read, weight and moments written, bf16 copy


HOST_BYTES = 28.0  # of an update in the host's memory: weight, gradient and two moments read, all but one written


@dataclass(frozen=True)
class Run:
    """How a step is run.

    Args:
        batch_tokens: Tokens of one step, all ranks together.
        itemsize: Bytes an element of the dtype that products compute in (bf16: 2); master weights are fp32.
        stream: Bytes an element of the residual stream: fp32 under autocast, whatever products compute in.
        weights: Bytes an element of weights, their gradients and the optimizer's moments.
        overlap: Which of oar, ors and oag hide communication.
        cached_gathers: Share of the gathered weights that are kept for their second use (1: N gathers a step, 0: 2N):
            in the recomputation of a checkpointed block, else in backward.
        micro_batches: Pieces that the batch of a rank is run in, one after another (gradient accumulation).
        rows: Rows of one data-parallel group and micro-batch, where whole sequences make them more than the even share.
        bucket_bytes: Gradients are reduced over data in buckets of this size.
        zero: 1 cuts the optimizer's state over data, 2 the gradients too.
        offload: The optimizer's state lies in the host's memory, and its step runs there (``axo.Offload``).
        selective: A checkpointed block keeps the results of its products and of attention; only what lies between
            them is run again, and all its collectives.
    """

    batch_tokens: int
    itemsize: int = 2
    stream: int = 4
    weights: int = 4
    overlap: frozenset[str] = frozenset(OVERLAPS)
    cached_gathers: float = 0.0
    micro_batches: int = 1
    rows: int = 0
    bucket_bytes: int = 25 << 20
    zero: int = 0
    selective: bool = False
    offload: bool = False

    @property
    def keeps(self) -> bool:
        """True when every layer gathers its weight once a step."""
        return self.cached_gathers == 1.0

    def run_again(self, layers: Iterable[Layer], forward: Iterable[float]) -> float:
        """Of these layers' ``forward`` seconds: those that a checkpointed block takes once more."""
        kept = ("linear", "attention") if self.selective else ()
        return sum(seconds for layer, seconds in zip(layers, forward, strict=True) if layer.kind not in kept)

    def optimizer_share(self, grid: Grid) -> float:
        """Share of its parameters whose optimizer state a rank has."""
        return 1.0 / grid.data if self.zero else 1.0

    def group_rows(self, grid: Grid) -> int:
        """Rows of one data-parallel group and micro-batch: m of the equations."""
        return self.rows or max(1, round(self.batch_tokens / (grid.data * self.micro_batches)))


class Network:
    """Times of collectives on one grid of one machine (bandwidth by equation (10), latency of rings and trees)."""

    def __init__(self, machine: Machine, grid: Grid) -> None:
        self.axes = {}
        for axis in AXES:
            ranks = grid.size(axis)
            if ranks > 1:
                ring, tree = machine.latency(grid, axis)
                self.axes[axis] = (ranks, 1.0 / machine.bandwidth(grid, axis), ring, tree)
        self.shared = {axis: machine.crosses_nodes(grid, axis) for axis in AXES}

    def seconds(self, op: str, axis: str, size: float, calls: float = 1.0) -> float:
        """Return the time of ``calls`` collectives, one after another, into which each rank puts ``size`` bytes."""
        ranks, per_byte, ring, tree = self.axes[axis]
        ring, tree = calls * ring, calls * tree
        if op == "all_gather":
            return (ranks - 1) * size * per_byte + ring
        if op == "reduce_scatter":
            return (ranks - 1) / ranks * size * per_byte + ring
        if op in ("broadcast", "reduce"):  # in chunks, one behind the other
            return size * per_byte + min(ring, tree)
        return 2 * (ranks - 1) / ranks * size * per_byte + 2 * min(ring, tree)


class LayerCost(NamedTuple):
    """Seconds of one layer, one micro-batch: products by phase, collectives by purpose."""

    forward: float  # products of the forward
    input_grad: float  # dI product (or the whole backward of a layer without weights)
    weight_grad: float  # dW product
    gather: float  # all-gather of the weight over z
    output: dict[str, float]  # blocking collectives of the forward, by axis
    input_reduce: dict[str, float]  # all-reduce of dI
    backward_blocking: dict[str, float]  # statistics of norms
    scatter: float  # reduce-scatter of dW, all-reduce of the bias gradient over z
    data: float  # all-reduce over data


def optimizer_seconds(machine: Machine, grid: Grid, run: Run, shard: float) -> float:
    """Return the seconds of the optimizer's step for a rank's ``shard`` of the parameters.

    Offloaded, gradients come down, the host updates and parameters go up, all three at the same time in pieces.
    """
    mine = run.optimizer_share(grid) * shard
    if not run.offload:
        return OPTIMIZER_BYTES * mine / (1e9 * machine.memory_gbs)
    return max(run.weights * mine / machine.host_link_gbs, HOST_BYTES * mine / machine.host_memory_gbs) / 1e9


def data_seconds(network: Network, reduced: float, shard: float, run: Run, times: int = 0) -> float:
    """Return the seconds over data in a step: gradients' all-reduces, ``reduced`` for each of ``times``, and ZeRO's.

    Each micro-batch reduces its gradients, so ``times`` is their number (0); with stages it is 1. ZeRO-2
    reduce-scatters them, which is half of an all-reduce (it starts behind backward; here it counts at the end). Then
    both stages gather the updated fp32 parameters, ``shard`` values a rank.
    """
    reduced *= times or run.micro_batches
    if not run.zero or "data" not in network.axes:
        return reduced
    ranks = network.axes["data"][0]
    gather = network.seconds("all_gather", "data", 4.0 * shard / ranks)
    return gather + (reduced / 2 if run.zero == 2 else reduced)


def calls_of(
    layer: Layer,
    grid: Grid,
    rows: int,
    run: Run,
    *,
    checkpointed: bool = False,
    gathers: int = 1,
    arrangement: Arrangement = AXONN,
    coords: Coords = cost.FIRST,
) -> list[cost.Call]:
    """Return the collectives of one layer in one step (``rows`` of one data-parallel group), from its cost().

    Those of one expert, where there are several.
    """
    rows = max(1, round(rows * layer.rows))
    if layer.kind == "linear":
        copies = layer.kv_copies(grid.x)
        return cost.linear(
            grid,
            rows,
            layer.in_features,
            layer.out_features,
            layer.bias,
            transposed=layer.transposed,
            itemsize=run.itemsize,
            recompute=checkpointed,
            gathers=gathers,
            input_grad=layer.input_grad,
            copied_features=layer.kv_features if copies > 1 else 0,
            copies=copies,
            arrangement=arrangement,
            coords=coords,
        )
    if layer.kind == "embedding":
        return cost.embedding(grid, rows, layer.in_features, layer.out_features, arrangement=arrangement, coords=coords)
    if layer.kind == "norm":
        return cost.norm(
            grid,
            rows,
            layer.out_features or layer.in_features,
            kind=layer.norm,
            recompute=checkpointed,
            axis=arrangement.inner if layer.over == "x" else layer.over or None,
            sum_grad_over=() if layer.over else (arrangement.inner,),
            arrangement=arrangement,
            coords=coords,
        )
    if layer.kind == "loss":
        return cost.cross_entropy(grid, rows, arrangement=arrangement, coords=coords)
    return []


def step_calls(workload: Workload, grid: Grid, run: Run, coords: Coords = cost.FIRST) -> list[cost.Call]:
    """Return every collective of one step of one micro-batch on the rank at ``coords``.

    Gradients come in the order of backward, since that decides which share a bucket.
    """
    rows = run.group_rows(grid)
    calls = []
    for block in reversed(workload.blocks):
        gathers = 1 if run.keeps else 2
        for _ in range(block.repeat):
            for layer in reversed(block.layers):
                calls += layer.experts * calls_of(
                    layer, grid, rows, run, checkpointed=block.checkpointed, gathers=gathers, coords=coords
                )
    return cost.in_buckets(calls, run.bucket_bytes)


def layer_cost(
    layer: Layer, grid: Grid, rows: int, run: Run, machine: Machine, network: Network, seq_length: int
) -> LayerCost:
    """Return the seconds of one layer (``rows`` of one data-parallel group)."""
    gather = scatter = data = 0.0
    output: dict[str, float] = {}
    input_reduce: dict[str, float] = {}
    blocking: dict[str, float] = {}
    for call in calls_of(layer, grid, rows, run):
        seconds = layer.experts * call.calls * network.seconds(call.op, call.axis, call.elements * call.itemsize)
        if call.purpose == cost.GATHER_WEIGHT:
            gather += seconds
        elif call.axis == "data":
            data += seconds
        elif call.purpose in (cost.SCATTER_WEIGHT_GRAD, cost.REDUCE_WEIGHT_GRAD):
            scatter += seconds
        else:
            into = output if call.phase == cost.FORWARD else blocking
            if call.purpose == cost.REDUCE_INPUT_GRAD:
                into = input_reduce
            into[call.axis] = into.get(call.axis, 0.0) + seconds
    forward, input_grad, weight_grad = products(layer, grid, rows, machine, seq_length)
    return LayerCost(forward, input_grad, weight_grad, gather, output, input_reduce, blocking, scatter, data)


def products(layer: Layer, grid: Grid, rows: int, machine: Machine, seq_length: int) -> tuple[float, float, float]:
    """Return seconds of (forward, dI, dW) of one layer on one rank; layers that only move memory have no dW."""
    my_rows = cost.chunk(max(1, round(rows * layer.rows)), grid.z)
    memory = 1e9 * machine.memory_gbs
    x, y = (grid.y, grid.x) if layer.transposed else (grid.x, grid.y)
    if layer.kind == "linear":
        k, n = cost.chunk(layer.in_features, y), cost.chunk(layer.out_features, x)
        if layer.kv_copies(x) > 1:
            n = (layer.out_features - layer.kv_features) // x + layer.kv_features * layer.kv_copies(x) // x
        seconds = layer.experts * machine.gemm_seconds(my_rows, k, n)
        return seconds, seconds if layer.input_grad else 0.0, seconds
    if layer.kind == "attention":
        seconds = 4.0 * my_rows * seen(seq_length) * cost.chunk(layer.in_features, x) / machine.gemm_flops
        return seconds, 2.0 * seconds, 0.0
    if layer.kind in ("pointwise", "norm"):
        forward, backward = NORM if layer.kind == "norm" else layer.moves
        split = grid.size(layer.over or "x") if layer.kind == "norm" else x
        elements = layer.experts * my_rows * cost.chunk(layer.in_features, split)
        return forward * elements / memory, backward * elements / memory, 0.0
    if layer.kind == "embedding":
        return 2.0 * my_rows * cost.chunk(layer.out_features, grid.y) * 2.0 / memory, 0.0, 0.0
    seconds = 4.0 * my_rows * cost.chunk(layer.out_features, grid.x) * 2.0 / memory  # loss: fp32 logits, twice
    return seconds, seconds, 0.0
