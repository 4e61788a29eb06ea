"""Communicator: the collectives of one axis (or of the world) on tensors, and the Work that a pending one gives.

    total = comms.x.all_reduce(t)                             # blocking, in place
    work = comms.z.all_gather(shard, async_op=True)           # pending; do not touch shard before wait
    weight = work.wait()

Every rank of a communicator issues the same operations in the same order (contract: csrc/base/communicator.h).
Roots and peers are ranks inside the communicator. Tensors may be NumPy arrays or anything with DLPack, and of any
strides that torch has (it has no negative ones). A communicator of one rank issues nothing. What it does not do: record
gradients; the layers of axo.nn and axo.matmul do.

A tensor that an operation writes counts as modified in place: autograd refuses a backward that would have read the old
values.
"""

from __future__ import annotations

import atexit
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from numbers import Real
from typing import Any, Self

import torch

from axo.comm.counting import observers
from axo.comm.extension import _C
from axo.comm.memory import (
    DTYPES,
    OPS,
    CopyPairs,
    as_tensor,
    check_counts,
    check_elements,
    check_integer,
    core_arguments,
    core_buffers,
    like,
    rows_of,
    rows_to_elements,
    scaled,
)
from axo.comm.work import Work, copy_all, deliver_completed, open_group, undelivered
from axo.errors import Error, Mismatch, raised
from axo.launch import CONSEQUENCES, let_the_cause_end_first, record_failure

__all__ = ["Communicator", "group"]

_REDUCES = {(dtype, op): _C.can_reduce(code, op_code) for dtype, code in DTYPES.items() for op, op_code in OPS.items()}
_HEARD_SECONDS = 1.0  # for peers on other hosts to learn why this rank ends: it would take unread words along
NOTHING = torch.empty(0, dtype=torch.uint8)  # what a barrier puts in
# The core's calls that look at most tensors of the host themselves. They take a code of ``OPS``, or -1.
_ALL_REDUCE, _ALL_GATHER = _C.Communicator.plain_all_reduce, _C.Communicator.plain_all_gather
_REDUCE_SCATTER, _BROADCAST = _C.Communicator.plain_reduce_scatter, _C.Communicator.plain_broadcast
_ALL_TO_ALL = _C.Communicator.plain_all_to_all


class group:
    """Launch the operations of a block as one, on whatever communicators they are.

    Operations without ``async_op`` are complete when the block ends; their results must not be read inside it. Blocks
    nest; the outermost end launches.
    """

    def __enter__(self) -> None:
        _C.group_start()
        open_group.depth += 1

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        open_group.depth -= 1
        if open_group.depth:
            _C.group_end()
            return
        recorded, waits = open_group.recorded, open_group.waits
        open_group.recorded, open_group.waits = [], []
        _C.group_end()
        for work in recorded:
            work.launched()
        if kind is None:
            for work in waits:
                work.wait()


