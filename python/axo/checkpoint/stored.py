"""What a checkpoint or a plain file holds, and reading it into the parts of tensors that this rank has.

Of a checkpoint the raw bytes of a chunk are read, straight into the parameter where its memory holds the chunk in one
piece; a value, or a chunk without a checksum, is read with ``torch.load``. What is read is hashed MiB by MiB, while the
core's own cache holds it, and two threads read. A plain file is mapped, and each rank cuts its own parts.
"""

from __future__ import annotations

import io
import os
import threading
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch

from axo import files
from axo.checkpoint import checksum, metadata, state
from axo.checkpoint.boxes import Box, Parts, overlaps
from axo.checkpoint.metadata import Extent, StoredTensor
from axo.checkpoint.storage import HOT

Item = TypeVar("Item")

_NOWHERE = Box((), ())


class StoredFile:
    """A plain state_dict.

    Attributes:
        path: The file.
        tensors: Name -> shape and dtype.
        names: Each name of a tensor -> that under which it is stored.
        head: What the entry ``axo`` says.
    """

    def __init__(self, path: Path, trust: bool) -> None:
        self.path = path
        self.head: dict[str, Any] = {"step": 0, "extra": None, "grid": None, "ranks": 1}
        values = read_state_dict(path, trust)
        self._values = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        self.tensors: state.Described = {name: (tuple(each.shape), each.dtype) for name, each in self._values.items()}
        self.names = {name: name for name in self.tensors}

    def read(self, wanted: Iterable[tuple[str, Parts]]) -> None:
        """Fill each part from the entry that is named beside it."""
        for entry, parts in wanted:
            parts.fill(self._values[entry.removeprefix(f"{state.MODEL}/")])


