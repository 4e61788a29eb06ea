"""What a checkpoint holds and where: DCP's metadata file, written for any reader of DCP's, and read without trust.

The file is a pickle, and a pickle may run anything. So the opcodes are looked through first: only those that plain
data needs, and no tuple that stands twice, whose hash could take for ever. Then Python's unpickler builds records: each
class of DCP's that may occur is a class here that only keeps what it is given, and any other name ends the reading.
Last, what the records say is taken over if it can be true:

- the chunks of each tensor tile it exactly once;
- each extent lies in a file of the folder itself, within that file, beside the others and not on them;
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
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from axo import files
from axo.checkpoint import checksum
from axo.checkpoint import folder as folders
from axo.checkpoint.boxes import Box, Lengths

_MOST = 1 << 63
_MOST_BYTES = 1 << 30  # of the file: of some six million chunks
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
# Opcodes (of protocol 4) -> bytes of their argument, or of its length.
_FIXED = {
    **dict.fromkeys(b"()N.]}aeubst\x85\x86\x87\x81\x88\x89\x93R\x94", 0),
    **dict(zip(b"KMJhj\x80\x95", (1, 2, 4, 1, 4, 1, 8), strict=True)),
}
_COUNTED = {0x8C: 1, ord("X"): 4, 0x8A: 1}
_TUPLES = set(b"t\x85\x86\x87")
_STOP, _MEMOIZE, _GET = ord("."), 0x94, set(b"hj")


class Extent(NamedTuple):
    """Bytes of a file of the checkpoint: what ``torch.save`` wrote of one chunk, or of one value.

    Attributes:
        file: Its name. start, length: Which bytes of it.
        checked: Position, bytes and checksum of the raw data among them (of a value: all); None: it has none.
    """

    file: str
    start: int
    length: int
    checked: tuple[int, int, str] | None


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint, and where its chunks lie."""

    dtype: torch.dtype
    shape: Lengths
    chunks: dict[Box, Extent]


Contents = dict[str, StoredTensor | Extent]  # entry -> a tensor, or the extent of what is none


