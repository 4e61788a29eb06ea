"""Flags, counters and packed buffers of fused operations: allocated once for each shape, then reused.

    flags     int32[chunks]   the epoch that each chunk has reached; only ever grows (cyclically)
    counters  int32[chunks]   finished tiles of each chunk; back to 0 when the chunk is complete
    epoch     Epoch           of the operation that runs now
    status    int32[4]        (1, flag number, epoch, value seen) once a wait inside a kernel has given up; in pinned
                              host memory, which kernels write to and the host reads for nothing, also while the
                              device's streams stand still
    table     int32[6, S]     the order in tiles, as segment_matmul_kernel reads it

Packed buffers have two slots, taken in turn by the epoch's parity; one, where nothing advances it. What ranks push into
each other's memory lies in one room of their line (:class:`PeerRoom`), whatever its shape.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from axo_kernels.comm.host_stream import SignalTimeout
from axo_kernels.comm.peers import PeerMemory
from axo_kernels.fused.chunks import NO_FLAG, ChunkOrder, TileTable, next_epoch, reached, wrapped

_NEVER = 2**31 - 1
_TABLE_ROWS = 6


Empty = Callable[[tuple[int, ...], torch.dtype, torch.device], torch.Tensor]


def empty_buffer(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A packed buffer that is no window of a library."""
    return torch.empty(shape, dtype=dtype, device=device)


class Epoch:
    """The number of the operation that runs now: what the host has ``counted``, and what stands in the device's
    ``word``, int32[1]; kernels add the two, in 32 bits.

    The host counts, which takes no launch, until an operation is ``captured``. From then on the device does, so that a
    replayed graph, in which no Python runs, advances it too.
    """

    def __init__(self, device: torch.device, first: int = 0) -> None:
        self.word = torch.zeros(1, dtype=torch.int32, device=device)
        self.counted = first
        self.captured = False

    def advance(self) -> None:
        """Begin the next operation. After 2**31 - 1 comes -2**31."""
        self.captured |= self.word.is_cuda and torch.cuda.is_current_stream_capturing()
        if self.captured:
            self.word.add_(1)
        else:
            self.counted = next_epoch(self.counted)

    @property
    def parts(self) -> tuple[torch.Tensor, int]:
        """As kernels are given it."""
        return self.word, self.counted

    def read(self) -> int:
        """The epoch; waits for the device."""
        return wrapped(self.counted + int(self.word))


