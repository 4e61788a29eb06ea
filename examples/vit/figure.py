"""The picture: accuracy by epoch, a line a setting; figure 7 of the Tesseract paper with other images."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

from examples.vit.training import Epoch

_INK, _MUTED, _GRID = "#1f2933", "#6b7785", "#e4e8ec"
_LINES = (("#a9cbe6", 7.0, "-"), ("#1668a8", 3.6, "-"), ("#e08a1e", 1.8, "-"), ("#1f2933", 1.2, ":"))


def draw(path: Path, runs: dict[str, list[list[Epoch]]], *, subtitle: str) -> None:
    """Draw a PNG: the mean over seeds, on training and on test images.

    Args:
        path: Where.
        runs: By setting: the epochs of each seed. Lines get thinner, since they lie on each other.
        subtitle: The line below the title.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context({"font.family": "DejaVu Sans", "font.size": 11, "text.color": _INK}):
        figure, panels = pyplot.subplots(1, 2, figsize=(10, 4.6), dpi=160, sharey=True)
        for panel, field, title in zip(
            panels, ("train_accuracy", "test_accuracy"), ("training images", "test images"), strict=True
        ):
            for (name, seeds), (color, width, style) in zip(runs.items(), _LINES, strict=False):
                values = [100 * mean(getattr(each, field) for each in epoch) for epoch in zip(*seeds, strict=True)]
                panel.plot(range(1, len(values) + 1), values, style, color=color, linewidth=width, label=name)
            panel.set_title(title, loc="left", fontsize=12, color=_INK)
            panel.set_xlabel("epoch", color=_MUTED)
            panel.grid(color=_GRID)
            panel.spines[["top", "right"]].set_visible(False)
        panels[0].set_ylabel("accuracy, %", color=_MUTED)
        panels[0].legend(frameon=False, loc="lower right")
        figure.text(
            0.07, 0.965, "One Vision Transformer, four ways to distribute it", fontsize=15, fontweight="bold", va="top"
        )
        figure.text(0.07, 0.905, subtitle, fontsize=10, color=_MUTED, va="top")
        figure.subplots_adjust(left=0.07, right=0.98, top=0.78, bottom=0.13, wspace=0.06)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        pyplot.close(figure)
