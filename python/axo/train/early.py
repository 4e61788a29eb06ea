"""What of a training run can be checked without torch and LitGPT's models, whose imports take seconds.

``axo train`` asks here before it imports them. ``check`` checks all of it again, on the model itself.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from axo.arrangement import arrangement_of
from axo.perf import cut, pipeline_schedule
from axo.placement import check_divides
from axo.plans.litgpt import sizes
from axo.train import data, models
from axo.train.config import KEPT, PRECISIONS, TrainConfig

if TYPE_CHECKING:
    from litgpt.config import Config


def check(config: TrainConfig) -> Config:
    """Check what a step is made of, that the grid divides the model, and the text. Returns the model's configuration.

    Raises:
        ValueError: An option is wrong; the message names it, its value and what would work.
    """
    model = check_sizes(config)
    if config.data:
        data.find_files(config.data)
    vocabulary = data.BYTE_VOCABULARY
    if config.tokenizer is not None:
        vocabulary = data.tokenizer_vocab_size(Path(config.tokenizer))
    assert model.padded_vocab_size is not None
    if vocabulary > model.padded_vocab_size:
        source = config.tokenizer or "byte-level tokens"
        raise ValueError(
            f"train: {source} has {vocabulary} tokens, more than the vocabulary of model {model.name!r} "
            f"({model.padded_vocab_size}); use --model-override padded_vocab_size=... of at least {vocabulary}"
        )
    return model


def check_sizes(config: TrainConfig) -> Config:
    """Check what a step is made of, and that the grid divides the model. Returns the model's configuration.

    Raises:
        ValueError: As for :func:`check`.
    """
    model = check_step(config)
    sizes.check_model(vars(model), config.grid, arrangement_of("train", config.algorithm).inner)
    return model


def check_step(config: TrainConfig) -> Config:
    """Check what a step is made of: numbers, precision, model, rows and stages. Returns the model's configuration.

    Raises:
        ValueError: As for :func:`check`.
    """
    _check_numbers(config)
    if config.zero not in (0, 1, 2):
        raise ValueError(f"train: zero={config.zero} is not 0, 1 or 2; for what ZeRO-3 does, give the grid's z ranks")
    if config.precision not in PRECISIONS:
        raise ValueError(f"train: precision={config.precision!r} is not one of {', '.join(PRECISIONS)}")
    arrangement = arrangement_of("train", config.algorithm)
    arrangement.check(config.grid)
    if config.recompute_keeps not in KEPT:
        raise ValueError(f"train: recompute-keeps={config.recompute_keeps!r} is not one of {', '.join(KEPT)}")
    if config.recompute_keeps != "nothing" and not config.recompute:
        raise ValueError(f"train: recompute-keeps={config.recompute_keeps} says what --recompute keeps; say that too")
    model = models.resolve(config.model, config.model_overrides)
    models.check_sequence(model, config.seq_len)
    if config.sequence_parallel:
        arrangement.only_axonn("train: sequence-parallel")
        check_divides("train", "seq-len", config.seq_len, "x", config.grid.x)
    rows = data.rank_rows(config.batch_size, config.grid, config.grid.coords(0), arrangement)
    if rows.count % config.accumulate:
        raise ValueError(
            f"train: accumulate={config.accumulate} does not divide a rank's {rows.count} rows "
            f"(batch-size={config.batch_size} over {arrangement.describe_rows(config.grid)}); "
            f"use one of {[n for n in range(1, min(rows.count, 4096) + 1) if rows.count % n == 0][:16]}"
        )
    if config.pipeline > 1:
        _check_pipeline(config, model.n_layer)
    return model


def _check_pipeline(config: TrainConfig, blocks: int) -> None:
    """Check the options of stages of a model of so many blocks.

    Raises:
        ValueError: They do not go together.
    """
    parts = arrangement_of("train", config.algorithm).row_parts(config.grid)
    rows = config.batch_size // parts // config.accumulate  # of a rank, in one piece
    pipeline_schedule.check_algorithm(config.schedule, config.algorithm)
    stages = config.pipeline * pipeline_schedule.schedule_kind(config.schedule).stages_per_rank
    cut.check(blocks, stages, config.stage_cuts)
    pipeline_schedule.check(config.schedule, config.microbatches, config.pipeline)
    if rows < config.microbatches:
        raise ValueError(
            f"train: microbatches={config.microbatches} are more than the {rows} rows of a rank in a piece"
            f" (batch-size={config.batch_size} in {parts} parts, in accumulate={config.accumulate} pieces); use at most"
            f" {rows}, or a larger batch-size"
        )


def _check_numbers(config: TrainConfig) -> None:
    for field in dataclasses.fields(config):
        option, value = field.metadata["option"], getattr(config, field.name)
        if isinstance(value, (int, float)):
            if field.name == "min_lr":
                option = option._replace(most=config.lr)
            must = option.wrong(value)
            if must:
                raise ValueError(f"train: {field.name.replace('_', '-')}={value} is out of range; it must be {must}")
    if config.goldfish_k == 1:
        raise ValueError("train: goldfish-k=1 would leave every token out; use 0 (off), or 2 and more")
