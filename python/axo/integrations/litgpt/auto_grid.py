"""``axo litgpt --grid auto``: the grid that the planner predicts to be fastest for the model, the batch and the ranks.

Asked are the grids over which litgpt's batch sizes divide; memory and time of a step are the planner's (axo.perf), with
Axo's overlaps on, gathered weights kept, and blocks not recomputed, as a run of litgpt's has it. What is chosen, and
why, is printed. Where the planner cannot answer there is an error: nothing stands in for its answer.
"""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from axo.grid import Grid
from axo.integrations.litgpt.early import folder_of, module_alone
from axo.integrations.litgpt.options import Options
from axo.launch import Rank

_LOCAL_MACHINE = "machine.yaml"  # where axo profile writes


def choose(command: str, options: Any, asked: Options, rank: Rank | None) -> Grid:
    """Ask the planner, and print its answer (under torchrun on rank 0).

    Args:
        command: Of litgpt.
        options: What was made of the command's arguments, by litgpt's parser or without it.
        asked: Ranks and machine, as far as given.
        rank: Under torchrun: who this process is.

    Raises:
        ValueError: The command does not train, ranks or machine are not known, or no grid fits.
    """
    if "train" not in options:
        raise ValueError(f"litgpt: --grid auto plans training steps, and {command} takes none; name a grid")
    ranks = _ranks(asked, rank)
    machine = _machine(asked.machine)
    from axo.perf import machine as machines
    from axo.perf import planner, readers

    train = options.train
    config = model_fields(options, "--grid auto")
    length = train.max_seq_length or config["block_size"]
    workload = readers.from_litgpt(config, seq_length=length).with_checkpointing(False)
    request = planner.Request(
        workload, machines.load(machine), ranks, train.global_batch_size * workload.seq_length, gather="keep"
    )
    dividing = [g for g in Grid.all(ranks) if train.global_batch_size % (train.micro_batch_size * g.z * g.data) == 0]
    if not dividing:
        raise ValueError(
            f"litgpt: --grid auto: --train.global_batch_size={train.global_batch_size} and"
            f" micro_batch_size={train.micro_batch_size} suit no grid of {ranks} ranks"
        )
    made = planner.plan(request, dividing)
    if rank is None or rank.rank == 0:
        others = f"{len(made.ranked)} grids fit, {len(made.left_out)} do not"
        batch = len(list(Grid.all(ranks))) - len(dividing)
        others += f", {batch} do not suit the batch sizes" if batch else ""
        print(f"axo litgpt: grid {made.best.grid}, chosen for {workload.name} on {ranks} ranks of {machine} ({others})")
        print(f"  {made.why(made.best)}")
    return made.best.grid


def _ranks(asked: Options, rank: Rank | None) -> int:
    if rank is not None:
        if asked.ranks not in (0, rank.world_size):
            raise ValueError(f"litgpt: --ranks {asked.ranks}, but {rank.world_size} ranks were started; leave it out")
        return rank.world_size
    if not asked.ranks:
        raise ValueError("litgpt: --grid auto does not know how many ranks to start; add --ranks N, or use torchrun")
    return asked.ranks


def _machine(given: str) -> str:
    if given:
        return given
    if Path(_LOCAL_MACHINE).is_file():
        return _LOCAL_MACHINE
    from axo.perf import machine

    raise ValueError(
        f"litgpt: --grid auto does not know the machine; add --machine NAME ({', '.join(machine.known())}), or measure"
        f" this one: axo profile --ranks {os.cpu_count()} --out {_LOCAL_MACHINE}"
    )


def model_fields(options: Any, why: str) -> dict[str, Any]:
    """The fields of the model's ``litgpt.Config``; ``why`` names the option that asks.

    Raises:
        ValueError: The checkpoint to start from does not say.
    """
    config = module_alone("litgpt.config").Config
    if "checkpoint_dir" in options:
        folder = folder_of(options.checkpoint_dir)
        if not (folder / "model_config.yaml").is_file():
            raise ValueError(f"litgpt: {why} reads the model from {folder}, which holds no model_config.yaml")
        return vars(config.from_file(folder / "model_config.yaml"))
    given = options.model_config
    if given is None:
        return vars(config.from_name(options.model_name))
    known = {field.name for field in fields(config)}
    return vars(config(**{key: value for key, value in vars(given).items() if key in known}))
