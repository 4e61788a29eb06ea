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
    ranks = Meeting(store, rank, size, f"communicator {name!r} (rank {rank} of {size})", TimeLeft(meeting))
    # How many times these ranks have met here: a store outlives its groups, and a later one may have the same name.
    round_ = key if size == 1 else ranks.round(f"{key}/hosts/{size}/{zlib.crc32(repr(list(members)).encode()):x}")
    hosts = ranks.gather(f"{round_}/host", _C.host_identity()) if size > 1 else []
    try:
        if len(set(hosts)) > 1:
            lines, left = wire.connect(ranks, round_, hosts), int(ranks.left() * 1000)
            core = _C.create_hosts_communicator(store, round_, rank, lines.data, lines.pulse, hosts, name, left)
        else:
            core = _C.create_host_communicator(store, round_, rank, size, name, int(ranks.left() * 1000))
    except (Aborted, PeerLost, Timeout):
        if (gone := ranks.given_up(round_)) is not None:
            raise gone from None
        raise
    except Exception as error:
        ranks.give_up(round_, error)
        raise
    core.set_timeout(int(seconds * 1000))
    return core
