"""A plan's step as the engine does it, against the clock: ``axo simulate``.

    step = simulate(request.workload, best.grid, request.machine, best.run)

The step of rank 0 is recorded as ``axo train`` would run the plan, and replayed (``axo.perf.replay``). What a
micro-batch computes, and the optimizer's step, take what the closed form says. Logits come whole (in chunks they would
send the same, and take minutes to record), a tied head sends its own gradient, learned positions are left out.
Not here: convolutions, and mixtures that LitGPT has no configuration for; stages (``axo.perf.stages``).
"""

from __future__ import annotations

from dataclasses import MISSING, fields

from litgpt.config import Config

from axo.dryrun.step import run as dry_run
from axo.grid import Grid
from axo.perf import model
from axo.perf.command import gather_cache
from axo.perf.layer_time import Costs, optimizer_seconds
from axo.perf.machine import Machine
from axo.perf.replay import Entry, Simulation, replay
from axo.perf.run_options import OVERLAPS, PRECISIONS, RunOptions
from axo.perf.workload import Workload
from axo.train.config import TrainConfig

RECORDED = 2  # micro-batches: the first, and one that adds to its gradients


def simulate(workload: Workload, grid: Grid, machine: Machine, run: RunOptions) -> Simulation:
    """Record one step of a plan and run it against the clock of a machine.

    Raises:
        ValueError: The engine has no such model, or cannot run it so.
    """
    entries = list[Entry]()
    dry_run(training_of(workload, grid, run), entries=entries)
    computed_s = model.micro_batch(workload, grid, run, Costs(machine, workload.seq_length)).compute
    optimizer_s = optimizer_seconds(machine, grid, run, workload)
    return replay(entries, grid, machine, computed_s, optimizer_s, run.micro_batches)


def training_of(workload: Workload, grid: Grid, run: RunOptions) -> TrainConfig:
    """The training whose first micro-batches are those of a plan.

    Raises:
        ValueError: The engine has no such model.
    """
    if not workload.in_litgpt:
        raise ValueError(f"simulate: {workload.name} is no transformer that LitGPT has a configuration for")
    if run.algorithm != "axonn" or max(run.context, run.experts) > 1:
        raise ValueError("simulate: the clock knows axonn alone, with whole sequences, and all experts on all ranks")
    settings = {one.name: one.default for one in fields(Config)}
    config = {name: default for name, default in settings.items() if default is not MISSING}
    config |= {name: value for name, value in workload.config.items() if name in settings}
    pieces = min(RECORDED, run.micro_batches)
    overlap = ",".join(name for name in OVERLAPS if name in run.overlap) or "none"
    return TrainConfig(
        model="tiny", model_overrides=config | {"block_size": max(workload.seq_length, workload.longest)},
        grid=grid, seq_len=workload.seq_length, accumulate=pieces,
        batch_size=pieces * grid.data * (run.group_rows(grid) // workload.seq_length),
        precision=next(name for name, sizes in PRECISIONS.items() if sizes.items() <= run._asdict().items()),
        recompute=run.recompute != "none", recompute_keeps="products" if run.selective else "nothing",
        zero=run.zero, overlap=overlap, gather_cache=gather_cache(workload, run.cached_gathers),
        sequence_parallel=run.sequence_parallel, chunked_loss=False,
    )  # fmt: skip