class StoredFolder:
    """A checkpoint; see :class:`StoredFile`.

    Args:
        path: The folder.
        verify: Compare checksums.
        trust: Take files that are links to elsewhere.

    Raises:
        ValueError: It cannot be read, is damaged, or no checkpoint of Axo's, or of a newer one.
    """

    def __init__(self, path: Path, verify: bool, trust: bool) -> None:
        self.path, self._verify = path, verify
        self._contents = metadata.read(path, verify, trust)
        if not self.holds(state.HEAD):
            raise ValueError(
                f"checkpoint: {path} was not written by axo.checkpoint.save (it has no entry {state.HEAD!r})"
            )
        self.head = self._checked(self.value(state.HEAD))
        self.tensors, aliases = self.tensors_of(state.MODEL), self.head["aliases"]
        self.names = {name: name for name in self.tensors}
        self.names |= {alias: name for alias, name in aliases.items() if name in self.tensors}

    def holds(self, entry: str) -> bool:
        """Whether there is such an entry, that is no tensor."""
        return isinstance(self._contents.get(entry), Extent)

    def tensors_of(self, kind: str) -> state.Described:
        """Name -> whole shape and dtype of the tensors of one kind."""
        return {
            entry.removeprefix(f"{kind}/"): (saved.shape, saved.dtype)
            for entry, saved in self._contents.items()
            if entry.startswith(f"{kind}/") and isinstance(saved, StoredTensor)
        }

    def value(self, entry: str) -> Any:
        """An entry that is no tensor."""
        extent = self._contents[entry]
        assert isinstance(extent, Extent)
        return _Reading(self.path, entry, extent, self._verify).load()

    def read(self, wanted: Iterable[tuple[str, Parts]]) -> None:
        """Fill each part from the entry that is named beside it.

        Raises:
            ValueError: What was read is damaged; names file and entry. What was read before it has been filled in.
        """
        readings: list[_Reading] = []
        for entry, parts in wanted:
            tensor = self._contents[entry]
            assert isinstance(tensor, StoredTensor)
            of_box: dict[Box, _Reading] = {}
            for own, box, common in overlaps(parts.boxes, list(tensor.chunks)):
                if box not in of_box:
                    extent = tensor.chunks[box]
                    of_box[box] = _Reading(self.path, entry, extent, self._verify, box, tensor.dtype)
                of_box[box].targets.append((common, common.within(own, parts.view(own))))
            readings += of_box.values()
        # The largest first, so that neither thread reads alone in the end; small ones as they lie.
        readings.sort(key=lambda each: (-(each.extent.length // HOT), each.extent.file, each.extent.start))
        _on_two_threads(_Reading.run, readings)

    def _checked(self, head: Any) -> dict[str, Any]:
        """The entry that says what the others are, if it is one of a format that is known."""
        kinds = {"format": int, "step": int, "ranks": int, "aliases": dict, "dropout": dict}
        damaged = f"checkpoint: {self.path} is damaged: {state.HEAD}"
        if not isinstance(head, dict) or not all(isinstance(head.get(name), kind) for name, kind in kinds.items()):
            raise ValueError(f"{damaged}: {files.shown(head)} is not what a save writes")
        counts = (count for counts in head["dropout"].values() for count in counts)
        if head["ranks"] < 1 or not all(count is None or type(count) is int for count in counts):
            raise ValueError(f"{damaged}: ranks or counters of dropout cannot be")
        if head["format"] > state.FORMAT:
            raise ValueError(
                f"checkpoint: {self.path} was written by a newer Axo (format {head['format']}, this one reads up to"
                f" {state.FORMAT}); update Axo"
            )
        return head


@dataclass
class _Reading:
    """Reads one entry, or one chunk of a tensor, and gives each of ``targets`` what it shares with the chunk.

    Raises:
        ValueError: Its bytes are missing, or are not those that were written; names file and entry.
    """

    path: Path
    entry: str
    extent: Extent
    verify: bool
    box: Box = _NOWHERE
    dtype: torch.dtype | None = None
    targets: list[tuple[Box, torch.Tensor]] = field(default_factory=list)

    def run(self) -> None:
        target = self.targets[0][1]
        if self.extent.checked is None:
            value = self.load()
            if not isinstance(value, torch.Tensor) or tuple(value.shape) != self.box.size:
                self.damaged("it holds no tensor of that size")
        elif len(self.targets) == 1 and _takes_bytes(target, self.box, self.dtype):
            if not target.is_inference():  # what autograd has kept of it, and copies elsewhere, are of others
                torch.autograd.graph.increment_version(target)
            self.fill(state.bytes_of(target))
            return
        else:
            value = torch.empty(self.box.size, dtype=self.dtype, device="cpu")  # whatever torch's default device is
            self.fill(state.bytes_of(value))
        for common, target in self.targets:
            with torch.inference_mode(target.is_inference()):  # a model may have been made in that mode
                target.copy_(common.within(self.box, value))

    def load(self) -> Any:
        """What ``torch.save`` wrote, read whole."""
        data = np.empty(self.extent.length, np.uint8)
        self.fill(data.data)
        try:
            return torch.load(io.BytesIO(data.data), map_location="cpu", weights_only=True)
        except Exception as error:  # of pickle's, zip's and torch's, many kinds
            self.damaged(f"it cannot be read ({state.reason(error)})")

    def fill(self, view: memoryview) -> None:
        """Read the bytes into ``view``, and compare their checksum."""
        position, _, expected = self.extent.checked or (self.extent.start, 0, None)
        file, done, value = self.path / self.extent.file, 0, 0
        verify = self.verify and expected is not None
        try:
            with files.open_regular(file) as opened:
                while done < len(view):
                    hot = view[done : done + HOT]
                    count = os.preadv(opened.fileno(), [hot], position + done)
                    if not count:
                        self.damaged("the file ends within it")
                    if verify:
                        value = checksum.update(value, hot[:count])
                    done += count
        except OSError as error:
            raise ValueError(f"checkpoint: {file} cannot be read: {error.strerror}") from None
        if verify and checksum.text(value) != expected:
            self.damaged(checksum.WRONG)

    def damaged(self, why: str) -> NoReturn:
        at = f", the part at {self.box.offset}" if any(self.box.offset) else ""
        raise ValueError(f"checkpoint: {self.path} is damaged: {self.extent.file}, {self.entry}{at}: {why}")


def _takes_bytes(target: torch.Tensor, box: Box, dtype: torch.dtype | None) -> bool:
    """Whether the bytes of a stored chunk are those of ``target``."""
    same = target.device.type == "cpu" and target.dtype == dtype and tuple(target.shape) == box.size
    return same and target.is_contiguous() and not target.is_conj() and not target.is_neg()


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


def read_state_dict(path: Path, trust: bool = False) -> dict[str, Any]:
    """A plain state_dict, its tensors mapped from the file where the format allows it.

    Raises:
        ValueError: The file is no state_dict.
    """
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        try:
            return dict(load_file(path))
        except Exception as error:  # safetensors' own class, which says nothing of the file
            raise ValueError(f"checkpoint: {path} cannot be read as a state_dict ({state.reason(error)})") from None
    values = read_plain(path, weights_only=not trust)
    for key in ("model", "state_dict"):  # what litgpt and consolidate(optimizer=True), and what Lightning write
        if isinstance(values, Mapping) and isinstance(values.get(key), Mapping):
            values = values[key]
    if not isinstance(values, Mapping) or not any(isinstance(value, torch.Tensor) for value in values.values()):
        raise ValueError(f"checkpoint: {path} holds no state_dict (name -> tensor)")
    return dict(values)
