"""The time line of recoveries of ``axo train --elastic``, of what its tests have printed of real runs.

    pytest -m soak -s tests/train/test_elastic_hosts.py | tee soak.txt
    python -m bench.recovery soak.txt --json bench/results/recovery.jsonl --plot docs/img/recovery.png

A row is one lost host or rank, of a run that has ended as serial training does: seconds from the loss until ranks are
told to end (detect), launchers and new ranks have met (agree), the copy is loaded (move), and the first step has ended
(step); lost: steps that were done again. The check is the test's own: losses.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from pathlib import Path

import torch

from .lib.arguments import Parser
from .lib.picture import panels
from .lib.table import Table, environment

PARTS = {"detect": "#c43d3d", "agree": "#f0a03c", "move": "#1668a8", "step": "#5a9e6f"}
COLUMNS = {"run": "d", "hosts": "d", "what": "s", "ranks": "d", "lost": "d"} | dict.fromkeys(PARTS, ".2f")
GOALS = {"host": 10.0, "rank": 5.0}


def main(arguments: list[str] | None = None) -> int:
    """Print and draw the recoveries that a file tells of. Returns 0."""
    parser = Parser("axo bench recovery", __doc__, json=True)
    parser.add_argument("file", type=Path, help="what the tests have printed")
    parser.add_argument("--plot", type=Path, default=None, help="draw them here (PNG)")
    options = parser.parse_args(arguments)
    text = options.file.read_text()
    ended = {int(run): float(apart) for run, apart in re.findall(r"run (\d+) has ended: .* apart by (\S+)", text)}
    every = [json.loads(told) for told in re.findall(r"^recovery (\{.*\})$", text, re.MULTILINE)]
    every = [row for row in every if row["run"] in ended]
    rows = [row for row in every if row["what"] in GOALS]
    if not rows:
        parser.error(f"{options.file} tells of no recovery of a run that has ended")
    table = Table(COLUMNS, options.json, environment(torch.device("cpu")) | {"bench": "recovery"})
    rows.sort(key=lambda row: (row["what"], row["hosts"], sum(row[part] for part in PARTS)))
    for row in rows:
        table.add(**row)
    for what, goal in GOALS.items():
        seconds = [sum(row[part] for part in PARTS) for row in rows if row["what"] == what] or [math.inf]
        median = statistics.median(seconds)
        table.note(f"{what}s, {len(seconds)}: median {median:.2f} s (goal {goal:g})", verdict=median < goal)
    most, apart, joins = max(row["lost"] for row in rows), max(ended.values()), len(every) - len(rows)
    table.note(f"{len(ended)} runs, {joins} joins; losses apart by {apart:.1e}; at most {most} steps done again")
    rows = [row for row in rows if row["what"] == "host"]
    if options.plot is not None:
        with panels(options.plot, (8, 0.8 + 0.22 * len(rows))) as (panel,):
            for number, row in enumerate(rows):
                begin = 0.0
                for part, color in PARTS.items():
                    panel.barh(number, row[part], left=begin, color=color, label=part if number == 0 else None)
                    begin += row[part]
            panel.set_yticks(range(len(rows)), [f"one of {row['hosts']}" for row in rows], fontsize=7)
            panel.set_xlabel("seconds since a host lost its power")
            panel.legend(ncols=len(PARTS), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
