"""The files of a checkpoint: one a rank in DCP's format, with a checksum (see ``checksum``) of each entry.

A tensor part is written by ``torch.save``, as DCP does, so plain DCP reads it. Beside DCP's record of where an entry
lies, the metadata holds (position, bytes, checksum) of the part's raw data. Reading takes just these bytes, straight
into the parameter where its memory holds the part in one piece. Other entries, and checkpoints without checksums, are
read with ``torch.load``. What is written or read is hashed MiB by MiB, while the core's own cache holds it, and two
threads read.

The checksum of the metadata itself stands in the marker (see ``folder``).
"""

from __future__ import annotations

import io
import os
import threading
import zipfile
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from axo import files
from axo.checkpoint import checksum, metadata, state
from axo.checkpoint import folder as folders

Item = TypeVar("Item")

_HOT = 1 << 20  # bytes that are hashed at once: a core's own cache still holds most of them
_MOST_METADATA = 1 << 30  # bytes: of some six million chunks
_UNVERIFIED = "axo.checkpoint.load(..., verify=False), which takes it as it is"
_WRONG = f"the checksum of what is there is not that of what was saved; use another checkpoint, or {_UNVERIFIED}"


# --- writing ----------------------------------------------------------------------------------------------------------


class Writer(dcp.FileSystemWriter):
    """DCP's writer: one file a rank, synced, with checksums."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0.distcp"
        try:
            with open(Path(self.path) / name, "wb") as file:
                results = [_write(file, name, item, planner.resolve_data(item)) for item in plan.items]
                file.flush()
                os.fsync(file.fileno())
        except RuntimeError as error:
            raise _first_error(error) from None  # here, because what is sent to the other ranks loses its causes
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


def _write(file: BinaryIO, name: str, item: WriteItem, data: torch.Tensor | io.BytesIO) -> WriteResult:
    start = file.tell()
    checked: tuple[int, int, str] | None = None
    if isinstance(data, io.BytesIO):
        view = data.getbuffer()
        file.write(view)
        checked = start, len(view), checksum.of(view)
    else:
        tensor = state.on_host(data)
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()  # torch.save writes whole storages
        watched = _WatchedFile(file, tensor)
        watched.save(tensor)
        if tensor.nbytes:
            assert watched.position is not None, "torch.save copied the tensor's bytes before it wrote them"
            checked = watched.position, tensor.nbytes, checksum.text(watched.value)
    length = file.tell() - start
    info = _StorageInfo(name, start, length)
    info.checked = checked  # type: ignore[attr-defined] # DCP keeps what it does not know
    return WriteResult(index=item.index, size_in_bytes=length, storage_data=info)


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
        for start in range(0, len(data), _HOT):
            self._file.write(data[start : start + _HOT])
            self.value = checksum.update(self.value, data[start : start + _HOT])
        return len(data)

    def flush(self) -> None:
        self._file.flush()


def save_plain(value: Any, path: Path) -> None:
    """``torch.save`` whose errors of the disk are the system's.

    Raises:
        OSError: It cannot be written.
    """
    with open(path, "wb") as file:
        try:
            _WatchedFile(file).save(value)
        except RuntimeError as error:
            raise _first_error(error) from None


def _first_error(error: BaseException) -> BaseException:
    """What torch's error of closing a file comes from: an error of the file before, or Ctrl-C; else itself."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError | KeyboardInterrupt):
        cause = cause.__cause__ or cause.__context__
    return cause or error


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
        return checksum.of(file.read())


# --- reading ----------------------------------------------------------------------------------------------------------


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
        if marker.checksum != checksum.KIND:
            raise ValueError(
                f"checkpoint: {path} has checksums {marker.checksum!r}, and {checksum.KIND} is known here; load it with"
                f" the version of Axo that wrote it, or by {_UNVERIFIED}"
            )
        if checksum.of(data) != marker.metadata:
            raise ValueError(f"checkpoint: {path} is damaged: {folders.METADATA}: {_WRONG}")
    described = metadata.read(path, data, follow=trust)
    if state.HEAD not in described.state_dict_metadata:
        raise ValueError(f"checkpoint: {path} was not written by axo.checkpoint.save (it has no entry {state.HEAD!r})")
    return described


def read_into(path: Path, saved: Metadata, entries: dict[str, Any], verify: bool = True) -> None:
    """Fill :class:`Parts` in place and replace other values.

    Raises:
        ValueError: What was read is damaged; names file and entry. What was read before it has been filled in.
    """
    requests: dict[MetadataIndex, list[ReadItem]] = {}
    for item in create_default_local_load_plan(entries, saved).items:
        requests.setdefault(item.storage_index, []).append(item)
    chunks = [
        _StoredChunk(path, saved.storage_data[index], saved.state_dict_metadata[index.fqn], items, verify)
        for index, items in requests.items()
    ]
    chunks.sort(key=lambda chunk: (chunk.info.relative_path, chunk.info.offset))
    _on_two_threads(lambda chunk: chunk.read_into(entries), chunks)


