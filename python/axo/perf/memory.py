"""What a rank holds at the fullest moments of a step, in bytes.

With P parameters, g = Gx Gy Gz, S = P / g, r = tokens of one rank and micro-batch, h the hidden size, and bytes an
element w of weights, c of products, s of the residual stream (4, 2, 4 under bf16 autocast: only products are bf16):

    weights    w S             gradients  w S             optimizer  2 w S (AdamW's moments)
               with ZeRO-1 the optimizer's, with ZeRO-2 the gradients' too, are cut over data; offloaded, the
               optimizer's are in the host's memory
    buckets    c S             gradients as they are reduced; at the end of backward .grad is made of them
    under way  the first bucket that goes over data, and a layer's gradient between its product and z
    gathered   c P' / (Gx Gy)  blocks as products read them: all of the model when kept from forward to backward, else
               two blocks (OAG gathers the next one ahead), or the largest layer
    kept       s r h / Gy a checkpointed block (its input; with selective recomputation the results of products and of
               attention too), or every saved tensor of every layer without checkpointing
    working    of backward: the tensors that a checkpointed block saves when it runs again, its output and the gradient
               of that, and the gradients that flow through its largest layer
    head       the last norm, head and loss: what they save (logits: c r V / Gx, in which their gradient is put), the
               gathered weight, the gradient of their input

    messages   of stages: torch's buffers for all messages of a step

Three moments are compared. When the loss is there, everything saved is there too, and gradients only where earlier
micro-batches left them (``zero_grad`` drops them). When blocks run backward, what the head held is gone. When backward
ends nothing saved is left, and gradients are there twice: in buckets and in .grad.

Saved tensors are counted from the layers: a linear layer saves its input in c, a norm its own in s and its statistics,
attention q, k, v, its output and a logarithm a head, an activation what its derivative needs; what two layers read is
saved once, but for the copies that each casts. The loss is the vocabulary-parallel one.
The allocator's waste is a flat share (`SLACK`), the communication library's and the context's buffers a flat 2 GiB.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from axo.grid import Grid
from axo.matmul.cost import chunk
from axo.perf.layer_time import Run
from axo.perf.machine import Machine
from axo.perf.workload import Block, Layer, Workload

GIB = 2.0**30
FP32 = 4  # bytes; of statistics
IN_FLIGHT = 1  # layers whose gradients are computed or being scattered over z at the fullest moment
SLACK = 0.05
RESERVED = 2 * GIB


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, by what they are for: of each the most that there is of it.

    ``accumulates``: gradients of earlier micro-batches are there when backward begins.
    """

    weights: float
    gradients: float
    optimizer: float
    buckets: float
    gathered: float
    kept: float
    working: float
    head: float
    under_way: float
    messages: float = 0.0
    accumulates: bool = False

    @property
    def moments(self) -> dict[str, float]:
        """Bytes at the three moments of which one is the fullest."""
        always = self.weights + self.optimizer + self.messages
        early = always + self.gathered + self.kept + self.under_way + self.gradients * self.accumulates
        return {
            "at the loss": early + self.head,
            "blocks run backward": early + self.working,
            "backward ends": always + self.gradients + self.buckets,
        }

    @property
    def total(self) -> float:
        """Bytes at the fullest moment, with the allocator's waste and the reserve of the libraries."""
        return max(self.moments.values()) * (1 + SLACK) + RESERVED

    @property
    def state(self) -> float:
        """The same at the end of backward, when no activation is left: micro-batches change nothing of it."""
        return self.moments["backward ends"] * (1 + SLACK) + RESERVED

    def fits(self, machine: Machine) -> bool:
        """True when it fits into one GPU."""
        return self.total <= machine.memory_gib * GIB


def estimate(workload: Workload, grid: Grid, run: Run) -> Memory:
    """Return the memory of one rank; shards and rows that do not divide are rounded up."""
    rows = chunk(run.group_rows(grid), grid.z)
    shard = (workload.parameters + workload.copied(grid)) / (grid.x * grid.y * grid.z)
    kept = working = head = largest = 0.0
    for block in workload.blocks:
        all_saved = sum(saved(layer, grid, rows, run) for layer in block.layers)
        linear = [layer for layer in block.layers if layer.kind == "linear"]
        largest = max(largest, *(float(layer.parameters) for layer in linear), 0.0)
        if any(layer.kind == "loss" for layer in block.layers):
            flowing = sum(run.itemsize * rows * chunk(layer.in_features, grid.y) for layer in linear)
            head += all_saved + flowing + _read(linear, grid, run)
            continue
        flows = [
            gradients_through(layer, grid, rows, run)
            for layer in block.layers
            if not (block.checkpointed and layer.kind == "norm")  # when a norm's turn comes half of the block is gone
        ]
        results = sum(products_kept(layer, grid, rows, run) for layer in block.layers) if run.selective else 0.0
        through = block_input(block, grid, rows, run)
        kept += block.repeat * (through + results if block.checkpointed else all_saved)
        again = all_saved + 2 * through  # with its output, and the gradient of that
        working = max(working, max(flows) + again * block.checkpointed)
    read = gathered(workload, grid, run)
    if head and grid.z > 1 and "oag" in run.overlap and not run.cached_gathers:
        head -= read / 2  # of the two blocks that are gathered at a time one has not been asked for yet
    reduced = run.optimizer_share(grid) if run.zero == 2 else 1.0
    silent = grid.z * grid.data == 1  # nothing to reduce: autograd puts a gradient into .grad at once
    copied = run.itemsize != run.weights and not silent
    return Memory(
        weights=run.weights * shard,
        gradients=run.weights * shard * reduced,
        optimizer=0.0 if run.offload else 2.0 * run.weights * shard * run.optimizer_share(grid),
        buckets=run.itemsize * shard * reduced if copied else 0.0,
        gathered=read,
        kept=kept,
        working=working,
        head=head,
        under_way=(min(run.itemsize * shard, run.bucket_bytes) if grid.data > 1 else 0.0)
        + (IN_FLIGHT * run.itemsize * largest / (grid.x * grid.y) if grid.z > 1 else 0.0),
        accumulates=run.micro_batches > 1 or silent,
    )


