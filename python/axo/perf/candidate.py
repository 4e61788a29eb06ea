"""One row of a plan (a grid and how it is run), the ways that a search tries, and why a grid is left out."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

from axo.grid import Grid
from axo.perf import memory, model
from axo.perf.layer_time import PRECISIONS, RunOptions
from axo.perf.request import Request
from axo.perf.stages import Stages
from axo.perf.workload import Workload

CACHE_LIMIT = 0.9  # of a GPU's memory may be filled with weights kept for their second use


@dataclass(frozen=True)
class Candidate:
    """One grid: its prediction, or the reason why it is left out. ``recompute``: blocks run again in backward."""

    grid: Grid
    run: RunOptions
    recompute: bool
    time: model.StepTime | None = None
    memory: memory.Memory | None = None
    reason: str = ""
    algorithm: str = "axonn"
    stages: Stages | None = None

    @property
    def name(self) -> str:
        """The grid, with its stages where there are several, and the algorithm where that is not axonn."""
        if self.stages is not None:
            return f"{self.grid} x {self.stages.ranks} stages, {self.stages.schedule}"
        return str(self.grid) if self.algorithm == "axonn" else f"{self.grid} {self.algorithm}"

    @property
    def pipeline(self) -> int:
        """How many stages it has."""
        return 1 if self.stages is None else self.stages.ranks

    @property
    def way(self) -> MemoryOptions:
        """How it is run."""
        run = self.run
        return MemoryOptions(self.recomputes, run.zero, run.offload, run.sequence_parallel)

    @property
    def recomputes(self) -> str:
        """``"none"``, ``"selective"`` or ``"full"``."""
        return ("selective" if self.run.selective else "full") if self.recompute else "none"

    @property
    def seconds(self) -> float:
        """Predicted time of a step; of a candidate that fits."""
        assert self.time is not None
        return self.time.total


class MemoryOptions(NamedTuple):
    """How a grid is run: what a search tries beside micro-batches.

    ``recompute``: ``"none"``, ``"selective"`` or ``"full"``; ``offload``: the optimizer's state in the host's memory.
    """

    recompute: str
    zero: int
    offload: bool
    sequence_parallel: bool

    @property
    def text(self) -> str:
        """It in words: ``full recomputation, ZeRO-2``."""
        said = [] if self.recompute == "none" else [f"{self.recompute} recomputation"]
        said += [f"ZeRO-{self.zero}"] if self.zero else []
        said += ["optimizer offloaded"] if self.offload else []
        said += ["tokens over x"] if self.sequence_parallel else []
        return ", ".join(said) or "no recomputation"


def ways(request: Request, grid: Grid) -> list[MemoryOptions]:
    """Return the ways to run a grid that are tried, those whose optimizer's step is slower last.

    Of ZeRO a search tries 0 and 2, which takes no longer than 1, and less memory; what the host updates is always cut.
    """
    if not request.search:
        recompute = "selective" if request.selective else "full" if request.workload.checkpointed else "none"
        return [MemoryOptions(recompute, request.zero, request.offload, request.sequence_parallel)]
    splits = request.workload.splits_tokens and grid.x > 1 and request.workload.seq_length % grid.x == 0
    every = itertools.product(
        (True,) if request.offload else (False, True),
        (True,) if request.sequence_parallel else (False, True) if splits else (False,),
        ("none", "selective", "full"),
        (0,) if grid.data == 1 else (0, 2),
    )
    return [MemoryOptions(how, zero, offload, split) for offload, split, how, zero in every
            if zero or not offload or grid.data == 1]  # fmt: skip


def run_options(request: Request, way: MemoryOptions | None = None, **more: Any) -> RunOptions:
    """The options of a request that hold for every grid, in one way to run it; ``more``: fields of ``RunOptions``."""
    sizes = PRECISIONS[request.precision]
    if way is None:
        way = MemoryOptions(
            "selective" if request.selective else "", request.zero, request.offload, request.sequence_parallel
        )
    return RunOptions(
        request.batch_tokens, sizes["itemsize"], sizes["stream"], sizes["weights"], request.overlap, zero=way.zero,
        selective=way.recompute == "selective", offload=way.offload, sequence_parallel=way.sequence_parallel, **more,
    )  # fmt: skip


def variant(workload: Workload, recompute: bool) -> Workload:
    """The model with its blocks recomputed, or not."""
    return workload if workload.checkpointed == recompute else workload.otherwise


def impossible(request: Request, grid: Grid) -> str:
    """Say what stands against a grid; empty where nothing does."""
    if grid.z * grid.data > request.sequences:
        return f"z*data={grid.z * grid.data} is more than the {request.sequences} sequences of the batch"
    if request.sequence_parallel and request.workload.seq_length % grid.x:
        return f"x={grid.x} does not divide seq_length={request.workload.seq_length}, whose tokens it is to split"
    return request.workload.misfit(grid)


def needs(request: Request, total: float) -> str:
    """The reason of a grid that needs too much."""
    return f"needs {total / memory.GIB:.1f} of {request.machine.memory_gib:g} GiB a GPU"


def share_that_fits(request: Request, full: memory.Memory, held: memory.Memory) -> float:
    """Which share of gathered weights can be kept, in hundredths, when all need ``full`` and none ``held``."""
    extra, free = full.total - held.total, CACHE_LIMIT * request.machine.memory_gib * memory.GIB - held.total
    return 1.0 if extra <= max(0.0, free) else max(0, int(100 * free / extra)) / 100
