"""Operations of streams that run side by side, against the clock.

A stream runs its operations in order, each as soon as what it waits for has ended. Streams of one group share what they
use in equal parts (the axes that leave a node its NICs, those inside it its links); products lose ``contention`` of
their speed while anything runs beside them.
Not here: which operations a step has (``replay``, ``pipeline_schedule``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from axo.perf.chrome_trace import COMPUTE, Span


class Operation(NamedTuple):
    """One operation.

    Args:
        name: What is done, for traces.
        stream: Where it stands in line.
        seconds: Time when nothing else runs.
        after: Numbers of the operations that must have ended (those before it in its stream come on top).
    """

    name: str
    stream: str
    seconds: float
    after: tuple[int, ...] = ()


def run(
    operations: Sequence[Operation], groups: Mapping[str, object] | None = None, contention: float = 0.0
) -> list[Span]:
    """Return when each operation ran, in their order.

    Args:
        groups: Of a stream: what it shares with the others of the same group; a stream without one shares nothing.
        contention: Share of its speed that ``COMPUTE`` loses while another stream runs.
    """
    groups = groups or {}
    queues: dict[str, deque[int]] = {}
    dependents: list[list[int]] = [[] for _ in operations]
    for number, operation in enumerate(operations):
        queues.setdefault(operation.stream, deque()).append(number)
        for other in operation.after:
            dependents[other].append(number)
    awaited = [len(operation.after) for operation in operations]
    spans: dict[int, Span] = {}
    left: dict[str, float] = {}  # seconds of what each busy stream runs
    begun: dict[str, float] = {}
    now, free = 0.0, list(queues)
    while True:
        for stream in free:
            if stream not in left and queues[stream] and not awaited[queues[stream][0]]:
                left[stream], begun[stream] = operations[queues[stream][0]].seconds, now
        if not left:
            break
        ends = {stream: seconds / _rate(stream, left, groups, contention) for stream, seconds in left.items()}
        passed = min(ends.values())
        now, free = now + passed, []
        for stream, end in ends.items():
            left[stream] *= 1.0 - passed / end if end else 0.0
            if end == passed:
                number = queues[stream].popleft()
                spans[number] = Span(stream, operations[number].name, begun[stream], now)
                del left[stream]
                free.append(stream)
                for other in dependents[number]:
                    awaited[other] -= 1
                    free.append(operations[other].stream)
    assert len(spans) == len(operations), f"{len(operations) - len(spans)} operations wait for each other"
    return [spans[number] for number in range(len(operations))]


def _rate(stream: str, busy: Mapping[str, float], groups: Mapping[str, object], contention: float) -> float:
    if stream == COMPUTE:
        return 1.0 if len(busy) == 1 else 1.0 - contention
    group = groups.get(stream)
    return 1.0 if group is None else 1.0 / sum(groups.get(other) == group for other in busy)
