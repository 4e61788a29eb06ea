"""Ranks of one machine that play several hosts, for tests and benches.

Two ranks are on one host when hostname, boot id, network namespace and user are equal.
"""

from __future__ import annotations

import os

from axo.comm.extension import _C


def simulate(ranks_per_host: int, *, rate: float = 0.0, latency: float = 0.0) -> None:
    """Let this rank play one of several hosts, in what it connects from here on. Support for tests and benches.

    Every rank calls it, with the same arguments, before it connects. Simulated hosts of one machine meet over
    the loopback interface, and what leaves one for another takes ``latency + bytes / rate`` a step.

    Args:
        ranks_per_host: Rank r is on "host" r // ranks_per_host; 0: its real host.
        rate: Bytes a second that leave a host, over all its ranks and what they split from one communicator; 0: no
            limit.
        latency: Seconds that each step between hosts takes beside its bytes.

    Raises:
        ValueError: ``ranks_per_host`` is negative, or RANK is not set.
        Error: A rate below 1 or above 1e15, or a latency that is negative or a minute and more.
    """
    rank = os.environ.get("RANK", "")
    if ranks_per_host < 0 or (ranks_per_host > 0 and not rank.isdigit()):
        raise ValueError(f"simulate: ranks_per_host={ranks_per_host}, RANK={rank!r}; use a number of ranks, in a rank")
    _C.simulate_host(f"host{int(rank) // ranks_per_host}" if ranks_per_host else "")
    _C.simulate_link(rate, latency)
