"""Checks of values that users give, with one sentence each: what was wrong, what is right.

    whole_number("plan: gpus", 0, least=1)     plan: gpus=0 is not a whole number of at least 1
    number("clip", "x", above=0)               clip='x' is not a number above 0
    one_of("train: loss", "mes", ["mse"])      train: loss='mes' is not known; did you mean 'mse'?

Each returns the value that it checked. ``what`` names the owner and the argument. What one place alone asks (sizes that
divide, shapes that fit) is checked there.
"""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Iterable
from typing import Any

from axo import files


def whole_number(what: str, value: Any, *, least: int | None = None, most: int | None = None) -> int:
    """A whole number: ``int``, or what stands for one (NumPy's); ``True`` and ``False`` are none.

    Args:
        what: Owner and argument.
        value: The value.
        least: The smallest that is right; None: any.
        most: The largest that is right; None: any.

    Raises:
        ValueError: It is something else, or too small or too large.
    """
    try:
        count = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = None
    if count is None or (least is not None and count < least) or (most is not None and count > most):
        raise ValueError(f"{what}={files.shown(value)} is not a whole number{_range(least, most)}")
    return count


def number(what: str, value: Any, *, above: float | None = None, least: float | None = None) -> float:
    """A finite number.

    Args:
        what: Owner and argument.
        value: The value.
        above: It must be larger than this; None: any.
        least: It must be at least this; None: any.

    Raises:
        ValueError: It is something else, infinite, or too small.
    """
    finite = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not finite or (above is not None and value <= above) or (least is not None and value < least):
        bound = f" above {above}" if above is not None else _range(least, None)
        raise ValueError(f"{what}={files.shown(value)} is not a number{bound}")
    return float(value)


def one_of(what: str, value: Any, allowed: Iterable[Any]) -> Any:
    """One of some values; for a misspelt word the nearest is offered, else all are listed.

    Args:
        what: Owner and argument.
        value: The value.
        allowed: What it may be.

    Raises:
        ValueError: It is none of them.
    """
    allowed = list(allowed)
    if value in allowed:
        return value
    raise ValueError(f"{what}={files.shown(value)} is not known; {nearest(value, allowed)}")


def nearest(value: Any, allowed: Iterable[Any]) -> str:
    """The end of a sentence that refuses ``value``: the one word that was likely meant, else all that are allowed."""
    allowed = list(allowed)
    by_lower = {word.lower(): word for word in allowed if isinstance(word, str)}
    close = difflib.get_close_matches(value.lower(), by_lower, 1) if isinstance(value, str) else []
    if close:
        return f"did you mean {by_lower[close[0]]!r}?"
    return f"use one of {', '.join(map(repr, allowed))}"


def _range(least: float | None, most: float | None) -> str:
    if least is None:
        return "" if most is None else f" of at most {most}"
    return f" of at least {least}" if most is None else f" from {least} to {most}"
