"""Several ranks' records against each other: would every collective find its peers?

The ranks of one communicator must issue the same operations, with the same element types, counts and reductions, in
the same order. Two ranks are compared on each communicator that they share: on axis x those that differ in x alone.

Of thousands of ranks a few have to be run. Ranks of one role hold shards of the same shapes and take as many rows, so
one of each role is run, and of each axis also the second rank beside rank 0, so that every axis has peers to compare.
With stages a role is one of a stage too; the ranks that stand where rank 0 does in the grids of all stages are run, and
each message must be awaited by the rank that it goes to, in the same order.
A mistake that depends on the number of a rank alone is found when that rank is among those that are run.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from axo.comm.recording import Issued, recording
from axo.dryrun.step import Record, check, run
from axo.grid import AXES, Coords
from axo.nn.layer import ParallelLayer
from axo.placement import Placement
from axo.train import loop
from axo.train.config import TrainConfig

MOST_COMPARED = 16  # ranks of one grid that are all run without being asked for


@dataclass(frozen=True)
class Mismatch:
    """Two ranks of one communicator that would not do the same."""

    axis: str
    number: int
    first: int
    other: int
    first_issues: str
    other_issues: str

    def __str__(self) -> str:
        return (
            f"collective {self.number} on {self.axis} does not match: rank {self.first} issues {self.first_issues},"
            f" rank {self.other} {self.other_issues}"
        )


def representatives(config: TrainConfig) -> dict[int, int]:
    """Return the ranks to run, each with how many ranks have its role (0: it is there to be compared only).

    A grid of at most 16 ranks is run whole.
    """
    check(config)
    grid = config.grid
    comms = recording(grid, 0)
    model = loop.build_shards(replace(config, pipeline=1), comms)
    kinds: dict[tuple[object, ...], Placement] = {}
    for module in model.modules():
        if isinstance(module, ParallelLayer):
            for one in module.placements.values():
                kinds[one.global_shape, one.splits, one.blocks, one.copies] = one
    roles: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for rank in range(grid.world_size):
        coords = grid.coords(rank)
        key = tuple(one.local_shape(grid, coords) for one in kinds.values())
        roles.setdefault(key, []).append(rank)
    chosen = {
        stage * grid.world_size + ranks[0]: len(ranks) for stage in range(config.pipeline) for ranks in roles.values()
    }
    if config.ranks <= MOST_COMPARED:
        return {rank: chosen.get(rank, 0) for rank in range(config.ranks)}
    for axis in AXES:
        if grid.size(axis) > 1:
            chosen.setdefault(grid.rank(**{axis: 1}), 0)
    return dict(sorted(chosen.items()))


def run_all(config: TrainConfig, ranks: Iterable[int], processes: int | None = None) -> list[Record]:
    """Run each of these ranks, several at a time: in as many processes as this one may use cores."""
    wanted = list(ranks)
    count = min(len(wanted), processes or len(os.sched_getaffinity(0)))
    if count <= 1:
        return [run(config, rank) for rank in wanted]
    torch.set_num_threads(1)  # a process that has computed with several threads cannot be forked
    with multiprocessing.get_context("fork").Pool(count, _begin) as pool:
        return pool.starmap(run, [(config, rank) for rank in wanted], chunksize=1)


def _begin() -> None:
    """What a process that runs ranks does first."""
    gc.freeze()  # what is imported is garbage to nobody
    # A handler of this process, such as torchelastic's, raises: in a worker that is a task's result, and ends nothing.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def compare(config: TrainConfig, records: list[Record]) -> list[Mismatch]:
    """Return the first mismatch of each communicator that these ranks share; empty: all match."""
    found = []
    for axis in (*AXES, "world", "everyone"):
        groups: dict[tuple[int, Coords | None], list[Record]] = {}
        for record in records:
            stage, rank = divmod(record.rank, config.grid.world_size)
            coords = config.grid.coords(rank)
            key = {"world": (stage, None), "everyone": (0, None)}.get(axis)
            groups.setdefault(key or (stage, coords._replace(**{axis: 0})), []).append(record)
        for group in groups.values():
            issued = [[each for each in record.issued if each.axis == axis] for record in group]
            found += [_first(axis, group[0], other, issued[0], also) for other, also in zip(group, issued, strict=True)]
    for one, other in itertools.permutations(records, 2):
        if one.rank % config.grid.world_size == other.rank % config.grid.world_size:
            to, of = (record.rank // config.grid.world_size for record in (other, one))
            sent = [each for each in one.issued if (each.op, each.peer) == ("send", to)]
            awaited = [each for each in other.issued if (each.op, each.peer) == ("recv", of)]
            found.append(_first("pipeline", one, other, sent, awaited))
    return sorted((bad for bad in found if bad is not None), key=lambda bad: bad.number)


def _first(axis: str, one: Record, other: Record, mine: list[Issued], theirs: list[Issued]) -> Mismatch | None:
    for number, (a, b) in enumerate(zip(mine, theirs, strict=False), 1):
        if a.must_match != b.must_match:
            return Mismatch(axis, number, one.rank, other.rank, str(a), str(b))
    if len(mine) == len(theirs):
        return None
    number = min(len(mine), len(theirs))
    said = [str(issued[number]) if len(issued) > number else "nothing more" for issued in (mine, theirs)]
    return Mismatch(axis, number + 1, one.rank, other.rank, *said)
