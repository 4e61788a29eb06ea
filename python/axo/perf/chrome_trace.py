"""A step as a Chrome trace (Trace Event Format), which https://ui.perfetto.dev opens: simulated, or recorded.

One process a rank, one thread a stream (compute, x, y, z, data, world), complete events ("X") in microseconds. Spans of
one stream that overlap have threads of their own ("z", "z 2", ...), since those of a thread must nest. Waits stand in
compute, where the rank is blocked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axo.grid import AXES

COMPUTE = "compute"
STREAMS = (COMPUTE, *AXES, "world")
_LANES = 1000  # of a stream, at most


@dataclass(frozen=True)
class Span:
    """Something that lasted on one rank.

    Args:
        stream: One of ``STREAMS``.
        name: What.
        start, end: Seconds, of one clock a rank.
        rank: Whose.
        bytes: How many a collective moves; 0: not known.
        blocked: The rank waited meanwhile.
        layer: Whose it is, where that is known.
    """

    stream: str
    name: str
    start: float
    end: float
    rank: int = 0
    bytes: int = 0
    blocked: bool = False
    layer: str = ""

    @property
    def waits(self) -> bool:
        """Whether it is the wait for a collective, not the collective."""
        return self.name.startswith("wait ")


def write(path: Path, spans: Iterable[Span], ranks: list[int]) -> None:
    """Write a trace to ``path`` (JSON).

    Args:
        spans: Those of all ranks; ``rank`` is a place in ``ranks``. Times are shown from the first span of each rank.
        ranks: What the processes are called.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": _events(spans, ranks)}), "utf-8")


def _events(spans: Iterable[Span], ranks: list[int]) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    mine: dict[int, list[Span]] = {process: [] for process in range(len(ranks))}
    for span in spans:
        mine[span.rank].append(span)
    for process, rank in enumerate(ranks):
        events += _titles("process", f"rank {rank}", process, pid=process)
        threads: dict[int, str] = {}
        ends: dict[str, list[float]] = {}  # of each stream: when its threads are free again
        first = min((span.start for span in mine[process]), default=0.0)
        lasting = (span for span in mine[process] if span.end > span.start)  # a simulation has some that take no time
        for span in sorted(lasting, key=lambda span: (span.start, -span.end)):
            stream, lane = COMPUTE if span.waits else span.stream, 0
            if stream != COMPUTE:
                free = ends.setdefault(stream, [])
                lane = next((number for number, end in enumerate(free) if end <= span.start), len(free))
                free[lane : lane + 1] = [span.end]
            thread = STREAMS.index(stream) * _LANES + lane
            threads[thread] = stream if lane == 0 else f"{stream} {lane + 1}"
            args = {"bytes": span.bytes, "layer": span.layer, "axis": span.stream if span.waits else ""}
            events.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "cat": "blocked" if span.blocked else "compute" if stream == COMPUTE else "communication",
                    "pid": process,
                    "tid": thread,
                    "ts": round(1e6 * (span.start - first), 3),
                    "dur": round(1e6 * (span.end - span.start), 3),
                    "args": {name: value for name, value in args.items() if value},
                }
            )
        for thread, name in threads.items():
            events += _titles("thread", name, thread, pid=process, tid=thread)
    return events


def _titles(what: str, name: str, place: int, **ids: int) -> list[dict[str, Any]]:
    """What a process or a thread is called, and where it stands among the others."""
    args = {"name": {"name": name}, "sort_index": {"sort_index": place}}
    return [{"ph": "M", "name": f"{what}_{kind}", **ids, "args": value} for kind, value in args.items()]