class Workspace:
    """The device memory of one fused operation at one shape."""

    def __init__(self, name: str, order: ChunkOrder, device: torch.device, first_epoch: int = 0) -> None:
        self.name = name
        self.order = order
        words = max(1, order.chunks)
        self.flags = torch.full((words,), first_epoch, dtype=torch.int32, device=device)
        self.counters = torch.zeros(words, dtype=torch.int32, device=device)
        self.epoch = Epoch(device, first_epoch)
        self.status = torch.zeros(4, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._told = ctypes.c_int32.from_address(self.status.data_ptr())  # its first word, at 50 ns a look
        self.turn, self.turns = 0, False
        self._buffers: dict[Any, torch.Tensor] = {}
        self._tables: dict[Any, torch.Tensor] = {}

    def advance(self) -> None:
        """Begin the next operation: a new epoch, the other slot."""
        self.epoch.advance()
        self.turn, self.turns = self.turn ^ 1, True

    def buffer(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, empty: Empty = empty_buffer
    ) -> torch.Tensor:
        """Return the packed buffer of this turn, made by ``empty``; without turns it is one."""
        if (self.turn, shape, dtype) not in self._buffers:
            for turn in (0, 1) if self.turns else (0,):  # both now: the second call may be inside a capture
                if (turn, shape, dtype) not in self._buffers:
                    self._buffers[turn, shape, dtype] = empty(shape, dtype, device)
        return self._buffers[self.turn, shape, dtype]

    def table(self, tiles: TileTable) -> tuple[torch.Tensor, int]:
        """Return the order as the kernel reads it, and its width (a power of two)."""
        segments, width = self.order.segments, table_width(self.order)
        if tiles not in self._tables:
            rows = [
                [*tiles.first_tile[:-1]],
                [segment.source for segment in segments],
                [segment.target for segment in segments],
                [segment.rows for segment in segments],
                [segment.flag for segment in segments],
                [tiles.tiles_of_flag[segment.flag] if segment.flag != NO_FLAG else 0 for segment in segments],
            ]
            padding = [_NEVER] + [0] * (_TABLE_ROWS - 1)
            full = [row + [pad] * (width - len(row)) for row, pad in zip(rows, padding, strict=True)]
            self._tables[tiles] = torch.tensor(full, dtype=torch.int32).to(self.flags.device)
        return self._tables[tiles], width

    def wait_on_host(self, number: int, timeout: float, rank: int) -> None:
        """Wait for a flag from a thread of this process.

        Raises:
            SignalTimeout: It was not set within ``timeout`` seconds.
        """
        epoch = self.epoch.read()
        deadline = time.monotonic() + timeout
        pause = 2e-5
        while not reached(int(self.flags[number]), epoch):
            if time.monotonic() > deadline:
                raise SignalTimeout(self._complaint(rank, number, epoch, int(self.flags[number]), timeout))
            time.sleep(pause)
            pause = min(2e-3, pause * 1.5)

    def write_on_host(self, number: int) -> None:
        """Set a flag to the current epoch from a thread of this process."""
        self.flags[number] = self.epoch.read()

    def check(self, rank: int, timeout: float) -> None:
        """Raise what a kernel has left in ``status`` so far, and clear it. Waits for nothing.

        Raises:
            SignalTimeout: A wait inside a kernel gave up.
        """
        if self._told.value:
            _, number, epoch, seen = self.status.tolist()
            self.status.zero_()
            self.counters.zero_()  # the kernel for Hopper has marked the chunk that did not come
            raise SignalTimeout(self._complaint(rank, number, epoch, seen, timeout))

    def _complaint(self, rank: int, number: int, epoch: int, seen: int, timeout: float) -> str:
        return (
            f"{self.name}: rank {rank} of {self.order.size} waited {timeout:g} s for {self._awaited(number)} of epoch "
            f"{epoch}; its flag stands at {seen}: a peer has not signalled"
        )

    def _awaited(self, number: int) -> str:
        """What a flag stands for."""
        peers = sorted({s.peer for s in self.order.segments if s.flag == number and s.peer != self.order.rank})
        whose = f" (rows of rank {', '.join(map(str, peers))})" if peers and not self.order.signals else ""
        return f"chunk {number}{whose}"


def table_width(order: ChunkOrder) -> int:
    """Columns of the table of an order's segments: a power of two, more than are used. Of a push there is one for each
    owner, also for those without rows."""
    columns = order.size if order.operation == "push" else len(order.segments)
    return max(16, 1 << columns.bit_length())


class Workspaces:
    """All workspaces of one communicator."""

    def __init__(self) -> None:
        self._all: dict[Any, Workspace] = {}

    def get(
        self,
        name: str,
        order: ChunkOrder,
        key: Any,
        device: torch.device,
        make: Callable[[], Workspace] | None = None,
    ) -> Workspace:
        """Return the workspace of an operation at a shape, making it (by ``make``) at the first call.

        Raises:
            RuntimeError: The first call is being captured: what it sets once would be set again by every replay.
        """
        workspace = self._all.get((name, order, key, device))
        if workspace is None:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"{name}: the first call for {order.rows} rows in {order.chunks} chunks is being captured; "
                    "run it once before the capture, which makes its flags and buffers"
                )
            workspace = make() if make is not None else Workspace(name, order, device)
            self._all[(name, order, key, device)] = workspace
        return workspace

    def all(self) -> Iterator[Workspace]:
        return iter(self._all.values())

    def keys(self) -> set[Any]:
        """What there is, for :meth:`keep`."""
        return set(self._all)

    def keep(self, keys: Collection[Any]) -> None:
        """Forget all others."""
        self._all = {key: workspace for key, workspace in self._all.items() if key in keys}


class PeerRoom:
    """What the ranks of a line push into, whatever they sum: memory that kernels of all reach, and the epoch in it.

        flags     int32[2 * size]      the epoch of which each rank's part has come, then each rank's sum
        halves    uint8[2, capacity]   taken in turn by the epoch's parity

    Attributes:
        capacity: Bytes of a half, a multiple of 256.
        bases, offset: Where each rank's memory begins, and the halves in it.
        workspaces: Of the operations that use it, by shape.
        under_way: What the latest operation has not launched yet.
    """

    def __init__(self, memory: PeerMemory, size: int, device: torch.device) -> None:
        self.offset = aligned(8 * size)
        self.capacity = (memory.mine.numel() - self.offset) // 2
        self.bases = memory.bases
        self.flags = memory.mine[: 8 * size].view(torch.int32)
        self.halves = memory.mine[self.offset :].view(2, self.capacity)
        self.counters = torch.zeros(size, dtype=torch.int32, device=device)
        self.epoch = Epoch(device)
        self.workspaces = Workspaces()
        self.under_way: Iterator[None] = iter(())
        self._memory = memory  # mapped while peers may write

    def settle(self) -> None:
        """Launch the rest of the latest operation: the next one is pushed behind it."""
        deque(self.under_way, 0)


def aligned(nbytes: int) -> int:
    """The next multiple of 256: loads and stores of 16 bytes a thread, whatever is behind."""
    return -(-nbytes // 256) * 256
