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

Not here: how the actions of a schedule are ordered (torch's; a pair of dualpipev is two actions, see ``_Step``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from axo.comm.connect import Communicators
from axo.errors import Refused
from axo.perf.pipeline_schedule import KINDS, V, schedule_kind
from axo.perf.pipeline_schedule import check as check_microbatches
from axo.perf.pipeline_schedule import check_algorithm as check_algorithm
from axo.pipeline.cut import part_of, tied_gradients
from axo.pipeline.stage import Stage

Loss = Callable[[Any, torch.Tensor], torch.Tensor]
Schedule = PipelineScheduleSingle | PipelineScheduleMulti


SCHEDULES = tuple(KINDS)


def layout(name: str) -> dict[str, Any]:
    """What a schedule asks of ``split``: ``stages_per_rank`` and ``order``.

    Raises:
        ValueError: The schedule is not known.
    """
    kind = schedule_kind(name)
    return {"stages_per_rank": kind.stages_per_rank, "order": kind.order}


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
        dtype: The dtype of the residual stream; default: that of the parameters.
        forward_context: Entered around each forward pass (autocast).

    Raises:
        ValueError: A module is not from ``split``, or the tokens do not divide over the ranks that split them.
    """
    stages = []
    for module in modules:
        part = part_of(module)
        if part is None:
            raise ValueError("pipeline: stages takes what axo.pipeline.split returned; make others by Stage itself")
        if tokens % part.token_ranks:
            raise ValueError(f"pipeline: {tokens} tokens do not divide over x={part.token_ranks}")
        own = dtype or next(p.dtype for p in module.parameters() if p.is_floating_point())
        hidden = torch.empty((rows, tokens // part.token_ranks, part.features), dtype=own, device="meta")
        ids = torch.empty((rows, tokens), dtype=torch.int64, device="meta")
        first = part.index == 0
        stages.append(
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
    return stages


class _Step:
    """Mixed into torch's schedules: checks what comes in, and ends a step."""

    def step(self: Any, *args: Any, target: Any = None, **kwargs: Any) -> Any:
        """Run one step; see torch. Every rank may pass inputs and targets: only those of first and last stage count.

        Raises:
            ValueError: The rows are not those of all micro-batches.
        """
        for what, given in (("inputs", args[0] if args else None), ("targets", target)):
            if given is not None and given.shape[0] != self.axo_rows:
                raise ValueError(
                    f"pipeline: {what} have {given.shape[0]} rows, and {self._n_microbatches} micro-batches of"
                    f" {self.axo_stages[0].rows} rows were announced; pass {self.axo_rows}"
                )
        kwargs.setdefault("return_outputs", False)
        if not self._has_backward:
            return super().step(*args, target=target, **kwargs)  # type: ignore[misc]
        with tied_gradients([stage.submod for stage in self.axo_stages]):
            return super().step(*args, target=target, **kwargs)  # type: ignore[misc]

    def _prepare_schedule_with_comms(self, actions: dict[int, list[Any]], *more: Any, **options: Any) -> None:
        """Put messages between the actions of each rank.

        torch sends what a forward and a backward pass in a pair (dualpipev) give when both are done. Here each is an
        action of its own, so that the next stage has the forward pass's output one backward pass sooner.
        """
        apart = {rank: [each for one in listed for each in getattr(one, "sub_actions", None) or (one,)]
                 for rank, listed in actions.items()}  # fmt: skip
        super()._prepare_schedule_with_comms(apart, *more, **options)  # type: ignore[misc]


def schedule(
    name: str,
    stages: Sequence[Stage],
    *,
    microbatches: int,
    loss: Loss,
    mean: bool = True,
    rows: int | None = None,
) -> Schedule:
    """Make torch's schedule ``name`` over this rank's stages. Every rank makes its own.

    After each ``step`` gradients are complete, and added to what ``.grad`` held; nothing is divided there. So steps
    may be accumulated.

    Args:
        name: One of :data:`SCHEDULES`.
        stages: What :func:`stages` returned; of modules of your own, in the order of their indices.
        microbatches: Parts that a step's rows are cut into; at least as many as stages.
        loss: The loss of one micro-batch: (output of the last stage, its targets) -> a scalar.
        mean: The loss of a step is the mean of those of its micro-batches, each as often as it has rows; else their
            sum. What ``losses`` gets are its summands.
        rows: Of a step on this rank; default: ``microbatches`` times what the stages were made for. Where the
            micro-batches do not divide them the first have one more, and that is what the stages are made for.

    Raises:
        ValueError: The schedule is not known, or does not fit the stages, the rows or the number of micro-batches.
        Refused: It does not suit the algorithm of the products, or torch.compile.
    """
    kind = schedule_kind(name)
    comms = stages[0].comms
    if len(stages) != kind.stages_per_rank and (kind.stages_per_rank == 1 or kind.order == V):
        raise ValueError(
            f"pipeline: {name!r} wants {kind.stages_per_rank} stages a rank, got {len(stages)}; give split"
            f" **axo.pipeline.layout({name!r})"
        )
    check_microbatches(name, microbatches, comms.stages)
    check_algorithm(name, comms.arrangement.name)
    if kind.splits and any(hasattr(stage.submod, "_orig_mod") for stage in stages):
        raise Refused(
            f"pipeline: torch refuses {name!r} with stages from torch.compile, whose backward it cannot split; use a"
            " schedule whose backward is in one phase, such as interleaved-1f1b, or leave torch.compile out"
        )
    whole = microbatches * stages[0].rows
    count = whole if rows is None else rows
    least, more = divmod(count, microbatches)
    if least < 1 or least + (more > 0) != stages[0].rows:
        raise ValueError(
            f"pipeline: rows={count} in {microbatches} micro-batches are not up to {stages[0].rows} rows each, which"
            f" the stages were made for; make them for {max(1, -(-count // microbatches))}, or use up to {whole} rows"
        )
    for stage in stages:
        stage.of_rank = list(stages)
        stage.announce_rows([least + (number < more) for number in range(microbatches)] if more else [])

    def weighted(output: Any, target: torch.Tensor) -> torch.Tensor:
        return loss(output, target) * (target.shape[0] / count if mean else 1.0)

    if kind.splits:
        for stage in stages:
            stage.split_backward()
    base = getattr(pipelining, kind.torch_name)
    own_class = type(f"Axo{kind.torch_name}", (_Step, base), {"__doc__": base.__doc__})
    steps = own_class(
        stages[0] if kind.stages_per_rank == 1 else list(stages), microbatches, loss_fn=weighted, scale_grads=False
    )
    steps.axo_stages = list(stages)
    steps.axo_rows = count
    return steps
