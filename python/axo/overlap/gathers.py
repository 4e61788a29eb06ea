"""Gathered weights: when they are gathered (OAG), and how long they are kept (the gather cache).

A pass is one forward of the model, in training or not, or one backward with its recomputations. The order in which
layers ask for weights that are not kept is recorded in each pass; the next pass of its kind is expected to ask in the
same order. So when a layer asks, the gathers of the rest of its model block and of the whole next block are issued, a
block's as one group. A layer that comes out of turn gathers for itself; what was gathered ahead and not used is dropped
at the end of the pass, and the record is always that of the last pass. Ranks along z run the same program, so they
expect the same order.

The autograd node that will use a kept weight in backward owns it. In two cases there is no such node, and it is kept
here: in the first run of a reentrantly checkpointed block, and in a recomputation. What only nodes keep is used by the
forward pass that gathered it and by the recomputations of its own backward, by nothing else. The reason: one rank may
still hold an output, and so its nodes, when others along z have dropped theirs. For the same reason only parameters are
gathered ahead: any other tensor lives as long as its nodes.

A weight that has changed since it was gathered (its version, its memory or the tensor itself) is gathered again. A
layer that multiplies in fp8 rounds its rows before they are gathered, and what is kept stays packed.

What a pipeline's step keeps for all its micro-batches is gathered when the step begins, before the first of them comes
(from the second step on): so all stages gather at once.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from axo.comm.communicator import group
from axo.overlap.dispatch_modes import hidden
from axo.overlap.events import TracedWork, span
from axo.overlap.quantized import QuantizedWeight, values
from axo.overlap.route import Route
from axo_kernels.fused.fp8 import SCALE_BYTES, pack

if TYPE_CHECKING:
    from axo.overlap.engine import Engine

TRAINING, EVALUATION, BACKWARD = "training", "evaluation", "backward"
_NOTHING = nullcontext()


def in_backward() -> bool:
    """Whether this thread runs a backward pass of autograd."""
    return torch._C._current_graph_task_id() != -1  # type: ignore[attr-defined]


def version_of(tensor: torch.Tensor) -> int:
    """The count of in-place changes; inference tensors have none."""
    return -1 if tensor.is_inference() else tensor._version


def owner(weight: torch.Tensor) -> torch.Tensor:
    """The tensor that ``weight`` is a view of, or itself: who is the same in the next pass."""
    return weight if weight._base is None else weight._base


class Gathered:
    """A block (rows, c), or the gather that will fill it, and what it was gathered from."""

    __slots__ = ("__weakref__", "_block", "_dtype", "_pending", "_pointer", "_version", "_weight")

    def __init__(
        self, weight: torch.Tensor, dtype: torch.dtype, block: torch.Tensor, pending: TracedWork | None
    ) -> None:
        self._weight, self._version, self._pointer = weakref.ref(owner(weight)), version_of(weight), weight.data_ptr()
        self._dtype, self._block, self._pending = dtype, block, pending

    def matches(self, weight: torch.Tensor, dtype: torch.dtype) -> bool:
        """Whether it is what a gather would give now."""
        return (
            self._dtype == dtype
            and self._weight() is owner(weight)
            and self._version == version_of(weight)
            and self._pointer == weight.data_ptr()
        )

    def wait(self) -> torch.Tensor:
        """The block, complete."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        return self._block


class _Held:
    """A weight kept for backward by no node: by how many uses, and whether a first run holds it."""

    def __init__(self, gathered: Gathered) -> None:
        self.gathered, self.uses, self.first_run = gathered, 0, False


