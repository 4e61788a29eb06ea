"""``python -m examples.loop.train``: a loop of one's own with what torchtitan's has, on one device or on a grid.

Activation checkpointing, bf16 autocast, accumulation, clipping, warm-up, asynchronous checkpoints, resume.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint as recompute

import axo
from axo.comm.connect import Communicators
from examples.nanogpt.model import GPT, Block, GPTConfig, rows


@dataclass(frozen=True)
class Job:
    """What to train, and how.

    Attributes:
        batch: Rows of one step, of all ranks and micro-batches together.
        micro_batches: In which a rank takes its rows.
        steps, stop_at: The schedule's length, and where this start ends (None: there).
    """

    model: GPTConfig = field(default_factory=GPTConfig)
    batch: int = 16
    micro_batches: int = 2
    steps: int = 8
    stop_at: int | None = None
    lr: float = 2e-3
    warmup: int = 2
    clip: float = 1.0
    recompute: bool = True
    bf16: bool = False


class RecomputedBlock(Block):
    """A block whose activations are computed again in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, n_embd), twice."""
        result: torch.Tensor = recompute(super().forward, x, use_reentrant=False)
        return result


def build(job: Job, comms: Communicators | None) -> torch.nn.Module:
    """The model with its first weights, the same on any grid."""
    torch.manual_seed(7)
    model = GPT(job.model)
    if job.recompute:
        for block in model.h:
            block.__class__ = RecomputedBlock
    return model if comms is None else axo.parallelize(model, comms, plan="auto")


def train(
    grid: str | None, out: str | Path, job: Job | None = None, *, resume: bool = False
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train, save to ``out`` at the end; the losses (means over all rows) and the whole weights.

    Args:
        grid: None: one device, without Axo's layers.
        resume: Go on from the newest checkpoint in ``out``, which any grid may have written.
    """
    job = job or Job()
    comms = axo.connect(grid) if grid else None
    model = build(job, comms)
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / job.warmup))
    first = 0
    if resume:
        loaded = axo.checkpoint.load(out, model, optimizer, comms=comms)
        assert loaded.extra is not None
        schedule.load_state_dict(loaded.extra["schedule"])
        first = loaded.step
    data = rows(job.steps * job.batch).split(job.batch)
    last = job.steps if job.stop_at is None else job.stop_at
    losses = []
    for step in range(first, last):
        mine = data[step] if comms is None else axo.shard_batch(data[step], comms)
        mean = torch.zeros(())
        for index, rows_of in enumerate(mine.chunk(job.micro_batches)):
            waits = comms is not None and index + 1 < job.micro_batches
            with axo.no_sync(model) if waits else nullcontext():
                with torch.autocast("cpu", torch.bfloat16, enabled=job.bf16):
                    loss = model(rows_of[:, :-1], rows_of[:, 1:]) / job.micro_batches
                loss.backward()
            mean += loss.detach().float()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        for line in () if comms is None else (comms.z, comms.data):
            line.all_reduce(mean, "avg")
        losses.append(mean.item())
    saved = axo.checkpoint.save(
        out, model, optimizer, step=last, extra={"schedule": schedule.state_dict()}, async_=True, comms=comms
    )
    saved.wait()
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def main() -> None:
    """Train and print, on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--grid", help="such as 2x1x2x1; left out: one device, without Axo")
    parser.add_argument("--out", default="runs/loop", help="folder of checkpoints (runs/loop)")
    parser.add_argument("--stop-at", type=int, help="end after this step")
    parser.add_argument("--bf16", action="store_true", help="compute in bf16")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    options = parser.parse_args()
    job = Job(stop_at=options.stop_at, bf16=options.bf16)
    losses, _ = train(options.grid, options.out, job, resume=options.resume)
    if torch.distributed.is_initialized() and torch.distributed.get_rank():
        return
    for step, loss in enumerate(losses):
        print(f"loss {step}: {loss:.5f}")


if __name__ == "__main__":
    main()
