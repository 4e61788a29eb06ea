"""What fused operations need from a communicator: the base of its adapters.

Rank, size, three collectives that return pending work, two flag operations of a *communication stream*, and what is
kept from call to call. ``fork()`` lets that stream run on its own, after what the compute stream has been given so far;
collectives issued until ``join()`` follow it and the flags waited for on it; ``join()`` makes the compute stream wait
for all of it. Without a fork a collective follows the compute stream.

    serial, split:  work = comm.all_reduce(t); ...; work.wait()
    signal:         comm.fork(); launch the product; comm.wait_flag(flag, epoch); comm.all_reduce(t); comm.join()

On a GPU the stream is a CUDA / HIP stream, and flags are waited for and written by one-program kernels (the portable
form of the driver's stream operations). On a CPU it is a thread that runs what it is given in order.
"""

from __future__ import annotations

import os
import random
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from axo_kernels import device as devices
from axo_kernels.comm.host_stream import HostStream
from axo_kernels.comm.peers import PeerMemory, Peers, host_number
from axo_kernels.fused.chunks import tile_table
from axo_kernels.fused.workspace import Empty, PeerRoom, Workspace, Workspaces, aligned, empty_buffer

_T = TypeVar("_T")
_NO_KERNELS = "needs kernels of Triton's, and a device that runs them, not {}"
_KEPT_BLOCK = 2048  # elements that a program copies at once


class Pending(Protocol):
    """A collective on its way."""

    def wait(self) -> Any: ...


@dataclass(frozen=True)
class FusedRun:
    """What a fused operation really did; ``comm.ran[-1]`` is the latest.

    Attributes:
        operation: ``"all_gather_matmul"``, ``"matmul_all_reduce"`` or ``"matmul_reduce_scatter"``.
        strategy: ``"serial"``, ``"split"``, ``"signal"`` or ``"push"``.
        chunks: Pieces in which the rows travelled.
        layout: The layout of the product.
        engine: Who multiplied: ``"torch"``, ``"triton"``, ``"interpreter"``, or ``"tuned"``: what was chosen for the
            plain product.
    """

    operation: str
    strategy: str
    chunks: int
    layout: str
    engine: str


