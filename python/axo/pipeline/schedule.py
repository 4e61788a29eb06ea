"""Schedules by name, as ``torch.distributed.pipelining`` has them, and the stages that ``split`` has made for them.

    modules = axo.pipeline.split(model, comms, **axo.pipeline.layout("zbv"))
    stages = axo.pipeline.stages(modules, comms, rows=2, tokens=128)
    schedule = axo.pipeline.schedule("zbv", stages, microbatches=8, loss=loss)
    losses = []
    schedule.step(ids, target=targets, losses=losses)           # every rank passes its rows; .grad is complete

    name                stages a rank   backward
    gpipe               1               all forward passes, then all backward passes    Huang et al. 2019
    1f1b                1               one forward, one backward                       Narayanan et al. 2019
    looped-bfs          2               breadth first                                   Lamy-Poirier 2022
    interleaved-1f1b    2               depth first                                     Narayanan et al. 2021
    zero-bubble         2               in two phases                                   Qi et al. 2023
    zbv                 2, in a V       in two phases                                   Qi et al. 2023
    dualpipev           2, in a V       in two phases                                   DeepSeek-AI 2024, Sea AI Lab

Not here: how the actions of a schedule are ordered (torch's).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from axo.comm.connect import Communicators
from axo.pipeline.cut import LOOP, V, part_of, tied_gradients
from axo.pipeline.stage import Stage

Loss = Callable[[Any, torch.Tensor], torch.Tensor]
Schedule = PipelineScheduleSingle | PipelineScheduleMulti


class _Known(NamedTuple):
    kind: Any
    stages_per_rank: int = 1
    order: str = LOOP
    splits: bool = False


_KNOWN = {
    "gpipe": _Known(pipelining.ScheduleGPipe),
    "1f1b": _Known(pipelining.Schedule1F1B),
    "looped-bfs": _Known(pipelining.ScheduleLoopedBFS, 2),
    "interleaved-1f1b": _Known(pipelining.ScheduleInterleaved1F1B, 2),
    "zero-bubble": _Known(pipelining.ScheduleInterleavedZeroBubble, 2, LOOP, True),
    "zbv": _Known(pipelining.ScheduleZBVZeroBubble, 2, V, True),
    "dualpipev": _Known(pipelining.ScheduleDualPipeV, 2, V, True),
}
SCHEDULES = tuple(_KNOWN)


def _known(name: str) -> _Known:
    if name not in _KNOWN:
        raise ValueError(f"pipeline: schedule={name!r} is not known; use one of {', '.join(SCHEDULES)}")
    return _KNOWN[name]


def layout(name: str) -> dict[str, Any]:
    """What a schedule asks of ``split``: ``stages_per_rank`` and ``order``.

    Raises:
        ValueError: The schedule is not known.
    """
    known = _known(name)
    return {"stages_per_rank": known.stages_per_rank, "order": known.order}


def check_microbatches(name: str, microbatches: int, ranks: int) -> None:
    """Check how many micro-batches a schedule is given, for stages on ``ranks`` ranks of a pipeline.

    Raises:
        ValueError: Fewer than its stages; or none that torch's schedule can order.
    """
    known = _known(name)
    least = ranks * (2 if name == "dualpipev" else 1)
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < least:
        raise ValueError(
            f"pipeline: microbatches={microbatches!r} are fewer than the {least} stages that {name!r} must fill; use at"
            f" least {least}"
        )
    rounds = max(1, microbatches // ranks)
    if known.order == LOOP and known.stages_per_rank > 1 and name != "looped-bfs" and microbatches % rounds:
        raise ValueError(
            f"pipeline: {name!r} orders micro-batches in rounds of equal length, and microbatches={microbatches} do not"
            f" divide into {rounds}; use a multiple of {ranks}"
        )


def stages(
    modules: Sequence[nn.Module],
    comms: Communicators,
    *,
    rows: int,
    tokens: int,
    dtype: torch.dtype | None = None,
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[Stage]:
    """Make the stages of this rank from what ``split`` returned.

    Args:
        modules: Its modules.
        comms: As for ``split``.
        rows, tokens: Of one micro-batch on this rank, as the model takes them.
        dtype: Of the residual stream; default: that of the parameters.
        forward_context: Entered around each forward pass (autocast).

    Raises:
        ValueError: A module is not from ``split``, or the tokens do not divide over the ranks that split them.
    """
    made = []
    for module in modules:
        part = part_of(module)
        if part is None:
            raise ValueError("pipeline: stages takes what axo.pipeline.split returned; make others by Stage itself")
        if tokens % part.token_ranks:
            raise ValueError(f"pipeline: {tokens} tokens do not divide over x={part.token_ranks}")
        found = dtype or next(p.dtype for p in module.parameters() if p.is_floating_point())
        hidden = torch.empty((rows, tokens // part.token_ranks, part.features), dtype=found, device="meta")
        ids = torch.empty((rows, tokens), dtype=torch.int64, device="meta")
        first = part.index == 0
        made.append(
            Stage(
                module,
                comms,
                ids if first else hidden,
                hidden,
                index=part.index,
                num_stages=part.stages,
                forward_context=forward_context,
            )
        )
    return made


class _Step:
    """Mixed into torch's schedules: checks what comes in, and ends a step."""

    def step(self: Any, *args: Any, target: Any = None, **kwargs: Any) -> Any:
        """Run one step; see torch. Every rank may pass inputs and targets: only those of first and last stage count.

        Raises:
            ValueError: The rows are not those of all micro-batches.
        """
        for what, given in (("inputs", args[0] if args else None), ("targets", target)):
            if given is not None and given.shape[0] != self.axo_rows * self._n_microbatches:
                raise ValueError(
                    f"pipeline: {what} have {given.shape[0]} rows, and {self._n_microbatches} micro-batches of"
                    f" {self.axo_rows} rows were announced; pass {self.axo_rows * self._n_microbatches}"
                )
        kwargs.setdefault("return_outputs", False)
        if not self._has_backward:
            return super().step(*args, target=target, **kwargs)  # type: ignore[misc]
        with tied_gradients([stage.submod for stage in self.axo_stages]):
            return super().step(*args, target=target, **kwargs)  # type: ignore[misc]


