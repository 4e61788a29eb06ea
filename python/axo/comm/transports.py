"""Which transport serves a communicator: the one place that decides it.

cpu     one host: shared memory; several: with TCP between them (axo.comm.wire)    Communicator
cuda    NCCL or RCCL, over any hosts                                               DeviceCommunicator
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from axo.comm import wire
from axo.comm.communicator import Communicator
from axo.comm.device import DeviceCommunicator, DeviceOptions, ask_for_launch_order
from axo.comm.extension import _C
from axo.comm.flight import arm
from axo.comm.rendezvous import Meeting, TimeLeft
from axo.errors import Aborted, PeerLost, Timeout


def alone(name: str, device: torch.device) -> Communicator:
    """The communicator of a single rank, which issues nothing."""
    kind = Communicator if device.type == "cpu" else DeviceCommunicator
    return kind(None, name=name, axis=name, device=device)


def meet(
    store: dist.Store,
    key: str,
    rank: int,
    size: int,
    device: torch.device,
    seconds: float,
    options: DeviceOptions,
    *,
    meeting: float,
) -> Communicator:
    """The communicator of all ranks that meet under ``key`` in the store. Collective.

    ``seconds``: the time limit of its operations; ``meeting``: that of this call.
    """
    if device.type == "cpu":
        core = host_core(store, key, rank, size, "world", seconds, meeting=meeting)
        return Communicator(core, name="world", axis="world")
    ask_for_launch_order()
    core_options = options.for_core(int(meeting * 1000), device.index)
    core = _C.create_device_communicator(store, key, rank, size, core_options)
    core.set_timeout(int(seconds * 1000))
    return DeviceCommunicator(core, name="world", axis="world", device=device)


def host_core(
    store: dist.Store,
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

    ``members``: their ranks in the world, where other ranks may have met, or will meet, under the same key.

    Raises:
        Timeout: Ranks have not come; names them. PeerLost: One came and died, or gave up. Error: The hosts cannot reach
            each other.
    """
    arm()
    who = f"communicator {name!r} (rank {rank} of {size})"
    left = TimeLeft(meeting)
    if size == 1:
        core = _C.create_host_communicator(None, "", 0, 1, name, int(left() * 1000))
        core.set_timeout(int(seconds * 1000))
        return core
    # A store outlives its groups, and a later one may have the same name.
    place = f"{key}/hosts/{size}/{zlib.crc32(repr(list(members)).encode()):x}"
    ranks = Meeting(store, place, rank, size, who, left)
    leads = False  # the ranks of its host: it knows which of them have not come
    try:
        own = _C.Leader()
        told = [text.split("\n") for text in ranks.gather(f"{_C.host_identity()}\n{own.address}")]
        hosts = [host for host, _ in told]
        leads = hosts.index(hosts[rank]) == rank
        neighbours = [address for host, address in told if host == hosts[rank]]
        if len(set(hosts)) == 1:
            core = _C.create_host_communicator(own, neighbours[0], rank, size, name, int(left() * 1000), ranks.lost)
        else:
            lines = wire.connect(ranks, hosts)
            core = _C.create_hosts_communicator(
                own,
                neighbours[0],
                rank,
                lines.data,
                lines.pulse,
                ranks.round,
                hosts,
                name,
                int(left() * 1000),
                ranks.lost,
            )
    except Exception as error:
        if isinstance(error, (Aborted, PeerLost)) or (isinstance(error, Timeout) and not leads):
            ranks.check()  # another rank has said more
        if not isinstance(error, Aborted):
            ranks.give_up(error)
        raise
    core.set_timeout(int(seconds * 1000))
    return core
