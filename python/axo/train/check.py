"""Every check of a training run that needs no rank.

The checks run before ranks start (under torchrun on each rank), so that bad input costs one message and no process;
those that need no torch come first (``early``). They build the model without storage and read the sizes of the files;
they run no torch operation on data, since the ranks are forked from this process (a parallel operation here would leave
them without their thread pool).
"""

from __future__ import annotations

from axo.arrangement import arrangement_of
from axo.plans.litgpt import plan as litgpt_plan
from axo.train import early, models
from axo.train.config import TrainConfig


def check(config: TrainConfig, found: early.Checked | None = None) -> early.Checked:
    """Check everything that can be known before ranks exist. Returns what ``early.check`` has found.

    Args:
        config: The options.
        found: That, where it is known; None: it is asked here.

    Raises:
        ValueError: An option is wrong; the message names it, its value and what would work.
    """
    found = found or early.check(config)
    arrangement = arrangement_of("train", config.algorithm)
    litgpt_plan.check(models.build_empty(found.model), config.grid, arrangement, config.sequence_parallel)
    return found
