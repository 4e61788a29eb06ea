"""Seconds of one layer on one rank: its products and its collectives.

Collectives come from ``axo.matmul.cost`` (so what is timed is what the engine issues) and run at the bandwidth of
equation (10) with the latency of a ring, or of a tree for an all-reduce where that is less. Products run at the
machine's GEMM rate; what only moves memory (norms, activations, residual sums) runs at its memory bandwidth. On CPU
ranks each layer takes the time beside that in which it is issued (``Machine.layer_us``).

Tesseract multiplies q blocks a product: of its q steps of broadcasts and a product (2 q steps with reduces in backward)
the first shows, and of the others what their products do not hide. Experts are layers one behind the other.

It does not know what overlaps what: ``axo.perf.model`` and ``axo.perf.simulator`` do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from axo.arrangement import ARRANGEMENTS
from axo.grid import AXES, Coords, Grid
from axo.matmul import cost
from axo.perf.flops import seen
from axo.perf.machine import Machine
from axo.perf.workload import NORM, Block, Layer

OVERLAPS = ("oar", "ors", "oag")
PRECISIONS = {  # bytes of RunOptions.itemsize, stream and weights
    "bf16-mixed": {"itemsize": 2, "stream": 4, "weights": 4},
    "bf16-true": {"itemsize": 2, "stream": 2, "weights": 2},
    "32-true": {"itemsize": 4, "stream": 4, "weights": 4},
}
T = TypeVar("T")
KEPT = ("linear", "attention")  # whose results selective recomputation keeps
OPTIMIZER_BYTES = 32.0  # a parameter: fp32 weight, two moments and gradient read, weight and moments written, bf16 copy
HOST_BYTES = 28.0  # of an update in the host's memory: weight, gradient and two moments read, all but one written


@dataclass(frozen=True)
class RunOptions:
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
        sequence_parallel: The tokens of the residual stream are split over x: the same bytes, but what is on the stream
            (``Layer.on_stream``) has 1/x of the rows, and no product hides the sums of dI.
        algorithm: How products are distributed: "axonn" or "tesseract".
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
    sequence_parallel: bool = False
    algorithm: str = "axonn"

    def token_ranks(self, grid: Grid) -> int:
        """Ranks that the tokens of the residual stream are split over."""
        return grid.x if self.sequence_parallel else 1

    @property
    def keeps(self) -> bool:
        """True when every layer gathers its weight once a step."""
        return self.cached_gathers == 1.0

    def run_again(self, layers: Iterable[Layer], forward: Iterable[float]) -> float:
        """Of these layers' ``forward`` seconds: those that a checkpointed block takes once more."""
        kept = KEPT if self.selective else ()
        return sum(seconds for layer, seconds in zip(layers, forward, strict=True) if layer.kind not in kept)

    def optimizer_share(self, grid: Grid) -> float:
        """Share of its parameters whose optimizer state a rank has."""
        return 1.0 / grid.data if self.zero else 1.0

    def group_rows(self, grid: Grid) -> int:
        """Rows of one data-parallel group and micro-batch of ``held_as``: m of the equations."""
        return self.rows or max(1, round(self.batch_tokens / (self.held_as(grid).data * self.micro_batches)))

    def held_as(self, grid: Grid) -> Grid:
        """The grid on which axonn's ranks hold what those of this algorithm hold on ``grid``.

        On q x q x d x data a rank of Tesseract has 1/q of all features, 1/(q d data) of the rows and 1/q^2 of the
        weights: as much as with axonn on q x q x 1 x (q d data), of q times as many ranks.
        """
        return grid if self.algorithm == "axonn" else Grid(grid.x, grid.y, 1, grid.data * grid.z * grid.x)

    def shard(self, grid: Grid, parameters: float) -> float:
        """A rank's part of so many parameters."""
        blocks = self.held_as(grid)
        return parameters / (blocks.x * blocks.y * blocks.z)


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
    reduced: float  # bytes that are all-reduced over data, the same for any size of it
    reduces: float  # and in how many calls
    hidden: dict[str, float]  # behind the layer's own products, in forward and in all, by axis: steps of Tesseract
    hidden_forward: dict[str, float]


