"""The file that a rank writes: tensors and values as ``torch.save`` writes them, with a checksum of each.

DCP writes its files so, and plain DCP reads these. Beside the place of what torch wrote, the metadata holds (position,
bytes, checksum) of a tensor's raw data. What is written is hashed MiB by MiB, while the core's own cache holds it.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from axo.checkpoint import checksum, state
from axo.checkpoint.metadata import Extent

HOT = 1 << 20  # bytes that are hashed at once: a core's own cache still holds most of them


def write(path: Path, values: Iterable[Any]) -> list[Extent]:
    """Write tensors and plain values as one file, synced. Returns where each is.

    Raises:
        OSError: It cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)  # who moved the folder away meanwhile has moved an empty one
    with _errors_of_the_disk(), open(path, "wb") as file:
        extents = [_write(file, path.name, value) for value in values]
        file.flush()
        os.fsync(file.fileno())
    return extents


def _write(file: BinaryIO, name: str, value: Any) -> Extent:
    start = file.tell()
    if not isinstance(value, torch.Tensor):
        buffer = io.BytesIO()
        torch.save(value, buffer)
        data = buffer.getbuffer()
        file.write(data)
        return Extent(name, start, len(data), (start, len(data), checksum.of(data)))
    tensor = state.on_host(value)
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()  # torch.save writes whole storages
    watched = _WatchedFile(file, tensor)
    watched.save(tensor)
    checked = None
    if tensor.nbytes:
        assert watched.position is not None, "torch.save copied the tensor's bytes before it wrote them"
        checked = watched.position, tensor.nbytes, checksum.text(watched.value)
    return Extent(name, start, file.tell() - start, checked)


class _WatchedFile:
    """A file into which ``torch.save`` writes, and where in it the bytes of one tensor, if it is given, went.

    Attributes:
        position: Where they begin.
        value: Their checksum.
    """

    def __init__(self, file: BinaryIO, tensor: torch.Tensor | None = None) -> None:
        self._file, self._tensor = file, tensor
        self.position: int | None = None
        self.value = 0
        self._is_over = False

    def save(self, value: Any) -> None:
        try:
            torch.save(value, self)  # type: ignore[arg-type]
        finally:
            self._is_over = True

    def write(self, data: memoryview) -> int:
        if self._is_over:  # torch's writer, freed after an error, writes the archive's end, and would abort the process
            return len(data)
        tensor = self._tensor
        if tensor is None or len(data) != tensor.nbytes:
            return self._file.write(data)
        if np.frombuffer(data, np.uint8).ctypes.data != tensor.data_ptr():
            return self._file.write(data)
        self.position = self._file.tell()
        for start in range(0, len(data), HOT):
            self._file.write(data[start : start + HOT])
            self.value = checksum.update(self.value, data[start : start + HOT])
        return len(data)

    def flush(self) -> None:
        self._file.flush()


def save_plain(value: Any, path: Path) -> None:
    """``torch.save`` whose errors of the disk are the system's.

    Raises:
        OSError: It cannot be written.
    """
    with _errors_of_the_disk(), open(path, "wb") as file:
        _WatchedFile(file).save(value)


@contextmanager
def _errors_of_the_disk() -> Iterator[None]:
    """Raise what torch's error of closing a file comes from: an error of the file before, or Ctrl-C; else itself."""
    try:
        yield
    except RuntimeError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError | KeyboardInterrupt):
            cause = cause.__cause__ or cause.__context__
        raise cause or error from None
