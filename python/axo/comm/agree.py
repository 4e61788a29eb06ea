"""Ranks that build something together must build the same: one small collective finds out, before anything is wrong."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch


def ranks_that_differ(comms: Any, text: str) -> list[int]:
    """The ranks whose ``text`` is not rank 0's; the same list on every rank. Every rank must call it."""
    if comms.grid.world_size == 1:
        return []
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
    mine = torch.tensor([digest], dtype=torch.int64, device=comms.device)
    digests = comms.world.all_gather(mine).tolist()
    return [rank for rank, other in enumerate(digests) if other != digests[0]]


def check_same_layers(layers: Sequence[Any], comms: Any, owner: str) -> None:
    """Compare what the ranks have built: sizes, splits, dtypes and options of each parallel layer.

    Two layers of different sizes can have shards of shapes that fit each other: they would run, and compute nonsense.

    Raises:
        ValueError: They differ; on every rank.
    """
    texts = []
    for layer in layers:
        matmul = getattr(layer, "matmul", None)
        exchange = getattr(layer, "exchange", None) or getattr(matmul, "exchange", None)
        dtypes = [str(getattr(layer, name).dtype) for name in layer.placements]
        options = (getattr(exchange, "op", None), getattr(getattr(exchange, "engine", None), "overlap", None))
        texts.append(f"{type(layer).__name__} {layer.placements} {dtypes} {options}")
    differ = ranks_that_differ(comms, "\n".join(texts))
    if differ:
        shown = "; ".join(f"{layer}, {getattr(layer, next(iter(layer.placements))).dtype}" for layer in layers[:3])
        raise ValueError(
            f"{owner}: ranks {differ} have built something else than rank 0; give every rank the same sizes, dtypes and"
            f" options (this rank: {shown})"
        )
