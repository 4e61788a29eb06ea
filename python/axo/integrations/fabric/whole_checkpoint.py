"""Checkpoints of a sharded model and optimizer as one rank would write them, and back.

    save    for each tensor in turn: gather it, write it on rank 0, drop it      (every rank takes part)
    load    each rank maps the file and copies its own parts out of it           (no communication)

What another stage of a pipeline holds is gathered there, and sent to rank 0; the file does not show it.

The file is what ``torch.save`` of the serial state gives: whole tensors under torch's names, the optimizer's moments in
the shape of their parameters. So a run without Axo reads it, and one on any other grid.

Not here: sharded checkpoints, written by all ranks (sharded_checkpoint.py); state of an optimizer that has not the
shape of its parameter (Adafactor's rows and columns) is refused by name.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.types import _Stateful
from torch import nn
from torch.optim import Optimizer

from axo.checkpoint.boxes import Parts
from axo.checkpoint.folder import whole_file
from axo.checkpoint.state import plain_optimizer, state_parts, values_of_none, with_names
from axo.checkpoint.stored import read_plain
from axo.integrations.fabric.stages import StageRunner
from axo.optim import checks
from axo.placement import placement_of

Keep = Callable[[torch.Tensor], Any]
Filter = Callable[[str, Any], bool]


def keep_all(tensor: torch.Tensor) -> torch.Tensor:
    """Keep a copy of a gathered tensor in host memory."""
    return tensor.to("cpu", copy=True)


def module_state(
    module: nn.Module, keep: Keep | None, wanted: Filter | None = None, stages: StageRunner | None = None
) -> dict[str, Any]:
    """The whole state dict of a sharded module, tensor by tensor. Every rank must call it.

    Args:
        module: Holds Axo's layers; what else it holds is replicated.
        keep: What becomes of each whole tensor on this rank; None: it is dropped and the result is empty.
        wanted: Leave out what it is false for; must answer alike on all ranks.
        stages: The stages, if the module is this rank's part of a pipeline.
    """
    own = {
        name: Parts(value, placement_of(value)) if isinstance(value, torch.Tensor) else value
        for name, value in module.state_dict(keep_vars=True).items()
        if wanted is None or wanted(name, value)
    }
    whole = _whole(own, keep, stages)
    return whole if stages is None else {name: whole[name] for name in stages.entries if name in whole}


@torch.no_grad()
def _whole(own: dict[Any, Any], keep: Keep | None, stages: StageRunner | None) -> dict[Any, Any]:
    """Name -> what ``keep`` makes of it, of all stages' values; a tensor of another stage is sent here."""
    like = {
        name: torch.empty(value.shape, dtype=value.local.dtype, device="meta") if isinstance(value, Parts) else value
        for name, value in own.items()
    }
    kept: dict[Any, Any] = {}
    for stage, values in enumerate([like] if stages is None else stages.share(like)):
        for name, value in values.items():
            if name in kept:  # an earlier stage holds it too
                continue
            if isinstance(value, torch.Tensor):
                whole = own[name].whole() if stages is None or stage == stages.comms.stage else None
                whole = whole if stages is None else stages.bring(whole, stage, value)
                value = None if keep is None or whole is None else keep(whole)
                del whole  # before the next is gathered
            kept[name] = value
    return {} if keep is None else kept


