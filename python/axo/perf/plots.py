"""Pictures of a step, as PNG bytes. The only file here that needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from axo.perf.chrome_trace import STREAMS, Span
from axo.perf.pipeline_schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Timeline

COLORS = {"compute": "#3b6fb6", "x": "#d1495b", "y": "#edae49", "z": "#2e8b57", "data": "#7b5ea7"}
_PHASES = {"forward": "#3b6fb6", "backward": "#e08a3c", "product": "#5fc3d0", "dI": "#9a9a2e", "dW": "#8c5a44"}
_LEGEND = {colour: phase for phase, colour in _PHASES.items()} | {"": "waiting"}
_LEGEND |= {_PHASES["dI"]: "dI: gradients of inputs", _PHASES["dW"]: "dW: of weights"}
_ACTIONS = {FORWARD: ("#3b6fb6", "#8fb3e0"), BACKWARD: ("#e08a3c", "#f2c08f"), INPUT: ("#5f9e6e", "#a8d3b2"),
            WEIGHT: ("#8c5a44", "#c39a87")}  # fmt: skip
_MOST_BARS = 2000  # drawn one by one


def timeline(spans: list[Span], title: str = "") -> bytes:
    """Return one rank's step as a PNG: a lane for each stream that has something in it, waits hatched; s, or ms."""
    lanes = [stream for stream in STREAMS if any(span.stream == stream for span in spans)]
    first = min((span.start for span in spans), default=0.0)
    seconds = max((span.end for span in spans), default=0.0) - first
    scale, unit = (1, "s") if seconds >= 2 else (1e3, "ms")
    total, named = scale * seconds or 1.0, set[str]()
    figure, axes = new_figure(10, 0.6 * len(lanes) + 1.7)
    for lane, stream in enumerate(lanes):
        bars: dict[str, list[tuple[float, float]]] = {}  # by colour; "": waits
        for span in sorted((span for span in spans if span.stream == stream), key=lambda span: span.start):
            colour = "" if span.waits else _PHASES.get(span.name.rpartition(" ")[2], COLORS.get(stream, "#9aa3ad"))
            bars.setdefault(colour, []).append((scale * (span.start - first), scale * (span.end - span.start)))
        for colour, of_colour in bars.items():
            label = _LEGEND.get(colour) if colour not in named else None
            named.add(colour)
            axes.broken_barh(
                _merge(of_colour, total) if len(spans) > _MOST_BARS else of_colour,
                (lane - 0.4, 0.8),
                facecolors=colour or "none",
                edgecolor="white" if colour else "black",
                hatch=None if colour else "////",
                label=label,
                linewidth=0.3 if len(spans) <= _MOST_BARS else 0,
            )
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set(xlabel=unit, xlim=(0, total))
    axes.set_title(title, fontsize=10, loc="left")
    if named & set(_LEGEND):
        figure.legend(fontsize=8, ncols=6, loc="outside lower center")
    return png(figure)


def _merge(spans: list[tuple[float, float]], total: float) -> list[tuple[float, float]]:
    """Join spans that no pixel separates, and give the others a pixel, so that ten thousand of them draw at once."""
    merged: list[list[float]] = []
    for start, length in spans:
        if merged and start - merged[-1][1] < total / 4000:
            merged[-1][1] = max(merged[-1][1], start + length)
        else:
            merged.append([start, start + length])
    return [(start, max(end - start, total / 2000)) for start, end in merged]


def pipeline_timeline(timeline: Timeline, title: str = "") -> bytes:
    """Return a pipeline's step as a PNG: ranks down, time across, the number of the micro-batch in each action.

    Lighter shades are later stages of the same rank.
    """
    total = timeline.seconds or 1.0
    figure, axes = new_figure(12, 0.5 * timeline.ranks + 1.6)
    axes.grid(False)
    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for one in timeline.ran:
        colour, seconds = _ACTIONS[one.action.kind][one.action.stage >= timeline.ranks], one.end - one.start
        bars.setdefault((one.rank, colour), []).append((one.start, seconds))
        if 12 * 130 / total * seconds > 14:  # pixels, about
            axes.text(
                one.start + seconds / 2, one.rank, str(one.action.microbatch), ha="center", va="center", fontsize=6
            )
    for (rank, colour), of_rank in bars.items():
        axes.broken_barh(of_rank, (rank - 0.45, 0.9), facecolors=colour, edgecolor="white", linewidth=0.4)
    names = {FORWARD: "forward", BACKWARD: "backward", INPUT: "backward: inputs", WEIGHT: "backward: weights"}
    for kind in dict.fromkeys(one.action.kind for one in timeline.ran):
        axes.broken_barh([], (0, 0), facecolors=_ACTIONS[kind][0], label=names[kind])
    axes.set_yticks(range(timeline.ranks), [f"rank {rank}" for rank in range(timeline.ranks)])
    axes.invert_yaxis()
    axes.set(xlabel="s", xlim=(0, total))
    axes.set_title(title, fontsize=10, loc="left")
    axes.legend(fontsize=8, ncols=4, loc="upper right", bbox_to_anchor=(1, 1 + 0.75 / (0.5 * timeline.ranks)))
    return png(figure)


def new_figure(width: float, height: float, rows: Sequence[int] = (1,)) -> tuple[Any, ...]:
    """Return a figure (inches), and its axes one below the other, of these relative heights, over the same x."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    every = figure.subplots(len(rows), sharex=True, squeeze=False, height_ratios=rows)[:, 0]
    for axes in every:
        axes.grid(True, color="#e6eaf0", lw=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, *every


def png(figure: Any) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()
