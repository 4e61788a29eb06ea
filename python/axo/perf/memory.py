"""What a rank holds at the fullest moments of a step, in bytes.

With P parameters, g = Gx Gy Gz, S = P / g, r = tokens of one rank and micro-batch, h the hidden size, and bytes an
element w of weights, c of products, s of the residual stream (4, 2, 4 under bf16 autocast: only products are bf16):

    weights    w S             gradients  w S             optimizer  2 w S (AdamW's moments)
               with ZeRO-1 the optimizer's, with ZeRO-2 the gradients' too, are cut over data; offloaded, the
               optimizer's are in the host's memory
    buckets    c S             gradients as they are reduced; at the end of backward .grad is made of them
               (with ZeRO-2 this rank's share, and a bucket that has not gone over data yet)
    tables     sines and cosines of the rotary embedding, whole on every rank: with the weights
    gathered   c P' / (Gx Gy)  blocks as products read them: all of the model when kept from forward to backward (where
               z is 1 one more block, which is cast again when it runs again), else two blocks (OAG gathers the next one
               ahead), or the largest layer
    kept       s r h / Gy a checkpointed block (its input; with selective recomputation the results of products and of
               attention too), or every saved tensor of every layer without checkpointing
    working    while a block runs backward: what a checkpointed one saves when it runs again, its output's gradient, and
               the most that any of its layers adds (`gradients_through`). Later layers have freed what they saved
               and their gathered weights, and have made gradients: the shards, a whole bucket over data for each
               dtype, and the last ones, which are still being scattered over z. Or, if that is more, the temporaries
               that are left when a block has run (`_unsaved`)
    logits     what the last norm, head and loss save (logits: c r V / Gx; their gradient overwrites them)
    head       the same as ``working`` of them
    messages   of stages: torch's buffers for all messages of a step
    under way  of stages: gradients of all micro-batches, not reduced over z

Three moments are compared. When the loss is there, everything saved is there too, and gradients only where earlier
micro-batches left them (``zero_grad`` drops them). When blocks run backward, what the head held is gone. When backward
ends nothing saved is left, and gradients are there twice: in buckets and in .grad.

Saved tensors are counted from the layers: a linear layer saves its input in c, a norm its own in s and its statistics,
attention q, k, v, its output and a logarithm a head (where its scores are capped, these too), an activation what its
derivative needs; what two layers read is saved once, or once a layer where each casts it. The loss is the
vocabulary-parallel one. ``axo bench memory`` holds all of it to what is allocated.
The allocator's waste is a flat share (`SLACK`), the communication library's and the context's buffers a flat 2 GiB.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from axo.grid import Grid
from axo.matmul import activations
from axo.matmul.cost import chunk
from axo.perf.layer_time import Computed, RunOptions, ends_block
from axo.perf.machine import Machine
from axo.perf.workload import Block, Layer, Workload

GIB = 2.0**30
FP32 = 4  # bytes; of statistics
LOSS_CHUNK = 1 << 18  # elements of a temporary of the loss, of which there are two at a time
SLACK = 0.05
RESERVED = 2 * GIB


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank by kind, each at its largest.

    ``accumulates``: gradients of earlier micro-batches are there when backward begins.
    """

    weights: float
    gradients: float
    optimizer: float
    buckets: float
    gathered: float
    kept: float
    working: float
    logits: float
    head: float
    under_way: float = 0.0
    messages: float = 0.0
    accumulates: bool = False

    @property
    def moments(self) -> dict[str, float]:
        """Bytes at the three moments of which one is the fullest."""
        always = self.weights + self.optimizer + self.messages
        early = always + self.gathered + self.kept + self.under_way + self.gradients * self.accumulates
        return {
            "at the loss": early + self.logits + self.head,
            "blocks run backward": early + self.working,
            "backward ends": always + self.gradients + self.buckets,
        }

    @property
    def saved(self) -> float:
        """Bytes that are kept for backward when it begins."""
        return self.kept + self.logits

    @property
    def total(self) -> float:
        """Bytes at the fullest moment, with the allocator's waste and the reserve of the libraries."""
        return max(self.moments.values()) * (1 + SLACK) + RESERVED

    @property
    def state(self) -> float:
        """The same at the end of backward, when no activation is left: the number of micro-batches does not matter."""
        return self.moments["backward ends"] * (1 + SLACK) + RESERVED

    def fits(self, machine: Machine) -> bool:
        """True when it fits into one GPU."""
        return self.total <= machine.memory_gib * GIB


