"""Compare the losses of a parallel run with the serial run's, and say it in one line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# fp32: the two runs add in another order. `tiny` at lr 1e-3 then differs by 1e-6 over 120 steps. Chaos grows with the
# rate: at lr 2e-3 two serial runs that only accumulate differently are 4e-4 apart after 120 steps, beyond this limit.
FP32_LIMIT = 1e-4
# bf16 keeps 8 bits of a product's result; the two runs round at other places, so losses differ by about that much.
BF16_RELATIVE_LIMIT = 1e-2


@dataclass(frozen=True)
class Parity:
    """The largest difference of two loss curves against its limit."""

    difference: float
    steps: int
    limit: float
    relative: bool
    precision: str

    @property
    def ok(self) -> bool:
        return self.difference <= self.limit  # NaN is not ok

    def __str__(self) -> str:
        verdict = "ok" if self.ok else "FAILED"
        kind, by = (f" ({self.precision}, relative)", " / serial") if self.relative else ("", "")
        return (
            f"parity{kind}: max |loss - serial|{by} = {self.difference:.1e} "
            f"over {self.steps} steps (limit {_number(self.limit)}): {verdict}"
        )


def compare(losses: Sequence[float], serial: Sequence[float], precision: str) -> Parity:
    """Compare two curves: absolute in fp32, relative to the serial loss in bf16.

    Raises:
        ValueError: The curves are empty or differ in length.
    """
    if not losses or len(losses) != len(serial):
        raise ValueError(f"parity: {len(losses)} and {len(serial)} losses cannot be compared")
    relative = precision != "32-true"
    differences = [abs(a - b) / (abs(b) if relative else 1.0) for a, b in zip(losses, serial, strict=True)]
    worst = math.nan if any(map(math.isnan, differences)) else max(differences)
    return Parity(worst, len(losses), BF16_RELATIVE_LIMIT if relative else FP32_LIMIT, relative, precision)


def _number(value: float) -> str:
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"
