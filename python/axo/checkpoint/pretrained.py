"""save_pretrained: a parallel Hugging Face model as a folder that ``from_pretrained`` loads.

    config.json                          and generation_config.json, if the model has one
    model.safetensors                    or model-00001-of-00003.safetensors, ..., with model.safetensors.index.json

Each tensor in turn is gathered on all ranks, and rank 0 writes it; no rank holds more than one whole tensor. A tensor
with several names (a tied head) is written under the first, as Hugging Face does.

Not here: LitGPT's models, which have no such configuration (``axo consolidate``, then ``litgpt convert_from_litgpt``).
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
from collections import deque
from collections.abc import Callable
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import nn

from axo.checkpoint import safetensors
from axo.checkpoint.folder import check_local, whole_file
from axo.checkpoint.ranks import agree, checkpoint_group, rank_in
from axo.checkpoint.state import check_kinds, check_storage, communicators
from axo.nn.placeholder import is_stage
from axo.placement import placement_of
from axo.sharding import unshard

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
    check_kinds(model, None)
    group = checkpoint_group(communicators(model))
    tensors = _tensors(model)
    problem = f"save_pretrained: folder={folder!r} names no folder; give one"
    if isinstance(folder, str | os.PathLike) and os.fspath(folder):
        problem = _problem(model, tensors, folder)
        folder = Path(folder).absolute()
    number = isinstance(max_file_bytes, Real) and not isinstance(max_file_bytes, bool)
    if not problem and not (number and max_file_bytes >= 1):
        problem = f"save_pretrained: max_file_bytes={max_file_bytes!r} is no size; use a number of at least 1"
    agree(group, problem, folder=str(folder), max_file_bytes=max_file_bytes)
    folder = Path(folder)
    files = _split(tensors, max_file_bytes)
    writes, problem = rank_in(group) == 0, ""

    def attempt(what: Path, write: Callable[..., None], *arguments: Any) -> None:
        """Have rank 0 write, if nothing has gone wrong so far."""
        nonlocal problem
        try:
            if writes and not problem:
                write(*arguments)
        except OSError as error:
            problem = f"save_pretrained: {what} cannot be written: {error.strerror}"
        except (TypeError, ValueError) as error:  # of Hugging Face, of a configuration that JSON does not know
            problem = f"save_pretrained: {what} cannot be written: {error}"

    attempt(folder, _write_words, model, folder, tensors)
    for file, names in files.items():
        wholes = (_whole(tensors[name]) for name in names)
        described = {name: (tensors[name].dtype, _shape(tensors[name])) for name in names}
        attempt(folder / file, safetensors.write, folder / file, described, wholes, {})
        deque(wholes, maxlen=0)  # the other ranks, and rank 0 after a failure, still take part in every gather
    if len(files) > 1:
        attempt(folder, _write_index, folder, files, tensors)
    attempt(folder, _remove_others, folder, {*files, _INDEX} if len(files) > 1 else {*files})
    agree(group, problem)
    return folder


def _problem(model: nn.Module, tensors: dict[str, torch.Tensor], folder: str | os.PathLike[str]) -> str:
    if is_stage(model):
        return (
            "save_pretrained: this model is one stage of a pipeline; save a checkpoint (axo.checkpoint.save), and load"
            " it without stages"
        )
    if not hasattr(getattr(model, "config", None), "save_pretrained"):
        return (
            f"save_pretrained: {type(model).__qualname__} has no config of Hugging Face's; use axo.checkpoint.save, or,"
            " for a model of LitGPT's, axo consolidate and litgpt convert_from_litgpt"
        )
    try:
        check_local(folder)
        for name, tensor in tensors.items():
            check_storage(name, tensor)
            safetensors.check_dtype(name, tensor.dtype)
    except ValueError as error:
        return str(error)
    return ""


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, each under its first name."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            found.setdefault(id(value), (name, value))
    return dict(found.values())


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    placement = placement_of(tensor)
    return tuple(tensor.shape) if placement is None else placement.global_shape


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    placement = placement_of(tensor)
    return tensor.detach() if placement is None else unshard(tensor.detach(), placement)


def _split(tensors: dict[str, torch.Tensor], most: int) -> dict[str, list[str]]:
    """File -> names of the tensors in it."""
    parts: list[list[str]] = []
    room = 0
    for name, tensor in tensors.items():
        size = math.prod(_shape(tensor)) * tensor.dtype.itemsize
        if not parts or size > room:
            parts.append([])
            room = most
        parts[-1].append(name)
        room -= size
    if len(parts) < 2:
        return {"model.safetensors": parts[0] if parts else []}
    return {f"model-{number:05d}-of-{len(parts):05d}.safetensors": names for number, names in enumerate(parts, 1)}


def _remove_others(folder: Path, kept: set[str]) -> None:
    """Remove tensor files of an earlier save: ``from_pretrained`` takes a model.safetensors before any other."""
    for path in folder.iterdir():
        if _TENSORS.fullmatch(path.name) and path.name not in kept:
            path.unlink()


def _write_words(model: Any, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """The configuration."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    dtypes = [tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()]
    setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", str(dtypes[0]).removeprefix("torch."))
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)


def _write_index(folder: Path, files: dict[str, list[str]], tensors: dict[str, torch.Tensor]) -> None:
    """Which tensor lies in which file, once these are there: an earlier save's index holds until then."""
    size = sum(math.prod(_shape(tensor)) * tensor.dtype.itemsize for tensor in tensors.values())
    where = {name: file for file, names in files.items() for name in names}
    with whole_file(folder / _INDEX) as unfinished:
        unfinished.write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": where}, indent=2))
