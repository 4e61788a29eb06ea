"""A record of one training step: what each rank computed, what it issued over each axis, and what it waited for.

compute has the forward of each module that has parameters of its own, its backward, the products inside them (product,
dI, dW), the optimizer and clipping. A collective lasts from its issue to its completion where that is known (blocking
ones, and those that the transport times), else until somebody waited for it. A wait is what the rank was blocked for; a
collective that is complete already has none. Collectives and waits of the engine (``axo.overlap``) carry the layer's
name. Recording costs some microseconds an event, so a traced step is a little longer; and torch's hooks of a module sum
what comes back from inside it before they add it to the rest, so a gradient may differ from that of a step that is not
traced, by rounding. The file: ``chrome_trace``.

With pipeline stages compute has a span for each action too (``F3 stage 1``: forward of micro-batch 3; B, I, W), around
what runs in it, and one for the step, which all ranks begin together; so ranks can be compared in time. What goes over
all stages stands in the thread "world". The picture is then of the actions: a lane a rank, stages down, time across.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from axo.checkpoint.ranks import checkpoint_group, share
from axo.comm.counting import Awaited, Observed, observers
from axo.errors import user_message
from axo.matmul.products import products_of
from axo.overlap import Events, record
from axo.perf import chrome_trace, plots
from axo.perf.chrome_trace import COMPUTE, STREAMS, Span
from axo.perf.pipeline_schedule import Action, TimedAction, Timeline
from axo.pipeline import actions
from axo.train.loop import Step, Trainer

_PRODUCTS = {"forward": "product", "dI": "dI", "dW": "dW"}


def traced_step(trainer: Trainer, index: int) -> Step:
    """Do a step; rank 0 writes what all ranks did to the file of ``--trace``, and a picture beside it (.png).

    The picture is of the first rank, or of the first rank of each stage.
    """
    config, comms, spans = trainer.config, trainer.comms, list[Span]()
    with ExitStack() as hooks:
        for name, module in trainer.model.named_modules():
            if config.chunks_loss and module is trainer.model.lm_head:
                _time_calls(trainer, "_loss_of_head", "head and loss", spans, hooks)
            elif next(module.parameters(recurse=False), None) is not None:
                _time_passes(name or type(module).__name__, module, spans, hooks)
        _time_calls(trainer, "clip", "clip", spans, hooks)
        _time_calls(trainer.optimizer, "step", "optimizer", spans, hooks)
        events = hooks.enter_context(record(trainer.model))
        ran = hooks.enter_context(actions.record(trainer.stages))
        if trainer.stages:
            comms.everyone.barrier()
        fused_before = products_of(comms).fused.calls
        observers.open()
        start = time.perf_counter()
        step = trainer.step(index)
        end = time.perf_counter()
        issued, waits = observers.close()
    spans += _communication(issued, waits, events)
    computed = [event for event in events if event.what == "compute"]
    spans += [Span(COMPUTE, f"{e.layer} {_PRODUCTS[e.op]}", e.start, e.end, layer=e.layer) for e in computed]
    spans += [Span(COMPUTE, f"{one.kind}{one.microbatch} stage {one.stage}", one.start, one.end) for one in ran]
    spans += [Span(COMPUTE, "step", start, end)] if trainer.stages else []
    spans.sort(key=lambda span: (span.start, -span.end))
    told = share(checkpoint_group(comms), [[astuple(span) for span in spans], [tuple(one) for one in ran], start])
    if comms.everyone.rank == 0:
        whose = f"{config.schedule}, {comms.stages} stages" if trainer.stages else "rank 0"
        title = f"step {index} on {comms.grid}, {whose} · {config.precision} · {step.seconds * 1e3:.0f} ms"
        if fused := products_of(comms).fused.calls - fused_before:
            title += f" · {fused} products fused"
        path = Path(config.trace or "")
        try:
            every = [replace(Span(*one), rank=rank) for rank, (of_rank, _, _) in enumerate(told) for one in of_rank]
            chrome_trace.write(path, every, list(range(len(told))))
            picture = _stages(told[:: comms.grid.world_size], title) if trainer.stages else plots.timeline(spans, title)
            path.with_suffix(".png").write_bytes(picture)
        except OSError as error:  # a full disk is no reason to end a run
            print(f"axo train: the trace is not written: {user_message(error)}", file=sys.stderr)
    comms.everyone.barrier()  # or the others would wait for rank 0 inside the next step
    return step


def _time_passes(name: str, module: nn.Module, spans: list[Span], hooks: ExitStack) -> None:
    """Note when the module's forward and backward begin and end."""
    begun: dict[str, float] = {}

    def begin(what: str, *_: Any) -> None:
        begun[what] = time.perf_counter()

    def end(what: str, *_: Any) -> None:
        if what in begun:
            spans.append(Span(COMPUTE, f"{name} {what}", begun.pop(what), time.perf_counter()))

    hooks.callback(module.register_forward_pre_hook(partial(begin, "forward")).remove)
    hooks.callback(module.register_forward_hook(partial(end, "forward")).remove)
    if not isinstance(module, nn.Embedding):  # its input has no gradient, so nothing says when its backward begins
        hooks.callback(module.register_full_backward_pre_hook(partial(begin, "backward")).remove)
        hooks.callback(module.register_full_backward_hook(partial(end, "backward")).remove)


