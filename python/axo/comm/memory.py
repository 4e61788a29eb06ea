"""From what a caller passes (a torch tensor, a NumPy array, anything with DLPack) to memory that the core can use.

The core moves contiguous memory of a known dtype, on the host or on the communicator's device. A tensor that is not
contiguous travels through a contiguous copy and is copied back when its operation has been waited for; the values are
exact either way. It checks; it does not move.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np
import torch

from axo.comm.extension import _C

# The codes of the core, by torch's dtype and by the name of the operation (csrc/base/types.h).
DTYPES: dict[torch.dtype, int] = {getattr(torch, name): code for code, name in enumerate(_C.DTYPES)}
OPS: dict[str, int] = {name: code for code, name in enumerate(_C.OPS)}

CopyPairs = tuple[tuple[torch.Tensor, torch.Tensor], ...]  # (to, from)
Buffers = tuple[torch.Tensor | None, torch.Tensor | None, CopyPairs]
_CPU = torch.device("cpu")
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor, or its bytes where the core does not know its dtype (uint16, ...): what can be sent."""
    return tensor if tensor.dtype in DTYPES else tensor.view(-1).view(torch.uint8)


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


def _plain_input(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if is_plain(tensor) else tensor.detach().resolve_conj().resolve_neg().contiguous()


def _plain_buffer(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """A new contiguous buffer to copy the tensor's values from."""
    if torch._debug_has_internal_overlap(tensor) == 1:
        raise ValueError(f"{what}: the result tensor is expanded (several elements share memory); use .contiguous()")
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def rows_of(tensor: torch.Tensor) -> int:
    """Along dim 0; a scalar counts as one."""
    return tensor.shape[0] if tensor.dim() else 1


def check_elements(what: str, out: torch.Tensor, count: int | None, source: torch.Tensor) -> None:
    """Refuse an ``out`` that has not ``count`` elements (None: any) of the dtype of ``source``."""
    if out.dtype != source.dtype:
        raise ValueError(f"{what}: out has dtype {out.dtype}, the input {source.dtype}; they must be equal")
    if count is not None and out.numel() != count:
        raise ValueError(f"{what}: out has {out.numel()} elements, expected {count} (the input has {source.numel()})")


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
    rows = rows_of(tensor)
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


def core_buffers(what: str, source: torch.Tensor | None, target: torch.Tensor | None, rank: int) -> Buffers:
    """What the core reads and writes, and the copies ``(to, from)`` to make afterwards.

    In place is ``target is source``, or that the smaller one is the part of ``rank`` of the larger.
    """
    if target is not None and is_plain(target):
        if source is None or source is target:
            return source, target, ()
        send = _plain_input(source)
        part, whole = (send, target) if send.nbytes <= target.nbytes else (target, send)
        in_place = what != "all_to_all_v" and part.nbytes < whole.nbytes
        check_overlap(what, whole, part, rank * part.nbytes if in_place else 0)
        return send, target, ()
    sent = None if source is None else _plain_input(source)
    if target is None:
        return sent, None, ()
    receive = _plain_buffer(target, what)
    if source is None:
        receive.copy_(target.detach())
    return sent, receive, ((target, receive),)


def core_arguments(
    op: str, send: torch.Tensor | None, receive: torch.Tensor | None, size: int, *others: Any
) -> tuple[Any, ...]:
    """What the core's call ``op`` takes: addresses, elements of one part, the code of the dtype, and ``others``."""
    buffer = receive if send is None else send
    if buffer is None:
        return ()
    code, sent = DTYPES[buffer.dtype], 0 if send is None else send.data_ptr()
    received = 0 if receive is None else receive.data_ptr()
    if op == "all_to_all_v":  # counts and offsets of what is sent, and of what comes
        return sent, *others[:2], received, *others[2:], code
    count = buffer.numel() if receive is None else min(buffer.numel(), receive.numel())
    if op in ("broadcast", "send", "recv"):  # one buffer
        return sent or received, count, code, *others
    return sent, received, count // size if op == "all_to_all" else count, code, *others


def most_held(device: torch.device) -> float:
    """The most bytes that this rank has held so far: of a GPU by torch's allocator, or by the process."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def physical_memory(device: torch.device) -> int | None:
    """Bytes of memory that a device has, used by any process; None where that is not known (meta, for example)."""
    if device.type == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_properties(device).total_memory
    return None
