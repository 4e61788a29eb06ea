"""``axo litgpt --grid auto``: the grid and the stages that the planner predicts to be fastest.

Asked are the grids over which litgpt's batch sizes divide; memory and time of a step are the planner's (axo.perf), with
Axo's overlaps on, gathered weights kept, and blocks not recomputed, as a run of litgpt's has it. Stages are filled by
one micro-batch of litgpt's. What is chosen, and why, is printed. Where the planner cannot answer there is an error:
nothing stands in for its answer.
"""

from __future__ import annotations

import os
from dataclasses import fields, replace
from typing import Any

import yaml

from axo.grid import Grid
from axo.integrations.litgpt.options import Options
from axo.integrations.litgpt.parsing import folder_of
from axo.launch import Rank


def choose(command: str, options: Any, asked: Options, rank: Rank | None) -> Options:
    """Ask the planner, and print its answer (under torchrun on rank 0).

    Args:
        command: Of litgpt.
        options: What was made of the command's arguments, by litgpt's parser or without it.
        asked: Ranks, machine and stages, as far as given.
        rank: Under torchrun: who this process is.

    Returns:
        ``asked`` with a grid, stages, their schedule, cuts and micro-batches.

    Raises:
        ValueError: The command does not train, ranks or machine are not known, or no grid fits.
    """
    if "train" not in options:
        raise ValueError(f"litgpt: --grid auto plans training steps, and {command} takes none; name a grid")
    ranks = _ranks(asked, rank)
    from axo.perf import machine as machines
    from axo.perf import planner, readers
    from axo.perf.grid_choice import choose as fastest
    from axo.perf.grid_choice import schedules_for, stage_counts

    try:
        machine = asked.machine or machines.measured_here()
        on = machines.load(machine)
    except ValueError as error:
        raise ValueError(f"litgpt: --grid auto: {error}") from None
    train = options.train
    config = model_fields(options, "--grid auto")
    length = train.max_seq_length or config["block_size"]
    workload = readers.from_litgpt(config, seq_length=length).with_checkpointing(False)
    alone = os.environ.get("TORCHDYNAMO_DISABLE", "1") != "1"  # what stages cannot do, see checks._check_stages
    if asked.offload not in ("none", "optimizer"):
        raise ValueError(
            f"litgpt: --grid auto plans an offload of the optimizer alone; with --offload {asked.offload} name a grid"
        )
    request = planner.Request(
        workload,
        on,
        ranks,
        train.global_batch_size * workload.seq_length,
        gather="keep",
        offload=asked.offload == "optimizer",
        pipeline=(asked.pipeline,) if asked.pipeline else (1,) if alone else stage_counts(ranks),
        schedules=schedules_for(asked.schedule, asked.pipeline, asked.cuts),
    )

    def pieces(grid: Grid) -> int:
        rows = train.micro_batch_size * grid.z * grid.data
        return 0 if train.global_batch_size % rows else train.global_batch_size // rows

    grids = [grid for stages in request.pipeline if ranks % stages == 0 for grid in Grid.all(ranks // stages)]
    if grids and not any(map(pieces, grids)):
        raise ValueError(
            f"litgpt: --grid auto: --train.global_batch_size={train.global_batch_size} and"
            f" micro_batch_size={train.micro_batch_size} suit no grid of {ranks} ranks"
        )
    choice = fastest(request, pieces, asked.microbatches)
    best, stages = choice.best, choice.best.stages
    found = replace(asked, grid=best.grid, pipeline=1, schedule="", cuts="", microbatches=0)
    if stages is not None:
        found = replace(
            found,
            pipeline=stages.ranks,
            schedule=stages.schedule,
            cuts=asked.cuts or ",".join(map(str, stages.bounds[1:-1])),
            microbatches=best.run.micro_batches,
        )
    if rank is None or rank.rank == 0:
        print(f"axo litgpt: {choice.tell(machine)}\n  the same by hand: {found.by_hand}")
    return found


def _ranks(asked: Options, rank: Rank | None) -> int:
    if rank is not None:
        if asked.ranks not in (0, rank.world_size):
            raise ValueError(f"litgpt: --ranks {asked.ranks}, but {rank.world_size} ranks were started; leave it out")
        return rank.world_size
    if not asked.ranks:
        raise ValueError("litgpt: --grid auto does not know how many ranks to start; add --ranks N, or use torchrun")
    return asked.ranks


def model_fields(options: Any, why: str) -> dict[str, Any]:
    """The fields of the model's ``litgpt.Config``; ``why`` names the option that asks.

    Raises:
        ValueError: The checkpoint to start from does not say.
    """
    from litgpt.config import Config as config

    if "checkpoint_dir" in options:
        folder = folder_of(options.checkpoint_dir)
        if not (folder / "model_config.yaml").is_file():
            raise ValueError(f"litgpt: {why} reads the model from {folder}, which holds no model_config.yaml")
        try:
            return vars(config.from_file(folder / "model_config.yaml"))
        except (yaml.YAMLError, TypeError, AttributeError, UnicodeDecodeError) as error:  # no YAML, or no fields
            why = " ".join(str(error).split())
            raise ValueError(f"litgpt: {folder / 'model_config.yaml'} is no configuration of a model: {why}") from None
    given = options.model_config
    if given is None:
        return vars(config.from_name(options.model_name))
    known = {field.name for field in fields(config)}
    return vars(config(**{key: value for key, value in vars(given).items() if key in known}))
