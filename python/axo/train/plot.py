"""The picture of a run: its loss over steps; with a serial run, that curve behind it and the difference below."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PLOT_NAME = "loss.png"
_INK, _MUTED, _GRID = "#1f2933", "#6b7785", "#e4e8ec"
_AXO, _SERIAL = "#1668a8", "#f0a03c"


def draw(
    path: Path,
    losses: Sequence[float],
    *,
    title: str,
    subtitle: str,
    vocabulary: int,
    serial: Sequence[float] | None = None,
    limit: float | None = None,
) -> None:
    """Draw a PNG.

    Args:
        losses: Loss of each step, in nats.
        title, subtitle: Two lines above the picture.
        vocabulary: Tokens; ln of it is what a guess costs, drawn as a reference.
        serial: The serial run's losses, if there was one.
        limit: What the difference may be at most, absolute; None draws none.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style: dict[Any, Any] = {
        "font.family": "DejaVu Sans",
        "font.size": 11,
        "text.color": _INK,
        "axes.edgecolor": _GRID,
        "axes.labelcolor": _MUTED,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": _GRID,
        "xtick.color": _MUTED,
        "ytick.color": _MUTED,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    steps = range(1, len(losses) + 1)
    with pyplot.rc_context(style):
        rows = 1 if serial is None else 2
        figure, axes = pyplot.subplots(
            rows, 1, figsize=(9, 5 if rows == 1 else 6.6), dpi=160, sharex=True, squeeze=False,
            gridspec_kw={"height_ratios": [1] if rows == 1 else [3, 1], "hspace": 0.12},
        )  # fmt: skip
        top = axes[0][0]
        guess = math.log(vocabulary)
        top.axhline(guess, color=_MUTED, linewidth=1, linestyle=(0, (4, 4)))
        top.annotate(
            f"a guess: ln({vocabulary}) = {guess:.2f}", (1, guess), xycoords=("axes fraction", "data"),
            xytext=(0, 5), textcoords="offset points", ha="right", color=_MUTED, fontsize=9,
        )  # fmt: skip
        if serial is not None:
            top.plot(steps, serial, color=_SERIAL, linewidth=5, alpha=0.75, solid_capstyle="round", label="serial")
        top.plot(steps, losses, color=_AXO, linewidth=1.8, solid_capstyle="round", label="Axo")
        tail = sum(losses[-10:]) / len(losses[-10:])
        top.annotate(
            f"{tail:.2f}", (len(losses), tail), xytext=(6, 0), textcoords="offset points",
            va="center", color=_AXO, fontweight="bold",
        )  # fmt: skip
        top.set_ylabel("loss (nats a token)")
        top.set_xlim(1, max(2, len(losses)))
        if serial is not None:
            top.legend(frameon=False, loc="lower left")
            _draw_difference(axes[1][0], steps, losses, serial, limit)
        axes[-1][0].set_xlabel("step")
        figure.text(0.09, 0.965, title, fontsize=15, fontweight="bold", va="top")
        figure.text(0.09, 0.918, subtitle, fontsize=10, color=_MUTED, va="top")
        figure.subplots_adjust(left=0.09, right=0.94, top=0.86, bottom=0.1)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        pyplot.close(figure)


def _draw_difference(below, steps: Sequence[int], losses, serial, limit: float | None) -> None:
    floor = 1e-9  # where two losses are equal, a logarithm needs something to show
    below.plot(steps, [max(floor, abs(a - b)) for a, b in zip(losses, serial, strict=True)], color=_AXO, linewidth=1.2)
    below.set_yscale("log")
    below.set_ylabel("|loss - serial|")
    if limit is not None:
        below.axhline(limit, color="#c43d3d", linewidth=1, linestyle=(0, (4, 4)))
        below.annotate(
            f"limit {limit:.0e}", (1, limit), xycoords=("axes fraction", "data"), xytext=(0, 4),
            textcoords="offset points", ha="right", color="#c43d3d", fontsize=9,
        )  # fmt: skip
