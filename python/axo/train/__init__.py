"""Training: ``run(TrainConfig(...))`` is what ``axo train`` calls.

    config    the options, which are those of the command        check    all that can be refused before ranks start
    models    LitGPT's GPT, by name or file                      data     text, tokens, batches
    recipe    optimizer, learning rate, precision                loop     the parallel step: what a reader copies from
    runner    ranks, the run's folder, checkpoints               serial   the oracle, and the verdict
    log, trace   what people see                                 auto     ``--grid auto``

Names load on first use, so that options can be read without torch.
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
