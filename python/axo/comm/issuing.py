"""How a collective is issued once its arguments are known, and the checks that all of them share.

:class:`Issuing` is the lower half of a communicator: ``axo.comm.communicator.Communicator`` has the collectives, and
``axo.comm.device.DeviceCommunicator`` issues them on streams. ``group`` launches several as one.
"""

from __future__ import annotations

import atexit
import sys
import time
import weakref
from numbers import Real
from typing import Any

import torch

from axo.comm.counting import active as counting
from axo.comm.counting import watch
from axo.comm.extension import _C
from axo.comm.memory import DTYPES, OPS, as_tensor, check_elements, check_integer, like
from axo.comm.work import Work, open_group
from axo.errors import Error, Mismatch

_DEFAULT_TIMEOUT = -1  # the communicator's own
_REDUCES = {(dtype, op): _C.can_reduce(code, op_code) for dtype, code in DTYPES.items() for op, op_code in OPS.items()}
# The code of an operation, by a dtype's code and its name, where it is defined.
REDUCTIONS = {(DTYPES[dtype], op): OPS[op] for (dtype, op), defined in _REDUCES.items() if defined}


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
        try:
            _C.group_end()
        finally:
            for work in recorded:
                work._recorded = False
        if kind is None:
            for work in waits:
                work.wait()


class Issuing:
    """What a communicator is, but for its collectives."""

    def __init__(self, core: Any, *, name: str, axis: str, device: torch.device | None = None) -> None:
        self._core = core  # None: one rank
        self.rank: int = core.rank if core is not None else 0
        self.size: int = core.size if core is not None else 1
        self.name = name
        self.axis = axis
        self.device = device or torch.device("cpu")
        self.transport: str = core.transport if core is not None else "none"
        self._blocked = 0.0
        self._siblings: tuple[Issuing, ...] = ()  # the other axes of the same grid
        if core is not None:
            _open.add(self)

    def __repr__(self) -> str:
        return f"Communicator({self.name!r}, rank {self.rank} of {self.size}, {self.transport})"

    @property
    def blocked_seconds(self) -> float:
        """How long this rank has been blocked in this communicator's operations, in seconds."""
        return self._blocked

    def abort(self, reason: str) -> None:
        """End every pending operation of this communicator, on every rank, with ``Aborted(reason)``. Never blocks."""
        if self._core is not None:
            self._core.abort(reason)

    def close(self) -> None:
        """Wait for this rank's pending operations, take leave of the peers, release memory. May be called again."""
        if self._core is not None:
            self._core.shutdown()

    def _issue(self, call: Any, args: tuple, keep: Any, copies: tuple, target: Any, result: Any, async_op: bool) -> Any:
        """Call the core; give the result, or a Work. ``target`` is the caller's tensor that is written, if any."""
        if target is not None and not copies:
            _C.modified(target)  # the core writes behind autograd's back
        if not async_op and not open_group.depth:
            start = time.perf_counter()
            try:
                call(*args, True, _DEFAULT_TIMEOUT, None)
            except Mismatch as error:
                self._spread(error)
                raise
            finally:
                self._blocked += time.perf_counter() - start
            watch.add(self.axis, start, None)
            for to, buffer in copies:
                with torch.no_grad():  # only where something is copied: it costs more than a small message
                    to.copy_(buffer)
            return result
        return self._pending(Work(self, call(*args, False, _DEFAULT_TIMEOUT, keep), result, copies), result, async_op)

    def _pending(self, work: Work, result: Any, async_op: bool) -> Any:
        watch.add(self.axis, time.perf_counter(), work)
        if open_group.depth:
            work._recorded = True
            open_group.recorded.append(work)
            if not async_op:
                open_group.waits.append(work)
                return result
        return work

    def _alone(self, source: torch.Tensor, target: Any, result: Any, async_op: bool) -> Any:
        if target is not source:
            with torch.no_grad():
                target.copy_(source.reshape(target.shape))
        return Work(self, None, result, ()) if async_op else result

    def _spread(self, error: Mismatch) -> None:
        """Tell the ranks of the other axes: only those of this one have seen the error."""
        for sibling in self._siblings:
            sibling.abort(f"on axis {self.axis!r}: {error}")

    # What a collective of host memory needs to know of most tensors, in one call. None: look closely.
    _plain = staticmethod(_C.plain)

    def _plain_pair(self, source: Any, target: Any) -> tuple[tuple, tuple] | None:
        """The same of two tensors of one dtype that do not overlap."""
        if target is None or (a := self._plain(source)) is None or (b := self._plain(target)) is None or a[2] != b[2]:
            return None
        return (a, b) if a[0] + a[3] <= b[0] or b[0] + b[3] <= a[0] else None

    def _tensor(self, array: Any, what: str) -> torch.Tensor:
        return as_tensor(array, what, self.device)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _count(self, op: str, tensor: torch.Tensor) -> None:
        if counting.blocks:
            counting.record(op, self.axis, tensor.numel(), tensor.element_size())
        if watch.issued is not None:
            watch.about_to(op, tensor.numel() * tensor.element_size())

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

    def _whole(self, what: str, part: torch.Tensor, array: Any, out: Any) -> tuple[torch.Tensor, Any]:
        """The tensor of ``size`` parts that a gather writes, and what the caller gets for it."""
        if out is None:
            rows = part.shape[0] if part.dim() else 1
            target = self._empty((self.size * rows, *part.shape[1:]), part.dtype)
            return target, like(target, array)
        target = self._tensor(out, what)
        why = f"{self.size} ranks with {part.numel()} each"
        check_elements(what, "out", target, self.size * part.numel(), part.dtype, why)
        return target, out

    def _part(self, what: str, whole: torch.Tensor, array: Any, out: Any) -> tuple[torch.Tensor, Any]:
        """The tensor that takes this rank's part of ``whole``, and what the caller gets for it."""
        rows = whole.shape[0] if whole.dim() else 1
        if rows % self.size:
            raise ValueError(f"{what}: dim 0 has {rows} rows, which do not divide over {self.size} ranks; pad them")
        if out is None:
            target = self._empty((rows // self.size, *whole.shape[1:]), whole.dtype)
            return target, like(target, array)
        target = self._tensor(out, what)
        why = f"a part of {whole.numel()} over {self.size} ranks"
        check_elements(what, "out", target, whole.numel() // self.size, whole.dtype, why)
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
_open: weakref.WeakSet[Issuing] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    if hasattr(sys, "last_value"):
        # The interpreter ends on an exception: what is pending here the peers may never join. They see us die.
        return
    for communicator in list(_open):
        try:
            communicator.close()
        except Error:
            pass  # a peer has gone already, and whoever waited for an operation has been told
    _C.leave_devices()  # groups of torch.distributed that nobody has destroyed
