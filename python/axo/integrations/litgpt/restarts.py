"""Start the ranks of a command on this host, and again when one was lost; what torchrun does with ``--max-restarts``.

Where torchrun has started them, this process is one. A rank is lost when a signal ended it, or when it left without an
error. An error (of the data, a NaN loss, a wrong option) would come again, so it ends the run. Each start continues
from the newest checkpoint, and repeats what was done since then.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from axo.integrations.litgpt import checks, conversation, run_folder
from axo.integrations.litgpt.commands import PARALLEL
from axo.integrations.litgpt.options import Options
from axo.integrations.litgpt.parsing import Parsed
from axo.launch import Rank, RankFailed, launch_local
from axo.train import elastic
from axo.train.config import TrainConfig
from axo.train.models import count_parameters

# Imported once, before local ranks are forked, instead of by each of them.
_USED_BY_RANKS = ("axo.checkpoint.reader", "axo.checkpoint.writer", "axo.parallelization", "axo.plans.litgpt.plan")
_BEGUN = "axo/litgpt/begun"
_MEETING_SECONDS = 600.0


def start(parsed: Parsed) -> None:
    """Run a command whose arguments have been checked, on its ranks.

    Raises:
        ValueError: Another run has the folder, or the command ended with an exit code.
        RankFailed: A local rank failed.
    """
    command, options = PARALLEL[parsed.command], parsed.own
    rank = None if options.hosts else Rank.from_environment()
    launch = Launch(rank if command.trains else None)
    from axo.integrations.litgpt import rank as of_rank

    for module in _USED_BY_RANKS:
        importlib.import_module(module)
    gc.freeze()  # a forked rank that looks through what was imported copies every page that it looks at
    atexit.register(gc.unfreeze)  # else Triton's modules report all of theirs as leaked when the program ends
    with ExitStack() as stack:
        holds = command.trains and (rank is None or rank.rank == 0) and parsed.values.get("model_name") != "list"
        if holds and not options.hosts:  # else the host does that has rank 0
            stack.enter_context(_hold(parsed, launch.again))
            launch.begin()
        given = parsed.command, options, partial(of_rank.start, parsed), parsed.as_yaml(), rank is None
        if rank is not None:
            of_rank.run(*given, int(launch.again))
            return
        if options.elastic:
            _run_elastic(parsed)
            return
        if parsed.command == "chat":
            conversation.keep_input()
        times, ends = options.max_restarts, command.trains
        run(of_rank.run, options.ranks_in_all, *given, max_restarts=times, terminate=ends)


def _hold(parsed: Parsed, again: bool) -> run_folder.Run:
    how = {"again": again, "allow_new_data": parsed.own.allow_new_data}
    return run_folder.hold(parsed.values, parsed.as_yaml, resumes=PARALLEL[parsed.command].resumes, **how)


@dataclass(frozen=True)
class _ElasticRun(TrainConfig):
    """What ``axo.train.elastic`` asks of a run of litgpt's: ranks, grid, folder; and what all hosts must have alike."""

    owner: ClassVar[str] = "litgpt"
    hyperparameters: str = ""


def _run_elastic(parsed: Parsed) -> None:
    """As ``axo train --elastic``; the global batch is LitGPT's, of which data ranks accumulate their parts.

    Raises:
        ValueError: Not what ``--elastic`` can be.
        RankFailed: A rank had an error, or too few ranks are left.
    """
    from axo.integrations.litgpt import rank as of_rank

    options, model = parsed.own, parsed.model
    config = _ElasticRun(
        grid=options.chosen_grid, pipeline=options.pipeline, elastic=options.elastic, copy_every=options.copy_every,
        out=str(run_folder.out_folder(parsed.values["out_dir"])), hosts=options.hosts or None,
        hyperparameters=parsed.as_yaml(),
    )  # fmt: skip

    def asked(run: TrainConfig) -> Options:
        usual: dict[str, Any] = {"elastic": "", "hosts": "", "copy_every": Options.copy_every}
        return replace(options, grid=run.grid, ranks=0, machine="", **usual)

    def start(launches: elastic.Launches, copies: elastic.StateCopies) -> int:
        own = asked(launches.config)
        parsed.litgpt.devices = parsed.values["devices"] = own.data_ranks
        begin = partial(of_rank.start, parsed, copy=launches.config.resume)
        given = parsed.command, own, begin, parsed.as_yaml(), True, int(copies.event != ""), (launches.config, copies)
        part = launches.part
        with _hold(parsed, copies.event != "") if part is not None and part.first == 0 else nullcontext():
            return launch_local(of_rank.run, launches.ranks, *given, terminate=True, noted=copies.signals, part=part)

    on_ranks = partial(elastic.nearest, config, check=lambda run: checks.check_grid(parsed, asked(run)))
    element = 2 if parsed.values["precision"] == "bf16-true" else 4
    elastic.check(config, on_ranks, 0 if model is None else 3 * element * count_parameters(model))
    elastic.run(config, on_ranks, start)


def run(function: Callable[..., Any], ranks: int, *args: Any, max_restarts: int, terminate: bool) -> None:
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
