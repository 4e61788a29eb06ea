"""What is called before and after each step of each optimizer of the process, for as long as its owner lives.

torch goes through one dict of hooks in a step. Taking a hook out of it when a model is collected, which can be at any
moment, could change that dict meanwhile ("OrderedDict mutated during iteration"). So one hook before and one after
stay there for good, and ask the owners that live.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

# Called with the optimizer, its step's arguments and options; before a step it may return new ones.
Hook = Callable[[Any, Any, Any], Any]

_before: weakref.WeakKeyDictionary[Any, list[Hook]] = weakref.WeakKeyDictionary()
_after: weakref.WeakKeyDictionary[Any, list[Hook]] = weakref.WeakKeyDictionary()


def before_steps(owner: Any, hook: Hook) -> None:
    """Call ``hook`` before each step while ``owner`` lives; the hook must not keep it alive."""
    _before.setdefault(owner, []).append(hook)


def after_steps(owner: Any, hook: Hook) -> None:
    """Call ``hook`` after each step while ``owner`` lives; the hook must not keep it alive."""
    _after.setdefault(owner, []).append(hook)


def _hooks(of: weakref.WeakKeyDictionary[Any, list[Hook]]) -> list[Hook]:
    return [hook for hooks in list(of.values()) for hook in hooks]


def _call_before(optimizer: Any, args: Any, options: Any) -> Any:
    changed = False
    for hook in _hooks(_before):
        result = hook(optimizer, args, options)
        if result is not None:
            (args, options), changed = result, True
    return (args, options) if changed else None


def _call_after(optimizer: Any, args: Any, options: Any) -> None:
    for hook in _hooks(_after):
        hook(optimizer, args, options)


register_optimizer_step_pre_hook(_call_before)
register_optimizer_step_post_hook(_call_after)
