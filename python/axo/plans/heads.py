"""Attention heads over x: who computes which queries, and who holds the keys and values that they attend to.

With H query heads and g groups of keys and values, rank x computes query heads [x H/Gx, (x+1) H/Gx). They attend to
the groups [x g/Gx, (x+1) g/Gx) where Gx divides g. Where g divides Gx, the heads of Gx/g neighbouring ranks attend to
one group. Each of these ranks holds it, and its gradient is the sum of theirs (``Placement.copies``).
"""

from __future__ import annotations

from collections.abc import Callable

from axo.errors import Refused
from axo.placement import check_divides


def kv_copies(
    owner: str,
    what: str,
    groups: int,
    ranks: int,
    fits: Callable[[int], bool] = lambda ranks: True,
    axis: str = "x",
) -> int:
    """How many neighbours along ``axis`` hold the same group of keys and values; 1: each rank has its own.

    ``fits``: whether else a number of ranks would do.

    Raises:
        Refused: The groups neither divide over x nor divide it.
    """
    if groups < ranks and ranks % groups == 0:
        return ranks // groups
    if groups < ranks:
        listed = ", ".join(str(x) for x in range(1, ranks + 1) if (groups % x == 0 or x % groups == 0) and fits(x))
        raise Refused(
            f"{owner}: {what}={groups} neither divides over {axis}={ranks} nor divides it; use a grid with {axis} in"
            f" {{{listed}}}"
        )
    check_divides(owner, what, groups, axis, ranks, fits)
    return 1
