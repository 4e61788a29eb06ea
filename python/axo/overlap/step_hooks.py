"""Functions to call before and after every step of every optimizer of the process, while their owner lives.

torch goes through one dict of hooks in a step. Taking a hook out of it when a model is collected, which can be at any
moment, could change that dict meanwhile ("OrderedDict mutated during iteration"). So one hook before and one after
stay there for good, and ask the owners that live.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # of a step: by position, the optimizer first, and by name
# Called with its owner, the optimizer and its step's arguments; before a step it may return new ones.
Hook = Callable[[Any, Optimizer, Arguments], Arguments | None]
Owner = TypeVar("Owner")
_Hooks = weakref.WeakKeyDictionary[object, list[Hook]]

_before, _after = _Hooks(), _Hooks()
TRIAL = "_axo_trial"  # an attribute of an optimizer whose steps are of no training: no hook is called


def closure_of(arguments: Arguments) -> Callable[[], object] | None:
    """The function that a step is to call for its loss and gradients."""
    args, options = arguments
    found = options["closure"] if "closure" in options else args[1] if len(args) > 1 else None
    return found if callable(found) else None  # an optimizer of one's own may take something else first


def with_closure(arguments: Arguments, closure: Callable[[], object]) -> Arguments:
    """The arguments of a step, with another such function."""
    args, options = arguments
    if "closure" in options:  # which may not be allowed by position
        return args, options | {"closure": closure}
    return (args[0], closure, *args[2:]), options


def before_steps(owner: Owner, hook: Callable[[Owner, Optimizer, Arguments], Arguments | None]) -> None:
    """Call ``hook`` before each step for as long as ``owner`` lives. The hook must not keep the owner alive."""
    _before.setdefault(owner, []).append(hook)


def after_steps(owner: Owner, hook: Callable[[Owner, Optimizer, Arguments], None]) -> None:
    """The same after each step."""
    _after.setdefault(owner, []).append(hook)


def _call(hooks: _Hooks, optimizer: Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> Arguments | None:
    changed = None
    if hasattr(optimizer, TRIAL):
        return None
    for owner, of_owner in list(hooks.items()):
        for hook in of_owner:
            changed = hook(owner, optimizer, changed or (args, options)) or changed
    return changed


def _call_after(optimizer: Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    _call(_after, optimizer, args, options)


register_optimizer_step_pre_hook(partial(_call, _before))
register_optimizer_step_post_hook(_call_after)
