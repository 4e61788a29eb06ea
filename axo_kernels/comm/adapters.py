"""What makes a communicator for fused operations of a process group, of an axo.Communicator, or of nothing.

Nothing here knows axo: an axo.Communicator is taken by its methods.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import Any, Protocol, Self, cast

import torch
import torch.distributed as dist

from axo_kernels.comm.communicator import FusedCommunicator, Pending
from axo_kernels.comm.host_stream import DONE
from axo_kernels.comm.peers import PeerMemory
from axo_kernels.fused.workspace import Workspace

# torch 2.13 renamed these two; the old names still work there, with a warning.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def uncapped() -> int:
    """Thread blocks that one operation of NCCL or RCCL may take when nobody has capped them but the environment.

    A product that waits on too many multiprocessors keeps the collective from starting, and then waits for it for ever.
    """
    if torch.version.hip is not None:
        return _MOST_OF_RCCL
    named = os.environ.get("NCCL_MAX_CTAS", "")
    return int(named) if named.isdecimal() and int(named) > 0 else _MOST_CHANNELS


# NCCL's most channels of an operation on one node. RCCL takes 112 by default on eight MI350, has up to 256, and
# keeps to no limit that it is given: before 2.30.7 not at all, later not in its direct collectives of eight ranks.
_MOST_CHANNELS, _MOST_OF_RCCL = 32, 256
# Channels tried for an operation beside a product that leaves as many multiprocessors: few cost the product least,
# and NVLink of an H100 wants more than four.
CAPS = (4, 8, 16)


# The version of NCCL whose gathers by copy engines take no multiprocessor.
_ZERO_CTA = 22800


def _issued(work: object) -> Pending:
    """What torch gives for a pending operation; None, for a rank outside the group, cannot happen here."""
    assert work is not None
    return cast(Pending, work)


class ProcessGroupCommunicator(FusedCommunicator):
    """A torch.distributed process group (NCCL, Gloo, axo, ...)."""

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: float = 60.0) -> None:
        group = group if group is not None else dist.group.WORLD
        super().__init__(dist.get_rank(group), dist.get_world_size(group), timeout)
        self.group = group
        self.store = partial(dist.distributed_c10d._get_process_group_store, cast(dist.ProcessGroup, group))

    def _all_reduce(self, tensor: torch.Tensor) -> Pending:
        return _issued(dist.all_reduce(tensor, group=self.group, async_op=True))

    def _all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> Pending:
        return _issued(_all_gather(out, tensor, group=self.group, async_op=True))

    def _reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor) -> Pending:
        return _issued(_reduce_scatter(out, tensor, group=self.group, async_op=True))

    @property
    def reserved_units(self) -> int:
        return uncapped()

    @property
    def _decisions(self) -> torch.device:
        if str(dist.get_backend(self.group)) == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def _broadcast(self, tensor: torch.Tensor) -> None:
        assert self.group is not None
        dist.broadcast(tensor, dist.get_global_rank(self.group, 0), group=self.group)


class Collectives(Protocol):
    """What fused operations ask of an axo.Communicator. A collective with ``async_op`` gives a :class:`Pending`."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def all_reduce(self, tensor: torch.Tensor, /, *, async_op: bool) -> Pending: ...
    def all_gather(self, tensor: torch.Tensor, out: torch.Tensor, /, *, async_op: bool) -> Pending: ...
    def reduce_scatter(self, tensor: torch.Tensor, out: torch.Tensor, op: str, /, *, async_op: bool) -> Pending: ...
    def broadcast(self, tensor: torch.Tensor, root: int, /) -> object: ...


class DeviceCollectives(Collectives, Protocol):
    """The same on GPUs: with a communication stream of its own, and flags."""

    @property
    def device(self) -> torch.device: ...
    @property
    def stream(self) -> int: ...
    @property
    def reserved_ctas(self) -> int: ...
    @property
    def library_version(self) -> int: ...
    def capped(self, max_ctas: int, /) -> Self: ...
    def follow(self) -> None: ...
    def signalled(self) -> AbstractContextManager[None]: ...
    def wait_flag(self, flag: Any, value: int, /) -> None: ...
    def write_flag(self, flag: Any, value: int, /) -> None: ...


Window = Callable[[Any, tuple[int, ...], torch.dtype, torch.device], torch.Tensor]


class AxoCommunicator(FusedCommunicator):
    """An axo.Communicator, known only by its methods. ``op``: of its reduce-scatters, ``"sum"`` or ``"avg"``."""

    def __init__(self, communicator: Collectives, timeout: float = 60.0, op: str = "sum") -> None:
        super().__init__(communicator.rank, communicator.size, timeout)
        self.communicator = communicator
        self.op = op
        self.scale = 1 / communicator.size if op == "avg" else 1.0

    @property
    def _decisions(self) -> torch.device:
        return torch.device(getattr(self.communicator, "device", "cpu"))

    def _all_reduce(self, tensor: torch.Tensor) -> Pending:
        return self.communicator.all_reduce(tensor, async_op=True)

    def _all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> Pending:
        return self.communicator.all_gather(tensor, out, async_op=True)

    def _reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor) -> Pending:
        return self.communicator.reduce_scatter(tensor, out, self.op, async_op=True)

    def _broadcast(self, tensor: torch.Tensor) -> None:
        self.communicator.broadcast(tensor, 0)


