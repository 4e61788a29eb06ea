"""Ranks that build something together must build the same: one small collective finds out, before anything is wrong."""

from __future__ import annotations

import hashlib

import torch

from axo.comm.connect import Communicators
from axo.errors import Aborted, Error, Mismatch

_BEFORE_THE_PEERS = 0.9  # of the time limit: they are to hear why, before their own limit ends what they wait for


def ranks_that_differ(comms: Communicators, text: str) -> list[int]:
    """The ranks whose ``text`` is not rank 0's; the same list on every rank. Every rank must call it."""
    if comms.grid.world_size == 1:
        return []
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
    mine = torch.tensor([digest], dtype=torch.int64, device=comms.device)
    digests = comms.world.all_gather(mine).tolist()
    return [rank for rank, other in enumerate(digests) if other != digests[0]]


def all_call(comms: Communicators, what: str) -> None:
    """Wait until every rank makes the same call ``what``; one that others do not make ends with its name, on all ranks.

    Raises:
        Error: Of the class of what was found: a rank did something else, nothing in time, or has left.
    """
    if comms.grid.world_size == 1:
        return
    world, reason = comms.world, f"rank {comms.rank} called {what} and others did not; every rank must call it"
    limit = world.set_timeout(comms.timeout)
    world.set_timeout(_BEFORE_THE_PEERS * limit)
    try:
        if ranks_that_differ(comms, what):
            raise Mismatch("they met in another place of the program")
    except Aborted:
        raise
    except Error as error:
        for line in comms.communicators:
            line.abort(reason)
        raise type(error)(f"{reason}: {error}") from None
    finally:
        world.set_timeout(limit)