def schedule(name: str, stages: Sequence[Stage], *, microbatches: int, loss: Loss, mean: bool = True) -> Schedule:
    """Make torch's schedule ``name`` over this rank's stages. Every rank makes its own.

    After each ``step`` gradients are complete, and added to what ``.grad`` held; nothing is divided there. So steps
    may be accumulated.

    Args:
        name: One of :data:`SCHEDULES`.
        stages: What :func:`stages` returned; of modules of your own, in the order of their indices.
        microbatches: Equal parts that a step's rows are cut into; at least as many as stages.
        loss: Of one micro-batch: (output of the last stage, its targets) -> a scalar.
        mean: The loss of a step is the mean of those of its micro-batches; else their sum. What ``losses`` gets are
            its summands.

    Raises:
        ValueError: The schedule is not known, or does not fit the stages or the number of micro-batches.
    """
    known = _known(name)
    comms = stages[0].comms
    if len(stages) != known.stages_per_rank and (known.stages_per_rank == 1 or known.order == V):
        raise ValueError(
            f"pipeline: {name!r} wants {known.stages_per_rank} stages a rank, got {len(stages)}; give split"
            f" **axo.pipeline.layout({name!r})"
        )
    check_microbatches(name, microbatches, comms.stages)
    weight = 1 / microbatches if mean else 1.0

    def weighted(output: Any, target: torch.Tensor) -> torch.Tensor:
        return loss(output, target) * weight

    if known.splits:
        for stage in stages:
            stage.split_backward()
    kind = type(f"Axo{known.kind.__name__}", (_Step, known.kind), {"__doc__": known.kind.__doc__})
    given = stages[0] if known.stages_per_rank == 1 else list(stages)
    made = kind(given, microbatches, loss_fn=weighted, scale_grads=False)
    made.axo_stages = list(stages)
    made.axo_rows = stages[0].rows
    return made
