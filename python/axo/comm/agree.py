"""Ranks that build something together must build the same: one small collective finds out, before anything is wrong."""

from __future__ import annotations

import hashlib

import torch

from axo.comm.connect import Communicators


def ranks_that_differ(comms: Communicators, text: str) -> list[int]:
    """The ranks whose ``text`` is not rank 0's; the same list on every rank. Every rank must call it."""
    if comms.grid.world_size == 1:
        return []
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
    mine = torch.tensor([digest], dtype=torch.int64, device=comms.device)
    digests = comms.world.all_gather(mine).tolist()
    return [rank for rank, other in enumerate(digests) if other != digests[0]]
