"""The files of a traced step.

    chrome trace (JSON)  one process a rank, a thread a stream: compute, x, y, z, data, world; open it in Perfetto
    picture (PNG)        the same of rank 0, a lane a stream; hatched where the rank was blocked

Collectives of one axis that overlap in time have threads of their own ("z", "z 2", ...), since the spans of a thread
must nest. Waits stand in compute, where the rank is blocked.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from axo.grid import AXES
from axo.train.trace import Span

STREAMS = ("compute", *AXES, "world")
_LANES = 1000  # of a stream, at most


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
        threads: dict[int, str] = {}
        ends: dict[str, list[float]] = {}  # of each stream: when its threads are free again
        first = min((span.start for span in of_rank), default=0.0)
        for span in sorted(of_rank, key=lambda span: (span.start, -span.end)):
            stream, lane = "compute" if _waits(span) else span.stream, 0
            if stream != "compute":
                free = ends.setdefault(stream, [])
                lane = next((number for number, end in enumerate(free) if end <= span.start), len(free))
                free[lane : lane + 1] = [span.end]
            thread = STREAMS.index(stream) * _LANES + lane
            threads[thread] = stream if lane == 0 else f"{stream} {lane + 1}"
            args = {"bytes": span.bytes, "layer": span.layer, "axis": span.stream if _waits(span) else ""}
            found.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "cat": "blocked" if span.blocked else "compute" if stream == "compute" else "communication",
                    "pid": rank,
                    "tid": thread,
                    "ts": round(1e6 * (span.start - first), 3),
                    "dur": round(1e6 * (span.end - span.start), 3),
                    "args": {name: value for name, value in args.items() if value},
                }
            )
        for thread, name in threads.items():
            found.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}})
            found.append(
                {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": thread, "args": {"sort_index": thread}}
            )
    return found


def _waits(span: Span) -> bool:
    return span.name.startswith("wait ")


def draw(spans: list[Span], path: Path, title: str) -> None:
    """A lane for each stream that has something in it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lanes = [stream for stream in STREAMS if any(span.stream == stream for span in spans)]
    first = min((span.start for span in spans), default=0.0)
    figure, axes = pyplot.subplots(figsize=(12, 0.6 * len(lanes) + 1.4), layout="constrained")
    colours = {"forward": "tab:blue", "backward": "tab:orange"}
    colours |= {"product": "tab:cyan", "dI": "tab:olive", "dW": "tab:brown"}
    for lane, stream in enumerate(lanes):
        for span in (span for span in spans if span.stream == stream):
            usual = "tab:green" if stream == "compute" else "tab:purple"
            colour = colours.get(span.name.rpartition(" ")[2], usual)
            bar = (1e3 * (span.start - first), max(1e3 * (span.end - span.start), 1e-3))
            waits = _waits(span)
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
