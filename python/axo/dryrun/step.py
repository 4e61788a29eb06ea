"""One rank's training step without peers and without values: what it would send, in which order, and what it holds.

    record = run(TrainConfig(model="Llama-3-70B", grid=Grid.parse("8x1x32x16"), ...), rank=0)

The model is built on the meta device as ``axo train`` builds it, its shards become fake tensors (shapes and dtypes
without memory), and ``axo.train``'s own step runs on them through Axo's engine, over communicators that only record
(``axo.comm.recording``). The second step counts: in the first the engine learns the order of gathers, and AdamW makes
its moments.

Not here: times; devices other than the CPU's paths of the engine; mixtures of experts, whose shapes depend on values.
"""

from __future__ import annotations

import gc
import itertools
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from axo.comm.recording import Issued, RecordingCommunicators, recording
from axo.dryrun.memory import ACTIVATIONS, BACKWARD, GRADIENTS, OPTIMIZER, WEIGHTS, FakePool, Peak, Tracker
from axo.nn import loss
from axo.overlap.model import engines
from axo.train import loop, models
from axo.train.config import TrainConfig
from axo.train.data import rank_rows
from axo.train.recipe import finish_model


@dataclass(frozen=True)
class Record:
    """What one rank did in one step.

    Attributes:
        issued: Its collectives, in order.
        peak: The fullest moment; peaks: that of each phase.
        held: Bytes of weights and of the optimizer's state, which are always there.
        seconds: How long the dry run took.
    """

    rank: int
    issued: list[Issued]
    peak: Peak
    peaks: dict[str, Peak]
    held: dict[str, int]
    seconds: float = field(compare=False)

    def traffic(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(operation, axis) -> calls, and bytes that this rank puts in."""
        calls: Counter[tuple[str, str]] = Counter()
        size: Counter[tuple[str, str]] = Counter()
        for one in self.issued:
            calls[one.op, one.axis] += 1
            size[one.op, one.axis] += one.elements * getattr(torch, one.dtype).itemsize
        return {key: (calls[key], size[key]) for key in calls}


def check(config: TrainConfig) -> None:
    """Refuse what a dry run cannot do.

    Raises:
        ValueError: The model has experts.
    """
    model = models.resolve(config.model, config.model_overrides)
    if model.mlp_class_name == "LLaMAMoE":
        raise ValueError(
            f"dryrun: model {config.model!r} is a mixture of experts, where the shapes of a step depend on the tokens;"
            " `axo plan` knows such models"
        )
    if config.precision == "16-mixed":
        raise ValueError("dryrun: precision='16-mixed' reads gradients to scale the loss; use bf16-mixed or 32-true")
    models.check_sequence(model, config.seq_len)


def run(config: TrainConfig, rank: int = 0) -> Record:
    """Run two steps as ``rank`` and return the second one's record.

    Raises:
        ValueError: The model does not fit the grid, or a dry run cannot do it (:func:`check`).
    """
    started = time.perf_counter()
    check(config)
    comms = recording(config.grid, rank)
    tracker = Tracker()
    with warnings.catch_warnings(), _one_chunk_for_all():
        warnings.filterwarnings("ignore", message=".*data pointer.*", category=UserWarning)
        trainer = _trainer(config, comms, tracker)
        _step(trainer, comms, tracker)
        comms.issued.clear()
        tracker.restart()
        _step(trainer, comms, tracker)
    held = {kind: tracker.now[kind] for kind in (WEIGHTS, OPTIMIZER)}
    del trainer
    gc.collect()  # the model and its hooks refer to each other
    return Record(rank, list(comms.issued), tracker.peak, tracker.peaks, held, time.perf_counter() - started)


@contextmanager
def _one_chunk_for_all() -> Iterator[None]:
    """Let the loss go through one of its equal chunks of rows: without values the others do nothing else."""
    plain = loss._row_chunks

    def first(tensor: torch.Tensor, start: int = 0) -> Iterator[tuple[int, torch.Tensor]]:
        return itertools.islice(plain(tensor, start), 1)

    loss._row_chunks = first
    try:
        yield
    finally:
        loss._row_chunks = plain


def _trainer(config: TrainConfig, comms: RecordingCommunicators, tracker: Tracker) -> loop.Trainer:
    model: Any = loop.build_shards(config, comms)
    tied = model.lm_head.weight is model.transformer.wte.weight
    model.forward = _watched(model.forward, tracker, "forward")
    for block in model.transformer.h:
        block.forward = _watched(block.forward, tracker)
    finish_model(model, config)
    with tracker:
        model.to_empty(device="cpu")
    if tied:
        model.lm_head.weight = model.transformer.wte.weight
    for engine in engines(model):
        engine.pool = FakePool(tracker)
    return loop.Trainer(config, comms, batches=None, model=model)  # type: ignore[arg-type]


def _watched(forward: Callable[..., Any], tracker: Tracker, phase: str = "") -> Callable[..., Any]:
    """A forward pass, or its recomputation, whose tensors are activations."""

    def watched(*args: Any, **options: Any) -> Any:
        with tracker.during(phase or tracker.phase, ACTIVATIONS):
            return forward(*args, **options)

    return watched


def _step(trainer: loop.Trainer, comms: RecordingCommunicators, tracker: Tracker) -> None:
    config = trainer.config
    rows = rank_rows(config.batch_size, comms.grid, comms.coords, comms.arrangement).count
    ids = torch.zeros(rows, config.seq_len, dtype=torch.int64)
    with tracker.during("backward", BACKWARD):
        trainer.accumulate(ids, ids)
    for parameter in trainer.model.parameters():
        tracker.call(parameter.grad, GRADIENTS)
    with tracker.during("optimizer", OPTIMIZER):
        trainer.update()
