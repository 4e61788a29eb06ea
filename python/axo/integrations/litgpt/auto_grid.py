"""``axo litgpt --grid auto``: the grid and the stages that the planner predicts to be fastest.

Asked are the grids over which litgpt's batch sizes divide; memory and time of a step are the planner's (axo.perf), with
Axo's overlaps on, gathered weights kept, and blocks not recomputed, as a run of litgpt's has it. Stages are filled by
one micro-batch of litgpt's. What is chosen, and why, is printed. Where the planner cannot answer there is an error:
nothing stands in for its answer.
"""

from __future__ import annotations

import os
from dataclasses import replace

from axo.grid import Grid
from axo.integrations.litgpt.options import Options
from axo.integrations.litgpt.parsing import Parsed
from axo.launch import Rank


def choose(parsed: Parsed, rank: Rank | None) -> Options:
    """Ask the planner, and print its answer (under torchrun on rank 0).

    Args:
        parsed: The command's arguments: ranks, machine and stages, as far as given.
        rank: Under torchrun: who this process is.

    Returns:
        Axo's options with a grid, stages, their schedule, cuts and micro-batches.

    Raises:
        ValueError: The command does not train, ranks or machine are not known, or no grid fits.
    """
    asked, train = parsed.own, parsed.values.get("train")
    if train is None:
        raise ValueError(f"litgpt: --grid auto plans training steps, and {parsed.command} takes none; name a grid")
    ranks = asked.ranks or (0 if rank is None else rank.world_size)
    if not ranks:
        raise ValueError("litgpt: --grid auto does not know how many ranks to start; add --ranks N, or use torchrun")
    if rank is not None and ranks != rank.world_size:
        raise ValueError(f"litgpt: --ranks {ranks}, but {rank.world_size} ranks were started; leave it out")
    if asked.offload not in ("none", "optimizer"):
        raise ValueError(
            f"litgpt: --grid auto plans an offload of the optimizer alone; with --offload {asked.offload} name a grid"
        )
    if parsed.model is None:
        raise ValueError("litgpt: --grid auto wants a model: a name of LitGPT's, or a folder with a model_config.yaml")
    from axo.perf import grid_choice, planner, readers
    from axo.perf import machine as machines

    try:
        machine = asked.machine or machines.measured_here()
        on = machines.load(machine)
    except ValueError as error:
        raise ValueError(f"litgpt: --grid auto: {error}") from None
    length, batch = train.max_seq_length or parsed.model.block_size, train.global_batch_size
    workload = readers.from_litgpt(vars(parsed.model), seq_length=length)
    unstaged = os.environ.get("TORCHDYNAMO_DISABLE", "1") != "1"  # stages are not compiled, see checks.py
    request = planner.Request(
        workload,
        on,
        ranks,
        batch * workload.seq_length,
        gather="keep",
        recompute="none",
        offload=asked.offload == "optimizer",
        pipeline=(asked.pipeline,) if asked.pipeline else (1,) if unstaged else grid_choice.stage_counts(ranks),
        schedules=grid_choice.schedules_for(asked.schedule, asked.pipeline, asked.cuts),
    )

    def pieces(grid: Grid) -> int:
        rows = train.micro_batch_size * grid.z * grid.data
        return 0 if batch % rows else batch // rows

    grids = [grid for stages in request.pipeline if ranks % stages == 0 for grid in Grid.all(ranks // stages)]
    if grids and not any(map(pieces, grids)):
        raise ValueError(
            f"litgpt: --grid auto: --train.global_batch_size={batch} and micro_batch_size={train.micro_batch_size} suit"
            f" no grid of {ranks} ranks"
        )
    choice = grid_choice.choose(request, pieces, asked.microbatches)
    best, stages = choice.best, choice.best.stages
    chosen = replace(asked, grid=best.grid, pipeline=1, schedule="", cuts="", microbatches=0)
    if stages is not None:
        chosen = replace(
            chosen,
            pipeline=stages.ranks,
            schedule=stages.schedule,
            cuts=asked.cuts or ",".join(map(str, stages.bounds[1:-1])),
            microbatches=best.run.micro_batches,
        )
    if rank is None or rank.rank == 0:
        print(f"axo litgpt: {choice.tell(machine)}\n  the same by hand: {chosen.by_hand}")
    return chosen
