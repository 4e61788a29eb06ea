"""The time line of recoveries of ``axo train --elastic``, of what its tests have printed of real runs.

    pytest -m soak -s tests/train/test_elastic_hosts.py | tee soak.txt
    python -m bench.recovery soak.txt --json bench/results/recovery.jsonl --plot docs/img/recovery.png

A row is one lost host: seconds from the loss of power until ranks are told to end (detect), launchers and new ranks
have met (agree), the copy is loaded (move), and the first step has ended (step). The check is the test's own: losses.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import torch

from .lib.arguments import Parser
from .lib.picture import panels
from .lib.table import Table, environment

PARTS = {"detect": "#c43d3d", "agree": "#f0a03c", "move": "#1668a8", "step": "#5a9e6f"}
COLUMNS = {"hosts": "d", "lost": "d"} | dict.fromkeys(PARTS, ".2f")


def main(arguments: list[str] | None = None) -> int:
    """Print and draw the recoveries that a file tells of. Returns 0."""
    parser = Parser("axo bench recovery", __doc__, json=True)
    parser.add_argument("file", type=Path, help="what the tests have printed")
    parser.add_argument("--plot", type=Path, default=None, help="draw them here (PNG)")
    options = parser.parse_args(arguments)
    told = [line.partition("recovery ")[2] for line in options.file.read_text().splitlines()]
    rows = [json.loads(text) for text in told if text.startswith("{")]
    if not rows:
        parser.error(f"{options.file} tells of no recovery")
    table = Table(COLUMNS, options.json, environment(torch.device("cpu")) | {"bench": "recovery"})
    rows.sort(key=lambda row: (row["hosts"], sum(row[part] for part in PARTS)))
    for row in rows:
        table.add(**row)
    median = statistics.median(sum(row[part] for part in PARTS) for row in rows)
    table.note(f"median of {len(rows)}: {median:.2f} s (goal 10)", verdict=median < 10, seconds=median)
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
