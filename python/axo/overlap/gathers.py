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
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import torch

from axo.comm.communicator import group
from axo.offload.copy_stream import CopyEvent
from axo.offload.shards import Shards
from axo.overlap.autograd import graph_task
from axo.overlap.dispatch_modes import dispatch_modes, hidden
from axo.overlap.events import Context, TracedWork
from axo.overlap.options import cache_limits
from axo.overlap.route import Route
from axo.quantized import QuantizedWeight, values
from axo_kernels.fused.fp8 import SCALE_BYTES, pack

_together = attrgetter("together")
TRAINING, EVALUATION, BACKWARD = "training", "evaluation", "backward"


class Gathered:
    """A block (rows, c), or the gather that will fill it, and what it was gathered from."""

    __slots__ = ("__weakref__", "_block", "_dtype", "_pending", "_pointer", "_version", "_weight")

    def __init__(
        self, weight: torch.Tensor, dtype: torch.dtype, block: torch.Tensor, pending: TracedWork | None
    ) -> None:
        owner = weight if weight._base is None else weight._base  # a view is another tensor in each pass
        self._weight, self._pointer = weakref.ref(owner), weight.data_ptr()
        self._version = -1 if weight.is_inference() else weight._version
        self._dtype, self._block, self._pending = dtype, block, pending

    def matches(self, weight: torch.Tensor, dtype: torch.dtype) -> bool:
        """Whether it is what a gather would give now."""
        return (
            self._dtype == dtype
            and self._weight() is (weight if weight._base is None else weight._base)
            and self._version == (-1 if weight.is_inference() else weight._version)
            and self._pointer == weight.data_ptr()
        )

    def wait(self) -> torch.Tensor:
        """The block, complete."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        return self._block


class _Brought(NamedTuple):
    """A shard on its way from the host."""

    shards: Shards
    event: CopyEvent


class _Kept:
    """A weight kept for backward by no node: by how many uses, and whether a first run holds it."""

    def __init__(self, gathered: Gathered) -> None:
        self.gathered, self.uses, self.first_run = gathered, 0, False


class Gathers:
    """The gathered weights of one model.

    Args:
        context: Communicators, options, pool and record.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._most_layers, self._most_bytes = cache_limits(context.overlap.gather_cache)
        self._admitted: dict[Route, int] = {}  # bytes: what the cache has room for
        self._kept: dict[Route, _Kept] = {}
        self._between: dict[Route, Gathered] = {}  # kept for the next micro-batch
        self.forward_passes = 0  # so many have begun
        self._pass: str | None = None
        self.looks_ahead = False  # gathers are issued ahead in the pass under way
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
        self._last.clear()
        self._drop_kept()
        self._reach = self._position  # what was issued ahead is gone

    def _drop_kept(self) -> None:
        self._kept.clear()
        self._between.clear()
        self._ahead.clear()

    # --- passes ---------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """A pipeline's step begins: gather what the cache has room for, as far as earlier steps have asked for it.

        Ranks along z have admitted the same weights to their caches, in the same order.
        """
        self.forget_nodes()
        if self._context.overlap.all_gather:
            routes = (route for route in self._admitted if (TRAINING, route) in self._asked_for)
            for _, batch in itertools.groupby(routes, key=_together):
                for route, gathered in self._issue(TRAINING, list(batch)).items():
                    self._between[route], self._last[route] = gathered, weakref.ref(gathered)

    def begin(self, kind: str) -> None:
        """A pass begins; one that never ended is forgotten."""
        if kind != BACKWARD:
            self.forget_nodes()
            self.forward_passes += 1
        self._pass, self._asked, self._position, self._reach = kind, [], 0, 0
        self.looks_ahead = self._context.overlap.all_gather
        self._ahead.clear()

    def end(self) -> None:
        """The pass is over: its order is what the next one of its kind expects.

        Within a pipeline's step later micro-batches may ask for nothing; the next step begins like its first.
        """
        if self._pass is not None and (self._asked or not self._context.holding):
            self._orders[self._pass] = self._asked, _reach(self._asked)
        self._pass, self._asked, self.looks_ahead = None, [], False
        self._ahead.clear()

    def forget_nodes(self) -> None:
        """Use no weight again that nodes of earlier passes alone may keep."""
        mine = self._between | {route: kept.gathered for route, kept in self._kept.items()}
        self._last = {route: last for route, last in self._last.items() if route in mine and last() is mine[route]}

    def drop(self) -> None:
        """Forget the pass under way and every weight kept here."""
        self._pass, self._asked, self.looks_ahead = None, [], False
        self._drop_kept()

    # --- what layers ask for --------------------------------------------------------------------------------------

    def forward(
        self,
        route: Route,
        weight: torch.Tensor,
        dtype: torch.dtype,
        *,
        recomputes: bool,
        recording: bool,
        wanted: bool,
        gather: Callable[[], torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, Gathered | None]:
        """The block for a forward product, and what its node is to hold on to, if anything.

        Args:
            recomputes: The forward is a part of a backward pass.
            recording: Grad mode is on, outside of the Function.
            wanted: Backward will want the block.
            gather: Gives the block where it would be gathered now and waited for.
        """
        asks = route in self._last and (self._pass is not None or recomputes or self._context.holding)
        gathered = self._reused(route, weight, dtype) if asks else None
        if gathered is None:
            gathered = self._ask(route, weight, dtype, gather)
        block = gathered.wait()
        if self._context.holding and self._admit(route, weight, block):
            self._between[route] = gathered
        if recomputes:
            if recording and wanted:
                self._keep(route, gathered, first_run=False)
        elif recording:
            if wanted and (route in self._admitted or self._admit(route, weight, block)):
                return block, gathered
        elif self._pass == TRAINING and self._admit(route, weight, block):
            self._keep(route, gathered, first_run=True)
        return block, None

    def backward(
        self, route: Route, node_holds: Gathered | None, weight: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """The block for a product of backward."""
        gathered = node_holds
        if gathered is None or not gathered.matches(weight, dtype):
            gathered = self._reused(route, weight, dtype) or self._ask(route, weight, dtype)
        if self._context.defers and route in self._admitted:
            self._between[route] = gathered
        if route in self._kept:  # this use is the caller's from now on
            self._kept[route].uses -= 1
            if self._kept[route].uses <= 0:
                del self._kept[route]
        return gathered.wait()

    # --- how ------------------------------------------------------------------------------------------------------

    def _reused(self, route: Route, weight: torch.Tensor, dtype: torch.dtype) -> Gathered | None:
        """What was gathered last, where it is still there and what a gather would give now."""
        last = self._last.get(route)
        gathered = None if last is None else last()
        return gathered if gathered is not None and gathered.matches(weight, dtype) else None

    def _keep(self, route: Route, gathered: Gathered, *, first_run: bool) -> None:
        kept = self._kept.get(route)
        if kept is None or kept.gathered is not gathered:
            kept = self._kept[route] = _Kept(gathered)
        if first_run or not kept.first_run:  # a recomputation is the use that its first run has counted
            kept.uses += 1
        kept.first_run |= first_run

    def _admit(self, route: Route, weight: torch.Tensor, block: torch.Tensor) -> bool:
        """Whether the cache has room for the block; it is never given back."""
        if route in self._admitted:
            return True
        full = len(self._admitted) >= self._most_layers
        full = full or sum(self._admitted.values()) + block.nbytes > self._most_bytes
        if full or isinstance(weight, QuantizedWeight):  # whose memory is what four bits save
            return False
        self._admitted[route] = block.nbytes
        return True

    def _ask(
        self,
        route: Route,
        weight: torch.Tensor,
        dtype: torch.dtype,
        gather: Callable[[], torch.Tensor] | None = None,
    ) -> Gathered:
        """The block, on its way; and the blocks that are expected to be asked for next."""
        gathered = self._ahead.pop(route, None)
        if gathered is None or not gathered.matches(weight, dtype):
            if gather is not None and not self.looks_ahead:
                gathered = Gathered(weight, dtype, gather(), None)
            else:
                gathered = self._start(route, weight, dtype, pending=self.looks_ahead)
        if self._pass is not None or self._context.holding:  # a stage's loss multiplies after its pass
            parameter = weakref.ref(weight) if isinstance(weight, torch.nn.Parameter) else lambda: None
            self._asked_for[self._pass or TRAINING, route] = parameter, dtype
        if self._pass is not None:
            self._asked.append(route)
            if self.looks_ahead:
                self._look_ahead(self._pass, route)
        if self._pass is not None or graph_task() != -1 or self._context.holding:
            self._last[route] = weakref.ref(gathered)
        return gathered

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
        for _, batch in itertools.groupby(order[start : self._reach], key=_together):
            self._ahead |= self._issue(kind, list(batch))

    def _issue(self, kind: str, batch: list[Route]) -> dict[Route, Gathered]:
        """Start the gathers of a batch, as passes of ``kind`` ask for them, but for what is there."""
        wanted = []
        for route in dict.fromkeys(batch):
            parameter, dtype = self._asked_for[kind, route]
            weight = parameter()
            if weight is None or route in self._ahead or (route in self._last and self._reused(route, weight, dtype)):
                continue
            wanted.append((route, weight, dtype))
        with group() if len(wanted) > 1 else nullcontext():
            return {route: self._start(route, weight, dtype, pending=True) for route, weight, dtype in wanted}

    def _start(self, route: Route, weight: torch.Tensor, dtype: torch.dtype, *, pending: bool) -> Gathered:
        """Gather this rank's rows over the shard axis, in ``dtype``, or packed in fp8."""
        if dispatch_modes():
            with hidden():
                whole, mine, brought = self._fill(route, weight, dtype)
        else:
            whole, mine, brought = self._fill(route, weight, dtype)
        context, axis = self._context, route.shard_axis
        assert axis is not None
        block = whole if route.block_rows == route.padded_rows else whole[: route.block_rows]
        call = partial(context.communicators[axis].all_gather, mine, whole)
        start = partial(context.start, call, block, "all_gather", axis, route.name, pending=pending)
        if brought is None:
            work = start()
        elif pending:
            with brought.shards.after_bringing():
                work = start()
        else:
            brought.event.block()
            work = start()
        return Gathered(weight, dtype, block, work if pending else None)

    def _fill(
        self, route: Route, weight: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, _Brought | None]:
        """Room for the gather, this rank's part of it, filled; and what brings that from the host, if it does."""
        context, shard, rows = self._context, values(weight).flatten(1), route.padded_rows // route.shards
        shards = None if shard.device == context.device else context.shards_of(weight)
        columns, kind = shard.shape[1], dtype
        if route.fp8 is not None:
            columns, kind = columns + SCALE_BYTES, torch.uint8
            if shards is not None:  # rounded by the computation, which waits for it
                room = shard.new_empty(shard.shape, device=context.device)
                shards.bring(room, shard).block()
                shard, shards = room, None
        whole = context.pool.allocate(
            (route.padded_rows, columns), kind, shard.device if shards is None else context.device
        )
        first = context.communicators[route.shard_axis].rank * rows  # in place: the collective copies only the others'
        mine = whole[first : first + rows]
        real = mine
        if shard.shape[0] != rows:
            real = mine[: shard.shape[0]]
            mine[shard.shape[0] :].zero_()
        if route.fp8 is not None:
            pack(shard, real, route.fp8)
        elif shards is None:
            real.copy_(shard)
        else:
            return whole, mine, _Brought(shards, shards.bring(real, shard))
        return whole, mine, None


def _reach(order: list[Route]) -> list[int]:
    """For each of the routes, where the block after its own ends."""
    ends: list[int] = []
    block = following = len(order)
    for index in reversed(range(len(order))):
        if index + 1 < len(order) and order[index].together != order[index + 1].together:
            block, following = index + 1, block
        ends.append(following)
    return ends[::-1]
