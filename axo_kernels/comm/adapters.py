"""What fused operations want of a communicator, and adapters that make one.

The protocol, :class:`Communicator`: rank, size, three collectives that return pending work, two flag operations of a
*communication stream*, and what is kept from call to call. ``fork()`` lets that stream run on its own, after what the
compute stream has been given so far; collectives issued until ``join()`` follow it and the flags waited for on it;
``join()`` makes the compute stream wait for all of it. Without a fork a collective follows the compute stream.

    serial, split:  work = comm.all_reduce(t); ...; work.wait()
    signal:         comm.fork(); launch the product; comm.wait_flag(flag, epoch); comm.all_reduce(t); comm.join()

On a GPU the stream is a CUDA / HIP stream, and flags are waited for and written by one-program kernels (the portable
form of the driver's stream operations). On a CPU it is a thread that runs what it is given in order. Nothing here knows
axo: an axo.Communicator is taken by its methods.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from axo_kernels import device as devices
from axo_kernels.comm.host_stream import HostStream, SignalTimeout, StreamWork
from axo_kernels.fused.workspace import Workspaces

__all__ = ["Communicator", "FusedCommunicator", "Ran", "SignalTimeout", "adapt", "gather_max"]


# torch 2.13 renamed these two; the old names still work there, with a warning.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Ran:
    """What a fused operation really did; ``comm.ran[-1]`` is the latest.

    Attributes:
        operation: ``"all_gather_matmul"``, ``"matmul_all_reduce"`` or ``"matmul_reduce_scatter"``.
        strategy: ``"serial"``, ``"split"`` or ``"signal"``.
        chunks: Pieces in which the rows travelled.
        layout: Of the product.
        engine: Who multiplied: ``"torch"``, ``"triton"``, ``"interpreter"``, or ``"tuned"``: what was chosen for the
            plain product.
    """

    operation: str
    strategy: str
    chunks: int
    layout: str
    engine: str


@runtime_checkable
class Communicator(Protocol):
    """What fused operations ask for: any object that has all of it serves. Tensors are contiguous, rows along dim 0.

    Attributes:
        rank, size: Of the ranks that communicate.
        timeout: Seconds after which a flag that nobody sets is reported.
        spins: Reads of a flag that a kernel does within that time.
        reserved_units: Multiprocessors that a product which waits or signals leaves to the communication.
        ran: The record: each operation appends a :class:`Ran`.
        workspaces: The flags and buffers, made at an operation's first call at a shape.
    """

    rank: int
    size: int
    timeout: float
    ran: deque[Ran]
    workspaces: Workspaces

    @property
    def spins(self) -> int: ...
    @property
    def reserved_units(self) -> int: ...
    def all_reduce(self, tensor: torch.Tensor) -> Any: ...
    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> Any: ...
    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor) -> Any: ...
    def wait_flag(self, workspace: Any, number: int) -> None: ...
    def write_flag(self, workspace: Any, number: int) -> None: ...
    def fork(self, device: torch.device) -> None: ...
    def join(self) -> None: ...
    def abandon(self) -> None: ...
    def poll(self) -> None: ...


class FusedCommunicator:
    """Base of the adapters: the communication stream, the flags, the workspaces and the record of what ran.

    Not thread-safe; make one per thread that issues operations.

    Args:
        rank, size: Of the communicator underneath.
        timeout: Seconds after which a flag that nobody sets is reported.
        keep: How many operations ``ran`` remembers.
    """

    def __init__(self, rank: int, size: int, timeout: float = 60.0, keep: int = 256) -> None:
        if not timeout > 0:
            raise ValueError(f"adapt: timeout={timeout} is no bound for a wait; use seconds of more than 0")
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.ran: deque[Ran] = deque(maxlen=keep)
        self.workspaces = Workspaces()
        self._host: HostStream | None = None
        self._stream: Any = None
        self._forked = False

    # What an adapter implements: issue one collective now, on the current stream or this thread.
    def _all_reduce(self, tensor: torch.Tensor) -> Any:
        raise NotImplementedError

    def _all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> Any:
        raise NotImplementedError

    def _reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor) -> Any:
        raise NotImplementedError

    def _broadcast_bytes(self, data: torch.Tensor, root: int) -> None:
        raise NotImplementedError

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        """Sum in place over the ranks; returns work to wait for."""
        return self._issue(lambda: self._all_reduce(tensor))

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> Any:
        """Gather ``(n, ...)`` into ``(size * n, ...)``; ``tensor`` may be this rank's part of ``out``."""
        return self._issue(lambda: self._all_gather(out, tensor))

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor) -> Any:
        """Sum ``(size * n, ...)`` over the ranks and keep this rank's ``(n, ...)``."""
        return self._issue(lambda: self._reduce_scatter(out, tensor))

    def _issue(self, call: Callable[[], Any]) -> Any:
        if not self._forked:
            return call()
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                work = call()
                if work is not None:
                    work.wait()  # orders the stream after the collective, so that a flag written next comes after it
                return work
        assert self._host is not None

        def run() -> None:
            work = call()
            if work is not None:
                work.wait()

        return self._host.submit(run)

    def fork(self, device: torch.device) -> None:
        """Let the communication stream run on its own from here on."""
        assert not self._forked, "fork() twice without join()"
        if device.type == "cuda":
            if self._stream is None:
                self._stream = torch.cuda.Stream(device, priority=-1)
            self._stream.wait_stream(torch.cuda.current_stream(device))
        elif self._host is None or self._host.process != os.getpid():
            self._host = HostStream(f"axo communication {self.rank}/{self.size}")
        self._forked = True

    def join(self) -> None:
        """Make the compute stream wait for the communication stream; on a CPU, block.

        Raises:
            SignalTimeout: A flag was not set in time (on a GPU: see ``poll``).
        """
        self._forked = False
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        if self._host is not None:
            self._host.join()

    def abandon(self) -> None:
        """After an error on the compute side: forget the communication stream, whose rest may never complete."""
        self._forked = False
        if self._host is not None:
            self._host.stop()
        self._host = self._stream = None

    def wait_flag(self, workspace: Any, number: int) -> None:
        """Hold the communication stream until flag ``number`` has reached the workspace's epoch."""
        assert self._forked, "wait_flag() belongs between fork() and join()"
        if self._stream is None:
            assert self._host is not None
            self._host.submit(lambda: workspace.wait_on_host(number, self.timeout, self.rank))
            return
        kernels = devices.signal_kernels()
        assert kernels is not None
        with torch.cuda.stream(self._stream):
            kernels.wait_flag_kernel[(1,)](
                workspace.flags[number:], workspace.epoch, workspace.status, self.spins, number, num_warps=1
            )

    def write_flag(self, workspace: Any, number: int) -> None:
        """Set flag ``number`` to the workspace's epoch, after everything issued on the communication stream so far."""
        assert self._forked, "write_flag() belongs between fork() and join()"
        if self._stream is None:
            assert self._host is not None
            self._host.submit(lambda: workspace.write_on_host(number))
            return
        kernels = devices.signal_kernels()
        assert kernels is not None
        with torch.cuda.stream(self._stream):
            kernels.write_flag_kernel[(1,)](workspace.flags[number:], workspace.epoch, num_warps=1)

    @property
    def reserved_units(self) -> int:
        """Multiprocessors that a product which waits or signals leaves to the communication library."""
        return 4

    @property
    def spins(self) -> int:
        """Reads of a flag before a kernel gives up: about a microsecond each (50 in the interpreter)."""
        return min(2**31 - 1, int(self.timeout * (2e4 if devices.interpreted() else 1e6)))

    def check(self) -> None:
        """Wait for the device, then raise what its kernels have reported: after the last operation of all.

        Raises:
            SignalTimeout: As of ``poll``.
        """
        for device in {workspace.flags.device for workspace in self.workspaces.all()}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        self.poll()

    def poll(self) -> None:
        """Raise what a kernel has reported so far; waits for nothing. Each fused operation begins with it.

        Raises:
            SignalTimeout: A flag was not set within the bound; the message has rank, chunk and epoch.
        """
        for workspace in self.workspaces.all():
            workspace.check(self.rank, self.timeout)

    def maximum(self, values: list[float]) -> list[float]:
        """The largest of each value over the ranks (see :func:`gather_max`)."""
        mine = torch.tensor([values], dtype=torch.float64, device=self._decisions)
        everyone = torch.empty((self.size, len(values)), dtype=torch.float64, device=self._decisions)
        self.all_gather(everyone, mine).wait()
        return [float(value) for value in everyone.amax(dim=0)]

    @property
    def _decisions(self) -> torch.device:
        """Where numbers that are decided upon travel."""
        return torch.device("cpu")

    def broadcast_text(self, text: str, root: int = 0) -> str:
        """Return the root's text on every rank (the tuner's one choice)."""
        if self.size == 1:
            return text
        data = text.encode()
        length = torch.tensor([len(data)], dtype=torch.int64)
        self._broadcast_bytes(length, root)
        if not int(length):
            return ""
        buffer = torch.zeros(int(length), dtype=torch.uint8)
        if self.rank == root:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self._broadcast_bytes(buffer, root)
        return bytes(buffer.numpy()).decode()


