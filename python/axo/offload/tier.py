"""The lower tier: memory for what a rank does not need now.

    CPU ranks    files without a name in a folder of the user's, mapped into memory (``MappedFiles``)
    GPU ranks    pinned memory of the host (``PinnedMemory``)

A mapped file costs no memory of its own: the kernel keeps its pages in memory while there is room, and writes them out
and drops them when there is not. The file has no name, so nothing is left however a process ends. Its whole length is
reserved on the disk before it is used, so a full disk is an error of that call and never one of a later write.

Not here: what lies there, and when it is copied.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path

import torch

_libc = ctypes.CDLL(None, use_errno=True)
PAGE = mmap.PAGESIZE
RUN = 1 << 30  # bytes
_KEPT_PASSES = 2


class Tier(ABC):
    """Where blocks of bytes lie."""

    @abstractmethod
    def block(self, size: int) -> torch.Tensor:
        """``size`` bytes of zeros, (size,) uint8 on the CPU. They are given back with the tensor.

        Raises:
            OSError: There is no room.
        """

    def soon(self, tensor: torch.Tensor) -> None:  # noqa: B027  most memory need not be told
        """The tensor, dense and of a block, will be read soon."""

    def rest(self, tensor: torch.Tensor) -> None:  # noqa: B027
        """The tensor, dense and of a block, is not needed for a while."""


class MappedFiles(Tier):
    """A tier in a folder; see the module.

    Args:
        folder: On a disk; it is made where it is not there.

    Raises:
        ValueError: It is no folder, or cannot be written to.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).absolute()
        self._held = 0
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            os.close(_nameless_file(self.folder))
        except OSError as error:
            raise ValueError(
                f"offload: dir={str(self.folder)!r} cannot be used: {error.strerror}; give a folder on a disk that this"
                " rank can write to"
            ) from None

    def block(self, size: int) -> torch.Tensor:
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        file = _nameless_file(self.folder)
        try:
            os.posix_fallocate(file, 0, size)
            mapped = torch.from_file(f"/proc/self/fd/{file}", shared=True, size=size, dtype=torch.uint8)
        except OSError as error:
            reasons = {errno.ENOSPC: "the disk is full", errno.EFBIG: "it passes the limit of a file's size"}
            raise OSError(
                error.errno,
                f"offload found no room for {size / 2**20:.1f} MiB more"
                f" ({reasons.get(error.errno or 0, str(error.strerror))};"
                f" this rank has {self._held / 2**20:.1f} MiB there); use a folder on a larger disk, or offload less",
                str(self.folder),
            ) from None
        finally:
            os.close(file)
        self._held += size
        return mapped

    def soon(self, tensor: torch.Tensor) -> None:
        _advise(tensor, mmap.MADV_WILLNEED)

    def rest(self, tensor: torch.Tensor) -> None:
        _advise(tensor, mmap.MADV_DONTNEED)  # of a mapped file: the pages stay in the file, the process lets them go


class PinnedMemory(Tier):
    """A tier in pinned memory of the host, which a GPU copies from and to by itself."""

    def block(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True)


class Runs(Tier):
    """Blocks that are kept for good, cut out of few large ones: a process can map some 65,000 files.

    Args:
        tier: Gives the large ones: as much as has been cut so far, at most RUN bytes.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._left = torch.empty(0, dtype=torch.uint8)
        self._cut = 0
        self.soon, self.rest = tier.soon, tier.rest  # type: ignore[method-assign]

    def block(self, size: int) -> torch.Tensor:
        room = -(-size // PAGE) * PAGE
        if room > self._left.numel():
            run = 1 << (min(max(room, self._cut), RUN) - 1).bit_length()  # torch rounds pinned memory so
            self._left = self._tier.block(max(room, run))
        block, self._left = self._left[:size], self._left[room:]
        self._cut += room
        return block


def tier_for(device: torch.device, folder: str | os.PathLike[str] | None) -> Tier:
    """The lower tier of a rank that computes on ``device``.

    Raises:
        ValueError: A CPU rank without a folder, or a GPU rank with one.
    """
    if device.type != "cpu":
        if folder is not None:
            raise ValueError(
                f"offload: dir={os.fspath(folder)!r} is of CPU ranks; a rank on {device} offloads to pinned memory of"
                " the host: leave dir out"
            )
        return PinnedMemory()
    if folder is None:
        raise ValueError("offload: a CPU rank offloads to files; name a folder on a disk: axo.Offload(dir=...)")
    return MappedFiles(folder)


class _Block:
    __slots__ = ("last_used", "memory")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory, self.last_used = memory, 0


class Blocks:
    """Blocks of a tier, used again and again. One is free when nobody but this refers to its memory."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._of_size: dict[int, list[_Block]] = {}
        self._passes = 0

    def allocate(self, size: int) -> torch.Tensor:
        """A block of ``size`` bytes with anything in it, (size,) uint8; free again when the last tensor on it is gone.

        Raises:
            OSError: There is no room.
        """
        room = -(-size // PAGE) * PAGE
        of_size = self._of_size.setdefault(room, [])
        entry = next((each for each in of_size if _references(each.memory) == _FREE), None)
        if entry is None:
            entry = _Block(self._tier.block(room))
            of_size.append(entry)
        entry.last_used = self._passes
        return entry.memory[:size]

    def end_of_pass(self) -> None:
        """Give back the free blocks that the last passes have not used."""
        self._passes += 1
        for size, entries in self._of_size.items():
            self._of_size[size] = [
                each
                for each in entries
                if each.last_used + _KEPT_PASSES >= self._passes or _references(each.memory) != _FREE
            ]


def _references(block: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(block.untyped_storage()._cdata)  # type: ignore[attr-defined]


_FREE = _references(torch.empty(1, dtype=torch.uint8))


def _nameless_file(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):  # a file system that does not know such files
            raise
    file, name = tempfile.mkstemp(prefix=".axo-offload-", dir=folder)
    os.unlink(name)
    return file


def _advise(tensor: torch.Tensor, advice: int) -> None:
    """Tell the kernel of the whole pages under ``tensor``; those at its ends that others share are left alone."""
    start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    if advice == mmap.MADV_WILLNEED:
        start, stop = start // PAGE * PAGE, -(-stop // PAGE) * PAGE
    else:
        start, stop = -(-start // PAGE) * PAGE, stop // PAGE * PAGE
    if start < stop:
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), advice)
