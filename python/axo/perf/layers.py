"""The kinds of layers that a model is made of. Each answers for itself, with its whole (unsharded) sizes:

    parameters, flops      trainable values; flops of its forward
    divides                the sizes that an axis must divide
    calls                  what it sends in a step, from ``axo.matmul.cost``, which the layers of ``axo.nn`` ask too
    seconds                its forward, dI and dW on one rank
    bytes                  what it keeps for its backward, and more

A new kind is a class here, a new option of a layer a field and what it changes in these answers.

``grid``, ``rows`` and ``run`` say where it runs: of ``calls`` and ``seconds`` the rows of one data-parallel group, of
bytes those of one rank. Products run at the machine's GEMM rate; what only moves memory at its memory bandwidth: the
bytes for every row and feature, forward and backward, that PyTorch moves when it runs each operation by itself under
bf16 autocast (the residual stream is fp32, products take and give bf16).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from axo.arrangement import ARRANGEMENTS
from axo.grid import Coords, Grid
from axo.matmul import activations, cost
from axo.matmul.cost import chunk
from axo.perf.machine import Machine
from axo.perf.run_options import RunOptions

RESIDUAL = (10.0, 12.0)  # fp32 + bf16 -> fp32; two fp32 gradients added
NORM = (14.0, 18.0)  # fp32 -> fp32, then the cast to bf16 that the next product wants
SPLIT = (8.0, 8.0)  # q, k, v taken apart and laid out by heads; rotary embedding on two thirds of them
ACTIVATION_GATED, ACTIVATION = (6.0, 10.0), (4.0, 6.0)  # bf16
FP32, INT64 = 4, 8  # bytes; of statistics, and of numbers of rows
LOSS_CHUNK = 1 << 18  # elements of a temporary of the loss, of which there are two at a time
AGAIN = (cost.BACKWARD, cost.GATHER_WEIGHT)  # what a head whose loss comes in chunks has no need of
Seconds = tuple[float, float, float]  # of forward, dI (or the whole backward of a layer without weights) and dW


def seen(seq_length: int) -> float:
    """Return how many tokens a token attends to under a causal mask, on average: itself and those before it."""
    return (seq_length + 1) / 2


class Value:
    """A frozen dataclass that is equal to others with the same fields that compare, whatever their names.

    Layers, blocks and models are keys of what a search has computed, so the hash is computed once.
    """

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        mine: Any = self
        return (type(self), *(getattr(self, one.name) for one in fields(mine) if one.compare and one.name != "name"))

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Value) and self._hash == other._hash and self._key == other._key)


class LayerBytes(NamedTuple):
    """Bytes of one layer on one rank; only products have all but the first three."""

    saved: float  # for its backward
    through: float = 0.0  # gradients of its input and output, and temporaries, while its backward runs
    results: float = 0.0  # that a block with selective recomputation keeps of it
    of_weights: float = 0.0  # as products read them, on top of the shard
    scattered: float = 0.0  # its weight's gradient before it is scattered over z; 0 where z is 1
    gradient: float = 0.0  # and this rank's shard of it


@dataclass(frozen=True, eq=False)
class Layer(Value):
    """What all kinds have.

    Args:
        name: For messages and traces.
        in_features: Features of its input; vocabulary of an embedding.
        out_features: Those of its output, where they are others.
        transposed: x and y swap roles (Algorithm 1): attention and pointwise layers have their features split over y.
        rows: Rows a token: 1, but fewer for convolutions at a lower resolution and for experts.
        experts: So many equal layers beside each other, each with ``rows`` rows a token.
        spread: Neighbours along z over which these are spread; tokens go to all of them evenly.
        heads, kv_groups: Of attention, and of what takes queries, keys and values apart for it.
        shares_input: Its input is that of an earlier layer, which keeps it and sums its gradient for both.
    """

    name: str
    in_features: int
    out_features: int = 0
    _: KW_ONLY
    transposed: bool = False
    rows: float = 1.0
    experts: int = 1
    spread: int = 1
    heads: int = 0
    kv_groups: int = 0
    shares_input: bool = False

    kind: ClassVar[str]
    results_stay: ClassVar[bool] = False  # selective recomputation keeps its results, and does not run it again

    @property
    def parameters(self) -> int:
        """Trainable values of the whole layer."""
        return 0

    @property
    def on_stream(self) -> bool:
        """Whether it works on the residual stream, token by token: what sequence parallelism splits over x."""
        return False

    def divides(self) -> Iterator[tuple[str, int, str]]:
        """The sizes that an axis must divide: what it is, how large, which axis."""
        yield from ()

    def flops(self, rows: float, attended: float) -> float:
        """Flops of its forward for ``rows`` tokens of a whole batch, each of which attends to ``attended``."""
        return 0.0

    def calls(
        self, grid: Grid, rows: int, run: RunOptions, *, recompute: bool = False, gathers: int = 1,
        coords: Coords = cost.FIRST,
    ) -> list[cost.Call]:  # fmt: skip
        """What it sends in one step, from its ``cost``: of one expert, where there are several."""
        where: dict[str, Any] = {"arrangement": ARRANGEMENTS[run.algorithm], "coords": coords}
        grid = self.holders(grid) if run.algorithm == "axonn" else grid
        return self._calls(grid, max(1, round(rows * self.rows)), run, recompute, gathers, where)

    def _calls(
        self, grid: Grid, rows: int, run: RunOptions, recompute: bool, gathers: int, where: dict[str, Any]
    ) -> list[cost.Call]:
        return []

    def seconds(self, grid: Grid, rows: int, machine: Machine, attended: float, token_ranks: int = 1) -> Seconds:
        """Seconds on one rank; ``token_ranks`` split its rows where it is ``on_stream``.

        Half of ``Machine.layer_us`` goes with forward and half with dI; each expert is a layer of its own.
        """
        holders = self.holders(grid)
        mine = chunk(max(1, round(rows * self.rows)), holders.z) / (token_ranks if self.on_stream else 1)
        forward, input_grad, weight_grad = self._seconds(holders, mine, machine, attended)
        beside = 0.5e-6 * machine.layer_us * self.mine
        return forward + beside, input_grad + beside, weight_grad

    def _seconds(self, grid: Grid, rows: float, machine: Machine, attended: float) -> Seconds:
        raise NotImplementedError

    def bytes(self, grid: Grid, rows: int, run: RunOptions) -> LayerBytes:
        """Its bytes on a rank, which has ``rows``."""
        raise NotImplementedError

    @property
    def mine(self) -> int:
        """Those of its experts that a rank holds."""
        return self.experts // self.spread

    def holders(self, grid: Grid) -> Grid:
        """Of the ranks that hold the same experts: each run of ``spread`` neighbours along z has one."""
        return grid if self.spread == 1 else replace(grid, z=grid.z // self.spread)

    def my_rows(self, grid: Grid, rows: int, run: RunOptions) -> float:
        """Its rows on a rank: of all its experts, and of its tokens where the stream's are split over x."""
        return rows * self.rows * self.experts / (run.token_ranks(grid) if self.on_stream else 1)

    def width(self, grid: Grid) -> int:
        """Features of its input on a rank."""
        return chunk(self.in_features, grid.y if self.transposed else grid.x)

    def local_heads(self, grid: Grid) -> tuple[int, int]:
        """Heads of a rank, and groups of keys and values."""
        return chunk(self.heads, grid.x), max(1, self.kv_groups // grid.x)


@dataclass(frozen=True, eq=False)
class LinearKind(Layer):
    """A product: k of ``in_features``, n of ``out_features``.

    Args:
        input_grad: False for a layer whose input needs no gradient.
        uneven: out_features need not divide over its axis (a head over a vocabulary).
        kv_features: Of a layer of queries, keys and values: how many of out_features, the last, are keys and values, of
            ``kv_groups`` groups; neighbours along x share a group where there are fewer groups than ranks.
        gathers: The first of those that read the same tokens, which sequence parallelism gathers.
        tied: Its weight is the embedding's, which counts it.
        head: It makes the logits.
        whole: Its outputs are whole on all ranks along x. Over y their gradient is summed ("sum": logits of experts, of
            whose outputs each rank has some features) or gathered ("gather": a latent that layers take over y).
        shared: Of a latent, how many of out_features, the last, go to attention as they are: they are not gathered.
    """

    bias: bool = False
    input_grad: bool = True
    uneven: bool = False
    kv_features: int = 0
    gathers: bool = False
    tied: bool = False
    head: bool = False
    whole: str = ""
    shared: int = 0

    kind = "linear"
    results_stay = True

    @property
    def parameters(self) -> int:
        weight = 0 if self.tied else self.in_features * self.out_features
        return self.experts * (weight + self.bias * self.out_features)

    def holders(self, grid: Grid) -> Grid:
        grid = super().holders(grid)
        return replace(grid, x=1) if self.whole else grid

    def kv_copies(self, ranks: int) -> int:
        """How many neighbours along x hold the same keys and values."""
        return ranks // self.kv_groups if 0 < self.kv_groups < ranks else 1

    def local_sizes(self, grid: Grid) -> tuple[int, int]:
        """Its k and n on one rank; keys and values that neighbours share each of them has whole."""
        x, y = (grid.y, grid.x) if self.transposed else (grid.x, grid.y)
        again = self.kv_features * (self.kv_copies(x) - 1)
        return chunk(self.in_features, y), chunk(self.out_features + again, x)

    def divides(self) -> Iterator[tuple[str, int, str]]:
        x, y = ("y", "x") if self.transposed else ("x", "y")
        yield f"{self.name}.in_features", self.in_features, y
        if not (self.uneven or self.whole):
            yield f"{self.name}.out_features", self.out_features - self.kv_features, x

    def flops(self, rows: float, attended: float) -> float:
        return activations.linear_flops(rows * self.rows * self.experts, self.in_features, self.out_features)

    def _calls(
        self, grid: Grid, rows: int, run: RunOptions, recompute: bool, gathers: int, where: dict[str, Any]
    ) -> list[cost.Call]:
        copies, square = self.kv_copies(grid.x), where["arrangement"].square
        tokens = list[cost.Call]()
        if run.sequence_parallel and self.gathers:
            tokens = cost.gather_sequence(
                grid, rows, self.in_features, itemsize=run.itemsize, recompute=recompute, coords=where["coords"]
            )
        calls = tokens + cost.linear(
            grid, rows, self.in_features, self.out_features, self.bias, transposed=self.transposed,
            itemsize=run.itemsize, recompute=recompute, gathers=gathers,
            input_grad=self.input_grad and (square or not self.shares_input),  # else summed with the first's
            copied_features=self.kv_features if copies > 1 else 0, copies=copies,
            sequence_parallel=run.sequence_parallel, **where,
        )  # fmt: skip
        if self.whole and grid.y > 1 and not square:
            op, parts = ("all_reduce", 1) if self.whole == "sum" else ("all_gather", grid.y)
            elements = chunk(rows, grid.z) * (self.out_features - self.shared) // parts
            calls.append(cost.Call(cost.BACKWARD, op, "y", elements, run.itemsize, cost.RELAYOUT))
        if self.in_chunks(run):
            calls = _in_chunks(
                [one for one in calls if (one.phase, one.purpose) != AGAIN], rows, self.out_features, grid
            )
        return calls

    def in_chunks(self, run: RunOptions) -> bool:
        """Whether its logits are made in chunks of rows, with the loss and all of its gradients."""
        return self.head and run.chunked_loss

    def _seconds(self, grid: Grid, rows: float, machine: Machine, attended: float) -> Seconds:
        seconds = self.mine * machine.gemm_seconds(int(rows), *self.local_sizes(grid))
        return seconds, seconds * self.input_grad, seconds

    def bytes(self, grid: Grid, rows: int, run: RunOptions) -> LayerBytes:
        grid = self.holders(grid)
        mine, (into, out), split = self.my_rows(grid, rows, run), self.local_sizes(grid), run.sequence_parallel
        # Tokens that are gathered come in the dtype of products, once for all that read them; an input whose gradients
        # are added up and summed over x is cast once; else each casts its own.
        once = split or grid.x > 1 or run.stream == run.itemsize
        others_keep = self.shares_input and not (split and self.gathers) and once
        # Else its output's gradient is that of the stream, already counted; with split tokens it is gathered first.
        apart = not self.transposed or run.stream != run.itemsize or run.token_ranks(grid) > 1
        whole, chunks = self.parameters / (grid.x * grid.y * self.spread), self.in_chunks(run)
        apart = apart and not chunks
        early = FP32 * into * out * chunks  # its weight's gradient, and in place of its input that one's
        return LayerBytes(
            saved=early + (0.0 if others_keep else activations.linear(mine, into, run.itemsize)),
            through=run.itemsize * mine * (into + out * apart),
            results=run.itemsize * mine * out,
            of_weights=self.weight_read(grid, run),
            scattered=run.itemsize * whole if grid.z > 1 else 0.0,
            gradient=(run.weights if grid.z * grid.data == 1 else run.itemsize) * whole / grid.z,
        )

    def weight_read(self, grid: Grid, run: RunOptions) -> float:
        """Bytes of its weight as its product reads it, on top of the shard."""
        if grid.z == 1 and run.itemsize == run.weights:
            return 0.0
        columns = self.out_features + self.kv_features * (self.kv_copies(grid.x) - 1)
        return run.itemsize * (self.mine * self.in_features * columns) / (grid.x * grid.y)


@dataclass(frozen=True, eq=False)
class EmbeddingKind(Layer):
    """A table of ``in_features`` rows (the vocabulary) and ``out_features`` columns."""

    kind = "embedding"

    @property
    def parameters(self) -> int:
        return self.in_features * self.out_features

    def _calls(
        self, grid: Grid, rows: int, run: RunOptions, recompute: bool, gathers: int, where: dict[str, Any]
    ) -> list[cost.Call]:
        split = run.sequence_parallel
        return cost.embedding(
            grid, rows, self.in_features, self.out_features, itemsize=run.weights, sequence_parallel=split, **where
        )

    def _seconds(self, grid: Grid, rows: float, machine: Machine, attended: float) -> Seconds:
        return 4.0 * rows * chunk(self.out_features, grid.y) / (1e9 * machine.memory_gbs), 0.0, 0.0

    def bytes(self, grid: Grid, rows: int, run: RunOptions) -> LayerBytes:
        return LayerBytes(activations.embedding(self.my_rows(grid, rows, run)))


@dataclass(frozen=True, eq=False)
class NormKind(Layer):
    """A norm over ``in_features``; ``out_features``: values of its weight, where those are fewer.

    Args:
        norm: "layernorm" or "rmsnorm".
        over: The axis that splits what it normalises, "y" or "x"; "": it normalises each head by itself, so that only
            its weight concerns other ranks; "whole": what all ranks along x and y have.
        of_product: Its input is a product's result, in the dtype of products.
    """

    norm: str = "layernorm"
    over: str = "y"
    of_product: bool = False

    kind = "norm"

    @property
    def on_stream(self) -> bool:
        return self.over == "y"

    @property
    def parameters(self) -> int:
        return (self.out_features or self.in_features) * (2 if self.norm == "layernorm" else 1)

    def divides(self) -> Iterator[tuple[str, int, str]]:
        if self.over == "y":
            yield f"{self.name}.features", self.in_features, "y"

    def _calls(
        self, grid: Grid, rows: int, run: RunOptions, recompute: bool, gathers: int, where: dict[str, Any]
    ) -> list[cost.Call]:
        inner = where["arrangement"].inner
        return cost.norm(
            grid, rows, self.out_features or self.in_features, kind=self.norm, recompute=recompute,
            sequence_parallel=run.sequence_parallel and self.on_stream,
            axis={"x": inner, "y": "y"}.get(self.over), sum_grad_over=() if self.over else (inner,), **where,
        )  # fmt: skip

    def _width(self, grid: Grid) -> int:
        return self.in_features if self.over == "whole" else chunk(self.in_features, grid.size(self.over or "x"))

    def _seconds(self, grid: Grid, rows: float, machine: Machine, attended: float) -> Seconds:
        return _moved(NORM, rows * self._width(grid), machine)

    def bytes(self, grid: Grid, rows: int, run: RunOptions) -> LayerBytes:
        mine, width, centered = self.my_rows(grid, rows, run), self._width(grid), self.norm == "layernorm"
        narrow = run.itemsize if self.of_product or self.over != "y" else run.stream  # of its input
        # In fp32: its output's gradient, normalized, scaled, a product, its input's gradient.
        native = centered and self.over == "y" and grid.y == 1
        tensors = (2 if narrow == FP32 else 3) if native else 5
        whose = narrow if self.of_product and run.stream == run.itemsize else 0  # the gradient of the block's output
        each = FP32 * tensors + ((2 - native) * narrow if narrow < FP32 else 0) - whose
        saved = activations.norm(mine, width, narrow, centered=centered, shares_input=self.shares_input)
        return LayerBytes(saved, mine * width * each)


@dataclass(frozen=True, eq=False)
class AttentionKind(Layer):
    """A fused attention kernel over ``heads`` heads.

    Args:
        scores: They are capped, so kept: tokens of a sequence.
        shared: Features of keys that all heads have the same, whose gradient is summed over the ranks of x.
    """

    scores: int = 0
    shared: int = 0

    kind = "attention"
    results_stay = True

    def flops(self, rows: float, attended: float) -> float:
        return 4.0 * rows * attended * self.in_features

    def _calls(
        self, grid: Grid, rows: int, run: RunOptions, recompute: bool, gathers: int, where: dict[str, Any]
    ) -> list[cost.Call]:
        calls = self.exchange(grid, rows, run, recompute)
        if self.shared and grid.size(inner := where["arrangement"].inner) > 1:
            mine = cost.rows_of(where["arrangement"], grid, rows, where["coords"])
            calls.append(cost.Call(cost.BACKWARD, "all_reduce", inner, mine * self.shared, run.itemsize, cost.RELAYOUT))
        return calls

    def exchange(self, grid: Grid, rows: int, run: RunOptions, recompute: bool, kind: str = "ring") -> list[cost.Call]:
        """What keys and values of sequences over ranks send in one step, by one of ``cost.EXCHANGES``."""
        return cost.attention(
            grid, 1, chunk(rows, grid.z), *self.local_heads(grid), self.in_features // max(1, self.heads),
            context=run.context, kind=kind, itemsize=run.itemsize, recompute=recompute,
        )  # fmt: skip

    def _seconds(self, grid: Grid, rows: float, machine: Machine, attended: float) -> Seconds:
        seconds = 4.0 * rows * attended * self.width(grid) / machine.attention_flops
        return seconds, 2.0 * seconds, 0.0

    def bytes(self, grid: Grid, rows: int, run: RunOptions) -> LayerBytes:
        mine, (heads, groups), width = self.my_rows(grid, rows, run), self.local_heads(grid), self.width(grid)
        # q, k and the output; v where each head's is a copy of its group's; a logarithm a head.
        tensors = run.itemsize * (3 + (groups < heads) - (self.scores > 0)) * width
        scores = FP32 * mine * self.scores * heads  # a square of a sequence a head
        logarithms = FP32 * mine * heads
        saved, kept = mine * tensors + logarithms, logarithms
        if self.scores:  # capped, softmax in fp32, and that cast; no logarithm
            cast = run.itemsize / FP32
            saved, kept = mine * tensors + scores * (2 if run.itemsize == FP32 else 1 + 2 * cast), scores * cast
        # Selective recomputation keeps what each call of the operator gives: in a context one for each piece of queries
        # and each piece of keys before it, of 2c pieces.
        parts = run.context + 0.5 if run.context > 1 else 1.0
        results = parts * (run.itemsize * mine * width + kept)
        through = run.itemsize * mine * 4 * width
        if run.context > 1:  # sums in fp32, of keys and values twice; these, and their gradients, come and go in parts
            keys, padded = 2 * width * groups // heads, 2 * width * (self.shared > 0)  # values, as wide as keys
            through += mine * (FP32 * (width + 2 * keys) + run.itemsize * (4 * (width + keys) + padded))
        return LayerBytes(saved, through + 2.0 * scores, results)


@dataclass(frozen=True, eq=False)
class PointwiseKind(Layer):
    """What only moves memory: activations, residual sums, queries, keys and values taken apart.

    Args:
        moves: Bytes moved to and from memory, forward and backward, for every row and feature.
        kept: Tensors of its width that it keeps for backward.
    """

    moves: tuple[float, float] = (0.0, 0.0)
    kept: int = 0

    kind = "pointwise"

    @property
    def on_stream(self) -> bool:
        return self.transposed

    def _seconds(self, grid: Grid, rows: float, machine: Machine, attended: float) -> Seconds:
        return _moved(self.moves, self.mine * rows * self.width(grid), machine)

    def bytes(self, grid: Grid, rows: int, run: RunOptions) -> LayerBytes:
        mine, width = run.itemsize * self.my_rows(grid, rows, run), self.width(grid)
        through = 0.0 if self.transposed else mine * max(2, self.kept) * width
        if not self.heads:
            return LayerBytes(mine * self.kept * width, through)
        # All that qkv laid down stays where norms read it, or v of every head lies there.
        heads, groups = self.local_heads(grid)
        laid_down = self.in_features // (self.heads + 2 * self.kv_groups) * (heads + 2 * groups)
        return LayerBytes(mine * laid_down * (self.kept > 0 or heads == groups), through)


@dataclass(frozen=True, eq=False)
class RoutingKind(Layer):
    """How tokens come to the experts that they have chosen and back (``axo.nn.experts``), weighted and added up."""

    kind = "routing"

    def _calls(
        self, grid: Grid, rows: int, run: RunOptions, recompute: bool, gathers: int, where: dict[str, Any]
    ) -> list[cost.Call]:
        if self.spread == 1:
            return []
        return cost.experts(
            chunk(self.experts * rows, grid.z * self.spread), chunk(self.in_features, grid.y), self.experts,
            ranks=self.spread, itemsize=run.itemsize, recompute=recompute,
        )  # fmt: skip

    def _seconds(self, grid: Grid, rows: float, machine: Machine, attended: float) -> Seconds:
        moves = tuple(a + b for a, b in zip(SPLIT, RESIDUAL, strict=True))
        return _moved(moves, self.mine * rows * self.width(grid), machine)

    def bytes(self, grid: Grid, rows: int, run: RunOptions) -> LayerBytes:
        mine, width = self.my_rows(grid, rows, run), self.width(grid)
        # Outputs before they are weighted; numbers of rows for each time that rows are put in another order.
        orders = 2 if self.spread == 1 else 4
        return LayerBytes(mine * (run.itemsize * width + INT64 * orders), mine * 2 * run.stream * width)


@dataclass(frozen=True, eq=False)
class LossKind(Layer):
    """The vocabulary-parallel loss of ``out_features`` logits, which may be ``capped``."""

    capped: bool = False

    kind = "loss"

    def _calls(
        self, grid: Grid, rows: int, run: RunOptions, recompute: bool, gathers: int, where: dict[str, Any]
    ) -> list[cost.Call]:
        calls = cost.cross_entropy(grid, rows, **where)
        return _in_chunks(calls, rows, self.out_features, grid) if run.chunked_loss else calls

    def _seconds(self, grid: Grid, rows: float, machine: Machine, attended: float) -> Seconds:
        seconds = 8.0 * rows * chunk(self.out_features, grid.x) / (1e9 * machine.memory_gbs)  # fp32 logits, twice
        return seconds, seconds, 0.0

    def bytes(self, grid: Grid, rows: int, run: RunOptions) -> LayerBytes:
        mine, columns = self.my_rows(grid, rows, run), chunk(self.out_features, grid.x)
        temporary = FP32 * min(2.0 * LOSS_CHUNK, mine * columns)  # of a few rows
        if run.chunked_loss:
            return LayerBytes(0.0, run.itemsize * min(activations.LOGITS_CHUNK, mine * columns) + temporary)
        return LayerBytes(activations.cross_entropy(mine, columns, run.itemsize, capped=self.capped), temporary)


def _moved(moves: tuple[float, ...], elements: float, machine: Machine) -> Seconds:
    forward, backward = (each * elements / (1e9 * machine.memory_gbs) for each in moves)
    return forward, backward, 0.0


def _in_chunks(calls: list[cost.Call], rows: int, columns: int, grid: Grid) -> list[cost.Call]:
    """What is sent for logits and loss, in as many pieces as ``axo.nn.linear_cross_entropy`` makes."""
    mine, made = chunk(rows, grid.z), (cost.REDUCE_OUTPUT, cost.STATISTICS)
    pieces = -(-mine // max(1, activations.LOGITS_CHUNK // chunk(columns, grid.x)))
    return [
        one._replace(elements=-(-one.elements // pieces), calls=pieces) if one.purpose in made else one for one in calls
    ]
