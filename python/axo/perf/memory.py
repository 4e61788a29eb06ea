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
               z is 1 one more block, which is cast again when it runs again), else what z cuts of two blocks
               (OAG gathers the next one ahead), and the largest of the others
    kept       s r h / Gy a recomputed block (its input; with selective recomputation the results of products and of
               attention too), or every saved tensor of every layer without checkpointing
    working    while a block runs backward: what a recomputed one saves when it runs again, its output's gradient, and
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

from typing import NamedTuple

from axo.grid import Grid
from axo.matmul.cost import chunk
from axo.perf.layer_time import Costs
from axo.perf.layers import LayerBytes, LinearKind, LossKind, NormKind, RoutingKind
from axo.perf.machine import Machine
from axo.perf.run_options import RunOptions
from axo.perf.workload import Block, Workload

GIB = 2.0**30
SLACK = 0.05
RESERVED = 2 * GIB


class Memory(NamedTuple):
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

    def fits(self, machine: Machine) -> bool:
        """True when it fits into one GPU."""
        return self.total <= machine.memory_gib * GIB


class _BlockBytes(NamedTuple):
    """Bytes of one block on one rank.

    Attributes:
        layers: Of each of its layers. all: Their sums.
        has_loss: Whether it is the block of the loss.
        ahead: Weights of the layers that z cuts, as products read them: they are gathered block by block.
        alone: That of the largest layer that is read by itself: each expert is one.
        input: Of the block, from the residual stream.
        unsummed: With split tokens, the last product's result, whose sum recomputation leaves out.
        workings: What ``_working`` has returned, by what it depends on beside these.
    """

    layers: list[LayerBytes]
    all: LayerBytes
    has_loss: bool
    ahead: float
    alone: float
    input: float
    unsummed: float
    workings: dict[tuple[object, ...], float]


def _block_bytes(block: Block, grid: Grid, rows: int, run: RunOptions, costs: Costs | None) -> _BlockBytes:
    def count() -> _BlockBytes:
        layers = [layer.bytes(grid, rows, run) for layer in block.layers]
        has_loss = any(isinstance(layer, LossKind) for layer in block.layers)
        last = block.unsummed(grid, run)
        unsummed = 0.0 if last is None else layers[block.layers.index(last)].results
        ahead = sum(of.of_weights for of in layers if of.scattered) if "oag" in run.overlap else 0.0
        reads = zip(block.layers, layers, strict=True)
        alone = max((of.of_weights / layer.mine for layer, of in reads if not (ahead and of.scattered)), default=0.0)
        total = LayerBytes._make(map(sum, zip(*layers, strict=True)))
        return _BlockBytes(layers, total, has_loss, ahead, alone, block_input(block, grid, rows, run), unsummed, {})

    if costs is None:
        return count()
    key = (block.once, "memory", grid.x, grid.y, grid.z, grid.data > 1, rows, *run.of_layer)
    return costs.once(key, count)


def of_model(costs: Costs, workload: Workload, grid: Grid, run: RunOptions) -> Memory:
    """``estimate``, computed once: of data it depends only where ZeRO cuts over it, or it is 1."""
    if run.algorithm != "axonn":
        return estimate(workload, grid, run, costs)
    cut = (run.zero, grid.data) if run.zero else (0, grid.data > 1)
    how = (run.rows, run.micro_batches > 1, run.optimizer, *run.of_block)
    one = costs.once(
        (workload, "memory", grid.x, grid.y, grid.z, *cut, *how),
        lambda: estimate(workload, grid, run._replace(offload=False), costs),
    )
    return one._replace(optimizer=0.0) if run.offload else one


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


