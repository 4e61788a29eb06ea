"""What of a training run can be checked without torch and LitGPT's models, whose imports take seconds.

``axo train`` asks here before it imports them. What only the model itself can tell is in ``check``.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from axo import settings
from axo.arrangement import arrangement_of
from axo.checkpoint import folder
from axo.comm import flight
from axo.comm.device_choice import check_device
from axo.offload.options import Offload
from axo.overlap.options import Overlap
from axo.perf import cut, pipeline_schedule, readers
from axo.placement import check_divides
from axo.plans.litgpt import sizes
from axo.train import data, models
from axo.train.config import CHECKPOINTS, KEPT, LOG_NAME, PLOT_NAME, PRECISIONS, TrainConfig

if TYPE_CHECKING:
    from litgpt.config import Config


class Checked(NamedTuple):
    """What the checks found: the model's configuration, and what opens the text (and encodes it first, if need be)."""

    model: Config
    batches: Callable[[], data.Batches]


def check(config: TrainConfig) -> Checked:
    """Check all that needs no model: the options, that the grid divides the model's sizes, files and text.

    Raises:
        ValueError: An option is wrong; the message names it, its value and what would work.
    """
    settings.check()
    flight.folder()
    model = check_sizes(config)
    _check_device(config)
    _check_files(config)
    _check_offload(config, model.n_layer)
    files = source_files(config)
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
    if config.tokenizer is not None:
        return Checked(model, lambda: open_batches(config, open_corpus(config, files)))
    batches = open_batches(config, open_corpus(config, files))
    return Checked(model, lambda: batches)


def check_here(config: TrainConfig) -> Checked:
    """:func:`check`, and that this machine, whose CPUs hold all ranks, has memory for the model.

    Raises:
        ValueError: As for :func:`check`, or it has not.
    """
    found = check(config)
    if check_device("train", config.device)[0] == "cpu":
        _check_memory(config, found.model)
    return found


def _check_memory(config: TrainConfig, model: Config) -> None:
    try:
        parameters = readers.from_litgpt(vars(model)).parameters
    except ValueError:  # latent attention, which readers do not know: counted on the model itself
        parameters = models.shape_of(model).parameters
    # Weights, gradients and AdamW's two moments, once over all ranks: what is replicated, and activations, come on top.
    needed = 4 * parameters * (2 if config.precision == "bf16-true" else 4)
    room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > room:
        raise ValueError(
            f"train: model {config.model!r} has {parameters:,} parameters, whose weights, gradients and optimizer state"
            f" take at least {needed / 2**30:,.1f} GiB, and this machine has {room / 2**30:,.1f} GiB; use a smaller"
            " model, or torchrun on more machines"
        )


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
    overlap_of(config)
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


def _check_device(config: TrainConfig) -> None:
    kind, index = check_device("train", config.device)
    if index is not None and config.ranks > 1:
        raise ValueError(
            f"train: device={config.device!r} is one device, and grid {config.grid} has {config.ranks} ranks;"
            f" use device={kind!r}, which gives each rank its own"
        )


def _check_offload(config: TrainConfig, blocks: int) -> None:
    offload = offload_of(config)
    if isinstance(offload.activations, int) and offload.activations > blocks:
        raise ValueError(
            f"train: offload={config.offload!r} asks for {offload.activations} blocks, and the model has {blocks}; use"
            " activations for all"
        )
    if config.offload_dir is None:
        return
    if config.offload == "none":
        raise ValueError(f"train: offload-dir={config.offload_dir} without offload; say what goes there: --offload ...")
    if check_device("train", config.device)[0] != "cpu":
        raise ValueError(
            f"train: offload-dir={config.offload_dir} is of CPU ranks; on device={config.device!r} the lower tier is"
            " pinned memory of the host: leave it out"
        )
    folder.check_writable("train: offload-dir", Path(config.offload_dir))


