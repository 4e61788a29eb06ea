"""What buffers stay allocated between steps.

Oracle: what a pass needs at once, by arithmetic; the losses of a model with another cache, to the bit.
"""

from __future__ import annotations

from sys import getrefcount

import torch
from torch import nn

import axo
from tests.launcher import run_ranks

WIDTH, LAYERS, RANKS = 256, 4, 2


def train(cache: str) -> tuple[list[float], list[int]]:
    """Losses, and idle bytes after each step, whose gradients are gone by then."""
    comms = axo.connect("1x1x2x1")
    torch.manual_seed(0)
    serial = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    overlap = axo.Overlap(gather_cache=cache)
    model = axo.parallelize(serial, comms, plan="auto", overlap=overlap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(comms.rank))
    losses, idle = [], []
    for _ in range(5):
        loss = model(rows).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss
        pools = [engine.pool._entries for engine in axo.overlap.engines(model)]
        buffers = [(size, each) for pool in pools for size, entries in pool.items() for each in entries]
        idle.append(sum(size * (getrefcount(each.memory) == 2) for size, each in buffers))
    return losses, idle


def test_idle_buffers_are_those_of_one_pass() -> None:
    block = WIDTH * WIDTH * 4
    losses, idle = run_ranks(train, RANKS, "all")[0]
    # Gathered weights of all layers, and what their gradients travel in: a block that is sent and the part that comes.
    assert block < max(idle) <= LAYERS * (2 * block + block // RANKS), idle
    without, fewer = run_ranks(train, RANKS, "none")[0]
    assert max(fewer) <= max(idle), (fewer, idle)
    assert losses == without
