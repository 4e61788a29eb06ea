"""The checksum of what a checkpoint holds: CRC-32, by ISA-L where there is code for the processor, else by zlib.

ISA-L (carry-less products of 512 bits) takes 66 to 78 GB/s from a core's own cache, zlib 2 GB/s.
"""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

KIND = "crc32"
UNVERIFIED = "axo.checkpoint.load(..., verify=False), which takes it as it is"
WRONG = f"the checksum of what is there is not that of what was saved; use another checkpoint, or {UNVERIFIED}"


def update(value: int, data: memoryview) -> int:
    """The checksum, as a number, of what has ``value`` (0: of nothing) and ``data`` behind it."""
    return crc32(data, value)


def text(value: int) -> str:
    """A checksum as it is written down."""
    return f"{value:08x}"


def of(data: memoryview | bytes) -> str:
    """The checksum of ``data``, as it is written down."""
    return text(update(0, memoryview(data)))