class DeviceAxoCommunicator(AxoCommunicator):
    """An axo.Communicator on GPUs: its own communication stream carries the flags and the collectives.

        fork                follow()          the stream goes on after what the compute stream has been given so far
        wait_flag, chunk    wait_flag(...)    then the chunk's collective, which follows the flag alone
        write_flag          write_flag(...)   after the collectives issued so far
        join                the compute stream waits for the collectives' works, and for what followed them

    Flags are waited for and written by the driver where it can, with the epoch that the host knows. Once an operation
    has been captured (a replayed graph advances the epoch in device memory only), and on AMD (whose stream waits are
    slow), one-program kernels on the same stream read it there instead. The driver's wait has no bound; what it waits
    for is set by a kernel of this very process, and a lost peer shows in the collective, which axo reports.
    """

    communicator: DeviceCollectives

    def __init__(
        self,
        communicator: DeviceCollectives,
        timeout: float = 60.0,
        op: str = "sum",
        channels: int = 0,
        window: Window | None = None,
        store: Callable[[], dist.Store] | None = None,
    ) -> None:
        super().__init__(communicator, timeout, op)
        self._channels = channels
        self._window = window
        self.store = store
        self._windowed: DeviceAxoCommunicator | None = None
        self._takes_none = False  # its gathers, of multiprocessors
        self._capped: dict[int, DeviceAxoCommunicator] = {}
        self._works: list[Pending] = []
        self._by_driver = torch.version.hip is None

    @property
    def reserved_units(self) -> int:
        """What operations take at most: its own cap (:meth:`capped`) beside what the communicators of this rank are
        capped at together (``DeviceOptions(max_ctas=...)``)."""
        if self._takes_none:  # one for flags that kernels set, and for a gather that takes a thread block after all
            return self.held_units + 1
        return self._channels + self.held_units or uncapped()

    def _flags_by_driver(self, workspace: Workspace) -> bool:
        return self._by_driver and not workspace.epoch.captured

    @property
    def held_units(self) -> int:
        return self.communicator.reserved_ctas

    @cached_property  # it is asked for at every fused product
    def caps(self) -> tuple[int, ...]:
        """None where the environment says how many (NCCL then ignores an own cap), where buffers are shared, on AMD."""
        named = os.environ.get("NCCL_MAX_CTAS") or os.environ.get("NCCL_MIN_CTAS")
        shared = getattr(self.communicator, "shares_buffers", False)
        return () if named or shared or torch.version.hip is not None else CAPS

    def capped(self, channels: int) -> FusedCommunicator:
        if channels in (0, self._channels):
            return self
        if not self.caps:
            return super().capped(channels)
        if channels not in self._capped:
            capped = DeviceAxoCommunicator(self.communicator.capped(channels), self.timeout, self.op, channels)
            capped.ran = self.ran
            self._capped[channels] = capped
        return self._capped[channels]

    @property
    def without_windows(self) -> str:
        if self._window is None:
            return "adapt() was given nothing that makes windows"
        if torch.version.hip is not None:
            return "RCCL's gathers by copy engines hang in graphs (before 2.31)"
        if self.communicator.library_version < _ZERO_CTA:
            return f"NCCL {self.communicator.library_version} is older than 2.28"
        return "split_share=True" if getattr(self.communicator, "shares_buffers", False) else ""

    def windowed(self) -> FusedCommunicator:
        if self.without_windows:
            return super().windowed()
        if self._windowed is None:
            assert self._window is not None
            twin = DeviceAxoCommunicator(self.communicator.capped(0), self.timeout, self.op)
            twin.ran, twin.empty = self.ran, partial(self._window, twin.communicator)
            twin._takes_none = self.on_one_host()  # copy engines do not reach further
            self._windowed = twin
        return self._windowed

    @property
    def twins(self) -> list[FusedCommunicator]:
        return [*self._capped.values(), *([self._windowed] if self._windowed else [])]

    def fork(self, device: torch.device) -> None:
        assert not self._forked, "fork() twice without join()"
        self.communicator.follow()
        self._forked = True

    def join(self) -> None:
        self._forked = False
        works, self._works = self._works, []
        try:
            for work in works:
                work.wait()
        except Exception:
            self.poll()  # a kernel that has given up tells more than the transport: which chunk, of which epoch
            raise
        torch.cuda.current_stream(self.communicator.device).wait_stream(self._device_stream())

    def abandon(self) -> None:
        self._forked = False
        self._works = []

    def _issue(self, call: Callable[[], Pending]) -> Pending:
        if not self._forked:
            return call()
        with self.communicator.signalled():
            work = call()
        self._works.append(work)
        return work

    def wait_flag(self, workspace: Workspace, number: int) -> None:
        if not (self._forked and self._flags_by_driver(workspace)):
            return super().wait_flag(workspace, number)
        self.communicator.wait_flag(workspace.flags[number:], workspace.epoch.counted)

    def write_flag(self, workspace: Workspace, number: int) -> None:
        if not (self._forked and self._flags_by_driver(workspace)):
            return super().write_flag(workspace, number)
        self.communicator.write_flag(workspace.flags[number:], workspace.epoch.counted)

    def _device_stream(self) -> Any:
        return torch.cuda.ExternalStream(self.communicator.stream, self.communicator.device)


