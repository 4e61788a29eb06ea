"""What a rank holds at the fullest moment of a step, in bytes.

With P parameters, g = Gx Gy Gz, r = tokens of one rank and micro-batch, h the hidden size:

    weights    4 P / g      fp32 masters          gradients  4 P / g        optimizer  8 P / g (AdamW's moments)
               with ZeRO-1 the optimizer's, with ZeRO-2 the gradients' too, are cut over data
    gathered   2 P' / (Gx Gy)   bf16 blocks: all of the model when kept from forward to backward, else two layers
    kept       2 r h / Gy a checkpointed block (its input), or every saved tensor of every layer without checkpointing
    working    the saved tensors of one block, and the fp32 logits and their gradient, r V / Gx each

Saved tensors are counted from the layers: each linear layer saves its input, pointwise, norm and attention layers
theirs. The allocator's waste is a flat share (`SLACK`), the communication library's and the context's buffers a flat 2
GiB. It does not know which framework runs: a share of 10% either way is to be expected.
"""

from __future__ import annotations

from dataclasses import dataclass

from axo.grid import Grid
from axo.matmul.cost import chunk
from axo.perf.layer_time import Run
from axo.perf.machine import Machine
from axo.perf.workload import Block, Layer, Workload

GIB = 2.0**30
SLACK = 0.05
RESERVED = 2 * GIB


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, by what they are for."""

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    kept: float
    working: float

    @property
    def total(self) -> float:
        """Bytes at the fullest moment, with the allocator's waste and the reserve of the libraries."""
        parts = self.weights + self.gradients + self.optimizer + self.gathered + self.kept + self.working
        return parts * (1 + SLACK) + RESERVED

    def fits(self, machine: Machine) -> bool:
        """True when it fits into one GPU."""
        return self.total <= machine.memory_gib * GIB


def estimate(workload: Workload, grid: Grid, run: Run) -> Memory:
    """Return the memory of one rank; shards and rows that do not divide are rounded up."""
    rows = chunk(run.group_rows(grid), grid.z)
    block_share = grid.x * grid.y
    parameters = workload.parameters + workload.copied(grid)
    shard = parameters / (block_share * grid.z)
    kept = working = largest = 0.0
    for block in workload.blocks:
        all_saved = sum(saved(layer, grid, rows) for layer in block.layers)
        if block.checkpointed:
            kept += block.repeat * block_input(block, grid, rows)
            working = max(working, all_saved)
        else:
            kept += block.repeat * all_saved
        largest = max(largest, *(float(layer.parameters) for layer in block.layers))
    if grid.z == 1:
        gathered = 2.0 * shard  # the bf16 copy that the products read
    elif run.cached_gathers:
        gathered = 2.0 * run.cached_gathers * parameters / block_share
    else:
        gathered = 2.0 * 2.0 * largest / block_share
    optimizer = 8.0 * shard * run.optimizer_share(grid)
    gradients = 4.0 * shard * (run.optimizer_share(grid) if run.zero == 2 else 1.0)
    return Memory(4.0 * shard, gradients, optimizer, gathered, kept, working)


def block_input(block: Block, grid: Grid, rows: int) -> float:
    """Bytes that a checkpointed block keeps: its input, in bf16."""
    first = block.layers[0]
    return 2.0 * rows * first.rows * chunk(first.in_features, grid.x if first.transposed else grid.y)


def saved(layer: Layer, grid: Grid, rows: int) -> float:
    """Bytes that one layer keeps for its backward."""
    my_rows = rows * layer.rows * layer.experts
    if layer.kind == "loss":
        return 2 * 4.0 * my_rows * chunk(layer.out_features, grid.x)
    if layer.kind == "norm":
        return 2.0 * my_rows * chunk(layer.in_features, grid.size(layer.over or "x"))
    if layer.kind == "embedding":
        return 8.0 * my_rows
    inside = grid.x if layer.kind == "linear" and layer.transposed else grid.y
    if layer.kind in ("attention", "pointwise"):
        if layer.transposed:  # a residual sum saves nothing
            return 0.0
        inside = grid.x
    copies = 4.0 if layer.kind == "attention" else 1.0  # q, k, v and the output
    return 2.0 * copies * my_rows * chunk(layer.in_features, inside)
