"""A trace of one training step: what this rank computed and what went over each axis, when.

    chrome trace (JSON)  one process a rank, a thread a stream: compute, x, y, z, data, world; open it in Perfetto
    picture (PNG)        the same of rank 0, a lane a stream; hatched where the rank was blocked

compute has the forward of each module that has parameters of its own, its backward, the optimizer and clipping; what a
module waits for lies inside its span. A collective lasts from its issue to its completion where that is known (blocking
ones, and those that the transport times), else until somebody waited for it. Recording costs some microseconds an
event, so a traced step is a little longer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from axo.counting import Observed, watch
from axo.grid import AXES

STREAMS = ("compute", *AXES, "world")


@dataclass(frozen=True)
class Span:
    """Something that lasted: seconds of this process's clock. ``blocked``: the rank waited meanwhile."""

    stream: str
    name: str
    start: float
    end: float
    bytes: int = 0
    blocked: bool = False


class StepTrace:
    """A context that records one step of ``model`` on this rank; ``spans`` afterwards.

    Args:
        model: Its modules name the compute spans.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.spans: list[Span] = []
        self._open: dict[tuple[str, str], float] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> StepTrace:
        for name, module in self._model.named_modules():
            if any(True for _ in module.parameters(recurse=False)):
                self._watch(name or type(module).__name__, module)
        watch.open()
        return self

    def __exit__(self, *error: Any) -> None:
        issued, waits = watch.close()
        for hook in self._hooks:
            hook.remove()
        self.spans += [_collective(one, waits) for one in issued]
        self.spans += [Span(axis, "wait", start, end, blocked=True) for axis, start, end in waits]
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


def _collective(one: Observed, waits: list[tuple[str, float, float]]) -> Span:
    end = one.end
    if one.work is not None:
        lasted = one.work.duration() if one.work.is_completed() else None
        later = [stop for axis, begin, stop in waits if axis == one.axis and stop >= one.start]
        end = one.start + lasted if lasted is not None else min(later, default=one.end)
    return Span(one.axis, one.op, one.start, end, one.bytes, blocked=one.work is None)


def write(spans: list[list[Span]], path: Path, title: str) -> Path:
    """Write the trace of all ranks to ``path`` and the picture of the first beside it. Returns the picture's path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events(spans)}), encoding="utf-8")
    picture = path.with_suffix(".png")
    draw(spans[0], picture, title)
    return picture


def events(spans: list[list[Span]]) -> list[dict[str, Any]]:
    """The events of a chrome trace; microseconds since the first event of each rank."""
    found: list[dict[str, Any]] = []
    for rank, of_rank in enumerate(spans):
        found.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        used = {span.stream for span in of_rank}
        for thread, stream in enumerate(STREAMS):
            if stream in used:
                found.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": stream}})
        first = min((span.start for span in of_rank), default=0.0)
        for span in of_rank:
            found.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "cat": "blocked" if span.blocked else "compute" if span.stream == "compute" else "communication",
                    "pid": rank,
                    "tid": STREAMS.index(span.stream),
                    "ts": round(1e6 * (span.start - first), 3),
                    "dur": round(1e6 * (span.end - span.start), 3),
                    "args": {"bytes": span.bytes} if span.bytes else {},
                }
            )
    return found


def draw(spans: list[Span], path: Path, title: str) -> None:
    """A lane for each stream that has something in it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lanes = [stream for stream in STREAMS if any(span.stream == stream for span in spans)]
    first = min((span.start for span in spans), default=0.0)
    figure, axes = pyplot.subplots(figsize=(12, 0.6 * len(lanes) + 1.4), layout="constrained")
    colours = {"forward": "tab:blue", "backward": "tab:orange"}
    for lane, stream in enumerate(lanes):
        for span in (span for span in spans if span.stream == stream):
            usual = "tab:green" if stream == "compute" else "tab:purple"
            colour = colours.get(span.name.rpartition(" ")[2], usual)
            bar = (1e3 * (span.start - first), max(1e3 * (span.end - span.start), 1e-3))
            waits = span.name == "wait"
            axes.broken_barh(
                [bar],
                (lane - 0.4, 0.8),
                facecolors="none" if waits else colour,
                edgecolor="black" if waits else "white",
                hatch="////" if waits else None,
                linewidth=0.3,
            )
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def gather(mine: list[Span], comms: Any) -> list[list[Span]] | None:
    """All ranks' spans on rank 0, None elsewhere. Every rank must call it."""
    if comms.grid.world_size == 1:
        return [mine]
    text = torch.tensor(list(json.dumps([vars(span) for span in mine]).encode()), dtype=torch.uint8)
    length = torch.tensor([text.numel()], dtype=torch.int64)
    lengths = comms.world.all_gather(length.to(comms.device)).tolist()
    padded = torch.zeros(1, max(lengths), dtype=torch.uint8)
    padded[0, : text.numel()] = text
    theirs = comms.world.all_gather(padded.to(comms.device)).cpu()
    if comms.rank != 0:
        return None
    rows = (bytes(row[:length].tolist()) for row, length in zip(theirs, lengths, strict=True))
    return [[Span(**span) for span in json.loads(row)] for row in rows]