class ProcessGroupCommunicator(FusedCommunicator):
    """A torch.distributed process group (NCCL, Gloo, axo, ...)."""

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: float = 60.0) -> None:
        group = group if group is not None else dist.group.WORLD
        super().__init__(dist.get_rank(group), dist.get_world_size(group), timeout)
        self.group = group

    def _all_reduce(self, tensor: torch.Tensor) -> Any:
        return dist.all_reduce(tensor, group=self.group, async_op=True)

    def _all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> Any:
        return _all_gather(out, tensor, group=self.group, async_op=True)

    def _reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor) -> Any:
        return _reduce_scatter(out, tensor, group=self.group, async_op=True)

    @property
    def _decisions(self) -> torch.device:
        if str(dist.get_backend(self.group)) == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def _broadcast_bytes(self, data: torch.Tensor, root: int) -> None:
        assert self.group is not None
        carried = data.to(self._decisions)
        dist.broadcast(carried, dist.get_global_rank(self.group, root), group=self.group)
        data.copy_(carried)


class AxoCommunicator(FusedCommunicator):
    """An axo.Communicator, known only by its methods. ``op``: of its reduce-scatters, ``"sum"`` or ``"avg"``."""

    def __init__(self, communicator: Any, timeout: float = 60.0, op: str = "sum") -> None:
        super().__init__(communicator.rank, communicator.size, timeout)
        self.communicator = communicator
        self.op = op

    @property
    def _decisions(self) -> torch.device:
        return torch.device(getattr(self.communicator, "device", "cpu"))

    def _all_reduce(self, tensor: torch.Tensor) -> Any:
        return self.communicator.all_reduce(tensor, async_op=True)

    def _all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> Any:
        return self.communicator.all_gather(tensor, out, async_op=True)

    def _reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor) -> Any:
        return self.communicator.reduce_scatter(tensor, out, self.op, async_op=True)

    def _broadcast_bytes(self, data: torch.Tensor, root: int) -> None:
        carried = data.to(self._decisions)
        self.communicator.broadcast(carried, root)
        data.copy_(carried)


