"""Communicators without peers: each collective is checked, counted and noted, and moves nothing.

    comms = recording("4x2x32x16", rank=17)      # one process stands for rank 17 of 4,096
    model = axo.parallelize(model, comms); ...    # the layers and the engine as they are
    comms.issued                                  # what this rank would have sent, in order

Tensors without values (``torch._subclasses.FakeTensor``) keep their shapes. For tensors with values, every peer holds
the same values as this rank: a sum is this value times the number of ranks, a gather repeats it. So checks that ranks
agree pass, and code that reads values can go on. A pending operation keeps its tensors until somebody waits for it, or
until its communicator has issued two more. Not here: what the collectives cost, and anything that depends on what peers
really hold.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from axo.comm.communicator import NOTHING, Communicator
from axo.comm.connect import Communicators
from axo.comm.counting import observers
from axo.comm.extension import _C
from axo.comm.memory import scaled
from axo.comm.transports import alone
from axo.comm.work import Work
from axo.grid import Grid

TRANSPORT = "recording"
# The operations that are recorded, and what is told of each beside tensors: its reduction or root.
_RECORDED = {
    "all_reduce": "{reduction}",
    "all_gather": "",
    "reduce_scatter": "{reduction}",
    "broadcast": "root {0}",
    "reduce": "{reduction} to root {1}",
    "barrier": "",
    "send": "",
    "recv": "",
    "all_to_all": "",
}
_AT_ONCE = 2  # operations of one communicator that count as under way
_INSIDE = ("axo.comm.", "axo.overlap.", "axo.matmul.", "axo.nn.", "torch.")


class Issued(NamedTuple):
    """One collective of one rank.

    Attributes:
        op, axis: Which. dtype, elements: What this rank puts in, or receives. detail: The reduction or the root.
        where: File and line outside Axo that led to it.
        peer: The stage that a message goes to or comes from.
    """

    op: str
    axis: str
    dtype: str
    elements: int
    detail: str
    where: str
    peer: int | None = None

    @property
    def must_match(self) -> tuple[str, str, int, str]:
        """What has to be equal on all ranks of the communicator."""
        what = "message" if self.peer is not None else self.op
        return what, self.dtype, self.elements, self.detail

    def __str__(self) -> str:
        detail = f", {self.detail}" if self.detail else ""
        if self.peer is not None:
            detail += f", {'to' if self.op == 'send' else 'from'} stage {self.peer}"
        return f"{self.op} of {self.elements:,} {self.dtype}{detail} ({self.where})"


class _UnderWay:
    """What a Work waits for: an operation that is complete when it is awaited; ``kept`` are its tensors."""

    def __init__(self, *kept: torch.Tensor | None) -> None:
        self._kept: tuple[torch.Tensor | None, ...] | None = kept

    def wait(self) -> None:
        self._kept = None

    def synchronize(self, limit: int) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._kept is None

    def exception(self) -> None:
        return None

    def seconds(self) -> float:
        return -1.0

    def source(self) -> int:
        return -1

    def when_completed(self, callback: Callable[[], None]) -> None:
        self.wait()
        callback()


class RecordingCommunicator(Communicator):
    """The collectives of one axis among ranks that are not there."""

    def __init__(self, rank: int, size: int, *, name: str, axis: str, issued: list[Issued]) -> None:
        super().__init__(None, name=name, axis=axis)
        self.rank, self.size, self.transport, self.issued = rank, size, TRANSPORT, issued
        self._under_way: deque[_UnderWay] = deque()

    def split(self, color: int, key: int = 0, *, name: str | None = None, axis: str | None = None) -> NoReturn:
        raise NotImplementedError("split: a communicator without peers cannot know their colors")

    def _tensor(self, array: Any, what: str) -> torch.Tensor:
        return array if isinstance(array, FakeTensor) else super()._tensor(array, what)

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
        op = op.removesuffix("_v")  # of uneven parts
        if op not in _RECORDED:
            raise NotImplementedError(
                f"{op}: a dry run does not record this operation; it knows {', '.join(_RECORDED)}"
            )
        start, moved = time.perf_counter(), source if source is not None else target
        counted = NOTHING if moved is None else moved
        reduction = _C.OPS[args[0]] if "reduc" in op else ""
        detail = _RECORDED[op].format(*args, reduction=reduction)
        self.issued.append(Issued(op, self.axis, _name(counted.dtype), counted.numel(), detail, _where()))
        if target is not None and written:
            _C.modified(target)
            uneven = op == "all_to_all" and source is not None and source.numel() != target.numel()
            if source is not None and not isinstance(source, FakeTensor) and not uneven:
                # What stands for peers is no memory of this rank.
                with torch.no_grad(), _disable_current_modes():
                    target.copy_(self._value(op, scaled(source.detach(), scale), reduction).reshape(target.shape))
        work = None
        if async_op:
            self._under_way.append(_UnderWay(source, target))
            work = Work(self, self._under_way[-1], result, ())
            if len(self._under_way) > _AT_ONCE:
                self._under_way.popleft().wait()
        observers.issued(op, self.axis, counted, start, work)
        return result if work is None else self._pending(work, result, True)

    def _value(self, op: str, source: torch.Tensor, reduction: str) -> torch.Tensor:
        """What this rank would get if all held ``source``."""
        if op == "all_gather":
            return source.reshape(-1).repeat(self.size)
        if reduction == "sum":
            source = source * self.size
        elif reduction == "product":
            source = source**self.size
        return source.reshape(self.size, -1)[self.rank] if op == "reduce_scatter" else source


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _where() -> str:
    """The nearest frame that is not Axo's own or torch's."""
    frame: Any = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_INSIDE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


class _Message(dist.Work):
    """A message of a stage that counts as sent once it is awaited."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self._tensor: torch.Tensor | None = tensor

    def wait(self, timeout: Any = None) -> bool:
        self._tensor = None
        return True


