"""Training: ``run(TrainConfig(...))`` is what ``axo train`` calls.

Cut by subject: ``config`` (options), ``check`` (what goes together), ``recipe`` (optimizer, learning rate, precision),
``loop`` (the parallel step), ``serial`` (the oracle), ``parity``, ``resume`` (checkpoints and the run's folder),
``runner`` (the whole), and what people see: ``log``, ``plot``, ``progress``, ``trace``. Names load on first use, so
that options can be read without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from axo.train.config import TrainConfig

if TYPE_CHECKING:
    from axo.launch import RankFailed
    from axo.train.runner import Outcome, run

__all__ = ["Outcome", "RankFailed", "TrainConfig", "run"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("axo.launch" if name == "RankFailed" else "axo.train.runner"), name)
    raise AttributeError(f"module 'axo.train' has no attribute {name!r}")