def optimizer_seconds(machine: Machine, grid: Grid, run: RunOptions, shard: float) -> float:
    """Return the seconds of the optimizer's step for a rank's ``shard`` of the parameters.

    Offloaded, gradients come down, the host updates and parameters go up, all three at the same time in pieces.
    """
    mine = run.optimizer_share(grid) * shard
    if not run.offload:
        return OPTIMIZER_BYTES * mine / (1e9 * machine.memory_gbs)
    return max(run.weights * mine / machine.host_link_gbs, HOST_BYTES * mine / machine.host_memory_gbs) / 1e9


def data_seconds(network: Network, reduced: float, shard: float, run: RunOptions, times: int = 0) -> float:
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
    run: RunOptions,
    *,
    checkpointed: bool = False,
    gathers: int = 1,
    coords: Coords = cost.FIRST,
) -> list[cost.Call]:
    """Return the collectives of one layer in one step (``rows`` of one data-parallel group), from its cost().

    Those of one expert, where there are several.
    """
    rows, split = max(1, round(rows * layer.rows)), run.sequence_parallel
    arrangement = ARRANGEMENTS[run.algorithm]
    where: dict[str, Any] = {"arrangement": arrangement, "coords": coords}
    if layer.kind == "linear":
        copies, gathered = layer.kv_copies(grid.x), list[cost.Call]()
        if split and layer.gathers:
            gathered = cost.gather_sequence(
                grid, rows, layer.in_features, itemsize=run.itemsize, recompute=checkpointed, coords=coords
            )
        sums = layer.input_grad and (arrangement.square or not layer.shares_input)  # else summed with the first's
        return gathered + cost.linear(
            grid, rows, layer.in_features, layer.out_features, layer.bias, transposed=layer.transposed,
            itemsize=run.itemsize, recompute=checkpointed, gathers=gathers, input_grad=sums,
            copied_features=layer.kv_features if copies > 1 else 0, copies=copies, sequence_parallel=split, **where,
        )  # fmt: skip
    if layer.kind == "embedding":
        return cost.embedding(grid, rows, layer.in_features, layer.out_features, sequence_parallel=split, **where)
    if layer.kind == "norm":
        return cost.norm(
            grid, rows, layer.out_features or layer.in_features, kind=layer.norm, recompute=checkpointed,
            sequence_parallel=split and layer.on_stream,
            axis=arrangement.inner if layer.over == "x" else layer.over or None,
            sum_grad_over=() if layer.over else (arrangement.inner,), **where,
        )  # fmt: skip
    return cost.cross_entropy(grid, rows, **where) if layer.kind == "loss" else []


def ends_block(layers: tuple[Layer, ...]) -> Layer | None:
    """The layer whose product ends a block, if nothing behind it keeps anything.

    Recomputation stops at its product: with sequence parallelism, which sums results apart, these are not summed again.
    """
    for layer in reversed(layers):
        if layer.kind != "pointwise":
            return layer if layer.kind == "linear" and layer.transposed else None
    return None


def layer_cost(
    layer: Layer, grid: Grid, rows: int, run: RunOptions, machine: Machine, network: Network, seq_length: int
) -> LayerCost:
    """Return the seconds of one layer (``rows`` of one data-parallel group of ``run.held_as(grid)``)."""
    token_ranks, square = run.token_ranks(grid) if layer.on_stream else 1, run.algorithm != "axonn"
    times = products(layer, run.held_as(grid), rows, machine, seq_length, token_ranks)
    blocks = grid.x if square and layer.kind == "linear" else 1
    forward, input_grad, weight_grad = (blocks * seconds for seconds in times)
    gather = scatter = reduced = reduces = 0.0
    output, input_reduce, blocking = (dict[str, float]() for _ in range(3))
    steps: dict[str, dict[str, float]] = {cost.FORWARD: {}, cost.BACKWARD: {}}
    for call in calls_of(layer, grid, rows * (grid.x * grid.z if square else 1), run):
        if call.axis == "data":
            reduced += layer.experts * call.calls * call.elements * call.itemsize
            reduces += layer.experts * call.calls
            continue
        seconds = layer.experts * call.calls * network.seconds(call.op, call.axis, call.elements * call.itemsize)
        if call.purpose == cost.REDUCE_WEIGHT_GRAD or (call.purpose == cost.SCATTER_WEIGHT_GRAD and not square):
            scatter += seconds
        elif call.purpose == cost.GATHER_WEIGHT and not square:
            gather += seconds
        else:
            into = output if call.phase == cost.FORWARD else blocking
            if call.purpose == cost.REDUCE_INPUT_GRAD and call.op == "all_reduce":  # not of gathered tokens
                into = input_reduce
            elif STEPS.get(call.purpose, frozenset("-")) <= run.overlap:
                into = steps[call.phase]
            into[call.axis] = into.get(call.axis, 0.0) + seconds
    hidden = [
        _shown_steps(steps[cost.FORWARD], blocks, forward, output),
        _shown_steps(steps[cost.BACKWARD], 2 * blocks, input_grad + weight_grad, blocking),
    ]
    both = {axis: hidden[0].get(axis, 0.0) + hidden[1].get(axis, 0.0) for axis in hidden[0] | hidden[1]}
    sent = (gather, output, input_reduce, blocking, scatter, reduced, reduces, both, hidden[0])
    return LayerCost(forward, input_grad, weight_grad, *sent)


