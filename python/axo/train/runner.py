"""One training run from its options to its outcome: what every rank does, and how it is launched.

A run is checked here, before ranks exist, as far as that is possible. Ranks then connect, agree that all of them can
read the data, train, and part; rank 0 alone holds the log and, with ``compare_serial``, trains the serial model
afterwards, when the other ranks are gone, with the threads of one rank.
"""

from __future__ import annotations

import math
import time
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

import axo
from axo.checkpoint import Run
from axo.checkpoint.ranks import agree, checkpoint_group
from axo.comm.device_choice import check_device
from axo.grid import check_ranks
from axo.launch import Rank, launch_local, set_threads
from axo.train import data, models, parity, plot
from axo.train.check import check
from axo.train.config import CHECKPOINTS, LOG_NAME, PLOT_NAME, TrainConfig
from axo.train.early import Checked, check_here
from axo.train.log import TrainLog
from axo.train.loop import Trainer
from axo.train.progress import Display
from axo.train.resume import Checkpoints
from axo.train.serial import train_serial

TAIL = 10  # steps whose mean loss is a run's result


@dataclass(frozen=True)
class Outcome:
    """What a run gave: losses of each step (nats), seconds of training, and the comparison if there was one.

    ``start`` is the first step of this process; ``checkpoint`` the last one saved; ``stopped`` names what ended
    the run before its last step (SIGTERM, Ctrl-C), "": nothing.
    """

    losses: list[float]
    seconds: float
    vocabulary: int
    log: Path
    plot: Path
    serial: list[float] | None = None
    serial_seconds: float = 0.0
    parity: parity.Parity | None = None
    start: int = 0
    checkpoint: Path | None = None
    stopped: str = ""

    @property
    def tail_loss(self) -> float:
        """Mean of the last ``TAIL`` losses."""
        tail = self.losses[-TAIL:]
        return sum(tail) / len(tail)

    @property
    def drop(self) -> float:
        """How far that lies under a guess, ln(vocabulary)."""
        return math.log(self.vocabulary) - self.tail_loss


def run(config: TrainConfig, found: Checked | None = None) -> Outcome | None:
    """Train: on new local ranks, or as the rank that torchrun made of this process. None on ranks other than 0.

    Args:
        config: The options.
        found: What ``axo.train.early.check_here`` has found of them; None: it is asked here.

    Raises:
        ValueError: The options are wrong.
        axo.launch.RankFailed: A local rank failed.
    """
    rank = Rank.from_environment()
    if rank is not None:
        return train_rank(config)
    found = check(config, found or check_here(config))
    check_devices(config)
    return launch_local(
        train_rank,
        config.ranks,
        config,
        found.batches(),  # opened, and encoded, once, before there are ranks to wait for it
        fork=check_device("train", config.device)[0] == "cpu",
        terminate=config.saves,
    )


def check_devices(config: TrainConfig) -> None:
    """Check that this machine has a device for each rank of the run.

    Raises:
        ValueError: It has less.
    """
    if check_device("train", config.device)[0] == "cpu":
        return
    count = torch.accelerator.device_count()
    if config.ranks > count:
        raise ValueError(
            f"train: grid {config.shown} has {config.ranks} ranks and this machine {count} of device"
            f" {config.device!r}, one for a rank; use a smaller grid, or torchrun on more machines"
        )


