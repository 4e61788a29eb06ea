"""Training: ``run(TrainConfig(...))`` is what ``axo train`` calls.

Cut by subject: ``config`` (options and checks), ``recipe`` (optimizer, schedule, precision), ``loop`` (the parallel
step), ``serial`` (the oracle), ``parity``, ``launch`` (local ranks), ``runner`` (the whole), and what people see:
``log``, ``plot``, ``progress``, ``flops``.
"""

from axo.trainer.config import TrainConfig
from axo.trainer.launch import RankFailed
from axo.trainer.runner import Outcome, run

__all__ = ["Outcome", "RankFailed", "TrainConfig", "run"]
