"""DCP's metadata of a checkpoint, read without trust: the file is a pickle, and a pickle may run anything.

Three steps. The opcodes are looked through: only those that plain data needs, and no tuple that stands twice, whose
hash could take for ever. Then Python's unpickler builds records: each class of DCP's that may occur is a class here
that only keeps what it is given, and any other name ends the reading. Last, DCP's own objects are made of the records
whose values are what they should be:

- the chunks of each tensor tile it exactly once;
- each part lies in a file of the folder itself, within that file, beside the others and not on them;
- raw data (position, bytes, checksum) is as long as the chunk.

So what a checkpoint makes a reader allocate is bounded by what its files hold. It takes twice the time of unpickling.
"""

from __future__ import annotations

import gc
import io
import math
import os
import pickle
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from axo import files

_MOST = 1 << 63
_DCP = "torch.distributed.checkpoint"
_RECORDS = {
    *((f"{_DCP}.metadata", name) for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata")),
    *((f"{_DCP}.metadata", name) for name in ("ChunkStorageMetadata", "MetadataIndex", "TensorProperties")),
    *((f"{_DCP}.metadata", name) for name in ("StorageMeta", "_MEM_FORMAT_ENCODING")),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),  # where DCP wrote it
    ("pathlib._local", "PosixPath"),  # the same in Python 3.13
}
# Opcodes (of protocol 4, which torch writes) -> bytes of their argument, or of its length.
_FIXED = {
    **dict.fromkeys(b"()N.]}aeubst\x85\x86\x87\x81\x88\x89\x93R\x94", 0),
    **dict(zip(b"KMJhj\x80\x95", (1, 2, 4, 1, 4, 1, 8), strict=True)),
}
_COUNTED = {0x8C: 1, ord("X"): 4, 0x8A: 1}
_TUPLES = set(b"t\x85\x86\x87")
_STOP, _MEMOIZE, _GET = ord("."), 0x94, set(b"hj")


def read(path: Path, data: bytes, *, follow: bool = False) -> Metadata:
    """DCP's metadata of the checkpoint ``path``, whose file holds ``data``.

    Args:
        path: The folder.
        data: What stands in its metadata file.
        follow: Whether files of the folder may be links to somewhere else.

    Raises:
        ValueError: It is no such metadata, or describes what cannot be; names the file.
    """
    collects = gc.isenabled()
    gc.disable()  # none of what is made is garbage, and to look through it again and again takes half of the time
    try:
        _check_opcodes(data)
        metadata = _metadata(_Unpickler(io.BytesIO(data)).load())
        _check_parts(path, metadata, follow)
    except OSError as error:
        raise ValueError(f"checkpoint: {error.filename} cannot be read: {error.strerror}") from None
    except _Damaged as error:
        raise ValueError(f"checkpoint: {path} is {error}") from None
    except Exception as error:  # of pickle's reader: many kinds, and no memory for what the file claims
        why = str(error) or type(error).__name__
        raise ValueError(f"checkpoint: the metadata of {path} cannot be read ({files.cut(why)})") from None
    finally:
        if collects:
            gc.enable()
    return metadata


class _Damaged(ValueError):
    """How a checkpoint is damaged, as the end of a sentence."""


def _damaged(what: str) -> NoReturn:
    raise _Damaged(f"damaged: .metadata: {what}")


class _Record:
    """What a pickle says of an object: nothing is done with it."""

    def __init__(self, *arguments: Any) -> None:
        self.state: Any = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._records = {name: type(name[1], (_Record,), {}) for name in _RECORDS}  # its own: a pickle can set fields

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._records:
            return self._records[module, name]
        value = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        if value is torch.Size or isinstance(value, torch.dtype):
            return value
        raise pickle.UnpicklingError(f"it names {files.shown(f'{module}.{name}')}, which no checkpoint of Axo's holds")


