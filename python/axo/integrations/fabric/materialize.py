"""Give a parallel model that was built on the meta device the values that its serial original would get.

Trainers build an empty model and then say how each layer is to be filled, by ``reset_parameters`` of the layer (LitGPT
replaces that method on single layers). The layers are gone once the model is parallel, so they are kept, still without
storage: each in turn gets storage, fills itself, hands this rank its shards, and is emptied again. All of it runs under
rank 0's generator, in the order of ``Module.modules``: the values are those of one rank that calls every
``reset_parameters`` in turn and ties parameters then (LitGPT's ``tie_embeddings``: of those that share one the first
gives its values, the others draw theirs in vain), and no rank ever holds more than one whole layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from axo.comm.connect import Communicators
from axo.integrations.fabric.recorded_init import RecordedInit
from axo.nn.generator import source_generator
from axo.nn.init import make_room, tied_parameters
from axo.nn.layer import ParallelLayer
from axo.nn.placeholder import Placeholder, shared


def holds_meta(module: nn.Module) -> bool:
    """Whether ``module`` itself has tensors on the meta device."""
    return any(tensor.is_meta for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)))


def materialize(
    model: nn.Module, originals: dict[str, nn.Module], comms: Communicators, recorded: RecordedInit | None = None
) -> None:
    """Fill every module of ``model`` that has tensors on the meta device. Every rank must call it.

    Args:
        model: What ``axo.parallelize`` made.
        originals: Its modules before that, by name; those that were replaced are needed.
        comms: The communicators of the grid.
        recorded: Knows how the originals' constructors would have filled them, which then counts.

    Raises:
        ValueError: A module has no ``reset_parameters``.
    """
    ties = tied_parameters(model)
    drawn: set[int] = set()  # whole parameters that have their values
    with source_generator(comms, comms.device, all_stages=True), torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, Placeholder):
                _draw_elsewhere(model, name, originals, comms, recorded, drawn)
                continue
            if not holds_meta(module):
                if name in originals and _has_drawn(originals[name], drawn):
                    _fill(originals[name], name, comms, recorded)
                    originals[name].to("meta")
                continue
            dtypes = {key: buffer.dtype for key, buffer in module.named_buffers(recurse=False)}
            make_room(module, comms.device, ties)
            if hasattr(module, "load_serial"):
                serial = originals[name]
                drawn.update(map(id, serial.parameters(recurse=False)))
                _fill(serial, name, comms, recorded)
                module.load_serial(serial)
                serial.to("meta")  # a reset_parameters set on the layer may refer to it: dropping it would not free it
                continue
            _reset(module, name)
            for key, dtype in dtypes.items():  # what is computed anew may come in another precision
                setattr(module, key, getattr(module, key).to(dtype))
    mask: Any = getattr(model, "mask_cache", None)
    if mask is not None and mask.is_meta:  # litgpt's, of a KV cache that was set on the meta device; no buffer
        model.mask_cache = torch.ones(mask.shape, dtype=torch.bool, device=comms.device).tril()  # type: ignore[assignment]


def _has_drawn(serial: nn.Module, drawn: set[int]) -> bool:
    whole = {id(parameter) for parameter in serial.parameters(recurse=False)}
    return bool(whole) and whole <= drawn


def _fill(serial: nn.Module, name: str, comms: Communicators, recorded: RecordedInit | None) -> None:
    if recorded is not None and recorded.knows(serial):
        recorded.fill(serial, comms.device, comms)
        return
    serial.to_empty(device=comms.device, recurse=False)
    _reset(serial, name)


def _draw_elsewhere(
    model: nn.Module,
    name: str,
    originals: dict[str, nn.Module],
    comms: Communicators,
    recorded: RecordedInit | None,
    drawn: set[int],
) -> None:
    """Draw what another stage's layers get; keep a table that this stage holds too, and drop the rest."""
    for below, serial in originals.items():
        if below != name and not below.startswith(f"{name}."):
            continue
        whole = dict(serial.named_parameters(recurse=False))
        if not whole:
            continue
        tied = _has_drawn(serial, drawn)
        drawn.update(map(id, whole.values()))
        _fill(serial, below, comms, recorded)
        for key in () if tied else whole:
            owner, _, child = shared(model).get(f"{below}.{key}", "").rpartition(".")
            if owner:
                layer = model.get_submodule(owner)
                assert isinstance(layer, ParallelLayer)
                layer.to_empty(device=comms.device, recurse=False)
                getattr(layer, child).copy_(layer.placements[child].take(getattr(serial, key).detach()))
        serial.to("meta")


def _reset(module: Any, name: str) -> None:
    if not callable(getattr(module, "reset_parameters", None)):
        raise ValueError(
            f"AxoStrategy: {name or 'the model'!r} ({type(module).__qualname__}) was built on the meta device and has"
            " no reset_parameters to fill it; build it with empty_init=False"
        )
    module.reset_parameters()
