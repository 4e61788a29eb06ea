"""What each layer sends: calls, elements and bytes for every collective, axis and phase of one training step.

For ``O[m, n] = I[m, k] @ W[k, n]`` on a grid Gx x Gy x Gz x Gdata (m = rows of one data-parallel group), a normal layer
puts in, on each rank (Algorithm 1 of "Democratizing AI" and of "A 4D Hybrid Algorithm"):

    forward    all_gather      z     kn / (Gx Gy Gz)      the rank's shard of the weight
               all_reduce      y     mn / (Gz Gx)         the partial output
    backward   all_reduce      x     mk / (Gz Gy)         the partial input gradient
               reduce_scatter  z     kn / (Gx Gy)         the block's weight gradient
               all_reduce      data  kn / (Gx Gy Gz)      the shard's weight gradient
               all_reduce      z, data   n / Gx           the bias gradient, where there is a bias

A transposed layer swaps x and y. Tesseract's layer on q x q x d (q = Gx = Gy, d = Gz; m rows over z and x) puts in

    forward    q broadcasts    y     mk / (d q q)         a block of the input, at its owner and at those who get it
               q broadcasts    x     kn / (q q)           a block of the weight
    backward   the same 2 q broadcasts, and behind each a product, whose sum goes to the owner of the block:
               q reduces       y     mk / (d q q)         a block of the input gradient
               q reduces       x     kn / (q q)           a block of the weight gradient
               all_reduce      z, data   kn / (q q)       the block's weight gradient

Sizes that do not divide are cut as ``torch.chunk`` does; weight shards are padded to
the largest. An axis of size 1 sends nothing and does not appear. ``elements`` counts what this rank puts in, as
``axo.count_collectives`` does, so the two can be compared exactly. Pure arithmetic: no torch, no process group.

It does not know time: ``axo.perf`` turns these counts into seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from axo.arrangement import AXONN, Arrangement
from axo.comm.counting import Count
from axo.grid import Coords, Grid
from axo.placement import chunk_bounds
from axo.placement import chunk_size as chunk

FORWARD, RECOMPUTE, BACKWARD = "forward", "recompute", "backward"
FIRST = Coords(0, 0, 0, 0)  # the rank with the largest shards

# What a collective is for; the scheduler may hide some of them behind products (OAG, ORS, OAR), not others.
GATHER_WEIGHT = "gather weight"  # OAG hides it
BROADCAST_BLOCK = "broadcast block"  # the product of the block before hides it
REDUCE_BLOCK = "reduce block"  # the products of the blocks after hide it
SUM_WEIGHT_BLOCK = "reduce weight block"  # as REDUCE_BLOCK, of a gradient
REDUCE_OUTPUT = "reduce output"  # nothing hides it: the next layer waits
REDUCE_INPUT_GRAD = "reduce input gradient"  # OAR hides it behind the weight-gradient product
SCATTER_WEIGHT_GRAD = "scatter weight gradient"  # ORS hides it behind the layers before
REDUCE_WEIGHT_GRAD = "reduce weight gradient"  # data axis, after the scatter
PASS_KEYS = "pass keys on"  # the attention of the piece at hand hides it
RELAYOUT = "re-layout"  # between whole activations and a layer's; nothing hides it
STATISTICS = "statistics"  # per-token sums of norms and of the loss


class Call(NamedTuple):
    """One collective as one rank issues it (``calls`` times with the same size)."""

    phase: str
    op: str
    axis: str
    elements: int  # put in by this rank, in one call
    itemsize: int  # bytes an element
    purpose: str
    calls: int = 1

    @property
    def bytes(self) -> int:
        """Bytes that this rank puts in, all calls together."""
        return self.elements * self.itemsize * self.calls


def part(size: int, parts: int, index: int) -> int:
    """Return the shard of rank ``index``; the last ranks' may be short or empty."""
    low, high = chunk_bounds(size, parts, index)
    return high - low


def total(calls: Iterable[Call]) -> dict[tuple[str, str], Count]:
    """Sum calls into ``{(op, axis): Count}``, the form of ``axo.count_collectives``."""
    sums: dict[tuple[str, str], Count] = {}
    for call in calls:
        old = sums.get((call.op, call.axis), Count())
        sums[call.op, call.axis] = old.plus(call.calls, call.elements * call.calls, call.bytes)
    return sums


