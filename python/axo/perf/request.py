"""What is to be planned: a model, a machine, a number of GPUs and a batch, and which ways to run it are tried.

It checks what it is given; ``axo.perf.planner`` plans it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from axo.arrangement import ARRANGEMENTS
from axo.grid import Grid
from axo.perf import pipeline_schedule as schedules
from axo.perf.layer_time import OVERLAPS, PRECISIONS, RunOptions
from axo.perf.machine import Machine
from axo.perf.workload import Workload

GATHERS = ("auto", "keep", "drop")
ALGORITHMS = ("axonn", "tesseract")
PLANNED = ("bf16-mixed", "bf16-true")
RECOMPUTATION = ("none", "selective", "full")
MOST_GPUS = 2**20


class MemoryOptions(NamedTuple):
    """How a grid is run: what a search tries beside micro-batches.

    ``recompute``: one of ``RECOMPUTATION``; ``offload``: the optimizer's state in the host's memory.
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


@dataclass(frozen=True)
class Request:
    """What is to be planned.

    Args:
        workload: The model.
        machine: Where it runs.
        gpus: Ranks.
        batch_tokens: Tokens of one step, all ranks together.
        tokens: Tokens of the whole training; 0: not asked.
        overlap: Which of oar, ors, oag are on.
        gather: "keep" gathered weights until backward, "drop" them, or "auto": keep as many as fit.
        zero: 1 cuts the optimizer's state over data, 2 the gradients too.
        precision: "bf16-mixed" or "bf16-true"; machine files know the rates of bf16 products.
        micro_batches: Pieces that a rank's rows are run in; 0: as few as fit.
        search: Look beside the grid for the best of recomputation (none, selective, full), ZeRO (0, 2), micro-batches,
            sequence parallelism and offload; else these are as said here, with the fewest micro-batches that fit.
        selective: Recomputation keeps the results of products and of attention.
        offload: The optimizer's state lies in the host's memory.
        sequence_parallel: The tokens of the residual stream are split over x.
        pipeline: Numbers of stages (ranks of a pipeline) that are tried; (1,): none.
        schedules: Of stages.
        algorithms: How products may be distributed: "axonn", "tesseract" (SUMMA is its grids of z = 1), which is not
            searched.
    """

    workload: Workload
    machine: Machine
    gpus: int
    batch_tokens: int
    tokens: float = 0.0
    overlap: frozenset[str] = frozenset(OVERLAPS)
    gather: str = "auto"
    zero: int = 0
    precision: str = "bf16-mixed"
    search: bool = False
    micro_batches: int = 0
    algorithms: tuple[str, ...] = ("axonn",)
    selective: bool = False
    pipeline: tuple[int, ...] = (1,)
    schedules: tuple[str, ...] = ("1f1b",)
    offload: bool = False
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        wrong = next((why for is_so, why in self._mistakes() if is_so), "")
        if wrong:
            raise ValueError(f"plan: {wrong}")
        for name in self.schedules:
            schedules.schedule_kind(name)

    def _mistakes(self) -> Iterator[tuple[bool, str]]:
        """What may be wrong: whether it is, and how that is said."""
        yield not _is_count(self.gpus, 1), f"gpus={self.gpus!r} is not a count; use a whole number of at least 1"
        yield self.gpus > MOST_GPUS, f"gpus={self.gpus} is more than any machine has; use at most {MOST_GPUS}"
        pieces = self.micro_batches
        yield not _is_count(pieces, 0), f"micro_batches={pieces!r} is not a count; use 0 for as few as fit"
        for name in ("search", "offload", "sequence_parallel"):
            value = getattr(self, name)
            yield not isinstance(value, bool), f"{name}={value!r} is not a switch; use True or False"
            both = name != "search" and value and "tesseract" in self.algorithms
            yield both, f"the planner knows no {name} with Tesseract; leave one of them out"
        yield (
            self.sequence_parallel and not self.workload.splits_tokens,
            (
                f"{self.workload.name} has experts or is no transformer: its tokens cannot be split over x; leave"
                " sequence_parallel out"
            ),
        )
        length = self.workload.seq_length
        yield self.batch_tokens < length, f"a batch of {self.batch_tokens} tokens is less than one sequence of {length}"
        for name, known, verb in (("gather", GATHERS, "known"), ("precision", PLANNED, "planned")):
            value = getattr(self, name)
            yield value not in known, f"{name}={value!r} is not {verb}; use one of {', '.join(known)}"
        yield self.zero not in (0, 1, 2), f"zero={self.zero!r} is not a stage; use 0, 1 or 2 (stage 3 is the axis z)"
        algorithms = self.algorithms
        yield (
            not algorithms or bool(set(algorithms) - set(ALGORITHMS)),
            (f"algorithms={algorithms!r} is not known; use some of {', '.join(ALGORITHMS)}"),
        )
        yield (
            not self.pipeline or not all(_is_count(count, 1) for count in self.pipeline),
            (f"pipeline={self.pipeline!r} are not counts of stages; use some of at least 1"),
        )
        yield (
            self.selective and not self.workload.checkpointed,
            ("selective says what recomputation keeps; leave blocks checkpointed"),
        )
        strange = ", ".join(sorted(self.overlap - set(OVERLAPS)))
        yield bool(strange), f"overlap {strange} is not known; use {', '.join(OVERLAPS)} or none"

    @property
    def sequences(self) -> int:
        """Sequences of one batch."""
        return max(1, round(self.batch_tokens / self.workload.seq_length))

    def model(self, recompute: bool) -> Workload:
        """The model with its blocks recomputed, or not."""
        return self.workload if self.workload.checkpointed == recompute else self.workload.otherwise

    def impossible(self, grid: Grid, algorithm: str = "axonn") -> str:
        """Say what stands against a grid; empty where nothing does."""
        workload = self.workload
        parts = ARRANGEMENTS[algorithm].row_parts(grid)
        if parts > self.sequences:
            rows = "z*data" if algorithm == "axonn" else "z*data*x"
            return f"{rows}={parts} is more than the {self.sequences} sequences of the batch"
        if self.sequence_parallel and workload.seq_length % grid.x:
            return f"x={grid.x} does not divide seq_length={workload.seq_length}, whose tokens it is to split"
        if algorithm == "tesseract":
            if self.zero:
                return "the planner knows no ZeRO with Tesseract"
            layers = (layer for block in workload.blocks for layer in block.layers)
            strange = next((layer.name for layer in layers if layer.experts == 1 and layer.rows != 1), "")
            if strange:
                return f"the planner knows no convolutions with Tesseract ({strange})"
        return workload.misfit(grid)

    def ways(self, grid: Grid, algorithm: str = "axonn") -> list[MemoryOptions]:
        """Return the ways to run a grid that are tried, those whose optimizer's step is slower last.

        Of ZeRO a search tries 0 and 2, which takes no longer than 1, and less memory; what the host updates is always
        cut. Tesseract is not searched.
        """
        recompute = "full" if self.workload.checkpointed else "none"
        if algorithm == "tesseract":
            return [MemoryOptions(recompute, 0, False, False)]
        if not self.search:
            recompute = "selective" if self.selective else recompute
            return [MemoryOptions(recompute, self.zero, self.offload, self.sequence_parallel)]
        splits = self.workload.splits_tokens and grid.x > 1 and self.workload.seq_length % grid.x == 0
        every = itertools.product(
            (True,) if self.offload else (False, True),
            (True,) if self.sequence_parallel else (False, True) if splits else (False,),
            RECOMPUTATION,
            (0,) if grid.data == 1 else (0, 2),
        )
        return [MemoryOptions(how, zero, offload, split) for offload, split, how, zero in every
                if zero or not offload or grid.data == 1]  # fmt: skip

    def run_options(self, way: MemoryOptions | None = None, **more: Any) -> RunOptions:
        """The options that hold for every grid, in one way to run it; ``more``: fields of ``RunOptions``."""
        if way is None:
            way = MemoryOptions("selective" if self.selective else "", self.zero, self.offload, self.sequence_parallel)
        sizes = PRECISIONS[self.precision]
        return RunOptions(
            self.batch_tokens, sizes["itemsize"], sizes["stream"], sizes["weights"], self.overlap, zero=way.zero,
            selective=way.recompute == "selective", offload=way.offload, sequence_parallel=way.sequence_parallel,
            **more,
        )  # fmt: skip


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
