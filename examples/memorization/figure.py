"""The picture of the study: exact match by bucket, cross-entropy beside Goldfish loss, a bar a width, a dot a seed."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

from examples.memorization.documents import EPOCHS

_INK, _MUTED, _GRID = "#1f2933", "#6b7785", "#e4e8ec"
_SHADES = ("#a9cbe6", "#5b9bd0", "#1668a8", "#0b3a63")


def draw(path: Path, rows: list[dict[str, Any]], *, subtitle: str) -> None:
    """Draw a PNG.

    Args:
        path: Where.
        rows: ``loss``, ``width``, ``seed`` and a share in [0, 1] for each of ``"0 ep"`` ..., as the table has them.
        subtitle: The line below the title.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style: dict[Any, Any] = {
        "font.family": "DejaVu Sans", "font.size": 11, "text.color": _INK, "axes.edgecolor": _GRID,
        "axes.labelcolor": _MUTED, "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True,
        "grid.color": _GRID, "xtick.color": _MUTED, "ytick.color": _MUTED,
        "axes.spines.top": False, "axes.spines.right": False,
    }  # fmt: skip
    losses = list(dict.fromkeys(row["loss"] for row in rows))
    widths = sorted({row["width"] for row in rows})
    bar = 0.8 / len(widths)
    with pyplot.rc_context(style):
        figure, panels = pyplot.subplots(
            1, len(losses), figsize=(5 * len(losses), 4.6), dpi=160, sharey=True, squeeze=False
        )
        for panel, loss in zip(panels[0], losses, strict=True):
            for index, width in enumerate(widths):
                runs = [row for row in rows if row["loss"] == loss and row["width"] == width]
                color = _SHADES[min(index + max(0, 3 - len(widths)), len(_SHADES) - 1)]
                for bucket, epochs in enumerate(EPOCHS):
                    place = bucket + (index - (len(widths) - 1) / 2) * bar
                    values = [100 * row[f"{epochs} ep"] for row in runs]
                    label = f"width {width}" if bucket == 0 else None
                    panel.bar(place, mean(values), 0.9 * bar, color=color, label=label)
                    panel.plot([place] * len(values), values, ".", color=_INK, markersize=3.5, zorder=3, clip_on=False)
            panel.set_title(loss, loc="left", fontsize=12, color=_INK)
            panel.set_xticks(range(len(EPOCHS)), [str(epochs) for epochs in EPOCHS])
            panel.set_xlabel("times that a document was seen")
        panels[0][0].set_ylim(0, 100)
        panels[0][0].set_ylabel("documents repeated exactly, %")
        panels[0][0].legend(frameon=False, loc="upper left")
        figure.text(0.07, 0.965, "What a model repeats word for word", fontsize=15, fontweight="bold", va="top")
        figure.text(0.07, 0.905, subtitle, fontsize=10, color=_MUTED, va="top")
        figure.subplots_adjust(left=0.07, right=0.98, top=0.78, bottom=0.13, wspace=0.06)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        pyplot.close(figure)
