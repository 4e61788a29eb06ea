"""What an earlier start of the ranks left in the launcher's store must not be read by a later one.

torchrun keeps one store for all starts of its ranks (``--max-restarts``) and gives it to them as it is. The next start
would find addresses of the dead, for which Gloo waits, and counts that a rank that was killed early has not made. How
often torchrun has started them does not tell starts apart: it counts by host. So the ranks agree on a name:

    rank r      hello/r = a new word of its own;       waits for start/<word>;     come/<name>/r
    rank 0      start/<word> = the name, for every word that it sees, until each rank has come under that name

and keep all else under it. A word that a dead rank left gets an answer that nobody reads.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from axo.errors import Timeout

_LOOK_S = 0.25  # between looks of a rank that waits for rank 0: a signal is handled then
_PAUSE_S = 0.002


def may_be_repeated() -> bool:
    """Whether these ranks are torchrun's, and may be the second ones that use its store."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and restarts != "0"


def store_of_this_start(store: Any, rank: int, world_size: int, seconds: float) -> Any:
    """A view of the launcher's store that no earlier start has seen. Collective where starts may be repeated.

    Raises:
        Timeout: Ranks have not come within ``seconds``; rank 0 names them.
    """
    if world_size == 1 or not may_be_repeated():
        return store
    if rank == 0:
        name = _lead(store, world_size, seconds)
    else:
        word = uuid.uuid4().hex
        store.set(f"axo/hello/{rank}", word)
        _wait(store, f"axo/start/{word}", rank, world_size, seconds)
        name = store.get(f"axo/start/{word}").decode()
        store.set(f"axo/come/{name}/{rank}", b"1")
    return dist.PrefixStore(f"axo/started/{name}", store)


def _lead(store: Any, world_size: int, seconds: float) -> str:
    name, late = uuid.uuid4().hex, time.monotonic() + seconds
    missing = dict.fromkeys(range(1, world_size), "")  # rank: the word that was answered last
    while True:
        for other, answered in list(missing.items()):
            if store.check([f"axo/come/{name}/{other}"]):
                del missing[other]
            elif store.check([f"axo/hello/{other}"]):
                word = store.get(f"axo/hello/{other}").decode()
                if word != answered:
                    store.set(f"axo/start/{word}", name)
                    missing[other] = word
        if not missing:
            return name
        if time.monotonic() > late:
            raise Timeout(
                f"connect (rank 0 of {world_size}): ranks {sorted(missing)} have not come within {seconds:g} s; they"
                " died at start-up, or call something else first"
            )
        time.sleep(_PAUSE_S)


def _wait(store: Any, key: str, rank: int, world_size: int, seconds: float) -> None:
    late = time.monotonic() + seconds
    while True:
        try:
            store.wait([key], timedelta(seconds=min(_LOOK_S, seconds)))
            return
        except dist.DistStoreError:
            if time.monotonic() > late:
                raise Timeout(
                    f"connect (rank {rank} of {world_size}): rank 0 has not come within {seconds:g} s; it died at"
                    " start-up, or calls something else first"
                ) from None
