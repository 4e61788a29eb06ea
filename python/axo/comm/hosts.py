"""What serves CPU ranks, by the hosts that they are on.

one host         shared memory
several hosts    shared memory inside each host, TCP between them (axo.comm.wire)

Two ranks are on one host when hostname, boot id, network namespace and user are equal. ``simulate`` lets ranks of one
machine play several hosts, for tests and benches.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence

from torch.distributed import Store

from axo.comm import wire
from axo.comm.extension import _C
from axo.comm.flight import arm
from axo.comm.rendezvous import TimeLeft, gather, give_up, given_up, next_round
from axo.errors import Aborted, PeerLost, Timeout


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


def create_core(
    store: Store,
    key: str,
    rank: int,
    size: int,
    name: str,
    seconds: float,
    members: Sequence[int] = (),
    *,
    meeting: float,
) -> _C.Communicator:
    """The core's communicator of the CPU ranks that meet under ``key`` in the store. Collective.

    ``seconds``: the time limit of its operations; ``meeting``: that of this call.
    ``members``: their ranks in the world, where other ranks may have met, or will meet, under the same key.

    Raises:
        Timeout: Ranks have not come; names them. PeerLost: One came and died, or gave up. Error: The hosts cannot reach
            each other.
    """
    arm()
    core = _met(store, key, rank, size, name, TimeLeft(meeting), members)
    core.set_timeout(int(seconds * 1000))
    return core


def _met(
    store: Store, key: str, rank: int, size: int, name: str, left: TimeLeft, members: Sequence[int]
) -> _C.Communicator:
    if size == 1:
        return _C.create_host_communicator(store, key, rank, size, name, int(left() * 1000))
    # How many times these ranks have met here: a store outlives its groups, and a later one may have the same name.
    place = f"{key}/hosts/{size}/{zlib.crc32(repr(list(members)).encode()):x}"
    round_ = next_round(store, place, rank)
    who = f"communicator {name!r} (rank {rank} of {size})"
    identities = gather(store, f"{round_}/host", rank, size, left(), who, _C.host_identity())
    try:
        if len(set(identities)) == 1:
            return _C.create_host_communicator(store, round_, rank, size, name, int(left() * 1000))
        return _between_hosts(store, round_, rank, size, name, left, identities)
    except (Aborted, PeerLost, Timeout):
        if (gone := given_up(store, round_, who)) is not None:
            raise gone from None
        raise
    except Exception as error:
        give_up(store, round_, rank, error)
        raise


def _between_hosts(
    store: Store, round_: str, rank: int, size: int, name: str, left: TimeLeft, identities: list[str]
) -> _C.Communicator:
    who = f"communicator {name!r} (rank {rank} of {size})"
    lines = wire.connect(store, round_, rank, size, identities, left, who)
    return _C.create_hosts_communicator(
        store, round_, rank, lines.data, lines.pulse, identities, name, int(left() * 1000)
    )
