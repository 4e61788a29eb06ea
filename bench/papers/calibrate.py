"""Fit a machine's two fractions to measured rows, and say how well they predict the rows that they did not see.

Each row of the papers' weak-scaling table gives a share of peak. Two unknowns explain it here: ``gemm_fraction`` (how
much of the measured GEMM rate products reach in a step) and ``network_fraction`` (how much of the NICs' rate
collectives reach). The machines share one network, so the rows are used as

    frontier, two rows     -> gemm_fraction and network_fraction
    perlmutter, one row    -> gemm_fraction, with frontier's network_fraction
    alps, one row          -> gemm_fraction, with frontier's network_fraction

which leaves 11 rows as predictions. Every row is tabulated once over both fractions (the best grid for each) and fits
interpolate in that table, so that leaving out each row in turn costs nothing more.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import correlation, fmean
from typing import NamedTuple

from axo.grid import Grid
from axo.perf import flops, machine, model, planner, readers
from axo.perf.run_options import OVERLAPS

BATCH = 2**24  # 16.8M tokens
GEMM = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2)
NETWORK = (0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
STEPS = 90  # of the fit between those points
ONE_ROW = ("perlmutter", "alps")


class Row(NamedTuple):
    """One row of the weak-scaling table."""

    machine: str
    gpus: int
    model: str

    def __str__(self) -> str:
        return f"{self.machine} {self.gpus} {self.model}"


CALIBRATION = (
    Row("frontier", 512, "gpt-5b"),
    Row("frontier", 8192, "gpt-80b"),
    Row("perlmutter", 2048, "gpt-20b"),
    Row("alps", 2048, "gpt-20b"),
)


class Fit(NamedTuple):
    """Fractions of the three machines."""

    network: float
    gemm: dict[str, float]


@dataclass(frozen=True)
class Table:
    """Predicted percent of peak of one row over GEMM x NETWORK."""

    values: tuple[tuple[float, ...], ...]

    def at(self, gemm: float, network: float) -> float:
        """Interpolate; outside the table its border counts."""
        i, s = _place(GEMM, gemm)
        j, t = _place(NETWORK, network)
        low = self.values[i][j] * (1 - t) + self.values[i][j + 1] * t
        high = self.values[i + 1][j] * (1 - t) + self.values[i + 1][j + 1] * t
        return low * (1 - s) + high * s


@lru_cache(maxsize=1)
def rows() -> dict[Row, float]:
    """Return the 15 rows of the weak-scaling table with their measured percent of peak."""
    weak = readers.papers()["democratizing_weak"]
    return {
        Row(name, gpus, f"gpt-{entry[0].lower()}"): entry[2]
        for name, table in weak.items()
        for gpus, entry in table.items()
    }


def request(row: Row, on: machine.Machine | None = None, *, overlap: Iterable[str] = OVERLAPS) -> planner.Request:
    """Return what the papers ran: 16.8M tokens, checkpointing, every overlap, no cache of gathered weights."""
    return planner.Request(
        readers.read(row.model),
        on or machine.load(row.machine),
        row.gpus,
        BATCH,
        overlap=frozenset(overlap),
        gather="drop",
    )


def tabulate(row: Row) -> Table:
    """Predict one row over both fractions, on the best grid for each pair."""
    asked = request(row)
    candidates = [c for c in (planner.consider(asked, grid) for grid in Grid.all(row.gpus)) if not c.reason]
    near: dict[Grid, planner.Candidate] = {}
    for gemm, network in itertools.product((0.4, 0.9), (0.3, NETWORK[-1])):
        here = replace(asked.machine, gemm_fraction=gemm, network_fraction=network)
        timed = sorted(candidates, key=lambda c: model.predict(asked.workload, c.grid, here, c.run).total)
        near.update({candidate.grid: candidate for candidate in timed[:4]})
    work = (
        100
        * flops.step_flops(asked.workload, BATCH, recompute=True, full_attention=True)
        / (row.gpus * asked.machine.peak_tflops * 1e12)
    )

    def percent(gemm: float, network: float) -> float:
        here = replace(asked.machine, gemm_fraction=gemm, network_fraction=network)
        return work / min(model.predict(asked.workload, c.grid, here, c.run).total for c in near.values())

    return Table(tuple(tuple(percent(gemm, network) for network in NETWORK) for gemm in GEMM))


def fit(tables: dict[Row, Table], seen: Iterable[Row]) -> Fit:
    """Fit the fractions to the rows ``seen`` by least squares of the relative error.

    Raises:
        ValueError: A machine has no row, or frontier fewer than two.
    """
    by_machine: dict[str, list[Row]] = {}
    for row in seen:
        by_machine.setdefault(row.machine, []).append(row)
    for name, least in (("frontier", 2), *((name, 1) for name in ONE_ROW)):
        if len(by_machine.get(name, [])) < least:
            raise ValueError(f"calibrate: {name} wants at least {least} row(s), got {len(by_machine.get(name, []))}")

    network, gemm = _fit_two(tables, by_machine["frontier"])
    return Fit(network, {"frontier": gemm, **{n: _fit_one(tables, by_machine[n], network) for n in ONE_ROW}})


def _fit_two(tables: dict[Row, Table], seen: list[Row]) -> tuple[float, float]:
    """Return (network, gemm)."""
    pairs = itertools.product(_points(NETWORK), _points(GEMM))
    return min(pairs, key=lambda pair: _off(tables, seen, pair[1], pair[0]))


def _fit_one(tables: dict[Row, Table], seen: list[Row], network: float) -> float:
    return min(_points(GEMM), key=lambda gemm: _off(tables, seen, gemm, network))


def _off(tables: dict[Row, Table], seen: list[Row], gemm: float, network: float) -> float:
    measured = rows()
    return sum((tables[row].at(gemm, network) / measured[row] - 1) ** 2 for row in seen)


def _points(border: Sequence[float]) -> list[float]:
    return [border[0] + (border[-1] - border[0]) * i / STEPS for i in range(STEPS + 1)]


def errors(tables: dict[Row, Table], fitted: Fit, which: Iterable[Row]) -> dict[Row, float]:
    """Return the relative errors (predicted / measured - 1) of rows under a fit."""
    measured = rows()
    return {row: tables[row].at(fitted.gemm[row.machine], fitted.network) / measured[row] - 1 for row in which}


def leave_one_out(tables: dict[Row, Table]) -> dict[Row, float]:
    """Return the relative error of each row under the fit to the other 14."""
    found = {}
    for row in tables:
        found.update(errors(tables, fit(tables, [other for other in tables if other != row]), [row]))
    return found


def null_errors(which: Iterable[Row]) -> dict[Row, float]:
    """Return the relative errors of one share of peak for each machine: the mean of its calibration rows."""
    measured = rows()
    share = {}
    for name in ("frontier", *ONE_ROW):
        seen = [measured[row] for row in CALIBRATION if row.machine == name]
        share[name] = sum(seen) / len(seen)
    return {row: share[row.machine] / measured[row] - 1 for row in which}


def fit_gemm(tables: dict[Row, Table], network: float) -> Fit:
    """Fit only the share of products, on the calibration rows, with a given ``network``."""
    return Fit(
        network,
        {
            name: _fit_one(tables, [row for row in CALIBRATION if row.machine == name], network)
            for name in ("frontier", *ONE_ROW)
        },
    )


def mean_error(values: Iterable[float]) -> float:
    """Return the mean of absolute values."""
    return fmean(map(abs, values))


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the rank correlation; equal values share their mean rank.

    Raises:
        ValueError: Lengths differ or are below 2.
    """
    if len(first) != len(second) or len(first) < 2:
        raise ValueError(f"spearman: {len(first)} and {len(second)} values; two equal lengths of at least 2 are wanted")
    varies = len({*first}) > 1 and len({*second}) > 1
    return correlation(_ranks(first), _ranks(second)) if varies else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum(o < v for o in values) + (sum(o == v for o in values) - 1) / 2 for v in values]


def _place(points: Sequence[float], value: float) -> tuple[int, float]:
    """Return the cell of ``value`` between ``points`` and its place in it, 0 to 1."""
    i = min(max(0, bisect.bisect_left(points, value) - 1), len(points) - 2)
    return i, min(1.0, max(0.0, (value - points[i]) / (points[i + 1] - points[i])))
