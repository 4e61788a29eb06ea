"""Ranks that build something together must build the same: one small collective finds out, before anything is wrong."""

from __future__ import annotations

import hashlib
import threading
import warnings

import torch

from axo.comm.communicator import Communicator
from axo.comm.connect import Communicators
from axo.errors import Aborted, Error, Mismatch

_PATIENCE = 20.0  # seconds, after which a rank that waits says for what
_BEFORE_THE_PEERS = 0.9  # of the time limit: they are to hear why, before their own limit ends what they wait for


def ranks_that_differ(comms: Communicators, text: str) -> list[int]:
    """The ranks whose ``text`` is not rank 0's; the same list on every rank. Every rank must call it."""
    return [] if comms.grid.world_size == 1 else _that_differ(comms.world, text)


def _that_differ(comm: Communicator, text: str) -> list[int]:
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
    digests = comm.all_gather(torch.tensor([digest], dtype=torch.int64, device=comm.device)).tolist()
    return [rank for rank, other in enumerate(digests) if other != digests[0]]


def all_call(comms: Communicators, what: str) -> None:
    """Wait until all ranks of one data index make the same call ``what``, which ends with its name where some do not.

    Ranks of other data indices hold the same parameters, and need not call. Where the others wait elsewhere, nothing
    differs: so a wait that is long says for what.

    Raises:
        Error: Of the class of what was found: a rank did something else, nothing in time, or has left.
    """
    reason = f"rank {comms.rank} called {what} and others did not; every rank must call it"
    # Whoever uses the world meanwhile is few: there the others hear of this call, not of a difference in their own.
    for line in (comms.world,) if comms.grid.data == 1 else (comms.x, comms.y, comms.z):
        if line.size == 1:
            continue
        limit = line.set_timeout(comms.timeout)
        line.set_timeout(_BEFORE_THE_PEERS * limit)
        waits = f"axo: rank {comms.rank} waits in {what} for others; every rank must call it"
        late = threading.Timer(_PATIENCE, warnings.warn, (waits, RuntimeWarning))
        late.daemon = True
        late.start()
        try:
            if _that_differ(line, what):
                raise Mismatch("they met in another place of the program")
        except Aborted:
            raise
        except Error as error:
            for each in comms.communicators:
                each.abort(reason)
            raise type(error)(f"{reason}: {error}") from None
        finally:
            late.cancel()
            line.set_timeout(limit)
