"""The files of a checkpoint: one a rank in DCP's format, with a checksum (see ``checksum``) of each entry.

A tensor part is written by ``torch.save``, as DCP does, so plain DCP reads it. Beside DCP's record of where an entry
lies, the metadata holds (position, bytes, checksum) of the part's raw data. Reading takes just these bytes, straight
into the parameter where its memory holds the part in one piece. Other entries, and checkpoints without checksums, are
read with ``torch.load``. A second thread hashes what is being written. Two threads read; each hashes what it has read
while its core's own cache holds it.

The checksum of the metadata itself stands in the marker (see ``folder``).
"""

from __future__ import annotations

import io
import os
import zipfile
from collections import deque
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from axo import files
from axo.checkpoint import checksum, metadata, state
from axo.checkpoint import folder as folders
from axo.checkpoint.parts import LoadPlanner

_PIECE = 2 << 20  # bytes that a thread takes at a time; at 8 MiB two look random to the disk's read-ahead
_HOT = 1 << 20  # bytes that are read, then hashed: a core's own cache still holds most of them
_MOST_METADATA = 1 << 30  # bytes: of some six million chunks
_SMALL = 256 << 10  # bytes that are read or hashed at once: a hand-over to another thread takes longer
_WRONG = (
    "the checksum of what is there is not that of what was saved; use another checkpoint, or"
    " axo.checkpoint.load(..., verify=False), which takes it as it is"
)


class Writer(dcp.FileSystemWriter):
    """DCP's writer: one file a rank, synced, with checksums."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0.distcp"
        try:
            with open(Path(self.path) / name, "wb") as file, futures.ThreadPoolExecutor(1) as beside:
                results = [_write(file, name, item, planner.resolve_data(item), beside) for item in plan.items]
                file.flush()
                os.fsync(file.fileno())
        except RuntimeError as error:
            raise _first_error(error) from None  # here, because what is sent to the other ranks loses its causes
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


def _first_error(error: BaseException) -> BaseException:
    """What torch's error of closing a file comes from: an error of the file before, or Ctrl-C; else itself."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError | KeyboardInterrupt):
        cause = cause.__cause__ or cause.__context__
    return cause or error


def save_plain(value: Any, path: Path) -> None:
    """``torch.save`` whose errors of the disk are the system's.

    Raises:
        OSError: It cannot be written.
    """
    with open(path, "wb") as file:
        passed_on = _Locate(file)
        try:
            torch.save(value, passed_on)  # type: ignore[arg-type]
        except RuntimeError as error:
            raise _first_error(error) from None
        finally:
            passed_on.ended = True


class _Locate:
    """Passes writes on to a file, and notes where the bytes of one tensor, if it is given, went.

    Writes after ``ended`` are dropped: torch's writer, when it is freed after an error (Ctrl-C), writes the end of its
    archive, and an error of that write would abort the process.
    """

    def __init__(self, file: BinaryIO, tensor: torch.Tensor | None = None) -> None:
        self._file, self._tensor = file, tensor
        self.position: int | None = None
        self.ended = False

    def write(self, data: memoryview) -> int:
        if self.ended:
            return len(data)
        tensor = self._tensor
        if tensor is not None and len(data) == tensor.nbytes:
            if np.frombuffer(data, np.uint8).ctypes.data == tensor.data_ptr():
                self.position = self._file.tell()
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def _write(
    file: BinaryIO, name: str, item: WriteItem, data: torch.Tensor | io.BytesIO, beside: futures.Executor
) -> WriteResult:
    start = file.tell()
    if isinstance(data, io.BytesIO):
        view = data.getbuffer()
        checked: tuple[int, int, str] | None = start, len(view), checksum.of(view)
        file.write(view)
    else:
        tensor = data.detach().cpu().resolve_conj().resolve_neg().contiguous()
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()  # torch.save writes whole storages
        located = _Locate(file, tensor)
        bytes_of = _bytes_of(tensor)
        hashing = None
        if tensor.nbytes > _SMALL:
            with suppress(RuntimeError):  # the program ends during an asynchronous save: no thread is given any more
                hashing = beside.submit(checksum.of, bytes_of)
        try:
            torch.save(tensor, located)  # type: ignore[arg-type]
        finally:
            located.ended = True
        checked = None
        if tensor.nbytes:
            assert located.position is not None, "torch.save copied the tensor's bytes before it wrote them"
            value = hashing.result() if hashing is not None else checksum.of(bytes_of)
            checked = located.position, tensor.nbytes, value
    length = file.tell() - start
    info = _StorageInfo(name, start, length)
    info.checked = checked  # type: ignore[attr-defined] # DCP keeps what it does not know
    return WriteResult(index=item.index, size_in_bytes=length, storage_data=info)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def seal(path: Path) -> str:
    """Look that every file of a checkpoint is there with its length. Returns the checksum of its metadata.

    Raises:
        ValueError: One is missing or too short.
    """
    try:
        read_metadata(path)
    except ValueError as error:
        raise ValueError(f"{error}; do all ranks see the same folder there?") from None
    with open(path / folders.METADATA, "rb") as file:
        os.fsync(file.fileno())  # DCP does so before its buffer is flushed, and the end might be lost
    return checksum.of((path / folders.METADATA).read_bytes())


