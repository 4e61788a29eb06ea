"""Every check of a training run that needs no rank: bad input costs one message and no process.

The checks run before ranks start (under torchrun on each rank). The model is asked itself, built without storage. No
torch operation runs on data, since the ranks are forked from this process (a parallel operation here would leave them
without their thread pool).
"""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path

import torch
from litgpt.config import Config
from torch import nn

from axo import settings
from axo.arrangement import Arrangement, arrangement_of
from axo.checkpoint import folder
from axo.comm import flight
from axo.comm.device_choice import check_device
from axo.grid import check_experts
from axo.nn.context import check_kind
from axo.offload.options import Offload
from axo.overlap.options import Overlap
from axo.perf import cut, pipeline_schedule
from axo.placement import check_divides
from axo.plans import context, experts
from axo.plans.litgpt import plan
from axo.train import data, models
from axo.train.config import CHECKPOINTS, KEPT, LOG_NAME, OPTIMIZERS, PLOT_NAME, PRECISIONS, TrainConfig

_NOT_WITH_EXPERTS = {
    "pipeline": 1, "context": 1, "offload": "none", "elastic": None, "sequence_parallel": False, "optimizer": "adamw",
}  # fmt: skip


def check(config: TrainConfig, one_machine: bool = False) -> data.Batches:
    """Check all that can be known before ranks exist; then open the text, which with a tokenizer is encoded once.

    Args:
        config: The options.
        one_machine: Whether this machine, which must have what it takes, holds all ranks.

    Raises:
        ValueError: An option is wrong; the message names it, its value and what would work.
    """
    settings.check()
    flight.folder()
    model, empty = check_grid(config)
    kind, index = check_device("train", config.device)
    if index is not None and config.ranks > 1:
        raise ValueError(
            f"train: device={config.device!r} is one device, and grid {config.grid} has {config.ranks} ranks;"
            f" use device={kind!r}, which gives each rank its own"
        )
    _check_files(config)
    _check_offload(config, model.n_layer, kind)
    if one_machine:
        check_machine(config, empty)
    vocabulary = data.BYTE_VOCABULARY if config.tokenizer is None else data.tokenizer_vocab_size(Path(config.tokenizer))
    assert model.padded_vocab_size is not None
    if vocabulary > model.padded_vocab_size:
        raise ValueError(
            f"train: {config.tokenizer or 'byte-level tokens'} has {vocabulary} tokens, more than the vocabulary of"
            f" model {model.name!r} ({model.padded_vocab_size}); use --model-override padded_vocab_size=... of at least"
            f" {vocabulary}"
        )
    return open_batches(config)


def check_grid(config: TrainConfig) -> tuple[Config, nn.Module]:
    """Check that a step can be done on the grid, and the model lie there. Returns its configuration, and it, empty.

    Raises:
        ValueError: As for :func:`check`.
    """
    model = check_step(config)
    empty = models.build_empty(model)
    plan.check(empty, config.grid, arrangement_of("train", config.algorithm), config.sequence_parallel)
    if config.context > 1:
        context.check(empty, config.context_kind, config.context, config.grid.x)
    if config.experts > 1:
        experts.check(empty, config.grid, config.experts, {"zero": config.zero})
    return model, empty


