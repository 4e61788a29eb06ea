"""Start the ranks of a run on this host, and again when one was lost; what torchrun does with ``--max-restarts``.

A rank is lost when a signal ended it, or when it left without an error. An error (of the data, a NaN loss, a wrong
option) would come again, so it ends the run. Each start continues from the newest checkpoint, and repeats what was done
since then.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from axo.launch import RankFailed, launch_local


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


def by_torchrun() -> tuple[int, int]:
    """(which start this is, counted from 0; how many restarts torchrun allows)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)), int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))


def newest(out_dir: Any) -> Path | None:
    """The newest checkpoint of a run, as ``--resume auto`` finds it."""
    from litgpt.utils import find_resume_path, init_out_dir

    return find_resume_path("auto", init_out_dir(out_dir))
