"""Schedules of a pipeline in time: which rank runs which micro-batch when, how long ranks wait, what they hold.

A pipeline of P ranks (each of them a grid in training) has v stages a rank. A step is M micro-batches: F(s, i) runs
micro-batch i forward on stage s, B backward, or I its gradients of inputs and W those of weights apart. In which order
a rank runs its actions is asked of torch's own schedules (``torch.distributed.pipelining``), which train; here each
action starts when its rank is free and

    F(s, i)            F(s-1, i) and a message have come
    B or I (s, i)      F(s, i) is done, B or I (s+1, i) and a message have come
    W(s, i)            I(s, i) is done

With f, b and w seconds of F, I and W of a whole rank (all of its stages) and messages that take no time, a step takes
M (f + b + w) and a bubble, and a rank holds so many micro-batches of its stages:

    schedule             bubble / (P-1)                      held by rank r
    gpipe                f + b + w                           M
    1f1b                 f + b + w                           P - r               Narayanan et al. 2021, 2.2
    looped-bfs           (f + b + w) / 2                     M
    interleaved-1f1b     (f + b + w) / 2                     (3P - 1) / 2 - r    the same
    zero-bubble          (f + max(0, b - w)) / 2             P                   Qi et al. 2023 (ZB1P, interleaved)
    zbv                  max(f / 2, b / 2, b - w) or more    P                   the same
    dualpipev            that of zero-bubble or more         P + 1/2

``estimate`` and ``in_flight`` are these closed forms, ``simulate`` the clock, to which tests hold them; the planner
ranks by the first, which need no torch.
Not here: what happens inside a stage (``axo.perf.model``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from axo.errors import Refused
from axo.perf import clock

LOOP, V = "loop", "v"
FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"


class Kind(NamedTuple):
    """What a schedule is.

    Attributes:
        torch_name: The class in ``torch.distributed.pipelining``.
        stages_per_rank: v.
        order: Stage s on rank s % P ("loop"), or there and back ("v").
        splits: Whether backward comes in two phases, I and W.
    """

    torch_name: str
    stages_per_rank: int = 1
    order: str = LOOP
    splits: bool = False


KINDS = {
    "gpipe": Kind("ScheduleGPipe"),
    "1f1b": Kind("Schedule1F1B"),
    "looped-bfs": Kind("ScheduleLoopedBFS", 2),
    "interleaved-1f1b": Kind("ScheduleInterleaved1F1B", 2),
    "zero-bubble": Kind("ScheduleInterleavedZeroBubble", 2, LOOP, True),
    "zbv": Kind("ScheduleZBVZeroBubble", 2, V, True),
    "dualpipev": Kind("ScheduleDualPipeV", 2, V, True),
}


class Action(NamedTuple):
    """F, B, I or W of one micro-batch on one stage."""

    kind: str
    stage: int
    microbatch: int


class TimedAction(NamedTuple):
    """An action, on which rank and when (seconds)."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What happened in one step.

    Attributes:
        seconds: From the first forward pass to the last backward pass.
        ran: Every action, by the time that it starts.
        busy: Seconds in which each rank ran something.
    """

    schedule: str
    ranks: int
    stages: int
    microbatches: int
    seconds: float
    ran: list[TimedAction] = field(repr=False)
    busy: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they run nothing: 0 to 1."""
        return 1.0 - sum(self.busy) / (self.ranks * self.seconds) if self.seconds else 0.0

    def held(self, kept: float | Sequence[float] = 1.0) -> tuple[float, ...]:
        """Return the most that each rank holds of what forward passes keep for backward.

        Args:
            kept: What one micro-batch keeps on each stage, in any unit (1: micro-batches are counted). It is there from
                F until B, or until W where backward is split.
        """
        each = _of_stages(kept, self.stages)
        now, most = [0.0] * self.ranks, [0.0] * self.ranks
        changes: list[tuple[float, int, int, float]] = []
        for rank, (kind, stage, _), start, end in self.ran:
            if kind == FORWARD:
                changes.append((start, 1, rank, each[stage]))
            elif kind != INPUT:
                changes.append((end, 0, rank, -each[stage]))
        for _, _, rank, change in sorted(changes, key=lambda one: one[:2]):
            now[rank] += change
            most[rank] = max(most[rank], now[rank])
        return tuple(most)


def schedule_kind(schedule: str) -> Kind:
    """Return what a schedule is.

    Raises:
        ValueError: It is not known.
    """
    if schedule not in KINDS:
        raise ValueError(f"pipeline: schedule={schedule!r} is not known; use one of {', '.join(KINDS)}")
    return KINDS[schedule]


def check_algorithm(name: str, algorithm: str) -> None:
    """Check that a schedule suits how products are distributed.

    Raises:
        Refused: Its weight phase would communicate.
    """
    if schedule_kind(name).splits and algorithm != "axonn":
        raise Refused(
            f"pipeline: {name!r} puts products of weights off, and with algorithm={algorithm!r} these communicate; use"
            " a schedule whose backward is in one phase, such as 1f1b or interleaved-1f1b, or algorithm='axonn'"
        )