class SoloCommunicator(FusedCommunicator):
    """A single rank: nothing travels."""

    def __init__(self, timeout: float = 60.0) -> None:
        super().__init__(0, 1, timeout)

    def _all_reduce(self, tensor: torch.Tensor) -> Any:
        return StreamWork.done()

    def _all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> Any:
        if out.data_ptr() != tensor.data_ptr():
            out.copy_(tensor.view(out.shape))
        return StreamWork.done()

    def _reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor) -> Any:
        if out.data_ptr() != tensor.data_ptr():
            out.copy_(tensor.view(out.shape))
        return StreamWork.done()


def adapt(communicator: Any, timeout: float = 60.0) -> FusedCommunicator:
    """Wrap a communicator once, and keep the result: it holds the workspaces and the record of what ran.

    Args:
        communicator: An axo.Communicator, a torch.distributed.ProcessGroup, None for the default group (or a single
            rank when torch.distributed is not initialised), or something wrapped already.
        timeout: Seconds after which a flag that nobody sets is reported.

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
        wanted += ["write_flag", "follow", "signalled", "stream", "device", "reserved_ctas"]
    missing = [name for name in wanted if not hasattr(communicator, name)]
    if missing:
        raise ValueError(
            f"adapt: {type(communicator).__name__} has no {', '.join(missing)}; give an axo.Communicator or a "
            f"torch.distributed.ProcessGroup"
        )
    if hasattr(communicator, "wait_flag"):
        from axo_kernels.comm.device import DeviceAxoCommunicator

        return DeviceAxoCommunicator(communicator, timeout)
    return AxoCommunicator(communicator, timeout)


def gather_max(comm: FusedCommunicator, values: list[float]) -> list[float]:
    """Return the largest of each value over the ranks, the same list on all of them."""
    if comm.size == 1:
        return values
    return comm.maximum(values)
