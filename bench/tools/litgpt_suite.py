"""How many of LitGPT's own tests pass on a grid, of those that pass serially on this machine?

    git clone --depth 1 --branch v0.5.13 https://github.com/Lightning-AI/litgpt
    python -m bench.tools.litgpt_suite litgpt --json bench/results/litgpt_suite.jsonl

Each group of files runs once without Axo, then on each grid with the plugin ``bench.tools.litgpt_plugin``. A
test counts where it passes in both; what passes serially only is listed by name. The checkout is read, not changed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import torch

from ..lib.arguments import Parser
from ..lib.table import Table, environment

GROUPS = {
    "test_model": ("test_model.py",),
    "test_lora": ("test_lora.py",),
    "convert": ("convert",),
    "generate": ("generate",),
    "test_pretrain, test_api": ("test_pretrain.py", "test_api.py"),
    "test_utils": ("test_utils.py",),
    "test_adapter": ("test_adapter.py",),
    "test_full": ("test_full.py",),
    "test_deepseek_moe": ("test_deepseek_moe.py",),
}
GRIDS, GOAL = "2x1x1x1,1x2x1x1,1x1x2x1", 0.95
COLUMNS = {"group": "s", "grid": "s", "serial": "d", "passed": "d", "share": ".3f"}


def main(arguments: list[str] | None = None) -> int:
    """Run all; returns the number of grids on which less than ``GOAL`` of what passes serially passes."""
    parser = Parser("python -m bench.tools.litgpt_suite", __doc__, json=True)
    parser.add_argument("checkout", type=Path, help="folder of LitGPT's repository at the installed version")
    parser.add_argument("--grids", default=GRIDS, help="comma-separated")
    parser.add_argument("--groups", default="", help=f"some of {', '.join(GROUPS)}, separated by semicolons")
    options = parser.parse_args(arguments)
    tests = options.checkout / "tests"
    if not (tests / "test_model.py").is_file():
        parser.error(f"{options.checkout}: no tests/test_model.py there; clone LitGPT's repository")
    chosen = [name.strip() for name in options.groups.split(";") if name.strip()] or list(GROUPS)
    if unknown := [name for name in chosen if name not in GROUPS]:
        parser.error(f"--groups {unknown[0]!r}: use some of {', '.join(GROUPS)}, separated by semicolons")
    table = Table(COLUMNS, options.json, {"bench": "litgpt_suite"} | environment(torch.device("cpu")))
    all_serial, all_passed = 0, Counter[str]()
    for name in chosen:
        files = [str(Path("tests", file)) for file in GROUPS[name]]
        serial = passing(options.checkout, files, None)
        all_serial += len(serial)
        for grid in options.grids.split(","):
            both = serial & passing(options.checkout, files, grid)
            all_passed[grid] += len(both)
            share = len(both) / max(len(serial), 1)
            table.add(group=name, grid=grid, serial=len(serial), passed=len(both), share=share)
            for test, count in sorted(Counter(test.partition("[")[0] for test in serial - both).items()):
                table.note(f"    serially only: {count} of {test}", test=test, count=count)
    shares = {grid: count / max(all_serial, 1) for grid, count in all_passed.items()}
    return table.judge(
        {f"{grid}: {share:.1%} of {all_serial}, at least {GOAL:.0%}": share >= GOAL for grid, share in shares.items()}
    )


def passing(checkout: Path, files: list[str], grid: str | None) -> set[str]:
    """Names of the tests that pass; on a grid as its rank 0, which speaks for all, sees them."""
    tested = ["-m", "pytest", "-q", "-rA", "--color=no", "-p", "no:cacheprovider", *files]
    if grid is None:
        command = [sys.executable, *tested, "-o", "markers=flaky: runs again"]  # of a plugin that is not installed
    else:
        ranks = 1
        for size in grid.split("x"):
            ranks *= int(size)
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [*launch, *tested, "-p", "bench.tools.litgpt_plugin", "--axo-grid", grid]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}  # for the plugin
    done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, check=False)
    found = re.findall(r"^(?:PASSED|XPASS) (tests/\S+::.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if not re.search(r"\d+ passed", done.stdout):
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    return set(found)


if __name__ == "__main__":
    sys.exit(main())
