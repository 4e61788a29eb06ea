"""A step as the engine did it, against the clock of a machine: what ``axo simulate`` shows.

A record (``axo.dryrun.run(..., entries=)``) is what one rank did, in the order of its program. It has a compute stream
and one for each axis; all ranks do the same at the same time, so one stands for all. What is computed runs one after
the other: a product takes ``Machine.gemm_seconds``, attention its flops at the rate of a fused kernel, and what only
moves memory shares by its bytes what these leave of the closed form's seconds (on the CPU it comes in more passes than
GPUs make). A collective starts when what was computed before it is there and its stream is free, and takes what
``axo.perf.layer_time.Network`` says; a wait holds the compute stream up until it has ended.

The last micro-batch that was recorded stands for those that were not. Not here: which operations a step has (the record
says it), other jobs on the network, pipelining inside a collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from axo.grid import AXES, Grid
from axo.perf import clock
from axo.perf.chrome_trace import COMPUTE, Span
from axo.perf.clock import Operation
from axo.perf.layer_time import Network
from axo.perf.machine import Machine

PRODUCT, ATTENTION, MEMORY, COLLECTIVE = "product", "attention", "memory", "collective"
WAIT, PIECE, UPDATE = "wait", "micro-batch", "optimizer"


class Entry(NamedTuple):
    """Something that a rank did.

    Attributes:
        what: One of the names above; ``PIECE`` and ``UPDATE``: a micro-batch, or the optimizer's step, begins.
        sizes: How many products of which m, k, n; or one number: attention's flops, bytes that are written to memory,
            bytes that the rank puts into a collective.
        name: For traces.
        op, axis: Of a collective.
        number: Of a collective, and of the one that a wait is for.
    """

    what: str
    sizes: tuple[float, ...] = ()
    name: str = ""
    op: str = ""
    axis: str = ""
    number: int = 0


@dataclass
class Simulation:
    """What happened in one step.

    Args:
        seconds: From the start to the end of the optimizer.
        exposed: Seconds by axis in which the compute stream stood still for that axis.
        busy: Seconds by stream in which it ran something.
        spans: Every operation, 0 s the start of the step.
        micro_batches: How many were recorded; ``seconds``, ``exposed`` and ``busy`` count the others as the last of
            them, and ``spans`` show only these.
    """

    seconds: float
    exposed: dict[str, float]
    busy: dict[str, float]
    spans: list[Span] = field(repr=False)
    micro_batches: int = 1


def replay(
    entries: Sequence[Entry],
    grid: Grid,
    machine: Machine,
    computed_s: float,
    optimizer_s: float,
    micro_batches: int = 1,
) -> Simulation:
    """Run a recorded step against the clock.

    Args:
        entries: The record, of at least one micro-batch.
        computed_s, optimizer_s: Seconds in which a rank computes a micro-batch, and the optimizer's step.
        micro_batches: Of the step. They run one after the other.
    """
    step = operations(entries, grid, machine, computed_s, optimizer_s)
    spans = clock.run(step, {axis: machine.crosses_nodes(grid, axis) for axis in AXES}, machine.contention)
    begin, end = (max(span.start for span in spans if span.name == mark) for mark in (PIECE, UPDATE))
    recorded = sum(span.name == PIECE for span in spans)
    times = [1 + (micro_batches - recorded) * (begin <= span.start < end) for span in spans]
    busy, exposed, free = dict.fromkeys((COMPUTE, *AXES), 0.0), dict.fromkeys(AXES, 0.0), 0.0
    for operation, span, count in zip(step, spans, times, strict=True):
        if span.stream in busy:
            busy[span.stream] += count * (span.end - span.start)
        if span.stream == COMPUTE:  # a gap before it is charged to what it waited for
            for axis in {step[number].stream for number in operation.after} & exposed.keys():
                exposed[axis] += count * (span.start - free)
            free = span.end
    seconds = max(span.end for span in spans) + (micro_batches - recorded) * (end - begin)
    return Simulation(seconds, exposed, busy, [span for span in spans if span.end > span.start], recorded)


def operations(
    entries: Sequence[Entry], grid: Grid, machine: Machine, computed_s: float, optimizer_s: float
) -> list[Operation]:
    """The operations of a recorded step, and what each waits for beside its stream, in the order of the program."""
    network, step = Network(machine, grid), list[Operation]()
    seconds, issued, computed = _seconds(entries, machine, computed_s), dict[int, int](), tuple[int, ...]()
    for one, size in zip(entries, seconds, strict=True):
        if one.what == COLLECTIVE:
            issued[one.number] = len(step)
            size = network.seconds(one.op, one.axis, *one.sizes)
            step.append(Operation(one.name, one.axis, size, computed))
        else:
            after, computed = (issued[one.number],) if one.what == WAIT else (), (len(step),)
            size = optimizer_s if one.what == UPDATE else size
            step.append(Operation(one.name or one.what, COMPUTE, size, after))
    return step


def _seconds(entries: Sequence[Entry], machine: Machine, micro_batch: float) -> list[float]:
    """Seconds of what is computed, ``micro_batch`` of each together; of other entries 0."""
    own = list[float]()
    for one in entries:
        if one.what == PRODUCT:
            count, m, k, n = map(int, one.sizes)
            own.append(count * machine.gemm_seconds(m, k, n))
        else:
            own.append(one.sizes[0] / machine.attention_flops if one.what == ATTENTION else 0.0)
    whole = micro_batch * sum(one.what == PIECE for one in entries)
    shrinks = min(1.0, whole / (sum(own) or 1.0))  # where products were measured at shapes like these
    moved = sum(one.sizes[0] for one in entries if one.what == MEMORY)
    a_byte = (whole - shrinks * sum(own)) / (moved or 1.0)
    return [a_byte * one.sizes[0] if one.what == MEMORY else shrinks * s for one, s in zip(entries, own, strict=True)]
