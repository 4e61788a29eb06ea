"""``axo train --grid auto``: grid, stages, schedule and micro-batches are what the planner predicts to be fastest.

Not here: the prediction (``axo.perf.grid_choice``).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from axo.grid import Grid
from axo.launch import Rank
from axo.perf import machine, planner, readers
from axo.perf.grid_choice import choose, schedules_for, stage_counts
from axo.train import models
from axo.train.config import TrainConfig

_PLANNED = {"bf16-mixed": "bf16-mixed", "16-mixed": "bf16-mixed", "bf16-true": "bf16-true"}


def ranks_of(rank: Rank | None, ranks: int) -> int:
    """The ranks to plan for: torchrun's, of which ``rank`` is one, or as many new ones as are asked for.

    Raises:
        ValueError: Their number is not known, or another is asked for.
    """
    if rank is not None and ranks not in (0, rank.world_size):
        raise ValueError(f"ranks={ranks}, but {rank.world_size} ranks were started; leave it out")
    if rank is None and ranks < 1:
        raise ValueError("grid=auto does not know how many ranks to start; add --ranks N, or use torchrun")
    return ranks if rank is None else rank.world_size


def chosen(config: TrainConfig, ranks: int, machine_name: str, given: Collection[str]) -> tuple[TrainConfig, str]:
    """Return ``config`` with the fastest grid and stages on ``ranks`` ranks, and what was chosen and why.

    Args:
        config: Its grid does not count.
        machine_name: A machine that the planner knows, or a file; "": what ``axo profile`` wrote here.
        given: Which of pipeline, schedule, cuts and microbatches the user has set: those are kept.

    Raises:
        ValueError: The machine is not known, or nothing fits.
    """
    if config.algorithm != "axonn":
        raise ValueError(f"train: grid=auto chooses for axonn; with algorithm={config.algorithm} name a grid")
    if config.context > 1:
        raise ValueError(f"train: grid=auto does not plan context={config.context}; name a grid")
    if config.precision not in _PLANNED:
        raise ValueError(
            f"train: grid=auto plans {', '.join(_PLANNED)}, not precision={config.precision!r}; name a grid"
        )
    if config.optimizer != "adamw":
        raise ValueError(f"train: grid=auto plans AdamW; with optimizer={config.optimizer} name a grid")
    if config.offload not in ("none", "optimizer"):
        raise ValueError(
            f"train: grid=auto plans an offload of the optimizer alone; with offload={config.offload} name a grid"
        )
    try:
        on = machine.load(machine_name or machine.measured_here())
    except ValueError as error:
        raise ValueError(f"train: grid=auto: {error}") from None
    model = models.resolve(config.model, config.model_overrides)
    workload = readers.from_litgpt(vars(model), seq_length=config.seq_len)
    recompute = "none" if not config.recompute else "selective" if config.recompute_keeps == "products" else "full"
    kept = {name: getattr(config, name) for name in ("pipeline", "schedule", "cuts", "microbatches") if name in given}
    stages = kept.get("pipeline", 0)
    request = planner.Request(
        workload,
        on,
        ranks,
        config.batch_size * config.seq_len,
        overlap=frozenset(config.overlap.split(",")) - {"none", ""},
        gather={"all": "keep", "none": "drop"}.get(config.gather_cache, "auto"),
        zero=config.zero,
        precision=_PLANNED[config.precision],
        recompute=recompute,
        offload=config.offload == "optimizer",
        sequence_parallel=config.sequence_parallel,
        pipeline=(stages,) if stages else stage_counts(ranks),
        schedules=schedules_for(kept.get("schedule", ""), stages, kept.get("cuts", "")),
    )

    def pieces(grid: Grid) -> int:
        return 0 if config.batch_size % (grid.z * grid.data * config.accumulate) else config.accumulate

    choice = choose(request, pieces, kept.get("microbatches", 0))
    best = choice.best
    changes: dict[str, Any] = {"grid": best.grid, "pipeline": 1}
    if best.stages is not None:
        changes |= {"pipeline": best.stages.ranks, "schedule": best.stages.schedule}
        changes |= {"microbatches": best.run.micro_batches, "cuts": kept.get("cuts", "planner")}
    return replace(config, **changes), choice.tell(on.name)
