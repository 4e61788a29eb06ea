"""A reproduction as tables and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from axo.perf import output

from .lines import Group, Summary


def group_table(group: Group) -> output.Table:
    """Return the lines of a reproduction as text."""
    rows = []
    for line in group.lines:
        paper = line.paper if isinstance(line.paper, str) else f"{line.paper:.4g}"
        error = "" if line.error is None else f"{100 * line.error:+.1f}%"
        rows.append([line.what, paper, f"{line.predicted:.4g}", line.unit, error, line.note])
    return ["what", "paper", "predicted", "unit", "error", "note"], rows


def rows_table(groups: Sequence[Group]) -> output.Table:
    """Return every line of a reproduction in one table."""
    rows = []
    for group in groups:
        for row, line in zip(group_table(group)[1], group.lines, strict=True):
            rows.append([group.title, *row[:5], line.standing])
    return ["figure or table", "what", "paper", "predicted", "unit", "error", "standing"], rows


def summary_table(found: Sequence[Summary]) -> output.Table:
    """Return the closing table of a reproduction: a line for each group."""
    header = ["figure or table", "rows", "held out, with a number", "mean |error|", "worst"]
    rows = [
        [one.title, str(one.rows), str(one.held_out), "" if one.mean is None else f"{100 * one.mean:.1f}%", one.worst]
        for one in found
    ]
    return header, rows


def group_json(group: Group) -> dict[str, Any]:
    """Return a reproduction group as plain data."""
    lines = [asdict(line) | {"error": line.error, "standing": line.standing} for line in group.lines]
    return {"title": group.title, "note": group.note, "lines": lines}