def optimizer_state(optimizer: Optimizer, keep: Keep | None, stages: StageRunner | None = None) -> dict[str, Any]:
    """The whole state dict of an optimizer over sharded parameters, tensor by tensor. Every rank must call it.

    Raises:
        ValueError: A state tensor has neither the shape of its parameter nor a single element, or is not a parameter's.
    """
    own, of_all_stages = _names(optimizer, stages)
    parts = {
        (name, key): state_parts(optimizer, name, key, value, parameter) if isinstance(value, torch.Tensor) else value
        for name, parameter in with_names(optimizer, own)
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    values: dict[Any, dict[str, Any]] = dict(values_of_none(optimizer))
    for (name, key), whole in _whole(parts, keep, stages).items():
        values.setdefault(name, {})[key] = whole
    options = map(checks.without, optimizer.param_groups)
    groups = [group | {"params": names} for group, names in zip(options, of_all_stages, strict=True)]
    return plain_optimizer(values, groups) if keep is not None else {}


def _names(optimizer: Optimizer, stages: StageRunner | None) -> tuple[list[list[Any]], list[list[Any]]]:
    """Names of the parameters of each group of this rank, and of all stages: numbers, where there are none."""
    if stages is not None:
        return stages.names_of(optimizer)
    number = itertools.count()
    names = [[next(number) for _ in group["params"]] for group in optimizer.param_groups]
    return names, names


def local_optimizer_state(
    optimizer: Optimizer, whole: dict[str, Any], stages: StageRunner | None = None
) -> dict[str, Any]:
    """Cut this rank's parts out of a whole optimizer state dict, for ``optimizer.load_state_dict``.

    Raises:
        ValueError: A state tensor has the shape of neither the whole parameter nor this rank's part.
    """
    own, of_all_stages = _names(optimizer, stages)
    numbers = {name: number for number, name in enumerate(itertools.chain(*of_all_stages))}
    saved: dict[int, dict[str, Any]] = whole["state"]
    if any(index >= len(numbers) for index in saved):
        raise ValueError(f"checkpoint: optimizer state of parameter {max(saved)}; the model has only {len(numbers)}")
    local: dict[int, dict[str, Any]] = {}
    for index, (name, parameter) in enumerate(with_names(optimizer, own)):
        placement = placement_of(parameter)
        for key, value in saved.get(numbers[name], {}).items():
            if isinstance(value, torch.Tensor) and value.dim() and placement is not None:
                lies = placement.state  # with ZeRO cut over data too
                if tuple(value.shape) not in (lies.whole_shape, lies.local_shape()):
                    raise ValueError(
                        f"checkpoint: {key!r} of parameter {name} to load into {type(optimizer).__name__} has shape"
                        f" {tuple(value.shape)}, and the parameter has {lies.whole_shape}"
                    )
                value = lies.take(value) if tuple(value.shape) == lies.whole_shape else value
            local.setdefault(index, {})[key] = value.clone() if isinstance(value, torch.Tensor) else value
    groups = whole["param_groups"]
    if stages is not None:
        number = itertools.count()
        groups = [group | {"params": [next(number) for _ in mine]} for group, mine in zip(groups, own, strict=True)]
    return {"state": local, "param_groups": groups}


def is_file_of_torch(path: Any, io: Any) -> bool:
    """Whether ``io``, Fabric's CheckpointIO, handles ``path`` as torch does: then it is done here, tensor by tensor."""
    return type(io) is TorchCheckpointIO and "://" not in str(path)


def save(
    path: Any, state: dict[str, Any], filters: dict[str, Filter], *, writes: bool, stages: StageRunner | None = None
) -> None:
    """Write ``state``, whose modules and optimizers are sharded, each tensor when it has been gathered.

    Every rank must call it.

    Args:
        path: The file.
        state: Modules, optimizers, anything with a state dict, and plain values.
        filters: As in ``Fabric.save``.
        writes: Whether this rank writes.
        stages: The stages, if the module is this rank's part of a pipeline.
    """
    if not writes:
        _convert(state, None, filters, stages)
        return
    from litgpt.utils import incremental_save

    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir():
        raise ValueError(f"checkpoint: {target} is a sharded checkpoint, a folder; remove it, or save sharded again")
    with whole_file(target) as unfinished, incremental_save(unfinished) as file:
        file.save(_convert(state, lambda tensor: file.store_early(tensor.cpu()), filters, stages))


def load(path: Any, io: Any, weights_only: bool | None) -> dict[str, Any]:
    """Read a checkpoint file; its tensors stay on disk until they are used, where the format allows it.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It cannot be read.
    """
    if not is_file_of_torch(path, io):
        return io.load_checkpoint(path, weights_only=weights_only)  # type: ignore[no-any-return]
    if not Path(path).is_file():
        raise FileNotFoundError(f"checkpoint: {path} does not exist or is not a file")
    return read_plain(Path(path), weights_only)


def _convert(
    state: dict[str, Any], keep: Keep | None, filters: dict[str, Filter], stages: StageRunner | None
) -> dict[str, Any]:
    converted: dict[str, Any] = {}
    for key, value in state.items():
        wanted = filters.get(key)
        if isinstance(value, nn.Module):
            converted[key] = module_state(value, keep, wanted, stages)
            continue
        if isinstance(value, Optimizer):
            value = optimizer_state(value, keep, stages)
        elif isinstance(value, _Stateful):
            value = value.state_dict()
        if wanted is not None and isinstance(value, dict):
            value = {name: each for name, each in value.items() if wanted(name, each)}
        converted[key] = value
    return converted
