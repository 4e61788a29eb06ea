"""``axo litgpt evaluate`` on a grid: LitGPT's own function on every rank, its model split.

LitGPT exports the checkpoint to Hugging Face's format, which rank 0 does while the others wait. The LM Evaluation
Harness then runs on every rank, on the same samples in the same order; of the model that it has loaded each rank keeps
its part (plan "auto"). Each rank reads the whole exported model first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import axo

_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "LT_STRATEGY", "LT_ACCELERATOR")


@contextlib.contextmanager
def no_rank() -> Iterator[None]:
    """A block without the environment of a rank: a serial program with a Fabric, or a harness, would act by it."""
    kept = {name: os.environ.pop(name) for name in _RANK if name in os.environ}
    try:
        yield
    finally:
        os.environ |= kept


def split_models(fabric: Any) -> None:
    """Split every model that the harness loads from now on. Rank 0 returns at once, the others when it loads one.

    Args:
        fabric: The run's Fabric, launched.
    """
    from lm_eval.models import huggingface

    stock: Any = huggingface.HFLM

    class SplitModel(stock):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            if fabric.global_rank == 0:
                fabric.barrier()  # what it reads has been exported
            with no_rank():  # else it would share its samples out
                super().__init__(*args, **options)
            strategy = fabric.strategy
            axo.parallelize(self.model, strategy.comms, plan="auto", algorithm=strategy.arrangement.name)

    huggingface.HFLM = SplitModel
    if fabric.global_rank:
        fabric.barrier()
