"""The picture of a run: its loss over steps; with a serial run, that curve behind it and the difference below."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MUTED, _AXO, _SERIAL = "#6b7785", "#1668a8", "#f0a03c"
_DASHES = (0, (4, 4))


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
    top.axhline(guess, color=_MUTED, linewidth=1, linestyle=_DASHES)
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
    top.set(ylabel="loss (nats a token)", xlim=(1, max(2, len(losses))))
    if serial is not None:
        top.legend(frameon=False, loc="lower left")
        _draw_difference(below[0], steps, losses, serial, limit)
    figure.axes[-1].set_xlabel("step")
    figure.suptitle(title, x=0.01, ha="left", fontsize=15, fontweight="bold")
    top.set_title(subtitle, loc="left", fontsize=10, color=_MUTED)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_difference(
    below: Axes, steps: Sequence[int], losses: Sequence[float], serial: Sequence[float], limit: float | None
) -> None:
    floor = 1e-9  # where two losses are equal, a logarithm needs something to show
    below.plot(steps, [max(floor, abs(a - b)) for a, b in zip(losses, serial, strict=True)], color=_AXO, linewidth=1.2)
    below.set(yscale="log", ylabel="|loss - serial|")
    if limit is not None:
        below.axhline(limit, color="#c43d3d", linewidth=1, linestyle=_DASHES)
        below.annotate(
            f"limit {limit:.0e}", (1, limit), xycoords=("axes fraction", "data"), xytext=(0, 4),
            textcoords="offset points", ha="right", color="#c43d3d", fontsize=9,
        )  # fmt: skip