def read_metadata(path: Path, verify: bool = True, trust: bool = False) -> Metadata:
    """DCP's metadata of a checkpoint that Axo wrote, with every file that it names in place.

    Args:
        path: The checkpoint.
        verify: Compare its checksum.
        trust: Take files that are links to somewhere else.

    Raises:
        ValueError: It cannot be read, is damaged or another program's, or a rank's file is missing or too short.
    """
    marker = folders.read_marker(path)
    try:
        data = files.read_bytes(path / folders.METADATA, _MOST_METADATA)
    except OSError as error:
        raise ValueError(f"checkpoint: the metadata of {path} cannot be read ({error.strerror})") from None
    if verify and marker is not None and marker.metadata is not None:
        hasher = checksum.hasher(marker.checksum, path)
        hasher.update(data)
        if hasher.hexdigest() != marker.metadata:
            raise ValueError(f"checkpoint: {path} is damaged: {folders.METADATA}: {_WRONG}")
    described = metadata.read(path, data, follow=trust)
    if state.HEAD not in described.state_dict_metadata:
        raise ValueError(f"checkpoint: {path} was not written by axo.checkpoint.save (it has no entry {state.HEAD!r})")
    return described


def read_plain(path: Path, weights_only: bool | None = True) -> Any:
    """What ``torch.save`` wrote as one file; its tensors stay on disk until they are used, where the format allows it.

    Args:
        path: The file.
        weights_only: As in ``torch.load``: False runs whatever the file says.

    Raises:
        ValueError: It cannot be read.
    """
    try:
        with files.open_regular(path) as file:
            mapped = zipfile.is_zipfile(file)
            if mapped and any(part.compress_type != zipfile.ZIP_STORED for part in zipfile.ZipFile(file).infolist()):
                raise ValueError("it is compressed")  # a little of it may become any amount; torch does not compress
        return torch.load(path, map_location="cpu", mmap=mapped, weights_only=weights_only)
    except Exception as error:  # pickle, zip, the system: each with classes of its own
        why, hint = state.reason(error), "it is damaged, or no checkpoint; get it again"
        if isinstance(error, OSError):
            why = error.strerror or why
        elif os.path.isfile(path) and not os.path.getsize(path):
            why = "it is empty"
        elif isinstance(error, LookupError) or why == "Weights only load failed":  # the pickle reader's, of other files
            why = "torch.save did not write it"
        elif why.startswith("it holds a "):  # a class or function that torch does not call unasked
            hint = "weights_only=False reads it (trust=True, --trust) and runs it; use that if you trust who wrote it"
        raise ValueError(f"checkpoint: {path} cannot be read ({why}): {hint}") from None


def read_bytes(path: Path, saved: Metadata, entry: str, verify: bool = True) -> Any:
    """One entry that is no tensor.

    Raises:
        ValueError: It is damaged.
    """
    wanted = {entry: None}
    read_into(path, saved, wanted, verify)
    return wanted[entry]


def read_into(path: Path, saved: Metadata, entries: dict[str, Any], verify: bool = True) -> None:
    """Fill :class:`Parts` in place and replace other values.

    Raises:
        ValueError: What was read is damaged; names file and entry. What was read before it has been filled in.
    """
    planner = LoadPlanner(entries, saved)
    requests: dict[MetadataIndex, list[ReadItem]] = {}
    for item in planner.create_local_plan().items:
        requests.setdefault(item.storage_index, []).append(item)
    places = [(saved.storage_data[index], index) for index in requests]
    places.sort(key=lambda place: (place[0].relative_path, place[0].offset))
    with torch.no_grad(), futures.ThreadPoolExecutor(1) as beside:
        reader = _FileReader(path, verify, beside)
        for name, of_file in groupby(places, key=lambda place: place[0].relative_path):
            try:
                with files.open_regular(path / name) as file:
                    for info, index in of_file:
                        reader.begin(name, index)
                        _read(reader, file, info, saved, planner, requests[index])
                    reader.finish()
            except OSError as error:
                raise ValueError(f"checkpoint: {path / name} cannot be read: {error.strerror}") from None


@dataclass
class _Piece:
    """What one thread reads: part of an entry."""

    entry: str
    file: int
    position: int
    view: memoryview
    hasher: checksum.Hasher | None