def _check_opcodes(data: bytes) -> None:
    """Refuse what plain data has no need of, a memo with gaps (of any size), and a tuple that stands in two places."""
    at, stored, previous, tuples = 0, 0, 0, set()
    while at < len(data):
        code = data[at]
        at += 1
        size = _FIXED.get(code)
        if size is None:
            if code not in _COUNTED:
                raise pickle.UnpicklingError(f"it holds opcode {code:#x}")
            size = int.from_bytes(data[at : at + _COUNTED[code]], "little")
            at += _COUNTED[code]
        elif code == _MEMOIZE:
            if previous in _TUPLES:
                tuples.add(stored)
            stored += 1
        elif code in _GET and int.from_bytes(data[at : at + size], "little") in tuples:
            raise pickle.UnpicklingError("a tuple of it stands in two places")
        elif code == _STOP:
            return
        at += size
        previous = code
    raise pickle.UnpicklingError("it ends too early")


def _fields(record: Any, kind: str) -> dict[str, Any]:
    if type(record).__name__ != kind or not isinstance(record, _Record) or not isinstance(record.state, dict):
        _damaged(f"a {kind} is expected, not {files.shown(record)}")
    return record.state


def _mapping(value: Any, what: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        _damaged(f"{what} is {files.shown(value)}")
    return value


def _count(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < _MOST:
        _damaged(f"{what} is {files.shown(value)}")
    return value


def _size(value: Any, what: str) -> torch.Size:
    if not isinstance(value, torch.Size) or not all(type(each) is int and 0 <= each < _MOST for each in value):
        _damaged(f"{what} is {files.shown(value)}")
    return value


def _metadata(record: Any) -> Metadata:
    said = _fields(record, "Metadata")
    described: dict[str, Any] = {}
    for name, entry in _mapping(said.get("state_dict_metadata"), "state_dict_metadata").items():
        if not isinstance(name, str):
            _damaged(f"an entry is called {files.shown(name)}")
        if type(entry).__name__ == "BytesStorageMetadata":
            described[name] = BytesStorageMetadata()
        else:
            described[name] = _tensor(name, _fields(entry, "TensorStorageMetadata"))
    stored: dict[MetadataIndex, _StorageInfo] = {}
    for key, info in _mapping(said.get("storage_data"), "storage_data").items():
        index, place = _fields(key, "MetadataIndex"), _fields(info, "_StorageInfo")
        offset, file = index.get("offset"), place.get("relative_path")
        name = index.get("fqn")
        if not isinstance(name, str) or name not in described:
            _damaged(f"a part is of {files.shown(name)}, which is no entry")
        if not isinstance(file, str) or not files.is_confined(file):
            _damaged(f"a part of {name} lies in {files.shown(file)}, which is no file of the folder")
        if place.get("transform_descriptors"):
            _damaged(f"a part of {name} is transformed, which Axo does not read")
        start, length = _count(place.get("offset"), f"the place of {name}"), _count(place.get("length"), "a length")
        part = _StorageInfo(file, start, length)
        part.checked = _checked(name, place.get("checked"), start, length)  # type: ignore[attr-defined]
        stored[MetadataIndex(name, None if offset is None else _size(offset, f"an offset of {name}"))] = part
    for name, entry in described.items():
        of_entry = [None] if isinstance(entry, BytesStorageMetadata) else [chunk.offsets for chunk in entry.chunks]
        for offset in of_entry:
            if MetadataIndex(name, offset) not in stored:
                _damaged(f"it does not say where {name} lies")
    return Metadata(described, storage_data=stored)


def _tensor(name: str, said: Mapping[str, Any]) -> TensorStorageMetadata:
    properties = said.get("properties")
    state = properties.state if isinstance(properties, _Record) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, torch.dtype):
        _damaged(f"the dtype of {name} is {files.shown(dtype)}")
    size, chunks = _size(said.get("size"), f"the size of {name}"), said.get("chunks")
    if not isinstance(chunks, list):
        _damaged(f"the chunks of {name} are {files.shown(chunks)}")
    boxes = []
    for chunk in chunks:
        box = _fields(chunk, "ChunkStorageMetadata")
        boxes.append((_size(box.get("offsets"), f"an offset of {name}"), _size(box.get("sizes"), f"a chunk of {name}")))
        if not len(size) == len(boxes[-1][0]) == len(boxes[-1][1]):
            _damaged(f"{name} has {len(size)} dims, and a chunk of it others")
    if math.prod(size) and not _tile(size, boxes, 0):
        _damaged(f"the {len(boxes)} chunks of {name} {tuple(size)} do not cover it exactly once")
    return TensorStorageMetadata(TensorProperties(dtype), size, [ChunkStorageMetadata(*box) for box in boxes])


def _tile(size: torch.Size, boxes: list[tuple[torch.Size, torch.Size]], dim: int) -> bool:
    """Whether boxes fill a tensor from ``dim`` on, each element once.

    They must do so slab by slab, as what is split dim by dim does: the ranges in ``dim`` follow each other without a
    gap, and those of the same range fill the dims behind it.
    """
    if dim == len(size):
        return len(boxes) == 1
    slabs: defaultdict[tuple[int, int], list[tuple[torch.Size, torch.Size]]] = defaultdict(list)
    for box in boxes:
        slabs[box[0][dim], box[1][dim]].append(box)
    end = 0
    for (start, length), inside in sorted(slabs.items()):
        if start != end or not length or not _tile(size, inside, dim + 1):
            return False
        end += length
    return end == size[dim]


def _checked(name: str, value: Any, start: int, length: int) -> tuple[int, int, str] | None:
    """Where raw data lies, its bytes and its checksum, inside the part that begins at ``start``."""
    if value is None:
        return None
    if not isinstance(value, tuple) or len(value) != 3 or not isinstance(value[2], str):
        _damaged(f"the checksum of {name} is {files.shown(value)}")
    position, size = _count(value[0], f"the place of {name}"), _count(value[1], f"the bytes of {name}")
    if not start <= position <= position + size <= start + length:
        _damaged(f"the bytes of {name} lie outside of its part")
    return position, size, value[2]


def _check_parts(path: Path, metadata: Metadata, follow: bool) -> None:
    """Compare what is described with the files of the folder."""
    of_file: defaultdict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for index, info in metadata.storage_data.items():
        of_file[info.relative_path].append((info.offset, info.offset + info.length, index.fqn))
    for name, parts in sorted(of_file.items()):
        size = _size_of(path / name, name, follow)
        for (_, end, one), (start, _, other) in pairwise(sorted(parts)):
            if start < end:
                _damaged(f"{one} and {other} lie in the same bytes of {name}")
        end = max(end for _, end, _ in parts)
        if size < end:
            raise _Damaged(f"damaged: {name} has {size} bytes, not {end}")
    for fqn, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            part: Any = metadata.storage_data[MetadataIndex(fqn)]
            if part.checked is not None and part.checked[:2] != (part.offset, part.length):
                _damaged(f"the bytes of {fqn} are not its part")
            continue
        for chunk in entry.chunks:
            part = metadata.storage_data[MetadataIndex(fqn, chunk.offsets)]
            size = math.prod(chunk.sizes) * entry.properties.dtype.itemsize
            if size > part.length if part.checked is None else size != part.checked[1]:
                _damaged(f"the bytes of {fqn} are not as many as its chunk has")


def _size_of(file: Path, name: str, follow: bool) -> int:
    try:
        with files.open_regular(file, follow=follow) as opened:
            return os.fstat(opened.fileno()).st_size
    except FileNotFoundError:
        rank = name.strip("_").split("_")[0]
        raise _Damaged(f"incomplete: {name}, the file of rank {rank}, is missing") from None
    except ValueError as error:
        hint = "; copy the file itself, or load with trust=True" if file.is_symlink() else ""
        raise _Damaged(f"not taken: {error}{hint}") from None
