"""One run: the digits, the serial loop, and the same loop on a grid.

What a grid changes is between the lines of ``train``: the model is parallelized, each rank takes its rows of a batch,
and the reported numbers are summed over ranks. The loss, the optimizer and the learning rates are plain torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import axo
from examples.vit.model import ViT

DIGITS = Path(__file__).parent / "digits.csv.gz"
TEST_IMAGES = 352  # of 1,797; a multiple of 8 ranks


@dataclass(frozen=True)
class Setting:
    """Where a run trains: ``grid`` of ranks by ``algorithm``, or one rank without Axo (``grid`` is "")."""

    name: str
    grid: str = ""
    algorithm: str = "axonn"

    @property
    def ranks(self) -> int:
        return axo.Grid.parse(self.grid).world_size if self.grid else 1


SETTINGS = (
    Setting("one rank, without Axo"),
    Setting("Tesseract [2,2,1]", "2x2x1x1", "tesseract"),
    Setting("Tesseract [2,2,2]", "2x2x2x1", "tesseract"),
    Setting("AxoNN 2x2x2x1", "2x2x2x1"),
)


@dataclass(frozen=True)
class Options:
    """Of a run: the same in all settings."""

    epochs: int = 15
    batch: int = 160
    lr: float = 0.005
    weight_decay: float = 0.1
    width: int = 64
    depth: int = 2


@dataclass(frozen=True)
class Epoch:
    """What one pass over the training images gave: mean loss, shares in [0, 1] of images that were told right."""

    loss: float
    train_accuracy: float
    test_accuracy: float


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Images (1797, 8, 8) in [-1, 1] and what they show; shuffled, the same in every run."""
    table = torch.from_numpy(np.loadtxt(DIGITS, delimiter=",", dtype=np.int64))  # 64 pixels of 0 to 16, and the digit
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]
    return table[:, :64].view(-1, 8, 8).float() / 8 - 1, table[:, 64]


def train(setting: Setting, seed: int, options: Options) -> list[Epoch]:
    """Train a ViT; called on every rank of the setting."""
    images, labels = digits()
    torch.manual_seed(seed)
    model = ViT(width=options.width, depth=options.depth)
    comms = axo.connect(setting.grid) if setting.grid else None
    if comms is not None:
        model = axo.parallelize(model, comms, plan="auto", algorithm=setting.algorithm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=options.weight_decay)
    count = len(labels) - TEST_IMAGES
    steps = count // options.batch
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, options.epochs * steps))
    order = torch.Generator().manual_seed(seed)
    history = []
    for _ in range(options.epochs):
        model.train()
        shuffled = torch.randperm(count, generator=order) + TEST_IMAGES
        seen, loss_sum, right = 0, 0.0, 0
        for rows in shuffled[: steps * options.batch].split(options.batch):
            mine = rows if comms is None else axo.shard_batch(rows, comms)
            logits = model(images[mine])
            loss = F.cross_entropy(logits, labels[mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            seen, loss_sum = seen + len(mine), loss_sum + len(mine) * loss.item()
            right += int((logits.argmax(-1) == labels[mine]).sum())
        model.eval()
        test = torch.arange(TEST_IMAGES)
        mine = test if comms is None else axo.shard_batch(test, comms)
        with torch.no_grad():
            told = int((model(images[mine]).argmax(-1) == labels[mine]).sum())
        sums = torch.tensor([seen, loss_sum, right, len(mine), told], dtype=torch.float64)
        if comms is not None:
            comms.world.all_reduce(sums)  # ranks that work on the same rows add the same to all of them
        images_seen, loss_sum, right, tested, told = sums.tolist()
        history.append(Epoch(loss_sum / images_seen, right / images_seen, told / tested))
    if comms is not None:
        comms.close()
    return history


def _rate(step: int, steps: int) -> float:
    """Share of the peak learning rate: a short linear warm-up, then a cosine to zero."""
    warm = max(1, steps // 20)
    return (step + 1) / warm if step < warm else 0.5 + 0.5 * math.cos(math.pi * (step - warm) / (steps - warm))