STEPS = {  # what lets steps of Tesseract hide behind the products of others
    cost.BROADCAST_BLOCK: frozenset({"oag"}),
    cost.REDUCE_BLOCK: frozenset({"oar", "ors"}),
    cost.SUM_WEIGHT_BLOCK: frozenset({"oar", "ors"}),
}


def _shown_steps(steps: dict[str, float], count: int, compute: float, shown: dict[str, float]) -> dict[str, float]:
    """Add to ``shown``, by axis, what the products of ``count`` steps do not hide; return the rest."""
    total = sum(steps.values())
    if not total:
        return {}
    share = (total / count + (count - 1) * max(0.0, (total - compute) / count)) / total
    for axis, seconds in steps.items():
        shown[axis] = shown.get(axis, 0.0) + share * seconds
    return {axis: (1.0 - share) * seconds for axis, seconds in steps.items()}


AxisSeconds = tuple[float, float]  # seconds over x, over y


class BlockCost(NamedTuple):
    """Seconds of one block, one micro-batch: the sums of its layers."""

    forward: float
    input_grad: float
    weight_grad: float
    stream: float  # of the first two, what sequence parallelism splits
    again: float  # its forward products, and those that are run again when results of products stay
    again_kept: float
    gather: float
    scatter: float
    last_scatter: float  # of the layer whose backward comes last
    output: AxisSeconds
    again_output: AxisSeconds  # of a block that runs again
    blocking: AxisSeconds
    reduce: AxisSeconds  # all-reduces of dI; below, the communication time that dW products beside them do not hide
    shown_reduce: AxisSeconds
    hidden: AxisSeconds  # by layers' own products; of these, in forward
    hidden_forward: AxisSeconds
    reduced: float
    reduces: float
    parameters: int
    # From one gathered weight to the next: it, products and output, output.
    segments: list[tuple[float, float, AxisSeconds]]


def block_cost(layers: tuple[Layer, ...], costs: list[LayerCost], run: RunOptions) -> BlockCost:
    """Add up the layers of a block."""
    forward = inputs = weights = stream = again_kept = gather = scatter = last_scatter = reduced = reduces = 0.0
    parameters, segments = 0, list[tuple[float, float, AxisSeconds]]()
    output, blocking, reduce, shown, hidden, hidden_forward = ([0.0, 0.0] for _ in range(6))
    waits, path, sums = 0.0, 0.0, (0.0, 0.0)  # of the segment so far
    for layer, one in zip(layers, costs, strict=True):
        forward, inputs, weights = forward + one.forward, inputs + one.input_grad, weights + one.weight_grad
        again_kept += one.forward * (layer.kind not in KEPT)
        stream += (one.forward + one.input_grad) * layer.on_stream
        parameters += layer.parameters
        scatter, last_scatter = scatter + one.scatter, last_scatter or one.scatter
        reduced, reduces = reduced + one.reduced, reduces + one.reduces
        if one.gather and path:
            segments.append((waits, path, sums))
            waits, path, sums = 0.0, 0.0, (0.0, 0.0)
        gather, waits, path = gather + one.gather, waits + one.gather, path + one.forward
        for axis, seconds in one.output.items():
            output[axis == "y"] += seconds
            path += seconds
            sums = (sums[0] + seconds, sums[1]) if axis == "x" else (sums[0], sums[1] + seconds)
        for axis, seconds in one.backward_blocking.items():
            blocking[axis == "y"] += seconds
        for axis, seconds in one.input_reduce.items():
            reduce[axis == "y"] += seconds
            shown[axis == "y"] += max(0.0, seconds - one.weight_grad)
        for total, by_axis in ((hidden, one.hidden), (hidden_forward, one.hidden_forward)):
            for axis, seconds in by_axis.items():
                total[axis == "y"] += seconds
    segments.append((waits, path, sums))
    ends = ends_block(layers) if run.sequence_parallel else None
    twice = output[0] if ends is None else output[0] - costs[layers.index(ends)].output.get("x", 0.0)
    pairs = [
        (each[0], each[1]) for each in (output, (twice, output[1]), blocking, reduce, shown, hidden, hidden_forward)
    ]
    times = (forward, inputs, weights, stream, forward, again_kept, gather, scatter, last_scatter)
    return BlockCost._make([*times, *pairs, reduced, reduces, parameters, segments])