class _OfLayer(NamedTuple):
    """Bytes of one layer; only products have all but the first three."""

    saved: float
    through: float  # gradients of its input and output, and temporaries
    results: float  # that selective recomputation keeps
    of_weights: float = 0.0  # as products read them
    scattered: float = 0.0  # its weight's gradient before it is scattered over z; 0 where z is 1
    gradient: float = 0.0  # and this rank's shard of it


class _OfBlock(NamedTuple):
    """Bytes of one block; sums of its layers where nothing else is said."""

    layers: list[_OfLayer]
    has_loss: bool
    saved: float
    results: float
    of_weights: float
    largest: float  # weight of a layer
    input: float  # of the block, from the residual stream
    unsummed: float  # with split tokens, the last product's result, whose sum recomputation leaves out
    gradients: float
    peaks: dict[tuple[float, bool], float]  # what ``_backward`` found, by what it depends on


def _of_block(block: Block, grid: Grid, rows: int, run: RunOptions, computed: Computed) -> _OfBlock:
    def count() -> _OfBlock:
        layers = [_of_layer(layer, grid, rows, run) for layer in block.layers]
        columns = list(zip(*layers, strict=True))
        kept, _, results, of_weights, _, gradients = map(sum, columns)
        has_loss = any(layer.kind == "loss" for layer in block.layers)
        into = block_input(block, grid, rows, run)
        last = ends_block(block.layers) if run.token_ranks(grid) > 1 else None
        unsummed = 0.0 if last is None else products_kept(last, grid, rows, run)
        return _OfBlock(layers, has_loss, kept, results, of_weights, max(columns[3]), into, unsummed, gradients, {})

    return computed.once(
        (block.once, "memory", grid.x, grid.y, grid.z, grid.data > 1, rows, run.sequence_parallel), count
    )


def _of_layer(layer: Layer, grid: Grid, rows: int, run: RunOptions) -> _OfLayer:
    always = (
        saved(layer, grid, rows, run),
        gradients_through(layer, grid, rows, run),
        products_kept(layer, grid, rows, run),
    )
    if layer.kind != "linear":
        return _OfLayer(*always)
    gradient = (run.weights if grid.z * grid.data == 1 else run.itemsize) * layer.parameters / (grid.x * grid.y)
    scattered = run.itemsize * layer.parameters / (grid.x * grid.y) if grid.z > 1 else 0.0
    return _OfLayer(*always, read(layer, grid, run), scattered, gradient / grid.z)


def of_model(computed: Computed, workload: Workload, grid: Grid, run: RunOptions) -> Memory:
    """``estimate``, computed once: of data it depends only where ZeRO cuts over it, or it is 1."""
    if run.algorithm != "axonn":
        return estimate(workload, grid, run, computed)
    cut = (run.zero, grid.data) if run.zero else (0, grid.data > 1)
    way = (run.rows, run.micro_batches > 1, run.cached_gathers, run.selective, run.sequence_parallel)
    one = computed.once(
        (workload, "memory", grid.x, grid.y, grid.z, *cut, *way),
        lambda: estimate(workload, grid, replace(run, offload=False), computed),
    )
    return replace(one, optimizer=0.0) if run.offload else one


class _Gradients:
    """Gradients while backward goes from the head to the embedding; ``made``: bytes of them so far."""

    def __init__(self, workload: Workload, grid: Grid, run: RunOptions) -> None:
        self.shard = (workload.parameters + workload.copied(grid)) / (grid.x * grid.y * grid.z)
        self.share = run.optimizer_share(grid) if run.zero == 2 else 1.0  # of them, that stays on this rank
        self.alone = grid.z * grid.data == 1  # none is reduced: autograd puts a gradient into .grad at once
        self.products = workload.of_products / workload.parameters * self.shard
        # Of norms and tables, in the dtype of weights.
        self.others = min(run.weights * (self.shard - self.products), run.bucket_bytes)
        self.grid, self.run, self.made = grid, run, 0.0

    def held(self) -> float:
        """This rank's share of what is made, and the buckets in which others wait for the rest."""
        run = self.run
        if self.grid.data == 1:  # alone, autograd adds to the gradients that earlier micro-batches left
            return 0.0 if self.alone and run.micro_batches > 1 else self.made
        mine = self.share * self.made
        return mine + min(run.itemsize * self.products - mine, run.bucket_bytes) + self.others


