"""The plans of docs/notes/planner.md are what ``axo plan`` says today. Oracle: the page, every figure of its tables.

Among the grids that the page names; with ``-m soak`` among all.
"""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from axo.cli import main as cli
from axo.grid import Grid
from axo.perf.memory import GIB

PAGE = Path(__file__).parents[2] / "docs" / "notes" / "planner.md"
GRID = r"\d+x\d+x\d+x\d+"
ROWS = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `--model")]


def figures(one: dict[str, Any]) -> list[str]:
    """What the page must say of the first row of a plan, as patterns."""
    found = [re.escape(one["grid"]), rf"\b{one['step_s']:.1f} s\b"]
    found.append(rf"\b{one['memory_bytes']['total'] / GIB:.0f} (of 80 )?GiB")
    if one["micro_batches"] > 1:
        found.append(rf"\b{one['micro_batches']} micro-batches")
    found.append({"none": "no recomputation", "selective": "selective recomputation", "full": ", recomputation"}[
        one["recomputes"]])  # fmt: skip
    if 0 < one["cached_gathers"] < 1:
        found.append(rf"\b{100 * one['cached_gathers']:.0f}% (of the gathered weights )?kept")
    if "pipeline" in one:
        found.append(rf"x {one['pipeline']} stages, {one['schedule']}")
    return found


def cost(one: dict[str, Any]) -> list[str]:
    hours, energy = one["gpu_hours"], one["megawatt_hours"]
    found = [rf"\b{one['days']:.0f} days", rf"\b{hours:,.0f} GPU hours" if hours < 1e6 else f"{hours / 1e6:.2g}M GPU h"]
    return [*found, rf"\b{energy:,.0f} MWh" if energy < 1e4 else f"{energy / 1e3:.0f} GWh"]


def test_the_page_has_its_plans() -> None:
    assert len(ROWS) == 7 and sum("--pipeline" in row[0] for row in ROWS) == 2


@pytest.mark.parametrize("grids", ["its grids", pytest.param("all grids", marks=pytest.mark.soak)])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: shlex.split(row[0].strip("`"))[1])
def test_a_plan_of_the_page_is_what_the_command_says(
    row: list[str], grids: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if grids == "its grids":
        named = [
            Grid.parse(name) for name in dict.fromkeys(re.findall(GRID, " ".join(row[1] + row[2] for row in ROWS)))
        ]
        monkeypatch.setattr(Grid, "all", lambda ranks: (grid for grid in named if grid.world_size == ranks))
    words = ["plan", "--machine", "h100", "--search", "--top", "3", *shlex.split(row[0].strip("`"))]
    ran = CliRunner().invoke(cli.app, [*words, "--json", "-"])
    assert ran.exit_code == 0, ran.output
    made = json.loads(ran.output)
    best, first = made["ranked"][0], row[1]
    every = [one for one in (*made["ranked"], *made["others"]) if "step_s" in one]
    if "--pipeline" in words:
        best = next(one for one in every if "pipeline" in one)
        without = next(one for one in every if "pipeline" not in one)
        assert row[2].startswith(f"{100 * (best['step_s'] / without['step_s'] - 1):+.1f}%")
    for pattern in figures(best) + (cost(best) if "days" in first else []):
        assert re.search(pattern, first), (pattern, first)
    said = {"ZeRO-2": best["zero"] == 2, "sequence parallelism": best["sequence_parallel"]}
    said["offloaded"] = best["offload"] != "none"
    for what, so in said.items():
        assert (what in first.partition(";")[0]) == so, (what, first)
    for text, percent in re.findall(r"([^;,]*?)\+([\d.]+)%", row[2]):
        grid, digits = re.search(GRID, text), len(percent.partition(".")[2])
        ways = (
            [one for one in every if one["grid"] == grid[0]] if grid else [o for o in made["others"] if "step_s" in o]
        )
        behind = [f"{100 * (one['step_s'] / made['ranked'][0]['step_s'] - 1):.{digits}f}" for one in ways]
        assert percent in behind, (text, percent, behind[:10])
