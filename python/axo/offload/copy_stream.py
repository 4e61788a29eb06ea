"""Copies between a device and the host on a stream of their own, beside the computation.

    copies = CopyStream(device)
    done = copies.copy([(to, source)])     # begins when what the compute stream holds so far has run
    done.block()                         # what the compute stream is given from now on comes after the copy
    done.synchronize()                   # the host waits

Tensors of a copy are held until it is known to be complete or the compute stream comes after it: then their memory,
which is the compute stream's, may be used again. So nothing needs ``record_stream``. On the CPU a copy is done at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch

TensorPair = tuple[torch.Tensor, torch.Tensor]
_MOST_BYTES = 256 << 20


class CopyEvent:
    """The end of a copy."""

    __slots__ = ("_device", "_event")

    def __init__(self, device: torch.device, event: torch.Event | None) -> None:
        self._device, self._event = device, event

    def is_completed(self) -> bool:
        """Whether the copy is complete; never blocks."""
        return self._event is None or self._event.query()

    def block(self) -> None:
        """Let the current stream go on after the copy."""
        if self._event is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._event)

    def synchronize(self) -> None:
        """Block the host until the copy is complete."""
        if self._event is not None:
            self._event.synchronize()


class CopyStream:
    """A stream of copies; see the module.

    Args:
        device: Where the computation runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device=device)
        self._in_flight: deque[tuple[CopyEvent, object, int]] = deque()
        self._bytes = 0

    def copy(self, pairs: Iterable[TensorPair], *after: CopyEvent | None, held: object = None) -> CopyEvent:
        """Copy each source into its target (of one shape), after ``after`` too; return the end of it.

        ``held`` lives as long as what is copied.
        """
        pairs = list(pairs)
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return CopyEvent(self._device, None)
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        for before in after:
            if before is not None and before._event is not None:
                self._stream.wait_event(before._event)
        with self._stream:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            done = CopyEvent(self._device, self._stream.record_event())
        self._keep(done, pairs, held)
        return done

    def following(self) -> AbstractContextManager[object]:
        """What is issued in this block comes after the copies so far, and after nothing else."""
        return nullcontext() if self._stream is None else self._stream

    def synchronize(self) -> None:
        """Block the host until all copies so far are complete."""
        if self._in_flight:
            self._in_flight[-1][0].synchronize()

    def _keep(self, done: CopyEvent, pairs: list[TensorPair], held: object) -> None:
        size = sum(target.nbytes for target, _ in pairs)
        self._in_flight.append((done, (pairs, held), size))
        self._bytes += size
        self.let_go(_MOST_BYTES + size)

    def let_go(self, most: int | None = None) -> None:
        """Let go of the tensors of copies that are complete, and of others while they have more than ``most`` bytes."""
        while self._in_flight and (self._in_flight[0][0].is_completed() or (most is not None and self._bytes > most)):
            done, _, size = self._in_flight.popleft()
            done.block()
            self._bytes -= size

    def finish(self) -> None:
        """Let the current stream go on after all copies so far."""
        self.let_go(-1)