class SoloCommunicator(FusedCommunicator):
    """A single rank: nothing travels.

    Args:
        timeout: As of :func:`adapt`.
        like: A communicator whose operations it tries out alone: of its ranks, and leaving as much free. What peers
            would have sent is whatever lies there, and nobody is waited for.
    """

    def __init__(self, timeout: float = 60.0, like: FusedCommunicator | None = None) -> None:
        super().__init__(*((like.rank, like.size) if like else (0, 1)), timeout)
        self._reserved = super().reserved_units if like is None else like.reserved_units

    @property
    def reserved_units(self) -> int:
        return self._reserved

    def capped(self, channels: int) -> FusedCommunicator:
        return self if self.size > 1 else super().capped(channels)

    def windowed(self) -> FusedCommunicator:
        return self if self.size > 1 else super().windowed()

    def maximum(self, values: list[float]) -> list[float]:
        return values

    def _all_reduce(self, tensor: torch.Tensor) -> Pending:
        return DONE

    def _all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> Pending:
        return _copied(out.view(self.size, *tensor.shape)[self.rank], tensor)

    def _reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor) -> Pending:
        return _copied(out, tensor.view(self.size, *out.shape)[self.rank])

    def peer_memory(self, nbytes: int, device: torch.device) -> PeerMemory:
        mine = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        flags = mine[: 8 * self.size].view(torch.int32).view(2, self.size)
        flags[:, [rank for rank in range(self.size) if rank != self.rank]] = 2**30  # of peers: set for long
        return PeerMemory(mine, (mine.data_ptr(),) * self.size)


def _copied(out: torch.Tensor, tensor: torch.Tensor) -> Pending:
    if out.data_ptr() != tensor.data_ptr():
        out.copy_(tensor)
    return DONE


def adapt(
    communicator: Collectives | dist.ProcessGroup | FusedCommunicator | None,
    timeout: float = 60.0,
    op: str = "sum",
    *,
    window: Window | None = None,
    store: Callable[[], dist.Store] | None = None,
) -> FusedCommunicator:
    """Wrap a communicator once, and keep the result: it holds the workspaces and the record of what ran.

    Args:
        communicator: An axo.Communicator, a torch.distributed.ProcessGroup, None for the default group (or a single
            rank when torch.distributed is not initialised), or something wrapped already.
        timeout: Seconds after which a flag that nobody sets is reported.
        op: What the reduce-scatters of an axo.Communicator do, ``"sum"`` or ``"avg"``.
        window: Of an axo.Communicator on GPUs: makes a tensor of a shape, dtype and device that is a window of the
            communicator, collectively. Gathers in windows take no multiprocessor.
        store: Of an axo.Communicator on GPUs: gives a store that its ranks have in common, by which torch shares their
            memory, for ``strategy="push"``. A process group brings its own.

    Raises:
        ValueError: The object is none of these.
    """
    if isinstance(communicator, FusedCommunicator):
        return communicator
    if isinstance(communicator, dist.ProcessGroup):
        return ProcessGroupCommunicator(communicator, timeout)
    if communicator is None:
        if dist.is_available() and dist.is_initialized():
            return ProcessGroupCommunicator(None, timeout)
        return SoloCommunicator(timeout)
    wanted = ["rank", "size", "all_reduce", "all_gather", "reduce_scatter", "broadcast"]
    if hasattr(communicator, "wait_flag"):
        wanted += ["write_flag", "follow", "signalled", "stream", "device", "reserved_ctas", "capped"]
    missing = [name for name in wanted if not hasattr(communicator, name)]
    if missing:
        raise ValueError(
            f"adapt: {type(communicator).__name__} has no {', '.join(missing)}; give an axo.Communicator or a "
            f"torch.distributed.ProcessGroup"
        )
    if hasattr(communicator, "wait_flag"):
        device = cast("DeviceCollectives", communicator)
        return DeviceAxoCommunicator(device, timeout, op, window=window, store=store)
    return AxoCommunicator(communicator, timeout, op)
