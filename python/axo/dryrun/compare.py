"""Several ranks' records against each other: would every collective find its peers?

The ranks of one communicator must issue the same operations, with the same element types, counts and reductions, in
the same order. Two ranks are compared on each communicator that they share: on axis x those that differ in x alone.

Of thousands of ranks a few have to be run. Ranks of one role hold shards of the same shapes and take as many rows, so
one of each role is run, and of each axis also the second rank beside rank 0, so that every axis has peers to compare.
With stages, each stage has roles of its own. The ranks that stand where rank 0 does in the grids of all stages are run
too, and each message must be awaited by the rank that it goes to, in the same order.
A mistake that depends on the number of a rank alone is found when that rank is among those that are run.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import signal
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import cast

import torch

from axo.comm.recording import Issued, recording
from axo.cores import usable_cores
from axo.dryrun.step import Record, check, run
from axo.grid import AXES, Coords
from axo.launch import RankFailed, end_with
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
    comms = recording(grid, 0, context=config.context, experts=config.experts)
    model, _ = loop.build_stages(replace(config, pipeline=1, offload="none"), comms)
    kinds: dict[tuple[object, ...], dict[object, Placement]] = {}
    for module in model.modules():
        if isinstance(module, ParallelLayer):
            for one in module.placements.values():
                kind = kinds.setdefault((one.global_shape, one.splits, one.blocks, one.copies), {})
                kind[one.holders] = one
    roles: dict[tuple[object, ...], list[int]] = {}
    # Data is outermost, and cuts no weight, but may spread experts.
    repeats = grid.data // max(1, config.experts // grid.z)
    for rank in range(grid.world_size // repeats):
        coords = grid.coords(rank)
        # Sorted: which of several experts of one shape a rank holds makes no role.
        key = tuple(tuple(sorted(one.local_shape(grid, coords) for one in kind.values())) for kind in kinds.values())
        roles.setdefault(key, []).append(rank)
    chosen = {
        stage * grid.world_size + ranks[0]: len(ranks) * repeats
        for stage in range(config.pipeline)
        for ranks in roles.values()
    }
    if config.ranks <= MOST_COMPARED:
        return {rank: chosen.get(rank, 0) for rank in range(config.ranks)}
    for axis in AXES:
        if grid.size(axis) > 1:
            chosen.setdefault(grid.rank(**{axis: 1}), 0)
    return dict(sorted(chosen.items()))


def run_all(config: TrainConfig, ranks: Iterable[int], processes: int | None = None) -> list[Record]:
    """Run each of these ranks in a process of its own, as many at a time as this one may use cores.

    Raises:
        ValueError: As for :func:`run`.
        RankFailed: A process ended without an answer, or with an error that is a mistake of Axo's.
    """
    wanted = list(ranks)
    count = min(len(wanted), processes or usable_cores())
    if count <= 1:
        return [run(config, rank) for rank in wanted]
    torch.set_num_threads(1)  # a process that has computed with several threads cannot be forked
    gc.collect()
    gc.freeze()  # what is imported is garbage to nobody
    context = multiprocessing.get_context("fork")
    left, records = wanted[::-1], dict[int, Record]()
    running: dict[Connection, tuple[int, ForkProcess]] = {}
    try:
        while left or running:
            while left and len(running) < count:
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_answer, args=(sender, os.getpid(), config, left[-1]))
                process.start()
                sender.close()
                running[receiver] = left.pop(), process
            for receiver in cast("list[Connection]", wait(list(running))):
                rank, process = running[receiver]
                try:
                    answer = receiver.recv()
                except (EOFError, OSError):  # it has sent nothing, or not all
                    answer = ""
                process.join()
                del running[receiver]
                receiver.close()
                if isinstance(answer, ValueError):
                    raise answer
                if isinstance(answer, str):
                    raise _failed(rank, answer, process.exitcode)
                records[rank] = answer
    finally:
        for _, process in running.values():
            process.kill()
            process.join()
        gc.unfreeze()
    return [records[rank] for rank in wanted]


def _answer(sender: Connection, parent: int, config: TrainConfig, rank: int) -> None:
    """Run a rank, and send its record or its error; end with the process that asks, however that ends."""
    end_with(parent)
    # A handler of that process, such as torchelastic's, raises: here that would be an answer, and end nothing.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both; the other one ends this one
    try:
        sender.send(run(config, rank))
    except ValueError as error:
        sender.send(error)
    except Exception:
        sender.send(traceback.format_exc())


def _failed(rank: int, trace: str, code: int | None) -> RankFailed:
    """What has happened to the process that ran a rank."""
    if trace:
        return RankFailed(f"rank {rank}: {trace.splitlines()[-1]}", rank=rank, trace=trace)
    how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with code {code}"
    hint = "; is there enough memory? --ranks 0 runs one at a time" if code == -signal.SIGKILL else ""
    return RankFailed(f"the process that ran rank {rank} {how}{hint}", rank=rank, lost=True)


def compare(config: TrainConfig, records: list[Record]) -> list[Mismatch]:
    """Return the first mismatch of each communicator that these ranks share; empty: all match."""
    bad = list[Mismatch | None]()
    for axis in (*AXES, "world", "everyone"):
        groups: dict[tuple[int, Coords | None], list[Record]] = {}
        for record in records:
            stage, rank = divmod(record.rank, config.grid.world_size)
            coords = config.grid.coords(rank)
            key = {"world": (stage, None), "everyone": (0, None)}.get(axis)
            groups.setdefault(key or (stage, coords._replace(**{axis: 0})), []).append(record)
        for group in groups.values():
            issued = [[each for each in record.issued if each.axis == axis] for record in group]
            bad += [_first(axis, group[0], other, issued[0], also) for other, also in zip(group, issued, strict=True)]
    for one, other in itertools.permutations(records, 2):
        if one.rank % config.grid.world_size == other.rank % config.grid.world_size:
            to, of = (record.rank // config.grid.world_size for record in (other, one))
            sent = [each for each in one.issued if (each.op, each.peer) == ("send", to)]
            awaited = [each for each in other.issued if (each.op, each.peer) == ("recv", of)]
            bad.append(_first("pipeline", one, other, sent, awaited))
    return sorted((one for one in bad if one is not None), key=lambda one: one.number)


def _first(axis: str, one: Record, other: Record, mine: list[Issued], theirs: list[Issued]) -> Mismatch | None:
    for number, (a, b) in enumerate(zip(mine, theirs, strict=False), 1):
        if a.must_match != b.must_match:
            return Mismatch(axis, number, one.rank, other.rank, str(a), str(b))
    if len(mine) == len(theirs):
        return None
    number = min(len(mine), len(theirs))
    said = [str(issued[number]) if len(issued) > number else "nothing more" for issued in (mine, theirs)]
    return Mismatch(axis, number + 1, one.rank, other.rank, *said)
