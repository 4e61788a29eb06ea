"""``python -m examples.trainer.lightning_trainer``: a GPT under Lightning's Trainer, on one device or on a grid."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from examples.nanogpt.model import GPT, GPTConfig, rows

BATCH = 8  # rows of one step, of all ranks together


class LitGPT(pl.LightningModule):
    """The model and its loss; nothing of Axo."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.model = GPT(config)
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        (ids,) = batch
        loss: torch.Tensor = self.model(ids[:, :-1], ids[:, 1:])
        self.log("loss", loss, sync_dist=True)
        mean = self.trainer.strategy.reduce(loss.detach(), reduce_op="mean")
        self.losses.append(float(mean))
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        (ids,) = batch
        self.log("val_loss", self.model(ids[:, :-1], ids[:, 1:]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)


def train(
    grid: str | None,
    out: str | Path,
    *,
    steps: int = 8,
    resume: str | Path | None = None,
    options: dict[str, Any] | None = None,
    callbacks: Sequence[pl.Callback] = (),
    logger: Any = False,
    **trainer_options: Any,
) -> tuple[list[float], float, dict[str, torch.Tensor]]:
    """Train, save ``out``/last.ckpt; the losses of the steps, the last validation's, rank 0's whole weights.

    Args:
        grid: None: Lightning's own single device.
        options: Further ones of AxoStrategy.
        callbacks, logger, trainer_options: Further ones of the Trainer.
    """
    pl.seed_everything(7, verbose=False)
    module = LitGPT(GPTConfig())
    strategy: Any = "auto"
    parts = 1
    if grid is not None:
        from axo.integrations.trainer import AxoStrategy

        strategy = AxoStrategy(grid, like_one_device=True, **(options or {}))
        parts = strategy.grid.z * strategy.grid.data
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1 if grid is None else "auto",
        max_steps=steps,
        gradient_clip_val=0.5,
        callbacks=[ModelCheckpoint(dirpath=out, save_last=True, save_top_k=0), *callbacks],
        logger=logger,
        enable_progress_bar=False,
        enable_model_summary=False,
        **trainer_options,
    )
    data = DataLoader(TensorDataset(rows(4 * BATCH)), batch_size=BATCH // parts, shuffle=False)
    check = DataLoader(TensorDataset(rows(BATCH, seed=5)), batch_size=BATCH // parts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, data, check, ckpt_path=resume)
    weights = trainer.strategy.lightning_module_state_dict()
    return (
        module.losses,
        float(trainer.callback_metrics.get("val_loss", torch.nan)),
        {name: value.clone() for name, value in weights.items()},
    )


def main() -> None:
    """Train and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--grid", help="such as 2x1x2x1; left out: one device, without Axo")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", default="runs/trainer", help="folder of last.ckpt (runs/trainer)")
    parser.add_argument("--resume", help="a checkpoint of any grid, or of one device")
    options = parser.parse_args()
    losses, validation, weights = train(options.grid, options.out, steps=options.steps, resume=options.resume)
    if not weights:
        return  # rank 0 has them, and prints
    for step, loss in enumerate(losses):
        print(f"step {step}: loss {loss:.5f}", flush=True)
    print(f"validation: {validation:.5f}")


if __name__ == "__main__":
    main()
