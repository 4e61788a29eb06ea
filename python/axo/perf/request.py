"""What is to be planned: a model, a machine, a number of GPUs and a batch, and which ways to run it are tried.

It checks what it is given; ``axo.perf.planner`` plans it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from axo.arrangement import ARRANGEMENTS
from axo.grid import Grid
from axo.perf import pipeline_schedule as schedules
from axo.perf.layer_time import Costs
from axo.perf.layers import AttentionKind
from axo.perf.machine import Machine
from axo.perf.run_options import OPTIMIZERS, OVERLAPS, PRECISIONS, RECOMPUTATION, RunOptions
from axo.perf.workload import Workload

ALGORITHMS = ("axonn", "tesseract")
MOST_GPUS = 2**20
MORE_CONTEXTS = 2
_WORDS = {
    "gather": (("auto", "keep", "drop"), "known"),
    "precision": (("bf16-mixed", "bf16-true"), "planned"),
    "recompute": (RECOMPUTATION, "known"),
    "optimizer": (OPTIMIZERS, "planned"),
}
_SWITCHES = ("search", "offload", "sequence_parallel", "chunked_loss")
_OF_RUN = (
    "overlap",
    "zero",
    "recompute",
    "offload",
    "sequence_parallel",
    "optimizer",
    "chunked_loss",
)  # fields that are those of RunOptions


@dataclass(frozen=True)
class Request:
    """What is to be planned.

    Args:
        workload: The model.
        machine: Where it runs.
        gpus: Ranks.
        batch_tokens: Tokens of one step, all ranks together.
        tokens: Tokens of the whole training; 0: not asked.
        gather: "keep" gathered weights until backward, "drop" them, or "auto": keep as many as fit.
        precision: "bf16-mixed" or "bf16-true"; machine files know the rates of bf16 products.
        search: Look beside the grid for the best of recomputation (none, selective, full), ZeRO (0, 2), micro-batches,
            sequence parallelism and offload; else these are as said here, with the fewest micro-batches that fit.
        micro_batches: Pieces that a rank's rows are run in; 0: as few as fit.
        algorithms: How products may be distributed: "axonn", "tesseract" (SUMMA is its grids of z = 1), which is not
            searched.
        pipeline: Numbers of stages (ranks of a pipeline) that are tried; (1,): none.
        schedules: Of stages.
        context: Neighbours along z that hold pieces of the same sequences; 0: as few as the batch needs on each grid.
        experts: Neighbours along z over which experts are spread; 0: on each grid as many as are fastest.
        overlap, zero, recompute, offload, sequence_parallel, optimizer, chunked_loss: See ``RunOptions``.
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
    optimizer: str = "adamw"
    chunked_loss: bool = False
    context: int = 1
    experts: int = 1

    def __post_init__(self) -> None:
        for wrong in self._mistakes():
            raise ValueError(f"plan: {wrong}")
        for name in self.schedules:
            schedules.schedule_kind(name)

    def _mistakes(self) -> Iterator[str]:
        model, length, strange = self.workload, self.workload.seq_length, sorted(self.overlap - set(OVERLAPS))
        if not _is_count(self.gpus, 1):
            yield f"gpus={self.gpus!r} is not a count; use a whole number of at least 1"
        if self.gpus > MOST_GPUS:
            yield f"gpus={self.gpus} is more than any machine has; use at most {MOST_GPUS}"
        if not _is_count(self.micro_batches, 0):
            yield f"micro_batches={self.micro_batches!r} is not a count; use 0 for as few as fit"
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                yield f"{name}={getattr(self, name)!r} is not a switch; use True or False"
            if name != "search" and getattr(self, name) and "tesseract" in self.algorithms:
                yield f"the planner knows no {name} with Tesseract; leave one of them out"
        if self.sequence_parallel and not model.splits_tokens:
            yield (
                f"{model.name} has experts or is no transformer: its tokens cannot be split over x; leave"
                " sequence_parallel out"
            )
        if self.sequence_parallel and self.chunked_loss:
            yield "a head whose loss comes in chunks takes no split tokens; leave sequence_parallel or chunked_loss out"
        if not _is_count(self.context, 0):
            yield f"context={self.context!r} is not a count of ranks; use 0 for as few as the batch needs"
        if self.context != 1 and (self.sequence_parallel or "tesseract" in self.algorithms):
            yield "sequences over ranks go with axonn and whole tokens alone; leave context or the other out"
        cut = any(layer.experts == 1 and layer.rows != 1 for _, layer in model.layers)
        if self.context != 1 and (cut or not model.stacked):
            yield f"{model.name} is no transformer: ranks cannot share its samples; leave context out"
        if self.context != 1 and any(isinstance(layer, AttentionKind) and layer.scores for _, layer in model.layers):
            yield f"{model.name} caps the scores of attention, which the planner does not know over several ranks"
        if not _is_count(self.experts, 0):
            yield f"experts={self.experts!r} is not a count of ranks; use 0 for as many as are fastest"
        elif self.experts != 1 and (not model.experts or (self.experts and model.experts % self.experts)):
            yield f"experts={self.experts} ranks do not divide the {model.experts} experts of {model.name}"
        if self.experts > 1 and (
            self.context != 1 or self.pipeline != (1,) or self.offload or {"tesseract"} & {*self.algorithms}
        ):
            yield f"experts={self.experts} goes with axonn alone, whole sequences, and no stages and no offload"
        if self.experts != 1 and self.optimizer == "muon":
            yield f"experts={self.experts} does not go with Muon; use adamw"
        if self.batch_tokens < length:
            yield f"a batch of {self.batch_tokens} tokens is less than one sequence of {length}"
        for name, (known, verb) in _WORDS.items():
            if getattr(self, name) not in known:
                yield f"{name}={getattr(self, name)!r} is not {verb}; use one of {', '.join(known)}"
        if self.optimizer == "muon" and (self.offload or "tesseract" in self.algorithms):
            yield f"the planner knows no Muon with {'offload' if self.offload else 'Tesseract'}; leave one of them out"
        if self.zero not in (0, 1, 2):
            yield f"zero={self.zero!r} is not a stage; use 0, 1 or 2 (stage 3 is the axis z)"
        if not self.algorithms or set(self.algorithms) - set(ALGORITHMS):
            yield f"algorithms={self.algorithms!r} is not known; use some of {', '.join(ALGORITHMS)}"
        if not self.pipeline or not all(_is_count(count, 1) for count in self.pipeline):
            yield f"pipeline={self.pipeline!r} are not counts of stages; use some of at least 1"
        if strange:
            yield f"overlap {', '.join(strange)} is not known; use {', '.join(OVERLAPS)} or none"

    @property
    def sequences(self) -> int:
        """Sequences of one batch."""
        return max(1, round(self.batch_tokens / self.workload.seq_length))

    def costs(self) -> Costs:
        """What plans of this request share, still empty."""
        return Costs(self.machine, self.workload.seq_length)

    def impossible(self, grid: Grid, algorithm: str = "axonn") -> str:
        """Say what stands against a grid; empty where nothing does."""
        workload, context = self.workload, self.context_of(grid)
        if not context:
            return f"context={self.context} does not divide z={grid.z}"
        if self.experts > 1 and grid.z % self.experts:
            return f"experts={self.experts} does not divide z={grid.z}"
        parts = ARRANGEMENTS[algorithm].row_parts(grid) // context
        if parts > self.sequences:
            rows = "z*data*x" if algorithm != "axonn" else "z*data" + "/context" * (context > 1)
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

    def contexts(self, grid: Grid) -> list[int]:
        """Numbers of neighbours along z that may share sequences on ``grid``: what is asked for, where it divides z.

        Where nothing is: the fewest that leave each of their groups a sequence, and the next ``MORE_CONTEXTS``, which
        round less, and hold less; all of z, if not even those do.
        """
        if self.context:
            return [self.context] if grid.z % self.context == 0 else []
        fewest = -(-grid.z * grid.data // self.sequences)
        enough = [count for count in range(fewest, grid.z + 1) if grid.z % count == 0]
        return enough[: 1 + MORE_CONTEXTS] or [grid.z]

    def context_of(self, grid: Grid) -> int:
        """The fewest of them; 0: there are none."""
        return min(self.contexts(grid), default=0)

    def shared(self, grid: Grid, stages: int = 1) -> list[tuple[int, int]]:
        """Numbers of neighbours along z that may share sequences, and experts, on ``grid``: each pair, one of it 1."""
        most = math.gcd(grid.z, self.workload.experts) if stages == 1 and not self.offload else 1
        spreads = [self.experts] if self.experts else [count for count in range(1, most + 1) if most % count == 0]
        return [pair for pair in itertools.product(self.contexts(grid), spreads) if 1 in pair]

    def ways(self, grid: Grid, algorithm: str = "axonn") -> list[RunOptions]:
        """Return the ways to run a grid that are tried, those whose optimizer's step is slower last.

        Of ZeRO a search tries 0 and 2, which takes no longer than 1, and less memory; what the host updates is always
        cut. Tesseract is not searched.
        """
        if algorithm == "tesseract":
            full = "none" if self.recompute == "none" else "full"
            return [self.run_options(algorithm=algorithm, recompute=full, zero=0)]
        context = self.context_of(grid)
        if not self.search:
            return [self.run_options(context=context)]
        splits = context == 1 and self.workload.splits_tokens and grid.x > 1 and self.workload.seq_length % grid.x == 0
        every = itertools.product(
            (True,) if self.offload else (False, True) if self.optimizer == "adamw" and self.experts == 1 else (False,),
            (True,) if self.sequence_parallel else (False, True) if splits else (False,),
            RECOMPUTATION,
            (0,) if grid.data == 1 else (0, 2),
        )
        return [self.run_options(recompute=how, zero=zero, offload=offload, sequence_parallel=split, context=context)
                for offload, split, how, zero in every if zero or not offload or grid.data == 1]  # fmt: skip

    def run_options(self, **changes: Any) -> RunOptions:
        """The options as they are asked for; ``changes``: fields of ``RunOptions``.

        A model without a stack of blocks has nothing to recompute.
        """
        given: dict[str, Any] = {name: getattr(self, name) for name in _OF_RUN} | PRECISIONS[self.precision] | changes
        given["chunked_loss"] &= not given["sequence_parallel"]  # whose tokens it does not take
        return RunOptions(self.batch_tokens, **given | ({} if self.workload.stacked else {"recompute": "none"}))


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
