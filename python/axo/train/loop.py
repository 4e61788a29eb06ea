"""The step loop of a parallel run.

One step, on a rank with D data ranks (z*data; Tesseract: x*z*data) and n tokens in all ranks' rows together:

    for each piece:  logits = model(inputs)                      (rows, seq_len, V/Gx)
                     loss   = sum of -log p(target) * D / n      so that the mean over data ranks is the serial mean
                     backward                                    gradients come back averaged over the D ranks
    clip the gradient norm, AdamW

With stages a piece is one step of a schedule of ``axo.pipeline``, whose micro-batches go through the stages; the last
stage has the losses.

The weight D/n makes unequal local batches exact: what counts is tokens, not ranks. One all-reduce of a few doubles a
step brings the loss of all ranks and each axis' blocked time together. Reading a loss waits for the device, so that is
left to the lines of the log. Not here: files, pictures, terminals (``log``, ``plot``, ``progress``), launching
(``launch``).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from litgpt.model import GPT

import axo
from axo import pipeline
from axo.errors import user_message
from axo.grid import AXES
from axo.train import data, models
from axo.train.config import TrainConfig
from axo.train.early import offload_of, overlap_of
from axo.train.recipe import (
    autocast,
    build_optimizer,
    finish_model,
    learning_rate,
    scales,
    set_learning_rate,
    wanted_targets,
)
from axo.train.trace import StepTrace, gather, write

_AXES = (*AXES, "world")
WARM_STEPS = 3  # before the one that is traced


@dataclass(frozen=True)
class Step:
    """What one step gave. ``blocked`` is seconds a rank spent blocked in communication, by axis, mean over ranks;
    ``stop`` is whether any rank was asked to end."""

    index: int
    loss: float
    lr: float
    grad_norm: float
    seconds: float
    tokens: int
    blocked: dict[str, float]
    stop: bool = False


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
        built: tuple[GPT, list[torch.nn.Module]] | None = None,
    ) -> None:
        self.config, self.comms, self.batches = config, comms, batches
        offload = offload_of(config)
        self.model, modules = built or build_model(config, comms)
        self.rows = data.rank_rows(config.batch_size, comms.grid, comms.coords, comms.arrangement)
        self.loss = axo.nn.CrossEntropyLoss(
            reduction="sum", comms=comms, columns=self.model.config.padded_vocab_size, inplace_backward=True
        )
        self._stages: list[pipeline.Stage] = []
        self._schedule = self._build_schedule(modules) if modules else None
        self._weight = 0.0  # of a token's loss in the piece under way
        self._total: torch.Tensor  # of this rank's token losses
        adamw = offload.adamw if offload.optimizer or offload.parameters else torch.optim.AdamW
        self.optimizer = build_optimizer(self.model, config, adamw)
        self.scaler = axo.GradScaler(enabled=scales(config), comms=comms)
        self.asked_to_stop: Callable[[], bool] = lambda: False
        self.trace: StepTrace | None = None  # of the step under way

    def run(self, start: int = 0) -> Iterator[Step]:
        """Train from step ``start``; yield each step as it ends."""
        traced = min(start + WARM_STEPS, self.config.steps - 1) if self.config.trace is not None else None
        for index in range(start, self.config.steps):
            yield self.step(index) if index != traced else self._traced_step(index)

    def _traced_step(self, index: int) -> Step:
        stages = self._stages
        with StepTrace(self.model, stages) as self.trace:
            if stages:  # ranks begin together, so that their times can be compared
                self.comms.everyone.barrier()
                step = self.trace.span("step", partial(self.step, index))
            else:
                step = self.step(index)
        spans = gather(self.trace.spans, self.comms)
        self.trace = None
        if spans is not None:
            whose = f"{self.config.schedule}, {self.comms.stages} stages" if stages else "rank 0"
            what = f"step {index} on {self.comms.grid}, {whose} · {self.config.precision}"
            try:
                write(spans, Path(self.config.trace or ""), f"{what} · {step.seconds * 1e3:.0f} ms", self.comms.stages)
            except OSError as error:  # a full disk is no reason to end a run
                print(f"axo train: the trace is not written: {user_message(error)}", file=sys.stderr)
        self.comms.everyone.barrier()  # or the others would wait for rank 0 inside the next step
        return step

    def step(self, index: int) -> Step:
        """Do one optimizer step.

        Raises:
            FloatingPointError: The loss is not finite on any rank's rows; every rank raises.
        """
        started, blocked = time.perf_counter(), self._blocked()
        config, device = self.config, self.comms.device
        lr = learning_rate(index, config)
        set_learning_rate(self.optimizer, lr)
        inputs, targets = (torch.from_numpy(part).to(device) for part in self.batches.read(index, self.rows))
        loss, counted = self.accumulate(inputs, wanted_targets(inputs, targets, config))
        norm = self.update()
        total = self._share(
            [float(loss), float(self.asked_to_stop())]
            + [now - before for now, before in zip(self._blocked(), blocked, strict=True)]
        )
        self.comms.poll()  # the host has seen the end of the step: a NaN may be rows that a peer never sent
        world = self.comms.everyone.size
        step = Step(
            index=index,
            loss=total[0] / (self.comms.grid.world_size // self.comms.data_ranks) / counted,  # ranks with the same rows
            lr=lr,
            grad_norm=float(norm),
            seconds=time.perf_counter() - started,
            tokens=config.batch_size * config.seq_len,
            blocked={axis: seconds / world for axis, seconds in zip(_AXES, total[2:], strict=True)},
            stop=total[1] > 0,
        )
        if not torch.isfinite(torch.tensor(step.loss)):
            raise FloatingPointError(
                f"train: the loss of step {index} is {step.loss} (learning rate {lr:g}, gradient norm "
                f"{step.grad_norm:g}); use a smaller lr or a longer warmup"
            )
        return step

    def accumulate(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Add the gradient of the mean loss over all ranks' tokens to ``.grad``.

        Args:
            inputs, targets: This rank's rows, ``(rows, seq_len)``; their number may differ between data ranks. A
                target of -100 counts for nothing.

        Returns:
            The sum of this rank's token losses (0 on a rank without the last stage), and the tokens of all data ranks
            that count.
        """
        grid, ranks = self.comms.grid, self.comms.data_ranks
        count = (targets != -100).sum().reshape(1)
        for axis in self.comms.arrangement.rows:
            if grid.size(axis) > 1:
                self.comms.axis(axis).all_reduce(count)
        tokens = int(count)
        self._total = torch.zeros((), dtype=torch.float64, device=targets.device)
        self._weight = ranks / tokens
        pieces = self.config.accumulate
        for piece_in, piece_out in zip(inputs.tensor_split(pieces), targets.tensor_split(pieces), strict=True):
            if self._schedule is not None:
                self._schedule.step(piece_in, target=piece_out)
                continue
            with autocast(self.config):
                logits = self.model(piece_in)
            loss = self._loss_of(logits, piece_out)
            del logits  # backward lets them go as soon as the head is done, if nobody else holds them
            loss.backward()
        return self._total, tokens

    def _loss_of(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """What backward begins with, (rows, seq_len, V/Gx), (rows, seq_len) -> a scalar."""
        loss = self.loss(logits.flatten(0, 1), targets.flatten())
        self._total += loss.detach().double()
        return self.scaler.scale(loss * self._weight)

    def _build_schedule(self, modules: list[torch.nn.Module]) -> pipeline.Schedule:
        config = self.config
        rows = self.rows.count // config.accumulate
        self._stages = pipeline.stages(
            modules,
            self.comms,
            rows=-(-rows // config.microbatches),
            tokens=config.seq_len,
            forward_context=partial(autocast, config),
        )
        return pipeline.schedule(
            config.schedule, self._stages, microbatches=config.microbatches, loss=self._loss_of, mean=False, rows=rows
        )

    def update(self) -> torch.Tensor:
        """Clip the gradients, step, and drop them; their norm before clipping."""
        self.scaler.unscale_(self.optimizer)
        clip = partial(axo.clip_grad_norm_, self.model.parameters(), self.config.clip or float("inf"))
        norm = clip() if self.trace is None else self.trace.span("clip", clip)
        update = partial(self.scaler.step, self.optimizer)  # skipped on all ranks where an fp16 gradient overflowed
        update() if self.trace is None else self.trace.span("optimizer", update)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _blocked(self) -> list[float]:
        seconds = self.comms.blocked_seconds
        return [seconds.get(axis, 0.0) for axis in _AXES]

    def _share(self, values: list[float]) -> list[float]:
        vector = torch.tensor(values, dtype=torch.float64, device=self.comms.device)
        if self.comms.everyone.size > 1:
            self.comms.everyone.all_reduce(vector)
        return vector.tolist()


def build_shards(config: TrainConfig, comms: axo.Communicators) -> GPT:
    """Build this rank's shards of the whole model on the meta device: shapes without values.

    Raises:
        ValueError: The plan cannot split this configuration on this grid.
    """
    model = models.build_empty(models.resolve(config.model, config.model_overrides))
    model.max_seq_length = config.seq_len
    options: dict[str, Any] = {"zero": config.zero, "overlap": overlap_of(config), "offload": offload_of(config)}
    options |= {"algorithm": config.algorithm, "sequence_parallel": config.sequence_parallel}
    axo.parallelize(model, comms, plan="litgpt", **options)
    return model


def build_stages(config: TrainConfig, comms: axo.Communicators) -> tuple[GPT, list[torch.nn.Module]]:
    """Build this rank's shards on the meta device, of its stages alone where there are several, and the stages.

    Raises:
        ValueError: As for :func:`build_model`, or the cuts do not give each stage a block.
    """
    model = build_shards(config, comms)
    if config.pipeline == 1:
        return model, []
    return model, pipeline.split(model, comms, config.stage_cuts, **pipeline.layout(config.schedule))


def build_model(config: TrainConfig, comms: axo.Communicators) -> tuple[GPT, list[torch.nn.Module]]:
    """Build the run's model as this rank's shards; the whole model never exists on a rank.

    Returns:
        The model, or this rank's part of it; and its stages, where there are several.

    Raises:
        ValueError: The plan cannot split this configuration on this grid.
    """
    model, modules = build_stages(config, comms)
    torch.manual_seed(config.seed)
    axo.init_weights(model, model._init_weights, offload=offload_of(config))  # LitGPT's own, layer by layer
    finish_model(model, config)
    return model, modules
