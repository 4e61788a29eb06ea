"""Pictures of measurements: panels on one sheet, written as a PNG; nothing is shown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def panels(path: Path, size: tuple[float, float], rows: int = 1, columns: int = 1, **options: Any) -> Iterator[Any]:
    """Yield rows x columns panels to draw on, the first row first; the sheet is written when the block ends.

    Args:
        path: The PNG; its folder is made.
        size: Of the sheet, in inches.
        options: As of ``Figure.subplots``.
    """
    from matplotlib.figure import Figure

    sheet = Figure(figsize=size, layout="constrained")
    yield sheet.subplots(rows, columns, squeeze=False, **options).flatten()
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.savefig(path, dpi=120)