class Gathers:
    """The gathered weights of one model.

    Args:
        engine: Its overlap options and record.
    """

    def __init__(self, engine: Engine, layers: float, size: float) -> None:
        self._engine = engine
        self._layers, self._bytes = layers, size
        self._admitted: dict[Route, int] = {}  # bytes: what the cache has room for
        self._held: dict[Route, _Held] = {}
        self._between: dict[Route, Gathered] = {}  # kept for the next micro-batch
        self.forward_passes = 0  # so many have begun
        self._pass: str | None = None
        self._asked: list[Route] = []  # of this pass, in order
        self._orders: dict[str, tuple[list[Route], list[int]]] = {}  # the routes; of each, how far to look ahead
        self._position = 0
        self._reach = 0  # in the order: what comes before has been issued, of routes that repeat the next use
        self._ahead: dict[Route, Gathered] = {}
        self._last: dict[Route, weakref.ref[Gathered]] = {}  # the weight gathered last, if somebody keeps it
        # The weight, if it is a parameter, and the dtype of each kind's last gathers.
        self._asked_for: dict[tuple[str, Route], tuple[Callable[[], torch.Tensor | None], torch.dtype]] = {}

    def outdate(self) -> None:
        """An optimizer has stepped: what is gathered is no longer what the weights are."""
        for weights in (self._last, self._held, self._between, self._ahead):
            weights.clear()
        self._reach = self._position  # what was issued ahead is gone

    # --- passes ---------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """A pipeline's step begins: gather what the cache has room for, as far as earlier steps have asked for it.

        Ranks along z have admitted the same weights to their caches, in the same order.
        """
        self.forget_nodes()
        if self._engine.overlap.all_gather:
            known = (route for route in self._admitted if (TRAINING, route) in self._asked_for)
            for _, batch in itertools.groupby(known, key=lambda route: route.together):
                for route, found in self._issue(TRAINING, list(batch)).items():
                    self._between[route], self._last[route] = found, weakref.ref(found)

    def begin(self, kind: str) -> None:
        """A pass begins; one that never ended is forgotten."""
        if kind != BACKWARD:
            self.forget_nodes()
            self.forward_passes += 1
        self._pass, self._asked, self._position, self._reach = kind, [], 0, 0
        self._ahead.clear()

    def end(self) -> None:
        """The pass is over: its order is what the next one of its kind expects.

        Within a pipeline's step later micro-batches may ask for nothing; the next step begins like its first.
        """
        if self._pass is not None and (self._asked or not self._engine.holding):
            self._orders[self._pass] = self._asked, _reach(self._asked)
        self._pass, self._asked = None, []
        self._ahead.clear()

    def forget_nodes(self) -> None:
        """Use no weight again that nodes of earlier passes alone may keep."""
        here = self._between | {route: held.gathered for route, held in self._held.items()}
        self._last = {route: last for route, last in self._last.items() if route in here and last() is here[route]}

    def drop(self) -> None:
        """Forget the pass under way and every weight kept here."""
        self._pass, self._asked = None, []
        for weights in (self._ahead, self._held, self._between):
            weights.clear()

    # --- what layers ask for --------------------------------------------------------------------------------------

    def forward(
        self,
        route: Route,
        weight: torch.Tensor,
        dtype: torch.dtype,
        *,
        recording: bool,
        wanted: bool,
        gather: Callable[[], torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, Gathered | None]:
        """The block for a forward product, and what its node is to hold on to, if anything.

        Args:
            recording: Grad mode is on, outside of the Function.
            wanted: Backward will want the block.
            gather: Gives the block where it would be gathered now and waited for.
        """
        recomputes = in_backward()
        if recomputes:
            self._engine.arm()
        found = self._kept(route, weight, dtype) if self._pass is not None or recomputes else None
        if found is None:
            found = self._ask(route, weight, dtype, gather)
        block = found.wait()
        if self._engine.holding and self._admit(route, weight, block):
            self._between[route] = found
        if recomputes:
            if recording and wanted:
                self._hold(route, found, first_run=False)
        elif recording:
            if wanted and self._admit(route, weight, block):
                return block, found
        elif self._pass == TRAINING and self._admit(route, weight, block):
            self._hold(route, found, first_run=True)
        return block, None

    def backward(
        self, route: Route, node_holds: Gathered | None, weight: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """The block for a product of backward."""
        found = node_holds
        if found is None or not found.matches(weight, dtype):
            found = self._kept(route, weight, dtype) or self._ask(route, weight, dtype)
        if self._engine.defers and route in self._admitted:
            self._between[route] = found
        return found.wait()

    def release(self, route: Route) -> None:
        """One use in backward is over."""
        held = self._held.get(route)
        if held is not None:
            held.uses -= 1
            if held.uses <= 0:
                del self._held[route]

    # --- how ------------------------------------------------------------------------------------------------------

    def _kept(self, route: Route, weight: torch.Tensor, dtype: torch.dtype) -> Gathered | None:
        last = self._last.get(route)
        found = None if last is None else last()
        return found if found is not None and found.matches(weight, dtype) else None

    def _hold(self, route: Route, found: Gathered, *, first_run: bool) -> None:
        held = self._held.get(route)
        if held is None or held.gathered is not found:
            held = self._held[route] = _Held(found)
        if first_run or not held.first_run:  # a recomputation is the use that its first run has counted
            held.uses += 1
        held.first_run |= first_run

    def _admit(self, route: Route, weight: torch.Tensor, block: torch.Tensor) -> bool:
        if route not in self._admitted:
            if isinstance(weight, QuantizedWeight):  # its memory is what four bits save
                return False
            if len(self._admitted) >= self._layers:
                return False
            if sum(self._admitted.values()) + block.nbytes > self._bytes:
                return False
            self._admitted[route] = block.nbytes
        return True

    @property
    def looks_ahead(self) -> bool:
        """Whether gathers are issued ahead in the pass under way."""
        return self._pass is not None and self._engine.overlap.all_gather

    def _ask(
        self,
        route: Route,
        weight: torch.Tensor,
        dtype: torch.dtype,
        gather: Callable[[], torch.Tensor] | None = None,
    ) -> Gathered:
        found = self._ahead.pop(route, None)
        if found is not None and not found.matches(weight, dtype):
            found = None
        looks_ahead = self.looks_ahead
        if found is None and gather is not None and not looks_ahead:
            found = Gathered(weight, dtype, gather(), None)
        elif found is None:
            found = self._start(route, weight, dtype, blocking=not looks_ahead)
        if self._pass is not None:
            self._asked.append(route)
            known = weakref.ref(weight) if isinstance(weight, torch.nn.Parameter) else lambda: None
            self._asked_for[self._pass, route] = known, dtype
            if looks_ahead:
                self._look_ahead(self._pass, route)
        if self._pass is not None or in_backward():
            self._last[route] = weakref.ref(found)
        return found

    def _look_ahead(self, kind: str, route: Route) -> None:
        """Issue the rest of the block of ``route`` and the next block, but for what has been issued."""
        order, reach = self._orders.get(kind, ([], []))
        try:
            at = order.index(route, self._position)
        except ValueError:
            return  # out of turn
        self._position = at + 1
        start, self._reach = max(at + 1, self._reach), max(reach[at], self._reach)
        if route in order[at + 1 : start]:  # its repeats were issued as one, which is used now
            self._ahead |= self._issue(kind, [route])
        for _, batch in itertools.groupby(order[start : self._reach], key=lambda other: other.together):
            self._ahead |= self._issue(kind, list(batch))

    def _issue(self, kind: str, batch: list[Route]) -> dict[Route, Gathered]:
        """Start the gathers of a batch, as passes of ``kind`` ask for them, but for what is there."""
        wanted = []
        for route in dict.fromkeys(batch):
            weight_of, dtype = self._asked_for[kind, route]
            weight = weight_of()
            if weight is None or route in self._ahead or self._kept(route, weight, dtype) is not None:
                continue
            wanted.append((route, weight, dtype))
        with group() if len(wanted) > 1 else _NOTHING:
            return {route: self._start(route, weight, dtype) for route, weight, dtype in wanted}

    def _start(self, route: Route, weight: torch.Tensor, dtype: torch.dtype, *, blocking: bool = False) -> Gathered:
        """Gather this rank's rows over the shard axis, in ``dtype``, or packed in fp8."""
        engine = self._engine
        assert route.shard_axis is not None
        names, line = ("all_gather", route.shard_axis, route.name), engine.comms.axis(route.shard_axis)
        with hidden():
            shard, rows = values(weight).flatten(1), route.padded_rows // route.shards
            shards = engine.shards_of(weight)
            device = shard.device if shards is None else engine.comms.device
            columns, kind = shard.shape[1], dtype
            if route.fp8 is not None:
                columns, kind = columns + SCALE_BYTES, torch.uint8
                if shards is not None:  # rounded by the computation, which waits for it
                    room = shard.new_empty(shard.shape, device=device)
                    shards.bring(room, shard).block()
                    shard, shards = room, None
            whole = engine.pool.allocate((route.padded_rows, columns), kind, device)
            mine = whole[line.rank * rows : (line.rank + 1) * rows]  # in place: the collective copies only the others'
            real, held = mine, shard.shape[0]
            if held != rows:
                real = mine[:held]
                mine[held:].zero_()
            if route.fp8 is not None:
                pack(shard, real, route.fp8)
            elif shards is None:
                real.copy_(shard)
            else:
                brought = shards.bring(real, shard)
            block = whole if route.block_rows == route.padded_rows else whole[: route.block_rows]
        if blocking:
            with span(engine.events, "wait", *names):
                if shards is not None:
                    brought.block()
                line.all_gather(mine, whole)
            return Gathered(weight, dtype, block, None)
        with _NOTHING if shards is None else shards.after_bringing():
            work = line.all_gather(mine, whole, async_op=True)
        return Gathered(weight, dtype, block, TracedWork(engine, work, block, *names))


def _reach(order: list[Route]) -> list[int]:
    """For each of the routes, where the block after its own ends."""
    ends: list[int] = []
    block = following = len(order)
    for index in reversed(range(len(order))):
        if index + 1 < len(order) and order[index].together != order[index + 1].together:
            block, following = index + 1, block
        ends.append(following)
    return ends[::-1]
