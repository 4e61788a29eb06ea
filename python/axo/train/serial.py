"""The same training on one rank with nothing of Axo in it: the oracle of ``--compare-serial``.

Plain ``litgpt.GPT``, ``torch.optim.AdamW``, ``torch.nn.functional.cross_entropy`` and
``torch.nn.utils.clip_grad_norm_``, with the same initial weights (same generator, same order of modules), the same
global batches and the same learning rates. It shares the configuration, the data and the schedule with the parallel
run, and no layer, loss, reduction or clipping.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from litgpt.model import GPT

from axo.train import data, models
from axo.train.config import TrainConfig
from axo.train.recipe import (
    autocast,
    build_optimizer,
    finish_model,
    learning_rate,
    scales,
    set_learning_rate,
    wanted_targets,
)


def train_serial(config: TrainConfig, batches: data.Batches) -> Iterator[float]:
    """Train on this process alone; yield the loss of each step."""
    device = torch.device(config.device)
    model = build_serial(config)
    optimizer = build_optimizer(model, config)
    scaler = torch.amp.GradScaler(device.type, enabled=scales(config))
    for step in range(config.steps):
        set_learning_rate(optimizer, learning_rate(step, config))
        pair = batches.read(step, data.Rows(0, config.batch_size))
        inputs, targets = (torch.from_numpy(part).to(device) for part in pair)
        targets = wanted_targets(inputs, targets, config)
        counted, total = int((targets != -100).sum()), 0.0
        pieces = config.accumulate
        for piece_in, piece_out in zip(inputs.tensor_split(pieces), targets.tensor_split(pieces), strict=True):
            with autocast(config):
                logits = model(piece_in)
            loss = F.cross_entropy(logits.float().flatten(0, 1), piece_out.flatten(), reduction="sum") / counted
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        if config.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        yield total


def build_serial(config: TrainConfig) -> GPT:
    """Build the whole model with the initial weights of the parallel run."""
    model_config = models.resolve(config.model, config.model_overrides)
    with torch.device(config.device):  # its generator draws the weights, as in the parallel run
        model = GPT(model_config)
    model.max_seq_length = config.seq_len
    torch.manual_seed(config.seed)
    model.apply(model._init_weights)
    finish_model(model, config)
    return model
