"""``axo litgpt evaluate`` on a grid: LitGPT's own function on every rank, its model split.

LitGPT exports the checkpoint to Hugging Face's format, which rank 0 does while the others wait. The LM Evaluation
Harness then runs on every rank, on the same samples in the same order; of the model that it has loaded each rank keeps
its part (plan "auto"). Each rank reads the whole exported model first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import axo


@contextlib.contextmanager
def on_grid(fabric: Any, alone: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Split every model that the harness loads in the body. Rank 0 enters at once, the others when it loads one.

    Args:
        fabric: The run's Fabric, launched.
        alone: Lets a function run without the environment of a rank, by which the harness would share its samples out.
    """
    from lm_eval.models import huggingface

    stock: Any = huggingface.HFLM

    class SplitModel(stock):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            if fabric.global_rank == 0:
                fabric.barrier()  # what it reads has been exported
            alone(super().__init__)(*args, **options)
            strategy = fabric.strategy
            axo.parallelize(self.model, strategy.comms, plan="auto", algorithm=strategy.arrangement.name)

    if fabric.global_rank:
        fabric.barrier()
    huggingface.HFLM = SplitModel
    try:
        yield
    finally:
        huggingface.HFLM = stock
