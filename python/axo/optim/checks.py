"""Refuse steps of optimizers that cannot be right on this rank's shards, before anything is changed.

    its update      must be one of single elements where parameters are split, which is tried (``update_trial``)
    its state       must be that of this rank's shards
    its parameters  must be those that the model has; one that also holds some which are not the grid's gets a warning

Every optimizer of the process is asked, since a model may be made by hand. ``optimizer.state_dict()`` holds this rank's
shards, under numbers that are the same on every rank: one that rank 0 saved would load on all, and be wrong in silence.
So its groups say whose shards they are ("x=0 of 2, z=1 of 4"; axes that split nothing are left out, since along them
ranks hold the same), and the first step after a load compares that.

Not here: gradients that are missing (``Engine``); ``axo.checkpoint``, which saves what any grid can load.
"""

from __future__ import annotations

import math
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from types import FrameType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from axo.errors import Refused
from axo.grid import AXES
from axo.optim.step_hooks import around_steps
from axo.optim.update_trial import KEY, LIMIT, try_update
from axo.placement import placement_of


def stepped(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters of all groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def shards_of(optimizer: Optimizer) -> str:
    """Which shards this rank's state is of; "" where every rank has the same."""
    parts = {}
    for parameter in stepped(optimizer):
        placement = placement_of(parameter)
        if placement is not None and placement.comms is not None:
            comms = placement.comms
            for axis in (axis for axes in placement.state.splits for axis in axes):
                if comms.grid.size(axis) > 1:
                    parts[axis] = f"{axis}={getattr(comms.coords, axis)} of {comms.grid.size(axis)}"
    return ", ".join(parts[axis] for axis in AXES if axis in parts)


def without(group: dict[str, Any]) -> dict[str, Any]:
    """A group's options as they were given."""
    return {key: value for key, value in group.items() if key != KEY}


def check_update(optimizer: Optimizer, where: str) -> None:
    """Check that an optimizer may step on the parts of parameters that this rank has.

    One that knows of the other ranks' parts says so: its class has ``takes_shards = True``.

    Raises:
        Refused: Its update of a part of a tensor is not that part of its update of the whole tensor.
    """
    if getattr(optimizer, "takes_shards", False) or not shards_of(optimizer):
        return
    name, trial = type(optimizer).__name__, try_update(optimizer)
    if trial.share > LIMIT:
        how = trial.reason if math.isinf(trial.share) and trial.reason else f"is off by {min(trial.share, 9.99):.1%}"
        instead = "axo.optim.Muon" if name == "Muon" else "an optimizer such as AdamW or SGD"
        raise Refused(
            f"{where}: {name} does not update element by element (on a half of a small tensor it {how}), and its"
            f" parameters are split over ranks; use {instead}, or a grid with data ranks only and zero=0; one"
            " that knows of the other ranks' parts needs takes_shards = True on its class"
        )
    if trial.reason:
        warnings.warn(
            f"axo: {where}: {name} could not be tried on a part of a small tensor ({trial.reason}). Its parameters are"
            " split over ranks, so its steps are right only if it updates element by element",
            stacklevel=2,
        )


_FRAMEWORKS = ("accelerate", "lightning", "pytorch_lightning", "lightning_fabric", "torch")


class _StateChecks:
    """Checks each optimizer that steps on shards: its update once, and its state."""

    def __init__(self) -> None:
        self._tried: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # and groups it had then

    def forget(self, optimizer: Optimizer) -> None:
        """Its parameters are other shards now."""
        self._tried.pop(optimizer, None)

    def before_step(self, optimizer: Optimizer) -> None:
        if self._tried.get(optimizer) != len(optimizer.param_groups):
            for each in (*_around(optimizer), optimizer):
                check_update(each, "step()")
            self._tried[optimizer] = len(optimizer.param_groups)
        for group in optimizer.param_groups:
            said = group.pop(KEY, None)
            if said is not None and said != (mine := shards_of(optimizer)):
                raise ValueError(
                    f"step(): the state of this {type(optimizer).__name__} was saved with the shards of {said}, and"
                    f" this rank has those of {mine or 'all ranks'}: optimizer.state_dict() is a rank's own; save and"
                    " load with axo.checkpoint.save and load, which take any grid"
                )
        if _say_shards not in optimizer._optimizer_state_dict_post_hooks.values():  # type: ignore[attr-defined]
            optimizer.register_state_dict_post_hook(_say_shards)


def _around(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Optimizers in whose steps this one's is, and of which torch's hooks know nothing: wrappers with no ``__init__``
    of torch's. Those of frameworks hand a step on as it is, and one without groups has no update of its own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
        framework = frame.f_globals.get("__name__", "").partition(".")[0] in _FRAMEWORKS
        known = owner is optimizer or framework or not hasattr(owner, "param_groups")
        if isinstance(owner, Optimizer) and not known:
            yield owner
        frame = frame.f_back


def _say_shards(optimizer: Optimizer, state: MutableMapping[str, Any]) -> None:
    shards = shards_of(optimizer)
    for group in state["param_groups"]:
        group.pop(KEY, None)
        if shards:
            group[KEY] = shards


state_checks = _StateChecks()
around_steps(state_checks, before=_StateChecks.before_step)  # first, and for good


def watch_replaced(model: nn.Module) -> Callable[[], None]:
    """Note the parameters of ``model``. What is returned is called when some of them may have been replaced.

    From then on steps of optimizers that hold a parameter which the model no longer has are refused.
    """
    noted = [(name, weakref.ref(parameter)) for name, parameter in model.named_parameters()]

    def watch() -> None:
        kept = {id(parameter) for parameter in model.parameters()}
        gone = [(name, each) for name, each in noted if each() is not None and id(each()) not in kept]
        if gone:
            around_steps(model, before=lambda _, optimizer: _refuse(optimizer, gone))

    return watch


def _refuse(optimizer: Optimizer, gone: list[tuple[str, weakref.ref[nn.Parameter]]]) -> None:
    names = {id(each()): name for name, each in gone if each() is not None}
    lost = [names[id(p)] for p in stepped(optimizer) if id(p) in names] if names else []
    if lost:
        raise RuntimeError(
            f"step(): this optimizer was made before axo.parallelize, or not given to axo.regrid, and holds {len(lost)}"
            f" parameters that the model no longer has ({lost[0]!r} among them), so it would train nothing; make the"
            " optimizer after that, from model.parameters()"
        )


class OtherParameters:
    """Warns once of each optimizer that steps parameters of a model beside some that are not the grid's."""

    def __init__(self) -> None:
        self._asked: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def warn(self, optimizer: Optimizer, model: Iterable[nn.Parameter]) -> None:
        """``model`` gives its parameters; ``optimizer`` is about to update its own."""
        if optimizer in self._asked:
            return
        with_gradient = [p for p in stepped(optimizer) if p.grad is not None]
        if not with_gradient:
            return
        self._asked.add(optimizer)
        others = [tuple(p.shape) for p in with_gradient if placement_of(p) is None]
        if others and not {id(p) for p in stepped(optimizer)}.isdisjoint(map(id, model)):
            warnings.warn(
                f"axo: step(): {len(others)} parameters of this optimizer, of shape {others[0]}, are not the grid's."
                " Axo does not reduce their gradients over z and data, so they drift apart: put them into the model"
                " before axo.parallelize, or reduce their gradients before the step",
                stacklevel=2,
            )
