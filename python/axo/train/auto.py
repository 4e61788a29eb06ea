"""``--grid auto``: grid, stages, schedule and micro-batches are what the planner predicts to be fastest.

Other training programs ask for a configuration that trains like theirs. Where the planner cannot answer there is an
error: nothing stands in for its answer. Not here: the prediction (``axo.perf.grid_choice``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from litgpt.config import Config

from axo.grid import Grid
from axo.launch import Rank
from axo.perf import machine, planner, readers
from axo.perf.grid_choice import choose, schedules_for, stage_counts
from axo.train import models
from axo.train.check import check_grid
from axo.train.config import TrainConfig

_PLANNED = {"bf16-mixed": "bf16-mixed", "16-mixed": "bf16-mixed", "bf16-true": "bf16-true"}


def chosen(
    config: TrainConfig,
    rank: Rank | None,
    ranks: int,
    machine_name: str,
    given: Collection[str],
    *,
    owner: str = "train: grid=auto",
    model: Config | None = None,
    pieces: Callable[[Grid], int] | None = None,
    stages: bool = True,
) -> tuple[TrainConfig, str]:
    """Return ``config`` with the fastest grid and stages, and what was chosen and why.

    Args:
        config: Its grid does not count.
        rank: Under torchrun: who this process is.
        ranks: How many new ones to plan for; 0: it is not said.
        machine_name: A machine that the planner knows, or a file; "": what ``axo profile`` wrote here.
        given: Which of pipeline, schedule, cuts and microbatches the user has set: those are kept.
        owner: Who asks, by which option.
        model: What is trained; None: what ``config`` names.
        pieces: In how many pieces a grid runs its batch; 0: the batch does not suit it. None: ``config.accumulate``.
        stages: Whether several may be chosen.

    Raises:
        ValueError: Ranks or machine are not known, an option is not planned, or nothing fits.
    """
    for right, planned in (
        (config.algorithm == "axonn", f"axonn; with algorithm={config.algorithm}"),
        (config.context == 1, f"whole sequences; with context={config.context}"),
        (config.experts == 1, f"experts on all data ranks; with experts={config.experts}"),
        (config.precision in _PLANNED, f"{', '.join(_PLANNED)}, not precision={config.precision!r};"),
        (
            config.offload in ("none", "optimizer"),
            f"an offload of the optimizer alone; with offload={config.offload}",
        ),
    ):
        if not right:
            raise ValueError(f"{owner} plans {planned} name a grid")
    if rank is None and ranks < 1:
        raise ValueError(f"{owner} does not know how many ranks to start; add --ranks N, or use torchrun")
    if rank is not None and ranks not in (0, rank.world_size):
        raise ValueError(f"{owner} on {ranks} ranks, but {rank.world_size} ranks were started; leave their number out")
    ranks = ranks if rank is None else rank.world_size
    try:
        on = machine.load(machine_name or machine.measured_here())
    except ValueError as error:
        raise ValueError(f"{owner}: {error}") from None
    kept = {name: getattr(config, name) for name in ("pipeline", "schedule", "cuts", "microbatches") if name in given}
    wanted = kept.get("pipeline", 0)
    request = planner.Request(
        readers.from_litgpt(
            vars(model or models.resolve(config.model, config.model_overrides)), seq_length=config.seq_len
        ),
        on,
        ranks,
        config.batch_size * config.seq_len,
        overlap=frozenset(config.overlap.split(",")) - {"none", ""},
        gather={"all": "keep", "none": "drop"}.get(config.gather_cache, "auto"),
        zero=config.zero,
        precision=_PLANNED[config.precision],
        recompute="none" if not config.recompute else "selective" if config.recompute_keeps == "products" else "full",
        offload=config.offload == "optimizer",
        sequence_parallel=config.sequence_parallel,
        optimizer=config.optimizer,
        chunked_loss=config.chunks_loss,
        pipeline=(wanted,) if wanted else stage_counts(ranks) if stages else (1,),
        schedules=schedules_for(kept.get("schedule", ""), wanted, kept.get("cuts", "")),
    )

    def accumulated(grid: Grid) -> int:
        return 0 if config.batch_size % (grid.z * grid.data * config.accumulate) else config.accumulate

    choice = choose(request, pieces or accumulated, kept.get("microbatches", 0))
    best = choice.best
    changes: dict[str, Any] = {"grid": best.grid, "pipeline": 1}
    if best.stages is not None:
        changes |= {"pipeline": best.stages.ranks, "schedule": best.stages.schedule}
        cuts = kept.get("cuts", ",".join(map(str, best.stages.bounds[1:-1])))
        changes |= {"microbatches": best.run.micro_batches, "cuts": cuts}
    return replace(config, **changes), choice.tell(machine_name or on.name)


def planned(config: TrainConfig, machine_name: str, given: Collection[str], ranks: int) -> TrainConfig:
    """What ``chosen`` gives on so many new ranks, checked as a grid of the user's is.

    Raises:
        ValueError: As for :func:`chosen`, and for ``axo.train.check.check_grid``.
    """
    check_grid(config := chosen(config, None, ranks, machine_name, given)[0])
    return config
