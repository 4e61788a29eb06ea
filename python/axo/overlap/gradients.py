"""Gradients between the product that gives them and ``.grad``.

Autograd gets None for a parameter whose gradient is still under way. At the end of the backward pass each gradient is
complete, goes through the parameter's hooks, is added to ``.grad`` (never put in its place), and then the
post-accumulate hooks run: as autograd does it, once a backward for each parameter. Where autograd wants the gradient
itself (``autograd.grad``, a weight that is no leaf) it gets it, reduced on the spot.

The way of one gradient:

    block of a weight    reduce-scattered over z into its slot; what z does not cut is computed in its slot
    slot                 this rank's rows: in a bucket, where other axes replicate them
    bucket               reduced over those axes, one after the other
    .grad                a view of the slot, through hooks

A slot lies in the open bucket of its kind (dtype and axes) in the order in which layers ask: the same on all ranks. A
bucket of gradients that are reduced over data is closed when it is full, and then all-reduced in place. Where its parts
are still on their way, that waits until the next bucket of the kind closes, or for the end of backward: what is issued
when depends on sizes and order alone, never on time. With ZeRO-2 the last reduction is a reduce-scatter: a bucket of
gradients ``[r_i, c_i]`` is packed as ``[Gdata, sum of ceil(r_i / Gdata) c_i]``, for each rank its rows of every
gradient, the shorter padded with zeros.

Without synchronisation (``axo.no_sync``, or between the micro-batches of a pipeline's step) gradients are summed where
they are, unreduced, until the next backward that synchronises, or the end of that step.

Not here: over which axes a gradient is reduced (``axo.overlap.route``).
"""

from __future__ import annotations

import math
from collections import deque
from functools import partial
from typing import Any

import torch

from axo.optim.zero import set_gradient
from axo.overlap.autograd import deliver, has_hooks, version_of
from axo.overlap.events import Context, TracedWork
from axo.overlap.route import Copies, Reduction, Route
from axo.placement import chunk_bounds, chunk_size

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
# Blocks that are being scattered, about those of three transformer layers: more would let a slow link fill the memory.
_AT_ONCE = 16
_HALF = (torch.bfloat16, torch.float16)
REDUCE_DTYPES = (None, torch.float32, torch.bfloat16)
BucketKind = tuple[torch.dtype, torch.device, tuple[Reduction, ...]]


class Slot:
    """Where one gradient of ``parameter`` lies: ``tensor``, padded rows included; ``rows`` of them are real.

    ``first`` is the row of the parameter that its first row belongs to. ``bucket`` reduces it; None: it is complete.
    """

    __slots__ = ("arriving", "bucket", "copies", "first", "parameter", "rows", "tensor")

    def __init__(self, parameter: torch.Tensor, tensor: torch.Tensor, rows: int, bucket: Bucket | None) -> None:
        self.parameter, self.tensor, self.rows, self.bucket = parameter, tensor, rows, bucket
        self.first = 0
        self.arriving: TracedWork | None = None
        self.copies: Copies | None = None

    def gradient(self) -> torch.Tensor:
        """The finished gradient, padding dropped: a view of the bucket unless that has room to spare."""
        shape = (self.rows, *self.parameter.shape[1:])
        gradient = self.tensor if self.tensor.shape == shape else self.tensor[: self.rows].view(shape)
        return gradient if self.bucket is None or self.bucket.exact else gradient.clone()