def rows_of(arrangement: Arrangement, grid: Grid, rows: int, coords: Coords) -> int:
    """Return the rows that the rank at ``coords`` has of those of one data-parallel group."""
    for axis in arrangement.rows:
        if axis != "data":
            rows = part(rows, grid.size(axis), getattr(coords, axis))
    return rows


def linear(
    grid: Grid,
    rows: int,
    in_features: int,
    out_features: int,
    bias: bool = True,
    *,
    transposed: bool = False,
    itemsize: int = 4,
    bias_itemsize: int = 4,
    recompute: bool = False,
    gathers: int = 1,
    input_grad: bool = True,
    copied_features: int = 0,
    copies: int = 1,
    sequence_parallel: bool = False,
    arrangement: Arrangement = AXONN,
    coords: Coords = FIRST,
) -> list[Call]:
    """Count the collectives of one fully connected layer (a convolution: in_features = channels x kernel area).

    Args:
        grid: The 4D grid.
        rows: m, rows of one data-parallel group (all rows together are ``grid.data * rows``).
        in_features, out_features: k and n, whole.
        bias: A bias of n values, split like the output.
        transposed: Swap the roles of x and y.
        itemsize: Bytes an element of the dtype that the product computes in: weights, activations, weight gradients.
        bias_itemsize: Bytes an element of the bias and its gradient.
        recompute: The forward runs again before backward (activation checkpointing).
        gathers: How often the weight is gathered over z in a step. 1: kept until backward. 2: once more, in the
            recomputation where there is one, else before the backward products (ZeRO-3).
        input_grad: False for a first layer whose input needs no gradient, and for one whose gradient is summed with
            that of another layer that takes the same input (``axo.matmul.shared_input``).
        copied_features: How many of the n, the last, are cut into fewer parts than the out axis has ranks (heads of
            keys and values), each part held by ``copies`` neighbours, who add up its gradient.
        sequence_parallel: Tokens are split over x between layers: a normal layer leaves dI a partial sum, for
            :func:`gather_sequence`, and a transposed one reduce-scatters its output.
        arrangement: Where the algorithm puts rows and features.
        coords: The rank that counts; the first holds the largest shards.
    """
    in_axis, out_axis = arrangement.features(transposed)
    my_rows = rows_of(arrangement, grid, rows, coords)
    my_out = part(out_features - copied_features, grid.size(out_axis), getattr(coords, out_axis))
    my_copied = copied_features * copies // grid.size(out_axis)
    my_out += my_copied
    my_in = part(in_features, grid.size(in_axis), getattr(coords, in_axis))
    if arrangement.square:
        calls = _blocks(grid, my_rows, my_in, my_out, itemsize, recompute, input_grad)
        calls += replicated_grad(my_out * my_in, itemsize, arrangement, split_by=("x",))
        if bias:
            calls += replicated_grad(my_out, bias_itemsize, arrangement)
        if copies > 1:
            calls.append(Call(BACKWARD, "all_reduce", out_axis, my_copied * my_in, itemsize, REDUCE_WEIGHT_GRAD))
            calls += [Call(BACKWARD, "all_reduce", out_axis, my_copied, bias_itemsize, REDUCE_WEIGHT_GRAD)] * bias
        return issued(calls, grid)
    shard = chunk(my_out, grid.z) * my_in
    calls = [Call(FORWARD, "all_gather", "z", shard, itemsize, GATHER_WEIGHT)]
    if gathers == 2:
        calls.append(Call(RECOMPUTE if recompute else BACKWARD, "all_gather", "z", shard, itemsize, GATHER_WEIGHT))
    scatters = sequence_parallel and transposed and grid.x > 1
    for phase in (FORWARD, RECOMPUTE) if recompute else (FORWARD,):
        op = "reduce_scatter" if scatters else "all_reduce"
        calls.append(Call(phase, op, in_axis, my_rows * my_out, itemsize, REDUCE_OUTPUT))
    if scatters:
        calls.append(Call(BACKWARD, "all_gather", "x", my_rows * my_out // grid.x, itemsize, REDUCE_OUTPUT))
    if input_grad and not (sequence_parallel and not transposed):
        calls.append(Call(BACKWARD, "all_reduce", out_axis, my_rows * my_in, itemsize, REDUCE_INPUT_GRAD))
    calls += weight_grad(shard, grid, itemsize)
    if bias:
        calls += [Call(BACKWARD, "all_reduce", "x", my_out, bias_itemsize, REDUCE_WEIGHT_GRAD)] * scatters
        calls += replicated_grad(my_out, bias_itemsize)
    if copies > 1:
        first, rows = coords.z * chunk(my_out, grid.z), part(my_out, grid.z, coords.z)
        shared = min(rows, max(0, first + rows - (my_out - my_copied)))
        calls += [Call(BACKWARD, "all_reduce", out_axis, shared * my_in, itemsize, REDUCE_WEIGHT_GRAD)] * (shared > 0)
        calls += [Call(BACKWARD, "all_reduce", out_axis, my_copied, bias_itemsize, REDUCE_WEIGHT_GRAD)] * bias
    return issued(calls, grid)


def table_head(
    grid: Grid,
    rows: int,
    in_features: int,
    out_features: int,
    *,
    itemsize: int = 4,
    recompute: bool = False,
    gathers: int = 1,
    arrangement: Arrangement,
    coords: Coords = FIRST,
) -> list[Call]:
    """Count the collectives of Tesseract's head whose weight ``[n, k]`` is the embedding's, n over x and k over y.

    The weight is gathered over x, O is summed over y whole and cut there; backward gathers dO over y.
    """
    my_rows = rows_of(arrangement, grid, rows, coords)
    shard = chunk(out_features, grid.x) * part(in_features, grid.y, coords.y)
    calls = [Call(FORWARD, "all_gather", "x", shard, itemsize, GATHER_WEIGHT)]
    if gathers == 2:
        calls.append(Call(RECOMPUTE if recompute else BACKWARD, "all_gather", "x", shard, itemsize, GATHER_WEIGHT))
    for phase in (FORWARD, RECOMPUTE) if recompute else (FORWARD,):
        calls.append(Call(phase, "all_reduce", "y", my_rows * out_features, itemsize, REDUCE_OUTPUT))
    calls += [
        Call(BACKWARD, "all_gather", "y", my_rows * chunk(out_features, grid.y), itemsize, RELAYOUT),
        Call(BACKWARD, "reduce_scatter", "x", shard * grid.x, itemsize, SCATTER_WEIGHT_GRAD),
        *replicated_grad(shard, itemsize, arrangement, split_by=("x",)),
    ]
    return issued(calls, grid)


def _blocks(
    grid: Grid, rows: int, my_in: int, my_out: int, itemsize: int, recompute: bool, input_grad: bool
) -> list[Call]:
    """Count the q steps of SUMMA in a layer of Tesseract."""
    q, input_block, weight_block = grid.x, rows * my_in, my_out * my_in
    calls = []
    for phase in (FORWARD, RECOMPUTE) if recompute else (FORWARD,):
        calls.append(Call(phase, "broadcast", "y", input_block, itemsize, BROADCAST_BLOCK, calls=q))
        calls.append(Call(phase, "broadcast", "x", weight_block, itemsize, BROADCAST_BLOCK, calls=q))
    if input_grad:
        calls.append(Call(BACKWARD, "broadcast", "x", weight_block, itemsize, BROADCAST_BLOCK, calls=q))
        calls.append(Call(BACKWARD, "reduce", "y", input_block, itemsize, REDUCE_BLOCK, calls=q))
    calls.append(Call(BACKWARD, "broadcast", "y", input_block, itemsize, BROADCAST_BLOCK, calls=q))
    calls.append(Call(BACKWARD, "reduce", "x", weight_block, itemsize, SUM_WEIGHT_BLOCK, calls=q))
    return calls


def conv2d(
    grid: Grid,
    batch: int,
    in_channels: int,
    out_channels: int,
    kernel_area: int,
    in_pixels: int,
    out_pixels: int,
    bias: bool = True,
    *,
    in_pixels_whole: int | None = None,
    groups: int = 1,
    transposed: bool = False,
    itemsize: int = 4,
    bias_itemsize: int = 4,
    gathers: int = 1,
    input_grad: bool = True,
    scatter_input: bool = False,
    gather_output: bool = False,
    coords: Coords = FIRST,
) -> list[Call]:
    """Count the collectives of one convolution: a linear layer whose output and input have different rows.

    Args:
        batch: Samples of one data-parallel group; rows are ``batch * pixels``.
        kernel_area: Height times width of the kernel; k is in_channels times that.
        in_pixels, out_pixels: Height times width of what the kernel is moved over, and of the output.
        in_pixels_whole: Pixels of the layer's input before padding, if padding happens outside the kernel.
        scatter_input, gather_output: Activations are whole outside the layer (``relayout``).

    All else as for :func:`linear`.
    """
    out_axis, in_axis = ("y", "x") if transposed else ("x", "y")
    samples = part(batch, grid.z, coords.z)
    my_out = part(out_channels, grid.size(out_axis), getattr(coords, out_axis))
    my_in = part(in_channels, grid.size(in_axis), getattr(coords, in_axis))
    shard = chunk(my_out, grid.z) * my_in // groups * kernel_area
    calls = [Call(FORWARD, "all_gather", "z", shard, itemsize, GATHER_WEIGHT)]
    if gathers == 2:
        calls.append(Call(BACKWARD, "all_gather", "z", shard, itemsize, GATHER_WEIGHT))
    calls.append(Call(FORWARD, "all_reduce", in_axis, samples * out_pixels * my_out, itemsize, REDUCE_OUTPUT))
    if input_grad:
        calls.append(Call(BACKWARD, "all_reduce", out_axis, samples * in_pixels * my_in, itemsize, REDUCE_INPUT_GRAD))
    calls += weight_grad(shard, grid, itemsize)
    if bias:
        calls += replicated_grad(my_out, bias_itemsize)
    before = samples * (in_pixels if in_pixels_whole is None else in_pixels_whole)
    calls += relayout(
        grid,
        before * in_channels if scatter_input and input_grad else 0,
        samples * out_pixels * out_channels if gather_output else 0,
        transposed=transposed,
        itemsize=itemsize,
    )
    return issued(calls, grid)


def relayout(
    grid: Grid,
    in_elements: int,
    out_elements: int,
    *,
    transposed: bool = False,
    itemsize: int = 4,
    arrangement: Arrangement = AXONN,
) -> list[Call]:
    """Count what a layer sends because activations are whole outside it, features cut on entry and gathered on exit.

    Args:
        in_elements: Whole elements (rows of this rank times all features) of an input that is cut here, whose gradient
            is gathered over the in axis; 0: it comes cut.
        out_elements: The same of an output that is gathered over the out axis; 0: it stays cut.
    """
    in_axis, out_axis = arrangement.features(transposed)
    calls = []
    if in_elements:
        calls.append(Call(BACKWARD, "all_gather", in_axis, in_elements // grid.size(in_axis), itemsize, RELAYOUT))
    if out_elements:
        calls.append(Call(FORWARD, "all_gather", out_axis, out_elements // grid.size(out_axis), itemsize, RELAYOUT))
    return issued(calls, grid)


def gather_sequence(
    grid: Grid, rows: int, features: int, *, itemsize: int = 4, recompute: bool = False, coords: Coords = FIRST
) -> list[Call]:
    """Count what gathers tokens that are split over x, features over y; backward adds up their gradient."""
    whole = part(rows, grid.z, coords.z) * part(features, grid.y, coords.y)
    phases = (FORWARD, RECOMPUTE) if recompute else (FORWARD,)
    calls = [Call(phase, "all_gather", "x", whole // grid.x, itemsize, REDUCE_INPUT_GRAD) for phase in phases]
    calls.append(Call(BACKWARD, "reduce_scatter", "x", whole, itemsize, REDUCE_INPUT_GRAD))
    return issued(calls, grid)


def embedding(
    grid: Grid,
    rows: int,
    num_embeddings: int,
    embedding_dim: int,
    *,
    itemsize: int = 4,
    sequence_parallel: bool = False,
    arrangement: Arrangement = AXONN,
    coords: Coords = FIRST,
) -> list[Call]:
    """Count the collectives of an embedding ``[V, h]``: V over x, h over y, the block sharded by rows over z.

    The block is gathered over z once, every x rank looks up the tokens that it owns, one all-reduce over x adds them:
    all in the dtype of the weight, whatever autocast says. With Tesseract the whole vocabulary is gathered over x.
    """
    my_dim = part(embedding_dim, grid.y, coords.y)
    if arrangement.square:
        shard = chunk(num_embeddings, grid.x) * my_dim
        calls = [
            Call(FORWARD, "all_gather", "x", shard, itemsize, GATHER_WEIGHT),
            Call(BACKWARD, "reduce_scatter", "x", shard * grid.x, itemsize, SCATTER_WEIGHT_GRAD),
            *replicated_grad(shard, itemsize, arrangement, split_by=("x",)),
        ]
        return issued(calls, grid)
    shard = chunk(part(num_embeddings, grid.x, coords.x), grid.z) * my_dim
    output, op = part(rows, grid.z, coords.z) * my_dim, "reduce_scatter" if sequence_parallel else "all_reduce"
    calls = [
        Call(FORWARD, "all_gather", "z", shard, itemsize, GATHER_WEIGHT),
        Call(FORWARD, op, "x", output, itemsize, REDUCE_OUTPUT),
        *weight_grad(shard, grid, itemsize),
    ]
    if sequence_parallel:
        calls.append(Call(BACKWARD, "all_gather", "x", output // grid.x, itemsize, REDUCE_OUTPUT))
    return issued(calls, grid)


def norm(
    grid: Grid,
    rows: int,
    features: int,
    *,
    kind: str = "layernorm",
    recompute: bool = False,
    sequence_parallel: bool = False,
    axis: str | None = "y",
    vectors: int | None = None,
    sum_grad_over: tuple[str, ...] = (),
    arrangement: Arrangement = AXONN,
    coords: Coords = FIRST,
) -> list[Call]:
    """Count the collectives of LayerNorm or RMSNorm over a hidden dimension that is split over ``axis`` (None: whole).

    Per token, in fp32: LayerNorm all-reduces the sum, then the squares around the mean, and two sums together backward;
    RMSNorm one number each way. The weight (and LayerNorm's bias: ``vectors`` of them), h / Gy values, is replicated
    over x and z: its gradient is reduced over z and data, and summed over ``sum_grad_over``. With
    ``sequence_parallel`` tokens are split over x, and it is summed there too.

    Raises:
        ValueError: ``kind`` is neither "layernorm" nor "rmsnorm".
    """
    if kind not in ("layernorm", "rmsnorm"):
        raise ValueError(f"norm: kind={kind!r} is not known; use 'layernorm' or 'rmsnorm'")
    sums = 2 if kind == "layernorm" else 1
    my_rows = rows_of(arrangement, grid, rows, coords) // (grid.x if sequence_parallel else 1)
    calls = []
    if axis is not None:
        for phase in (FORWARD, RECOMPUTE) if recompute else (FORWARD,):
            calls.append(Call(phase, "all_reduce", axis, my_rows, 4, STATISTICS, calls=sums))
        calls.append(Call(BACKWARD, "all_reduce", axis, sums * my_rows, 4, STATISTICS))
    mine = features if axis is None else part(features, grid.size(axis), getattr(coords, axis))
    for _ in range(sums if vectors is None else vectors):
        for summed in ("x",) if sequence_parallel else sum_grad_over:
            calls.append(Call(BACKWARD, "all_reduce", summed, mine, 4, REDUCE_WEIGHT_GRAD))
        calls += replicated_grad(mine, 4, arrangement)
    return issued(calls, grid)


def cross_entropy(
    grid: Grid, rows: int, *, smoothing: bool = False, arrangement: Arrangement = AXONN, coords: Coords = FIRST
) -> list[Call]:
    """Count the collectives of the vocabulary-parallel loss: per token, in fp32, a maximum and two sums over x.

    The sums are the denominators and the logits of the targets (with label smoothing all logits too); with the maximum
    travel three numbers by which the ranks check each other's columns. Nothing is sent backward.
    """
    my_rows, axis = rows_of(arrangement, grid, rows, coords), arrangement.inner
    return issued(
        [
            Call(FORWARD, "all_reduce", axis, my_rows + 3, 4, STATISTICS),
            Call(FORWARD, "all_reduce", axis, (2 + smoothing) * my_rows, 4, STATISTICS),
        ],
        grid,
    )


EXCHANGES = ("ring", "gather", "heads")  # of keys and values of sequences that several ranks hold


def heads_divide(heads: int, groups: int, ranks: int) -> bool:
    """Whether a rank's heads, of queries and of keys and values, can be given to ``ranks``, as kind "heads" does."""
    return heads % ranks == 0 and (groups % ranks == 0 or ranks % groups == 0)


def attention(
    grid: Grid,
    rows: int,
    tokens: int,
    heads: int,
    groups: int,
    head_size: int,
    *,
    context: int,
    kind: str,
    value_size: int | None = None,
    itemsize: int = 4,
    recompute: bool = False,
) -> list[Call]:
    """Count what the attention of sequences over ``context`` ranks along z exchanges (``axo.nn.context_attention``).

    Of n elements of keys and values on a rank "gather" puts n into an all-gather and c n into a reduce-scatter
    backward; "ring" sends n c - 1 times, and twice that backward; "heads" moves queries, keys, values and outputs by
    all-to-all, and their gradients back.

    Args:
        rows: Sequences of one context.
        tokens: Of the rank that has the most: what is sent is padded to them.
        heads, groups: Of queries, and of keys and values, on a rank.
        head_size, value_size: Of each, and of values if they have another.
        context: c, ranks that hold pieces of a sequence.
        kind: One of EXCHANGES.
        itemsize: Bytes an element of the dtype that attention computes in.
        recompute: The forward runs again before backward.
    """
    if context == 1:
        return []
    sizes = head_size, head_size if value_size is None else value_size
    both, forward, calls = rows * tokens * sum(sizes), (FORWARD, RECOMPUTE) if recompute else (FORWARD,), list[Call]()
    keys = groups * both
    if kind == "gather":
        calls += [Call(phase, "all_gather", "z", keys, itemsize, RELAYOUT) for phase in forward]
        calls.append(Call(BACKWARD, "reduce_scatter", "z", context * keys, itemsize, RELAYOUT))
    elif kind == "ring":
        for phase in (*forward, BACKWARD, BACKWARD):
            calls += [Call(phase, op, "z", keys, itemsize, PASS_KEYS, calls=context - 1) for op in ("send", "recv")]
    else:
        for phase in (*forward, BACKWARD):
            of_heads = [heads * rows * tokens * size for size in sizes]  # queries, and outputs
            moved = (*of_heads, max(groups, context) * both)
            calls += [Call(phase, "all_to_all", "z", elements, itemsize, RELAYOUT) for elements in moved]
    return calls


def experts(
    rows: int,
    hidden: int,
    count: int,
    *,
    ranks: int,
    axis: str = "z",
    received: int | None = None,
    itemsize: int = 4,
    recompute: bool = False,
) -> list[Call]:
    """Count what a mixture sends whose experts lie on several ranks (``axo.nn.experts``); not what these send inside.

    Args:
        rows: Choices of this rank: its tokens times the experts of each.
        hidden: Features on a rank, h/Gy.
        count: E, experts.
        ranks: e, over which they are spread. A rank's own travel in two halves, if it has two.
        axis: As which ``comms.experts`` is counted: data where it reaches beyond z.
        received: Choices of all ranks that are of this rank's experts; None: as many as ``rows``, the even case.
        itemsize: Bytes an element of the dtype that experts compute in.
        recompute: The forward runs again before backward.
    """
    received, each, calls = rows if received is None else received, count // ranks, list[Call]()
    for phase in (FORWARD, RECOMPUTE) if recompute else (FORWARD,):
        calls.append(Call(phase, "all_to_all", axis, count, 8, RELAYOUT))
    for phase in (FORWARD, RECOMPUTE, BACKWARD) if recompute else (FORWARD, BACKWARD):
        for all_rows in (rows, received):
            later = all_rows * (each // 2) // each
            halves = (all_rows - later, later) if each > 1 else (all_rows,)
            calls += [Call(phase, "all_to_all", axis, half * hidden, itemsize, RELAYOUT) for half in halves]
    return calls


def weight_grad(shard: int, grid: Grid, itemsize: int) -> list[Call]:
    """Return the two reductions of a weight's gradient: of the block over z, of this rank's shard over data."""
    return [
        Call(BACKWARD, "reduce_scatter", "z", shard * grid.z, itemsize, SCATTER_WEIGHT_GRAD),
        Call(BACKWARD, "all_reduce", "data", shard, itemsize, REDUCE_WEIGHT_GRAD),
    ]


def replicated_grad(
    elements: int, itemsize: int, arrangement: Arrangement = AXONN, split_by: tuple[str, ...] = ()
) -> list[Call]:
    """Return the reductions of the gradient of what ranks with other rows replicate (bias, norm weight): z, then data.

    ``split_by``: axes of rows that split it, and over which it is reduced otherwise (a block of Tesseract's weight).
    """
    return [
        Call(BACKWARD, "all_reduce", axis, elements, itemsize, REDUCE_WEIGHT_GRAD)
        for axis in reversed(arrangement.rows)
        if axis not in split_by
    ]


def issued(calls: Iterable[Call], grid: Grid) -> list[Call]:
    """Drop the collectives of axes of size 1: they are never issued."""
    return [call for call in calls if getattr(grid, call.axis) > 1]