class FusedCommunicator:
    """Base of the adapters: the communication stream, the flags, the workspaces and the record of what ran.

    Not thread-safe; make one per thread that issues operations. Tensors are contiguous, rows along dim 0.

    Attributes:
        ran: The record: each operation appends a :class:`FusedRun`.
        workspaces: The flags and buffers, made at an operation's first call at a shape.
        rooms: What the ranks push into: one, or none yet.
        captured_rooms: Those of before whose addresses captured graphs have.
        store: Where the ranks meet to share memory; None: they do not.

    Args:
        rank, size: Of the communicator underneath.
        timeout: Seconds after which a flag that nobody sets is reported.
    """

    def __init__(self, rank: int, size: int, timeout: float = 60.0) -> None:
        if not timeout > 0:
            raise ValueError(f"adapt: timeout={timeout} is no bound for a wait; use seconds of more than 0")
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.ran: deque[FusedRun] = deque(maxlen=256)
        self.workspaces = Workspaces()
        self.rooms: list[PeerRoom] = []
        self.captured_rooms: list[PeerRoom] = []
        self.store: Callable[[], dist.Store] | None = None
        self._peers: Peers | None = None
        self._unreachable: str | None = None
        self._host: HostStream | None = None
        self._stream: Any = None
        self._forked = False

    # What an adapter implements: issue one collective now, on the current stream or this thread.
    def _all_reduce(self, tensor: torch.Tensor) -> Pending:
        raise NotImplementedError

    def _all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> Pending:
        raise NotImplementedError

    def _reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor) -> Pending:
        raise NotImplementedError

    def _broadcast(self, tensor: torch.Tensor) -> None:
        raise NotImplementedError  # from rank 0, on the device of `_decisions`

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Sum in place over the ranks; returns work to wait for."""
        return self._issue(lambda: self._all_reduce(tensor))

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> Pending:
        """Gather ``(n, ...)`` into ``(size * n, ...)``; ``tensor`` may be this rank's part of ``out``."""
        return self._issue(lambda: self._all_gather(out, tensor))

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor) -> Pending:
        """Sum ``(size * n, ...)`` over the ranks and keep this rank's ``(n, ...)``."""
        return self._issue(lambda: self._reduce_scatter(out, tensor))

    def _issue(self, call: Callable[[], Pending]) -> Pending:
        if not self._forked:
            return call()
        if self._stream is None:
            assert self._host is not None
            return self._host.submit(lambda: call().wait())
        with torch.cuda.stream(self._stream):
            work = call()
            work.wait()  # orders the stream after the collective, so that a flag written next comes after it
            return work

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

    def wait_flag(self, workspace: Workspace, number: int) -> None:
        """Hold the communication stream until flag ``number`` has reached the workspace's epoch."""
        self._on_stream(
            lambda: workspace.wait_on_host(number, self.timeout, self.rank),
            lambda kernels: kernels.wait_flag_kernel[(1,)](
                workspace.flags[number:], *workspace.epoch.parts, workspace.status, self.spins, number, num_warps=1
            ),
        )

    def write_flag(self, workspace: Workspace, number: int) -> None:
        """Set flag ``number`` to the workspace's epoch, after everything issued on the communication stream so far."""
        self._on_stream(
            lambda: workspace.write_on_host(number),
            lambda kernels: kernels.write_flag_kernel[(1,)](
                workspace.flags[number:], *workspace.epoch.parts, num_warps=1
            ),
        )

    def keep(self, workspace: Workspace, packed: torch.Tensor, kept: torch.Tensor) -> None:
        """Set the last flag, then copy the rows of all segments from ``packed`` into ``kept``, where they stand in rank
        order: both lay here before ``fork()``."""
        order = workspace.order
        last = order.chunks - 1

        def on_host() -> None:
            workspace.write_on_host(last)
            for segment in order.segments:
                kept[segment.written] = packed[segment.read]

        def launch(kernels: Any) -> None:
            table, width = workspace.table(tile_table(order, 1, 1))
            most = max(segment.rows for segment in order.segments) * kept.shape[1]
            kernels.keep_rows_kernel[(max(1, min(32, most // _KEPT_BLOCK)), len(order.segments))](
                packed, kept, table, workspace.flags[last:], *workspace.epoch.parts, kept.shape[1],
                SEGMENTS=width, BLOCK=_KEPT_BLOCK, num_warps=4,
            )  # fmt: skip

        self._on_stream(on_host, launch)

    def _on_stream(self, on_host: Callable[[], None], launch: Callable[[Any], None]) -> None:
        """What happens on the communication stream beside collectives; ``launch`` is given the kernels of a GPU."""
        assert self._forked, "flags are waited for and written, and copies made, between fork() and join()"
        if (stream := self._device_stream()) is None:
            assert self._host is not None
            self._host.submit(on_host)
            return
        kernels = devices.signal_kernels()
        assert kernels is not None
        with torch.cuda.stream(stream):
            launch(kernels)

    def _device_stream(self) -> Any:
        """The communication stream where it is one of a GPU; None on a CPU."""
        return self._stream

    @property
    def reserved_units(self) -> int:
        """Multiprocessors that a product which waits or signals leaves to the communication; as many thread blocks as
        its collectives may take (a link that is only simulated takes one)."""
        return 4

    @property
    def caps(self) -> tuple[int, ...]:
        """Numbers of channels to try for its operations beside a product; none where they cannot be capped."""
        return ()

    @property
    def held_units(self) -> int:
        """Multiprocessors that a product leaves to other communication beside its own capped one."""
        return 0

    def capped(self, channels: int) -> FusedCommunicator:
        """The same ranks, each operation on ``channels`` channels at most; ``reserved_units`` is then that and
        ``held_units``; 0: as it is. Collective at the first call for a number."""
        if channels:
            raise ValueError(f"{type(self).__name__}: channels={channels}: its operations cannot be capped; use 0")
        return self

    scale = 1.0  # of the sums of its reduce-scatters

    @property
    def without_windows(self) -> str:
        """Why gathers in windows, which take no multiprocessor, are not to be had; "" where they are."""
        return f"{type(self).__name__} has none"

    def windowed(self) -> FusedCommunicator:
        """The same ranks, with buffers (:meth:`empty`) in which gathers take no multiprocessor. Collective, once."""
        raise ValueError(f"{type(self).__name__}: windows=True: {self.without_windows}; use windows=False")

    empty: Empty = staticmethod(empty_buffer)

    def unreachable(self, device: torch.device) -> str:
        """Why kernels of these ranks cannot write to each other's memory there; "" where they can. Collective, once.

        Raises:
            RuntimeError: It would be found out inside a capture.
        """
        if self._unreachable is None:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("push: nothing is known of these ranks' memory; run it once before the capture")
            why = "" if devices.runs_triton(device) else _NO_KERNELS.format(device)
            if self.maximum([float(bool(why))])[0]:
                why = why or _NO_KERNELS.format("that of another rank")
            else:
                try:
                    self.agreed(lambda: self.peer_room(0, device))
                except ValueError as error:
                    why = f"needs memory that kernels of all ranks reach: {error}"
            self._unreachable = why
        return self._unreachable

    def on_one_host(self) -> bool:
        """Whether these ranks could hand each other memory. Collective."""
        try:
            host = float(host_number())
        except OSError:  # a rank that has none shares it with nobody; it must take part below
            host = float(random.getrandbits(48))
        most, least = self.maximum([host, -host])
        return most == -least

    def agreed(self, call: Callable[[], _T]) -> _T:
        """What ``call`` gives, once it has failed on no rank. Collective.

        Raises:
            ValueError: It failed on some rank; on all of them.
        """
        try:
            result, why = call(), ""
        except Exception as error:
            why = str(error).strip().split("\n")[0] or type(error).__name__
        if self.maximum([float(bool(why))])[0]:
            raise ValueError(why or "another rank has none")
        return result

    def peer_room(self, nbytes: int, device: torch.device) -> PeerRoom:
        """The room of this line, of halves of at least so many bytes: as many on all ranks. Collective where it grows.

        Raises:
            ValueError: A rank has no such memory, or they are on several hosts.
            RuntimeError: It would grow inside a capture.
        """
        last = self.rooms[-1] if self.rooms else None
        if last is not None and last.capacity >= nbytes:
            return last
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"push: {nbytes} bytes are wanted in a capture; run it once before, which makes room")
        if last is None and not self.on_one_host():
            raise ValueError("they are on several hosts")
        if last is not None:
            last.settle()
            nbytes = max(nbytes, last.capacity * 3 // 2)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        capacity = int(self.maximum([float(max(nbytes, 1))])[0])  # nobody uses the old one any more: all are here
        del last  # its memory goes before the new one's comes
        self.forget_room()
        memory = self.peer_memory(aligned(8 * self.size) + 2 * aligned(capacity), device)
        self.rooms.append(self.agreed(lambda: PeerRoom(memory, self.size, device)))
        return self.rooms[-1]

    def forget_room(self) -> None:
        """Have the next push begin in a room of its own: on all ranks, once one of them has failed in the last.

        One whose addresses a captured graph has stays where it is.
        """
        self.captured_rooms += [room for room in self.rooms if room.epoch.captured]
        self.rooms.clear()

    def peer_memory(self, nbytes: int, device: torch.device) -> PeerMemory:
        """Allocate as many bytes on each rank, of zeros, that kernels of all reach: collective.

        Raises:
            ValueError: There is no such memory here, on some rank; on all of them.
        """
        if self.store is None:
            raise ValueError(f"{type(self).__name__} has none")
        if self._peers is None:
            name, store = self.broadcast_text(uuid.uuid4().hex), self.store
            self._peers = self.agreed(lambda: Peers(name, store(), self.rank, self.size))
        peers = self._peers
        mine = self.agreed(lambda: peers.allocate(nbytes, device))
        try:
            return self.agreed(lambda: peers.map(mine))
        except ValueError:
            self._peers = None  # some have exchanged, others not: the next time all begin under another name
            raise

    @property
    def spins(self) -> int:
        """Reads of a flag before a kernel gives up: about a microsecond each (50 in the interpreter)."""
        return min(2**31 - 1, int(self.timeout * (2e4 if devices.interpreted() else 1e6)))

    def check(self) -> None:
        """Wait for the device, then raise what its kernels have reported: after the last operation of all.

        Raises:
            SignalTimeout: As of ``poll``.
        """
        for device in {workspace.flags.device for workspace in self._workspaces()}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        self.poll()

    def poll(self) -> None:
        """Raise what a kernel has reported so far; waits for nothing. Each fused operation begins with it.

        Raises:
            SignalTimeout: A flag was not set within the bound; the message has rank, chunk and epoch.
        """
        for workspace in self._workspaces():
            workspace.check(self.rank, self.timeout)

    @property
    def twins(self) -> list[FusedCommunicator]:
        """The same ranks with other limits: what was made by :meth:`capped` and :meth:`windowed`."""
        return []

    def _workspaces(self) -> Iterator[Workspace]:
        for comm in (self, *self.twins):
            yield from comm.workspaces.all()
            for room in (*comm.captured_rooms, *comm.rooms):
                yield from room.workspaces.all()

    @contextmanager
    def trial(self, device: torch.device) -> Iterator[None]:
        """What operations inside make goes with its end: workspaces, and a room or what it has grown. Collective."""
        before, rooms = {comm: comm.workspaces.keys() for comm in (self, *self.twins)}, list(self.rooms)
        yield
        for comm in (self, *self.twins):
            comm.workspaces.keep(before.get(comm, ()))
        if self.rooms and self.rooms != rooms:
            self.forget_room()
            if rooms:
                self.peer_room(rooms[-1].capacity, device)

    def maximum(self, values: list[float]) -> list[float]:
        """Return the largest of each value over the ranks, the same list on all of them."""
        if self.size == 1:
            return values
        mine = torch.tensor([values], dtype=torch.float64, device=self._decisions)
        everyone = torch.empty((self.size, len(values)), dtype=torch.float64, device=self._decisions)
        self.all_gather(everyone, mine).wait()
        return [float(value) for value in everyone.amax(dim=0)]

    @property
    def _decisions(self) -> torch.device:
        """Where numbers that are decided upon travel."""
        return torch.device("cpu")

    def broadcast_text(self, text: str) -> str:
        """Return rank 0's text on every rank (the tuner's one choice)."""
        if self.size == 1:
            return text
        data = torch.tensor(list(text.encode()), dtype=torch.uint8)
        length = torch.tensor([data.numel()], dtype=torch.int64, device=self._decisions)
        self._broadcast(length)
        if not int(length):
            return ""
        carried = (data if self.rank == 0 else torch.zeros(int(length), dtype=torch.uint8)).to(self._decisions)
        self._broadcast(carried)
        return bytes(carried.tolist()).decode()
