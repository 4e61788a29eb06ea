"""``axo train --elastic MIN:MAX``: when a rank dies the run goes on, with fewer ranks on another grid.

    all ranks     every ``copy_every`` steps: what a checkpoint holds, into a folder of this host's memory (tmpfs)
    the launcher  sees that a rank has died, ends the others, takes the nearest grid of fewer ranks, forks them
    new ranks     connect, load the newest copy onto their grid (``axo.checkpoint``), and go on

The launcher owns the folder, so it outlives every rank; when the launcher has been killed, the next one removes it. A
death costs the steps since the newest complete copy, which is written while the next steps run: ``copy_every``, and
those that it takes to write one. Batch, order of the data and schedule are the run's, whatever the grid: the losses are
those of a run that nothing happened to.

Not here: ranks of several hosts, whose memory is lost with them, and more ranks than before. Both are refused.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from axo.checkpoint.folder import latest, number_of, run_of
from axo.grid import AXES, Grid
from axo.launch import RankFailed, own_folder
from axo.train.check import check_grid
from axo.train.config import CHECKPOINTS, TrainConfig

_MEMORY = "/dev/shm"
_COPY_BYTES = 12  # of a parameter: itself and AdamW's two moments, in fp32


@dataclass
class StateCopies:
    """Where a run's copies lie, and how it came to go on from one.

    Attributes:
        folder: On tmpfs.
        noticed: When a rank had died and the launcher had ended the others, by the monotonic clock; None: none has.
        seconds: What has passed since then, in parts.
    """

    folder: str
    noticed: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    def mark(self, part: str) -> None:
        """``part`` is what has passed since the part before."""
        if self.noticed is not None:
            self.seconds[part] = time.monotonic() - self.noticed - sum(self.seconds.values())


def check_elastic(config: TrainConfig) -> None:
    """Check what ``--elastic`` asks for.

    Raises:
        ValueError: It is no MIN:MAX, MAX is not the ranks of the grid, no grid of fewer ranks fits, or this host's
            memory has no room for the copies.
    """
    least, most = _bounds(config)
    if most != config.ranks:
        raise ValueError(f"train: elastic={config.elastic}: grid {config.shown} has {config.ranks} ranks, not {most}")
    if least < most and isinstance(smaller := _smaller(config), str):
        raise ValueError(
            f"train: elastic={config.elastic}: no grid of {least} to {most - 1} ranks fits ({smaller}); use a smaller"
            " MIN, or another batch-size"
        )
    try:
        free = shutil.disk_usage(_MEMORY).free
    except OSError as error:
        raise ValueError(f"train: elastic={config.elastic} keeps copies in {_MEMORY}: {error.strerror}") from None
    parameters = sum(parameter.numel() for parameter in check_grid(config)[1].parameters())
    needed = 2 * _COPY_BYTES * parameters  # one stays until the next is complete
    if needed > free:
        raise ValueError(
            f"train: elastic={config.elastic}: two copies of the run's state take {needed / 2**30:,.1f} GiB, and"
            f" {_MEMORY} has {free / 2**30:,.1f} GiB free; make it larger (mount -o remount,size=...), or use"
            " --save-every and --resume"
        )


@contextlib.contextmanager
def copies_of_a_run() -> Iterator[StateCopies]:
    """Room for the copies of one run, in this host's memory."""
    with own_folder(_MEMORY) as folder:
        yield StateCopies(folder)


def after_a_death(config: TrainConfig, copies: StateCopies, error: RankFailed) -> TrainConfig:
    """The run that goes on after ``error``: fewer ranks, and the newest copy or checkpoint.

    Raises:
        RankFailed: There is no smaller grid.
    """
    copies.noticed, copies.seconds = time.monotonic(), {}
    smaller = _smaller(config)
    if isinstance(smaller, str):
        raise RankFailed(f"{error}; elastic={config.elastic} ends here: {smaller}", rank=error.rank, lost=True)
    copy = latest(copies.folder)
    if copy is None:  # before the first one the run has done nothing
        return smaller
    saved = latest(Path(config.out, CHECKPOINTS), run=run_of(copy)) if config.saves else None
    newest = copy if saved is None or number_of(saved) <= number_of(copy) else saved
    return replace(smaller, resume=str(newest), overwrite=False)


def _bounds(config: TrainConfig) -> tuple[int, int]:
    least, colon, most = (config.elastic or "").partition(":")
    if not (colon and least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
        raise ValueError(
            f"train: elastic={config.elastic!r} is not MIN:MAX; use two numbers of ranks, such as 2:{config.ranks}"
        )
    return int(least), int(most)


def _smaller(config: TrainConfig) -> TrainConfig | str:
    """The run on the most ranks below its own on which it fits, on the nearest grid; else why it fits on none."""
    why = f"there are {config.ranks} ranks, and MIN is {_bounds(config)[0]}"
    for ranks in range(config.ranks - 1, _bounds(config)[0] - 1, -1):
        grids = [] if ranks % config.pipeline else Grid.all(ranks // config.pipeline)
        for grid in sorted(grids, key=lambda grid: _distance(config.grid, grid)):
            smaller = replace(config, grid=grid)
            try:
                check_grid(smaller)
            except ValueError as error:
                why = str(error)
            else:
                return smaller
    return why


def _distance(one: Grid, other: Grid) -> tuple[float, int, int]:
    """How far two grids are apart; of two as far, the one with fewer ranks along x and y is nearer."""
    apart = sum(abs(math.log(one.size(axis) / other.size(axis))) for axis in AXES)
    return round(apart, 9), other.x * other.y, other.x