class Bucket:
    """Gradients of one kind in one buffer."""

    def __init__(self, kind: BucketKind, capacity: int, context: Context, *, scatters: bool) -> None:
        dtype, device, reductions = kind
        self.kind, self.reductions, self.capacity = kind, list(reductions), capacity
        self.buffer = context.pool.allocate((capacity,), dtype, device)
        self.used = 0
        self.slots: list[Slot] = []
        self.under_way: TracedWork | None = None
        self._context, self._scatters, self._scattered = context, scatters, False

    @property
    def exact(self) -> bool:
        """Whether the buffer has no room to spare, so that gradients may stay in it."""
        return self._scattered or self.used == self.capacity

    def arrived(self) -> bool:
        return all(slot.arriving is None for slot in self.slots)

    def advance(self) -> bool:
        """Wait for its parts, or the reduction under way, and issue the next; False when none is left."""
        for slot in self.slots:
            if slot.arriving is not None:
                slot.arriving.wait()
                slot.arriving = None
        if self.under_way is not None:
            self.under_way.wait()
            self.under_way = None
        if not self.reductions or not self.used:
            return False
        axis, op = self.reductions.pop(0)
        line, name = self._context.communicators[axis], "all_reduce"
        if self._scatters and axis == "data":
            parts, result = self._by_rank()
            call, name = partial(line.reduce_scatter, parts, result, op=op), "reduce_scatter"
        else:
            result = self.buffer[: self.used]
            call = partial(line.all_reduce, result, op)
        self.under_way = self._context.start(call, result, name, axis, f"{len(self.slots)} gradients", pending=True)
        return True

    def _by_rank(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients packed by ranks, and room for this rank's part, where the slots lie from now on."""
        comms, like = self._context.comms, self.buffer
        ranks, mine = comms.grid.data, comms.coords.data
        sizes = [chunk_size(slot.rows, ranks) * math.prod(slot.tensor.shape[1:]) for slot in self.slots]
        parts = self._context.pool.allocate((ranks, sum(sizes)), like.dtype, like.device)
        result = self._context.pool.allocate((sum(sizes),), like.dtype, like.device)
        for slot, part, piece in zip(self.slots, parts.split(sizes, 1), result.split(sizes), strict=True):
            _pack(slot.tensor[: slot.rows], part)
            low, high = chunk_bounds(slot.rows, ranks, mine)
            shape = (chunk_size(slot.rows, ranks), *slot.tensor.shape[1:])
            slot.tensor, slot.first, slot.rows = piece.view(shape), low, high - low
        self.buffer, self._scattered = result, True  # lets go of the whole gradients
        return parts.view(-1), result


def _pack(gradient: torch.Tensor, part: torch.Tensor) -> None:
    """(r, ...) -> (ranks, ceil(r / ranks) * row), each line one rank's rows."""
    ranks, rows = part.shape[0], gradient.shape[0]
    if rows % ranks == 0:
        part.copy_(gradient.reshape(ranks, -1))
        return
    for index in range(ranks):
        low, high = chunk_bounds(rows, ranks, index)
        flat = gradient[low:high].reshape(-1)
        part[index, : flat.numel()].copy_(flat)
        part[index, flat.numel() :].zero_()


class Buckets:
    """The gradients of one backward pass, once they are complete over z (or as they come, where z replicates).

    Args:
        context: Communicators, pool and options: ``bucket_bytes``, at which a bucket closes.
        scatters: Every rank gets its rows of each gradient (ZeRO-2); else all of them.
    """

    def __init__(self, context: Context, *, scatters: bool) -> None:
        self._context, self._scatters = context, scatters
        self._open: dict[BucketKind, Bucket] = {}
        self._closed: list[Bucket] = []
        self._slots: list[Slot] = []
        self._sizes: dict[BucketKind, list[int]] = {}  # of each kind: elements of its buckets in the last backward

    def slot(
        self,
        parameter: torch.Tensor,
        shape: tuple[int, ...],
        rows: int,
        like: torch.Tensor,
        reductions: tuple[Reduction, ...],
    ) -> Slot:
        """Room for a gradient that is then reduced by ``reductions``."""
        if reductions:
            kind, size = (like.dtype, like.device, reductions), math.prod(shape)
            bucket = self._open.get(kind)
            if bucket is None or bucket.used + size > bucket.capacity:
                if bucket is not None:
                    self._close(kind)
                bucket = Bucket(kind, self._capacity(kind, size), self._context, scatters=self._scatters)
                self._open[kind] = bucket
            slot = Slot(parameter, bucket.buffer[bucket.used : bucket.used + size].view(shape), rows, bucket)
            bucket.used += size
            bucket.slots.append(slot)
        else:
            slot = Slot(parameter, self._context.pool.allocate(shape, like.dtype, like.device), rows, None)
        self._slots.append(slot)
        return slot

    def ready(self, bucket: Bucket) -> None:
        """A slot of the bucket is filled, or will be when what arrives in it has come."""
        if bucket.used == bucket.capacity:
            self._close(bucket.kind)

    def _capacity(self, kind: BucketKind, size: int) -> int:
        """Elements of the next bucket: what it took last time, else the size of the option."""
        dtype, _, reductions = kind
        if not {"data", "data/experts"} & dict(reductions).keys():
            return size
        sizes = self._sizes.get(kind, [])
        number = sum(bucket.kind == kind for bucket in self._closed)
        limit = self._context.overlap.bucket_bytes // dtype.itemsize
        return max(size, sizes[number] if number < len(sizes) else limit)

    def _close(self, kind: BucketKind) -> None:
        bucket = self._open.pop(kind)
        for other in self._closed:
            if other.kind == kind and other.under_way is None and other.reductions:
                other.advance()
        self._closed.append(bucket)
        if bucket.arrived():
            bucket.advance()

    def drain(self) -> None:
        """Issue what is closed: whoever calls is about to use the same communicators."""
        for bucket in self._closed:
            if bucket.under_way is None and bucket.reductions:
                bucket.advance()

    def close(self) -> None:
        """No gradient comes any more: issue every bucket whose parts are there."""
        for kind in list(self._open):
            self._close(kind)

    def finish(self) -> list[Slot]:
        """Complete everything, after ``close``; the slots in order."""
        running = list(self._closed)
        self.drain()
        while running:
            running = [bucket for bucket in running if bucket.advance()]
        slots, self._sizes = self._slots, {}
        for bucket in self._closed:
            self._sizes.setdefault(bucket.kind, []).append(bucket.used)
        self.drop()
        for slot in slots:
            if slot.arriving is not None:
                slot.arriving.wait()
        shared = [slot for slot in slots if slot.copies is not None]
        for works in [slot.copies.start(slot.tensor, slot.first, slot.rows) for slot in shared if slot.copies]:
            for work in works:
                work.wait()
        return slots

    def drop(self) -> None:
        """Forget everything: at the end, or after an exception in backward."""
        for bucket in (*self._open.values(), *self._closed):
            bucket.slots = []  # they refer to each other: buffers would stay until the garbage collector comes
        self._open, self._closed, self._slots = {}, [], []


class Deferred:
    """A gradient of micro-batches that were not synchronised: unreduced, and how to reduce it.

    ``zero_grad`` drops what has been accumulated, so it must drop these gradients too. torch tells nobody of that call,
    so it is read from ``.grad``. When a backward pass ends, a parameter whose gradient is kept here and whose ``.grad``
    is None gets negative zeros in ``.grad``. If these are gone or positive later, or if a ``.grad`` that had values is
    zero now, ``zero_grad`` was called (scaling and clipping do neither). The negative zeros go when the next backward
    pass begins.

    Args:
        route: The route of the layer whose gradient it is.
        parameter: What it is the gradient of, or of whose block.
        grad: That of the first micro-batch; halves are added up in fp32.
        reductions: What it is reduced over, for what z replicates; None: the gradient of a block.
    """

    __slots__ = ("_mark", "_seen", "_was_zero", "parameter", "reductions", "route", "runs_hooks", "tensor", "version")

    def __init__(
        self, route: Route, parameter: torch.Tensor, grad: torch.Tensor, reductions: tuple[Reduction, ...] | None
    ) -> None:
        self.route, self.parameter, self.reductions = route, parameter, reductions
        self.tensor = grad.float() if grad.dtype in _HALF else grad
        self.version = version_of(parameter)
        self.runs_hooks = True  # of the parameter, on the finished gradient
        self._mark: torch.Tensor | None = None
        self._seen: tuple[torch.Tensor, int] | None = None
        self._was_zero: torch.Tensor | None = None  # read only when it matters: that waits for a GPU

    def check_unchanged(self) -> None:
        """Refuse to go on with a parameter that is no longer what the gradient was taken of.

        Raises:
            RuntimeError: It has changed.
        """
        if self.version != version_of(self.parameter):
            raise RuntimeError(
                f"no_sync: {self.route.name or 'a parameter'} has changed while gradients of earlier micro-batches"
                " wait to be reduced; run the last backward of a step outside of axo.no_sync, before optimizer.step()"
            )

    def watch(self) -> None:
        """A backward pass has ended: remember what ``.grad`` is, and give it zeros if it is None."""
        grad = self.parameter.grad
        if grad is None:
            self._mark = grad = self.parameter.grad = torch.full_like(self.parameter, -0.0, requires_grad=False)
        self._seen = grad, version_of(grad)
        self._was_zero = _all_zero(grad) if self._mark is None else None

    def zeroed(self) -> bool:
        """Whether ``zero_grad`` was called since ``watch``."""
        if self._seen is None:
            return False
        (seen, version), grad = self._seen, self.parameter.grad
        if grad is None:
            return True
        if grad is seen and version_of(grad) == version:
            return False
        if self._was_zero is not None and bool(self._was_zero):
            return False
        return bool(_all_zero(grad))

    def unwatch(self) -> None:
        """A backward pass begins: take the zeros away again, unless something was added to them."""
        mark, seen, self._mark, self._seen = self._mark, self._seen, None, None
        if mark is not None and seen is not None and self.parameter.grad is mark and version_of(mark) == seen[1]:
            self.parameter.grad = None


def _all_zero(grad: torch.Tensor) -> torch.Tensor:
    """Whether there is something and all of it is +0.0, on the gradient's device."""
    if not grad.numel():
        return torch.zeros((), dtype=torch.bool)
    return (grad.ne(0) | grad.signbit()).any().logical_not()


GradientBuffer = torch.Tensor | Slot  # what a product may put a gradient into


class Gradients:
    """The pending gradients of one model.

    Args:
        context: Its communicators, options, pool and record.
        scatters: As for :class:`Buckets`.
    """

    def __init__(self, context: Context, *, scatters: bool) -> None:
        self._context = context
        self.buckets = Buckets(context, scatters=scatters)
        self.deferred: dict[int, Deferred] = {}
        self._hooks: dict[int, list[tuple[Any, dict[int, Any]]]] = {}  # each parameter's: its dicts, what they held
        self._scattering: deque[TracedWork] = deque()
        self._expected: set[int] = set()  # parameters whose gradients come later

    # --- a gradient comes -----------------------------------------------------------------------------------------

    def expect(self, parameter: torch.Tensor) -> None:
        """A gradient of the backward pass under way comes later, so autograd gets None for it now."""
        self._expected.add(id(parameter))
        # It would run hooks with that; they run on the complete gradient. It looks into these very dicts.
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
            self._take_hooks(parameter)

    def _take_hooks(self, parameter: torch.Tensor) -> None:
        tables = [getattr(parameter, name) for name in _HOOKS]
        self._hooks[id(parameter)] = [(table, dict(table or {})) for table in tables]
        for table in tables:
            if table:
                table.clear()

    def buffer(
        self, route: Route, parameter: torch.Tensor, columns: int, like: torch.Tensor, *, scattered: bool
    ) -> GradientBuffer:
        """Where a product may put the gradient of the block: a Slot where that is its last place, else a tensor.

        ``scattered``: this rank's rows of it, which the product itself reduces over z.
        """
        shape = (route.shard_rows if scattered else route.padded_rows, columns)
        last = scattered or (route.shards == 1 and self._reduced_in(like) == like.dtype)
        if last and not self._context.defers:
            return self.buckets.slot(parameter, shape, route.shard_rows, like, route.weight_reductions)
        return self._context.pool.allocate(shape, like.dtype, like.device)

    def kept_block(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """The fp32 sum to which the gradient of a block, of 16-bit ``dtype``, need only be added, padded rows included.

        None where there is none yet, or the gradient is to be reduced.
        """
        kept = self.deferred.get(id(parameter)) if self._context.defers else None
        if kept is None or kept.reductions is not None or kept.tensor.dtype != torch.float32 or dtype.itemsize != 2:
            return None
        kept.check_unchanged()
        return kept.tensor

    def takes_shard_of(self, parameter: torch.Tensor) -> bool:
        """Whether its product may reduce this gradient over z: nothing that ``no_sync`` kept is added to it before."""
        return not self._context.defers and id(parameter) not in self.deferred

    def add_weight(self, route: Route, parameter: torch.Tensor, into: GradientBuffer) -> None:
        """The gradient of the block is in what ``buffer`` gave, or in any padded buffer: reduce it in time."""
        if self._context.defers:
            self._defer(route, parameter, into.tensor if isinstance(into, Slot) else into, None)
            return
        if self._context.reduce_dtype is not None and not isinstance(into, Slot):
            into = self.cast(into)
        if self.deferred:
            self._take_deferred(parameter, into.tensor if isinstance(into, Slot) else into)
        self._send_weight(route, parameter, into)

    def add_vector(
        self, route: Route, parameter: torch.Tensor, grad: torch.Tensor, reductions: tuple[Reduction, ...]
    ) -> None:
        """The gradient of a parameter that z and data replicate: reduce it by ``reductions`` in time."""
        if self._context.defers:
            self._defer(route, parameter, grad, reductions)
            return
        if self._context.reduce_dtype is not None:
            grad = self.cast(grad)
        if self.deferred:
            self._take_deferred(parameter, grad)
        self._send_vector(route, parameter, grad, reductions)

    def keep_vector(self, route: Route, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        """Keep a gradient of a pipeline's micro-batch that is replicated, out of one of its hooks, for the step's end.

        No hook runs on it again.
        """
        self._defer(route, parameter, grad.clone(), route.vector_reductions)
        self.deferred[id(parameter)].runs_hooks = False

    def cast(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient in the dtype that it is to be reduced in."""
        return grad if self._context.reduce_dtype is None else self._cast(grad, self._reduced_in(grad))

    def _reduced_in(self, grad: torch.Tensor) -> torch.dtype:
        dtype = self._context.reduce_dtype
        return grad.dtype if dtype is None or grad.dtype == torch.float64 else dtype

    def _cast(self, grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """``grad`` in ``dtype``, in memory that is used again once nobody has the gradient any more."""
        if grad.dtype == dtype:
            return grad
        return self._context.pool.allocate(tuple(grad.shape), dtype, grad.device).copy_(grad)

    # --- on its way -----------------------------------------------------------------------------------------------

    def _send_weight(self, route: Route, parameter: torch.Tensor, into: GradientBuffer) -> None:
        rows, scatter = route.padded_rows // route.shards, None
        if isinstance(into, Slot):
            slot = into
        else:
            slot = self.buckets.slot(parameter, (rows, into.shape[1]), route.shard_rows, into, route.weight_reductions)
            if route.shards == 1:
                slot.tensor.copy_(into)
            else:
                slot.arriving = scatter = self._start_scatter(route, into, slot.tensor)
        slot.copies = route.weight_copies
        if slot.bucket is not None:
            self.buckets.ready(slot.bucket)
        if scatter is None:
            return
        shards = self._context.shards_of(parameter) if parameter.device != self._context.device else None
        if shards is not None and slot.bucket is None and slot.copies is None:  # complete then: it leaves for the host
            place = shards.to_host(slot.gradient(), parameter.dtype, scatter.wait, held=(slot.tensor, into))
            slot.arriving, slot.tensor = None, place
            return
        while self._scattering and (self._scattering[0].done() or len(self._scattering) == _AT_ONCE):
            self._scattering.popleft().wait()  # lets go of the buffer it was scattered from
        self._scattering.append(scatter)

    def _start_scatter(self, route: Route, buffer: torch.Tensor, out: torch.Tensor) -> TracedWork | None:
        """Reduce-scatter the padded gradient of the block into ``out``; None when that is done already."""
        context, axis = self._context, route.shard_axis
        assert axis is not None
        call = partial(context.communicators[axis].reduce_scatter, buffer, out, op=route.op)
        pending = context.overlap.reduce_scatter
        work = context.start(call, out, "reduce_scatter", axis, route.name, pending=pending)
        return work if pending else None

    def _send_vector(
        self, route: Route, parameter: torch.Tensor, grad: torch.Tensor, reductions: tuple[Reduction, ...]
    ) -> None:
        slot = self.buckets.slot(parameter, tuple(grad.shape), grad.shape[0], grad, reductions)
        slot.copies = route.vector_copies
        slot.tensor.copy_(grad)
        if slot.bucket is not None:
            self.buckets.ready(slot.bucket)

    # --- without synchronisation ----------------------------------------------------------------------------------

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
        old = self.deferred.pop(id(parameter), None)
        if old is None:
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

    def forget_zeroed(self) -> None:
        """Drop gradients of micro-batches that ``zero_grad`` was to throw away."""
        if self.deferred:
            self.deferred = {key: each for key, each in self.deferred.items() if not each.zeroed()}

    # --- the pass -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A backward pass begins."""
        if self._context.holding:
            return
        self.forget_zeroed()
        for each in self.deferred.values():
            each.unwatch()

    def start(self, *, of_step: bool = False) -> None:
        """Issue what is left to be reduced, and wait for none of it; ``of_step``: no backward pass comes before it."""
        if self.deferred and not self._context.defers:
            for each in self.deferred.values() if of_step else ():
                if each.runs_hooks and has_hooks(each.parameter):
                    self._take_hooks(each.parameter)
            self._send_deferred()
        self.buckets.close()

    def finish(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Complete all gradients: of each parameter, by its id, the parameter and the gradient."""
        self.start()
        totals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        host = None  # the ways to the host, if any weight lies there
        for slot in self.buckets.finish():
            parameter, grad = slot.parameter, slot.gradient()
            shards = self._context.shards_of(parameter) if parameter.device != self._context.device else None
            if shards is not None:
                host = shards
                if grad.device != parameter.device:
                    grad = shards.to_host(grad, parameter.dtype)
            if id(parameter) in totals:  # used twice
                if shards is not None:
                    shards.wait()
                totals[id(parameter)][1].add_(grad)
            else:
                totals[id(parameter)] = (parameter, grad)
        if host is not None:
            host.wait()
        self._scattering.clear()
        self._expected.clear()
        return totals

    def deliver(self, totals: dict[int, tuple[torch.Tensor, torch.Tensor]], *, by_rows: bool) -> None:
        """Put the gradients that ``finish`` gave into ``.grad``; ``by_rows``: ZeRO may have cut them."""
        hooks, give = self._give_hooks_back(), set_gradient if by_rows else None
        for parameter, grad in totals.values():
            grad = grad if grad.dtype == parameter.dtype else self._cast(grad, parameter.dtype)
            if give is None and parameter.grad is None and id(parameter) not in hooks:
                parameter.grad = grad  # what deliver comes to
            else:
                deliver(parameter, grad, hooks.get(id(parameter), ({}, {})), give)
        if not self._context.holding:
            for each in self.deferred.values():
                each.watch()

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
        """Forget what is pending; of how many parameters that was.

        What micro-batches without synchronisation have left goes too, unless the pass had not come to any gradient: a
        part of its gradients is in there, or a part of theirs was on its way.
        """
        count = len(self._expected)
        self._expected.clear()
        if count:
            self.deferred.clear()
        for each in self.deferred.values():
            each.watch()
        self._give_hooks_back()
        self._scattering.clear()
        self.buckets.drop()
        return count
