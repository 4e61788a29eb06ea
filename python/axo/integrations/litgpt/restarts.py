"""Start the ranks of a run on this host, and again when one was lost; what torchrun does with ``--max-restarts``.

A rank is lost when a signal ended it, or when it left without an error. An error (of the data, a NaN loss, a wrong
option) would come again, so it ends the run. Each start continues from the newest checkpoint, and repeats what was done
since then.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from axo.launch import Rank, RankFailed, launch_local

_BEGUN = "axo/litgpt/begun"
_MEETING_SECONDS = 600.0


def run(function: Callable[..., None], ranks: int, *args: Any, max_restarts: int, terminate: bool) -> None:
    """Call ``function(*args, start)`` on ``ranks`` new local ranks; ``start`` counts from 0.

    Args:
        function, ranks, args: As for :func:`axo.launch.launch_local`.
        max_restarts: How often lost ranks may be replaced.
        terminate: Pass SIGTERM on to the ranks, which end in their own time.

    Raises:
        RankFailed: A rank had an error, or was lost once too often.
    """
    for start in range(max_restarts + 1):
        try:
            launch_local(function, ranks, *args, start, terminate=terminate)
            return
        except RankFailed as failed:
            if not failed.lost or start == max_restarts:
                raise
            again = f"axo: starting all ranks again ({start + 1} of {max_restarts}), from the newest checkpoint"
            print(f"axo: {failed}\n{again}", file=sys.stderr, flush=True)


class Launch:
    """What the starts of one launch of torchrun's know of each other. Every rank makes it, in each start.

    torchrun's number of a start does not tell: each host counts for itself, and a start counts that was refused its
    folder. So rank 0 leaves a word in torchrun's store, which lives as long as the launch, once the folder is the
    run's, and tells all ranks of the next start. Where torchrun keeps no store, the largest number of all ranks counts.

    Attributes:
        again: An earlier start has begun the run; the same on every rank.
    """

    def __init__(self, rank: Rank | None) -> None:
        self.again = False
        self._store: Any = None
        if rank is None or os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
            return
        from axo.comm import rendezvous

        who = f"litgpt (rank {rank.rank} of {rank.world_size})"
        place = rank.rank, rank.world_size, _MEETING_SECONDS
        self._store = rendezvous.launchers_store(*place)
        kept = rendezvous.may_be_repeated()
        begun = self._store.check([_BEGUN]) if kept else int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
        store = rendezvous.store_of_this_start(self._store, *place)
        meeting = rendezvous.Meeting(store, "axo/litgpt", *place[:2], who, rendezvous.TimeLeft(_MEETING_SECONDS))
        said = meeting.gather(str(begun))
        self.again = "True" in (said[:1] if kept else said)

    def begin(self) -> None:
        """The folder is the run's; rank 0 says so."""
        if self._store is not None:
            self._store.set(_BEGUN, "")
