"""The step of a parallel run: what a reader copies from.

One step, on a rank with D data ranks (z*data; Tesseract: x*z*data) and n tokens in all ranks' rows together:

    for each piece:  logits = model(inputs)                      (rows, its tokens, V/Gx)
                     loss   = sum of -log p(target) * D / n      so that the mean over data ranks is the serial mean
                     backward                                    gradients come back averaged over the D ranks
    clip the gradient norm, AdamW or Muon

With stages a piece is one step of a schedule of ``axo.pipeline``, whose micro-batches go through the stages; the last
stage has the losses. The weight D/n makes unequal local batches exact: what counts is tokens, not ranks. One all-reduce
of a few doubles a step brings the loss of all ranks and each axis' blocked time together.

Not here: the run around it (``runner``), what a step is recorded as (``trace``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from litgpt.model import GPT
from torch import nn

import axo
from axo import pipeline
from axo.comm.memory import most_held
from axo.grid import AXES
from axo.nn.experts import busiest, spread_experts
from axo.nn.linear_loss import without_head
from axo.perf import cut
from axo.placement import context_ranges
from axo.sharding import cut_sequence
from axo.train import data, models, recipe
from axo.train.check import offload_of, overlap_of
from axo.train.config import TrainConfig

_AXES = (*AXES, "world")


@dataclass(frozen=True)
class Step:
    """What one step gave. ``blocked`` is seconds a rank spent blocked in communication, by axis, and ``memory`` the
    most bytes that it has held so far, means over ranks; ``by_rank`` is those seconds of each rank, after those in
    which it was not blocked: (ranks, 1 + axes); ``stop`` is whether any rank was asked to end; ``balance`` is that of
    experts on several ranks (``axo.nn.experts.busiest``)."""

    index: int
    loss: float
    lr: float
    grad_norm: float
    seconds: float
    tokens: int
    blocked: dict[str, float]
    memory: float
    by_rank: torch.Tensor
    stop: bool = False
    balance: float | None = None


class Trainer:
    """A model on its grid, its optimizer and its data.

    Args:
        config: The run.
        comms: Communicators of the run's grid.
        batches: Its data.
        built: This rank's shards, and its stages where there are several; None: they are built here.
    """

    def __init__(
        self,
        config: TrainConfig,
        comms: axo.Communicators,
        batches: data.Batches,
        built: tuple[GPT, list[nn.Module]] | None = None,
    ) -> None:
        self.config, self.comms, self.batches = config, comms, batches
        self.model, self._modules = built or build_model(config, comms)
        self.rows = data.rank_rows(config.batch_size, comms.grid, comms.coords, comms.arrangement, config.context)
        self._over_rows = [comms.axis(axis) for axis in comms.arrangement.rows if comms.grid.size(axis) > 1]
        self._data_ranks = comms.data_ranks
        self._peers = comms.grid.world_size // comms.data_ranks  # ranks with the same tokens
        self.loss = axo.nn.CrossEntropyLoss(
            reduction="sum", comms=comms, columns=self.model.config.padded_vocab_size, inplace_backward=True
        )
        self._softcap = self.model.config.final_logit_softcapping
        self._spread = spread_experts(self.model)
        self.stages: list[pipeline.Stage] = []
        self._schedule = self._build_schedule(self._modules) if self._modules else None
        self._weight = 0.0  # of a token's loss in the piece under way
        self._total: torch.Tensor  # of this rank's token losses
        self.optimizer = recipe.build_optimizer(self.model, config, offload_of(config))
        self.scaler = axo.GradScaler(enabled=config.precision == "16-mixed", comms=comms)
        self.asked_to_stop: Callable[[], bool] = lambda: False

    def step(self, index: int) -> Step:
        """Do one optimizer step.

        Raises:
            FloatingPointError: The loss is not finite on any rank's rows; every rank raises.
        """
        started, config, comms = time.perf_counter(), self.config, self.comms
        blocked_before = comms.blocked_seconds
        lr = recipe.set_learning_rate(self.optimizer, index, config)
        inputs, targets = (torch.from_numpy(part).to(comms.device) for part in self.batches.read(index, self.rows))
        targets = recipe.wanted_targets(inputs, targets, config)
        mine, tokens = self.accumulate(*(cut_sequence(part, comms) for part in (inputs, targets)))
        norm = float(self.update())
        seconds = time.perf_counter() - started
        blocked = {axis: now - blocked_before.get(axis, 0.0) for axis, now in comms.blocked_seconds.items()}
        of_rank = [float(mine), self.asked_to_stop(), most_held(comms.device), seconds - sum(blocked.values())]
        every = torch.zeros(comms.everyone.size, len(of_rank) + len(_AXES), dtype=torch.float64)
        of_rank += [blocked[axis] for axis in _AXES]
        every[comms.everyone.rank] = torch.tensor(of_rank, dtype=torch.float64)
        rows = self._rows_of_experts()
        shared = torch.cat([every.flatten().to(comms.device), rows.flatten()])
        comms.everyone.all_reduce(shared)
        every = shared[: every.numel()].view_as(every).cpu()
        total, stop, memory = every[:, :3].sum(0).tolist()
        of_experts = shared[every.numel() :].view_as(rows)
        balance = busiest(of_experts, comms.experts.size) if self._spread else None
        comms.poll()  # the host has seen the end of the step: a NaN may be rows that a peer never sent
        loss = total / self._peers / tokens  # each of them has counted
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"train: the loss of step {index} is {loss} (learning rate {lr:g}, gradient norm {norm:g}); use a"
                " smaller lr or a longer warmup"
            )
        means = dict(zip(_AXES, every[:, 4:].mean(0).tolist(), strict=True))
        seconds, tokens, memory = time.perf_counter() - started, config.batch_size * config.seq_len, memory / len(every)
        return Step(index, loss, lr, norm, seconds, tokens, means, memory, every[:, 3:], stop > 0, balance)

    def _rows_of_experts(self) -> torch.Tensor:
        """Rows that this rank has sent to each expert, in the place of its group: (mixtures, groups, E)."""
        groups, ranks = self.comms.data_ranks, self.comms.experts.size
        experts = len(self._spread[0].experts) if self._spread else 0
        rows = torch.zeros(len(self._spread), groups // ranks, experts, dtype=torch.float64, device=self.comms.device)
        for number, mixture in enumerate(self._spread):
            rows[number, self.comms.data_rank // ranks] = torch.tensor(mixture.take_counts(), dtype=torch.float64)
        return rows

    def accumulate(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Add the gradient of the mean loss over all ranks' tokens to ``.grad``.

        Args:
            inputs, targets: This rank's rows and tokens, ``(rows, tokens)``; their number may differ between data
                ranks. A target of -100 counts for nothing.

        Returns:
            The sum of this rank's token losses (0 on a rank without the last stage), and the tokens of all data ranks
            that count.
        """
        count = (targets != -100).sum().reshape(1)
        for line in self._over_rows:
            line.all_reduce(count)
        tokens = int(count)
        self._total = torch.zeros((), dtype=torch.float64, device=targets.device)
        self._weight = self._data_ranks / tokens
        pieces = self.config.accumulate
        for piece_in, piece_out in zip(inputs.tensor_split(pieces), targets.tensor_split(pieces), strict=True):
            if self._schedule is not None:
                self._schedule.step(piece_in, target=piece_out)
                continue
            with self._forward_context(piece_out):
                outputs = self.model(piece_in)
            loss = self._loss_of(outputs, piece_out)
            del outputs  # backward lets logits go as soon as the head is done, if nobody else holds them
            loss.backward()
        return self._total, tokens

    @contextmanager
    def _forward_context(self, targets: torch.Tensor | None = None) -> Iterator[None]:
        """Of a forward pass. In chunks a model without stages gives the loss: so the head is gathered with the rest."""
        loss = None if targets is None else partial(self._loss_of_head, targets)
        head = without_head(self.model, *self._modules, loss=loss) if self.config.chunks_loss else nullcontext()
        with recipe.autocast(self.config), head:
            yield

    def _loss_of_head(self, targets: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        head: Any = self.model.lm_head
        return axo.nn.linear_cross_entropy(rows, head, targets, reduction="sum", softcap=self._softcap)

    def _loss_of(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """What backward begins with: logits (rows, seq_len, V/Gx), in chunks what the head takes (rows, seq_len, h/Gy)
        or the loss, and targets (rows, seq_len) -> a scalar."""
        if self.config.chunks_loss:
            with recipe.autocast(self.config):
                loss = self._loss_of_head(targets, outputs) if outputs.dim() else outputs
        else:
            loss = self.loss(outputs.flatten(0, 1), targets.flatten())
        self._total += loss.detach().double()
        return self.scaler.scale(loss * self._weight)

    def update(self) -> torch.Tensor:
        """Clip the gradients, step, and drop them; their norm before clipping."""
        self.scaler.unscale_(self.optimizer)
        norm = self.clip()
        self.scaler.step(self.optimizer)  # skipped on all ranks where an fp16 gradient overflowed
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def clip(self) -> torch.Tensor:
        """Clip the gradients; their norm before."""
        return axo.clip_grad_norm_(self.model.parameters(), self.config.clip or math.inf)

    def _build_schedule(self, modules: list[nn.Module]) -> pipeline.Schedule:
        config, rows = self.config, len(self.rows) // self.config.accumulate
        most = -(-rows // config.microbatches)
        ranges = context_ranges(config.seq_len, config.context, self.comms.context.rank)
        tokens = sum(high - low for low, high in ranges)
        self.stages = pipeline.stages(
            modules, self.comms, rows=most, tokens=tokens, forward_context=self._forward_context
        )
        return pipeline.schedule(
            config.schedule, self.stages, microbatches=config.microbatches, loss=self._loss_of, mean=False, rows=rows
        )


def build_stages(config: TrainConfig, comms: axo.Communicators) -> tuple[GPT, list[nn.Module]]:
    """Build this rank's shards on the meta device (shapes without values), of its stages alone where there are
    several, and the stages.

    Raises:
        ValueError: The plan cannot split this model on this grid, or the cuts do not give each stage a block.
    """
    model = models.build_empty(models.resolve(config.model, config.model_overrides))
    model.max_seq_length = config.seq_len
    axo.parallelize(
        model, comms, plan="litgpt", algorithm=config.algorithm, sequence_parallel=config.sequence_parallel,
        zero=config.zero, overlap=overlap_of(config), offload=offload_of(config),
        context=config.context_kind if config.context > 1 else None,
    )  # fmt: skip
    if config.pipeline == 1:
        return model, []
    return model, pipeline.split(model, comms, cut.read(config.cuts), **pipeline.layout(config.schedule))


def build_model(config: TrainConfig, comms: axo.Communicators) -> tuple[GPT, list[nn.Module]]:
    """The same with the run's initial weights; the whole model never exists on a rank.

    Raises:
        ValueError: As for :func:`build_stages`.
    """
    model, modules = build_stages(config, comms)
    torch.manual_seed(config.seed)
    axo.init_weights(model, model._init_weights, offload=offload_of(config))  # LitGPT's own, layer by layer
    recipe.finish_model(model, config)
    return model, modules