def estimate(workload: Workload, grid: Grid, run: RunOptions, costs: Costs | None = None) -> Memory:
    """Return the memory of one rank; shards and rows that do not divide are rounded up.

    Args:
        costs: What other plans of this workload with the same precision and overlaps have computed; more is put in.
    """
    if run.algorithm != "axonn":
        return estimate(workload, run.held_as(grid), run._replace(algorithm="axonn", rows=run.group_rows(grid)), costs)
    rows, gradients = chunk(run.group_rows(grid), grid.z), _Gradients(workload, grid, run)
    blocks = [(block, _block_bytes(block, grid, rows, run, costs)) for block in workload.blocks]
    gathered = _gathered([(block.repeat, one) for block, one in blocks if not one.has_loss], grid, run)
    kept = logits = head = 0.0
    extra = [0.0]  # while blocks run backward: bytes more than when the loss was there
    freed = of_head = 0.0
    for block, one in reversed(blocks):
        if one.has_loss:
            logits += one.all.saved
            head = _head(block, one, run, gradients, gathered)
            gradients.made += one.all.gradient
            of_head = one.all.gradient * grid.z
            continue
        mine = one.input + one.all.results * run.selective if block.reruns(run) else one.all.saved
        kept += block.repeat * mine
        if one.all.gradient:
            # The head's gradient may still be under way: only gathers of a block make earlier collectives complete.
            ahead = of_head if run.cached_gathers and grid.z > 1 else 0.0
            working, frees = _working(block, one, grid, run, ahead), mine + run.cached_gathers * one.all.of_weights
            extra.append(_unsaved(block, one.input, grid, run, rerun=False))
            for before in (0, block.repeat - 1):  # the last of these blocks, then the first
                gradients.made, freed = gradients.made + before * one.all.gradient, freed + before * frees
                extra.append(gradients.held() + working - freed)
            gradients.made, freed = gradients.made + one.all.gradient, freed + frees
    shard, share = gradients.shard, gradients.share
    copied, states = run.itemsize != run.weights and not gradients.alone, 2.0 * shard  # moments
    if run.optimizer == "muon":  # one of a matrix
        matrices = sum(many * one.in_features * one.out_features for many, one in workload.matrices)
        states -= (matrices + workload.copied(grid)) / (grid.x * grid.y * grid.z)
    waiting = min((1 - share) * run.itemsize * shard, run.bucket_bytes)  # with ZeRO-2, a bucket at a time is whole
    return Memory(
        weights=run.weights * (shard + workload.tables),
        gradients=run.weights * shard * share,
        optimizer=0.0 if run.offload else run.weights * states * run.optimizer_share(grid),
        buckets=run.itemsize * shard * share * copied + waiting,
        gathered=gathered,
        kept=kept,
        working=max(extra),
        logits=logits,
        head=head,
        accumulates=run.micro_batches > 1,
    )


def _head(block: Block, one: _BlockBytes, run: RunOptions, gradients: _Gradients, gathered: float) -> float:
    """Bytes of the block of the loss, beside what it saves: before its backward, or at the fullest moment of it."""
    grid, weight = gradients.grid, one.all.of_weights * max(run.cached_gathers, run.chunked_loss)
    before = weight + one.layers[-1].through
    during = one.all.of_weights + _backward(block, one, grid, run) + gradients.held()
    biased = any(isinstance(layer, LinearKind) and layer.bias for layer in block.layers)
    if run.itemsize != run.weights and grid.data > 1 and not biased:
        during -= gradients.others  # their bucket is made after the product
    if not run.cached_gathers:
        before -= gathered  # forward has freed all
        if grid.z > 1 and "oag" in run.overlap:  # of two blocks that are gathered at a time, one is not asked for yet
            during -= gathered / 2
    return max(during, before)


def _working(block: Block, one: _BlockBytes, grid: Grid, run: RunOptions, ahead: float) -> float:
    """Bytes at the fullest moment of a block's backward, on top of what it has kept; ``ahead``: of a gradient that is
    still under way."""
    key = (run.recompute, run.cached_gathers, ahead)
    if key not in one.workings:
        backward = _backward(block, one, grid, run, ahead)
        most = _while_rerun(block, one, grid, run, backward) if block.reruns(run) else backward
        one.workings[key] = one.input + most  # the output's gradient is as large as the input
    return one.workings[key]


def _while_rerun(block: Block, one: _BlockBytes, grid: Grid, run: RunOptions, backward: float) -> float:
    """Bytes at the fullest moment of a block that runs again, and of its backward after it."""
    # What it saves again; a block has kept its input, which its first layer saves, already.
    first = one.input if isinstance(block.layers[0], NormKind) or run.stream == run.itemsize else 0.0
    rerun = one.all.saved - one.all.results * run.selective - first + one.unsummed
    cast = one.all.of_weights * run.cached_gathers if grid.z == 1 else 0.0  # its weights, for its second forward
    unsaved = _unsaved(block, one.input, grid, run, rerun=True)
    return max(rerun + backward, rerun + unsaved + cast, one.unsummed + _while_summed(block, one, grid, run))


