"""Fit the fractions of the papers' machines to four measured rows.

Each row of the papers' weak-scaling table gives a share of peak. Two unknowns explain it here: ``gemm_fraction`` (how
much of the measured GEMM rate products reach in a step) and ``network_fraction`` (how much of the NICs' rate
collectives reach). The machines share one network, so the rows are used as

    frontier, two rows     -> gemm_fraction and network_fraction
    perlmutter, one row    -> gemm_fraction, with frontier's network_fraction
    alps, one row          -> gemm_fraction, with frontier's network_fraction

which leaves 11 rows as predictions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from statistics import correlation, fmean
from typing import NamedTuple

from axo.grid import Grid
from axo.perf import flops, machine, model, planner, readers
from axo.perf.run_options import OVERLAPS

BATCH = 2**24  # 16.8M tokens


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


@cache
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


@cache
def _near(row: Row) -> tuple[planner.Request, tuple[planner.Candidate, ...]]:
    """What a row asks for, and the grids of which one is the best for any fractions in reach."""
    asked = request(row)
    candidates = [c for c in (planner.consider(asked, grid) for grid in Grid.all(row.gpus)) if not c.reason]
    near: dict[Grid, planner.Candidate] = {}
    for gemm, network in itertools.product((0.4, 0.9), (0.3, 1.0)):
        here = replace(asked.machine, gemm_fraction=gemm, network_fraction=network)
        timed = sorted(candidates, key=lambda c: model.predict(asked.workload, c.grid, here, c.run).total)
        near.update({candidate.grid: candidate for candidate in timed[:4]})
    return asked, tuple(near.values())


def error(row: Row, gemm: float, network: float) -> float:
    """Predicted over measured percent of peak, less 1, on the best grid for these fractions."""
    asked, near = _near(row)
    here = replace(asked.machine, gemm_fraction=gemm, network_fraction=network)
    seconds = min(model.predict(asked.workload, c.grid, here, c.run).total for c in near)
    work = flops.step_flops(asked.workload, BATCH, recompute=True, full_attention=True)
    return 100 * work / (row.gpus * asked.machine.peak_tflops * 1e12) / seconds / rows()[row] - 1


def fit() -> dict[str, tuple[float, float]]:
    """(gemm_fraction, network_fraction) of each machine, by least squares of the errors of its rows.

    The network's is frontier's. Two rows identify it poorly.
    """
    seen = {name: [row for row in CALIBRATION if row.machine == name] for name in ("frontier", "perlmutter", "alps")}

    def squares(rows: Sequence[Row], gemm: float, network: float) -> float:
        return sum(error(row, gemm, network) ** 2 for row in rows)

    def gemm_of(rows: Sequence[Row], network: float) -> float:
        return _least(lambda gemm: squares(rows, gemm, network))

    first = seen["frontier"]
    network = _least(lambda share: squares(first, gemm_of(first, share), share))
    return {name: (gemm_of(rows, network), network) for name, rows in seen.items()}


def _least(function: Callable[[float], float]) -> float:
    """Where between 0.3 and 1.1 it is least: of nine points, then of ever closer ones around the best."""
    best, step = 0.7, 0.1
    while step > 1e-3:
        best = min((best + step * n for n in range(-4, 5)), key=function)
        step /= 4
    return best


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
