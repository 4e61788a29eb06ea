"""First values: equal to the serial layer's for the same seed, shard by shard, whatever the seeds of the other ranks.

Rank 0 of the grid is the source. Its generator's state goes to all ranks (``axo.nn.generator``); each builds one whole
layer at a time under that state, keeps its shards and drops the rest. So a rank never holds more than one whole layer.
A stage of a pipeline draws for the layers of the other stages too, and drops what it has drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from axo.nn.generator import source_generator
from axo.nn.layer import ParallelLayer, check_same_layers
from axo.nn.placeholder import Placeholder, is_stage, shared
from axo.offload import Offload


def init_weights(
    model: nn.Module,
    fn: Callable[..., Any] | None = None,
    *,
    with_names: bool = False,
    offload: Offload | None = None,
) -> nn.Module:
    """Give a parallel model, on the meta device or not, the values that the serial model would get.

    Equal to ``serial.to_empty(device=...); serial.apply(fn)`` under rank 0's generator, modules in the order of
    ``Module.apply``. For a parallel layer ``fn`` is called with the whole serial layer that it stands for, every
    other module is passed to ``fn`` itself. A parameter that ``fn`` leaves alone keeps its value, or, where it was on
    the meta device, gets what the layer's own ``reset_parameters`` gives. Where a module's buffers were on the meta
    device and it has no parameters of its own (litgpt's rotary cache), its ``reset_parameters`` is called too. Every
    rank must call this.

    Args:
        model: What ``axo.parallelize`` returned, or any module that holds parallel layers.
        fn: Fills one module; None calls ``reset_parameters`` of each module that has it.
        with_names: Call ``fn(module, name)`` with the module's name in ``model``, for rules that depend on it.
        offload: Moves each module's parameters to the lower tier once they are filled, where it says so.

    Raises:
        ValueError: The model holds no parallel layer, or the ranks' models differ.
    """
    parallel = [module for module in model.modules() if isinstance(module, ParallelLayer)]
    if not parallel:
        raise ValueError(f"init_weights: {type(model).__name__} holds no parallel layer; call axo.parallelize first")
    comms = parallel[0].comms
    check_same_layers([layer for layer in parallel if layer.placements], comms, "init_weights")
    fill = _nameless(_reset) if fn is None else fn if with_names else _nameless(fn)
    ties = tied_parameters(model)
    with source_generator(comms, comms.device, all_stages=is_stage(model)), torch.no_grad():
        _init_module(model, "", fill, comms.device, ties, model, offload)
    return model


def _take_shared(model: nn.Module, serial: nn.Module, name: str, keys: list[str]) -> None:
    """Another stage's layer ``name`` has been filled: take ``keys`` of it that this stage holds too.

    Who is filled last gives both their values.
    """
    own = shared(model)
    for key in keys:
        owner, _, child = own.get(f"{name}.{key}", "").rpartition(".")
        if not owner:
            continue
        layer = model.get_submodule(owner)
        assert isinstance(layer, ParallelLayer)
        if not getattr(layer, child).is_meta:  # else it is filled later
            getattr(layer, child).copy_(layer.placements[child].take(getattr(serial, key).detach()))


Ties = dict[torch.Tensor, list[tuple[nn.Module, str]]]


def tied_parameters(model: nn.Module) -> Ties:
    """Parameters that several modules share, with their owners."""
    owners: Ties = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(parameter, []).append((module, name))
    return {parameter: found for parameter, found in owners.items() if len(found) > 1}


def make_room(module: nn.Module, device: torch.device, ties: Ties) -> None:
    """Take a module off the meta device, without values; who shares a parameter with it shares the new one."""
    before = dict(module.named_parameters(recurse=False))
    module.to_empty(device=device, recurse=False)
    for name, old in before.items():
        for other, other_name in ties.get(old, ()):
            setattr(other, other_name, getattr(module, name))


def _reset(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None)
    if reset is not None:
        reset()


def _nameless(fn: Callable[[nn.Module], Any]) -> Callable[[nn.Module, str], Any]:
    return lambda module, name: fn(module)


def _init_module(
    module: nn.Module,
    name: str,
    fill: Callable[[nn.Module, str], Any],
    device: torch.device,
    ties: Ties,
    model: nn.Module,
    offload: Offload | None,
) -> None:
    for child_name, child in module.named_children():
        _init_module(child, f"{name}.{child_name}" if name else child_name, fill, device, ties, model, offload)
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    was_meta = any(tensor.is_meta for tensor in own)
    if was_meta:
        make_room(module, device, ties)
    if isinstance(module, ParallelLayer):
        _init_layer(module, name, fill, was_meta)
    elif isinstance(module, Placeholder):
        if module.stands_for is not None:
            _draw_module(module.stands_for, name, fill, device, model)
    else:
        fill(module, name)
        if was_meta and not any(True for _ in module.parameters(recurse=False)):
            _reset(module)
    if offload is not None:
        offload.move_in(module.parameters(recurse=False))


def _draw_module(
    module: nn.Module, name: str, fill: Callable[[nn.Module, str], Any], device: torch.device, model: nn.Module
) -> None:
    """Draw the values of a module on the meta device, and drop them."""
    for child_name, child in module.named_children():
        _draw_module(child, f"{name}.{child_name}", fill, device, model)
    if isinstance(module, ParallelLayer):
        if module.placements:
            weight = getattr(module, next(iter(module.placements)))
            for serial, keys in _filled(module, name, fill, device, weight.dtype, True):
                _take_shared(model, serial, name, keys)
        return
    tensors = any(True for kind in (module.parameters, module.buffers) for _ in kind(recurse=False))
    if tensors:
        make_room(module, device, {})
    fill(module, name)
    if tensors and not any(True for _ in module.parameters(recurse=False)):
        _reset(module)
    module.to_empty(device="meta", recurse=False)


def _init_layer(layer: ParallelLayer, name: str, fill: Callable[[nn.Module, str], Any], was_meta: bool) -> None:
    """Fill the serial layer that ``layer`` stands for and keep this rank's part of what was touched."""
    if not layer.placements:
        return
    weight = getattr(layer, next(iter(layer.placements)))
    for serial, names in _filled(layer, name, fill, weight.device, weight.dtype, was_meta):
        layer.load_serial(serial, names)


def _filled(
    layer: ParallelLayer,
    name: str,
    fill: Callable[[nn.Module, str], Any],
    device: torch.device,
    dtype: torch.dtype,
    was_meta: bool,
) -> Iterator[tuple[nn.Module, list[str]]]:
    """Whole layers with first values, one at a time, each with the parameters that are to be taken from it."""
    serial = layer.serial(device, dtype)
    parameters = dict(serial.named_parameters())
    for parameter in parameters.values():
        parameter.view(-1)[:1].fill_(torch.nan)  # still there afterwards: not touched
    fill(serial, name)
    untouched = [key for key, parameter in parameters.items() if parameter.view(-1)[:1].isnan().any()]
    yield serial, [key for key in layer.placements if key not in untouched]
    if untouched and was_meta:
        del serial, parameters, parameter  # one whole layer at a time
        default: Any = layer.serial(device, dtype)
        default.reset_parameters()
        yield default, untouched
