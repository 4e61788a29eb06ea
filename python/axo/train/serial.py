"""The same training on one rank with nothing of Axo in it, and how far from it a run is: ``--compare-serial``.

The oracle is plain ``litgpt.GPT``, ``torch.optim``'s AdamW or Muon, ``torch.nn.functional.cross_entropy`` and
``torch.nn.utils.clip_grad_norm_``, with the same initial weights (same generator, same order of modules), the same
global batches and the same learning rates. It shares the configuration, the data and the recipe with the parallel run,
and no layer, loss, reduction or clipping.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from litgpt.model import GPT

from axo.train import data, models, recipe
from axo.train.config import TrainConfig

# fp32: the two runs add in another order. `tiny` at lr 1e-3 then differs by 1e-6 over 120 steps. Chaos grows with the
# rate: at lr 2e-3 two serial runs that only accumulate differently are 4e-4 apart after 120 steps, beyond this limit.
FP32_LIMIT = 1e-4
# bf16 keeps 8 bits of a product's result; the two runs round at other places, so losses differ by about that much.
BF16_RELATIVE_LIMIT = 1e-2


def train_serial(config: TrainConfig, batches: data.Batches) -> Iterator[float]:
    """Train on this process alone; yield the loss of each step."""
    device = torch.device(config.device)
    model = build_serial(config)
    optimizers = build_optimizers(model, config)
    scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "16-mixed")
    for step in range(config.steps):
        for optimizer in optimizers:
            recipe.set_learning_rate(optimizer, step, config)
        rows = range(config.batch_size)
        inputs, targets = (torch.from_numpy(part).to(device) for part in batches.read(step, rows))
        targets = recipe.wanted_targets(inputs, targets, config)
        tokens, total = int((targets != -100).sum()), 0.0
        pieces = (part.tensor_split(config.accumulate) for part in (inputs, targets))
        for piece_in, piece_out in zip(*pieces, strict=True):
            with recipe.autocast(config):
                logits = model(piece_in)
            loss = F.cross_entropy(logits.float().flatten(0, 1), piece_out.flatten(), reduction="sum") / tokens
            scaler.scale(loss).backward()
            total += loss.item()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        if config.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad(set_to_none=True)
        scaler.update()
        yield total


def build_optimizers(model: GPT, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Build torch's own: AdamW, or Muon with the same options and AdamW for what is no matrix of a hidden layer."""
    together = recipe.build_optimizer(model, config)
    if config.optimizer == "adamw":
        return [together]
    names = ("params", "lr", "weight_decay", "adjust_lr_fn", "betas")
    groups = [{name: group[name] for name in names if name in group} for group in together.param_groups]
    return [
        torch.optim.Muon([group for group in groups if "betas" not in group]),
        torch.optim.AdamW([group for group in groups if "betas" in group]),
    ]


def build_serial(config: TrainConfig) -> GPT:
    """Build the whole model with the initial weights of the parallel run."""
    with torch.device(config.device):  # its generator draws the weights, as in the parallel run
        model = GPT(models.resolve(config.model, config.model_overrides))
    model.max_seq_length = config.seq_len
    torch.manual_seed(config.seed)
    model.apply(model._init_weights)
    recipe.finish_model(model, config)
    return model


@dataclass(frozen=True)
class Parity:
    """The largest difference of two loss curves against its limit: absolute in fp32, relative to serial in bf16."""

    difference: float
    steps: int
    limit: float
    relative: bool
    precision: str

    @property
    def ok(self) -> bool:
        return self.difference <= self.limit  # NaN is not ok

    def __str__(self) -> str:
        kind, by = (f" ({self.precision}, relative)", " / serial") if self.relative else ("", "")
        limit = f"{self.limit:.0e}".replace("e-0", "e-")
        return (
            f"parity{kind}: max |loss - serial|{by} = {self.difference:.1e} "
            f"over {self.steps} steps (limit {limit}): {'ok' if self.ok else 'FAILED'}"
        )


def compare(losses: Sequence[float], serial: Sequence[float], precision: str) -> Parity:
    """Compare two curves.

    Raises:
        ValueError: The curves are empty or differ in length.
    """
    if not losses or len(losses) != len(serial):
        raise ValueError(f"parity: {len(losses)} and {len(serial)} losses cannot be compared")
    relative = precision != "32-true"
    differences = [abs(a - b) / (abs(b) if relative else 1.0) for a, b in zip(losses, serial, strict=True)]
    worst = math.nan if any(map(math.isnan, differences)) else max(differences)
    return Parity(worst, len(losses), BF16_RELATIVE_LIMIT if relative else FP32_LIMIT, relative, precision)