def check_step(config: TrainConfig) -> Config:
    """Check what a step is made of: numbers, precision, model, rows and stages. Returns the model's configuration.

    Raises:
        ValueError: As for :func:`check`.
    """
    _check_values(config)
    arrangement = arrangement_of("train", config.algorithm)
    arrangement.check(config.grid)
    model = models.resolve(config.model, config.model_overrides)
    if config.seq_len > model.block_size:
        raise ValueError(
            f"model {model.name!r}: seq-len={config.seq_len} is not in [1, block_size={model.block_size}]; "
            f"use a shorter sequence, or --model-override block_size={config.seq_len}"
        )
    if config.chunked_loss:
        arrangement.only_axonn("train: chunked-loss")
        if config.sequence_parallel or config.precision == "16-mixed":
            other = "sequence-parallel" if config.sequence_parallel else "precision=16-mixed, whose scale comes after,"
            raise ValueError(f"train: chunked-loss with {other} is not supported; leave one of them out")
    if config.sequence_parallel:
        arrangement.only_axonn("train: sequence-parallel")
        check_divides("train", "seq-len", config.seq_len, "x", config.grid.x)
    _check_context(config, arrangement)
    _check_experts(config, arrangement)
    rows = len(data.rank_rows(config.batch_size, config.grid, config.grid.coords(0), arrangement, config.context))
    if rows % config.accumulate:
        raise ValueError(
            f"train: accumulate={config.accumulate} does not divide a rank's {rows} rows "
            f"(batch-size={config.batch_size} over {arrangement.describe_rows(config.grid)}); "
            f"use one of {[n for n in range(1, min(rows, 4096) + 1) if rows % n == 0][:16]}"
        )
    if config.pipeline > 1:
        _check_stages(config, model.n_layer, rows // config.accumulate)
    overlap_of(config)
    return model


def _check_values(config: TrainConfig) -> None:
    """Check each option by itself: the bounds of numbers, and words."""
    for field in dataclasses.fields(config):
        bounds, value, name = field.metadata["bounds"], getattr(config, field.name), field.name.replace("_", "-")
        if name == "min-lr" and math.isfinite(config.lr):
            bounds = bounds._replace(words=f"in [0, {config.lr:g}]", most=config.lr)
        if bounds is not None and value is not None and not bounds.least <= value <= bounds.most:
            raise ValueError(f"train: {name}={value} is out of range; it must be {bounds.words}")
    for name, value, words in (
        ("precision", config.precision, PRECISIONS),
        ("recompute-keeps", config.recompute_keeps, KEPT),
        ("optimizer", config.optimizer, OPTIMIZERS),
    ):
        if value not in words:
            raise ValueError(f"train: {name}={value!r} is not one of {', '.join(words)}")
    if config.hosts is not None and config.elastic is None:
        raise ValueError(f"train: hosts={config.hosts} is of --elastic MIN:MAX; say that too, or use torchrun or srun")
    if config.recompute_keeps != "nothing" and not config.recompute:
        raise ValueError(f"train: recompute-keeps={config.recompute_keeps} says what --recompute keeps; say that too")
    if config.optimizer == "muon" and config.precision == "16-mixed" and config.compare_serial:
        raise ValueError(
            "train: compare-serial with optimizer=muon and precision=16-mixed compares with two optimizers, each of"
            " which skips steps by itself; use bf16-mixed or 32-true"
        )
    if config.goldfish_k == 1:
        raise ValueError("train: goldfish-k=1 would leave every token out; use 0 (off), or 2 and more")


def _check_context(config: TrainConfig, arrangement: Arrangement) -> None:
    check_kind("train", config.context_kind)
    if config.context == 1:
        return
    arrangement.only_axonn("train: context")
    if config.grid.z % config.context:
        fitting = [count for count in range(1, config.grid.z + 1) if config.grid.z % count == 0]
        raise ValueError(f"train: context={config.context} does not divide z={config.grid.z}; use one of {fitting}")
    if config.sequence_parallel:
        raise ValueError(f"train: sequence-parallel with context={config.context} is not supported; leave one out")


def _check_experts(config: TrainConfig, arrangement: Arrangement) -> None:
    check_experts("train", config.grid, config.experts)
    if config.experts == 1:
        return
    arrangement.only_axonn("train: experts")
    for other, off in _NOT_WITH_EXPERTS.items():
        if (value := getattr(config, other)) != off:
            name = other.replace("_", "-")
            raise ValueError(
                f"train: {name}={value} with experts={config.experts} is not supported; leave one of the two out"
            )


def _check_stages(config: TrainConfig, blocks: int, rows: int) -> None:
    """Check the options of stages: of a model of so many blocks, with so many rows of a rank in a piece."""
    pipeline_schedule.check_algorithm(config.schedule, config.algorithm)
    stages = config.pipeline * pipeline_schedule.schedule_kind(config.schedule).stages_per_rank
    try:
        cut.check(blocks, stages, cut.read(config.cuts))
    except ValueError as error:
        raise ValueError(f"train: {error}") from None
    pipeline_schedule.check(config.schedule, config.microbatches, config.pipeline)
    if rows < config.microbatches:
        parts = config.batch_size // config.accumulate // rows
        raise ValueError(
            f"train: microbatches={config.microbatches} are more than the {rows} rows of a rank in a piece"
            f" (batch-size={config.batch_size} in {parts} parts, in accumulate={config.accumulate} pieces); use at most"
            f" {rows}, or a larger batch-size"
        )


def check_machine(config: TrainConfig, model: nn.Module) -> None:
    """Check that this machine has a device for each rank of the run; CPU ranks: memory for the whole ``model``.

    Raises:
        ValueError: It has not.
    """
    if check_device("train", config.device)[0] != "cpu":
        count, hosts = torch.accelerator.device_count(), (config.hosts or "").count(",") + 1
        if config.ranks > count * hosts:
            raise ValueError(
                f"train: grid {config.shown} has {config.ranks} ranks and this machine {count} of device"
                f" {config.device!r}, one for a rank; use a smaller grid, or torchrun on more machines"
            )
        return
    parameters = sum(parameter.numel() for parameter in model.parameters())
    # Weights, gradients and AdamW's two moments, once over all ranks: what is replicated, and activations, come on top.
    # With --elastic two copies in memory and the one that ranks write from.
    copies = 0 if config.elastic is None else 3 * copy_bytes(config, model)
    needed = 4 * parameters * _element(config) + copies
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        beside = f", with the copies of elastic={config.elastic}," if copies else ""
        raise ValueError(
            f"train: model {config.model!r} has {parameters:,} parameters, whose weights, gradients and optimizer state"
            f"{beside} take at least {needed / 2**30:,.1f} GiB, and this machine has {memory / 2**30:,.1f} GiB; use a"
            " smaller model, or torchrun on more machines"
        )


def copy_bytes(config: TrainConfig, model: nn.Module) -> int:
    """Bytes of a checkpoint of ``model``: its parameters and AdamW's two moments of each."""
    return 3 * _element(config) * sum(parameter.numel() for parameter in model.parameters())


def _element(config: TrainConfig) -> int:
    return 2 if config.precision == "bf16-true" else 4


def _check_offload(config: TrainConfig, blocks: int, device: str) -> None:
    offload, place = offload_of(config), config.offload_dir
    if offload.optimizer and config.optimizer != "adamw":
        raise ValueError(
            f"train: offload={config.offload!r} puts AdamW's state on the lower tier, and optimizer={config.optimizer};"
            " use adamw, or offload parameters and activations"
        )
    activations = offload.activations
    if isinstance(activations, int) and activations > blocks:
        raise ValueError(
            f"train: offload={config.offload!r} asks for {activations} blocks, and the model has {blocks}; use"
            " activations for all"
        )
    if place is not None and config.offload == "none":
        raise ValueError(f"train: offload-dir={place} without offload; say what goes there: --offload ...")
    if place is not None and device != "cpu":
        raise ValueError(
            f"train: offload-dir={place} is of CPU ranks; on device={config.device!r} the lower tier is"
            " pinned memory of the host: leave it out"
        )
    if place is not None:
        folder.check_writable("train: offload-dir", Path(place))


def _check_files(config: TrainConfig) -> None:
    """Check that what a run writes can be written, before it has trained for hours."""
    if not config.out.strip():
        raise ValueError("train: out is empty; name the folder of the run")
    out, trace = Path(config.out), None if config.trace is None else Path(config.trace)
    for each in (out, out / CHECKPOINTS) if config.saves else (out,):
        folder.check_writable("train: out", each)
    if config.resume is not None:
        if not config.resume.strip():
            raise ValueError("train: resume is empty; use auto, or name a checkpoint")
        if config.overwrite:
            raise ValueError("train: overwrite starts again, and resume continues; use one of the two")
        if config.resume != "auto":
            folder.check_local(config.resume)
            folder.resolve(os.path.abspath(config.resume))
    elif not config.overwrite and (older := folder.latest(out / CHECKPOINTS)) is not None:
        raise ValueError(
            f"train: out={out} holds checkpoints of an earlier run, the newest {older.name}; go on from it with"
            " --resume, give another --out, or say --overwrite to remove them"
        )
    written = {"out": out / PLOT_NAME, "out's log": out / LOG_NAME}
    if trace is not None:
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
        if path.name == LOG_NAME and (path.is_symlink() or (path.exists() and path.stat().st_nlink > 1)):
            raise ValueError(
                f"train: {option}: {path} is a name of a file elsewhere, and is not written into; remove it"
            )
        if path.exists() and not os.access(path, os.W_OK):
            raise ValueError(f"train: {option}: no permission to write {path}")


def offload_of(config: TrainConfig) -> Offload:
    """What of the run lies on the lower tier; on CPU ranks it is files in the run's folder, unless another is named.

    Raises:
        ValueError: The options are wrong.
    """
    on_cpu = check_device("train", config.device)[0] == "cpu"
    try:
        return Offload.parse(config.offload, config.offload_dir or (config.out if on_cpu else None))
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


def open_batches(config: TrainConfig) -> data.Batches:
    """The run's batches; with a tokenizer the text is encoded into the run's folder first (once)."""
    files = data.find_files(config.data) if config.data else data.default_text()
    if config.tokenizer is None:
        corpus = data.Corpus(files)
    else:
        corpus = data.encode(files, Path(config.tokenizer), Path(config.out) / "tokens")
    return data.Batches(corpus, seq_len=config.seq_len, batch_size=config.batch_size, seed=config.seed)
