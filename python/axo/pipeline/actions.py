"""What the stages of a rank ran in a step, and when: for traces, and for measuring how much of a step is bubble.

    with axo.pipeline.actions.record(stages) as ran:
        schedule.step(ids, target=targets)
    [(one.kind, one.stage, one.microbatch, one.end - one.start) for one in ran]

Any stages of ``torch.distributed.pipelining``. Messages, and waits for them, lie between the actions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch.distributed.pipelining import PipelineStage

METHODS = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")


class RecordedAction(NamedTuple):
    """An action: F forward, B backward, I its gradients of inputs and W those of weights apart; seconds of
    ``time.perf_counter``."""

    kind: str
    stage: int
    microbatch: int
    start: float
    end: float


@contextmanager
def record(stages: Sequence[PipelineStage]) -> Iterator[list[RecordedAction]]:
    """Record what ``stages`` run inside the block, in order."""
    ran: list[RecordedAction] = []
    for stage in stages:
        for name in METHODS:
            stage.__dict__[name] = _timed(stage, name, getattr(stage, name), ran)
    try:
        yield ran
    finally:
        for stage in stages:
            for name in METHODS:
                del stage.__dict__[name]


def _timed(
    stage: PipelineStage, name: str, method: Callable[..., Any], ran: list[RecordedAction]
) -> Callable[..., Any]:
    def timed(microbatch: int, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = method(microbatch, *args, **kwargs)
        kind = {"f": "F", "b": "B" if kwargs.get("full_backward", True) else "I"}[name[0]]
        kind = "W" if name == "backward_weight_one_chunk" else kind
        ran.append(RecordedAction(kind, stage.stage_index, microbatch, start, time.perf_counter()))
        return result

    return timed
