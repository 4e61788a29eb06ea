"""How much of a pipeline's time is bubble? Each schedule measured beside what the clock of axo.perf says, and torch's.

    axo bench pipeline --ranks 2,4
    axo bench pipeline --ranks 4 --schedules gpipe,interleaved-1f1b,zero-bubble --contestants axo

A stage computes nothing: its passes wait for a given time, so that ranks may be more than cores. Forward, gradient of
the input and gradient of the weight of one micro-batch take --ms each on a rank, over all of its stages; what torch and
Axo do beside is filled up to SLACK, so that all passes of a kind last as long. Contestants: ``axo``
(axo.pipeline.Stage), and torch's PipelineStage over gloo and over backend axo; they take steps in turns, the order
turned round each time.

Columns: ms a step (the slowest rank; median), the part of the ranks' time, from the first pass to the end of the last,
in which they run nothing (bubble), the same where ``axo.perf.pipeline_schedule.simulate`` runs the schedule with the
times that passes and messages really took (model), by what part of it the measured one is off, the bubble of equal
passes that cost nothing beside (ideal), the time of a message (ms), and ``#wrong``: gradients that are not what the
number of micro-batches makes them. What a rank needs from one action to the next where nothing is missing (mean) is
taken for a part of the action; a message takes from the end of what sends it to the start of what it is for, where that
rank did nothing else meanwhile (mean).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

import axo
from axo.checkpoint.ranks import checkpoint_group, share
from axo.overlap.weight_phase import WeightPhase
from axo.perf.pipeline_schedule import KINDS, rank_of, simulate
from axo.pipeline.actions import METHODS, RecordedAction, record

from .lib.arguments import Parser
from .lib.table import Table, environment

COLUMNS = {"ranks": "d", "schedule": "s", "contestant": "s", "step(ms)": ".1f", "bubble": ".3f", "model": ".3f"}
COLUMNS |= {"off": "+.3f", "ideal": ".3f", "message(ms)": ".2f", "#wrong": "d"}
CONTESTANTS = ("axo", "torch axo", "torch gloo")
WIDTH, ROWS = 64, 1
SLACK, SPIN = 1.5e-3, 3e-4  # seconds


class _Pass(torch.autograd.Function):
    """The identity; forward and backward take ``seconds``."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return input.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return grad.contiguous(), None  # torch's own stage sends it as it is


class _Weight(torch.autograd.Function):
    """The identity of a parameter; its gradient takes ``seconds``, in the weight phase where there is one."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, stage: Padded) -> torch.Tensor:
        ctx.stage = stage
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        stage = ctx.stage

        def product() -> torch.Tensor:
            time.sleep(stage.seconds)
            return grad

        if stage.phase is not None and stage.phase.take(stage.weight, product):
            return None, None
        return product(), None


class Padded(nn.Module):
    """input + weight, in which each of the three passes takes ``seconds``."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))
        self.seconds = seconds
        self.phase: WeightPhase | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _Pass.apply(input + _Weight.apply(self.weight, self), self.seconds)  # type: ignore[no-untyped-call]


@contextmanager
def filled_up(stages: Sequence[PipelineStage], seconds: float) -> Iterator[None]:
    """Let each action of ``stages`` last SLACK longer than what it waits for, where it does not take longer anyway."""

    def fill(method: Callable[..., Any], weight: bool) -> Callable[..., Any]:
        def filled(*args: Any, **kwargs: Any) -> Any:
            whole = not weight and method.__name__[0] == "b" and kwargs.get("full_backward", True)
            until = time.perf_counter() + (2 if whole else 1) * seconds + SLACK
            result = method(*args, **kwargs)
            time.sleep(max(0.0, until - SPIN - time.perf_counter()))
            while time.perf_counter() < until:
                pass
            return result

        return filled

    for stage in stages:
        for name in METHODS:
            stage.__dict__[name] = fill(getattr(stage, name), "weight" in name)
    try:
        yield
    finally:
        for stage in stages:
            for name in METHODS:
                stage.__dict__.pop(name, None)


