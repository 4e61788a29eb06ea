"""Gradients between the product that gives them and ``.grad``.

Autograd gets None for a parameter whose gradient is still under way. At the end of the backward pass each gradient is
complete, goes through the parameter's hooks, is added to ``.grad`` (never put in its place), and then the
post-accumulate hooks run: as autograd does it, once a backward for each parameter.

Where autograd wants the gradient itself (``autograd.grad``, a weight that is no leaf) it gets it, reduced on the spot.
Without synchronisation (``axo.no_sync``, or between the micro-batches of a pipeline's step) gradients are summed where
they are, unreduced, until the next backward that synchronises, or the end of that step.

Not here: what is done on which axis (``axo.overlap.route`` says it), buckets (``buckets``).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from axo.offload.shards import Shards
from axo.overlap.buckets import Buckets, Slot
from axo.overlap.deferred import Deferred
from axo.overlap.events import TracedWork, span
from axo.overlap.gathers import in_backward
from axo.overlap.route import Reduction, Route
from axo.overlap.weight_phase import deliver

if TYPE_CHECKING:
    from axo.overlap.engine import Engine

SKIP, NOW, LATER = "skip", "now", "later"
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
GradientBuffer = torch.Tensor | Slot  # what a product may put a gradient into
# Blocks that are being scattered, about those of three transformer layers: more would let a slow link fill the memory.
_AT_ONCE = 16
REDUCE_DTYPES = (None, torch.float32, torch.bfloat16)


def how(node: torch.autograd.graph.Node, index: int) -> str:
    """What the backward pass under way wants of the gradient of input ``index`` of ``node``, a leaf in most cases.

    SKIP: nothing. LATER: that it is in ``.grad`` when backward returns. NOW: the gradient itself.
    """
    return _how(node.next_functions[index][0])


def hows(node: torch.autograd.graph.Node, inputs: int) -> list[str]:
    """``how`` of the first ``inputs`` inputs, asked at once, since it takes most time to ask ``node`` for its edges."""
    found = [_how(into) for into, _ in node.next_functions[:inputs]]
    return found + [SKIP] * (inputs - len(found))  # it has edges for tensors alone


def _how(into: torch.autograd.graph.Node | None) -> str:
    if into is None:
        return SKIP
    try:
        if not torch._C._will_engine_execute_node(into):  # type: ignore[attr-defined]
            return SKIP
    except RuntimeError:  # a leaf that autograd.grad wants
        return NOW
    return LATER if type(into).__name__ == "AccumulateGrad" else NOW


def has_hooks(parameter: torch.Tensor) -> bool:
    """Whether a gradient that comes to ``parameter`` runs hooks."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)  # type: ignore[attr-defined]


def wanted(node: torch.autograd.graph.Node, index: int) -> bool:
    """Whether the backward pass under way wants the gradient of input ``index`` of ``node`` at all.

    ``needs_input_grad`` says what any pass could want; one for the gradients of weights alone wants none of inputs.
    """
    return torch.compiler.is_compiling() or how(node, index) != SKIP