def write(path: Path, contents: Contents) -> str:
    """Write the metadata of the checkpoint ``path``, synced. Returns its checksum.

    Raises:
        ValueError: A file that it names is missing or too short.
    """
    described: dict[str, Any] = {}
    stored: dict[dcp.MetadataIndex, _StorageInfo] = {}
    for name, entry in contents.items():
        if isinstance(entry, Extent):
            described[name], places = dcp.BytesStorageMetadata(), {dcp.MetadataIndex(name): entry}
        else:
            chunks = [dcp.ChunkStorageMetadata(*map(torch.Size, box)) for box in entry.chunks]
            properties, shape = dcp.TensorProperties(entry.dtype), torch.Size(entry.shape)
            described[name] = dcp.TensorStorageMetadata(properties, shape, chunks)
            indices = [dcp.MetadataIndex(name, chunk.offsets) for chunk in chunks]
            places = dict(zip(indices, entry.chunks.values(), strict=True))
        for index, extent in places.items():
            stored[index] = _StorageInfo(extent.file, extent.start, extent.length)
            vars(stored[index])["checked"] = extent.checked  # DCP keeps what it does not know
    data = pickle.dumps(dcp.Metadata(described, storage_data=stored), protocol=4)
    try:
        _contents(path, data, follow=False)
    except ValueError as error:
        raise ValueError(f"{error}; do all ranks see the same folder there?") from None
    with open(path / folders.METADATA, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return checksum.of(data)


def read(path: Path, verify: bool = True, trust: bool = False) -> Contents:
    """What the checkpoint ``path`` holds, with every file that it names in place.

    Args:
        path: The folder.
        verify: Compare the checksum of the metadata, which stands in the marker.
        trust: Take files that are links to somewhere else.

    Raises:
        ValueError: It cannot be read, is damaged, describes what cannot be, or a rank's file is missing or too short.
    """
    marker = folders.read_marker(path)
    try:
        data = files.read_bytes(path / folders.METADATA, _MOST_BYTES)
    except OSError as error:
        raise ValueError(f"checkpoint: the metadata of {path} cannot be read ({error.strerror})") from None
    if verify and marker is not None and marker.metadata is not None:
        if marker.checksum != checksum.KIND:
            raise ValueError(
                f"checkpoint: {path} has checksums {marker.checksum!r}, and {checksum.KIND} is known here; load it with"
                f" the version of Axo that wrote it, or by {checksum.UNVERIFIED}"
            )
        if checksum.of(data) != marker.metadata:
            raise ValueError(f"checkpoint: {path} is damaged: {folders.METADATA}: {checksum.WRONG}")
    return _contents(path, data, trust)


def _contents(path: Path, data: bytes, follow: bool) -> Contents:
    collects = gc.isenabled()
    gc.disable()  # none of what is made is garbage, and to look through it again and again takes half of the time
    try:
        _check_opcodes(data)
        contents = _taken_over(_Unpickler(io.BytesIO(data)).load())
        _check_extents(path, contents, follow)
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
    return contents


class _Damaged(ValueError):
    """How a checkpoint is damaged, as the end of a sentence."""


def _damaged(what: str) -> NoReturn:
    raise _Damaged(f"damaged: .metadata: {what}")


# --- the pickle -------------------------------------------------------------------------------------------------------


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


# --- what it says -----------------------------------------------------------------------------------------------------


def _fields(record: Any, kind: str) -> dict[str, Any]:
    if type(record).__name__ != kind or not isinstance(record, _Record) or not isinstance(record.state, dict):
        _damaged(f"a {kind} is expected, not {files.shown(record)}")
    return record.state


def _expect(fits: bool, value: Any, what: str) -> Any:
    if not fits:
        _damaged(f"{what} is {files.shown(value)}")
    return value


def _count(value: Any, what: str) -> int:
    return _expect(type(value) is int and 0 <= value < _MOST, value, what)


def _shape(value: Any, what: str) -> Lengths:
    fits = isinstance(value, torch.Size) and all(type(each) is int and 0 <= each < _MOST for each in value)
    return tuple(_expect(fits, value, what))


def _taken_over(record: Any) -> Contents:
    fields = _fields(record, "Metadata")
    described: Any = fields.get("state_dict_metadata")
    stored: Any = fields.get("storage_data")
    _expect(isinstance(described, dict), described, "state_dict_metadata")
    extents: dict[str, dict[Lengths | None, Extent]] = {
        _expect(isinstance(name, str), name, "the name of an entry"): {} for name in described
    }
    for key, info in _expect(isinstance(stored, dict), stored, "storage_data").items():
        index, place = _fields(key, "MetadataIndex"), _fields(info, "_StorageInfo")
        name, offset = index.get("fqn"), index.get("offset")
        if not isinstance(name, str) or name not in extents:
            _damaged(f"a part is of {files.shown(name)}, which is no entry")
        offset = None if offset is None else _shape(offset, f"an offset of {name}")
        extents[name][offset] = _extent(name, place)
    return {
        name: _placed(name, None, extents[name])
        if type(entry).__name__ == "BytesStorageMetadata"
        else _tensor(name, _fields(entry, "TensorStorageMetadata"), extents[name])
        for name, entry in described.items()
    }


def _extent(name: str, place: Mapping[str, Any]) -> Extent:
    file, checked = place.get("relative_path"), place.get("checked")
    if not isinstance(file, str) or not files.is_confined(file):
        _damaged(f"a part of {name} lies in {files.shown(file)}, which is no file of the folder")
    if place.get("transform_descriptors"):
        _damaged(f"a part of {name} is transformed, which Axo does not read")
    start, length = _count(place.get("offset"), f"the place of {name}"), _count(place.get("length"), "a length")
    if checked is None:
        return Extent(file, start, length, None)
    fits = isinstance(checked, tuple) and len(checked) == 3 and isinstance(checked[2], str)
    _expect(fits, checked, f"the checksum of {name}")
    position, size = _count(checked[0], f"the place of {name}"), _count(checked[1], f"the bytes of {name}")
    if not start <= position <= position + size <= start + length:
        _damaged(f"the bytes of {name} lie outside of its part")
    return Extent(file, start, length, checked)


def _placed(name: str, offset: Lengths | None, extents: Mapping[Lengths | None, Extent]) -> Extent:
    if offset not in extents:
        _damaged(f"it does not say where {name} lies")
    return extents[offset]


def _tensor(name: str, fields: Mapping[str, Any], extents: Mapping[Lengths | None, Extent]) -> StoredTensor:
    properties = fields.get("properties")
    state = properties.state if isinstance(properties, _Record) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    dtype = _expect(isinstance(dtype, torch.dtype), dtype, f"the dtype of {name}")
    shape, chunks = _shape(fields.get("size"), f"the size of {name}"), fields.get("chunks")
    boxes = []
    for chunk in _expect(isinstance(chunks, list), chunks, f"the list of chunks of {name}"):
        of_chunk = _fields(chunk, "ChunkStorageMetadata")
        box = Box(*(_shape(of_chunk.get(key), f"a chunk of {name}") for key in ("offsets", "sizes")))
        if not len(shape) == len(box.offset) == len(box.size):
            _damaged(f"{name} has {len(shape)} dims, and a chunk of it others")
        boxes.append(box)
    if math.prod(shape) and not _tile(shape, boxes, 0):
        _damaged(f"the {len(boxes)} chunks of {name} {shape} do not cover it exactly once")
    return StoredTensor(dtype, shape, {box: _placed(name, box.offset, extents) for box in boxes})


def _tile(shape: Lengths, boxes: Sequence[Box], dim: int) -> bool:
    """Whether boxes fill a tensor from ``dim`` on, each element once.

    They must do so slab by slab, as what is split dim by dim does: the ranges in ``dim`` follow each other without a
    gap, and those of the same range fill the dims behind it.
    """
    if dim == len(shape):
        return len(boxes) == 1
    slabs: defaultdict[tuple[int, int], list[Box]] = defaultdict(list)
    for box in boxes:
        slabs[box.offset[dim], box.size[dim]].append(box)
    end = 0
    for (start, length), inside in sorted(slabs.items()):
        if start != end or not length or not _tile(shape, inside, dim + 1):
            return False
        end += length
    return end == shape[dim]


def _check_extents(path: Path, contents: Contents, follow: bool) -> None:
    """Compare what is described with the files of the folder."""
    of_file: defaultdict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for name, entry in contents.items():
        for extent in (entry,) if isinstance(entry, Extent) else entry.chunks.values():
            of_file[extent.file].append((extent.start, extent.start + extent.length, name))
    for file, parts in sorted(of_file.items()):
        size, end = _size_of(path / file, file, follow), max(end for _, end, _ in parts)
        for (_, stop, one), (start, _, other) in pairwise(sorted(parts)):
            if start < stop:
                _damaged(f"{one} and {other} lie in the same bytes of {file}")
        if size < end:
            raise _Damaged(f"damaged: {file} has {size} bytes, not {end}")
    for name, entry in contents.items():
        if isinstance(entry, Extent):
            if entry.checked is not None and entry.checked[:2] != (entry.start, entry.length):
                _damaged(f"the bytes of {name} are not its part")
            continue
        for box, extent in entry.chunks.items():
            size = math.prod(box.size) * entry.dtype.itemsize
            if size > extent.length if extent.checked is None else size != extent.checked[1]:
                _damaged(f"the bytes of {name} are not as many as its chunk has")


def _size_of(path: Path, name: str, follow: bool) -> int:
    try:
        with files.open_regular(path, follow=follow) as opened:
            return os.fstat(opened.fileno()).st_size
    except FileNotFoundError:
        rank = name.strip("_").split("_")[0]
        raise _Damaged(f"incomplete: {name}, the file of rank {rank}, is missing") from None
    except ValueError as error:
        hint = "; copy the file itself, or load with trust=True" if path.is_symlink() else ""
        raise _Damaged(f"not taken: {error}{hint}") from None
