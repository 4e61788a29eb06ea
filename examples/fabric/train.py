"""``python -m examples.fabric.train``: a Fabric program, on one device or on a grid."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

import axo
from examples.nanogpt.model import GPT, GPTConfig, rows

BATCH = 8  # rows of one step, of all ranks together


def train(
    grid: str | None, out: str | Path, *, steps: int = 8, resume: str | Path | None = None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train, save ``out``/model.ckpt; the losses (means over all rows) and, on rank 0, the whole weights.

    Args:
        grid: None: Fabric's single device.
    """
    strategy: Any = axo.AxoStrategy(grid, plan="auto", like_one_device=True) if grid else "auto"
    fabric = L.Fabric(accelerator="cpu", strategy=strategy, devices="auto" if grid else 1)
    fabric.launch()
    fabric.seed_everything(7, verbose=False)
    model = fabric.setup(GPT(GPTConfig()))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))
    parts = strategy.row_parts if grid else 1
    data = fabric.setup_dataloaders(DataLoader(TensorDataset(rows(steps * BATCH)), batch_size=BATCH // parts))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if resume is not None:
        fabric.load(resume, state)
    losses = []
    for step, (batch,) in enumerate(data):
        if step < state["step"]:
            continue
        loss = model(batch[:, :-1], batch[:, 1:])
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(fabric.all_reduce(loss.detach().clone(), reduce_op="mean")))
    fabric.save(Path(out) / "model.ckpt", state | {"step": steps})
    weights = fabric.strategy.get_module_state_dict(getattr(model, "_forward_module", model))
    return losses, {name: value.clone() for name, value in weights.items()}


def main() -> None:
    """Train and print, on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--grid", help="such as 2x1x2x1; left out: one device, without Axo")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", default="runs/fabric", help="folder of model.ckpt (runs/fabric)")
    parser.add_argument("--resume", help="a checkpoint of any grid, or of one device")
    options = parser.parse_args()
    losses, weights = train(options.grid, options.out, steps=options.steps, resume=options.resume)
    for step, loss in enumerate(losses if weights else ()):
        print(f"step {step}: loss {loss:.5f}")


if __name__ == "__main__":
    main()
