"""CPU ranks on several hosts: shared memory inside each host, torch's Gloo between them.

Two ranks are on one host when hostname, boot id, network namespace and user are equal. ``simulate`` lets ranks of one
machine play several hosts, for tests and benches.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import Store

from axo.comm.extension import _C
from axo.comm.rendezvous import Meeting
from axo.errors import Error

_GLOO_MEETS_S = 60.0


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


def core_between_hosts(meeting: Meeting, round_: str, identities: list[str], name: str) -> _C.Communicator:
    """The core's communicator of ranks that met in ``round_``, on the hosts ``identities``. Collective.

    Raises:
        Error: The hosts cannot reach each other.
    """
    rank, size, store = meeting.rank, meeting.size, meeting.store
    limit = timedelta(seconds=min(meeting.left(), _GLOO_MEETS_S))
    try:
        gloo = _gloo(dist.PrefixStore(f"{round_}/gloo", store), rank, size, limit, identities)
    except RuntimeError as error:
        names = dict.fromkeys(identity.partition(" ")[0] for identity in identities)
        raise Error(
            f"{meeting.who}: the hosts {', '.join(names)} do not reach each other through Gloo; GLOO_SOCKET_IFNAME"
            f" names the interface to use ({error})"
        ) from None
    return _C.create_hosts_communicator(store, round_, gloo, identities, name, int(meeting.left() * 1000))


def _gloo(store: Store, rank: int, size: int, timeout: timedelta, identities: list[str]) -> dist.ProcessGroup:
    """A Gloo group of these ranks. Simulated hosts of one machine use loopback."""
    group: Any = dist.ProcessGroupGloo
    machines = {identity.partition(" ")[2] for identity in identities}
    device = group.create_device(hostname="127.0.0.1") if len(machines) == 1 else group.create_default_device()
    options = group._Options()
    options._devices = [device]
    options._timeout = timeout
    return group(store, rank, size, options)
