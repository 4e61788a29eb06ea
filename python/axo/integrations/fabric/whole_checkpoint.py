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

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.types import _Stateful
from torch import nn
from torch.optim import Optimizer

from axo.checkpoint.folder import whole_file
from axo.checkpoint.storage import read_plain
from axo.integrations.fabric.stages import StageRunner
from axo.optim import checks
from axo.placement import Placement, placement_of
from axo.sharding import unshard

Keep = Callable[[torch.Tensor], Any]
Filter = Callable[[str, Any], bool]


def keep_all(tensor: torch.Tensor) -> torch.Tensor:
    """Keep a gathered tensor in host memory."""
    return tensor.cpu()


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
    every = module.state_dict(keep_vars=True).items()
    own = {name: (it, placement_of(it)) for name, it in every if wanted is None or wanted(name, it)}
    return dict(_kept(own, keep, None if stages is None else stages.entries, stages))


def _kept(
    own: dict[str, tuple[Any, Placement | None]], keep: Keep | None, order: list[str] | None, stages: StageRunner | None
) -> Iterator[tuple[str, Any]]:
    """(name, what ``keep`` makes of it) of all stages' values, in order; a tensor of another stage is sent here."""
    mine = {name: _like_whole(*each) for name, each in own.items()}
    every = [mine] if stages is None else stages.share(mine)
    for name in order or own:
        holder = next((number for number, values in enumerate(every) if name in values), None)
        if holder is None:
            continue
        whole = like = every[holder][name]
        if isinstance(like, torch.Tensor):
            whole = _whole(*own[name]) if stages is None or holder == stages.comms.stage else None
            whole = whole if stages is None else stages.bring(whole, holder, like)
        if keep is not None:
            yield name, keep(whole) if isinstance(whole, torch.Tensor) else whole


def optimizer_state(optimizer: Optimizer, keep: Keep | None, stages: StageRunner | None = None) -> dict[str, Any]:
    """The whole state dict of an optimizer over sharded parameters, tensor by tensor. Every rank must call it.

    Raises:
        ValueError: A state tensor has neither the shape of its parameter nor a single element.
    """
    local = optimizer.state_dict()
    parameters = _parameters(optimizer)
    own: dict[str, tuple[Any, Placement | None]] = {}
    groups, owners = _numbers(optimizer, stages)
    for index, parameter in enumerate(parameters):
        for key, value in local["state"].get(index, {}).items():
            placement = None
            if isinstance(value, torch.Tensor) and value.dim():
                placement = state_placement(parameter)
                shape = parameter.shape if placement is None else placement.local_shape()
                _check_shape(optimizer, index, key, value.shape, shape)
            own[f"{owners[index]}/{key}"] = value, placement
    kept: dict[int, dict[str, Any]] = {}
    order = None
    if stages is not None:
        place = {number: at for at, number in enumerate(number for group in groups for number in group)}
        names = dict.fromkeys(name for each in stages.share(list(own)) for name in each)
        order = sorted(names, key=lambda name: place[int(name.partition("/")[0])])
    for name, whole in _kept(own, keep, order, stages):
        number, _, key = name.partition("/")
        kept.setdefault(int(number), {})[key] = whole
    options = [checks.without(group) for group in local["param_groups"]]
    told = [group | {"params": numbers} for group, numbers in zip(options, groups, strict=True)]
    return {"state": kept, "param_groups": told} if keep is not None else {}


def _numbers(optimizer: Optimizer, stages: StageRunner | None) -> tuple[list[list[int]], list[int]]:
    """How a state dict of the whole model numbers parameters: those of each group, and this rank's own in order."""
    if stages is None:
        counts = [len(group["params"]) for group in optimizer.param_groups]
        starts = [sum(counts[:group]) for group in range(len(counts))]
        groups = [list(range(start, start + count)) for start, count in zip(starts, counts, strict=True)]
        return groups, list(range(sum(counts)))
    names = stages.groups_of(optimizer)
    number = {name: index for index, name in enumerate(name for group in names for name in group)}
    own = [number[name] for group in stages.names_of(optimizer) for name in group]
    return [[number[name] for name in group] for group in names], own


