"""Methods of other packages that see a whole model, where ranks hold parts of it.

PEFT's ``merge`` and ``unmerge`` of a layer (of ``merge_adapter``, ``merge_and_unload``) get whole weights, one layer's
at a time, and each rank keeps its part of what they leave. transformers' ``generate`` goes on with passes until all
ranks along z have their tokens (its ``synced_gpus``), since weights are gathered over z in each. All ranks call them.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import nn

from axo.comm.agree import all_call
from axo.comm.connect import Communicators
from axo.placement import is_split, placement_of
from axo.sharding import unshard


def install(model: nn.Module, comms: Communicators) -> None:
    """Give the modules of ``model``, which a plan has made, such methods."""
    for module in model.modules():
        target: Any = module
        if hasattr(module, "merged_adapters"):  # a layer of PEFT's
            target.merge, target.unmerge = (partial(_of_whole, module, comms, name) for name in ("merge", "unmerge"))
        generate = getattr(module, "generate", None)
        if comms.grid.z > 1 and callable(generate) and "synced_gpus" in inspect.signature(generate).parameters:
            target.generate = partial(generate, synced_gpus=True)
            target._has_unfinished_sequences = partial(_has_unfinished_sequences, comms)


def _of_whole(layer: nn.Module, comms: Communicators, name: str, *args: Any, **options: Any) -> Any:
    split: Any = [p for p in layer.parameters() if is_split(placement_of(p))]
    if split:
        all_call(comms, f"{type(layer).__name__}.{name}()")
    for parameter in split:
        parameter.data = unshard(parameter.detach(), parameter.placement)
    try:
        return getattr(type(layer), name)(layer, *args, **options)
    finally:
        for parameter in split:
            parameter.data = parameter.placement.take(parameter.detach()).clone()


def _has_unfinished_sequences(comms: Communicators, done: bool, synced_gpus: bool, device: torch.device) -> bool:
    """As transformers' own, of the ranks along z."""
    if synced_gpus:
        return bool(comms.z.all_reduce(torch.tensor([float(not done)], device=device)).item())
    return not done
