"""What is to be planned: a model, a machine, a number of GPUs and a batch, and which ways to run it are tried.

It checks what it is given; ``axo.perf.planner`` plans it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from axo.arrangement import ARRANGEMENTS
from axo.grid import Grid
from axo.perf import pipeline_schedule as schedules
from axo.perf.layer_time import Costs
from axo.perf.machine import Machine
from axo.perf.run_options import OVERLAPS, PRECISIONS, RECOMPUTATION, RunOptions
from axo.perf.workload import Workload

GATHERS = ("auto", "keep", "drop")
ALGORITHMS = ("axonn", "tesseract")
PLANNED = ("bf16-mixed", "bf16-true")
MOST_GPUS = 2**20


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
        search: Look beside the grid for the best of recomputation (none, selective, full), ZeRO (0, 2), micro-batches,
            sequence parallelism and offload; else these are as said here, with the fewest micro-batches that fit.
        micro_batches: Pieces that a rank's rows are run in; 0: as few as fit.
        algorithms: How products may be distributed: "axonn", "tesseract" (SUMMA is its grids of z = 1), which is not
            searched.
        recompute: "full", "selective" (it keeps the results of products and of attention) or "none".
        pipeline: Numbers of stages (ranks of a pipeline) that are tried; (1,): none.
        schedules: Of stages.
        offload: The optimizer's state lies in the host's memory.
        sequence_parallel: The tokens of the residual stream are split over x.
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
    recompute: str = "full"
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

    def _mistakes(self) -> list[tuple[bool, str]]:
        """What may be wrong: whether it is, and how that is said."""
        model, length, strange = self.workload, self.workload.seq_length, sorted(self.overlap - set(OVERLAPS))
        switches = {name: getattr(self, name) for name in ("search", "offload", "sequence_parallel")}
        square = "tesseract" in self.algorithms
        words = (("gather", GATHERS, "known"), ("precision", PLANNED, "planned"), ("recompute", RECOMPUTATION, "known"))
        named = [
            (
                getattr(self, name) not in known,
                f"{name}={getattr(self, name)!r} is not {verb}; use one of {', '.join(known)}",
            )
            for name, known, verb in words
        ]
        return [
            (not _is_count(self.gpus, 1), f"gpus={self.gpus!r} is not a count; use a whole number of at least 1"),
            (
                _is_count(self.gpus, 1) and self.gpus > MOST_GPUS,
                f"gpus={self.gpus} is more than any machine has; use at most {MOST_GPUS}",
            ),
            (
                not _is_count(self.micro_batches, 0),
                f"micro_batches={self.micro_batches!r} is not a count; use 0 for as few as fit",
            ),
            *(
                (not isinstance(value, bool), f"{name}={value!r} is not a switch; use True or False")
                for name, value in switches.items()
            ),
            *(
                (square and switches[name], f"the planner knows no {name} with Tesseract; leave one of them out")
                for name in ("offload", "sequence_parallel")
            ),
            (
                self.sequence_parallel and not model.splits_tokens,
                f"{model.name} has experts or is no transformer: its tokens cannot be split over x; leave"
                " sequence_parallel out",
            ),
            (
                self.batch_tokens < length,
                f"a batch of {self.batch_tokens} tokens is less than one sequence of {length}",
            ),
            *named,
            (self.zero not in (0, 1, 2), f"zero={self.zero!r} is not a stage; use 0, 1 or 2 (stage 3 is the axis z)"),
            (
                not self.algorithms or bool(set(self.algorithms) - set(ALGORITHMS)),
                f"algorithms={self.algorithms!r} is not known; use some of {', '.join(ALGORITHMS)}",
            ),
            (
                not self.pipeline or not all(_is_count(count, 1) for count in self.pipeline),
                f"pipeline={self.pipeline!r} are not counts of stages; use some of at least 1",
            ),
            (bool(strange), f"overlap {', '.join(strange)} is not known; use {', '.join(OVERLAPS)} or none"),
        ]

    @property
    def sequences(self) -> int:
        """Sequences of one batch."""
        return max(1, round(self.batch_tokens / self.workload.seq_length))

    def costs(self) -> Costs:
        """What plans of this request share, still empty."""
        return Costs(self.machine, self.workload.seq_length)

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
            strange = next((layer.name for _, layer in workload.layers if layer.experts == 1 and layer.rows != 1), "")
            if strange:
                return f"the planner knows no convolutions with Tesseract ({strange})"
        return workload.misfit(grid)

    def ways(self, grid: Grid, algorithm: str = "axonn") -> list[RunOptions]:
        """Return the ways to run a grid that are tried, those whose optimizer's step is slower last.

        Of ZeRO a search tries 0 and 2, which takes no longer than 1, and less memory; what the host updates is always
        cut. Tesseract is not searched.
        """
        if algorithm == "tesseract":
            full = "none" if self.recompute == "none" else "full"
            return [self.run_options(algorithm=algorithm, recompute=full, zero=0)]
        if not self.search:
            return [self.run_options()]
        splits = self.workload.splits_tokens and grid.x > 1 and self.workload.seq_length % grid.x == 0
        every = itertools.product(
            (True,) if self.offload else (False, True),
            (True,) if self.sequence_parallel else (False, True) if splits else (False,),
            RECOMPUTATION,
            (0,) if grid.data == 1 else (0, 2),
        )
        return [self.run_options(recompute=how, zero=zero, offload=offload, sequence_parallel=split)
                for offload, split, how, zero in every if zero or not offload or grid.data == 1]  # fmt: skip

    def run_options(self, **changes: Any) -> RunOptions:
        """The options as they are asked for; ``changes``: fields of ``RunOptions``.

        A model without a stack of blocks has nothing to recompute.
        """
        same = {name: getattr(self, name) for name in ("overlap", "zero", "recompute", "offload", "sequence_parallel")}
        given: dict[str, Any] = same | PRECISIONS[self.precision] | changes
        if not self.workload.stacked:
            given["recompute"] = "none"
        return RunOptions(self.batch_tokens, **given)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
