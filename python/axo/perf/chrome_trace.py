"""Write a simulated step as a Chrome trace (Trace Event Format), which https://ui.perfetto.dev opens.

One process a representative rank, one thread a stream, complete events ("X") in microseconds; memory of rank 0 as a
counter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from axo.perf.schedule import STREAMS
from axo.perf.simulator import Simulation


def events(simulation: Simulation) -> list[dict[str, Any]]:
    """Return the trace events of a simulation, in time order."""
    found: list[dict[str, Any]] = []
    for process, rank in enumerate(simulation.ranks):
        found.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": f"rank {rank}"}})
        found.append({"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}})
        for thread, stream in enumerate(STREAMS):
            name = {"name": stream if stream == STREAMS[0] else f"axis {stream}"}
            found.append({"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": name})
    for span in sorted(simulation.spans, key=lambda span: (span.start, span.end)):
        if span.end > span.start:
            found.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "cat": "compute" if span.stream == STREAMS[0] else "communication",
                    "pid": span.rank,
                    "tid": STREAMS.index(span.stream),
                    "ts": round(1e6 * span.start, 3),
                    "dur": round(1e6 * (span.end - span.start), 3),
                }
            )
    for when, held in simulation.memory:
        args = {"GiB": round(held / 2**30, 4)}
        found.append({"ph": "C", "name": "memory held", "pid": 0, "ts": round(1e6 * when, 3), "args": args})
    return found


def write(simulation: Simulation, path: Path) -> None:
    """Write the trace to ``path`` (JSON)."""
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events(simulation)}))
