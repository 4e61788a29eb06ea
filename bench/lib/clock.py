"""The wall clock of ranks that do the same: the slowest one's seconds; and rows that something else disturbed.

A row of rivals is disturbed where rounds disagree: the middle half of the ratios to the first, or of the first's own
times, is further apart than ``AGREE``. It is measured up to three times; that in which rounds disagree least stands,
whichever rival it favours, and says so where they still do. A verdict leaves disturbed rows out: without them it may
be missed, but not reached: it is not measured then, and a run that goes on measures those rows again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from axo_kernels.tune.timing import Timing

AGREE, TRIES = 1.1, 3  # tensor cores at full load wander by 3%


def undisturbed(measure: Callable[[], list[Timing]], device: torch.device) -> tuple[list[Timing], float | None]:
    """Measure a row, again where it is disturbed; how far its rounds disagree where it still is. On a CPU, whose times
    are nobody's goal, once."""
    tries = [measure()]
    while _apart(tries[-1]) > AGREE and len(tries) < TRIES and device.type == "cuda":
        tries.append(measure())
    best = min(tries, key=_apart)
    return best, _apart(best) if _apart(best) > AGREE and device.type == "cuda" else None


def _apart(timings: list[Timing]) -> float:
    """How far the rounds disagree, at the rival at which they do most."""
    return max(timing.apart for timing in timings)


def slowest(comm: Any, call: Callable[[], object]) -> float:
    """Seconds of one call on the slowest rank of ``comm``, which begin together."""
    comm.barrier()
    start = time.perf_counter()
    call()
    spent = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    return float(comm.all_reduce(spent, "max"))
