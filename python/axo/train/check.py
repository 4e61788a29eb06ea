"""Every check of a training run that needs no rank, and the run's text.

The checks run before ranks start (and again, cheaply, on each rank under torchrun), so that bad input costs one
message and no process; those that need no torch come first (``early``). They build the model without storage and read
the sizes of the files; they run no torch operation on data, since the ranks are forked from this process (a parallel
operation here would leave them without their thread pool).
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from axo import checkpoint
from axo.arrangement import arrangement_of
from axo.checkpoint.folder import kind_of
from axo.comm.transports import check_device
from axo.plans.litgpt import plan as litgpt_plan
from axo.train import data, early, models
from axo.train.config import TrainConfig
from axo.train.log import LOG_NAME
from axo.train.plot import PLOT_NAME
from axo.train.recipe import offload_of
from axo.train.resume import CHECKPOINTS, saves


def check(config: TrainConfig) -> None:
    """Check everything that can be known before ranks exist.

    Raises:
        ValueError: An option is wrong; the message names it, its value and what would work.
    """
    model = early.check(config)
    _check_device(config)
    _check_files(config)
    _check_offload(config, model.n_layer)
    arrangement = arrangement_of("train", config.algorithm)
    litgpt_plan.check(models.build_empty(model), config.grid, arrangement, config.sequence_parallel)
    files = source_files(config)
    if config.tokenizer is None:
        open_batches(config, data.ByteCorpus(files))


def _check_device(config: TrainConfig) -> None:
    place = check_device("train", config.device)
    if place.index is not None and config.ranks > 1:
        raise ValueError(
            f"train: device={config.device!r} is one device, and grid {config.grid} has {config.ranks} ranks;"
            f" use device={place.type!r}, which gives each rank its own"
        )


def _check_offload(config: TrainConfig, blocks: int) -> None:
    try:
        offload = offload_of(config)
    except ValueError as error:
        raise ValueError(f"train: {error}") from None
    if isinstance(offload.activations, int) and offload.activations > blocks:
        raise ValueError(
            f"train: offload={config.offload!r} asks for {offload.activations} blocks, and the model has {blocks}; use"
            " activations for all"
        )
    if config.offload_dir is None:
        return
    if config.offload == "none":
        raise ValueError(f"train: offload-dir={config.offload_dir} without offload; say what goes there: --offload ...")
    if torch.device(config.device).type != "cpu":
        raise ValueError(
            f"train: offload-dir={config.offload_dir} is of CPU ranks; on device={config.device!r} the lower tier is"
            " pinned memory of the host: leave it out"
        )
    check_writable("offload-dir", Path(config.offload_dir) / "file")


def _check_files(config: TrainConfig) -> None:
    """Check that what a run writes can be written, before it has trained for hours."""
    if not config.out.strip():
        raise ValueError("train: out is empty; name the folder of the run")
    out = Path(config.out)
    for folder in (out, out / CHECKPOINTS) if saves(config) else (out,):
        check_writable("out", folder / "file")
        if folder.is_symlink() and not folder.exists():
            raise ValueError(f"train: out={folder} {kind_of(folder)}; give a folder")
    written = {"out": out / PLOT_NAME, "out's log": out / LOG_NAME}
    if config.resume is not None:
        if not config.resume.strip():
            raise ValueError("train: resume is empty; use auto, or name a checkpoint")
        if config.overwrite:
            raise ValueError("train: overwrite starts again, and resume continues; use one of the two")
    else:
        older = checkpoint.latest(out / CHECKPOINTS)
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
        check_writable("trace", trace)
        written["trace's picture"] = trace.with_suffix(".png")
    for option, path in written.items():
        if path.exists() and not path.is_file():
            raise ValueError(f"train: {option}: {path} {kind_of(path)}, and a file of that name is to be written")
        if path.exists() and not os.access(path, os.W_OK):
            raise ValueError(f"train: {option}: no permission to write {path}")


def check_writable(option: str, path: Path) -> None:
    """Check that the file ``path`` can be made: its folder is there, or can be made.

    Raises:
        ValueError: It cannot; names the option and what is in the way.
    """
    wrong = f"train: {option}={str(path.parent if option in ('out', 'offload-dir') else path)[:120]} cannot be written"
    folder = path.parent.absolute()
    try:
        path.exists()  # raises for a name that is too long
        while not folder.exists():
            folder = folder.parent
    except OSError as error:
        raise ValueError(f"{wrong}: {error.strerror}") from None
    if not folder.is_dir():
        raise ValueError(f"{wrong}: {folder} is not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{wrong}: no permission to write in {folder}")


def source_files(config: TrainConfig) -> list[Path]:
    """The text files of a run."""
    return data.find_files(config.data) if config.data else data.default_text()


def open_corpus(config: TrainConfig) -> data.Corpus:
    """Open the text as tokens; with a tokenizer, encode it into the run's folder first (once)."""
    files = source_files(config)
    if config.tokenizer is None:
        return data.ByteCorpus(files)
    return data.encode(files, Path(config.tokenizer), Path(config.out) / "tokens")


def open_batches(config: TrainConfig, corpus: data.Corpus) -> data.Batches:
    """The run's batches."""
    return data.Batches(corpus, seq_len=config.seq_len, batch_size=config.batch_size, seed=config.seed)
