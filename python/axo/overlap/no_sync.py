"""The data ranks together: gradient accumulation without communication, and unequal local batches.

    for piece in pieces[:-1]:
        with axo.no_sync(model):                     # gradients stay here, unreduced
            loss_of(piece).backward()
    loss_of(pieces[-1]).backward()                   # reduces the sum: .grad is complete

    weight = axo.token_weight(tokens_of_this_rank, comms)
    (weight * mean_loss_of_this_rank).backward()     # the gradient of the mean over all ranks' tokens

How gradients travel over the data axis is in ``axo.overlap.gradients``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from axo.comm.connect import Communicators
from axo.overlap.model import engines


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Let ``backward`` inside the block add up gradients on this rank without reducing them over the data ranks.

    ``.grad`` does not change until the next backward outside of it, which reduces the sum. What is kept meanwhile is
    the gradient of whole gathered weights; the gather cache keeps its weights for the next micro-batch too. All ranks
    must enter and leave it together; what counts is where backward is called. Sums that are part of a product, as
    Tesseract's over x, are made all the same.

    Raises:
        ValueError: ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"no_sync: a {type(model).__name__} is no model; pass the model that axo.parallelize returned")
    outermost = [engine for engine in engines(model) if engine.synchronizing]
    for engine in outermost:
        engine.defer(synchronizing=False)
    try:
        yield
    finally:
        for engine in outermost:
            engine.defer(synchronizing=True)


def token_weight(tokens: int | torch.Tensor, comms: Communicators) -> torch.Tensor:
    """The factor for this rank's mean loss that makes averaged gradients those of the mean over all data ranks' tokens.

    Args:
        tokens: Tokens (or samples) in this rank's batch; ranks that work on the same rows hold the same.
        comms: What ``axo.connect`` returned. Collective over the axes that split rows.

    Returns:
        ``tokens * data ranks / all tokens``: 1 where all ranks have as many; 0 where no rank has any. fp32, a scalar.
    """
    mine = torch.as_tensor(tokens, dtype=torch.float64, device=comms.device).reshape(1)
    total = mine.clone()
    for axis in comms.arrangement.rows:
        if comms.grid.size(axis) > 1:
            total = comms.axis(axis).all_reduce(total)
    weight = mine * comms.data_ranks / total.clamp(min=1)
    return weight.float().squeeze(0)
