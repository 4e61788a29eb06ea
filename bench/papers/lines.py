"""A reproduction as data: a line for each number of the papers, in groups, and how far off each group is.

It knows neither papers nor models: ``reproduce`` and ``figures`` fill it.
"""

from __future__ import annotations

from dataclasses import dataclass

from .calibrate import mean_error


@dataclass(frozen=True)
class Line:
    """One number of the papers and the prediction.

    Args:
        what: Which number.
        paper: Theirs; a text where they give a range.
        predicted: Ours.
        unit: Of both.
        note: What was assumed; "calibrated" marks a row that the model has seen.
        other: The two numbers are of different experiments, so that there is no error.
    """

    what: str
    paper: float | str
    predicted: float
    unit: str
    note: str = ""
    other: bool = False

    @property
    def error(self) -> float | None:
        """Predicted / paper - 1; None where the paper gives a range."""
        if self.other or not isinstance(self.paper, (int, float)) or not self.paper:
            return None
        return self.predicted / self.paper - 1

    @property
    def calibrated(self) -> bool:
        """Whether the model has seen this number."""
        return "calibrated" in self.note

    @property
    def standing(self) -> str:
        """``"calibrated"``, ``"held out"``, or ``"no error"`` where the paper gives a range or another experiment."""
        if self.calibrated:
            return "calibrated"
        return "no error" if self.error is None else "held out"


@dataclass(frozen=True)
class Bar:
    """One step, cut into products, communication that shows, and what hides behind the products (seconds)."""

    what: str
    products: float
    shown: float
    hidden: float


@dataclass(frozen=True)
class Group:
    """Lines that belong together."""

    title: str
    lines: list[Line]
    note: str = ""


def held_out(lines: list[Line]) -> list[float]:
    """Return the errors of the rows that the model has not seen."""
    return [line.error for line in lines if not line.calibrated and line.error is not None]


@dataclass(frozen=True)
class Summary:
    """One group in the closing table: how many rows have an error, of how many it is held out, and how large it is."""

    title: str
    rows: int
    held_out: int
    mean: float | None
    worst: str


def summaries(found: list[Group]) -> list[Summary]:
    """Return one line for each group: the mean |error| of its held-out rows and the worst of them."""
    lines = []
    for group in found:
        errors = {line.what: line.error for line in group.lines if line.error is not None and not line.calibrated}
        worst = max(errors, key=lambda what: abs(errors[what])) if errors else ""
        mean = mean_error(errors.values()) if errors else None
        said = f"{worst} {100 * errors[worst]:+.0f}%" if errors else "the papers give ranges or plots"
        lines.append(Summary(group.title, len(group.lines), len(errors), mean, said))
    return lines
