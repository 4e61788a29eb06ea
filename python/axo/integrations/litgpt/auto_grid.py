"""``axo litgpt --grid auto``: the grid and the stages that the planner predicts to be fastest (``axo.train.auto``).

Asked are the grids over which litgpt's batch sizes divide, for what a run of litgpt's has in common with one of ``axo
train``: Axo's overlaps, gathered weights kept, blocks not recomputed. Stages are filled by one micro-batch of litgpt's.
What is chosen, and why, is printed.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from axo.grid import Grid
from axo.integrations.litgpt.options import Options
from axo.integrations.litgpt.parsing import Parsed
from axo.launch import Rank
from axo.train.auto import chosen
from axo.train.config import TrainConfig

_OWNER = "litgpt: --grid auto"


def choose(parsed: Parsed, rank: Rank | None) -> Options:
    """Complete Axo's options by the planner's answer, and print it (under torchrun on rank 0).

    Raises:
        ValueError: The command does not train, ranks or machine are not known, or no grid fits.
    """
    asked, train = parsed.own, parsed.values.get("train")
    if train is None:
        raise ValueError(f"{_OWNER} plans training steps, and {parsed.command} takes none; name a grid")
    if parsed.model is None:
        raise ValueError(f"{_OWNER} wants a model: a name of LitGPT's, or a folder with a model_config.yaml")
    stages = ("pipeline", "schedule", "cuts", "microbatches")
    given: dict[str, Any] = {name: value for name in stages if (value := getattr(asked, name))}
    length, batch = train.max_seq_length or parsed.model.block_size, train.global_batch_size
    compiled = os.environ.get("TORCHDYNAMO_DISABLE", "1") != "1"  # no stages (checks.py), no loss in chunks
    config = TrainConfig(
        batch_size=batch, seq_len=length, offload=asked.offload, algorithm=asked.algorithm,
        chunked_loss=asked.vocab_loss and not compiled and parsed.values.get("precision") != "16-mixed", **given,
    )  # fmt: skip

    def pieces(grid: Grid) -> int:
        rows = train.micro_batch_size * grid.z * grid.data
        return 0 if batch % rows else batch // rows

    who: dict[str, Any] = {"owner": _OWNER, "model": parsed.model, "pieces": pieces, "stages": not compiled}
    config, why = chosen(config, rank, asked.ranks, asked.machine, given, **who)
    options = replace(asked, grid=config.grid, pipeline=1, schedule="", cuts="", microbatches=0)
    if config.pipeline > 1:
        options = replace(options, **{name: getattr(config, name) for name in stages})
    if rank is None or rank.rank == 0:
        print(f"axo litgpt: {why}\n  the same by hand: {options.by_hand}")
    return options