class _FileReader:
    """Reads bytes of files, and compares their checksums.

    Raises:
        ValueError: Bytes are missing, or are not those that were written; names file and entry.
    """

    def __init__(self, path: Path, verify: bool, beside: futures.Executor) -> None:
        self._path, self._verify = path, verify
        self._beside: futures.Executor | None = beside
        self._entry = ""
        self._kind = (folders.read_marker(path) or folders.Marker()).checksum
        self._pieces: deque[_Piece] = deque()
        self._hashed: list[tuple[str, str, list[_Piece]]] = []

    def begin(self, file: str, index: MetadataIndex) -> None:
        """What is read from here on belongs to this entry."""
        at = f", the part at {tuple(index.offset)}" if index.offset and any(index.offset) else ""
        self._entry = f"{file}, {index.fqn}{at}"

    def fill(self, file: io.FileIO, position: int, view: memoryview, expected: str | None) -> None:
        """Read into ``view``, what is small at once, the rest in ``finish``, which also compares the checksum."""
        verify = self._verify and expected is not None
        size = _PIECE if not verify or checksum.joins(self._kind) else len(view)
        pieces = [
            _Piece(
                self._entry,
                file.fileno(),
                position + start,
                view[start : start + size],
                checksum.hasher(self._kind, self._path) if verify else None,
            )
            for start in range(0, len(view), max(1, size))
        ]
        if len(view) > _SMALL:
            self._pieces += pieces
        else:
            for piece in pieces:
                self._read(piece)
        if verify and expected is not None:
            self._hashed.append((self._entry, expected, pieces))

    def finish(self) -> None:
        """Read what is left, in two threads, and compare the checksums of all that was read."""
        helpers = []
        if self._beside is not None and len(self._pieces) > 1:
            try:
                helpers.append(self._beside.submit(self._read_pieces))
            except RuntimeError:  # the system gives no thread; later it might, and would run this call too
                self._beside = None
        try:
            self._read_pieces()
        finally:
            self._wait(helpers)
        for helper in helpers:
            helper.result()
        for entry, expected, pieces in self._hashed:
            if checksum.joined([piece.hasher for piece in pieces if piece.hasher is not None]) != expected:
                raise self.damaged(_WRONG, entry)
        self._hashed.clear()

    def _wait(self, helpers: list[futures.Future[None]]) -> None:
        try:
            futures.wait(helpers)
        except BaseException:  # Ctrl-C: nobody may read into tensors, or from a closed file, behind our back
            self._pieces.clear()
            futures.wait(helpers)
            raise

    def _read_pieces(self) -> None:
        try:
            while self._pieces:
                try:
                    piece = self._pieces.popleft()
                except IndexError:  # the other thread took the last
                    break
                self._read(piece)
        finally:
            self._pieces.clear()  # after an error the other thread ends too

    def _read(self, piece: _Piece) -> None:
        done = 0
        while done < len(piece.view):
            hot = piece.view[done : done + _HOT]
            count = os.preadv(piece.file, [hot], piece.position + done)
            if not count:
                raise self.damaged("the file ends within it", piece.entry)
            if piece.hasher is not None:
                piece.hasher.update(hot[:count])
            done += count

    def damaged(self, why: str, entry: str | None = None) -> ValueError:
        return ValueError(f"checkpoint: {self._path} is damaged: {entry or self._entry}: {why}")


def _read(
    reader: _FileReader,
    file: io.FileIO,
    info: Any,
    saved: Metadata,
    planner: LoadPlanner,
    items: list[ReadItem],
) -> None:
    """Read one stored entry, for all that need a part of it."""
    tensor, sizes = saved.state_dict_metadata[items[0].storage_index.fqn], torch.Size()
    if isinstance(tensor, TensorStorageMetadata):
        sizes = next(chunk.sizes for chunk in tensor.chunks if chunk.offsets == items[0].storage_index.offset)
    position, size, expected = getattr(info, "checked", None) or (info.offset, info.length, None)
    if position == info.offset:
        data = np.empty(size, np.uint8)
        reader.fill(file, position, data.data, expected)
        reader.finish()
        try:
            value = torch.load(io.BytesIO(data.data), map_location="cpu", weights_only=True)
        except Exception as error:  # of pickle's, zip's and torch's, many kinds
            raise reader.damaged(f"it cannot be read ({state.reason(error)})") from None
        if items[0].type == LoadItemType.BYTE_IO:
            planner.state_dict[items[0].dest_index.fqn] = value
            return
        if not isinstance(value, torch.Tensor) or value.shape != sizes:
            raise reader.damaged("it holds no tensor of that size")
    else:
        assert isinstance(tensor, TensorStorageMetadata)
        target = planner.resolve_tensor(items[0])
        whole = len(items) == 1 and target.shape == sizes and target.is_contiguous()
        whole = whole and not target.is_conj() and not target.is_neg()  # whose bytes are others
        if whole and target.device.type == "cpu" and target.dtype == tensor.properties.dtype:
            if not target.is_inference():  # what autograd has kept of it, and copies elsewhere, are of other values
                torch.autograd.graph.increment_version(target)
            reader.fill(file, position, _bytes_of(target), expected)
            return
        value = torch.empty(sizes, dtype=tensor.properties.dtype, device="cpu")  # whatever torch's default device is
        reader.fill(file, position, _bytes_of(value), expected)
        reader.finish()
    for item in items:
        planner.resolve_tensor(item).copy_(narrow_tensor_by_index(value, item.storage_offsets, item.lengths))
