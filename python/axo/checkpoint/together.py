"""What the ranks of a save or a load tell each other: one process group, apart from training's, and shared errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist


def checkpoint_group(comms: Any) -> Any:
    """The process group of a grid's checkpoints, on CPU; None for one rank. Collective on its first use.

    Raises:
        ValueError: Several ranks, and no communicators.
    """
    if comms is None:
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f"checkpoint: {dist.get_world_size()} ranks, and the model has no parallel layer; pass comms="
            )
        return None
    return comms.checkpoint_group if comms.grid.world_size > 1 else None


def share(group: Any, value: Any) -> list[Any]:
    """Every rank's value, in rank order."""
    if group is None:
        return [value]
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def share_path(comms: Any, path: Path | None) -> Path | None:
    """Rank 0's path, on every rank."""
    return share(checkpoint_group(comms), path)[0]


def raise_together(group: Any, problem: str) -> None:
    """Go on only if no rank has a problem ("" = none).

    Raises:
        ValueError: Some rank has one; the same message on every rank.
    """
    problems = share(group, problem)
    wrong = [(rank, text) for rank, text in enumerate(problems) if text]
    if wrong:
        rank, text = wrong[0]
        raise ValueError(text if len(wrong) == len(problems) else f"rank {rank}: {text}")
