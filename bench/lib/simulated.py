"""A communicator that is not there: rank 0 of ``size`` ranks that all hold the same data, over a link of chosen speed.

For tests and for measuring overlap on one device. Results are those of real ranks with equal data (an all-reduce gives
``size * tensor``); each collective also occupies the wire for the time that a ring would need. On a GPU the wire is a
stream with a spinning block (by the clock of nanoseconds: wire.py), so it takes one multiprocessor, as a communication
library would take a few; on a CPU it is a thread that sleeps. What it does not show: contention of real traffic with
the product for memory and caches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from axo_kernels.comm.communicator import FusedCommunicator
from axo_kernels.comm.host_stream import HostStream


class SimulatedCommunicator(FusedCommunicator):
    """Rank 0 of a group in which all ranks hold the same.

    Args:
        size: Ranks pretended.
        bandwidth: Bytes a second of the link of each rank (GB/s = 1e9).
        device: Where tensors are.
        timeout: As of every communicator.
    """

    _effects = True

    def __init__(self, size: int, bandwidth: float, device: torch.device, timeout: float = 60.0) -> None:
        super().__init__(0, size, timeout)
        self.bandwidth = bandwidth
        self._hold = holder(device) if device.type == "cuda" else time.sleep
        self._wire: Any = torch.cuda.Stream(device) if device.type == "cuda" else HostStream("simulated wire")

    @contextmanager
    def without_effects(self) -> Iterator[None]:
        """In this block collectives take their time and change nothing.

        For timing: what gives the results runs on multiprocessors, after the time of the ring, and on the few that a
        signalled product leaves it would take longer than the ring.
        """
        self._effects = False
        try:
            yield
        finally:
            self._effects = True

    def seconds(self, moved: float) -> float:
        """Time of a ring that moves ``moved`` bytes through each rank's link."""
        return moved / self.bandwidth

    def _all_reduce(self, tensor: torch.Tensor) -> Any:
        share = (self.size - 1) / self.size
        return self._run(lambda: tensor.mul_(self.size), 2 * share * tensor.nbytes)

    def _all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> Any:
        parts = out.view(self.size, *tensor.shape)
        return self._run(lambda: parts.copy_(tensor.clone()), (self.size - 1) * tensor.nbytes)

    def _reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor) -> Any:
        mine = tensor.view(self.size, *out.shape)[0]
        share = (self.size - 1) / self.size
        return self._run(lambda: torch.mul(mine, self.size, out=out), share * tensor.nbytes)

    def _broadcast(self, tensor: torch.Tensor) -> None:
        pass

    def _run(self, effect: Any, moved: float) -> Any:
        seconds = self.seconds(moved)
        if isinstance(self._wire, HostStream):

            def act() -> None:
                self._hold(seconds)
                with torch.no_grad():
                    if self._effects:
                        effect()

            return self._wire.submit(act)
        self._wire.wait_stream(torch.cuda.current_stream(self._wire.device))
        with torch.cuda.stream(self._wire), torch.no_grad():
            self._hold(seconds)
            if self._effects:
                effect()
            return _Recorded(self._wire.record_event())


class _Recorded:
    """Work that is an event on the wire."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


def holder(device: torch.device) -> Callable[[float], None]:
    """How to keep the current stream busy for so many seconds: by the clock of nanoseconds; on AMD, which has none, by
    cycles, whose number a second falls while the card multiplies."""
    if torch.version.hip is None:
        from .wire import hold

        return lambda seconds: hold[(1,)](int(seconds * 1e9), num_warps=1)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(_CYCLES)  # the device wakes
    start.record()
    torch.cuda._sleep(_CYCLES)
    stop.record()
    stop.synchronize()
    rate = _CYCLES / (start.elapsed_time(stop) / 1e3)
    return lambda seconds: torch.cuda._sleep(int(seconds * rate))


_CYCLES = 20_000_000