def estimate(workload: Workload, grid: Grid, run: RunOptions, computed: Computed | None = None) -> Memory:
    """Return the memory of one rank; shards and rows that do not divide are rounded up.

    Args:
        computed: By other plans of this workload with the same precision and overlaps; more is put in.
    """
    if run.algorithm != "axonn":
        return estimate(
            workload, run.held_as(grid), replace(run, algorithm="axonn", rows=run.group_rows(grid)), computed
        )
    computed = computed or Computed()
    rows, gradients = chunk(run.group_rows(grid), grid.z), _Gradients(workload, grid, run)
    of_blocks = [(block, _of_block(block, grid, rows, run, computed)) for block in workload.blocks]
    gathered = _gathered([(block.repeat, one) for block, one in of_blocks if not one.has_loss], grid, run)
    kept = logits = head = 0.0
    extra = [0.0]  # while blocks run backward: bytes more than when the loss was there
    freed = of_head = 0.0
    for block, one in reversed(of_blocks):
        if one.has_loss:
            logits += one.saved
            head = _head(block, one, run, gradients, gathered)
            gradients.made += one.gradients
            of_head = one.gradients * grid.z
            continue
        results = one.results if run.selective else 0.0
        mine = one.input + results if block.checkpointed else one.saved
        kept += block.repeat * mine
        if one.gradients:
            # The head's gradient may still be under way: only gathers of a block make earlier collectives complete.
            ahead = of_head if run.cached_gathers and grid.z > 1 else 0.0
            working, frees = _working(block, one, grid, run, ahead), mine + run.cached_gathers * one.of_weights
            extra.append(_unsaved(block, one.input, grid, run, rerun=False))
            for before in (0, block.repeat - 1):  # the last of these blocks, then the first
                gradients.made, freed = gradients.made + before * one.gradients, freed + before * frees
                extra.append(gradients.held() + working - freed)
            gradients.made, freed = gradients.made + one.gradients, freed + frees
    shard, share = gradients.shard, gradients.share
    copied = run.itemsize != run.weights and not gradients.alone
    waiting = min((1 - share) * run.itemsize * shard, run.bucket_bytes)  # with ZeRO-2, a bucket at a time is whole
    return Memory(
        weights=run.weights * (shard + workload.tables),
        gradients=run.weights * shard * share,
        optimizer=0.0 if run.offload else 2.0 * run.weights * shard * run.optimizer_share(grid),
        buckets=run.itemsize * shard * share * copied + waiting,
        gathered=gathered,
        kept=kept,
        working=max(extra),
        logits=logits,
        head=head,
        accumulates=run.micro_batches > 1,
    )


def _head(block: Block, one: _OfBlock, run: RunOptions, gradients: _Gradients, gathered: float) -> float:
    """Bytes of the block of the loss, beside what it saves: before its backward, or at the fullest moment of it."""
    grid, before = gradients.grid, run.cached_gathers * one.of_weights + one.layers[-1].through
    during = one.of_weights + _backward(block, one, grid, run) + gradients.held()
    if run.itemsize != run.weights and grid.data > 1 and not any(layer.bias for layer in block.layers):
        during -= gradients.others  # their bucket is made after the product
    if not run.cached_gathers:
        before -= gathered  # forward has freed all
        if grid.z > 1 and "oag" in run.overlap:  # of two blocks that are gathered at a time, one is not asked for yet
            during -= gathered / 2
    return max(during, before)


def _working(block: Block, one: _OfBlock, grid: Grid, run: RunOptions, ahead: float) -> float:
    """Bytes at the fullest moment of a block's backward, on top of what it has kept; ``ahead``: of a gradient that is
    still under way."""
    output = one.input  # its gradient, as large as the input
    if not block.checkpointed:
        return output + _backward(block, one, grid, run, ahead)
    results = one.results if run.selective else 0.0
    rerun = one.saved - results - _first_input(block.layers[0], one.input, run) + one.unsummed  # what it saves again
    cast = one.of_weights * run.cached_gathers if grid.z == 1 else 0.0  # its weights, for its second forward
    return output + max(
        rerun + _backward(block, one, grid, run, ahead),
        rerun + _unsaved(block, one.input, grid, run, rerun=True) + cast,
        one.unsummed + _while_summed(block, one, grid, run),
    )


def _while_summed(block: Block, one: _OfBlock, grid: Grid, run: RunOptions) -> float:
    """Bytes while a block runs again, its tokens split over x, and scatters the result of a product over x.

    That result, whole, and the gathered gradient of the block's output are there too.
    """
    if run.token_ranks(grid) == 1:
        return 0.0
    most = there = 0.0
    last = ends_block(block.layers)  # its result is not summed again
    for layer, of in zip(block.layers, one.layers, strict=True):
        sums = layer.kind == "linear" and layer.transposed and layer is not last
        there += of.saved
        if sums:
            most = max(most, there + of.results * (2 - run.selective))
        there -= of.results * run.selective  # what selective recomputation kept is counted already
    return most