def _check_files(config: TrainConfig) -> None:
    """Check that what a run writes can be written, before it has trained for hours."""
    if not config.out.strip():
        raise ValueError("train: out is empty; name the folder of the run")
    out = Path(config.out)
    for each in (out, out / CHECKPOINTS) if config.saves else (out,):
        folder.check_writable("train: out", each)
    written = {"out": out / PLOT_NAME, "out's log": out / LOG_NAME}
    if config.resume is not None:
        if not config.resume.strip():
            raise ValueError("train: resume is empty; use auto, or name a checkpoint")
        if config.overwrite:
            raise ValueError("train: overwrite starts again, and resume continues; use one of the two")
        if config.resume != "auto":
            folder.check_local(config.resume)
            folder.resolve(os.path.abspath(config.resume))
    else:
        older = folder.latest(out / CHECKPOINTS)
        if older is not None and not config.overwrite:
            raise ValueError(
                f"train: out={out} holds checkpoints of an earlier run, the newest {older.name}; go on from it with"
                " --resume, give another --out, or say --overwrite to remove them"
            )
    if config.trace is not None:
        trace = Path(config.trace)
        if trace.is_dir():
            raise ValueError(f"train: trace={trace} is a folder; name a file, such as {trace}/trace.json")
        if trace.exists() and not trace.is_file():
            raise ValueError(f"train: trace={trace} is not a file; name one, such as trace.json")
        if trace.suffix == ".png":
            raise ValueError(f"train: trace={trace} ends in .png, the name of its picture; use {trace.stem}.json")
        place = folder.nearest("train: trace", trace, trace)
        if not os.access(place, os.W_OK | os.X_OK):
            raise ValueError(f"train: trace={trace} cannot be written: no permission to write in {place}")
        written["trace's picture"] = trace.with_suffix(".png")
    for option, path in written.items():
        if path.exists() and not path.is_file():
            raise ValueError(
                f"train: {option}: {path} {folder.kind_of(path)}, and a file of that name is to be written"
            )
        if path.exists() and not os.access(path, os.W_OK):
            raise ValueError(f"train: {option}: no permission to write {path}")


def offload_of(config: TrainConfig) -> Offload:
    """What of the run lies on the lower tier; on CPU ranks it is files in the run's folder, unless another is named.

    Raises:
        ValueError: The options are wrong.
    """
    place = config.offload_dir
    if place is None and check_device("train", config.device)[0] == "cpu":
        place = config.out
    try:
        return Offload.parse(config.offload, place)
    except ValueError as error:
        raise ValueError(f"train: {error}") from None


def overlap_of(config: TrainConfig) -> Overlap:
    """The run's overlaps and cache of gathered weights.

    Raises:
        ValueError: One of them is not known.
    """
    wanted = {part.strip() for part in config.overlap.split(",")} - {"", "none"}
    if unknown := wanted - {"oar", "ors", "oag"}:
        raise ValueError(f"train: overlap {', '.join(sorted(unknown))} is not known; use oar, ors, oag or none")
    cache = int(config.gather_cache) if config.gather_cache.isdecimal() else config.gather_cache
    return Overlap("oar" in wanted, "ors" in wanted, "oag" in wanted, cache)


def source_files(config: TrainConfig) -> list[Path]:
    """The text files of a run."""
    return data.find_files(config.data) if config.data else data.default_text()


def open_corpus(config: TrainConfig, files: Sequence[Path] | None = None) -> data.Corpus:
    """Open the text as tokens; with a tokenizer, encode it into the run's folder first (once).

    Args:
        config: The options.
        files: Of the text, where they are known.
    """
    if files is None:
        files = source_files(config)
    if config.tokenizer is None:
        return data.ByteCorpus(files)
    return data.encode(files, Path(config.tokenizer), Path(config.out) / "tokens")


def open_batches(config: TrainConfig, corpus: data.Corpus) -> data.Batches:
    """The run's batches."""
    return data.Batches(corpus, seq_len=config.seq_len, batch_size=config.batch_size, seed=config.seed)
