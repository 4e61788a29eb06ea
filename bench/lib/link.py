"""Rates and times of links as command lines give them."""

from __future__ import annotations

import argparse
import re

_RATES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def rate(text: str) -> float:
    """Bytes a second: 200M, 1.5G (K, M, G: powers of 1000). For argparse."""
    value = _read(text, _RATES)
    if value is None or not 1 <= value <= 1e15:
        raise argparse.ArgumentTypeError(f"{text!r} is no rate; use bytes a second, such as 200M or 1.5G")
    return value


def seconds(text: str) -> float:
    """A time below a minute: 50us, 2ms. For argparse."""
    value = _read(text, _TIMES)
    if value is None or not 0 < value < 60:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; use one below 60 s, such as 50us or 2ms")
    return value


def _read(text: str, units: dict[str, float]) -> float | None:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]*)", text)
    return float(found[1]) * units[found[2]] if found and found[2] in units else None
