"""Refuse the state of an optimizer that another rank has saved.

``optimizer.state_dict()`` holds this rank's shards, under numbers that are the same on every rank: one that rank 0
saved would load on all, and be wrong in silence. So its groups say whose shards they are ("x=0 of 2, z=1 of 4"; axes
that split nothing are left out, since along them ranks hold the same), and the first step after a load compares that.

Not here: ``axo.checkpoint``, which saves what any grid can load.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from torch.optim import Optimizer

from axo.grid import AXES
from axo.placement import placement_of

KEY = "axo_shards"  # in each group of a state dict


def shards_of(optimizer: Optimizer) -> str:
    """Which shards this rank's state is of; "" where every rank has the same."""
    found = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            placement = placement_of(parameter)
            if placement is not None and placement.comms is not None:
                comms = placement.comms
                for axis in (axis for axes in placement.state.splits for axis in axes):
                    if comms.grid.size(axis) > 1:
                        found[axis] = f"{axis}={getattr(comms.coords, axis)} of {comms.grid.size(axis)}"
    return ", ".join(found[axis] for axis in AXES if axis in found)


def check(optimizer: Optimizer) -> None:
    """Compare what a loaded state says with this rank.

    Raises:
        ValueError: It is of other shards.
    """
    for group in optimizer.param_groups:
        said = group.pop(KEY, None)
        if said is not None and said != (mine := shards_of(optimizer)):
            raise ValueError(
                f"step(): the state of this {type(optimizer).__name__} was saved with the shards of {said}, and this"
                f" rank has those of {mine or 'all ranks'}: optimizer.state_dict() is a rank's own; save and load with"
                " axo.checkpoint.save and load, which take any grid"
            )


def mark(optimizer: Optimizer) -> None:
    """Have each state dict of this optimizer say whose shards it holds."""
    if _say not in optimizer._optimizer_state_dict_post_hooks.values():  # type: ignore[attr-defined]
        optimizer.register_state_dict_post_hook(_say)


def _say(optimizer: Optimizer, state: MutableMapping[str, Any]) -> None:
    shards = shards_of(optimizer)
    for group in state["param_groups"]:
        group.pop(KEY, None)
        if shards:
            group[KEY] = shards


def without(group: dict[str, Any]) -> dict[str, Any]:
    """A group's options as they were given."""
    return {key: value for key, value in group.items() if key != KEY}
