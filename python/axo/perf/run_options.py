"""How a step is run: what its memory and its time depend on beside the model, the grid and the machine."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from axo.grid import Grid

OVERLAPS = ("oar", "ors", "oag")
OPTIMIZERS = ("adamw", "muon")
RECOMPUTATION = ("none", "selective", "full")
PRECISIONS = {  # bytes of RunOptions.itemsize, stream and weights
    "bf16-mixed": {"itemsize": 2, "stream": 4, "weights": 4},
    "bf16-true": {"itemsize": 2, "stream": 2, "weights": 2},
    "32-true": {"itemsize": 4, "stream": 4, "weights": 4},
}

# What may be decided about a step, and what a plan with each value is called beside one with another.
CHOICES: dict[str, dict[object, str]] = {
    "algorithm": {"axonn": "axonn", "tesseract": "tesseract"},
    "recompute": {how: f"{how.replace('none', 'no')} recomputation" for how in RECOMPUTATION},
    "zero": {0: "no ZeRO", 2: "ZeRO-2"},
    "offload": {False: "optimizer on the GPU", True: "optimizer in the host's memory"},
    "sequence_parallel": {False: "no sequence parallelism", True: "sequence parallelism"},
}


class RunOptions(NamedTuple):
    """How a step is run.

    Args:
        batch_tokens: Tokens of one step, all ranks together.
        itemsize: Bytes an element of the dtype that products compute in (bf16: 2); master weights are fp32.
        stream: Bytes an element of the residual stream: fp32 under autocast, whatever products compute in.
        weights: Bytes an element of weights, their gradients and the optimizer's moments.
        overlap: Which of oar, ors and oag hide communication.
        cached_gathers: Share of the gathered weights that are kept for their second use (1: N gathers a step, 0: 2N):
            in the recomputation of a block, else in backward.
        micro_batches: Pieces that the batch of a rank is run in, one after another (gradient accumulation).
        rows: Rows of one data-parallel group and micro-batch, where whole sequences make them more than the even share.
        bucket_bytes: Gradients are reduced over data in buckets of this size.
        zero: 1 cuts the optimizer's state over data, 2 the gradients too.
        recompute: What blocks of a stack run again before backward: "full": all; "selective": what lies between their
            products and attention, whose results they keep, and all their collectives; "none".
        offload: The optimizer's state lies in the host's memory, and its step runs there (``axo.Offload``).
        sequence_parallel: The tokens of the residual stream are split over x: the same bytes, but what is on the stream
            (``Layer.on_stream``) has 1/x of the rows, and no product hides the sums of dI.
        algorithm: How products are distributed: "axonn" or "tesseract".
        optimizer: "adamw" or "muon" (``axo.optim.Muon``: one moment of matrices of hidden layers, which it
            orthogonalizes).
        chunked_loss: Logits never exist whole (``axo.nn.linear_cross_entropy``): the forward of head and loss makes
            them in chunks of rows, and all gradients of the head with them.
        context: Neighbours along z that hold pieces of the same sequences, whose keys and values go
            round among them ("ring").
        experts: Neighbours along z over which experts are spread (``Workload.spread``).
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
    recompute: str = "full"
    offload: bool = False
    sequence_parallel: bool = False
    algorithm: str = "axonn"
    optimizer: str = "adamw"
    chunked_loss: bool = False
    context: int = 1
    experts: int = 1

    @property
    def of_layer(self) -> tuple[object, ...]:
        """What the collectives and the bytes of a layer depend on, beside rows, overlaps and dtypes."""
        return self.sequence_parallel, self.algorithm, self.chunked_loss, self.context

    @property
    def of_block(self) -> tuple[object, ...]:
        """The same of a block."""
        return *self.of_layer, self.recompute, self.cached_gathers

    @property
    def selective(self) -> bool:
        """True when recomputed blocks keep the results of products and of attention."""
        return self.recompute == "selective"

    @property
    def text(self) -> str:
        """What saves memory in words: ``full recomputation, ZeRO-2``."""
        words = [] if self.recompute == "none" else [f"{self.recompute} recomputation"]
        words += [f"ZeRO-{self.zero}"] if self.zero else []
        words += ["optimizer offloaded"] * self.offload + ["tokens over x"] * self.sequence_parallel
        words += ["Muon"] * (self.optimizer == "muon") + ["loss in chunks"] * self.chunked_loss
        words += [f"sequences over {self.context}"] * (self.context > 1)
        words += [f"experts over {self.experts}"] * (self.experts > 1)
        return ", ".join(words) or "no recomputation"

    def token_ranks(self, grid: Grid) -> int:
        """Ranks that the tokens of the residual stream are split over."""
        return grid.x if self.sequence_parallel else 1

    def context_grid(self, grid: Grid) -> Grid:
        """The grid whose z are the ranks that share sequences."""
        return replace(grid, z=self.context, data=grid.data * grid.z // self.context)

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
