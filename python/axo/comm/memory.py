"""From what a caller passes (a torch tensor, a NumPy array, anything with DLPack) to memory that the core can use.

The core moves contiguous memory of a known dtype, on the host or on the communicator's device. A tensor that is not
contiguous travels through a contiguous copy and is copied back when its operation has been waited for; the values are
exact either way. It checks; it does not move.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

import numpy as np
import torch

from axo.comm.extension import _C

if TYPE_CHECKING:
    from axo.comm.connect import Communicators
    from axo.comm.device import DeviceCommunicator

# The codes of the core, by torch's dtype and by the name of the operation (csrc/base/types.h).
DTYPES: dict[torch.dtype, int] = {getattr(torch, name): code for code, name in enumerate(_C.DTYPES)}
OPS: dict[str, int] = {name: code for code, name in enumerate(_C.OPS)}

_CPU = torch.device("cpu")
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def as_tensor(array: Any, what: str, device: torch.device = _CPU) -> torch.Tensor:
    """The torch tensor that shares memory with ``array``, checked: on ``device``, dense, of a dtype that Axo moves.

    Raises:
        TypeError: Not an array. ValueError: An array that this communicator cannot move.
    """
    if isinstance(array, torch.Tensor):
        tensor = array
        if type(array) not in _PLAIN and array.device == device and array.numel() > 0 and array.data_ptr() == 0:
            kind = type(array).__name__
            raise ValueError(f"{what}: {kind} has no memory of its own; pass the tensor inside it (.to_local())")
    elif isinstance(array, np.ndarray):
        if not array.flags.writeable:
            raise ValueError(f"{what}: the NumPy array is read-only; pass a copy")
        try:
            tensor = torch.from_numpy(array)
        except (TypeError, ValueError) as error:  # a negative stride, another byte order, a dtype that torch has not
            raise type(error)(f"{what}: torch cannot view the NumPy array, pass a plain copy: {error}") from None
    elif hasattr(array, "__dlpack__"):
        try:
            tensor = torch.from_dlpack(array)
        except (AttributeError, BufferError, RuntimeError) as error:
            raise TypeError(f"{what}: torch cannot read the DLPack of {type(array).__name__}: {error}") from None
    else:
        raise TypeError(f"{what}: {type(array).__name__} is not a tensor; pass a torch tensor, a NumPy or DLPack array")
    if tensor.device != device:
        moves, hint = ("host memory", ".cpu()") if device.type == "cpu" else (f"memory of {device}", f".to('{device}')")
        raise ValueError(f"{what}: the tensor is on {tensor.device}; this communicator moves {moves}, use {hint}")
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{what}: dtype {tensor.dtype} is not supported; view it as one that is, such as torch.uint8")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{what}: layout {tensor.layout} is not supported; use .to_dense()")
    return tensor


def like(result: torch.Tensor, array: Any) -> Any:
    """``result`` as the kind of array that the caller passed, if that kind can be made of it."""
    if isinstance(array, torch.Tensor):
        return result
    if isinstance(array, np.ndarray):
        return result.numpy()
    namespace = getattr(array, "__array_namespace__", None)  # CuPy and what else follows the array API standard
    return result if namespace is None else namespace().from_dlpack(result)


def scaled(tensor: torch.Tensor, scale: float | None) -> torch.Tensor:
    return tensor if scale is None else tensor.detach() * scale


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory, read from its start, is its values in order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def plain_input(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if is_plain(tensor) else tensor.detach().resolve_conj().resolve_neg().contiguous()


def plain_output(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """The tensor, or a new contiguous buffer to copy back from."""
    if is_plain(tensor):
        return tensor
    if torch._debug_has_internal_overlap(tensor) == 1:
        raise ValueError(f"{what}: the result tensor is expanded (several elements share memory); use .contiguous()")
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def check_elements(what: str, out: torch.Tensor, count: int, dtype: torch.dtype, why: str) -> None:
    if out.dtype != dtype:
        raise ValueError(f"{what}: out has dtype {out.dtype}, the input {dtype}; they must be equal")
    if out.numel() != count:
        raise ValueError(f"{what}: out has {out.numel()} elements, expected {count} ({why})")


def check_overlap(what: str, source: torch.Tensor, target: torch.Tensor, offset: int) -> None:
    """Refuse overlapping memory, but for ``target`` starting ``offset`` bytes after ``source``."""
    start, other = source.data_ptr(), target.data_ptr()
    if other == start + offset or source.nbytes == 0 or target.nbytes == 0:
        return
    if start < other + target.nbytes and other < start + source.nbytes:
        raise ValueError(f"{what}: input and out overlap in memory other than in place; use separate tensors")


def check_integer(what: str, name: str, value: Any, bits: int = 32) -> None:
    """Raises TypeError when ``value`` is not a whole number (NumPy's are) of so many bits."""
    limit = 1 << (bits - 1)
    if type(value) is int and -limit <= value < limit:  # at once: to look for a protocol takes as long as a broadcast
        return
    if not isinstance(value, SupportsIndex) or not -limit <= value.__index__() < limit:
        raise TypeError(f"{what}: {name}={value!r} is not a whole number of {bits} bits")


def check_counts(name: str, counts: Sequence[int], size: int) -> None:
    """Raises TypeError or ValueError unless an all_to_all has a number of rows for each rank."""
    for rows_of_rank in counts:
        check_integer("all_to_all", name, rows_of_rank, bits=64)
    if len(counts) != size or min(counts) < 0:
        raise ValueError(f"all_to_all: {name}={list(counts)} has no number of at least 0 for each of {size} ranks")


def rows_to_elements(
    name: str, counts: Sequence[int] | None, tensor: torch.Tensor, size: int
) -> tuple[list[int], list[int]]:
    """Counts and offsets, in elements, of the parts of an all_to_all: ``counts`` rows of dim 0 each (None: equal)."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if counts is None:
        if rows % size:
            raise ValueError(f"all_to_all: dim 0 has {rows} rows, which do not divide over {size} ranks; give {name}")
        counts = [rows // size] * size
    check_counts(name, counts, size)
    if sum(counts) != rows:
        raise ValueError(
            f"all_to_all: {name}={list(counts)} does not cut {rows} rows into {size} parts; "
            f"give {size} numbers of at least 0 that add up to {rows}"
        )
    per_row = tensor.numel() // rows if rows else 0
    elements = [count * per_row for count in counts]
    offsets = [sum(elements[:rank]) for rank in range(size)]
    return elements, offsets


def core_buffers(what: str, source: torch.Tensor, target: torch.Tensor, offset: int = 0) -> tuple[Any, Any, tuple]:
    """What the core reads and writes, and the copies ``(to, from)`` to make afterwards.

    In place is ``target is source``, or memory that begins ``offset`` bytes apart.
    """
    receive = plain_output(target, what)
    if target is source:
        if receive is not target:
            receive.copy_(source.detach())
        send = receive
    else:
        send = plain_input(source)
        if receive is target:
            whole, part = (target, send) if target.nbytes >= send.nbytes else (send, target)
            check_overlap(what, whole, part, offset)
    return send, receive, () if receive is target else ((target, receive),)


def address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def empty_shared(
    shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    comms: Communicators | DeviceCommunicator | None = None,
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
    for size in shape:
        check_integer("empty_shared", "shape", size, bits=64)
    if any(size < 0 for size in shape):
        raise ValueError(f"empty_shared: shape {tuple(shape)} has a negative size")
    if dtype not in DTYPES:
        raise ValueError(f"empty_shared: dtype {dtype} is not supported; view it as one that is, such as torch.uint8")
    count = math.prod(shape)
    if count * dtype.itemsize >= 2**63:
        raise ValueError(f"empty_shared: shape {tuple(shape)} is more memory than can be addressed")
    place = torch.device(device)
    if place.type != "cpu":
        return _empty_on_device(tuple(shape), dtype, place, comms)
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    memory = _C.SharedMemory(count * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))


def _empty_on_device(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, comms: Communicators | DeviceCommunicator | None
) -> torch.Tensor:
    if comms is None or comms.device.type != device.type or device.index not in (None, comms.device.index):
        raise ValueError(
            f"empty_shared: device={str(device)!r} needs comms, the communicators of that device that will use it"
        )
    lines = [line for line in comms.communicators if line.size > 1]
    count = math.prod(shape)
    if not lines or count == 0:
        return torch.empty(shape, dtype=dtype, device=comms.device)
    memory = _C.device_memory(
        [cast("_C.DeviceCommunicator", line._core) for line in lines], count * dtype.itemsize, str(comms.device)
    )
    return torch.from_dlpack(memory).view(dtype).view(shape)


def physical_memory(device: torch.device) -> int | None:
    """Bytes of memory that a device has, used by any process; None where that is not known (meta, for example)."""
    if device.type == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_properties(device).total_memory
    return None


def shared_block(size: int) -> Any:
    """``size`` bytes of such memory as a buffer; it is free when nobody refers to it."""
    return _C.SharedMemory(size)
