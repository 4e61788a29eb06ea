"""Who is slow: what each rank works in a step, and how long the ranks of an axis wait for the last of them.

A step takes all ranks the same time, as they wait for each other: the slow one is the one that does not wait.

    worked    seconds of a step in which a rank was not blocked in communication
    spread    of an axis: the most that a rank was blocked on it less the least, of the line where that differs most

The times are the host's: on a GPU a rank that is slow shows where the host waits for its kernels.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from axo import files
from axo.grid import AXES, Grid
from axo.train.config import LOG_NAME

STEPS, SLOWER = 20, 1.2  # a rank is named that is so many times as slow as the others over so many steps
_FASTER = 1.1  # and may be named again once it was not even so slow
_MOST = 1 << 30  # bytes of a log
_ROWS = 32  # of a table: the slowest ranks of more


def spread(grid: Grid, blocked: torch.Tensor) -> dict[str, float]:
    """Of each axis with several ranks. ``blocked``: seconds of each rank of all stages on x, y, z, data: (ranks, 4)."""
    sizes = [grid.size(axis) for axis in AXES]
    cells = blocked.numpy().reshape(-1, *reversed(sizes), len(AXES))  # a few torch operations take as long as a reduce
    several = [(place, axis) for place, axis in enumerate(AXES) if sizes[place] > 1]
    return {axis: float(np.ptp(cells[..., place], axis=-1 - place).max()) for place, axis in several}


class SlowRanks:
    """Watches the steps of a run for a rank that is slower than those that do the same work.

    Args:
        ranks: Of one stage.
        hosts: The name of each rank's host, of all stages.
    """

    def __init__(self, ranks: int, hosts: Sequence[str]) -> None:
        self._ranks, self._hosts = ranks, hosts
        self._worked: deque[Sequence[float]] = deque(maxlen=STEPS)
        self._named = -1

    def take(self, step: int, worked: Sequence[float]) -> dict[str, Any] | None:
        """A line of the log where a rank has become slow; ``worked``: seconds of each rank in that step."""
        self._worked.append(worked)
        if len(self._worked) < STEPS or self._ranks == 1:
            return None
        times, rank = slowest([sum(seconds) / STEPS for seconds in zip(*self._worked, strict=True)], self._ranks)
        if times < _FASTER:
            self._named = -1
        if times < SLOWER or rank == self._named:
            return None
        self._named = rank
        return {"kind": "slow", "step": step, "rank": rank, "host": self._hosts[rank], "times": times, "steps": STEPS}


def slowest(worked: Sequence[float], ranks: int) -> tuple[float, int]:
    """How many times as long as the median of the others of its stage the slowest rank has worked, and which it is."""
    result = (1.0, 0)
    for first in range(0, len(worked), ranks):
        stage = worked[first : first + ranks]
        rank = max(range(len(stage)), key=stage.__getitem__)
        others = [*stage[:rank], *stage[rank + 1 :]]
        if others:
            result = max(result, (stage[rank] / max(statistics.median(others), 1e-9), first + rank))
    return result


def words(line: dict[str, Any]) -> str:
    """A line of a slow rank, for people."""
    rank, times, steps = int(line["rank"]), line["times"], int(line["steps"])
    return (
        f"rank {rank} on {files.shown(line['host'])} has worked {times:.2f} times as long as the others"
        f" for {steps} steps, and they wait for it"
    )


def live(run: Path) -> tuple[list[str], list[list[str]], list[str]]:
    """What ``axo info --live`` shows of a run's folder: a table of its ranks, and lines.

    Raises:
        ValueError: It holds no log of a run with such figures.
    """
    path = run / LOG_NAME if run.is_dir() else run
    try:
        header, steps, slow = _read(path)
        hosts, ranks = [str(host) for host in header["hosts"]], Grid.parse(header["grid"]).world_size
        worked = [statistics.fmean(seconds) for seconds in zip(*(step["worked"] for step in steps), strict=True)]
        waited = {axis: statistics.fmean(step["spread"][axis] for step in steps) for axis in steps[-1]["spread"]}
        seconds, last = statistics.fmean(step["seconds"] for step in steps), int(steps[-1]["step"])
        times, rank = slowest(worked, ranks)
        order = sorted(range(len(worked)), key=worked.__getitem__, reverse=True)[:_ROWS]
        rows = [[str(r), files.printable(hosts[r]), f"{worked[r]:.4g}", f"{worked[r] / seconds:.0%}"] for r in order]
        lines = [f"step {last + 1}, {seconds:.4g} s a step over the last {len(steps)} that are in the log"]
        spreads = ", ".join(f"{files.printable(axis)} {value:.4g} s" for axis, value in waited.items())
        lines += [f"the first to arrive waits for the last: {spreads}"] if spreads else []
        lines += [f"slowest: rank {rank} on {files.printable(hosts[rank])}, {times:.2f} times the others of its stage"]
        lines += [f"step {int(line['step']) + 1}: {words(line)}" for line in slow[-3:]]
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, OSError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is no log of a run with times of its ranks ({why})") from None
    return ["rank", "host", "worked (s)", "of the step"], rows, lines


def _read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """The newest header of a log, the last steps after it, and its lines of slow ranks."""
    header: dict[str, Any] = {}
    steps: deque[dict[str, Any]] = deque(maxlen=STEPS)
    slow: list[dict[str, Any]] = []
    for text in files.read_bytes(path, _MOST).decode("utf-8", "replace").splitlines():
        try:
            line = files.parse_json(text)
        except ValueError:  # it is being written
            continue
        match line:
            case {"kind": "header"}:
                header, steps, slow = line, deque(maxlen=STEPS), []
            case {"kind": "step"}:
                steps.append(line)
            case {"kind": "slow"}:
                slow.append(line)
    if not steps:
        raise ValueError("no step is in it yet")
    return header, list(steps), slow