def made(name: str, contestant: str, comms: axo.Communicators, group: Any, options: argparse.Namespace) -> Any:
    """(the schedule, its stages on this rank) of one contestant."""
    kind = KINDS[name]
    count = comms.stages * kind.stages_per_rank
    mine = [stage for stage in range(count) if rank_of(stage, count, comms.stages, kind.order) == comms.stage]
    modules = [Padded(options.ms / 1e3 / kind.stages_per_rank) for _ in mine]
    like = torch.empty(ROWS, WIDTH)
    loss = _sum
    if contestant == "axo":
        stages = []
        for index, module in zip(mine, modules, strict=True):
            stage = axo.pipeline.Stage(module, comms, like, like, index=index, num_stages=count)
            module.phase = stage.weight_phase
            stages.append(stage)
        schedule: Any = axo.pipeline.schedule(name, stages, microbatches=options.microbatches, loss=loss, mean=False)
        return schedule, stages
    like.requires_grad_()
    plain = [
        pipelining.PipelineStage(module, index, count, torch.device("cpu"), like, like, group=group)
        for index, module in zip(mine, modules, strict=True)
    ]
    given: Any = plain if kind.stages_per_rank > 1 else plain[0]
    made_by: Any = getattr(pipelining, kind.torch_name)
    return made_by(given, options.microbatches, loss_fn=loss, scale_grads=False), plain


