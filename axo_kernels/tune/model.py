"""Tune all products of a model at once; what ``axo tune`` runs.

The command line belongs to the caller: this returns rows and takes a function that is told of the progress.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from axo_kernels.tune.model_shapes import layers, parse_grid
from axo_kernels.tune.tuner import Tuner


@dataclass(frozen=True)
class Row:
    """One product: what torch does by default, and what was chosen."""

    layer: str
    product: str
    torch_seconds: float
    chosen: str
    chosen_seconds: float

    @property
    def gain(self) -> float:
        """How many times faster than torch's own way."""
        return self.torch_seconds / self.chosen_seconds if self.chosen_seconds else 1.0


def tune_model(
    model: str,
    grid: str = "1x1x1",
    *,
    rows: int = 2048,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    shrink: int = 1,
    tuner: Tuner | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Iterator[Row]:
    """Measure each product of a model's block once and write the cache; yields one row a product.

    Args:
        model: ``"gpt-5b"`` to ``"gpt-640b"``.
        grid: ``"GxxGyxGz"`` or with the data axis.
        rows: Tokens of one data-parallel group.
        dtype, device: Of the operands.
        shrink: Divide the hidden size (for machines without a GPU).
        tuner: None: a new one that writes the user's cache.
        progress: Told (done, total, name) while candidates are measured; None draws a line on a terminal.
    """
    place = torch.device(device)
    if tuner is None:
        tuner = Tuner("first-step", progress=progress or _draw)
    cut = layers(model, parse_grid(grid), rows, shrink)
    for layer in cut:
        for what, product in layer.products(dtype).items():
            choice = tuner.choose(product, place)
            yield Row(f"{layer.name} {what}", product.name, choice.baseline, choice.name, choice.seconds)
        # torch stores [out, in]; what another storage would gain, with these choices
        best = tuner.layer(layer.m, layer.n, layer.k, dtype, place)
        stored = "[in, out]" if best.transposed else "[out, in]"
        yield Row(f"{layer.name} weight", "all three", best.baseline, f"stored {stored}", best.seconds)


def as_table(rows: list[Row]) -> str:
    """Columns in plain text."""
    lines = [("layer", "product", "torch ms", "chosen", "ms", "gain")]
    for row in rows:
        times = f"{row.torch_seconds * 1e3:.3f}", row.chosen, f"{row.chosen_seconds * 1e3:.3f}", f"{row.gain:.2f}"
        lines.append((row.layer, row.product, *times))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _draw(done: int, total: int, name: str) -> None:
    if not sys.stderr.isatty():
        return
    filled = 20 * done // max(1, total)
    sys.stderr.write(f"\r[{'#' * filled}{'.' * (20 - filled)}] {name:<60}")
    if done == total:
        sys.stderr.write("\r" + " " * 84 + "\r")
    sys.stderr.flush()
