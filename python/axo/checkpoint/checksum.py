"""Checksums of what a checkpoint holds: CRC-32, in older ones XXH3 of 64 bits; its marker says which.

CRC-32 by ISA-L (carry-less products of 512 bits) takes 66 to 78 GB/s from a core's own cache, XXH3 47. zlib computes
the same CRC-32 at 2 GB/s; it serves processors for which ISA-L has no code.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import xxhash

try:
    from isal.isal_zlib import crc32, crc32_combine
except ImportError:
    from zlib import crc32

    crc32_combine = None  # type: ignore[assignment]

KIND = "crc32"  # of what is written


class Hasher(Protocol):
    """What ``hashlib`` and xxhash have."""

    def update(self, data: memoryview | bytes, /) -> object: ...
    def hexdigest(self) -> str: ...


class _Crc32:
    def __init__(self) -> None:
        self._value = self._size = 0

    def update(self, data: memoryview | bytes, /) -> None:
        self._value = crc32(data, self._value)
        self._size += len(data)

    def join(self, after: _Crc32) -> None:
        self._value = crc32_combine(self._value, after._value, after._size)
        self._size += after._size

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


_HASHERS: dict[str, Callable[[], Hasher]] = {KIND: _Crc32, "xxh3": xxhash.xxh3_64}


def of(data: memoryview | bytes) -> str:
    """The checksum of what is written."""
    hasher = _HASHERS[KIND]()
    hasher.update(data)
    return hasher.hexdigest()


def hasher(kind: str, path: Path) -> Hasher:
    """To check what was written with checksums of ``kind`` at ``path``.

    Raises:
        ValueError: No such checksum is known.
    """
    if kind not in _HASHERS:
        raise ValueError(
            f"checkpoint: {path} has checksums {kind!r}, and {', '.join(_HASHERS)} are known here; load it with the"
            " version of Axo that wrote it, or by axo.checkpoint.load(..., verify=False), which takes it as it is"
        )
    return _HASHERS[kind]()


def joins(kind: str) -> bool:
    """Whether the checksum of a whole follows from those of its pieces."""
    return kind == "crc32" and crc32_combine is not None


def joined(hashers: list[Hasher]) -> str:
    """The checksum of a whole from those of its pieces, in their order."""
    whole, *others = hashers
    for after in others:
        assert isinstance(whole, _Crc32) and isinstance(after, _Crc32)
        whole.join(after)
    return whole.hexdigest()
