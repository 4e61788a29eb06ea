"""One training run from its options to its outcome: what every rank does, and how it goes on from a checkpoint.

A run is checked before ranks exist, as far as that is possible. Ranks then connect, agree that all of them can read the
data, train, and part; rank 0 alone holds the log and, with ``compare_serial``, trains the serial model afterwards, when
the other ranks are gone, with the threads of one rank.

A checkpoint of step s holds everything after s steps; step s is the next. The batches are a function of (seed, step,
row), so the step is the data's position; what that function depends on is kept beside it and compared, and so are the
model's options: a checkpoint of other heads may have the same shapes. A run may go on on another grid, for more steps,
or with other options of the optimizer; with another order of the data or model only where that is asked for.
A run has an identity (``axo.checkpoint.Run``): it loads, replaces and removes its own checkpoints only.
"""

from __future__ import annotations

import math
import time
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import axo
from axo import checkpoint
from axo.checkpoint.folder import check_place, name_of, number_of, step_of
from axo.checkpoint.mirrors import Mirrors
from axo.checkpoint.ranks import agree, checkpoint_group, share
from axo.comm.extension import _C
from axo.comm.rendezvous import admit_nobody_else
from axo.grid import check_ranks
from axo.launch import Interrupted, Rank, Termination, launch_local, set_threads
from axo.matmul.products import products_of
from axo.offload import OffloadedAdamW
from axo.train import data, elastic
from axo.train.check import check, check_grid, copy_bytes
from axo.train.config import CHECKPOINTS, LOG_NAME, PLOT_NAME, TrainConfig
from axo.train.copies import RankCopies
from axo.train.elastic import StateCopies
from axo.train.log import Display, TrainLog, draw
from axo.train.loop import Step, Trainer
from axo.train.serial import Parity, compare, train_serial
from axo.train.slow import words

TAIL = 10  # steps whose mean loss is a run's result
WARM_STEPS = 3  # before the one that is traced
_ORDER = ("seed", "batch_size", "seq_len", "tokenizer")  # with the text: what the order of the data depends on
_NOT_OF_MODEL = ("name", "hf_config", "block_size", "vocab_size", "padding_multiple")  # change no logit
_SHOWN = {"adamw": "AdamW", "muon": "Muon"}
_OF_OPTIMIZER = ("betas", "weight_decay")  # its options on the command line, beside the rate


@dataclass(frozen=True)
class Outcome:
    """What a run gave: losses of each step (nats), seconds of training, and the comparison if there was one.

    ``start`` is the first step of this process; ``checkpoint`` the last one saved; ``stopped`` names what ended
    the run before its last step (SIGTERM, Ctrl-C), "": nothing; ``next`` is the run on other ranks that it goes on as.
    """

    losses: list[float]
    seconds: float
    vocabulary: int
    log: Path
    plot: Path
    serial: list[float] | None = None
    serial_seconds: float = 0.0
    parity: Parity | None = None
    start: int = 0
    checkpoint: Path | None = None
    stopped: str = ""
    next: TrainConfig | None = None

    @property
    def tail_loss(self) -> float:
        """Mean of the last ``TAIL`` losses."""
        return sum(self.losses[-TAIL:]) / len(self.losses[-TAIL:])

    @property
    def drop(self) -> float:
        """How far that lies under a guess, ln(vocabulary)."""
        return math.log(self.vocabulary) - self.tail_loss


def run(config: TrainConfig, on_ranks: elastic.OnRanks | None = None) -> Outcome | None:
    """Train: on new local ranks, or as the rank that torchrun made of this process. None on ranks other than 0.

    Args:
        config: The options.
        on_ranks: With ``elastic``: gives the run on another number of ranks; None: it takes the nearest grid.

    Raises:
        ValueError: The options are wrong.
        axo.launch.RankFailed: A local rank failed.
    """
    if config.hosts is None and Rank.from_environment() is not None:
        return train_rank(config)
    batches = check(config, one_machine=True)
    launch = partial(launch_local, train_rank, fork=config.device.startswith("cpu"), terminate=config.saves)
    if config.elastic is None:
        return launch(config.ranks, config, batches)
    on_ranks = on_ranks or partial(elastic.nearest, config)
    elastic.check(config, on_ranks, copy_bytes(config, check_grid(config)[1]))
    outcome: Outcome | None = None

    def start(launches: elastic.Launches, copies: StateCopies) -> int:
        nonlocal outcome
        ranks, of_all = launches.ranks, launches.part
        outcome = launch(ranks, launches.config, batches, copies, noted=copies.signals, part=of_all)
        return outcome.next.ranks if outcome is not None and outcome.next is not None else 0

    elastic.run(config, on_ranks, start)
    return outcome


