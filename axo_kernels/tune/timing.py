"""Time rivals against each other: in turns, so that whatever slows the machine slows all of them, and by medians.

On a GPU device events are used, the host has a head start that covers its launches, and the caches are flushed between
runs; on a CPU the wall clock. Rivals are compared by the longer of device's and host's time: a call that the host
issues more slowly than the device computes it is no faster than that in a program that waits for nothing. Times are in
seconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Thunk = Callable[[], object]
# Larger than the L2 of any GPU in tiles.TARGETS.
_FLUSH_BYTES = 256 << 20
# Cycles a second, at least as many as any GPU does; and the shortest and the longest head start of the host, seconds.
_CYCLES = 2e9
_SHORTEST, _LONGEST = 2e-4, 2e-2


@dataclass(frozen=True)
class Timing:
    """What was measured of one rival.

    Attributes:
        seconds: Median over the rounds, of the device.
        ratio: Median over the rounds of this rival's time over the first rival's time in the same round: the longer of
            device's and host's.
        late_ratio: The ratio that three rounds of four stay under.
        issued: Median of the host's seconds for a call; 0 on a CPU, which does not issue but work.
        apart: How far rounds disagree: the ratio that three of four stay under, over the one that one of four does; of
            the first rival its seconds instead.
    """

    seconds: float
    ratio: float
    late_ratio: float
    issued: float = 0.0
    apart: float = 1.0

    @property
    def judged(self) -> float:
        """Seconds that a program pays: the longer of device's and host's."""
        return max(self.seconds, self.issued)


def issue_time(call: Thunk, device: torch.device) -> float:
    """Seconds that the host needs to issue a call; 0 on a CPU, which does not issue but work."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    call()
    issued = time.perf_counter() - started
    torch.cuda.synchronize(device)
    return issued


def head_start(issued: float) -> float:
    """Seconds that the device is held while the host issues: twice what that takes, so that launches are not timed.

    A fused operation of eight chunks is some thirty launches, more than a fixed fraction of a millisecond. A call that
    waits for the device takes the whole of its time to issue; there the bound ends it.
    """
    return min(_LONGEST, max(_SHORTEST, 2 * issued))


def timed(call: Thunk, device: torch.device, issued: float = 0.0) -> tuple[float, float]:
    """Time one call, after everything before it has finished: seconds of the device, and of the host to issue it (0 on
    a CPU). ``issued``: what :func:`issue_time` has found."""
    started = time.perf_counter()
    if device.type != "cuda":
        call()
        return time.perf_counter() - started, 0.0
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(int(head_start(issued) * _CYCLES))
    start.record()
    started = time.perf_counter()
    call()
    host = time.perf_counter() - started
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3, host


def once(call: Thunk, device: torch.device, issued: float = 0.0) -> float:
    """The device's seconds of :func:`timed`."""
    return timed(call, device, issued)[0]


def sustained(calls: Sequence[Thunk], device: torch.device, rounds: int = 7, seconds: float = 0.02) -> list[Timing]:
    """Time all calls in turns, each many times back to back, as a training step has them: caches are warm, the card is
    at the clock of its work, and what the host issues too slowly shows.

    Args:
        calls: The rivals; the first is what the others are compared with.
        device: Where they run.
        rounds: Turns; every second one runs in reverse order.
        seconds: Of one rival in a turn, about.
    """
    counts = []
    for call in calls:
        call()
        counts.append(max(1, min(500, int(seconds / max(1e-6, timed(call, device, issue_time(call, device))[0])))))

    def batch(index: int) -> tuple[float, float]:
        def repeated() -> None:
            for _ in range(counts[index]):
                calls[index]()

        device_time, host = timed(repeated, device)
        return device_time / counts[index], host / counts[index]

    return _in_turns(len(calls), rounds, batch)


def paired(
    calls: Sequence[Thunk], device: torch.device, rounds: int = 9, warmup: int = 2, budget: float = float("inf")
) -> list[Timing]:
    """Time all calls in turns.

    Args:
        calls: The rivals; the first is what the others are compared with.
        device: Where they run.
        rounds: Turns; every second one runs in reverse order.
        warmup: Calls of each that are not counted.
        budget: Seconds after which no further round is begun (three are run in any case).
    """
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device) if device.type == "cuda" else None
    for call in calls:
        for _ in range(warmup):
            call()
    issued = [issue_time(call, device) for call in calls]

    def one(index: int) -> tuple[float, float]:
        if flush is not None:
            flush.zero_()
        return timed(calls[index], device, issued[index])

    return _in_turns(len(calls), rounds, one, budget)


def _in_turns(
    count: int, rounds: int, measure: Callable[[int], tuple[float, float]], budget: float = float("inf")
) -> list[Timing]:
    """Measure each of ``count`` rivals once a round, every second round in reverse order."""
    times: list[list[tuple[float, float]]] = [[] for _ in range(count)]
    started = time.perf_counter()
    for turn in range(rounds):
        for index in range(count) if turn % 2 == 0 else reversed(range(count)):
            times[index].append(measure(index))
        if turn >= 2 and time.perf_counter() - started > budget:
            break
    return _timings(times)


def _timings(times: Sequence[Sequence[tuple[float, float]]]) -> list[Timing]:
    """Medians of what the rounds took on the device and on the host, and of the ratios to the first."""
    timings = []
    for mine in times:
        ratios = sorted(max(x) / max(y) for x, y in zip(mine, times[0], strict=True))
        seconds, issued = (statistics.median(each) for each in zip(*mine, strict=True))
        late = 3 * len(ratios) // 4
        compared = ratios if mine is not times[0] else sorted(map(max, mine))
        apart = compared[late] / compared[len(ratios) // 4]
        timings.append(Timing(seconds, statistics.median(ratios), ratios[late], issued, apart))
    return timings


def relative_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the reference; NaN never passes a limit."""
    gap = norm = 0.0
    columns = max(1, reference.shape[-1]) if reference.dim() else 1
    rows = max(1, _BLOCK // columns)
    pairs = zip(result.reshape(-1, columns).split(rows), reference.reshape(-1, columns).split(rows), strict=True)
    for got, expected in pairs:
        exact = expected.double()
        gap += float((got.double() - exact).square().sum())
        norm += float(exact.square().sum())
    return (gap / norm if norm > 0 else gap) ** 0.5


# Elements compared at once: in fp64, large results would not fit beside themselves.
_BLOCK = 1 << 26
