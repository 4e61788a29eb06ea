"""A record of one training step: what this rank computed, what it issued over each axis, and what it waited for.

compute has the forward of each module that has parameters of its own, its backward, the products inside them (product,
dI, dW), the optimizer and clipping. A collective lasts from its issue to its completion where that is known (blocking
ones, and those that the transport times), else until somebody waited for it. A wait is what the rank was blocked for; a
collective found complete has none. Collectives and waits of the engine (``axo.overlap``) carry the layer's name.
Recording costs some microseconds an event, so a traced step is a little longer. The file's form: ``chrome_trace``.

With pipeline stages compute has a span for each action too (``F3 stage 1``: forward of micro-batch 3; B, I, W), around
what runs in it, and one for the step, which all ranks begin together; so ranks can be compared in time. What goes over
all stages stands in the thread "world". The picture is then of the actions: a lane a rank, stages down, time across.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from axo.checkpoint.ranks import checkpoint_group, share
from axo.comm.connect import Communicators
from axo.comm.counting import Awaited, Observed
from axo.comm.counting import observers as watch
from axo.overlap import Events, record
from axo.perf import chrome_trace
from axo.perf.chrome_trace import STREAMS, Span
from axo.pipeline import Stage, actions

_PRODUCTS = {"forward": "product", "dI": "dI", "dW": "dW"}


class StepTrace:
    """A context that records one step of ``model`` on this rank; ``spans`` afterwards.

    Args:
        model: Its modules name the compute spans.
        stages: The stages of a pipeline that this rank has.
    """

    def __init__(self, model: nn.Module, stages: Sequence[Stage] = ()) -> None:
        self._model, self._stages = model, stages
        self._ran: list[actions.RecordedAction] = []
        self.spans: list[Span] = []
        self._open: dict[tuple[str, str], float] = {}
        self._hooks: list[RemovableHandle] = []
        self._stack = ExitStack()
        self._events: Events = []

    def __enter__(self) -> StepTrace:
        for name, module in self._model.named_modules():
            if any(True for _ in module.parameters(recurse=False)):
                self._watch(name or type(module).__name__, module)
        self._events = self._stack.enter_context(record(self._model))
        self._ran = self._stack.enter_context(actions.record(self._stages))
        watch.open()
        return self

    def __exit__(self, *error: Any) -> None:
        issued, waits = watch.close()
        self._stack.close()
        for hook in self._hooks:
            hook.remove()
        self.spans += communication(issued, waits, self._events)
        self.spans += [
            Span("compute", f"{event.layer} {_PRODUCTS[event.op]}", event.start, event.end, layer=event.layer)
            for event in self._events
            if event.what == "compute"
        ]
        self.spans += [
            Span("compute", f"{one.kind}{one.microbatch} stage {one.stage}", one.start, one.end) for one in self._ran
        ]
        if self._stages:  # what came before the ranks began together is not of the step
            begin = max((span.start for span in self.spans if span.name == "step"), default=0.0)
            self.spans = [span for span in self.spans if span.start >= begin]
        self.spans.sort(key=lambda span: (span.start, -span.end))

    def _watch(self, name: str, module: nn.Module) -> None:
        begin, end = self._begin, self._end
        self._hooks += [
            module.register_forward_pre_hook(lambda *_: begin("forward", name)),
            module.register_forward_hook(lambda *_: end("forward", name)),
        ]
        if isinstance(module, nn.Embedding):
            return  # its input has no gradient, so nothing says when its backward begins
        self._hooks += [
            module.register_full_backward_pre_hook(lambda *_: begin("backward", name)),
            module.register_full_backward_hook(lambda *_: end("backward", name)),
        ]

    def _begin(self, what: str, name: str) -> None:
        self._open[what, name] = time.perf_counter()

    def _end(self, what: str, name: str) -> None:
        start = self._open.pop((what, name), None)
        if start is not None:
            self.spans.append(Span("compute", f"{name} {what}", start, time.perf_counter()))

    def span(self, name: str, call: Callable[[], Any]) -> Any:
        """Do ``call`` as a compute span."""
        start = time.perf_counter()
        result = call()
        self.spans.append(Span("compute", name, start, time.perf_counter()))
        return result


def communication(issued: list[Observed], waits: list[Awaited], events: Events) -> list[Span]:
    """The spans of collectives and of waits, from what the communicators saw and what the engine recorded of it."""
    layers = _layers(issued, events)
    blocked = [event for event in events if event.what == "wait"]
    spans = []
    for number, one in enumerate(issued):
        mine = [wait for wait in waits if one.work is not None and wait.work is one.work]
        lasted = one.work.duration() if one.work is not None and one.work.is_completed() else None
        end = one.start + lasted if lasted is not None else min((wait.end for wait in mine), default=one.end)
        layer = layers.get(number, "")
        axis = one.axis if one.axis in STREAMS else "world"
        spans.append(Span(axis, one.op, one.start, end, bytes=one.bytes, blocked=one.work is None, layer=layer))
        for wait in mine:
            # The engine also drops what it finds complete, which is no wait.
            if layer and not any(event.start <= wait.start and wait.end <= event.end for event in blocked):
                continue
            spans.append(Span(axis, f"wait {one.op}", wait.start, wait.end, blocked=True, layer=layer))
    return spans


def _layers(issued: list[Observed], events: Events) -> dict[int, str]:
    """Whose collectives they are, by their places in ``issued``: the engine records each right after it is issued, or
    from before until after it where the rank is blocked."""
    found: dict[int, str] = {}
    for event in events:
        if event.what == "compute":
            continue
        for number in range(len(issued) - 1, -1, -1):
            one = issued[number]
            if number in found or (one.op, one.axis) != (event.op, event.axis) or one.start > event.end:
                continue
            if (one.work is not None) == (event.what == "issue") and (one.work is not None or one.start >= event.start):
                found[number] = event.layer
            break
    return found


def gather(mine: list[Span], comms: Communicators) -> list[list[Span]] | None:
    """All ranks' spans on rank 0, None elsewhere. Every rank must call it."""
    everyone = comms.everyone
    if everyone.size == 1:
        return [mine]
    told = share(checkpoint_group(comms), [astuple(span) for span in mine])
    return [[Span(*span) for span in spans] for spans in told] if everyone.rank == 0 else None


def write(spans: list[list[Span]], path: Path, title: str, stages: int = 1) -> None:
    """Write the trace of all ranks to ``path``, and a picture beside it (.png): of the first rank, or of all stages."""
    from axo.perf import plots

    of_all = [replace(span, rank=rank) for rank, of_rank in enumerate(spans) for span in of_rank]
    chrome_trace.write(path, of_all, list(range(len(spans))))
    drawn = plots.timeline(spans[0], title) if stages == 1 else _picture(spans[:: len(spans) // stages], title)
    path.with_suffix(".png").write_bytes(drawn)


def _picture(of_ranks: list[list[Span]], title: str) -> bytes:
    """The actions of one rank of each stage: a lane a rank, time across."""
    from axo.perf import plots
    from axo.perf.pipeline_schedule import Action, TimedAction, Timeline

    ran: list[TimedAction] = []
    for rank, spans in enumerate(of_ranks):
        begin = min(span.start for span in spans)
        for span in spans:
            if said := re.fullmatch(r"([FBIW])(\d+) stage (\d+)", span.name):
                action = Action(said[1], int(said[3]), int(said[2]))
                ran.append(TimedAction(rank, action, span.start - begin, span.end - begin))
    seconds = max((one.end for one in ran), default=0.0)
    return plots.pipeline_timeline(Timeline("", len(of_ranks), 0, 0, seconds, ran, ()), title)