def _sum(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.sum()


def measure(ranks: int, options: argparse.Namespace, table: Table) -> list[dict[str, Any]]:
    """On every rank: the rows of so many ranks, which rank 0 adds to ``table`` as they come."""
    torch.set_num_threads(1)
    comms = axo.connect("1x1x1x1", pipeline=ranks)
    everyone = comms.everyone
    groups = {"torch axo": dist.new_group(backend="axo"), "torch gloo": dist.new_group(backend="gloo")}
    batch = torch.zeros(options.microbatches * ROWS, WIDTH)
    rows: list[dict[str, Any]] = []
    for name in options.schedules:
        each = options.ms / 1e3 / KINDS[name].stages_per_rank
        field = {one: made(name, one, comms, groups.get(one), options) for one in options.contestants}
        steps: dict[str, list[Measured]] = {one: [] for one in field}
        wrong = dict.fromkeys(field, 0)
        for repeat in range(options.repeats + 1):
            for one, (schedule, stages) in list(field.items())[:: -1 if repeat % 2 else 1]:
                everyone.barrier()
                start = time.perf_counter()
                with filled_up(stages, each), record(stages) as ran:
                    schedule.step(batch, target=batch)
                spent = time.perf_counter() - start
                told = share(checkpoint_group(comms), (spent, ran, sent_at(schedule, ran)))
                every = [(spent, [RecordedAction(*one) for one in ran], sent) for spent, ran, sent in told]
                if repeat:  # the first makes connections
                    steps[one].append(bubbles(name, every, options.microbatches))
                expected = torch.full((WIDTH,), float(batch.shape[0]))
                for stage in stages:
                    wrong[one] += stage.submod.weight.grad is None or not torch.equal(
                        stage.submod.weight.grad, expected
                    )
                    stage.submod.weight.grad = None
        ideal = simulate(name, ranks, options.microbatches, each, each, each).bubble
        for one in field:
            seconds, found, model, message = map(statistics.median, zip(*steps[one], strict=True))
            errors = int(everyone.all_reduce(torch.tensor([wrong[one]])))
            rows.append(
                {"ranks": ranks, "schedule": name, "contestant": one, "step(ms)": 1e3 * seconds, "bubble": found}
                | {"model": model, "off": found / model - 1, "ideal": ideal}
                | {"message(ms)": 1e3 * message, "#wrong": errors}
                | {"all": [[round(value, 5) for value in step] for step in steps[one]]}
            )
            if everyone.rank == 0:
                table.add(**rows[-1])
    comms.close()
    return rows if everyone.rank == 0 else []


class Measured(NamedTuple):
    """Of one step: seconds, share of the ranks' time that is bubble, that of the simulator, seconds of a message."""

    seconds: float
    bubble: float
    model: float
    message: float


def sent_at(schedule: Any, ran: list[RecordedAction]) -> list[float]:
    """When the result of each action is sent: at its end; of torch's pairs (dualpipev) when both are done."""
    if not hasattr(schedule, "pipeline_order_with_comms"):  # one stage a rank
        return [one.end for one in ran]
    sent: list[float] = []
    for action in schedule.pipeline_order_with_comms[schedule.rank]:
        together = len(action.sub_actions or (action,)) if action.is_compute_op else 0
        sent += together * [ran[len(sent) + together - 1].end]
    return sent


def bubbles(name: str, every: list[tuple[float, list[RecordedAction], list[float]]], microbatches: int) -> Measured:
    """What all ranks ran in one step, and when it was sent, beside what the simulator says to it."""
    ranks, kind = len(every), KINDS[name]
    count = ranks * kind.stages_per_rank
    home = [rank_of(stage, count, ranks, kind.order) for stage in range(count)]
    left = {(one.kind == "F", one.stage, one.microbatch): sent
            for _, ran, times in every for one, sent in zip(ran, times, strict=True) if one.kind != "W"}  # fmt: skip
    sent = [  # of each rank's actions: when another rank sends what it is for
        [
            left[one.kind == "F", source, one.microbatch]
            if one.kind != "W" and 0 <= source < count and home[source] != home[one.stage]
            else 0.0
            for one in ran
            for source in [one.stage + (-1 if one.kind == "F" else 1)]
        ]
        for _, ran, _ in every
    ]
    free = [[0.0, *(one.end for one in ran[:-1])] for _, ran, _ in every]
    steps = [list(zip(ran, came, was, strict=True)) for (_, ran, _), came, was in zip(every, sent, free, strict=True)]
    arrived = [one.start - came for rank in steps for one, came, was in rank if came > was]
    message = statistics.fmean(arrived) if arrived else 0.0
    lasted: dict[str, list[list[float]]] = {kind: [[] for _ in range(count)] for kind in "FBIW"}
    busy, between = 0.0, []
    for rank in steps:
        gaps = [one.start - was for one, came, was in rank if was and came + message < was]
        between.append(statistics.fmean(gaps) if gaps else 0.0)
        for one, came, was in rank:
            gap = one.start - was if was and came + message < was else between[-1]
            lasted[one.kind][one.stage].append(one.end - one.start + gap)
            busy += lasted[one.kind][one.stage][-1]
    message = max(0.0, message - statistics.fmean(between))
    ends, starts = [ran[-1].end for _, ran, _ in every], [ran[0].start for _, ran, _ in every]
    seconds = max(ends) - min(starts) + statistics.fmean(between)
    mean = {kind: [statistics.fmean(one) if one else 0.0 for one in stages] for kind, stages in lasted.items()}
    whole = [not weights for weights in lasted["W"]]  # backward of this stage comes in one phase only
    inputs = [mean["B" if whole[stage] else "I"][stage] for stage in range(count)]
    model = simulate(name, ranks, microbatches, mean["F"], inputs, mean["W"], message).bubble
    return Measured(max(spent for spent, *_ in every), 1 - busy / (ranks * seconds), model, message)


def main(given: list[str] | None = None) -> int:
    """Run the bench; returns 1 when a gradient is wrong."""
    parser = Parser("axo bench pipeline", __doc__, json=True)
    parser.add_argument("--ranks", default="2,4", help="of the pipeline; comma-separated")
    parser.add_argument("--schedules", default=",".join(KINDS), help="comma-separated")
    parser.add_argument("--contestants", default=",".join(CONTESTANTS), help="comma-separated")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--ms", type=float, default=20.0, help="of each of the three passes of a micro-batch on a rank")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(given)
    for name, known in (("schedules", KINDS), ("contestants", CONTESTANTS)):
        setattr(options, name, getattr(options, name).split(","))
        if unknown := set(getattr(options, name)) - set(known):
            parser.error(f"--{name}: {', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    if not all(part.isdecimal() and int(part) > 1 for part in options.ranks.split(",")):
        parser.error(f"--ranks {options.ranks}: wanted numbers of at least 2, such as 2,4")
    from axo.launch import launch_local

    header = {"bench": "pipeline", **environment(torch.device("cpu"))}
    header |= {"microbatches": options.microbatches, "ms": options.ms, "repeats": options.repeats}
    table = Table(COLUMNS, options.json, header)
    for ranks in map(int, options.ranks.split(",")):
        for name in options.schedules:
            axo.pipeline.check_microbatches(name, options.microbatches, ranks)
        table.rows += launch_local(measure, ranks, ranks, options, table)  # rank 0 has printed them
    return int(any(row["#wrong"] for row in table.rows))


if __name__ == "__main__":
    raise SystemExit(main())
