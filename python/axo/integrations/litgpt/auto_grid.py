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
    config = model_fields(options)
    if config is None:
        raise ValueError("litgpt: --grid auto wants a model: a name of LitGPT's, or a folder with a model_config.yaml")
    length = train.max_seq_length or config["block_size"]
    workload = readers.from_litgpt(config, seq_length=length)
    alone = os.environ.get("TORCHDYNAMO_DISABLE", "1") != "1"  # what stages cannot do, see checks._check_values
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
        recompute="none",
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


def _ranks(asked: Options, rank: Rank | None) -> int:
    if rank is not None:
        if asked.ranks not in (0, rank.world_size):
            raise ValueError(f"litgpt: --ranks {asked.ranks}, but {rank.world_size} ranks were started; leave it out")
        return rank.world_size
    if not asked.ranks:
        raise ValueError("litgpt: --grid auto does not know how many ranks to start; add --ranks N, or use torchrun")
    return asked.ranks


def model_fields(options: Any) -> dict[str, Any] | None:
    """The fields of the model's ``litgpt.Config``; None: LitGPT will list models, or the folder does not say.

    Raises:
        ValueError: LitGPT has no model of that name (it would print its list and end as if all were well), or the file
            is no configuration.
    """
    from litgpt.config import Config, name_to_config

    from axo.perf.readers import nearest

    if "checkpoint_dir" in options:
        file = folder_of(options.checkpoint_dir) / "model_config.yaml"
        try:
            return vars(Config.from_file(file)) if file.is_file() else None
        except (yaml.YAMLError, TypeError, AttributeError, UnicodeDecodeError) as error:  # no YAML, or no fields
            why = " ".join(str(error).split())
            raise ValueError(f"litgpt: {file} is no configuration of a model: {why}") from None
    name, given = options.model_name, options.model_config
    if given is not None:
        names = {field.name for field in fields(Config)}
        return vars(Config(**{key: value for key, value in vars(given).items() if key in names}))
    try:
        return None if name == "list" else vars(Config.from_name(name))
    except ValueError:
        near = nearest(name, name_to_config)
        raise ValueError(
            f"litgpt: there is no model {name!r}{near}; litgpt pretrain list names all, --model_config takes one of"
            " your own"
        ) from None
