"""What is to be planned: a model, a machine, a number of GPUs and a batch, and which ways to run it are tried.

It checks what it is given; ``axo.perf.planner`` plans it.
"""

from __future__ import annotations

from dataclasses import dataclass

from axo.perf import pipeline_schedule as schedules
from axo.perf.layer_time import OVERLAPS
from axo.perf.machine import Machine
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
        if isinstance(self.gpus, bool) or not isinstance(self.gpus, int) or self.gpus < 1:
            raise ValueError(f"plan: gpus={self.gpus!r} is not a count; use a whole number of at least 1")
        if self.gpus > MOST_GPUS:
            raise ValueError(f"plan: gpus={self.gpus} is more than any machine has; use at most {MOST_GPUS}")
        if isinstance(self.micro_batches, bool) or not isinstance(self.micro_batches, int) or self.micro_batches < 0:
            raise ValueError(f"plan: micro_batches={self.micro_batches!r} is not a count; use 0 for as few as fit")
        for name in ("search", "offload", "sequence_parallel"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"plan: {name}={getattr(self, name)!r} is not a switch; use True or False")
            if name != "search" and getattr(self, name) and "tesseract" in self.algorithms:
                raise ValueError(f"plan: the planner knows no {name} with Tesseract; leave one of them out")
        if self.sequence_parallel and not self.workload.splits_tokens:
            raise ValueError(
                f"plan: {self.workload.name} has experts or is no transformer: its tokens cannot be split over x; leave"
                " sequence_parallel out"
            )
        if self.batch_tokens < self.workload.seq_length:
            raise ValueError(
                f"plan: a batch of {self.batch_tokens} tokens is less than one sequence of {self.workload.seq_length}"
            )
        if self.gather not in GATHERS:
            raise ValueError(f"plan: gather={self.gather!r} is not known; use one of {', '.join(GATHERS)}")
        if self.precision not in PLANNED:
            raise ValueError(f"plan: precision={self.precision!r} is not planned; use one of {', '.join(PLANNED)}")
        if self.zero not in (0, 1, 2):
            raise ValueError(f"plan: zero={self.zero!r} is not a stage; use 0, 1 or 2 (stage 3 is the axis z)")
        if not self.algorithms or set(self.algorithms) - set(ALGORITHMS):
            raise ValueError(f"plan: algorithms={self.algorithms!r} is not known; use some of {', '.join(ALGORITHMS)}")
        if not self.pipeline or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in self.pipeline):
            raise ValueError(f"plan: pipeline={self.pipeline!r} are not counts of stages; use some of at least 1")
        for name in self.schedules:
            schedules.schedule_kind(name)
        if self.selective and not self.workload.checkpointed:
            raise ValueError("plan: selective says what recomputation keeps; leave blocks checkpointed")
        unknown = self.overlap - set(OVERLAPS)
        if unknown:
            raise ValueError(
                f"plan: overlap {', '.join(sorted(unknown))} is not known; use {', '.join(OVERLAPS)} or none"
            )

    @property
    def sequences(self) -> int:
        """Sequences of one batch."""
        return max(1, round(self.batch_tokens / self.workload.seq_length))
