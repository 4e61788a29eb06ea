"""How long from the command to the first training step? `axo litgpt pretrain` on a grid, until it prints that step.

    python -m bench.tools.first_step --grids 2x2x2x1 --repeats 3 --json bench/results/first_step.jsonl

The model is tiny: what is measured is imports, the start of ranks, the configuration, the data and the first step.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from ..curves import write_run
from ..lib.arguments import Parser, numbers
from ..lib.table import Table, environment

COLUMNS = {"grid": "s", "median_s": ".1f", "least_s": ".1f"}


def main(arguments: list[str] | None = None) -> int:
    """Print a line for each grid."""
    parser = Parser("python -m bench.tools.first_step", __doc__, json=True)
    parser.add_argument("--grids", default="2x2x2x1", help="comma-separated")
    parser.add_argument("--repeats", default="3", help="starts of each; the median counts")
    options = parser.parse_args(arguments)
    (repeats,) = numbers("--repeats", options.repeats)
    header = {"bench": "first_step", "cores": os.cpu_count()} | environment(torch.device("cpu"))
    table = Table(COLUMNS, options.json, header)
    for grid in options.grids.split(","):
        seconds = [until_first_step(grid) for _ in range(repeats)]
        table.add(grid=grid, median_s=statistics.median(seconds), least_s=min(seconds), seconds=seconds)
    return 0


def until_first_step(grid: str) -> float:
    """Seconds from the command to its line of the first step; the run is ended there."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = write_run(folder, steps=40)
        command = [sys.executable, "-m", "axo.cli", "litgpt", "pretrain", "--grid", grid, "--config", str(file)]
        began = time.perf_counter()
        run = subprocess.Popen(
            [*command, "--out_dir", str(folder / "out")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert run.stdout is not None
        printed = []
        try:
            for line in run.stdout:
                printed.append(line)
                if re.search(r"iter \d+ step 1 ", line):
                    return time.perf_counter() - began
        finally:
            run.send_signal(signal.SIGTERM)
            run.communicate()
    raise SystemExit(f"{' '.join(command)} ended before its first step:\n{''.join(printed)[-2000:]}")


if __name__ == "__main__":
    sys.exit(main())