def gathered(workload: Workload, grid: Grid, run: Run) -> float:
    """Bytes of the blocks' weights as products read them: gathered over z, or cast where z does not cut them."""
    blocks = [block for block in workload.blocks if all(layer.kind != "loss" for layer in block.layers)]
    linear = [[layer for layer in block.layers if layer.kind == "linear"] for block in blocks]
    if run.cached_gathers:
        every = sum(block.repeat * _read(layers, grid, run) for block, layers in zip(blocks, linear, strict=True))
        copied = run.itemsize * workload.copied(grid) / (grid.x * grid.y) if every else 0.0
        return run.cached_gathers * (every + copied)
    if grid.z > 1 and "oag" in run.overlap:
        return 2.0 * max(_read(layers, grid, run) for layers in linear)
    return max(_read([layer], grid, run) for layers in linear for layer in layers)


def _read(layers: Iterable[Layer], grid: Grid, run: Run) -> float:
    """Bytes of these layers' weights as products read them, on top of the shards."""
    if grid.z == 1 and run.itemsize == run.weights:
        return 0.0
    return run.itemsize * sum(layer.parameters for layer in layers) / (grid.x * grid.y)


def block_input(block: Block, grid: Grid, rows: int, run: Run) -> float:
    """Bytes that a checkpointed block keeps: its input, a piece of the residual stream."""
    first = block.layers[0]
    return run.stream * rows * first.rows * chunk(first.in_features, grid.x if first.transposed else grid.y)


def products_kept(layer: Layer, grid: Grid, rows: int, run: Run) -> float:
    """Bytes that a block with selective recomputation keeps of one layer: the result of a product or of attention."""
    my_rows = rows * layer.rows * layer.experts
    if layer.kind == "linear":
        return run.itemsize * my_rows * chunk(layer.out_features, grid.y if layer.transposed else grid.x)
    if layer.kind == "attention":
        return my_rows * (run.itemsize * chunk(layer.in_features, grid.x) + FP32 * chunk(layer.heads, grid.x))
    return 0.0


def gradients_through(layer: Layer, grid: Grid, rows: int, run: Run) -> float:
    """Bytes of the gradients of one layer's input and output while its backward runs."""
    if layer.kind == "norm" and layer.over == "y":  # its own and the residual's; temporaries, but in torch's kernel
        temporaries = 0 if layer.norm == "layernorm" and grid.y == 1 else 3 * FP32
        return (2 * run.stream + temporaries) * rows * layer.rows * chunk(layer.in_features, grid.y)
    if layer.kind != "linear":
        return 0.0
    inside, outside = (grid.x, grid.y) if layer.transposed else (grid.y, grid.x)
    width = chunk(layer.in_features, inside) + chunk(layer.out_features, outside)
    return run.itemsize * rows * layer.rows * layer.experts * width


def saved(layer: Layer, grid: Grid, rows: int, run: Run) -> float:
    """Bytes that one layer keeps for its backward; ``rows`` of one rank."""
    my_rows = rows * layer.rows * layer.experts
    if layer.kind == "loss":  # the logits, ids, and two statistics a row
        return my_rows * (run.itemsize * chunk(layer.out_features, grid.x) + 8 + 2 * FP32)
    if layer.kind == "norm":
        statistics = FP32 * my_rows * (2 if layer.norm == "layernorm" else 1)
        width = 0 if layer.shares_input else chunk(layer.in_features, grid.size(layer.over or "x"))
        return statistics + (run.stream if layer.over == "y" else run.itemsize) * my_rows * width
    if layer.kind == "embedding":
        return 8.0 * my_rows
    if layer.kind == "linear":
        if layer.shares_input and run.stream == run.itemsize:
            return 0.0
        return run.itemsize * my_rows * chunk(layer.in_features, grid.x if layer.transposed else grid.y)
    if layer.kind == "attention":  # q, k and the output; v where each head's is a copy of its group's
        tensors = 3 + (layer.kv_groups < layer.heads)
        return my_rows * (run.itemsize * tensors * chunk(layer.in_features, grid.x) + FP32 * chunk(layer.heads, grid.x))
    return run.itemsize * layer.kept * my_rows * chunk(layer.in_features, grid.x)
