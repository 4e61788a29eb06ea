"""How much of a pipeline's time is bubble? Each schedule measured beside what the clock of axo.perf says, and torch's.

    axo bench pipeline --ranks 2,4
    axo bench pipeline --ranks 4 --schedules gpipe,interleaved-1f1b,zero-bubble --contestants axo

A stage computes nothing: its passes wait for a given time, so that ranks may be more than cores. Forward, gradient of
the input and gradient of the weight of one micro-batch take --ms each on a rank, over all of its stages. Contestants:
``axo`` (axo.pipeline.Stage), and torch's PipelineStage over gloo and over backend axo; they take steps in turns.

Columns: ms a step (the slowest rank; median), the part of the ranks' time in which they run nothing (bubble), the same
where ``axo.perf.pipeline_schedule.simulate`` runs the schedule with the times that the passes really took (model), by
what part of it the measured one is off, the bubble of equal passes that cost nothing beside (ideal), and ``#wrong``:
gradients that are not what the number of micro-batches makes them. What a rank needs from one action to the next where
nothing is missing (the lower quartile of such gaps) is taken for a part of the action.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

import axo
from axo.overlap.weight_phase import WeightPhase
from axo.perf.pipeline_schedule import KINDS, rank_of, simulate
from axo.pipeline.actions import Ran, record

from .lib.table import Table, environment

COLUMNS = {"ranks": "d", "schedule": "s", "contestant": "s", "step(ms)": ".1f", "bubble": ".3f", "model": ".3f"}
COLUMNS |= {"off": "+.3f", "ideal": ".3f", "#wrong": "d"}
CONTESTANTS = ("axo", "torch axo", "torch gloo")
WIDTH, ROWS = 64, 1


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


def measure(ranks: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """On every rank: the rows of so many ranks; on ranks other than 0 none."""
    torch.set_num_threads(1)
    comms = axo.connect("1x1x1x1", pipeline=ranks)
    everyone = comms.everyone
    groups = {"torch axo": dist.new_group(backend="axo"), "torch gloo": dist.new_group(backend="gloo")}
    batch = torch.zeros(options.microbatches * ROWS, WIDTH)
    rows: list[dict[str, Any]] = []
    for name in options.schedules:
        field = {one: made(name, one, comms, groups.get(one), options) for one in options.contestants}
        steps: dict[str, list[tuple[float, float, float]]] = {one: [] for one in field}
        wrong = dict.fromkeys(field, 0)
        for repeat in range(options.repeats + 1):
            for one, (schedule, stages) in field.items():
                everyone.barrier()
                start = time.perf_counter()
                with record(stages) as ran:
                    schedule.step(batch, target=batch)
                spent = time.perf_counter() - start
                every: list[Any] = [None] * ranks
                dist.all_gather_object(every, (spent, ran))
                if repeat:  # the first makes connections
                    steps[one].append(bubbles(name, every, options.microbatches))
                expected = torch.full((WIDTH,), float(batch.shape[0]))
                for stage in stages:
                    wrong[one] += stage.submod.weight.grad is None or not torch.equal(
                        stage.submod.weight.grad, expected
                    )
                    stage.submod.weight.grad = None
        each = options.ms / 1e3 / KINDS[name].stages_per_rank
        ideal = simulate(name, ranks, options.microbatches, each, each, each).bubble
        for one in field:
            seconds, found, model = map(statistics.median, zip(*steps[one], strict=True))
            errors = int(everyone.all_reduce(torch.tensor([wrong[one]])))
            rows.append(
                {"ranks": ranks, "schedule": name, "contestant": one, "step(ms)": 1e3 * seconds, "bubble": found}
                | {"model": model, "off": found / model - 1, "ideal": ideal, "#wrong": errors}
                | {"all": [[round(value, 5) for value in step] for step in steps[one]]}
            )
    comms.close()
    return rows if everyone.rank == 0 else []


def bubbles(name: str, every: list[tuple[float, list[Ran]]], microbatches: int) -> tuple[float, float, float]:
    """From what all ranks ran: (seconds of the step, its bubble, the simulator's bubble)."""
    ranks, seconds = len(every), max(spent for spent, _ in every)
    count = ranks * KINDS[name].stages_per_rank
    lasted: dict[str, list[list[float]]] = {kind: [[] for _ in range(count)] for kind in "FBIW"}
    busy = 0.0
    for _, ran in every:
        gaps = sorted(after.start - before.end for before, after in itertools.pairwise(ran))
        between = gaps[len(gaps) // 4]
        for action in ran:
            lasted[action.kind][action.stage].append(action.end - action.start + between)
            busy += lasted[action.kind][action.stage][-1]
    mean = {kind: [statistics.fmean(one) if one else 0.0 for one in stages] for kind, stages in lasted.items()}
    whole = [not weights for weights in lasted["W"]]  # backward of this stage comes in one phase only
    inputs = [mean["B" if whole[stage] else "I"][stage] for stage in range(count)]
    model = simulate(name, ranks, microbatches, mean["F"], inputs, mean["W"]).bubble
    return seconds, 1 - busy / (ranks * seconds), model


def main(given: list[str] | None = None) -> int:
    """Run the bench; returns 1 when a gradient is wrong."""
    parser = argparse.ArgumentParser(prog="axo bench pipeline", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2,4", help="of the pipeline; comma-separated")
    parser.add_argument("--schedules", default=",".join(KINDS), help="comma-separated")
    parser.add_argument("--contestants", default=",".join(CONTESTANTS), help="comma-separated")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--ms", type=float, default=10.0, help="of each of the three passes of a micro-batch on a rank")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None, help="append JSON lines here")
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
        for row in launch_local(measure, ranks, ranks, options) or []:
            table.add(**row)
    return int(any(row["#wrong"] for row in table.rows))


if __name__ == "__main__":
    raise SystemExit(main())
