"""One run: a GPTModel of megatron-core on one rank as it is, or on a grid."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import axo
from examples.megatron.model import TOKENS, VOCABULARY, build
from examples.megatron.parallel import loss_of, megatron_state, parallelize
from examples.megatron.shims import on_cpu


@dataclass
class Run:
    """What a run gave: the mean loss of each step, and whole weights under Megatron's names."""

    losses: list[float]
    weights: dict[str, torch.Tensor]


def train(name: str, grid: str, steps: int = 20, batch: int = 8) -> Run:
    """Train the model ``name`` on texts that count; called on every rank. ``grid`` is "" for Megatron alone."""
    torch.distributed.init_process_group("axo")
    with on_cpu():
        torch.manual_seed(0)
        model = build(name)
        comms = axo.connect(grid) if grid else None
        if comms is not None:
            model = parallelize(model, comms)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        draw = torch.Generator().manual_seed(1)
        losses = []
        for _ in range(steps):
            first = torch.randint(VOCABULARY, (batch, 1), generator=draw)
            text = (first + torch.arange(TOKENS + 1)) % VOCABULARY
            mine = text if comms is None else axo.shard_batch(text, comms)
            loss = loss_of(model, mine[:, :-1], mine[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        weights = megatron_state(model)
        if comms is not None:
            mean = comms.world.all_reduce(torch.tensor(losses, dtype=torch.float64)) / comms.grid.world_size
            losses = mean.tolist()
            comms.close()
    torch.distributed.destroy_process_group()
    return Run(losses, weights)