def _gathered(blocks: list[tuple[int, _OfBlock]], grid: Grid, run: RunOptions) -> float:
    """Bytes of weights of (how many, blocks) as products read them: gathered over z, or cast where z cuts nothing."""
    if run.cached_gathers:
        return run.cached_gathers * sum(repeat * one.of_weights for repeat, one in blocks)
    if grid.z > 1 and "oag" in run.overlap:
        return 2.0 * max(one.of_weights for _, one in blocks)
    return max(one.largest for _, one in blocks)


def read(layer: Layer, grid: Grid, run: RunOptions) -> float:
    """Bytes of a linear layer's weight as its product reads it, on top of the shard."""
    if grid.z == 1 and run.itemsize == run.weights:
        return 0.0
    columns = layer.out_features + layer.kv_features * (layer.kv_copies(grid.x) - 1)
    return run.itemsize * (layer.experts * layer.in_features * columns) / (grid.x * grid.y)


def block_input(block: Block, grid: Grid, rows: int, run: RunOptions) -> float:
    """Bytes that a checkpointed block keeps: its input, a piece of the residual stream."""
    first, rows = block.layers[0], rows // run.token_ranks(grid)
    return run.stream * rows * first.rows * chunk(first.in_features, grid.x if first.transposed else grid.y)


def products_kept(layer: Layer, grid: Grid, rows: int, run: RunOptions) -> float:
    """Bytes that a block with selective recomputation keeps of one layer: the result of a product or of attention."""
    my_rows = rows * layer.rows * layer.experts
    if layer.kind == "linear":
        return run.itemsize * my_rows * layer.local_sizes(grid)[1]
    if layer.kind == "attention":
        heads = FP32 * my_rows * chunk(layer.heads, grid.x)
        kept = _scores(layer, grid, my_rows) * run.itemsize / FP32 if layer.scores else heads
        return run.itemsize * my_rows * chunk(layer.in_features, grid.x) + kept
    return 0.0


def _first_input(layer: Layer, of_input: float, run: RunOptions) -> float:
    """Bytes of the block's input that its first layer saves; a checkpointed block has kept them already."""
    return of_input if layer.kind == "norm" or run.stream == run.itemsize else 0.0


def _unsaved(block: Block, of_input: float, grid: Grid, run: RunOptions, *, rerun: bool) -> float:
    """Bytes that are there when a block has run, forward or again (``rerun``), and that no layer has saved.

    Results of its two branches (selective recomputation sums over x in a copy of what it keeps), the stream between
    them and the norm's result where no layer has saved them; in forward its output, in recomputation the gradient of
    its output, cast for products.
    """
    norms = [layer for layer in block.layers if layer.kind == "norm" and layer.over == "y" and not layer.of_product]
    parallel = len(norms) == 1 or any(norm.shares_input for norm in norms)
    casts, branch = run.stream != run.itemsize, of_input * run.itemsize / run.stream
    first = block.checkpointed and not rerun  # nothing is saved
    copies = 2.0 * branch * (rerun or not run.selective or grid.x > 1)
    if run.selective and rerun and grid.x > 1:
        copies += branch
    output = branch * casts if rerun else of_input
    return output + copies + of_input * (parallel or first) + of_input * (bool(norms) and (casts or first))


def _backward(block: Block, one: _OfBlock, grid: Grid, run: RunOptions, ahead: float = 0.0) -> float:
    """Bytes on top of what a block has saved at the fullest moment of its backward, layer by layer.

    After its backward a layer's saved tensors and gathered weight are freed, and its gradient stays. While a gradient
    is computed, the two before it are still being scattered over z; ``ahead``: bytes of one that the block begins with.
    """
    releases = run.cached_gathers > 0 or (grid.z > 1 and "oag" in run.overlap)
    if (ahead, releases) in one.peaks:
        return one.peaks[ahead, releases]
    most, there, before, last = 0.0, 0.0, 0.0, ahead
    for layer, of in zip(reversed(block.layers), reversed(one.layers), strict=True):
        if layer.kind != "loss":  # the gradient of the logits overwrites them
            most = max(most, there + before + last + of.through)
            if layer.kind == "linear":  # dI, then dW without the weight
                there -= of.of_weights * releases
                most = max(most, there + before + last + of.scattered + of.through)
                before, last = last, of.scattered
                there += of.gradient
        there -= of.saved
    one.peaks[ahead, releases] = most
    return most


