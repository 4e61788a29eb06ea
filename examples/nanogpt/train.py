"""``python -m examples.nanogpt.train``: nanoGPT's model and loop, on one device or (under torchrun) on a grid."""

from __future__ import annotations

import argparse

import torch

import axo
from examples.nanogpt.model import GPT, GPTConfig, rows

BATCH = 8  # rows of one step, of all ranks together


def train(grid: str | None, *, steps: int = 8) -> tuple[list[float], list[int], str]:
    """Train; the losses (means over all rows), a greedy continuation, what the plan has made of each layer.

    Args:
        grid: None: one device, without Axo.
    """
    torch.manual_seed(7)
    model = GPT(GPTConfig())
    comms = axo.connect(grid) if grid else None
    if comms is not None:
        axo.parallelize(model, comms, plan="auto")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = rows(steps * BATCH)
    losses = []
    for batch in data.split(BATCH):
        mine = batch if comms is None else axo.shard_batch(batch, comms)
        loss = model(mine[:, :-1], mine[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if comms is not None:
            for line in (comms.z, comms.data):
                line.all_reduce(mean, "avg")
        losses.append(mean.item())
    text = data[:1, :8]
    with torch.no_grad():
        for _ in range(8):
            text = torch.cat((text, model(text)[:, -1:].argmax(-1)), 1)
    return losses, text[0].tolist(), str(axo.plan_report(model)) if comms is not None else ""


def main() -> None:
    """Train and print, on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--grid", help="such as 2x2x1x1; left out: one device, without Axo")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    losses, text, report = train(options.grid, steps=options.steps)
    if torch.distributed.is_initialized() and torch.distributed.get_rank():
        return
    print(report)
    for step, loss in enumerate(losses):
        print(f"step {step}: loss {loss:.5f}")
    print("greedy:", *text)


if __name__ == "__main__":
    main()
