"""Two mechanisms that could explain what the papers' text leaves open, each fitted on one named row.

    wide products   h = 16384 runs at 22% of peak whatever the scale: products of that width reach a smaller share
    slow rings      ZeRO-3 collapses on 1,024 GPUs: each hop of a ring between nodes takes longer than NCCL's constant

A mechanism holds if it brings rows that it was not fitted on nearer and leaves right what was right without it.
Neither is part of the model: see the note of the group that ``axo reproduce papers`` prints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

from axo.grid import Grid
from axo.perf import machine, planner, readers
from axo.perf.machine import Machine
from axo.perf.planner import DAY, GridPlan, Request

from . import calibrate
from .calibrate import BATCH, Row

TOKENS = 2e12
MONTH, YEAR = 30.44 * DAY, 365.25 * DAY
ROUNDS = 14  # halvings of the interval that a fit searches
WIDE = Row("frontier", 512, "gpt-640b")  # the row that wide products are fitted on
RINGS = 1024  # the ZeRO-3 row that slow rings are fitted on


def _made(row: Row, on: Machine) -> GridPlan:
    return planner.plan(calibrate.request(row, on))


def _solved(low: float, high: float, too_low: Callable[[float], bool]) -> float:
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if too_low(middle) else (low, middle)
    return (low + high) / 2


@cache
def wide_products() -> float:
    """Return the share of frontier's ``gemm_fraction`` that products of h = 16384 reach, from 640B on 512 GCDs."""
    measured = readers.papers()["democratizing_text"]["years_640B_512"] * YEAR
    steps = TOKENS / BATCH
    return _solved(0.1, 1.0, lambda share: steps * _made(WIDE, slowed(share)).best.seconds > measured)


def slowed(share: float) -> Machine:
    """Return frontier with products at ``share`` of what they reach."""
    on = machine.load("frontier")
    return replace(on, gemm_fraction=on.gemm_fraction * share)


def zero_3(gpus: int, latency_us: float = 0.0) -> float:
    """Return the predicted % of peak of ZeRO-3 on perlmutter (A 4D Hybrid Algorithm, Table III); 0: NCCL's latency."""
    on = machine.load("perlmutter")
    on = replace(on, latency_inter_us=latency_us or on.latency_inter_us)
    size = readers.papers()["axonn4d_util_pct"][gpus][0]
    asked = Request(readers.read(f"gpt-{size.lower()}"), on, gpus, 2**22, gather="drop")
    found = planner.consider(asked, Grid(z=gpus))
    return GridPlan(asked, [found]).percent_of_peak(found, full_attention=True)


@cache
def slow_rings() -> float:
    """Return the microseconds of a hop between nodes, from ZeRO-3's row on 1,024 GPUs."""
    measured = readers.papers()["axonn4d_util_pct"][RINGS][2]
    return _solved(14.0, 600.0, lambda latency: zero_3(RINGS, latency) > measured)


def rows() -> Iterator[tuple[str, float, float, float, str, str]]:
    """Yield (what, paper, without the mechanism, with it, unit, what it was fitted on where that is this row)."""
    text = readers.papers()["democratizing_text"]
    plain, wide = machine.load("frontier"), slowed(wide_products())
    steps = TOKENS / BATCH
    years = [steps * _made(WIDE, on).best.seconds / YEAR for on in (plain, wide)]
    yield "wide products: 640B on 512 GCDs", text["years_640B_512"], *years, "years", "calibrated"
    months = [steps * _made(Row("frontier", 8192, "gpt-640b"), on).best.seconds / MONTH for on in (plain, wide)]
    yield "wide products: 640B on 8192 GCDs", text["months_640B_8192"], *months, "months", ""
    large = Row("frontier", 32768, "gpt-320b")
    made = [_made(large, on) for on in (plain, wide)]
    usual, slow = (one.percent_of_peak(one.best, full_attention=True) for one in made)
    yield "wide products: 320B on 32768 GCDs", calibrate.rows()[large], usual, slow, "% of peak", ""
    seconds = [one.best.time.compute for one in made if one.best.time is not None]
    yield "wide products: 320B, computation", text["blas_320B_compute_s"][1], *seconds, "s", ""
    for gpus, row in readers.papers()["axonn4d_util_pct"].items():
        fitted = "calibrated" if gpus == RINGS else ""
        yield f"slow rings: ZeRO-3 on {gpus}", row[2], zero_3(gpus), zero_3(gpus, slow_rings()), "% of peak", fitted