class Gradients:
    """The pending gradients of one model.

    Args:
        engine: Its communicators, pool and record.
        buckets: Where gradients go from z.
    """

    def __init__(self, engine: Engine, buckets: Buckets) -> None:
        self._engine = engine
        self.buckets = buckets
        self.deferred: dict[int, Deferred] = {}
        self._hooks: dict[int, list[tuple[Any, dict[int, Any]]]] = {}  # each parameter's: its dicts, what they held
        self._arriving: deque[TracedWork] = deque()
        self._count = 0

    def forget_zeroed(self) -> None:
        """Drop gradients of micro-batches that ``zero_grad`` was to throw away."""
        if self.deferred:
            self.deferred = {key: each for key, each in self.deferred.items() if not each.zeroed()}

    def begin(self) -> None:
        """A backward pass begins."""
        if self._engine.holding:
            return
        self.forget_zeroed()
        for each in self.deferred.values():
            each.unwatch()

    def gradient_buffer(
        self, route: Route, parameter: torch.Tensor, columns: int, like: torch.Tensor
    ) -> GradientBuffer:
        """Where a product may put the gradient of the block: a Slot where that is its last place, else a tensor."""
        shape = (route.padded_rows, columns)
        last = route.shards == 1 and self._reduced_in(like) == like.dtype
        if last and not self._engine.defers:
            return self.buckets.slot(parameter, shape, route.shard_rows, like, route.weight_reductions)
        return self._engine.pool.allocate(shape, like.dtype, like.device)

    def kept_block(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """The fp32 sum to which the gradient of a block, of 16-bit ``dtype``, need only be added, padded rows included.

        None where there is none yet, or the gradient is to be reduced.
        """
        kept = self.deferred.get(id(parameter)) if self._engine.defers else None
        if kept is None or kept.reductions is not None or kept.tensor.dtype != torch.float32 or dtype.itemsize != 2:
            return None
        kept.check_unchanged()
        return kept.tensor

    def added(self, parameter: torch.Tensor) -> None:
        """A gradient was added to what ``kept_block`` gave."""
        self._begin(parameter)

    def add_weight(self, route: Route, parameter: torch.Tensor, into: GradientBuffer) -> None:
        """The gradient of the block is in what ``gradient_buffer`` gave, or in any padded buffer: reduce it in time."""
        self._begin(parameter)
        buffer = into.tensor if isinstance(into, Slot) else into
        if self._engine.defers:
            self._defer(route, parameter, buffer, None)
            return
        if not isinstance(into, Slot):
            into = buffer = self.cast(into)
        self._take_deferred(parameter, buffer)
        self._send_weight(route, parameter, into)

    def takes_shard_of(self, parameter: torch.Tensor) -> bool:
        """Whether its product may reduce this gradient over z: nothing that ``no_sync`` kept is added to it before."""
        return not self._engine.defers and id(parameter) not in self.deferred

    def shard_buffer(self, route: Route, parameter: torch.Tensor, columns: int, like: torch.Tensor) -> Slot:
        """Where a gradient goes that its product reduces over z: this rank's rows."""
        self._begin(parameter)
        shape = (route.shard_rows, columns)
        return self.buckets.slot(parameter, shape, route.shard_rows, like, route.weight_reductions)

    def add_shard(self, route: Route, slot: Slot) -> None:
        """The slot holds this rank's rows of a gradient: reduce it in time."""
        slot.copies = route.weight_copies
        self.buckets.ready(slot)

    def add_vector(
        self, route: Route, parameter: torch.Tensor, grad: torch.Tensor, reductions: tuple[Reduction, ...]
    ) -> None:
        """The gradient of a parameter that z and data replicate: reduce it by ``reductions`` in time."""
        self._begin(parameter)
        if self._engine.defers:
            self._defer(route, parameter, grad, reductions)
            return
        grad = self.cast(grad)
        self._take_deferred(parameter, grad)
        self._send_vector(route, parameter, grad, reductions)

    def keep_vector(self, route: Route, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        """Keep a gradient of a pipeline's micro-batch that is replicated, out of one of its hooks, for the step's end.

        No hook runs on it again.
        """
        self._defer(route, parameter, grad.clone(), route.vector_reductions)
        self.deferred[id(parameter)].runs_hooks = False

    def _reduced_in(self, grad: torch.Tensor) -> torch.dtype:
        wanted = self._engine.reduce_dtype
        return grad.dtype if wanted is None or grad.dtype == torch.float64 else wanted

    def cast(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient in the dtype that it is to be reduced in."""
        return grad if self._engine.reduce_dtype is None else self._cast(grad, self._reduced_in(grad))

    def _begin(self, parameter: torch.Tensor) -> None:
        if not in_backward():
            return  # the weight phase of a pipeline's micro-batch: nothing of autograd is under way
        self._count += 1
        self.expect(parameter)

    def expect(self, parameter: torch.Tensor) -> None:
        """A gradient of the backward pass under way comes later, so autograd gets None for it now."""
        self._engine.arm()
        # It would run hooks with that; they run on the complete gradient. It looks into these very dicts.
        self._take_hooks(parameter)

    def _take_hooks(self, parameter: torch.Tensor) -> None:
        if has_hooks(parameter):
            tables = [getattr(parameter, name) for name in _HOOKS]
            self._hooks[id(parameter)] = [(table, dict(table or {})) for table in tables]
            for table in tables:
                if table:
                    table.clear()

    def _send_weight(self, route: Route, parameter: torch.Tensor, into: GradientBuffer) -> None:
        if isinstance(into, Slot):
            self.add_shard(route, into)
            return
        rows = route.padded_rows // route.shards
        slot = self.buckets.slot(parameter, (rows, into.shape[1]), route.shard_rows, into, route.weight_reductions)
        if route.shards == 1:
            slot.tensor.copy_(into)
            self.add_shard(route, slot)
            return
        slot.copies = route.weight_copies
        pending = self._start_scatter(route, into, slot.tensor)
        self.buckets.ready(slot, pending)
        if pending is None:
            return
        shards = self._engine.shards_of(parameter)
        if shards is not None and slot.leaves():
            slot.leave(shards.to_host(slot.gradient(), parameter.dtype, pending.wait, held=(slot.tensor, into)))
            return
        while self._arriving and (self._arriving[0].done() or len(self._arriving) == _AT_ONCE):
            self._arriving.popleft().wait()  # lets go of the buffer it was scattered from
        self._arriving.append(pending)

    def _start_scatter(self, route: Route, buffer: torch.Tensor, out: torch.Tensor) -> TracedWork | None:
        """Reduce-scatter the padded gradient of the block into ``out``; None when that is done already."""
        engine = self._engine
        assert route.shard_axis is not None
        names = "reduce_scatter", route.shard_axis, route.name
        line = engine.comms.axis(route.shard_axis)
        if not engine.overlap.reduce_scatter:
            with span(engine.events, "wait", *names):
                line.reduce_scatter(buffer, out, op=route.op)
            return None
        work = line.reduce_scatter(buffer, out, op=route.op, async_op=True)
        return TracedWork(engine, work, out, *names)

    def _send_vector(
        self, route: Route, parameter: torch.Tensor, grad: torch.Tensor, reductions: tuple[Reduction, ...]
    ) -> None:
        slot = self.buckets.slot(parameter, tuple(grad.shape), grad.shape[0], grad, reductions)
        slot.copies = route.vector_copies
        slot.tensor.copy_(grad)
        self.buckets.ready(slot)

    def _defer(
        self, route: Route, parameter: torch.Tensor, grad: torch.Tensor, reductions: tuple[Reduction, ...] | None
    ) -> None:
        old = self.deferred.get(id(parameter))
        if old is None:
            self.deferred[id(parameter)] = Deferred(route, parameter, grad, reductions)
            return
        old.check_unchanged()
        old.tensor.add_(grad)

    def _take_deferred(self, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        """Add what micro-batches without synchronisation have left to ``grad``, in place."""
        if not self.deferred or (old := self.deferred.pop(id(parameter), None)) is None:
            return
        old.check_unchanged()
        if old.tensor.dtype == grad.dtype:
            grad.add_(old.tensor)
        else:
            grad.copy_(old.tensor.add_(grad))

    def _send_deferred(self) -> None:
        """Reduce what only the micro-batches without synchronisation have used."""
        for left in list(self.deferred.values()):
            left.check_unchanged()
            if left.reductions is None:
                self._send_weight(left.route, left.parameter, self.cast(left.tensor))
            else:
                self._send_vector(left.route, left.parameter, self.cast(left.tensor), left.reductions)
        self.deferred.clear()

    def start(self) -> None:
        """Issue what is left to be reduced, and wait for none of it."""
        if self.deferred and not self._engine.defers:
            self._send_deferred()
        self.buckets.close()

    def start_held(self) -> None:
        """A pipeline's step has no backward pass left: issue the reduction of what its micro-batches have left."""
        for each in self.deferred.values():
            if each.runs_hooks:
                self._take_hooks(each.parameter)
        self.start()

    def finish(self) -> None:
        """Complete all gradients and put them into ``.grad``."""
        self.start()
        totals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        shards: Shards | None = None  # those of the model, if any weight lies on the host
        for parameter, grad in self.buckets.finish():
            here = self._engine.shards_of(parameter)
            if here is not None:
                shards = here
                if grad.device != parameter.device:
                    grad = here.to_host(grad, parameter.dtype)
            if id(parameter) in totals:  # used twice
                if here is not None:
                    here.wait()
                totals[id(parameter)][1].add_(grad)
            else:
                totals[id(parameter)] = (parameter, grad)
        if shards is not None:
            shards.wait()
        self._arriving.clear()
        self._count = 0
        hooks = self._give_hooks_back()
        zero = self._engine.zero
        if zero is not None:
            zero.end_backward()
        give = None if zero is None else zero.give
        for parameter, grad in totals.values():
            deliver(parameter, self._cast(grad, parameter.dtype), hooks.get(id(parameter), ({}, {})), give)
        if not self._engine.holding:
            for each in self.deferred.values():
                each.watch()

    def _cast(self, grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """``grad`` in ``dtype``, in memory that is used again once nobody has the gradient any more."""
        if grad.dtype == dtype:
            return grad
        return self._engine.pool.allocate(tuple(grad.shape), dtype, grad.device).copy_(grad)

    def _give_hooks_back(self) -> dict[int, Any]:
        taken, self._hooks = self._hooks, {}
        for tables in taken.values():
            for table, hooks in tables:
                if hooks:
                    meanwhile = dict(table)
                    table.clear()
                    table.update(hooks)
                    table.update(meanwhile)
        return {key: tuple(hooks for _, hooks in tables) for key, tables in taken.items()}

    def drop(self) -> int:
        """Forget what is pending; how many gradients that were.

        What micro-batches without synchronisation have left goes too, unless the pass had not come to any gradient: a
        part of its gradients is in there, or a part of theirs was on its way.
        """
        count, self._count = self._count, 0
        if count:
            self.deferred.clear()
        for each in self.deferred.values():
            each.watch()
        self._give_hooks_back()
        self._arriving.clear()
        self.buckets.drop()
        return count
