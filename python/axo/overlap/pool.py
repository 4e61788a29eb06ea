"""Buffers for collectives, used again and again; on the CPU in memory that the transport reads where it lies.

A buffer is free when nobody but the pool refers to its memory: no owner has to give it back, and a gradient that is a
view of one stays what it is as long as somebody holds it. The pool lets go of buffers that the last passes have not
used.
"""

from __future__ import annotations

import math
from sys import getrefcount
from typing import Any

import torch

from axo.comm.shared_memory import shared_block

_SHARED_FROM = 32 * 1024  # bytes; the transport stages smaller ones anyway
_KEPT_PASSES = 2


class _Buffer:
    __slots__ = ("last_used", "memory")

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.last_used = 0


_FREE = 2  # references to the memory of a free buffer, as sys.getrefcount counts: the entry's own, and the question's


class Pool:
    """Buffers of one engine, by size."""

    def __init__(self) -> None:
        self._entries: dict[int, list[_Buffer]] = {}
        self._passes = 0

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised contiguous tensor."""
        size = math.prod(shape) * dtype.itemsize
        if device.type != "cpu" or size < _SHARED_FROM:
            return torch.empty(shape, dtype=dtype, device=device)
        entries = self._entries.setdefault(size, [])
        for entry in entries:
            if getrefcount(entry.memory) == _FREE:  # asked for each buffer at each call: no function of ours
                break
        else:
            entry = _Buffer(shared_block(size))
            entries.append(entry)
        entry.last_used = self._passes
        flat = torch.frombuffer(entry.memory, dtype=dtype)
        return flat if len(shape) == 1 else flat.view(shape)

    def end_of_pass(self) -> None:
        """Give back what the last passes have not used."""
        self._passes += 1
        for size, entries in self._entries.items():
            self._entries[size] = [
                each
                for each in entries
                if each.last_used + _KEPT_PASSES >= self._passes or getrefcount(each.memory) != _FREE
            ]
