"""Where to cut a model into stages so that the slowest rank of a pipeline has as little to do as possible.

What counts is flops: of each block, and of what stands before the first and behind the last, which go with the first
and the last stage. An embedding costs next to nothing and a head as much as one or two blocks, so the last stage gets
fewer blocks. The result is the same whatever the machine.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from axo.perf.layers import EmbeddingKind, LossKind, seen
from axo.perf.pipeline_schedule import rank_of
from axo.perf.workload import Block, Workload


def read(text: str) -> str | list[int]:
    """Return the cuts that a command line names: ``"even"``, ``"planner"``, or the numbers of ``"3,7"``.

    Raises:
        ValueError: It is none of these.
    """
    if text in ("even", "planner"):
        return text
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"cuts={text!r} is not even, planner, or numbers of blocks such as 3,7")
    return list(map(int, parts))


def check(blocks: int, stages: int, cuts: str | Sequence[int]) -> None:
    """Check cuts that ``split`` is to get; the planner's fit any model that has a block for each stage.

    Raises:
        ValueError: They do not give each stage a block.
    """
    bounds_of(blocks, stages, "even" if cuts == "planner" else cuts)


def bounds_of(blocks: int, stages: int, cuts: str | Sequence[int]) -> list[int]:
    """Where each stage begins, and the end: ``stages + 1`` numbers of blocks.

    Raises:
        ValueError: The cuts do not give each stage a block.
    """
    _check_stages(blocks, stages)
    if isinstance(cuts, str):
        if cuts != "even":
            raise ValueError(
                f"pipeline: cuts={cuts!r} is not known; use 'even', 'planner', or the first block of each later stage"
            )
        return [round(blocks * stage / stages) for stage in range(stages + 1)]
    inner = list(cuts)
    if any(isinstance(cut, bool) or not isinstance(cut, int) for cut in inner) or len(inner) != stages - 1:
        raise ValueError(
            f"pipeline: cuts={inner} must be {stages - 1} whole numbers for {stages} stages: the first block of each"
            " stage but the first"
        )
    bounds = [0, *inner, blocks]
    if any(low >= high for low, high in itertools.pairwise(bounds)):
        raise ValueError(
            f"pipeline: cuts={inner} leave a stage without layers, or go beyond the {blocks} blocks; they must rise"
            f" from 1 to {blocks - 1}"
        )
    return bounds


def _check_stages(blocks: int, stages: int) -> None:
    if not 1 <= stages <= blocks:
        raise ValueError(
            f"pipeline: {blocks} blocks over {stages} stages leave a stage without layers; use at most {blocks} stages"
        )


def _stack(workload: Workload) -> tuple[list[Block], list[int]]:
    """The different blocks of a model, what stands before the blocks first and what stands behind them last; and for
    each block in between its place among them.

    Raises:
        ValueError: The model is not an embedding, a stack of blocks, and a head.
    """
    first, *middle, last = workload.blocks
    ends = isinstance(first.layers[0], EmbeddingKind) and isinstance(last.layers[-1], LossKind)
    if not (ends and middle and first.repeat == last.repeat == 1):
        raise ValueError(f"pipeline: {workload.name} is not an embedding, blocks and a head; it cannot be cut")
    return [first, *middle, last], [kind for kind, block in enumerate(middle, 1) for _ in range(block.repeat)]


def part(workload: Workload, bounds: Sequence[int], stages: Sequence[int]) -> Workload:
    """Return the part of a model that some of its stages are, of which ``bounds`` says where each begins."""
    kinds, stack = _stack(workload)
    last = len(bounds) - 2
    mine = [kind for stage in stages for kind in stack[bounds[stage] : bounds[stage + 1]]]
    counts = Counter([0] * (0 in stages) + mine + [len(kinds) - 1] * (last in stages))
    return replace(workload, blocks=tuple(kinds[kind].times(counts[kind]) for kind in sorted(counts)))


def planned(workload: Workload, ranks: int, stages: int, order: str) -> list[int]:
    """Return where each stage of ``workload`` begins, and the end: ``best`` of its flops."""
    kinds, stack = _stack(workload)
    flops = [sum(layer.flops(1.0, seen(workload.seq_length)) for layer in block.layers) for block in kinds]
    return best(flops[0], [flops[kind] for kind in stack], flops[-1], ranks=ranks, stages=stages, order=order)


def best(
    before: float, blocks: Sequence[float], after: float, *, ranks: int, stages: int, order: str = "loop"
) -> list[int]:
    """Return where each stage begins, and the end: ``stages + 1`` numbers of blocks.

    The work of the busiest rank is the least that moving blocks from stage to stage reaches; then that of the busiest
    stages.

    Args:
        before, after: Work of the first and of the last stage beside their blocks.
        blocks: Work of each block.
        ranks, stages, order: Of the pipeline; see ``axo.perf.pipeline_schedule.rank_of``.

    Raises:
        ValueError: Fewer blocks than stages.
    """
    _check_stages(len(blocks), stages)
    return list(_best(before, tuple(blocks), after, ranks, stages, order))


@lru_cache(maxsize=256)
def _best(before: float, blocks: tuple[float, ...], after: float, ranks: int, stages: int, order: str) -> list[int]:
    sums = [0.0, *itertools.accumulate(blocks)]
    homes = [rank_of(stage, stages, ranks, order) for stage in range(stages)]

    def badness(bounds: list[int]) -> tuple[float, float]:
        loads, squares = [0.0] * ranks, 0.0
        for stage in range(stages):
            work = sums[bounds[stage + 1]] - sums[bounds[stage]]
            work += before * (stage == 0) + after * (stage == stages - 1)
            loads[homes[stage]] += work
            squares += work * work
        return max(loads), squares

    bounds = [round(len(blocks) * stage / stages) for stage in range(stages + 1)]
    least = badness(bounds)
    while True:
        tried = []
        for source, target in itertools.permutations(range(stages), 2):
            if bounds[source + 1] - bounds[source] < 2:
                continue
            moved = list(bounds)
            step = -1 if target > source else 1  # the cuts between them give one block towards the target
            for cut in range(min(source, target) + 1, max(source, target) + 1):
                moved[cut] += step
            tried.append((badness(moved), moved))
        nearest = min(tried, default=(least, bounds))
        if nearest[0] >= least:
            return bounds
        least, bounds = nearest