def _while_summed(block: Block, one: _BlockBytes, grid: Grid, run: RunOptions) -> float:
    """Bytes while a block runs again, its tokens split over x, and scatters the result of a product over x.

    That result, whole, and the gathered gradient of the block's output are there too.
    """
    if run.token_ranks(grid) == 1:
        return 0.0
    most = there = 0.0
    last = block.unsummed(grid, run)  # its result is not summed again
    for layer, of in zip(block.layers, one.layers, strict=True):
        there += of.saved
        if isinstance(layer, LinearKind) and layer.transposed and layer is not last:
            most = max(most, there + of.results * (2 - run.selective))
        there -= of.results * run.selective  # what selective recomputation kept is counted already
    return most


def _gathered(blocks: list[tuple[int, _BlockBytes]], grid: Grid, run: RunOptions) -> float:
    """Bytes of weights of (how many, blocks) as products read them: gathered over z, or cast where z cuts nothing."""
    if run.cached_gathers:
        return run.cached_gathers * sum(repeat * one.all.of_weights for repeat, one in blocks)
    return 2.0 * max(one.ahead for _, one in blocks) + max(one.alone for _, one in blocks)


def block_input(block: Block, grid: Grid, rows: int, run: RunOptions) -> float:
    """Bytes that a recomputed block keeps: its input, a piece of the residual stream; ``rows`` of one rank."""
    first, rows = block.layers[0], rows // run.token_ranks(grid)
    return run.stream * rows * first.rows * chunk(first.in_features, grid.x if first.transposed else grid.y)


def _unsaved(block: Block, of_input: float, grid: Grid, run: RunOptions, *, rerun: bool) -> float:
    """Bytes that are there when a block has run, forward or again (``rerun``), and that no layer has saved.

    Results of its two branches (selective recomputation sums over x in a copy of what it keeps), the stream between
    them and the norm's result where no layer has saved them; in forward its output, in recomputation the gradient of
    its output, cast for products.
    """
    norms, parallel = block.branches
    casts, branch = run.stream != run.itemsize, of_input * run.itemsize / run.stream
    first, selective = block.reruns(run) and not rerun, run.selective  # first: nothing is saved
    copies = 2.0 * branch * (rerun or not selective or grid.x > 1)
    if selective and rerun and grid.x > 1:
        copies += branch
    output = branch * casts if rerun else of_input
    return output + copies + of_input * (parallel or first) + of_input * (norms and (casts or first))


def _backward(block: Block, one: _BlockBytes, grid: Grid, run: RunOptions, ahead: float = 0.0) -> float:
    """Bytes on top of what a block has saved at the fullest moment of its backward, layer by layer.

    After its backward a layer's saved tensors and gathered weight are freed, and its gradient stays. While a gradient
    is computed, the two before it are still being scattered over z; ``ahead``: bytes of one that the block begins with.
    Experts follow each other. A block that does not run again asks for its weights at its first product.
    """
    asks = 0.0 if run.cached_gathers or block.reruns(run) else one.ahead
    most, there, before, last = 0.0, -asks, 0.0, ahead
    for layer, of in zip(reversed(block.layers), reversed(one.layers), strict=True):
        if not isinstance(layer, LossKind):  # the gradient of the logits overwrites them
            each = 1 if isinstance(layer, RoutingKind) else layer.mine
            if isinstance(layer, LinearKind):
                there, asks = there + asks, 0.0
            most = max(most, there + before + last + of.through / each)
            if isinstance(layer, LinearKind):  # dI, then dW without the weight
                there -= of.of_weights * (run.cached_gathers > 0 or (one.ahead > 0 and of.scattered > 0))
                most = max(most, there + before + last + (of.scattered + of.through) / each)
                before, last = last, of.scattered / each
                there += of.gradient
        there -= of.saved
    return most
