"""The picture of a run: its loss over steps; with a serial run, that curve behind it and the difference below."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_MUTED, _AXO, _SERIAL, _LIMIT = "#6b7785", "#1668a8", "#f0a03c", "#c43d3d"


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
    from axo.perf.plots import new_figure  # only here: a run needs it once it has trained

    steps = range(1, len(losses) + 1)
    figure, top, *below = new_figure(9, 5 if serial is None else 6.6, (1,) if serial is None else (3, 1))
    guess = math.log(vocabulary)
    _draw_line(top, guess, _MUTED, f"a guess: ln({vocabulary}) = {guess:.2f}")
    if serial is not None:
        top.plot(steps, serial, color=_SERIAL, linewidth=5, alpha=0.75, solid_capstyle="round", label="serial")
    top.plot(steps, losses, color=_AXO, linewidth=1.8, solid_capstyle="round", label="Axo")
    tail = sum(losses[-10:]) / len(losses[-10:])
    top.annotate(
        f"{tail:.2f}", (len(losses), tail), xytext=(6, 0), textcoords="offset points",
        va="center", color=_AXO, fontweight="bold",
    )  # fmt: skip
    top.set(ylabel="loss (nats a token)", xlim=(1, max(2, len(losses))))
    if serial is not None:
        top.legend(frameon=False, loc="lower left")
        floor = 1e-9  # where two losses are equal, a logarithm needs something to show
        differences = [max(floor, abs(a - b)) for a, b in zip(losses, serial, strict=True)]
        below[0].plot(steps, differences, color=_AXO, linewidth=1.2)
        below[0].set(yscale="log", ylabel="|loss - serial|")
        if limit is not None:
            _draw_line(below[0], limit, _LIMIT, f"limit {limit:.0e}")
    figure.axes[-1].set_xlabel("step")
    figure.suptitle(title, x=0.01, ha="left", fontsize=15, fontweight="bold")
    top.set_title(subtitle, loc="left", fontsize=10, color=_MUTED)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # a link there is not followed
    figure.savefig(path)


def _draw_line(axes: Any, height: float, color: str, words: str) -> None:
    """A dashed line across, with its words at the right end."""
    axes.axhline(height, color=color, linewidth=1, linestyle=(0, (4, 4)))
    axes.annotate(
        words, (1, height), xycoords=("axes fraction", "data"), xytext=(0, 5),
        textcoords="offset points", ha="right", color=color, fontsize=9,
    )  # fmt: skip
