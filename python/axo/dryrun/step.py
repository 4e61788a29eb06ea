"""One rank's training step without peers and without values: what it would send, in which order, and what it holds.

    record = run(TrainConfig(model="Llama-3-70B", grid=Grid.parse("8x1x32x16"), ...), rank=0)

The model is built on the meta device as ``axo train`` builds it, its shards become fake tensors (shapes and dtypes
without memory), and ``axo.train``'s own step runs on them through Axo's engine, over communicators that only record
(``axo.comm.recording``). The second step counts: in the first the engine learns the order of gathers, and AdamW makes
its moments.

Tokens of a mixture go to its experts evenly: the shapes of a step depend on nothing else that only values say.

Not here: times; devices other than the CPU's paths of the engine.
"""

from __future__ import annotations

import gc
import itertools
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from litgpt.model import GPT
from torch.distributed.pipelining import stage

import axo
from axo.comm.connect import Communicators
from axo.comm.recording import Issued, RecordingCommunicators, recording
from axo.dryrun.memory import (
    ACTIVATIONS,
    BACKWARD,
    GRADIENTS,
    MESSAGES,
    OPTIMIZER,
    UNCOUNTED,
    WEIGHTS,
    FollowedPool,
    FollowedTier,
    Following,
    Ledger,
    Peak,
)
from axo.dryrun.recorder import Recorder
from axo.dryrun.shapes import Faking
from axo.nn import loss
from axo.nn.experts import SpreadExperts
from axo.offload import activations
from axo.overlap.events import TracedWork
from axo.overlap.model import engines
from axo.perf.replay import Entry
from axo.sharding import cut_sequence
from axo.train import loop
from axo.train.check import check_step
from axo.train.config import TrainConfig
from axo.train.data import rank_rows
from axo.train.recipe import finish_model

MOST = 1 << 20  # ranks of a grid


@dataclass(frozen=True)
class Record:
    """What one rank did in one step.

    Attributes:
        issued: Its collectives, in order.
        peak: The fullest moment; peaks: that of each phase.
        held: Bytes of weights and of the optimizer's state, which are always there.
        most: The most bytes that there were of each kind.
        saved: Bytes that are kept for backward when it begins, buffers of gathered weights beside.
        seconds: How long the dry run took.
    """

    rank: int
    issued: list[Issued]
    peak: Peak
    peaks: dict[str, Peak]
    held: dict[str, int]
    most: dict[str, int]
    saved: int
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
        ValueError: An option is wrong (:func:`axo.train.check.check_step`).
    """
    check_step(config)
    if config.ranks > MOST:
        raise ValueError(f"dryrun: {config.grid} has {config.ranks:,} ranks; a dry run knows grids of up to {MOST:,}")
    if config.seq_len % (2 * config.context) and config.context > 1:
        raise ValueError(
            f"dryrun: seq-len={config.seq_len} does not divide into 2 x context={config.context} pieces, and a"
            " dry run knows equal ones alone"
        )
    if not config.offload.startswith(("none", "activations")) or "," in config.offload:
        raise ValueError(
            f"dryrun: offload={config.offload} is not known to a dry run beyond activations; leave the rest out"
        )
    if config.precision == "16-mixed":
        raise ValueError("dryrun: precision='16-mixed' reads gradients to scale the loss; use bf16-mixed or 32-true")
    if config.pipeline == 1 and config.cuts != "even":
        raise ValueError(f"dryrun: cuts={config.cuts} are of stages, and there is one; add --pipeline")


def run(config: TrainConfig, rank: int = 0, entries: list[Entry] | None = None) -> Record:
    """Run two steps as ``rank`` on tensors without values and return the second one's record.

    Args:
        entries: Takes all that the rank does in it, for ``axo.perf.replay``.

    Raises:
        ValueError: The model does not fit the grid, or a dry run cannot do it (:func:`check`).
    """
    check(config)
    comms = recording(config.grid, rank, config.pipeline, config.context, config.experts)
    with warnings.catch_warnings(), _two_chunks_for_all():
        warnings.filterwarnings("ignore", message=".*data pointer.*", category=UserWarning)
        return _run(config, comms, fake=True, entries=entries)


def measure(config: TrainConfig, comms: Communicators | None = None, rank: int = 0) -> Record:
    """Run two steps on tensors that have values: the same record from what is really allocated.

    Args:
        config: The run; its model has to fit into this process.
        comms: Those of real ranks, of which each calls this; None: ``rank``'s without peers. Only these record
            what is issued.

    Raises:
        ValueError: The model does not fit the grid.
    """
    alone = recording(config.grid, rank, config.pipeline, config.context, config.experts)
    return _run(config, alone if comms is None else comms, fake=False)


def _run(config: TrainConfig, comms: Communicators, fake: bool, entries: list[Entry] | None = None) -> Record:
    started = time.perf_counter()
    ledger = Ledger()
    mode = Faking(ledger) if fake else Following(ledger)
    followed = nullcontext if entries is None else Recorder(ledger, mode, entries).of
    alone = comms if isinstance(comms, RecordingCommunicators) else None
    issued = alone.issued if alone else []
    built = _build(config, comms, ledger, mode)
    with alone.messages() if alone else _no_delay(), _receiving(ledger, mode), routed_evenly(alone is not None):
        trainer = loop.Trainer(config, comms, batches=None, built=built)  # type: ignore[arg-type]
        trainer._loss_of = _watched(trainer._loss_of, ledger, "forward")  # type: ignore[method-assign]
        _step(trainer, ledger, mode)
        issued.clear()
        ledger.restart()
        with followed(trainer):
            saved = _step(trainer, ledger, mode)
        ledger.look()
        always = {kind: ledger.there(kind) for kind in (WEIGHTS, OPTIMIZER)}
        del trainer, built
    gc.collect()  # the model and its hooks refer to each other
    seconds = time.perf_counter() - started
    rank = comms.rank + comms.stage * config.grid.world_size
    return Record(rank, list(issued), ledger.peak, ledger.peaks, always, ledger.most, saved, seconds)


def _two_chunks_for_all() -> AbstractContextManager[object]:
    """Let the loss go through two of its equal chunks of rows: without values the others do nothing else."""
    plain = loss._row_chunks

    def two(tensor: torch.Tensor, start: int = 0) -> Iterator[tuple[int, torch.Tensor]]:
        return itertools.islice(plain(tensor, start), 2)  # at the second the first's temporaries are there too

    return mock.patch.object(loss, "_row_chunks", two)


@contextmanager
def routed_evenly(alone: bool) -> Iterator[None]:
    """Let token after token choose the next experts, whatever the router says; ``alone``: so do all peers."""
    call, count = SpreadExperts.__call__, SpreadExperts._counts

    def routed(mixture: SpreadExperts, rows: torch.Tensor, weights: torch.Tensor, choices: torch.Tensor) -> Any:
        even = torch.arange(choices.numel(), device=choices.device).view_as(choices)
        return call(mixture, rows, weights, even % len(mixture.experts))

    def counted(mixture: SpreadExperts, counts: torch.Tensor, rows: int) -> tuple[list[int], list[int]]:
        line, experts = mixture.comms.experts, len(mixture.experts)
        if line.size > 1:
            line.all_to_all(counts, torch.empty_like(counts))
        going = [(rows + experts - 1 - number) // experts for number in range(experts)]
        each = experts // line.size
        return going, line.size * going[each * line.rank : each * (line.rank + 1)]

    with mock.patch.multiple(SpreadExperts, __call__=routed, _counts=counted if alone else count):
        yield


def _no_delay() -> AbstractContextManager[object]:
    """Let a collective among real ranks be complete when somebody asks: how long it takes is not what is measured."""
    return mock.patch.object(TracedWork, "done", lambda pending: pending.wait() is not None)


def _receiving(ledger: Ledger, mode: Faking | Following) -> AbstractContextManager[object]:
    """Let the buffers that torch's stages receive into be followed."""
    plain = stage._make_tensor_from_meta

    def made(*args: Any) -> torch.Tensor:
        with mode, ledger.during(ledger.phase, MESSAGES):
            return plain(*args)

    return mock.patch.object(stage, "_make_tensor_from_meta", made)