def _time_calls(target: object, method: str, name: str, spans: list[Span], hooks: ExitStack) -> None:
    plain = getattr(target, method)

    def timed(*args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        result = plain(*args, **options)
        spans.append(Span(COMPUTE, name, start, time.perf_counter()))
        return result

    setattr(target, method, timed)
    hooks.callback(delattr, target, method)


def _communication(issued: list[Observed], waits: list[Awaited], events: Events) -> list[Span]:
    """The spans of collectives and of waits, from what the communicators saw and what the engine recorded of it."""
    layers, spans = _layers(issued, events), list[Span]()
    blocked = [event for event in events if event.what == "wait"]
    for number, one in enumerate(issued):
        mine = [wait for wait in waits if one.work is not None and wait.work is one.work]
        lasted = one.work.duration() if one.work is not None and one.work.is_completed() else None
        end = one.start + lasted if lasted is not None else min((wait.end for wait in mine), default=one.end)
        layer, axis = layers.get(number, ""), one.axis if one.axis in STREAMS else "world"
        spans.append(Span(axis, one.op, one.start, end, bytes=one.bytes, blocked=one.work is None, layer=layer))
        for wait in mine:
            # The engine also drops what is complete already, which is no wait.
            if not layer or any(event.start <= wait.start and wait.end <= event.end for event in blocked):
                spans.append(Span(axis, f"wait {one.op}", wait.start, wait.end, blocked=True, layer=layer))
    return spans


def _layers(issued: list[Observed], events: Events) -> dict[int, str]:
    """Whose collectives they are, by their places in ``issued``: the engine records each right after it is issued, or
    from before until after it where the rank is blocked."""
    layers: dict[int, str] = {}
    for event in events:
        for number in range(len(issued) - 1, -1, -1):  # the last one before the event's end
            one = issued[number]
            if number in layers or (one.op, one.axis) != (event.op, event.axis) or one.start > event.end:
                continue
            if (one.work is not None) if event.what == "issue" else (one.work is None and one.start >= event.start):
                layers[number] = event.layer
            break
    return layers


def _stages(told: list[Any], title: str) -> bytes:
    """The picture of the actions of one rank of each stage: a lane a rank, time across."""
    ran = [
        TimedAction(rank, Action(kind, stage, number), begin - start, end - start)
        for rank, (_, of_rank, start) in enumerate(told)
        for kind, stage, number, begin, end in of_rank
    ]
    seconds = max((one.end for one in ran), default=0.0)
    return plots.pipeline_timeline(Timeline("", len({one.rank for one in ran}), 0, 0, seconds, ran, ()), title)