def gradients_through(layer: Layer, grid: Grid, rows: int, run: RunOptions) -> float:
    """Bytes of the gradients of one layer's input and output, and of temporaries, while its backward runs."""
    my_rows = _rows(layer, grid, rows, run)
    if layer.kind == "norm":  # in fp32: its output's gradient, normalized, scaled, a product, its input's gradient
        elements = my_rows * chunk(layer.in_features, grid.size(layer.over or "x"))
        narrow = _itemsize(layer, run)
        native = layer.norm == "layernorm" and layer.over == "y" and grid.y == 1
        tensors = (2 if narrow == FP32 else 3) if native else 5
        whose = narrow if layer.of_product and run.stream == run.itemsize else 0  # the gradient of the block's output
        return elements * (FP32 * tensors + ((2 - native) * narrow if narrow < FP32 else 0) - whose)
    if layer.kind == "linear":
        into, out = layer.local_sizes(grid)
        # Else its output's gradient is that of the stream, already counted; with split tokens it is gathered first.
        apart = not layer.transposed or run.stream != run.itemsize or run.token_ranks(grid) > 1
        return run.itemsize * my_rows * (into + out * apart)
    if layer.kind == "attention":
        return run.itemsize * my_rows * 4 * chunk(layer.in_features, grid.x) + 2.0 * _scores(layer, grid, my_rows)
    if layer.kind == "pointwise" and not layer.transposed:  # of its output and its inputs
        return run.itemsize * my_rows * max(2, layer.kept) * chunk(layer.in_features, grid.x)
    if layer.kind == "loss":  # its temporaries are of a few rows
        return FP32 * min(2.0 * LOSS_CHUNK, my_rows * chunk(layer.out_features, grid.x))
    return 0.0


def _rows(layer: Layer, grid: Grid, rows: int, run: RunOptions) -> float:
    """Rows of a layer on this rank: of all its experts, and of its tokens where the stream's are split over x."""
    return rows * layer.rows * layer.experts / (run.token_ranks(grid) if layer.on_stream else 1)


def _itemsize(layer: Layer, run: RunOptions) -> int:
    """Bytes an element of a norm's input."""
    return run.itemsize if layer.of_product or layer.over != "y" else run.stream


def _scores(layer: Layer, grid: Grid, my_rows: float) -> float:
    """Bytes of attention's scores in fp32, a square of a sequence a head."""
    return FP32 * my_rows * layer.scores * chunk(layer.heads, grid.x)


def _heads(layer: Layer, grid: Grid) -> tuple[int, int]:
    """Heads of a rank, and groups of keys and values."""
    return chunk(layer.heads, grid.x), max(1, layer.kv_groups // grid.x)


def saved(layer: Layer, grid: Grid, rows: int, run: RunOptions) -> float:
    """Bytes that one layer keeps for its backward; ``rows`` of one rank."""
    my_rows = _rows(layer, grid, rows, run)
    if layer.kind == "loss":
        columns = chunk(layer.out_features, grid.x)
        return activations.cross_entropy(my_rows, columns, run.itemsize, capped=layer.capped)
    if layer.kind == "norm":
        width, centered = chunk(layer.in_features, grid.size(layer.over or "x")), layer.norm == "layernorm"
        of_input = _itemsize(layer, run)
        return activations.norm(my_rows, width, of_input, centered=centered, shares_input=layer.shares_input)
    if layer.kind == "embedding":
        return activations.embedding(my_rows)
    if layer.kind == "linear":
        # Tokens that are gathered come in the dtype of products, once for all that read them; an input whose gradients
        # are added up and summed over x is cast once; else each casts its own.
        split = run.sequence_parallel
        once = split or grid.x > 1 or run.stream == run.itemsize
        if layer.shares_input and not (split and layer.gathers) and once:
            return 0.0
        return activations.linear(my_rows, layer.local_sizes(grid)[0], run.itemsize)
    if layer.kind == "attention":  # q, k and the output; v where each head's is a copy of its group's
        heads, groups = _heads(layer, grid)
        tensors = run.itemsize * (3 + (groups < heads) - (layer.scores > 0)) * chunk(layer.in_features, grid.x)
        if layer.scores:  # capped, softmax in fp32, and that cast; no logarithm
            scores = _scores(layer, grid, my_rows) * (2 if run.itemsize == FP32 else 1 + 2 * run.itemsize / FP32)
            return my_rows * tensors + scores
        return my_rows * (tensors + FP32 * heads)
    if layer.heads:  # all that qkv laid down stays where norms read it, or v of every head lies there
        heads, groups = _heads(layer, grid)
        width = layer.in_features // (layer.heads + 2 * layer.kv_groups) * (heads + 2 * groups)
        return run.itemsize * my_rows * width * (layer.kept > 0 or heads == groups)
    return run.itemsize * layer.kept * my_rows * chunk(layer.in_features, grid.x)