class Computed:
    """What plans of one request share: each thing is computed once."""

    def __init__(self) -> None:
        self._values: dict[object, Any] = {}

    def once(self, key: object, compute: Callable[[], T]) -> T:
        """What ``compute`` returns, or has returned for this key."""
        if key not in self._values:
            self._values[key] = compute()
        value: T = self._values[key]
        return value


class Costs(Computed):
    """Costs of networks, layers and blocks on one machine; most of them do not depend on data."""

    def __init__(self, machine: Machine, seq_length: int) -> None:
        super().__init__()
        self.machine, self.seq_length = machine, seq_length

    def network(self, grid: Grid) -> Network:
        """The network of one grid."""
        return self.once(grid, lambda: Network(self.machine, grid))

    def layer(self, layer: Layer, grid: Grid, rows: int, run: RunOptions) -> LayerCost:
        """The cost of a layer; ``rows`` of one data-parallel group."""
        return self.once(
            (layer.nameless, grid.x, grid.y, grid.z, grid.data > 1, rows, run.sequence_parallel, run.algorithm),
            lambda: layer_cost(layer, grid, rows, run, self.machine, self.network(grid), self.seq_length),
        )

    def block(self, block: Block, grid: Grid, rows: int, run: RunOptions) -> BlockCost:
        """The cost of a block; ``rows`` of one data-parallel group."""
        return self.once(
            (block.once, grid.x, grid.y, grid.z, grid.data > 1, rows, run.sequence_parallel, run.algorithm),
            lambda: block_cost(block.layers, [self.layer(one, grid, rows, run) for one in block.layers], run),
        )


def products(
    layer: Layer, grid: Grid, rows: int, machine: Machine, seq_length: int, token_ranks: int = 1
) -> tuple[float, float, float]:
    """Return seconds of (forward, dI, dW) of one layer on one rank; layers that only move memory have no dW.

    Half of ``Machine.layer_us`` goes with forward and half with dI; each expert is a layer of its own.

    Args:
        token_ranks: Ranks that split the rows of this rank of z (sequence parallelism, on the residual stream).
    """
    forward, input_grad, weight_grad = _products(layer, grid, rows, machine, seq_length, token_ranks)
    beside = 0.5e-6 * machine.layer_us * layer.experts
    return forward + beside, input_grad + beside, weight_grad


def _products(
    layer: Layer, grid: Grid, rows: int, machine: Machine, seq_length: int, token_ranks: int
) -> tuple[float, float, float]:
    my_rows = cost.chunk(max(1, round(rows * layer.rows)), grid.z)
    memory = 1e9 * machine.memory_gbs
    x = grid.y if layer.transposed else grid.x
    if layer.kind == "linear":
        seconds = layer.experts * machine.gemm_seconds(my_rows, *layer.local_sizes(grid))
        return seconds, seconds if layer.input_grad else 0.0, seconds
    if layer.kind == "attention":
        seconds = 4.0 * my_rows * seen(seq_length) * cost.chunk(layer.in_features, x) / machine.attention_flops
        return seconds, 2.0 * seconds, 0.0
    if layer.kind in ("pointwise", "norm"):
        forward, backward = NORM if layer.kind == "norm" else layer.moves
        split = grid.size(layer.over or "x") if layer.kind == "norm" else x
        elements = layer.experts * my_rows / token_ranks * cost.chunk(layer.in_features, split)
        return forward * elements / memory, backward * elements / memory, 0.0
    if layer.kind == "embedding":
        return 2.0 * my_rows * cost.chunk(layer.out_features, grid.y) * 2.0 / memory, 0.0, 0.0
    seconds = 4.0 * my_rows * cost.chunk(layer.out_features, grid.x) * 2.0 / memory  # loss: fp32 logits, twice
    return seconds, seconds, 0.0