class RecordingGroup(dist.ProcessGroup):
    """The ranks of a pipeline for the messages of ``torch.distributed.pipelining``, which are noted and go nowhere."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.issued: list[Issued] = []

    def getBackendName(self) -> str:
        return _BACKEND

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """By which torch 2.15's schedules sort messages; torch's own asks a backend."""
        return "pipeline"

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        return self._note("send", tensors[0], peer)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        if not isinstance(tensors[0], FakeTensor):
            with torch.no_grad(), _disable_current_modes():
                tensors[0].fill_(1)  # in the vote by which torch's stages begin: "the shapes are given"
        return self._note("recv", tensors[0], peer)

    def _get_backend(self, device: object) -> object:  # type: ignore[override]
        """What torch asks whether it groups messages: this object does not."""
        return self

    def allreduce(self, tensors: list[torch.Tensor], options: object) -> dist.Work:  # type: ignore[override]
        """The vote by which torch's stages begin, from torch 2.15 on: this rank's own answer is that of all."""
        return _Message(tensors[0])

    def _note(self, op: str, tensor: torch.Tensor, peer: int) -> dist.Work:
        self.issued.append(Issued(op, "pipeline", _name(tensor.dtype), tensor.numel(), "", _where(), peer))
        return _Message(tensor)


_BACKEND = "axo-recording"


class RecordingCommunicators(Communicators):
    """The communicators of one grid, or of the grids of a pipeline, seen by one rank whose peers are not there.

    Attributes:
        issued: What this rank has sent so far, over all axes, in order.
    """

    def __init__(self, grid: Grid, rank: int, stages: int = 1, context: int = 1, experts: int = 1) -> None:
        self.issued: list[Issued] = []
        name = "world" if stages == 1 else "everyone"
        nobody = alone(name, torch.device("cpu"))
        everyone = self._part(nobody, 0, rank, grid.world_size * stages, name, name)
        super().__init__(grid, rank, everyone, False, 1.0, stages=stages, context=context, experts=experts)

    def _split(self, of: Communicator, color: int, rank: int, size: int, name: str, axis: str) -> Communicator | None:
        if color < 0:
            return None
        if size == 1:
            return alone(axis, of.device)
        return RecordingCommunicator(rank, size, name=name, axis=axis, issued=self.issued)

    @contextmanager
    def messages(self) -> Iterator[None]:
        """Let torch's stages send in this block: torch.distributed then has a process group that records.

        Raises:
            ValueError: torch.distributed is initialised already.
        """
        if self.stages == 1:
            yield
            return
        if dist.is_initialized():
            raise ValueError("recording: torch.distributed is initialised in this process; use another for stages")
        if not hasattr(dist.Backend, _BACKEND.upper()):
            dist.Backend.register_backend(_BACKEND, RecordingGroup, devices=["cpu"])
        dist.init_process_group(_BACKEND, store=dist.HashStore(), rank=self.stage, world_size=self.stages)
        self.pipeline_group = group = dist.distributed_c10d._get_default_group()
        assert isinstance(group, RecordingGroup)
        group.issued = self.issued
        try:
            yield
        finally:
            del self.pipeline_group
            dist.destroy_process_group()


def recording(
    grid: Grid | str, rank: int = 0, stages: int = 1, context: int = 1, experts: int = 1
) -> RecordingCommunicators:
    """The communicators of ``grid`` as ``rank`` would have them, without peers; with ``stages`` such grids in a row.

    ``context``: neighbours along z that hold pieces of the same sequences. ``experts``: those that hold other experts.

    Raises:
        ValueError: There is no such rank.
    """
    parsed = Grid.parse(grid)
    ranks = parsed.world_size * stages
    if not 0 <= rank < ranks:
        of = parsed.in_stages(stages)
        raise ValueError(f"recording: rank {rank} is not one of the {ranks} ranks of grid {of}")
    return RecordingCommunicators(parsed, rank, stages, context, experts)
