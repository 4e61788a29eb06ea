"""consolidate: a checkpoint to one plain file and back, tensor by tensor, on one process and without a model.

To .pth: every whole tensor is put together in a mapped scratch file beside the result, which torch.save then streams,
so host memory holds a tensor at a time (the disk holds the model twice meanwhile). To .safetensors: the header is known
in advance, and tensors follow it one by one. Both results get their name when they are complete.
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
from axo.checkpoint.parts import Parts
from axo.checkpoint.reader import StoredFolder, read_state_dict
from axo.checkpoint.storage import save_plain
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
    path, out = folders.check_consolidate(source, out, optimizer, step), Path(out)
    if path.is_file():
        return _to_checkpoint(path, out, step, trust)
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
    model = dict(_tensors(stored, state.MODEL, out))
    model |= {alias: model[name] for alias, name in stored.aliases.items()}
    whole: Any = model
    if optimizer:
        if not stored.has_optimizer:
            raise ValueError(f"consolidate: {stored.path} holds no optimizer")
        saved = stored.read_value(state.OPTIMIZER)
        moments = _tensors(stored, state.OPTIMIZER, out)
        values = state.optimizer_values(saved, {f"{state.OPTIMIZER}/{name}": each for name, each in moments})
        plain = state.plain_optimizer(values, saved["groups"])
        whole = {"model": model, "optimizer": plain, "step": stored.head["step"], "extra": stored.head["extra"]}
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
        stored.read({f"{kind}/{name}": Parts(whole)})
        yield name, whole


def _to_safetensors(stored: StoredFolder, out: Path, optimizer: bool) -> None:
    def wholes() -> Iterator[torch.Tensor]:
        for name, (shape, dtype) in stored.tensors.items():
            whole = torch.empty(shape, dtype=dtype)
            stored.read({f"{state.MODEL}/{name}": Parts(whole)})
            yield whole

    aliases = {f"{alias} is": name for alias, name in stored.aliases.items()}
    safetensors.write(out, stored.tensors, wholes(), aliases)


def _to_checkpoint(source: Path, folder: Path, step: int, trust: bool) -> Path:
    values = read_state_dict(source, trust)
    aliases: dict[str, str] = {}
    first: dict[Any, str] = {}
    entries: dict[str, Any] = {}
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"consolidate: {source} holds {name!r}, a {type(value).__name__}; only tensors are taken")
        same = (value.data_ptr(), value.shape, value.stride()) if value.numel() else name
        if same in first:
            aliases[name] = first[same]
        else:
            first[same] = name
            entries[f"{state.MODEL}/{name}"] = Parts(value)
    entries[state.HEAD] = head(step, aliases=aliases)
    final = folder.absolute() / folders.name_of(step)
    try:
        part = folders.UnfinishedCheckpoint(final, None)
    except OSError as error:
        raise ValueError(f"consolidate: {final} cannot be written: {error.strerror}") from None
    write(entries, part.folder, part, final, step)
    return final