def _build(
    config: TrainConfig, comms: Communicators, ledger: Ledger, mode: Faking | Following
) -> tuple[GPT, list[torch.nn.Module]]:
    """The model of this rank, and its stages, followed."""
    model: Any
    with mock.patch.object(activations, "tier_for", lambda *_: FollowedTier(ledger, mode)):
        model, modules = loop.build_stages(config, comms)
    head, table = model.lm_head, model.transformer.wte
    tied = getattr(head, "weight", None) is getattr(table, "weight", head)
    for module in modules or [model]:
        module.forward = _watched(module.forward, ledger, "forward")
    for block in model.transformer.h:
        block.forward = _watched(block.forward, ledger)
    if isinstance(mode, Faking):
        finish_model(model, config)  # torch changes the dtype of no tensor without values but on the meta device
        with mode:
            model.to_empty(device="cpu")
        if tied:
            head.weight = table.weight
    else:
        axo.init_weights(model, model._init_weights)
        finish_model(model, config)
    for tensor in (*model.parameters(), *model.buffers()):
        ledger.call(tensor.data, WEIGHTS)
    for engine in engines(model):
        engine.pool = FollowedPool(ledger, mode)
    return model, modules


def _watched(forward: Callable[..., Any], ledger: Ledger, phase: str = "") -> Callable[..., Any]:
    """A forward pass, or its recomputation, whose tensors are activations."""

    def watched(*args: Any, **options: Any) -> Any:
        with ledger.during(phase or ledger.phase, ACTIVATIONS):
            return forward(*args, **options)

    return watched


def _step(trainer: loop.Trainer, ledger: Ledger, mode: Faking | Following) -> int:
    """Run a step; the most bytes that were kept when a backward pass began."""
    config, comms = trainer.config, trainer.comms
    rows = rank_rows(config.batch_size, comms.grid, comms.coords, comms.arrangement, config.context)
    ids = cut_sequence(torch.zeros(len(rows), config.seq_len, dtype=torch.int64), comms)
    ledger.call(ids, UNCOUNTED)
    saved = 0
    plain = trainer._loss_of

    def loss_of(*args: Any) -> torch.Tensor:
        nonlocal saved
        loss = plain(*args)
        saved = max(saved, ledger.there(ACTIVATIONS))
        return loss

    trainer._loss_of = loss_of  # type: ignore[method-assign, assignment]
    following = mode if isinstance(mode, Following) else nullcontext()
    with following, ledger.during("backward", BACKWARD):
        trainer.accumulate(ids, ids)
    for parameter in trainer.model.parameters():
        if parameter.grad is not None:
            ledger.call(parameter.grad, GRADIENTS)
    with following, ledger.during("optimizer", OPTIMIZER):
        trainer.update()
    trainer._loss_of = plain  # type: ignore[method-assign]
    return saved
