"""The wall clock of ranks that do the same: the slowest one's seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


def slowest(comm: Any, call: Callable[[], object]) -> float:
    """Seconds of one call on the slowest rank of ``comm``, which begin together."""
    comm.barrier()
    start = time.perf_counter()
    call()
    spent = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    return float(comm.all_reduce(spent, "max"))
