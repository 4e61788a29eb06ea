"""A reproduction as tables, JSON, CSV and plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from axo.perf import output, plots

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


def groups_csv(groups: Sequence[Group]) -> str:
    """Return reproduction groups as CSV."""
    rows = [{"group": group.title} | line for group in groups for line in group_json(group)["lines"]]
    return output.as_csv(rows, ["group", "what", "paper", "predicted", "unit", "error", "standing", "note"])


def group_plot(group: Group) -> bytes:
    """Return any group as a plot: its bars, else for each line the paper's number and the prediction; a range is a bar.

    Lines of several units share a logarithmic scale.
    """
    if group.bars:
        return plots.png(plots.bars([one.what for one in group.bars], {
            "computation": [one.products for one in group.bars],
            "communication that shows": [one.shown for one in group.bars],
        }))  # fmt: skip
    figure, axes = plots.new_figure(9, 0.32 * len(group.lines) + 1.4)
    for place, line in enumerate(group.lines):
        ends = _ends(line.paper)
        if len(ends) == 2:
            axes.plot(ends, (place, place), "-", lw=6, color="#c9d3e0", solid_capstyle="butt")
        elif ends:
            axes.plot(ends, (place,), "o", color=plots.COLORS["x"])
        axes.plot((line.predicted,), (place,), "s", color=plots.COLORS["products"], mfc="white", mew=1.5)
        if line.calibrated:
            axes.plot((line.predicted,), (place,), "x", color="black", ms=5)
    axes.set_yticks(range(len(group.lines)), [f"{line.what} ({line.unit})" for line in group.lines], fontsize=7)
    axes.invert_yaxis()
    values = [value for line in group.lines for value in (*_ends(line.paper), line.predicted)]
    if values and min(values) > 0 and max(values) > 20 * min(values):
        axes.set_xscale("log")
        plots.plain_log(axes.xaxis)
    for marker, color, name in (("o", plots.COLORS["x"], "paper"), ("s", plots.COLORS["products"], "predicted"),
                                ("x", "black", "calibrated on")):  # fmt: skip
        axes.plot([], [], marker, color=color, mfc="white" if marker == "s" else color, label=name)
    axes.legend(fontsize=8, ncols=3, loc="lower right", bbox_to_anchor=(1, 1))
    return plots.png(figure)


def _ends(paper: float | str) -> tuple[float, ...]:
    """What the paper gives: a number, the ends of "13 to 45", or nothing."""
    if not isinstance(paper, str):
        return (float(paper),)
    first, to, last = paper.partition(" to ")
    try:
        return (float(first), float(last)) if to else (float(first),)
    except ValueError:
        return ()
