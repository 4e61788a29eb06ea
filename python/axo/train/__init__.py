"""Training: ``run(TrainConfig(...))`` is what ``axo train`` calls.

Cut by subject: ``config`` (options and checks), ``recipe`` (optimizer, schedule, precision), ``loop`` (the parallel
step), ``serial`` (the oracle), ``parity``, ``runner`` (the whole), and what people see:
``log``, ``plot``, ``progress``, ``peaks``.
"""

from axo.launch import RankFailed
from axo.train.config import TrainConfig
from axo.train.runner import Outcome, run

__all__ = ["Outcome", "RankFailed", "TrainConfig", "run"]
