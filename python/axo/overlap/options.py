"""Overlap: which communication hides behind which product, and what is kept; an option of ``axo.parallelize``.

    OAR  all_reduce       the all-reduce of dI runs behind the dW product
    ORS  reduce_scatter   the reduce-scatter of dW runs behind the layers before; awaited at the end of backward
    OAG  all_gather       the weights of the next block are gathered while this one computes
    cache gather_cache    gathered weights are kept from forward to recomputation and backward

Sources: section "Overlapping communication with computation" of "Democratizing AI" (OAR, ORS, OAG) and its cache of
gathered weights. Not here: anything that runs.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

BUCKET_BYTES = 25 << 20
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(_UNITS)})")


@dataclass(frozen=True)
class Overlap:
    """How a model overlaps communication and computation. Gradients and losses do not depend on it.

    Args:
        all_reduce: OAR.
        reduce_scatter: ORS. Off: each layer waits for its own.
        all_gather: OAG. Needs the order of the first pass, which is recorded; so it begins with the second.
        gather_cache: ``"all"``, ``"none"``, a number of layers, or bytes such as ``"512MiB"``: gathered weights that
            are kept until backward has used them. Weights gathered for N layers a step: N with all, 2N with none,
            2N - K with K layers, with activation checkpointing and without.
        bucket_bytes: Gradients are reduced over the data axis in buckets of this size; 0: each by itself.

    Raises:
        ValueError: An option is out of range.
    """

    all_reduce: bool = True
    reduce_scatter: bool = True
    all_gather: bool = True
    gather_cache: str | int = "all"
    bucket_bytes: int = BUCKET_BYTES

    def __post_init__(self) -> None:
        cache_limits(self.gather_cache)
        for name in ("all_reduce", "reduce_scatter", "all_gather"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"Overlap: {name}={getattr(self, name)!r} is not a switch; use True or False")
        if self.bucket_bytes < 0:
            raise ValueError(f"Overlap: bucket_bytes={self.bucket_bytes} is negative; use 0 for no buckets")


def cache_limits(gather_cache: str | int) -> tuple[float, float]:
    """(layers, bytes) that the cache may hold.

    Raises:
        ValueError: Not an option of the cache.
    """
    if gather_cache == "all":
        return math.inf, math.inf
    if gather_cache == "none":
        return 0, 0
    if isinstance(gather_cache, str) and (size := _SIZE.fullmatch(gather_cache)):
        return math.inf, float(size[1]) * _UNITS[size[2]]
    if isinstance(gather_cache, int) and not isinstance(gather_cache, bool) and gather_cache >= 0:
        return gather_cache, math.inf
    raise ValueError(
        f"gather_cache={gather_cache!r} is not known; use 'all', 'none', a number of layers such as 8, or bytes such as"
        " '512MiB'"
    )
