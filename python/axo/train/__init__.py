"""Training: ``run(TrainConfig(...))`` is what ``axo train`` calls.

Cut by subject: ``config`` (options), ``early`` and ``check`` (what goes together), ``recipe`` (optimizer, learning
rate, precision), ``loop`` (the parallel step), ``serial`` (the oracle), ``parity``, ``resume`` (checkpoints and the
run's folder), ``runner`` (the whole), and what people see: ``log``, ``plot``, ``progress``, ``trace``. Names load on
first use, so that options can be read without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from axo.lazy import names_of
from axo.train.config import TrainConfig

if TYPE_CHECKING:
    from axo.launch import RankFailed
    from axo.train.runner import Outcome, run

__all__ = ["Outcome", "RankFailed", "TrainConfig", "run"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = names_of(
        __name__, {"Outcome": "axo.train.runner", "RankFailed": "axo.launch", "run": "axo.train.runner"}
    )
