"""What buffers stay allocated between steps, and that a limit on them changes no result.

Oracle: what a pass needs at once, by arithmetic; the losses of a model without the limit, to the bit.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import axo
from tests.launcher import run_ranks

WIDTH, LAYERS, RANKS = 256, 4, 2


def train(idle_bytes: int | str | None, cache: str) -> tuple[list[float], list[int]]:
    """Losses, and idle bytes after each step, whose gradients are gone by then."""
    comms = axo.connect("1x1x2x1")
    torch.manual_seed(0)
    serial = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    overlap = axo.Overlap(idle_bytes=idle_bytes, gather_cache=cache)
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
        idle.append(sum(engine.pool.idle_bytes() for engine in axo.overlap.engines(model)))
    return losses, idle


def test_idle_buffers_are_those_of_one_pass_and_a_limit_holds() -> None:
    block = WIDTH * WIDTH * 4
    losses, idle = run_ranks(train, RANKS, None, "all")[0]
    # Gathered weights of all layers, and what their gradients travel in: a block that is sent and the part that comes.
    assert block < max(idle) <= LAYERS * (2 * block + block // RANKS), idle
    without, fewer = run_ranks(train, RANKS, None, "none")[0]
    assert max(fewer) <= max(idle), (fewer, idle)
    grads = LAYERS * block // RANKS  # free when zero_grad has let go of them, after the pass that they belong to
    limited, few = run_ranks(train, RANKS, 0, "all")[0]
    assert max(few) <= grads < max(idle), few
    assert limited == losses == without


@pytest.mark.parametrize("size", [-1, True, "much", 1.5])
def test_a_limit_that_is_no_size_is_refused(size: object) -> None:
    with pytest.raises(ValueError, match="is not a size; use bytes"):
        axo.Overlap(idle_bytes=size)  # type: ignore[arg-type]