def train_rank(
    config: TrainConfig, batches: data.Batches | None = None, copies: StateCopies | None = None
) -> Outcome | None:
    """What each rank runs. Returns the outcome on rank 0, None elsewhere.

    Args:
        config: The options.
        batches: The run's, where all was checked before this rank began.
        copies: Where ranks that may die leave copies of their state; None: they do not.

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
            if config.elastic is not None:
                raise ValueError(
                    f"train: elastic={config.elastic} starts its own ranks; leave torchrun or srun out, and"
                    " for several hosts give --hosts, or use --save-every with --resume auto"
                )
            batches = check(config)
        except (ValueError, OSError) as error:
            problem = str(error)
    with ExitStack() as last:
        # Closed on success only: a rank that fails must not wait for what is pending; its peers see it die.
        ways = {"pipeline": config.pipeline, "context": config.context, "experts": config.experts}
        with axo.connect(config.grid, device=config.device, timeout=config.timeout, **ways) as comms:
            if comms.device.type == "cpu":
                admit_nobody_else()
            agree(checkpoint_group(comms), problem)
            if copies is not None:
                copies.mark("agree")
            assert batches is not None
            again = {"resume": config.resume is not None, "overwrite": config.overwrite}
            of_hosts, place = None if copies is None else copies.run, Path(config.out) / CHECKPOINTS
            folder = checkpoint.Run(config.out, comms, checkpoints=place, identity=of_hosts, **again)
            last.callback(folder.close)
            outcome = _train(config, comms, batches, folder, copies)
        if rank.rank != 0:
            return None
        return _finish(config, batches, outcome) if outcome.next is None else outcome


def _train(
    config: TrainConfig,
    comms: axo.Communicators,
    batches: data.Batches,
    folder: checkpoint.Run,
    copies: StateCopies | None,
) -> Outcome:
    trainer, termination = Trainer(config, comms, batches), Termination() if config.saves else None
    checkpoints = Checkpoints(config, trainer, folder, termination, copies)
    start, losses = checkpoints.resume()
    hosts = share(checkpoint_group(comms), _C.host_name())
    log, display = None, None
    if comms.everyone.rank == 0:
        if config.resume is not None:
            told = f"{checkpoints.origin}, after step {start}{checkpoints.changed}" if checkpoints.origin else ""
            print(f"axo train: goes on in {config.out} from {told or 'the start: no checkpoint there'}")
        log = TrainLog(config, trainer.model.config, batches.tokens, comms.world.transport, hosts, start)
        display = Display(f"axo {config.shown}", config.steps)
    traced = min(start + WARM_STEPS, config.steps - 1) if config.trace is not None else -1
    began, stopped, next_run = time.perf_counter(), "", None
    with display or nullcontext(), termination or nullcontext():
        for index in range(start, config.steps):
            step = trainer.step(index) if index != traced else _traced_step(trainer, index)
            if checkpoints.copies:
                checkpoints.copies.settle(index + 1)
            losses.append(step.loss)
            ends = index + 1 == config.steps
            if log and display and (slow := log.watch(step)):
                display.console.print(f"axo train: {words(slow)}", highlight=False, soft_wrap=True, markup=False)
            if log and display and (ends or (index + 1) % config.log_every == 0):
                display.show(index + 1, log.step(step))
            if log and checkpoints.copies and (line := checkpoints.copies.first_step(index + 1)):
                log.write(line)
            checkpoints.after(step)
            if checkpoints.copies and checkpoints.copies.resizes:
                next_run = checkpoints.copies.next
                break
            if step.stop and not ends and termination is not None:
                stopped = termination.by  # another rank's is taken to be SIGTERM
                break
    if checkpoints.copies and checkpoints.copies.resizes and termination is not None and termination.asked:
        raise Interrupted(termination.number)  # this rank alone, and late
    seconds, out = time.perf_counter() - began, Path(config.out)
    outcome = Outcome(losses, seconds, batches.vocab_size, out / LOG_NAME, out / PLOT_NAME, start=start)
    if log is not None:
        summary = {"kind": "summary", "steps": len(losses), "seconds": seconds, "tail_loss": outcome.tail_loss}
        log.write(summary | {"fused": products_of(comms).fused.report})
        log.close()
    return replace(outcome, checkpoint=checkpoints.last, stopped=stopped, next=next_run)


def _traced_step(trainer: Trainer, index: int) -> Step:
    from axo.train.trace import traced_step  # which draws

    return traced_step(trainer, index)


def _finish(config: TrainConfig, batches: data.Batches, outcome: Outcome) -> Outcome:
    """Train serially where that was asked for, and draw the losses."""
    began = time.perf_counter()
    if config.compare_serial and not outcome.stopped:
        serial: list[float] = []
        with Display("serial", config.steps) as display:
            for loss in train_serial(config, batches):
                serial.append(loss)
                display.show(len(serial), {"loss": loss})
        parity = compare(outcome.losses, serial, config.precision)
        outcome = replace(outcome, serial=serial, serial_seconds=time.perf_counter() - began, parity=parity)
    took = f"{config.steps} steps" + (f" in {outcome.seconds:.0f} s" if not outcome.start else "")
    subtitle = (
        f"{config.ranks} rank{'s' if config.ranks > 1 else ''} · {config.precision} · {config.batch_size} rows of "
        f"{config.seq_len} tokens · {_SHOWN[config.optimizer]}, lr {config.lr:g} · {took}"
    )
    limit = outcome.parity.limit if outcome.parity is not None and not outcome.parity.relative else None
    curves: dict[str, Any] = {"vocabulary": outcome.vocabulary, "serial": outcome.serial, "limit": limit}
    draw(outcome.plot, outcome.losses, title=f"{config.model} on {config.shown}", subtitle=subtitle, **curves)
    return outcome


class Checkpoints:
    """The checkpoints of one run on this rank: when they are saved, and how the run goes on from one.

    Args:
        config: The options.
        trainer: Its model, optimizer and data.
        folder: The run's hold on its folder.
        termination: Notes SIGTERM and Ctrl-C; None: they end the run at once.
        copies: Where copies in memory go; None: nowhere.

    Attributes:
        last: The newest checkpoint that this run wrote; None: none yet.
        origin: The one that it went on from; None: none.
        changed: The optimizer's options that are this command's and differ from those of ``origin``, in words.
        copies: Those in memory; None: there are none.
    """

    def __init__(
        self,
        config: TrainConfig,
        trainer: Trainer,
        folder: checkpoint.Run,
        termination: Termination | None,
        copies: StateCopies | None = None,
    ) -> None:
        self._state_copies = copies
        self.copies: RankCopies | None = None
        if copies is not None:
            save = partial(self._save, keep=1)
            self.copies = RankCopies(config, copies, trainer.comms, save, lambda: trainer.asked_to_stop())
        self._config, self._trainer, self._run, self._termination = config, trainer, folder, termination
        self._folder = Path(config.out) / CHECKPOINTS
        # What a step depends on beside the weights: the data, and what the model makes of them.
        self._order = {name: getattr(config, name) for name in _ORDER} | {"text": trainer.batches.text}
        self._model = {name: value for name, value in asdict(trainer.model.config).items() if name not in _NOT_OF_MODEL}
        self._done, self._losses = 0, list[float]()
        self.last: Path | None = None
        self.origin: Path | None = None
        self.changed = ""
        if termination is not None:
            termination.progress = self._progress
            trainer.asked_to_stop = lambda: termination.asked

    def _progress(self) -> tuple[int, Path | None, int]:
        newest = checkpoint.latest(self._folder, run=self._run.id) or self.origin
        if newest is not None and self._state_copies is not None and newest.parent == Path(self._state_copies.folder):
            newest = None  # it ends with the launcher
        return self._done, newest, (step_of(newest.name) or 0) if newest is not None else 0

    def resume(self) -> tuple[int, list[float]]:
        """Load what ``--resume`` asks for. Returns the next step, and the losses of those before it.

        Raises:
            ValueError: There is no such checkpoint, or it is of another model or another order of the data; or a later
                step's place is taken.
        """
        config, losses, problem = self._config, [], ""
        newest = None if config.resume is None else self._newest(self._run.id)
        asked = newest if config.resume == "auto" else config.resume
        if self.copies is not None:
            self.copies.complete(asked)
        if asked is not None:
            losses = self._load(str(asked), newest)
        elif config.resume is not None and (others := self._newest(None)) is not None:
            raise ValueError(
                f"train: the checkpoints in {self._folder} are another run's; name the one to go on from, such as"
                f" --resume {others}"
            )
        self._done, self._losses = len(losses), losses
        if config.saves and self._trainer.comms.everyone.rank == 0 and self._folder.is_dir():
            try:
                for path in sorted(self._folder.iterdir()):
                    if self._done < (step_of(path.name) or 0) <= config.steps:
                        check_place(path, self._run.id)
            except ValueError as error:
                problem = str(error)
        agree(checkpoint_group(self._trainer.comms), problem)
        if self.copies is not None:
            self.copies.loaded(self._done)
        return self._done, losses

    def _newest(self, run: str | None) -> Path | None:
        """The newest checkpoint of a run, None: of any. Rank 0 looks: the others might see the folder later."""
        first = self._trainer.comms.everyone.rank == 0
        return checkpoint.share_path(self._trainer.comms, checkpoint.latest(self._folder, run=run) if first else None)

    def _load(self, path: str, newest: Path | None) -> list[float]:
        """Load a checkpoint; ``newest`` is this run's. Returns the losses of the steps before it."""
        config, optimizer = self._config, self._trainer.optimizer
        asked = [{name: group[name] for name in _OF_OPTIMIZER if name in group} for group in optimizer.param_groups]
        loaded = checkpoint.load(path, self._trainer.model, optimizer)
        self.origin = loaded.path
        for group, options in zip(optimizer.param_groups, asked, strict=True):
            for name, value in options.items():
                if group[name] != value and name not in self.changed:
                    self.changed += f", with {name}={value} (there {group[name]})"
            group.update(options)  # this command's: those of the checkpoint were loaded with it
        extra = loaded.extra if isinstance(loaded.extra, dict) else {}
        losses = list(extra.get("losses", []))
        if len(losses) != loaded.step:
            raise ValueError(
                f"train: {loaded.path} was not saved by axo train: of its {loaded.step} steps it has {len(losses)}"
                " losses; name one that was"
            )
        if not config.allow_new_data:
            self._check_position(loaded.path, extra)
        if loaded.step > config.steps:
            raise ValueError(
                f"train: {loaded.path} is of step {loaded.step}, beyond steps={config.steps}; ask for more steps"
            )
        if newest is not None and number_of(newest) > loaded.step and config.saves:
            if newest == loaded.path:
                raise ValueError(f"train: {newest} is of step {loaded.step}; rename it to {name_of(loaded.step)}")
            raise ValueError(
                f"train: this run has later checkpoints than {loaded.path}, the newest {newest}, and the next --resume"
                " would take that: go on from it with --resume auto, remove the later ones, or give another --out"
            )
        if extra.get("scaler"):
            self._trainer.scaler.load_state_dict(extra["scaler"])
        return losses

    def _check_position(self, path: Path, extra: dict[str, Any]) -> None:
        """Refuse a checkpoint after which this run's data or model would be others."""
        order, model = "the order of the data", "the model"
        for what, saved, now in ((order, extra, self._order), (model, extra.get("model", {}), self._model)):
            for name, value in now.items():
                if name in saved and saved[name] != value:
                    option = name.replace("_", "-") if saved is extra else name
                    raise ValueError(
                        f"train: {path} was saved with {option}={saved[name]}, now it is {value}, and {what} would be"
                        " another: use the same, or say --allow-new-data"
                    )

    def after(self, step: Step) -> None:
        """Save if it is time: each ``save_every`` steps, after the last, and when any rank has been asked to end."""
        config, self._done = self._config, step.index + 1
        ends = step.stop or self._done == config.steps
        if self.copies is not None:
            if ends or self.copies.after(self._done):
                self.copies.wait()
        if not config.saves:
            return
        if step.stop and self._termination is not None:
            self._termination.tell_lost()
        if not ends and self._done % config.save_every:
            return
        self._run.hold()
        if self.copies is not None:
            self.copies.wait()
        handle = self._save(self._folder, keep=config.keep)
        self.last = handle.path
        if ends:
            handle.wait()

    def _save(self, folder: Path, mirrors: Mirrors | None = None, *, keep: int) -> checkpoint.Save:
        trainer = self._trainer
        # A copy of the losses: the file is written while the next steps add theirs. Not where that takes a copy of the
        # optimizer's state which memory has no room for.
        extra = self._order | {"model": self._model, "losses": list(self._losses)}
        extra |= {"scaler": trainer.scaler.state_dict()}
        return checkpoint.save(
            folder, trainer.model, trainer.optimizer, step=self._done, extra=extra, keep=keep, run=self._run.id,
            async_=not isinstance(trainer.optimizer, OffloadedAdamW), mirrors=mirrors,
        )  # fmt: skip
