"""What one training run is: the options of ``axo train`` as a frozen dataclass, and every check that needs no rank.

The checks run before ranks start (and again, cheaply, on each rank under torchrun), so that bad input costs one
message and no process. They build the model without storage and read the sizes of the files; they run no torch
operation on data, since the ranks are forked from this process (a parallel operation here would leave them without
their thread pool).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from axo.comm.transports import check_device
from axo.grid import Grid
from axo.plans.litgpt import plan as litgpt_plan
from axo.train import data, models

PRECISIONS = ("bf16-mixed", "32-true", "bf16-true", "16-mixed")


@dataclass(frozen=True)
class TrainConfig:
    """Options of a training run.

    Args:
        model, model_overrides: See :func:`axo.train.models.resolve`.
        grid: Ranks on each axis.
        data: Files and folders of text; empty: the Python standard library's sources.
        tokenizer: A ``tokenizer.json``; None: bytes.
        steps: Optimizer steps.
        batch_size: Rows of the global batch, the same for every grid.
        seq_len: Tokens of a row.
        accumulate: Pieces that a rank's rows are cut into, one backward each.
        lr, min_lr, warmup: Peak and last learning rate; steps of linear warm-up before the cosine.
        weight_decay, beta1, beta2: AdamW. Decay is on parameters of two dims only (weights, not biases or norms).
        clip: Largest gradient norm; 0: no clipping.
        goldfish_k, goldfish_h: Goldfish loss: leave one of k tokens out, chosen by the h before it; k = 0: off.
        seed: Chooses initial weights and the order of the data.
        precision: One of ``PRECISIONS``.
        recompute: Run each block's forward again in backward (activation checkpointing).
        zero: 1 cuts optimizer state over the data axis, 2 gradients too.
        device: ``cpu``, or ``cuda``: each rank takes the GPU that LOCAL_RANK names.
        threads: CPU threads of a rank; 0: cores divided by the ranks of this host, at least 1.
        out: Folder for the log and the plot.
        log_every: Steps between two lines of the log.
        peak_tflops: Dense peak of one rank's device; None: looked up by the GPU's name, unknown on a CPU.
        save_every: Save a checkpoint each so many steps, after the last one and on SIGTERM; 0: never.
        keep: How many checkpoints stay.
        resume: Go on from a checkpoint: ``auto`` (the newest of ``out``; from the start if it has none) or a folder.
        trace: Write a chrome trace of one step to this file, and its picture beside it.
        compare_serial: Train the same model on one rank without Axo and compare the losses.
    """

    model: str = models.TINY
    model_overrides: dict[str, Any] = field(default_factory=dict)
    grid: Grid = field(default_factory=Grid)
    data: tuple[str, ...] = ()
    tokenizer: str | None = None
    steps: int = 200
    batch_size: int = 16
    seq_len: int = 128
    accumulate: int = 1
    lr: float = 1e-3
    min_lr: float = 1e-4
    warmup: int = 20
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    goldfish_k: int = 0
    goldfish_h: int = 13
    seed: int = 0
    precision: str = "bf16-mixed"
    recompute: bool = False
    zero: int = 0
    device: str = "cpu"
    threads: int = 0
    out: str = "runs/train"
    log_every: int = 1
    peak_tflops: float | None = None
    save_every: int = 0
    keep: int = 2
    resume: str | None = None
    trace: str | None = None
    compare_serial: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return the options as plain values, for the header of a log."""
        return dataclasses.asdict(self) | {"grid": str(self.grid), "data": list(self.data)}


def check(config: TrainConfig) -> None:
    """Check everything that can be known before ranks exist.

    Raises:
        ValueError: An option is wrong; the message names it, its value and what would work.
    """
    _check_numbers(config)
    if config.zero not in (0, 1, 2):
        raise ValueError(f"train: zero={config.zero} is not 0, 1 or 2; for what ZeRO-3 does, give the grid's z ranks")
    if config.precision not in PRECISIONS:
        raise ValueError(f"train: precision={config.precision!r} is not one of {', '.join(PRECISIONS)}")
    _check_device(config)
    if Path(config.out).exists() and not Path(config.out).is_dir():
        raise ValueError(f"train: out={config.out} is a file; give a folder")
    if config.trace is not None and Path(config.trace).is_dir():
        raise ValueError(f"train: trace={config.trace} is a folder; name a file, such as {config.trace}/trace.json")
    model = models.resolve(config.model, config.model_overrides)
    models.check_sequence(model, config.seq_len)
    rows = data.rank_rows(config.batch_size, config.grid, config.grid.coords(0))
    if rows.count % config.accumulate:
        raise ValueError(
            f"train: accumulate={config.accumulate} does not divide a rank's {rows.count} rows "
            f"(batch-size={config.batch_size} over z*data={config.grid.z * config.grid.data}); "
            f"use one of {[n for n in range(1, rows.count + 1) if rows.count % n == 0]}"
        )
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
    litgpt_plan.check(models.build_empty(model), SimpleNamespace(grid=config.grid))
    files = source_files(config)
    if config.tokenizer is None:
        open_batches(config, data.ByteCorpus(files))


def _check_device(config: TrainConfig) -> None:
    place = check_device("train", config.device)
    if place.index is not None and config.grid.world_size > 1:
        raise ValueError(
            f"train: device={config.device!r} is one device, and grid {config.grid} has {config.grid.world_size} ranks;"
            f" use device={place.type!r}, which gives each rank its own"
        )


def _check_numbers(config: TrainConfig) -> None:
    bounds: dict[str, tuple[float, float]] = {
        "steps": (1, float("inf")),
        "batch_size": (1, float("inf")),
        "seq_len": (1, float("inf")),
        "accumulate": (1, float("inf")),
        "warmup": (0, float("inf")),
        "weight_decay": (0, float("inf")),
        "clip": (0, float("inf")),
        "goldfish_k": (0, float("inf")),
        "goldfish_h": (1, float("inf")),
        "seed": (0, 2**63 - 1),
        "threads": (0, 4096),
        "log_every": (1, float("inf")),
        "save_every": (0, float("inf")),
        "keep": (1, float("inf")),
        "lr": (0, float("inf")),
        "min_lr": (0, config.lr),
        "beta1": (0, 1 - 1e-9),
        "beta2": (0, 1 - 1e-9),
    }
    for name, (low, high) in bounds.items():
        value = getattr(config, name)
        if not low <= value <= high or not math.isfinite(value):  # NaN fails the first
            limit = f"at least {low:g}" if high == float("inf") else f"in [{low:g}, {high:g}]"
            raise ValueError(f"train: {name.replace('_', '-')}={value} is out of range; it must be {limit}")
    if config.goldfish_k == 1:
        raise ValueError("train: goldfish-k=1 would leave every token out; use 0 (off), or 2 and more")
    if config.peak_tflops is not None and not config.peak_tflops > 0:
        raise ValueError(f"train: peak-tflops={config.peak_tflops} must be above 0")


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
