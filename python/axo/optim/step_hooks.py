"""Functions to call around every step of every optimizer of the process, while their owner lives.

    before    a step begins, or its closure is about to run: parameters may be used as a whole
    update    the gradients are there, and the update is next
    after     the update is done

torch goes through one dict of hooks in a step. Taking a hook out of it when a model is collected, which can be at any
moment, could change that dict meanwhile ("OrderedDict mutated during iteration"). So one hook before and one after
stay there for good, and ask the owners that live.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

TRIAL = "_axo_trial"  # an attribute of an optimizer whose steps are of no training: nothing is called
Owner = TypeVar("Owner")


class _Hooks(NamedTuple):
    before: Callable[[Any, Optimizer], object] | None
    update: Callable[[Any, Optimizer], object] | None
    after: Callable[[Any, Optimizer], object] | None


_owners = weakref.WeakKeyDictionary[object, list[_Hooks]]()


def around_steps(
    owner: Owner,
    *,
    before: Callable[[Owner, Optimizer], object] | None = None,
    update: Callable[[Owner, Optimizer], object] | None = None,
    after: Callable[[Owner, Optimizer], object] | None = None,
) -> None:
    """Call functions with ``owner`` and the optimizer around each step. None of them may keep the owner alive."""
    _owners.setdefault(owner, []).append(_Hooks(before, update, after))


def forget(owner: object) -> None:
    """Call nothing more for ``owner``."""
    _owners.pop(owner, None)


def _call(moment: str, optimizer: Optimizer) -> None:
    for owner, of_owner in list(_owners.items()):
        for hooks in of_owner:
            hook = getattr(hooks, moment)
            if hook is not None:
                hook(owner, optimizer)


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if hasattr(optimizer, TRIAL):
        return None
    _call("before", optimizer)
    closure = options["closure"] if "closure" in options else args[1] if len(args) > 1 else None
    if not callable(closure):  # an optimizer of one's own may take something else first
        _call("update", optimizer)
        return None

    def followed() -> object:
        _call("before", optimizer)
        loss = closure()
        _call("update", optimizer)
        return loss

    if "closure" in options:  # which may not be allowed by position
        return args, options | {"closure": followed}
    return (args[0], followed, *args[2:]), options


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    if not hasattr(optimizer, TRIAL):
        _call("after", optimizer)


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
