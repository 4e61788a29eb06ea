"""Memory that collectives use where it lies: of the ranks of one host, or a window of a GPU's library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch

from axo.comm.communicator import Communicator
from axo.comm.connect import Communicators
from axo.comm.extension import _C
from axo.comm.memory import DTYPES, check_integer


def empty_shared(
    shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    comms: Communicators | Communicator | None = None,
) -> torch.Tensor:
    """An uninitialised tensor in memory that the ranks' collectives use where it lies, without staging.

    On the CPU it is memory of this process that the ranks of the host can share. On a GPU it comes from NCCL's own
    allocator (``comms`` says whose), and is a window of every communicator of ``comms``: then this call is collective,
    with equal sizes on all ranks. Worth it for large buffers that are reduced or gathered again and again. A view of
    one is as good. The memory lives as long as a tensor of it; a process that is forked later does not have it and
    must not touch it. On a GPU all ranks drop their tensors in one order, and before they make the next: NCCL gives a
    window the first place that is free, and it must be the same on all ranks. Dropping one waits for the device.

    Raises:
        ValueError: A GPU without ``comms``, or another device than theirs; a shape that is none; a dtype that Axo does
            not move. axo.Error: No room, or the library is too old for it.
    """
    shape = tuple(shape)
    for length in shape:
        check_integer("empty_shared", "shape", length, bits=64)
    if any(length < 0 for length in shape):
        raise ValueError(f"empty_shared: shape {shape} has a negative size")
    if dtype not in DTYPES:
        raise ValueError(f"empty_shared: dtype {dtype} is not supported; view it as one that is, such as torch.uint8")
    size, place = math.prod(shape) * dtype.itemsize, torch.device(device)
    if size >= 2**63:
        raise ValueError(f"empty_shared: shape {shape} is more memory than can be addressed")
    if place.type == "cpu" and size > 0:
        return torch.frombuffer(shared_block(size), dtype=dtype).view(shape)
    if place.type == "cpu":
        return torch.empty(shape, dtype=dtype)
    if comms is None or comms.device.type != place.type or place.index not in (None, comms.device.index):
        raise ValueError(
            f"empty_shared: device={str(place)!r} needs comms, the communicators of that device that will use it"
        )
    cores = [cast("_C.DeviceCommunicator", line._core) for line in comms.communicators if line.size > 1]
    if not cores or size == 0:
        return torch.empty(shape, dtype=dtype, device=comms.device)
    return torch.from_dlpack(_C.device_memory(cores, size, str(comms.device))).view(dtype).view(shape)


def shared_block(size: int) -> Any:
    """``size`` bytes of such memory as a buffer; it is free when nobody refers to it."""
    return _C.SharedMemory(size)
