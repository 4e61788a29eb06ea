"""save_pretrained: a parallel Hugging Face model as a folder that ``from_pretrained`` loads.

    config.json                          and generation_config.json, if the model has one
    model.safetensors                    or model-00001-of-00003.safetensors, ..., with model.safetensors.index.json

Each tensor in turn is gathered on all ranks, and rank 0 writes it: the others hold one whole tensor at a time, rank 0
those of the file that it writes. A tensor with several names (a tied head) is written under the first, as Hugging Face
does.

Not here: LitGPT's models, which have no such configuration (``axo consolidate``, then ``litgpt convert_from_litgpt``).
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
from collections import deque
from collections.abc import Iterator
from itertools import islice
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import nn

from axo.checkpoint import safetensors, state
from axo.checkpoint.boxes import Parts
from axo.checkpoint.folder import check_local, whole_file
from axo.checkpoint.ranks import checkpoint_group, on_all_ranks, rank_in
from axo.nn.placeholder import is_stage

_INDEX = "model.safetensors.index.json"
_TENSORS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


@torch.no_grad()
def save_pretrained(model: nn.Module, folder: str | os.PathLike[str], *, max_file_bytes: int = 5_000_000_000) -> Path:
    """Write a folder that ``from_pretrained`` of the model's class loads. Every rank must call it.

    Args:
        model: A ``transformers.PreTrainedModel`` that ``axo.parallelize`` has split, or a serial one.
        folder: Where to; files of the same names are replaced, and tensor files of an earlier save are removed.
        max_file_bytes: Begin another file where one would be longer; a single tensor may be.

    Returns:
        The folder.

    Raises:
        ValueError: The model has no configuration of Hugging Face's, ranks were given different arguments, or rank 0
            could not write; the same on every rank.
    """
    state.check_kinds(model, None)
    group = checkpoint_group(state.communicators(model))
    tensors: dict[str, Parts] = {}
    with on_all_ranks(group) as told:
        told |= {"folder": str(folder), "max_file_bytes": max_file_bytes}
        tensors = _checked(model, folder, max_file_bytes)
    folder = Path(folder).absolute()
    # OSError of the disk; the others of Hugging Face, of a configuration that JSON does not know.
    errors = OSError, TypeError, ValueError
    with on_all_ranks(group, errors, lambda error: _unwritable(folder, error)):
        wholes = (parts.whole() for parts in tensors.values())
        try:
            if rank_in(group) == 0:
                _write(model, folder, tensors, wholes, max_file_bytes)
        finally:
            deque(wholes, maxlen=0)  # every rank takes part in every gather
    return folder


def _checked(model: nn.Module, folder: Any, max_file_bytes: Any) -> dict[str, Parts]:
    """Check the arguments. Returns name -> tensor: parameters and buffers, each under its first name."""
    check_local(folder, f"save_pretrained: folder={folder!r} names no folder; give one")
    if is_stage(model):
        raise ValueError(
            "save_pretrained: this model is one stage of a pipeline; save a checkpoint (axo.checkpoint.save), and load"
            " it without stages"
        )
    if not hasattr(getattr(model, "config", None), "save_pretrained"):
        raise ValueError(
            f"save_pretrained: {type(model).__qualname__} has no config of Hugging Face's; use axo.checkpoint.save, or,"
            " for a model of LitGPT's, axo consolidate and litgpt convert_from_litgpt"
        )
    tensors = state.parts(state.model_entries(model)[0])
    for name, parts in tensors.items():
        safetensors.check_dtype(name, parts.local.dtype)
    if not isinstance(max_file_bytes, Real) or isinstance(max_file_bytes, bool) or not float(max_file_bytes) >= 1:
        raise ValueError(f"save_pretrained: max_file_bytes={max_file_bytes!r} is no size; use a number of at least 1")
    return tensors


def _unwritable(folder: Path, error: Exception) -> str:
    where, why = (error.filename or folder, error.strerror) if isinstance(error, OSError) else (folder, error)
    return f"save_pretrained: {where} cannot be written: {why}"


def _write(model: Any, folder: Path, tensors: dict[str, Parts], wholes: Iterator[torch.Tensor], most: int) -> None:
    """Write the configuration, the tensors as they come, and which of them lies in which file."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    dtypes = [parts.local.dtype for parts in tensors.values() if parts.local.is_floating_point()]
    setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", str(dtypes[0]).removeprefix("torch."))
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)
    described = {name: (tuple(parts.shape), parts.local.dtype) for name, parts in tensors.items()}
    files = _split(described, most)
    for file, names in files.items():
        safetensors.write(folder / file, {name: described[name] for name in names}, islice(wholes, len(names)), {})
    written = {*files}
    if len(files) > 1:  # once they are there: an earlier save's index holds until then
        written.add(_INDEX)
        size = sum(safetensors.bytes_of(*each) for each in described.values())
        where = {name: file for file, names in files.items() for name in names}
        with whole_file(folder / _INDEX) as unfinished:
            unfinished.write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": where}, indent=2))
    for path in folder.iterdir():  # from_pretrained takes a model.safetensors before any other
        if _TENSORS.fullmatch(path.name) and path.name not in written:
            path.unlink()


def _split(described: state.Described, most: int) -> dict[str, list[str]]:
    """File -> names of the tensors in it."""
    parts: list[list[str]] = []
    room = -math.inf
    for name, each in described.items():
        size = safetensors.bytes_of(*each)
        if size > room:
            parts.append([])
            room = most
        parts[-1].append(name)
        room -= size
    if len(parts) < 2:
        return {"model.safetensors": parts[0] if parts else []}
    return {f"model-{number:05d}-of-{len(parts):05d}.safetensors": names for number, names in enumerate(parts, 1)}