def train_rank(config: TrainConfig, batches: data.Batches | None = None) -> Outcome | None:
    """What each rank runs. Returns the outcome on rank 0, None elsewhere.

    Args:
        config: The options.
        batches: The run's, where all was checked before this rank began.

    Raises:
        ValueError: The grid does not match the ranks, or some rank cannot take part; the same on every rank.
    """
    rank = Rank.from_environment()
    assert rank is not None
    check_ranks("train", config.grid, config.pipeline, rank.world_size)
    set_threads(config.threads, rank.local_world_size)
    problem = ""
    if batches is None:
        try:
            batches = check(config).batches()
        except (ValueError, OSError) as error:
            problem = str(error)
    with ExitStack() as held:
        # Closed on success only: a rank that fails must not wait for what is pending; its peers see it die.
        with axo.connect(config.grid, device=config.device, pipeline=config.pipeline) as comms:
            agree(checkpoint_group(comms), problem)
            assert batches is not None
            again = {"resume": config.resume is not None, "overwrite": config.overwrite}
            run = Run(config.out, comms, checkpoints=Path(config.out) / CHECKPOINTS, **again)
            held.callback(run.close)
            outcome = _train(config, comms, batches, run)
        return _finish(config, batches, outcome) if rank.rank == 0 else None


def _train(config: TrainConfig, comms: axo.Communicators, batches: data.Batches, run: Run) -> Outcome:
    trainer = Trainer(config, comms, batches)
    checkpoints = Checkpoints(config, trainer, run)
    start, losses = checkpoints.resume()
    log, display = None, None
    if comms.everyone.rank == 0:
        if config.resume is not None:
            found = "the start: no checkpoint there"
            if checkpoints.origin:
                found = f"{checkpoints.origin}, after step {start}{checkpoints.changed}"
            print(f"axo train: goes on in {config.out} from {found}")
        shape = models.shape_of(models.resolve(config.model, config.model_overrides))
        log = TrainLog(config, shape, batches.tokens, comms.world.transport, start)
        display = Display(Console(), f"axo {config.shown}", config.steps)
    started, stopped = time.perf_counter(), ""
    with display or nullcontext(), checkpoints:
        for step in trainer.run(start):
            losses.append(step.loss)
            if log and display and (len(losses) % config.log_every == 0 or len(losses) == config.steps):
                display.show(len(losses), log.step(step))
            stopped = checkpoints.stopped_by if step.stop and len(losses) < config.steps else ""
            checkpoints.after(step, losses)
            if stopped:
                break
    outcome = Outcome(
        losses,
        time.perf_counter() - started,
        batches.vocab_size,
        Path(config.out, LOG_NAME),
        Path(config.out, PLOT_NAME),
        start=start,
        checkpoint=checkpoints.last,
        stopped=stopped,
    )
    if log is not None:
        summary = {"steps": len(losses), "seconds": outcome.seconds, "tail_loss": outcome.tail_loss}
        log.write({"kind": "summary"} | summary)
        log.close()
    return outcome


def _finish(config: TrainConfig, batches: data.Batches, outcome: Outcome) -> Outcome:
    """Train serially where that was asked for, and draw the losses."""
    serial: list[float] | None = None
    verdict: parity.Parity | None = None
    started = time.perf_counter()
    if config.compare_serial and not outcome.stopped:
        serial = []
        with Display(Console(), "serial", config.steps) as display:
            for loss in train_serial(config, batches):
                serial.append(loss)
                display.show(len(serial), {"loss": loss})
        verdict = parity.compare(outcome.losses, serial, config.precision)
    serial_seconds = time.perf_counter() - started
    plot.draw(
        outcome.plot,
        outcome.losses,
        title=f"{config.model} on {config.shown}",
        subtitle=_subtitle(config, outcome.start, outcome.seconds),
        vocabulary=outcome.vocabulary,
        serial=serial,
        limit=verdict.limit if verdict is not None and not verdict.relative else None,
    )
    return replace(outcome, serial=serial, serial_seconds=serial_seconds, parity=verdict)


def _subtitle(config: TrainConfig, start: int, seconds: float) -> str:
    ranks = config.ranks
    took = f"{config.steps} steps" if start else f"{config.steps} steps in {seconds:.0f} s"
    return (
        f"{ranks} rank{'s' if ranks > 1 else ''} · {config.precision} · {config.batch_size} rows of "
        f"{config.seq_len} tokens · AdamW, lr {config.lr:g} · {took}"
    )
