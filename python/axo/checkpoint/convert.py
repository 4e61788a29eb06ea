"""consolidate: a checkpoint to one plain file and back, tensor by tensor, on one process and without a model.

Each whole tensor is put together in a mapped scratch file beside the result, so host memory holds a tensor at a time.
To .pth: torch.save streams them all (the disk holds the model twice meanwhile). To .safetensors: the header is known in
advance, and tensors follow it one by one. Both results get their name when they are complete.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from axo.checkpoint import folder as folders
from axo.checkpoint import safetensors, state
from axo.checkpoint.boxes import Parts
from axo.checkpoint.storage import save_plain
from axo.checkpoint.stored import StoredFolder, read_state_dict
from axo.checkpoint.writer import head, write


def consolidate(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    optimizer: bool = False,
    step: int = 0,
    trust: bool = False,
) -> Path:
    """Write a checkpoint as one plain file, or a plain file as a checkpoint. One process calls it; no model is needed.

    Args:
        source: A checkpoint or a folder of them (the newest), or a plain state_dict (.pth, .safetensors).
        out: From a checkpoint: the file, ``.pth`` (or any other name) as ``torch.save`` of the state_dict or
            ``.safetensors``. From a file: the folder in which a checkpoint is made.
        optimizer: To .pth only: write ``{"model", "optimizer", "step", "extra"}``, the optimizer as its plain
            ``state_dict``.
        step: From a file: names the checkpoint.
        trust: As in ``axo.checkpoint.load``.

    Returns:
        What was written.

    Raises:
        ValueError: The source is neither, or the result cannot hold what was asked.
    """
    for what, given in (("source", source), ("out", out)):
        wrong = f"{what} is empty" if given == "" else f"{what}={given!r} is no path"
        folders.check_local(given, f"consolidate: {wrong}; name a file or a folder")
    folders.check_step("consolidate", step)
    source, out = Path(source), Path(out)
    if source.is_file():
        return _to_checkpoint(source, out, step, trust)
    path = folders.resolve(source)
    if os.path.isfile(out.parent / folders.MARKER):  # also where it may not be read
        raise ValueError(f"consolidate: {out} would lie in a checkpoint, {out.parent}; name a file elsewhere")
    if os.path.exists(out) and not out.is_file():
        raise ValueError(f"consolidate: {out} {folders.kind_of(out)}; name a file, such as {out / 'model.pth'}")
    if optimizer and out.suffix == ".safetensors":
        raise ValueError("consolidate: a .safetensors file holds no optimizer; name the result .pth")
    try:
        stored = StoredFolder(path, True, trust)
        out.parent.mkdir(parents=True, exist_ok=True)
        (_to_safetensors if out.suffix == ".safetensors" else _to_pth)(stored, out, optimizer)
    except OSError as error:
        raise ValueError(f"consolidate: {out} cannot be written: {error.strerror}") from None
    except RuntimeError as error:  # torch's, of files that do not fit
        raise ValueError(f"consolidate: {out} cannot be written: {state.reason(error)}") from None
    except (LookupError, TypeError, AttributeError, ArithmeticError, MemoryError) as error:  # ours, as we take it apart
        raise ValueError(f"checkpoint: {path} holds what no save writes ({type(error).__name__}: {error})") from error
    return out


def _to_pth(stored: StoredFolder, out: Path, optimizer: bool) -> None:
    tensors = dict(_tensors(stored, state.MODEL, out))
    whole: Any = {name: tensors[first] for name, first in stored.names.items()}
    if optimizer:
        if not stored.holds(state.OPTIMIZER):
            raise ValueError(f"consolidate: {stored.path} holds no optimizer")
        saved = stored.value(state.OPTIMIZER)
        values = state.optimizer_values(saved, dict(_tensors(stored, state.OPTIMIZER, out)))
        plain = state.plain_optimizer(values, saved["groups"])
        whole = {"model": whole, "optimizer": plain, "step": stored.head["step"], "extra": stored.head["extra"]}
    with folders.whole_file(out) as unfinished:
        save_plain(whole, unfinished)


def _tensors(stored: StoredFolder, kind: str, out: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor of a kind, whole, in a file beside ``out`` that the system may drop from memory.

    The file has no name any more, so nothing of it is left, however the process ends.
    """
    for name, (shape, dtype) in stored.tensors_of(kind).items():
        count = math.prod(shape)
        with tempfile.NamedTemporaryFile(dir=out.parent, prefix=".axo-") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, count * dtype.itemsize))  # a full disk is an error here
            mapped = torch.from_file(file.name, True, count, dtype=dtype) if count else torch.empty(0, dtype=dtype)
        whole = mapped.view(shape)
        stored.read([(f"{kind}/{name}", Parts(whole))])
        yield name, whole


def _to_safetensors(stored: StoredFolder, out: Path, optimizer: bool) -> None:
    aliases = {f"{alias} is": name for alias, name in stored.names.items() if alias != name}
    safetensors.write(out, stored.tensors, (whole for _, whole in _tensors(stored, state.MODEL, out)), aliases)


def _to_checkpoint(source: Path, folder: Path, step: int, trust: bool) -> Path:
    final = folder.absolute() / folders.name_of(step)
    folders.check_place(final, None)
    folders.check_writable("consolidate: out", folder)
    aliases: dict[str, str] = {}
    first: dict[Any, str] = {}
    entries: dict[str, Any] = {}
    for name, value in read_state_dict(source, trust).items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"consolidate: {source} holds {name!r}, a {type(value).__name__}; only tensors are taken")
        stored = first.setdefault((value.data_ptr(), value.shape, value.stride()) if value.numel() else name, name)
        if stored == name:
            entries[f"{state.MODEL}/{name}"] = Parts(value)
        else:
            aliases[name] = stored
    entries[state.HEAD] = head(step, aliases=aliases)
    try:
        part = folders.UnfinishedCheckpoint(final, None)
    except OSError as error:
        raise ValueError(f"consolidate: {final} cannot be written: {error.strerror}") from None
    write(entries, part.folder, part, final, step)
    return final
