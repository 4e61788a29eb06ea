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
from torch.distributed.checkpoint.metadata import Metadata

from axo.checkpoint import folder as folders
from axo.checkpoint import safetensors, state
from axo.checkpoint.parts import Parts
from axo.checkpoint.reader import read_head, read_state_dict, tensors_of
from axo.checkpoint.storage import read_bytes, read_into, read_metadata, save_plain
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
    metadata = read_metadata(path, trust=trust)
    try:
        _to_file(path, metadata, out, optimizer)
    except OSError as error:
        raise ValueError(f"consolidate: {out} cannot be written: {error.strerror}") from None
    except RuntimeError as error:  # torch's, of files that do not fit
        raise ValueError(f"consolidate: {out} cannot be written: {state.reason(error)}") from None
    except (LookupError, TypeError, AttributeError, ArithmeticError, MemoryError) as error:  # ours, as we take it apart
        raise ValueError(f"checkpoint: {path} holds what no save writes ({type(error).__name__}: {error})") from error
    return out


def _to_file(path: Path, metadata: Metadata, out: Path, optimizer: bool) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".safetensors":
        _to_safetensors(path, metadata, out)
    else:
        _to_pth(path, metadata, out, optimizer)


def _to_pth(path: Path, metadata: Metadata, out: Path, optimizer: bool) -> None:
    about = read_head(path, metadata)
    model = dict(_tensors(path, metadata, state.MODEL, out))
    model |= {alias: model[name] for alias, name in about["aliases"].items()}
    whole: Any = model
    if optimizer:
        if state.OPTIMIZER not in metadata.state_dict_metadata:
            raise ValueError(f"consolidate: {path} holds no optimizer")
        saved = read_bytes(path, metadata, state.OPTIMIZER)
        moments = _tensors(path, metadata, state.OPTIMIZER, out)
        values = state.optimizer_values(saved, {f"{state.OPTIMIZER}/{name}": each for name, each in moments})
        plain = state.plain_optimizer(values, saved["groups"])
        whole = {"model": model, "optimizer": plain, "step": about["step"], "extra": about["extra"]}
    with folders.whole_file(out) as unfinished:
        save_plain(whole, unfinished)


def _tensors(path: Path, metadata: Metadata, kind: str, out: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor of a kind, whole, in a file beside ``out`` that the system may drop from memory.

    The file has no name any more, so nothing of it is left, however the process ends.
    """
    for name, (shape, dtype) in tensors_of(metadata, kind).items():
        count = math.prod(shape)
        with tempfile.NamedTemporaryFile(dir=out.parent, prefix=".axo-") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, count * dtype.itemsize))  # a full disk is an error here
            mapped = torch.from_file(file.name, True, count, dtype=dtype) if count else torch.empty(0, dtype=dtype)
        whole = mapped.view(shape)
        read_into(path, metadata, {f"{kind}/{name}": Parts(whole)})
        yield name, whole


def _to_safetensors(path: Path, metadata: Metadata, out: Path) -> None:
    tensors = tensors_of(metadata, state.MODEL)

    def wholes() -> Iterator[torch.Tensor]:
        for name, (shape, dtype) in tensors.items():
            whole = torch.empty(shape, dtype=dtype)
            read_into(path, metadata, {f"{state.MODEL}/{name}": Parts(whole)})
            yield whole

    aliases = read_head(path, metadata)["aliases"]
    safetensors.write(out, tensors, wholes(), {f"{alias} is": name for alias, name in aliases.items()})


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
    write(entries, part.path, part, final, step)
    return final
