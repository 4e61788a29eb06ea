"""Which transport serves a communicator: the one place that decides it, and the device that a rank uses.

cpu     shared memory of one host; of several hosts, with Gloo between them (axo.comm.hosts)
                                        axo.comm.communicator.Communicator
cuda    NCCL or RCCL, over any hosts    axo.comm.device.DeviceCommunicator
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from axo.comm.communicator import Communicator
from axo.comm.device import DeviceCommunicator, DeviceOptions, ask_for_launch_order
from axo.comm.device_choice import check_device
from axo.comm.extension import _C
from axo.comm.hosts import create_core


def resolve_device(device: str | torch.device) -> torch.device:
    """The device with its index, made current: the index given, else LOCAL_RANK, else the current device.

    Raises:
        ValueError: This torch, or this machine, does not have it.
    """
    kind, index = check_device("connect", device)
    if kind == "cpu":
        return torch.device(device)
    count = torch.accelerator.device_count()
    if index is None:
        index = int(os.environ.get("LOCAL_RANK", torch.accelerator.current_device_index()))
        if count == 1:
            index = 0  # the launcher shows each rank its own GPU; two ranks on one are found when they meet
    if index >= count:
        raise ValueError(f"connect: device {index} of {count}; start at most {count} ranks on this machine")
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)


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
    threads: bool = False,
) -> Communicator:
    """The communicator of all ranks that meet under ``key`` in the store. Collective.

    ``seconds``: the time limit of its operations; ``meeting``: that of this call.
    ``threads``: this rank is a thread, and others of this process use GPUs too.
    """
    if device.type == "cpu":
        core = create_core(store, key, rank, size, "world", seconds, meeting=meeting)
        return Communicator(core, name="world", axis="world")
    ask_for_launch_order()
    core_options = options.for_core(int(meeting * 1000), device.index)
    core = _C.create_device_communicator(store, key, rank, size, core_options, threads)
    core.set_timeout(int(seconds * 1000))
    return DeviceCommunicator(core, name="world", axis="world", device=device)