def local_optimizer_state(
    optimizer: Optimizer, whole: dict[str, Any], stages: StageRunner | None = None
) -> dict[str, Any]:
    """Cut this rank's parts out of a whole optimizer state dict, for ``optimizer.load_state_dict``.

    Raises:
        ValueError: A state tensor has the shape of neither the whole parameter nor this rank's part.
    """
    parameters = _parameters(optimizer)
    groups, owners = _numbers(optimizer, stages)
    known = sum(map(len, groups))
    saved: dict[int, dict[str, Any]] = whole["state"]
    if any(index >= known for index in saved):
        raise ValueError(f"checkpoint: optimizer state of parameter {max(saved)}; the model has only {known}")
    local: dict[int, dict[str, Any]] = {}
    for own, index in enumerate(owners):
        if index not in saved:
            continue
        placement = state_placement(parameters[own])
        local[own] = {}
        for name, value in saved[index].items():
            if isinstance(value, torch.Tensor) and value.dim() and placement is not None:
                if tuple(value.shape) == placement.global_shape:
                    value = placement.take(value)
                _check_shape(optimizer, index, name, value.shape, placement.local_shape())
            local[own][name] = value.clone() if isinstance(value, torch.Tensor) else value
    if stages is None:
        return {"state": local, "param_groups": whole["param_groups"]}
    here, told = iter(range(len(owners))), []
    for group, mine in zip(whole["param_groups"], optimizer.param_groups, strict=True):
        told.append(group | {"params": [next(here) for _ in mine["params"]]})
    return {"state": local, "param_groups": told}


def state_placement(parameter: torch.Tensor) -> Placement | None:
    """How the optimizer's state of a parameter lies: with ZeRO cut over data too."""
    placement = placement_of(parameter)
    return None if placement is None else placement.state


def save(
    path: Any,
    state: dict[str, Any],
    io: Any,
    storage_options: Any,
    filters: dict[str, Filter],
    *,
    writes: bool,
    stages: StageRunner | None = None,
) -> None:
    """Write ``state``, whose modules and optimizers are sharded, to ``path``. Every rank must call it.

    Args:
        path: The file.
        state: Modules, optimizers, anything with a state dict, and plain values.
        io: Fabric's CheckpointIO. The default one writes each tensor when it has been gathered; another gets all of
            them at once, on rank 0.
        storage_options: For another CheckpointIO.
        filters: As in ``Fabric.save``.
        writes: Whether this rank writes.
        stages: The stages, if the module is this rank's part of a pipeline.
    """
    if type(io) is not TorchCheckpointIO or "://" in str(path) or storage_options is not None:
        tree = _convert(state, keep_all if writes else None, filters, stages)
        if writes:
            io.save_checkpoint(checkpoint=tree, path=path, storage_options=storage_options)
        return
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
    if type(io) is not TorchCheckpointIO or "://" in str(path):
        return io.load_checkpoint(path, weights_only=weights_only)
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
            value = {name: item for name, item in value.items() if wanted(name, item)}
        converted[key] = value
    return converted


def _like_whole(value: Any, placement: Placement | None) -> Any:
    """A whole tensor's shape and dtype, on the meta device; what is no tensor, as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty(value.shape if placement is None else placement.global_shape, dtype=value.dtype, device="meta")


@torch.no_grad()
def _whole(tensor: torch.Tensor, placement: Placement | None) -> torch.Tensor:
    return tensor.detach().clone() if placement is None else unshard(tensor.detach(), placement)


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    """In the order in which the state dict numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _check_shape(optimizer: Optimizer, index: int, name: str, shape: Any, expected: Any) -> None:
    if shape != expected:
        raise ValueError(
            f"checkpoint: {type(optimizer).__name__} keeps {name!r} of parameter {index} in shape {tuple(shape)}, and"
            f" the parameter has shape {tuple(expected)} on this rank; only state of the parameter's shape is supported"
        )