class Communicator:
    """The collectives among the ranks of one axis. Made by ``axo.connect`` and ``split``.

    Attributes:
        rank, size: This process's rank, and how many there are. name, axis: For errors and for counting.
        device: What it moves. transport: What moves it: ``"shared-memory"``, ``"nccl"``, ...; ``"none"`` for one rank.
    """

    def __init__(
        self,
        core: _C.Communicator | None,
        *,
        name: str,
        axis: str,
        device: torch.device | None = None,
        timeout: float | None = None,
        borrowed: bool = False,
    ) -> None:
        self._core: _C.Communicator | None = core  # None: one rank
        self._cores = [] if core is None else [core]  # this one, and those that share its fate
        self._timeout_ms = -1 if timeout is None else int(timeout * 1000)  # of each operation; -1: the core's own
        self._timeout = timeout
        self._borrowed = borrowed  # the core is a process group's, which closes it
        self.rank: int = core.rank if core is not None else 0
        self.size: int = core.size if core is not None else 1
        self.name = name
        self.axis = axis
        self.device = device or torch.device("cpu")
        self.transport: str = core.transport if core is not None else "none"
        self._blocked = 0.0
        self._siblings: tuple[Communicator, ...] = ()  # the other axes of the same grid
        if core is not None:
            _open.add(self)

    def __repr__(self) -> str:
        return f"Communicator({self.name!r}, rank {self.rank} of {self.size}, {self.transport})"

    @property
    def communicators(self) -> tuple[Communicator, ...]:
        """This one alone, as ``axo.Communicators`` has it of several."""
        return (self,)

    @property
    def blocked_seconds(self) -> float:
        """How long this rank has been blocked in this communicator's operations, in seconds."""
        return self._blocked

    def abort(self, reason: str) -> None:
        """End every pending operation of this communicator, on every rank, with ``Aborted(reason)``. Never blocks."""
        for core in self._cores:
            core.abort(reason)

    def give_up(self, error: BaseException) -> None:
        """This rank ends with ``error``: its peers' operations end with ``PeerLost`` that says so. Never blocks."""
        for core in self._cores:
            core.give_up(raised(error))

    def set_timeout(self, seconds: float) -> float:
        """Set the time limit of operations and splits that begin from here on; return the one before, in seconds."""
        before = self.limit_core(seconds)
        if self._timeout is not None:  # its own limit, which it gives with each operation
            before, self._timeout, self._timeout_ms = self._timeout, seconds, int(seconds * 1000)
        return before

    def limit_core(self, seconds: float) -> float:
        """Set the limit of the core alone, which splits have, and operations that are given none; the one before."""
        before = [core.set_timeout(int(seconds * 1000)) / 1000 for core in self._cores]
        return before[0] if before else 0.0

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{self.name!r}: a communicator belongs to its process and is not pickled; of a parallel model every rank"
            " calls model.state_dict() (whole tensors), axo.checkpoint.save(...) or axo.checkpoint.save_pretrained(...)"
        )

    def close(self) -> None:
        """Wait for this rank's pending operations, leave the peers, release memory. May be called again."""
        with ExitStack() as last_first:  # all are closed, whichever raises
            for core in () if self._borrowed else self._cores:
                last_first.callback(core.shutdown)

    def all_reduce(
        self, tensor: Any, op: str = "sum", async_op: bool = False, *, out: Any = None, scale: float | None = None
    ) -> Any:
        """Reduce over ranks, elementwise, in place unless ``out`` is given; every rank gets the same bits.

        ``scale`` multiplies this rank's input first, in the same operation: the result is the sum of scale * tensor.
        """
        if out is None and scale is None:
            code = OPS.get(op, -1) if type(op) is str else -1
            if (done := self._run_plain(_ALL_REDUCE, tensor, code, tensor, async_op)) is not None:
                return done
        return self._collective("all_reduce", tensor, out, async_op, op=op, scale=scale)

    def all_gather(self, tensor: Any, out: Any = None, async_op: bool = False) -> Any:
        """Concatenate the ranks' tensors ``(n0, ...)`` along dim 0, in rank order: ``(size * n0, ...)``."""
        if out is not None:
            if (done := self._run_plain(_ALL_GATHER, tensor, out, out, async_op)) is not None:
                return done
        return self._collective("all_gather", tensor, out, async_op)

    def reduce_scatter(
        self, tensor: Any, out: Any = None, op: str = "sum", async_op: bool = False, *, scale: float | None = None
    ) -> Any:
        """Reduce ``(size * n0, ...)`` over ranks; this rank gets part ``rank`` of dim 0: ``(n0, ...)``.

        ``scale`` is that of :meth:`all_reduce`.
        """
        if out is not None and scale is None:
            code = OPS.get(op, -1) if type(op) is str else -1
            if (done := self._run_plain(_REDUCE_SCATTER, tensor, (out, code), out, async_op)) is not None:
                return done
        return self._collective("reduce_scatter", tensor, out, async_op, op=op, scale=scale)

    def broadcast(self, tensor: Any, root: int = 0, async_op: bool = False) -> Any:
        """Copy the root's values to every rank, in place."""
        self._check_rank("broadcast", "root", root)
        if (done := self._run_plain(_BROADCAST, tensor, root, tensor, async_op)) is not None:
            return done
        target = self._tensor(tensor, "broadcast")
        return self._run("broadcast", None, target, tensor, async_op, root, written=self.rank != root)

    def reduce(self, tensor: Any, root: int = 0, op: str = "sum", async_op: bool = False, *, out: Any = None) -> Any:
        """Reduce over ranks; the result is at the root, in place unless ``out`` is given. None elsewhere."""
        return self._collective("reduce", tensor, out, async_op, op=op, root=root)

    def gather(self, tensor: Any, root: int = 0, out: Any = None, async_op: bool = False) -> Any:
        """Concatenate the ranks' tensors ``(n0, ...)`` at the root: ``(size * n0, ...)``. None elsewhere."""
        return self._collective("gather", tensor, out, async_op, root=root)

    def scatter(self, tensor: Any, root: int = 0, out: Any = None, async_op: bool = False) -> Any:
        """Cut the root's ``(size * n0, ...)`` along dim 0; each rank gets its part ``(n0, ...)``.

        Only the root passes a tensor; the others pass None and ``out``.
        """
        if self.rank == root and tensor is None:
            raise ValueError("scatter: the root must pass a tensor")
        if self.rank == root:
            return self._collective("scatter", tensor, out, async_op, root=root)
        self._check_rank("scatter", "root", root)
        if out is None:
            raise ValueError(f"scatter: rank {self.rank} is not the root ({root}) and must pass out")
        return self._run("scatter", None, self._tensor(out, "scatter"), out, async_op, root)

    def all_to_all(
        self,
        tensor: Any,
        out: Any = None,
        async_op: bool = False,
        *,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
    ) -> Any:
        """Send part p of dim 0 to rank p, and receive from rank p its part for this rank, in rank order.

        Parts are equal unless the counts say otherwise: rows of dim 0 for each rank; what p sends here must equal what
        is received from p.
        """
        if out is not None and send_counts is None and recv_counts is None:
            if (done := self._run_plain(_ALL_TO_ALL, tensor, out, out, async_op)) is not None:
                return done
        source = self._tensor(tensor, "all_to_all")
        sent, send_offsets = rows_to_elements("send_counts", send_counts, source, self.size)
        rows = rows_of(source)
        if out is None and recv_counts is not None:
            check_counts("recv_counts", recv_counts, self.size)
            rows = sum(recv_counts)
        elif out is None and send_counts is not None:
            raise ValueError("all_to_all: send_counts without recv_counts or out; say what comes from each rank")
        target, result = self._output("all_to_all", source, tensor, out, rows, None)
        received, recv_offsets = rows_to_elements("recv_counts", recv_counts, target, self.size)
        if self.size == 1:
            check_elements("all_to_all", target, source.numel(), source)
        if send_counts is None and recv_counts is None and sent[0] == received[0]:
            return self._run("all_to_all", source, target, result, async_op)
        parts = (sent, send_offsets, received, recv_offsets)
        return self._run("all_to_all_v", source, target, result, async_op, *parts)

    def send(self, tensor: Any, peer: int, tag: int = 0, async_op: bool = False) -> Any:
        """Send to ``peer``; meets its ``recv`` of the same tag, in issue order."""
        self._check_peer("send", peer)
        check_integer("send", "tag", tag)
        source = self._tensor(tensor, "send")
        return self._run("send", source, None, tensor, async_op, peer, tag)

    def recv(self, tensor: Any, peer: int | None, tag: int = 0, async_op: bool = False) -> Any:
        """Receive from ``peer`` into ``tensor``; None: from whichever rank sends first, as ``Work.source()`` then says.

        From any rank only on the CPUs of one host: NCCL and RCCL match messages by rank.
        """
        if peer is not None:
            self._check_peer("recv", peer)
        elif self.size == 1:
            raise ValueError(f"recv: {self.name!r} has one rank: there is nobody to receive from")
        check_integer("recv", "tag", tag)
        target = self._tensor(tensor, "recv")
        return self._run("recv", None, target, tensor, async_op, -1 if peer is None else peer, tag)

    def barrier(self, async_op: bool = False) -> Any:
        """Return when every rank has come here."""
        return self._run("barrier", None, None, None, async_op)

    def split(self, color: int, key: int = 0, *, name: str | None = None, axis: str | None = None) -> Self | None:
        """Make a communicator of the ranks that pass the same ``color``, ordered by ``(key, rank)``. Collective.

        A negative color takes no part and gets None. ``axis`` is the name under which its operations are counted.
        """
        check_integer("split", "color", color)
        check_integer("split", "key", key)
        name = name or f"{self.name}/split{color}"
        alone = self._core is None and color >= 0
        core = None if self._core is None else self._core.split(color, key, name)
        if core is None and not alone:
            return None
        if core is not None and core.size == 1:
            core.shutdown()
            core = None
        return type(self)(core, name=name, axis=axis or self.axis, device=self.device, timeout=self._timeout)

    def _collective(
        self,
        what: str,
        tensor: Any,
        out: Any,
        async_op: bool,
        *,
        op: str | None = None,
        root: int | None = None,
        scale: float | None = None,
    ) -> Any:
        """One operation that reads ``tensor`` and, where this rank is the root or there is none, writes ``out``.

        Without ``out`` a gather makes a tensor of all ranks' parts, a scatter one of this rank's, and other operations
        write in place.
        """
        if root is not None:
            self._check_rank(what, "root", root)
        source = self._tensor(tensor, what)
        args = () if op is None else (self._op(what, op, source, scale),)
        args = args if root is None else (*args, root)
        if root not in (None, self.rank):
            return self._run(what, source, None, None, async_op, *args)
        rows, count = rows_of(source), source.numel()
        if what in ("all_gather", "gather"):
            rows, count = self.size * rows, self.size * count
        elif what in ("reduce_scatter", "scatter"):
            if rows % self.size:
                raise ValueError(f"{what}: dim 0 has {rows} rows, which do not divide over {self.size} ranks; pad them")
            rows, count = rows // self.size, count // self.size
        elif out is None:
            return self._run(what, source, source, tensor, async_op, *args, scale=scale)
        target, result = self._output(what, source, tensor, out, rows, count)
        return self._run(what, source, target, result, async_op, *args, scale=scale)

    def _run(
        self,
        op: str,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        result: Any,
        async_op: bool,
        *args: Any,
        scale: float | None = None,
        written: bool = True,
    ) -> Any:
        """One operation, whose arguments are checked: its result, or a Work.

        ``source`` is what this rank puts in, None where that is in ``target``, which the operation writes (None: it
        writes nothing here). ``args``: what the core's call takes beside tensors. ``result``: what the caller gets.
        """
        if self._core is None:
            value = None if source is None else scaled(source, scale)
            if target is not None and value is not None and value is not target:
                copy_all(((target, value.reshape(target.shape)),))
            return self._nothing_pending(result) if async_op else result
        counted = target if source is None or op == "scatter" else source
        call = getattr(self._core, op)
        send, receive, copies = core_buffers(op, source, target, self.rank)
        if scale is not None and send is not None:
            call, send, args = self._scaled(op, send, args, scale)
        args = core_arguments(op, send, receive, self.size, *args)
        if target is not None and written and not copies:
            _C.modified(target)  # the core writes behind autograd's back
        start = time.perf_counter()
        work = self._issue(call, args, (send, receive), copies, result, not async_op and not open_group.depth)
        if observers.active:
            observers.issued(op.removesuffix("_v"), self.axis, NOTHING if counted is None else counted, start, work)
        return result if work is None else self._pending(work, result, async_op)

    def _nothing_pending(self, result: Any) -> Work:
        return Work(self, None, result, ())

    def _issue(
        self, call: Callable[..., Any], args: tuple[Any, ...], keep: Any, copies: CopyPairs, result: Any, blocking: bool
    ) -> Work | None:
        """Call the core, which keeps ``keep`` alive; None where the operation is complete."""
        if blocking:
            self.block(call, *args, True, self._timeout_ms, None)
            if copies:  # to enter a mode costs more than a small message
                copy_all(copies)
            if undelivered:
                deliver_completed()
            return None
        return Work(self, call(*args, False, self._timeout_ms, keep), result, copies)

    def _scaled(
        self, op: str, source: torch.Tensor, args: tuple[Any, ...], scale: float
    ) -> tuple[Callable[..., Any], torch.Tensor, tuple[Any, ...]]:
        """The core's call, its input, and its arguments. The host scales first; a device in the call."""
        return getattr(self._core, op), scaled(source, scale), args

    def _pending(self, work: Work, result: Any, async_op: bool) -> Any:
        if open_group.depth:
            open_group.recorded.append(work)
            if not async_op:
                open_group.waits.append(work)
                return result
        elif work._copies:
            work.launched()
        return work

    def block(self, wait: Callable[..., object], *arguments: Any) -> float:
        """Call what blocks in the core; when that began. The time counts as this communicator's."""
        start = time.perf_counter()
        try:
            wait(*arguments)
        except Mismatch as error:
            self._spread(error)
            raise
        finally:
            self._blocked += time.perf_counter() - start
        return start

    def _spread(self, error: Mismatch) -> None:
        """Tell the ranks of the other axes: only those of this one have seen the error."""
        for sibling in self._siblings:
            sibling.abort(f"on axis {self.axis!r}: {error}")

    def _run_plain(self, call: Any, tensor: Any, other: Any, result: Any, async_op: bool) -> Any:
        """As ``_run``, of arguments that nobody has looked at; None where they are to be looked at closely.

        So are those of operations that somebody observes, and of blocking ones in a group.
        """
        if self._core is None or observers.active:
            return None
        if async_op:
            core_work = call(self._core, tensor, other, False, self._timeout_ms)
            if core_work is None:
                return None
            work = Work(self, core_work, result, ())
            return self._pending(work, result, True) if open_group.depth else work
        try:
            spent = call(self._core, tensor, other, True, self._timeout_ms)
        except Mismatch as error:
            self._spread(error)
            raise
        if spent is None:
            return None
        self._blocked += spent
        if undelivered:
            deliver_completed()
        return result

    def _tensor(self, array: Any, what: str) -> torch.Tensor:
        return as_tensor(array, what, self.device)

    def _op(self, what: str, op: str, tensor: torch.Tensor, scale: float | None = None) -> int:
        if not isinstance(op, str) or op not in OPS:
            raise ValueError(f"{what}: op={op!r} is not an operation; use one of {', '.join(OPS)}")
        if not _REDUCES[tensor.dtype, op]:
            raise ValueError(f"{what}: op={op!r} is not defined on {tensor.dtype}")
        if scale is not None and not isinstance(scale, Real):
            raise TypeError(f"{what}: scale={scale!r} is not a number")
        if scale is not None and (op != "sum" or not tensor.dtype.is_floating_point):
            raise ValueError(f"{what}: scale={scale} goes with op='sum' on floating point; got {op!r}, {tensor.dtype}")
        return OPS[op]

    def _output(
        self, what: str, source: torch.Tensor, array: Any, out: Any, rows: int, count: int | None
    ) -> tuple[torch.Tensor, Any]:
        """The tensor that is written: ``out``, of ``count`` elements, or a new one; and what the caller gets for it."""
        if out is None:
            target = source.new_empty((rows, *source.shape[1:]))
            return target, like(target, array)
        target = self._tensor(out, what)
        check_elements(what, target, count, source)
        return target, out

    def _check_rank(self, what: str, name: str, rank: int) -> None:
        check_integer(what, name, rank)
        if not 0 <= rank < self.size:
            raise ValueError(f"{what}: {name}={rank} is not a rank of {self.name!r}; use 0 to {self.size - 1}")

    def _check_peer(self, what: str, peer: int) -> None:
        self._check_rank(what, "peer", peer)
        if peer == self.rank:
            raise ValueError(f"{what}: peer={peer} is this rank itself; copy the tensor instead")


# Those that the end of the program closes. Closing says "left" to the peers; else they would find a dead process.
_open: weakref.WeakSet[Communicator] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    error = getattr(sys, "last_value", None)
    if error is not None:  # the interpreter ends on it: what is pending here the peers may never join
        tell_of(error, _open)
        return
    for core in [core for communicator in list(_open) for core in communicator._cores]:
        with suppress(Error):  # a peer has gone already, and those who waited for an operation have its error
            core.shutdown()
    _C.leave_devices()  # groups of torch.distributed that nobody has destroyed


def tell_of(error: BaseException, communicators: Iterable[Communicator]) -> None:
    """This rank ends with ``error``: leave it for torchrun's report, and tell the peers; wait where it is another's."""
    if not isinstance(error, CONSEQUENCES):
        record_failure(error)
    told = list(communicators)
    for communicator in told:
        communicator.give_up(error)
    end = time.monotonic() + _HEARD_SECONDS
    for communicator in told:
        for core in communicator._cores:
            core.until_heard(max(0, int(1000 * (end - time.monotonic()))))
    if isinstance(error, CONSEQUENCES):
        let_the_cause_end_first()