def check(schedule: str, microbatches: int, ranks: int) -> None:
    """Check how many micro-batches a schedule is given, for stages on ``ranks`` ranks of a pipeline.

    Raises:
        ValueError: Fewer than its stages; or none that torch's schedule can order.
    """
    kind = schedule_kind(schedule)
    least = ranks * (2 if schedule == "dualpipev" else 1)
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < least:
        raise ValueError(
            f"pipeline: microbatches={microbatches!r} are fewer than the {least} stages that {schedule!r} must fill;"
            f" use at least {least}"
        )
    rounds = max(1, microbatches // ranks)
    if kind.order == LOOP and kind.stages_per_rank > 1 and schedule != "looped-bfs" and microbatches % rounds:
        raise ValueError(
            f"pipeline: {schedule!r} orders micro-batches in rounds of equal length, and microbatches={microbatches} do"
            f" not divide into {rounds}; use a multiple of {ranks}"
        )


def rank_of(stage: int, stages: int, ranks: int, order: str) -> int:
    """Return the rank that holds a stage."""
    if order == V:
        return min(stage, stages - 1 - stage)
    return stage % ranks


def stages_of(rank: int, stages: int, ranks: int, order: str) -> list[int]:
    """Return the stages of one rank: every ``ranks``-th after it (``"loop"``), or there and back (``"v"``)."""
    return [rank, stages - 1 - rank] if order == V else list(range(rank, stages, ranks))


@lru_cache(maxsize=64)
def actions(schedule: str, ranks: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Return what each rank runs, in order: what torch's schedule of that name gives (imports torch).

    Raises:
        ValueError: An unknown schedule, or a number of micro-batches that it cannot order.
    """
    from torch.distributed import pipelining

    check(schedule, microbatches, ranks)
    kind = schedule_kind(schedule)
    schedule_class: Any = getattr(pipelining, kind.torch_name)
    # Messages are added by the runtime for real stages; of the order they change nothing.
    schedule_class = type(
        f"OrderOf{kind.torch_name}", (schedule_class,), {"_prepare_schedule_with_comms": lambda self, order: None}
    )
    stages = [_stage(index, ranks, kind) for index in range(kind.stages_per_rank)]
    order = schedule_class(stages if kind.stages_per_rank > 1 else stages[0], microbatches)
    listed = order.pipeline_order if kind.stages_per_rank > 1 else order._get_pipeline_order()
    return tuple(_plain(listed[rank], kind) for rank in range(ranks))


def _stage(index: int, ranks: int, kind: Kind) -> SimpleNamespace:
    """What torch's schedules read of a stage when they are made."""
    return SimpleNamespace(
        num_stages=ranks * kind.stages_per_rank,
        group_size=ranks,
        group_rank=0,
        stage_index=index * ranks,
        is_first=index == 0,
        is_last=False,
        has_backward=True,
        submod=None,
    )


def _plain(listed: Sequence[Any], kind: Kind) -> tuple[Action, ...]:
    """With one stage a rank micro-batches come in order; torch's printed 1F1B counts the last rank's from 1."""
    count, plain = Counter[str](), list[Action]()
    for one in (one for one in listed if one is not None):
        for each in one.sub_actions or (one,):  # a pair runs one after the other
            what = each.computation_type.value
            if what in (FORWARD, BACKWARD, INPUT, WEIGHT):
                number = each.microbatch_index if kind.stages_per_rank > 1 else count[what]
                plain.append(Action(what, each.stage_index, number))
                count[what] += 1
    return tuple(plain)


def simulate(
    schedule: str,
    ranks: int,
    microbatches: int,
    forward_s: float | Sequence[float],
    backward_input_s: float | Sequence[float],
    backward_weight_s: float | Sequence[float],
    message_s: float = 0.0,
) -> Timeline:
    """Run one step against the clock.

    Args:
        schedule: One of ``KINDS``.
        ranks: Ranks of the pipeline (``axo.connect(pipeline=)``); each has ``KINDS[schedule].stages_per_rank`` stages.
        microbatches: Micro-batches of the step.
        forward_s, backward_input_s, backward_weight_s: Seconds of one micro-batch on one stage: one figure for all
            stages, or one for each. A backward pass that is not split takes the sum of the two.
        message_s: Seconds from the end of an action until its result is on another rank; the sender does not wait.

    Raises:
        ValueError: An unknown schedule, micro-batches that it cannot order, or times that mean nothing.
    """
    kind = schedule_kind(schedule)
    stages = ranks * kind.stages_per_rank
    seconds = {FORWARD: _of_stages(forward_s, stages), INPUT: _of_stages(backward_input_s, stages),
               WEIGHT: _of_stages(backward_weight_s, stages)}  # fmt: skip
    seconds[BACKWARD] = tuple(map(sum, zip(seconds[INPUT], seconds[WEIGHT], strict=True)))
    listed = [(rank, one) for rank, queue in enumerate(actions(schedule, ranks, microbatches)) for one in queue]
    # What gives others something: backward of inputs counts as I, split or not.
    numbers = {(INPUT if one.kind == BACKWARD else one.kind, *one[1:]): n for n, (_, one) in enumerate(listed)}
    operations, messages = list[clock.Operation](), list[clock.Operation]()
    for rank, (what, stage, microbatch) in listed:
        after = []
        for source in _waits(what, stage, stages):
            number = numbers[(*source, microbatch)]
            if message_s and listed[number][0] != rank:
                after.append(len(listed) + len(messages))
                messages.append(clock.Operation("message", "from {} {}".format(*source), message_s, (number,)))
            else:
                after.append(number)
        operations.append(clock.Operation(what, str(rank), seconds[what][stage], tuple(after)))
    spans = clock.run(operations + messages)
    ran = [TimedAction(rank, one, span.start, span.end)
           for (rank, one), span in zip(listed, spans[: len(listed)], strict=True)]  # fmt: skip
    ran.sort(key=lambda one: (one.start, one.rank))
    busy = tuple(sum(one.end - one.start for one in ran if one.rank == rank) for rank in range(ranks))
    return Timeline(schedule, ranks, stages, microbatches, max(one.end for one in ran), ran, busy)


def _waits(kind: str, stage: int, stages: int) -> list[tuple[str, int]]:
    """What an action waits for: kinds and stages of actions of the same micro-batch."""
    if kind == WEIGHT:
        return [(INPUT, stage)]
    if kind == FORWARD:
        return [(FORWARD, stage - 1)] if stage else []
    return [(FORWARD, stage)] + [(INPUT, stage + 1)] * (stage + 1 < stages)


def estimate(
    schedule: str, ranks: int, microbatches: int, groups: Sequence[tuple[int, Sequence[float]]], message_s: float = 0.0
) -> float:
    """Return about the seconds that ``simulate`` finds, by the closed form.

    The slowest rank works through all micro-batches; every other adds its part of the bubble.

    Args:
        groups: (how many ranks, seconds of F, I and W of one micro-batch on all stages of each).
    """
    slowest = max((seconds for _, seconds in groups), key=sum)
    if ranks == 1:
        return microbatches * sum(slowest)
    fill = sum(count * _fill(schedule, ranks, *seconds) for count, seconds in groups)
    fill -= _fill(schedule, ranks, *slowest)
    return microbatches * sum(slowest) + fill + message_s * messages(schedule, ranks, microbatches)


def _fill(schedule: str, ranks: int, forward: float, inputs: float, weights: float) -> float:
    """What one rank adds to the bubble."""
    if schedule in ("gpipe", "1f1b"):
        return forward + inputs + weights
    if schedule in ("looped-bfs", "interleaved-1f1b"):
        return (forward + inputs + weights) / 2
    inner = (ranks - 2) / (ranks - 1)  # of the ranks stand between two others
    if schedule == "zbv":
        least = max(forward / 2, inputs / 2, inputs - weights)
        return least + max(0.0, forward - inputs / 2 - least) * inner
    least = (forward + max(0.0, inputs - weights)) / 2
    return least + (max(0.0, inputs - weights / 2 - least) * inner if schedule == "dualpipev" else 0.0)


def messages(schedule: str, ranks: int, microbatches: int) -> float:
    """Messages that nothing hides, one behind the other."""
    if schedule in ("gpipe", "looped-bfs"):
        return 2.0 * (ranks - 1)
    if schedule == "1f1b":  # there and back for as many micro-batches as there are ranks
        return 2.0 * microbatches * (ranks - 1) / ranks + 2.0 * (ranks - 2)
    return 4.0 * ranks - 2 if schedule == "interleaved-1f1b" else 5.0 * ranks - 4


@lru_cache(maxsize=4096)
def in_flight(schedule: str, ranks: int, microbatches: int, rank: int = 0) -> float:
    """Return how many micro-batches ``rank`` holds of its stages at most; a half: of one of two stages."""
    schedule_kind(schedule)
    most: dict[str, float] = {"gpipe": microbatches, "looped-bfs": microbatches, "1f1b": ranks - rank}
    most["interleaved-1f1b"] = (3 * ranks - 1) / 2 - rank
    most["dualpipev"] = ranks + 1 / 2
    return min(microbatches, most.get(schedule, ranks))


def _of_stages(value: float | Sequence[float], stages: int) -> tuple[float, ...]:
    each = (float(value),) * stages if isinstance(value, (int, float)) else tuple(map(float, value))
    if len(each) != stages or any(not 0 <= one < float("inf") for one in each):
        raise ValueError(
            f"pipeline: {value!r} must be one figure of at least 0, or one for each of the {stages} stages"
        )
    return each
