"""Checkpoints of a training run: when they are saved, and how a run goes on from one.

A checkpoint of step s holds everything after s steps; step s is the next. The batches are a function of (seed, step,
row), so the step is the data's position; what that function depends on is kept beside it and compared. A run may go on
on another grid, for more steps, or with another rate; not with another order of the data.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from axo import checkpoint
from axo.launch import Termination
from axo.train.config import TrainConfig
from axo.train.loop import Step, Trainer

FOLDER = "checkpoints"
# What the order of the data depends on.
_POSITION = ("seed", "batch_size", "seq_len", "tokenizer")


def saves(config: TrainConfig) -> bool:
    """Whether a run saves checkpoints, and so also on SIGTERM."""
    return config.save_every > 0


class Checkpoints:
    """The checkpoints of one run on this rank; a context in which SIGTERM is noted.

    Args:
        config: The run.
        trainer: Its model and optimizer.

    Attributes:
        last: The newest checkpoint that this run wrote; None: none yet.
    """

    def __init__(self, config: TrainConfig, trainer: Trainer) -> None:
        self._config, self._trainer = config, trainer
        self._folder = Path(config.out) / FOLDER
        self._termination = Termination() if saves(config) else None
        self.last: Path | None = None

    def __enter__(self) -> Checkpoints:
        if self._termination is not None:
            self._termination.__enter__()
            self._trainer.asked_to_stop = lambda: self._termination is not None and self._termination.asked
        return self

    def __exit__(self, *error: Any) -> None:
        if self._termination is not None:
            self._termination.__exit__(*error)

    def resume(self) -> tuple[int, list[float]]:
        """Load what ``--resume`` asks for. Returns the next step, and the losses of those before it.

        Raises:
            ValueError: There is no such checkpoint, or it is of another model or another order of the data.
        """
        asked = self._config.resume
        if asked is None:
            return 0, []
        if asked == "auto":
            # Rank 0 looks: the others might see the folder later.
            newest = checkpoint.latest(self._folder) if self._trainer.comms.rank == 0 else None
            found = checkpoint.share_path(self._trainer.comms, newest)
            if found is None:
                return 0, []
            asked = str(found)
        loaded = checkpoint.load(asked, self._trainer.model, self._trainer.optimizer)
        extra = loaded.extra or {}
        for name, value in self._position().items():
            if name in extra and extra[name] != value:
                option = name.replace("_", "-")
                raise ValueError(
                    f"train: {loaded.path} was saved with {option}={extra[name]}, now it is {value}, and the order"
                    " of the data would be another: use the same, or start anew without --resume"
                )
        if loaded.step > self._config.steps:
            raise ValueError(
                f"train: {loaded.path} is of step {loaded.step}, beyond steps={self._config.steps}; ask for more steps"
            )
        if extra.get("scaler"):
            self._trainer.scaler.load_state_dict(extra["scaler"])
        return loaded.step, list(extra.get("losses", []))

    def after(self, step: Step, losses: list[float]) -> None:
        """Save if it is time: each ``save_every`` steps, after the last, and when any rank has been asked to end."""
        if not saves(self._config):
            return
        done = step.index + 1
        ends = step.stop or done == self._config.steps
        if not ends and done % self._config.save_every:
            return
        handle = checkpoint.save(
            self._folder,
            self._trainer.model,
            self._trainer.optimizer,
            step=done,
            extra=self._position() | {"losses": losses, "scaler": self._trainer.scaler.state_dict()},
            keep=self._config.keep,
            async_=True,
        )
        self.last = handle.path
        if ends:
            handle.wait()

    def _position(self) -> dict[str, Any]:
        return {name: getattr(self._config, name) for name in _POSITION}
