"""Checkpoints of a training run: when they are saved, and how a run goes on from one.

A checkpoint of step s holds everything after s steps; step s is the next. The batches are a function of (seed, step,
row), so the step is the data's position; what that function depends on is kept beside it and compared, and so are the
model's options: a checkpoint of other heads may have the same shapes. A run may go on on another grid, for more steps,
or with other options of the optimizer; with another order of the data or model only where that is asked for.
A run has an identity (``axo.checkpoint.Run``): it loads, replaces and removes its own checkpoints only.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from axo import checkpoint
from axo.checkpoint.folder import check_place, name_of, number_of, step_of
from axo.checkpoint.ranks import agree, checkpoint_group
from axo.launch import Termination
from axo.offload import OffloadedAdamW
from axo.train import models
from axo.train.config import CHECKPOINTS, TrainConfig
from axo.train.loop import Step, Trainer

_ORDER = ("seed", "batch_size", "seq_len", "tokenizer")  # with the text: what the order of the data depends on
_NOT_OF_MODEL = ("name", "hf_config", "block_size", "vocab_size", "padding_multiple")  # change no logit
_OF_OPTIMIZER = ("betas", "weight_decay")  # its options on the command line, beside the rate


class Checkpoints:
    """The checkpoints of one run on this rank; a context in which SIGTERM and Ctrl-C are noted.

    Args:
        config: The options.
        trainer: Its model, optimizer and data.
        run: Its hold on its folder.

    Attributes:
        last: The newest checkpoint that this run wrote; None: none yet.
        origin: The one that it went on from; None: none.
        changed: The optimizer's options that are this command's and differ from those of ``origin``, in words.
    """

    def __init__(self, config: TrainConfig, trainer: Trainer, run: checkpoint.Run) -> None:
        self._config, self._trainer, self._run = config, trainer, run
        self._folder = Path(config.out) / CHECKPOINTS
        model = asdict(models.resolve(config.model, config.model_overrides))  # once: its file may change
        known = {name: value for name, value in model.items() if name not in _NOT_OF_MODEL}
        order = {name: getattr(config, name) for name in _ORDER}
        # What a step depends on beside the weights: the data, and what the model makes of them.
        self._position = order | {"text": trainer.batches.text, "model": known}
        self._termination = Termination() if config.saves else None
        self._done = 0
        self.last: Path | None = None
        self.origin: Path | None = None
        self.changed = ""

    def __enter__(self) -> Checkpoints:
        if self._termination is not None:
            termination = self._termination.__enter__()
            termination.progress = self._progress
            self._trainer.asked_to_stop = lambda: termination.asked
        return self

    def __exit__(self, *error: Any) -> None:
        if self._termination is not None:
            self._termination.__exit__(*error)

    @property
    def stopped_by(self) -> str:
        """What asked this rank to end, in words; another rank's is taken to be SIGTERM."""
        return self._termination.by if self._termination is not None else ""

    def _progress(self) -> tuple[int, Path | None, int]:
        newest = checkpoint.latest(self._folder, run=self._run.id) or self.origin
        return self._done, newest, (step_of(newest.name) or 0) if newest is not None else 0

    def resume(self) -> tuple[int, list[float]]:
        """Load what ``--resume`` asks for. Returns the next step, and the losses of those before it.

        Raises:
            ValueError: There is no such checkpoint, or it is of another model or another order of the data; or a later
                step's place is taken.
        """
        start, losses = self._load()
        self._done = start
        problem = ""
        if self._config.saves and self._trainer.comms.everyone.rank == 0 and self._folder.is_dir():
            try:
                for path in sorted(self._folder.iterdir()):
                    if start < (step_of(path.name) or 0) <= self._config.steps:
                        check_place(path, self._run.id)
            except ValueError as error:
                problem = str(error)
        agree(checkpoint_group(self._trainer.comms), problem)
        return start, losses

    def _load(self) -> tuple[int, list[float]]:
        asked = self._config.resume
        if asked is None:
            return 0, []
        newest = self._newest(self._run.id)
        if asked == "auto":
            if newest is None:
                others = self._newest(None)
                if others is None:
                    return 0, []
                raise ValueError(
                    f"train: the checkpoints in {self._folder} are another run's; name the one to go on from, such as"
                    f" --resume {others}"
                )
            asked = str(newest)
        groups = self._trainer.optimizer.param_groups
        asked_for = [{name: group[name] for name in _OF_OPTIMIZER} for group in groups]
        loaded = checkpoint.load(asked, self._trainer.model, self._trainer.optimizer)
        self.origin = loaded.path
        for group, options in zip(self._trainer.optimizer.param_groups, asked_for, strict=True):
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
        saved, now = (each | each.get("model", {}) for each in (extra, self._position))
        for name, value in now.items():
            if name in saved.keys() - {"model"} and saved[name] != value and not self._config.allow_new_data:
                of_data = name in extra
                option = name.replace("_", "-") if of_data else name
                raise ValueError(
                    f"train: {loaded.path} was saved with {option}={saved[name]}, now it is {value}, and"
                    f" {'the order of the data' if of_data else 'the model'} would be another: use the same, or say"
                    " --allow-new-data"
                )
        if loaded.step > self._config.steps:
            raise ValueError(
                f"train: {loaded.path} is of step {loaded.step}, beyond steps={self._config.steps}; ask for more steps"
            )
        if newest is not None and number_of(newest) > loaded.step and self._config.saves:
            if newest == loaded.path:
                raise ValueError(f"train: {newest} is of step {loaded.step}; rename it to {name_of(loaded.step)}")
            raise ValueError(
                f"train: this run has later checkpoints than {loaded.path}, the newest {newest}, and the next --resume"
                " would take that: go on from it with --resume auto, remove the later ones, or give another --out"
            )
        if extra.get("scaler"):
            self._trainer.scaler.load_state_dict(extra["scaler"])
        return loaded.step, losses

    def _newest(self, run: str | None) -> Path | None:
        """The newest checkpoint of a run, None: of any. Rank 0 looks: the others might see the folder later."""
        found = checkpoint.latest(self._folder, run=run) if self._trainer.comms.everyone.rank == 0 else None
        return checkpoint.share_path(self._trainer.comms, found)

    def after(self, step: Step, losses: list[float]) -> None:
        """Save if it is time: each ``save_every`` steps, after the last, and when any rank has been asked to end."""
        if not self._config.saves:
            return
        self._done = done = step.index + 1
        if step.stop and self._termination is not None:
            self._termination.tell_lost()
        ends = step.stop or done == self._config.steps
        if not ends and done % self._config.save_every:
            return
        self._run.hold()
        handle = checkpoint.save(
            self._folder,
            self._trainer.model,
            self._trainer.optimizer,
            step=done,
            # A copy of the losses: the file is written while the next steps add theirs.
            extra=self._position | {"losses": list(losses), "scaler": self._trainer.scaler.state_dict()},
            keep=self._config.keep,
            run=self._run.id,
            # Not while the next steps run if that takes a copy which memory has no room for.
            async_=not isinstance(self._trainer.optimizer, OffloadedAdamW),
        )
        self.last = handle.path
        if ends:
            handle.wait()
