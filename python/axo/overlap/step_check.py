"""Refuse an optimizer step that has no gradients to use, before anything is changed.

torch lets ``step`` pass over parameters without gradients in silence. Where none of a model's parameters has one, and
its last forward pass in training was not followed by a backward, or gradients still wait for a backward outside of
``axo.no_sync``, that is a mistake. The check hangs on torch's own list of hooks before a step, and goes when its
model goes. After a step nothing gathered before is used again, though versions may not tell (``p.data.add_(...)``).
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from axo.overlap.engine import Engine


def watch(engine: Engine) -> None:
    """Check each optimizer step on parameters of the model of ``engine`` against what the engine has seen."""
    seen = weakref.ref(engine)

    def check(optimizer: Any, args: Any, options: Any) -> None:
        engine = seen()
        if engine is None:
            return
        engine.gradients.forget_zeroed()
        if not (engine.gradients.deferred or engine.awaits_backward):
            return
        mine = {id(parameter) for parameter in engine.parameters()}  # those of a meta model are made anew
        stepped = [p for group in optimizer.param_groups for p in group["params"] if id(p) in mine]
        if any(id(p) in engine.gradients.deferred for p in stepped):
            raise RuntimeError(
                "step(): gradients of micro-batches inside axo.no_sync wait to be reduced; run the last backward of the"
                " step outside of it"
            )
        if stepped and all(p.grad is None for p in stepped):
            raise RuntimeError(
                "step() without backward: the model has run forward, and none of its parameters has a gradient; call"
                " backward on the loss first"
            )

    def stepped(optimizer: Any, args: Any, options: Any) -> None:
        engine = seen()
        if engine is not None:
            engine.gathers.outdate()

    for handle in (register_optimizer_step_pre_hook(check), register_optimizer_step_post_hook(stepped)):
        weakref.finalize(engine, handle.remove)