def _on_two_threads(work: Callable[[Item], None], items: Iterable[Item]) -> None:
    """Call ``work`` for each item, on this thread and, where the system gives one, another; an error of either ends it.

    The other thread has this one's stream and modes of autograd, and has ended when this returns.
    """
    shared = iter(list(items))  # its next() is one step, whoever takes it
    errors: list[BaseException] = []
    inference = torch.is_inference_mode_enabled()
    stream: Any = torch.accelerator.current_stream() if torch.cuda.is_initialized() else nullcontext()

    def run(stream: Any) -> None:
        try:
            with torch.inference_mode(inference), torch.no_grad(), stream:
                for item in shared:
                    if errors:
                        return
                    work(item)
        except BaseException as error:
            errors.append(error)

    beside = threading.Thread(target=run, args=(stream,))
    with suppress(RuntimeError):  # the system gives none, or the program is ending
        beside.start()
    run(nullcontext())
    while beside.is_alive():
        try:
            beside.join()
        except KeyboardInterrupt as error:  # nobody may read into tensors behind our back
            errors.append(error)
    if errors:
        raise errors[0]


class _StoredChunk:
    """One entry, or one chunk of a tensor, as it lies in a file, and who wants what of it.

    Raises:
        ValueError: Its bytes are missing, or are not those that were written; names file and entry.
    """

    def __init__(self, path: Path, info: Any, described: Any, items: list[ReadItem], verify: bool) -> None:
        self.path, self.info, self._described, self._items = path, info, described, items
        self._position, self._size, checked = getattr(info, "checked", None) or (info.offset, info.length, None)
        self._expected = checked if verify else None

    def read_into(self, entries: dict[str, Any]) -> None:
        """Read it, and give each its part."""
        tensor = self._described if isinstance(self._described, TensorStorageMetadata) else None
        index = self._items[0].storage_index
        sizes = next(c.sizes for c in tensor.chunks if c.offsets == index.offset) if tensor else torch.Size()
        targets = [self._target(entries, item) for item in self._items] if tensor else []
        if self._position == self.info.offset:
            value = self._load()
            if tensor is None:
                entries[self._items[0].dest_index.fqn] = value
                return
            if not isinstance(value, torch.Tensor) or value.shape != sizes:
                raise self._damaged("it holds no tensor of that size")
        else:
            dtype = self._described.properties.dtype
            if len(targets) == 1 and _takes_bytes(targets[0], sizes, dtype):
                if not targets[0].is_inference():  # what autograd has kept of it, and copies elsewhere, are of others
                    torch.autograd.graph.increment_version(targets[0])
                self._fill(state.bytes_of(targets[0]))
                return
            value = torch.empty(sizes, dtype=dtype, device="cpu")  # whatever torch's default device is
            self._fill(state.bytes_of(value))
        for item, target in zip(self._items, targets, strict=True):
            target.copy_(narrow_tensor_by_index(value, item.storage_offsets, item.lengths))

    @staticmethod
    def _target(entries: dict[str, Any], item: ReadItem) -> torch.Tensor:
        box = entries[item.dest_index.fqn].chunk(item.dest_index.offset)
        return narrow_tensor_by_index(box, item.dest_offsets, item.lengths)

    def _load(self) -> Any:
        """What ``torch.save`` wrote, read whole."""
        data = np.empty(self._size, np.uint8)
        self._fill(data.data)
        try:
            return torch.load(io.BytesIO(data.data), map_location="cpu", weights_only=True)
        except Exception as error:  # of pickle's, zip's and torch's, many kinds
            raise self._damaged(f"it cannot be read ({state.reason(error)})") from None

    def _fill(self, view: memoryview) -> None:
        """Read the bytes into ``view``, and compare their checksum."""
        name, done, value = self.path / self.info.relative_path, 0, 0
        try:
            with files.open_regular(name) as file:
                while done < len(view):
                    piece = view[done : done + _HOT]
                    count = os.preadv(file.fileno(), [piece], self._position + done)
                    if not count:
                        raise self._damaged("the file ends within it")
                    if self._expected is not None:
                        value = checksum.update(value, piece[:count])
                    done += count
        except OSError as error:
            raise ValueError(f"checkpoint: {name} cannot be read: {error.strerror}") from None
        if self._expected is not None and checksum.text(value) != self._expected:
            raise self._damaged(_WRONG)

    def _damaged(self, why: str) -> ValueError:
        index = self._items[0].storage_index
        at = f", the part at {tuple(index.offset)}" if index.offset and any(index.offset) else ""
        return ValueError(f"checkpoint: {self.path} is damaged: {self.info.relative_path}, {index.fqn}{at}: {why}")


def _takes_bytes(target: torch.Tensor, sizes: Any, dtype: torch.dtype) -> bool:
    """Whether the bytes of a stored chunk are those of ``target``."""
    same = target.device.type == "cpu" and target.dtype == dtype and target.shape == sizes
    return same and target.is_contiguous() and not target.is_conj() and not target.is_neg()


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
