"""Where to cut a model into stages so that the slowest rank of a pipeline has as little to do as possible.

What counts is flops: of each block, and of what stands before the first and behind the last, which go with the first
and the last stage. An embedding costs next to nothing and a head as much as one or two blocks, so the last stage gets
fewer blocks. The result is the same whatever the machine.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from axo.perf.flops import forward_flops
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


class BlockStack:
    """The layers of a model as stages see them.

    Attributes:
        kinds: Different blocks, what stands before the blocks first, and what stands behind them last.
        stack: Of each block in between, its place in ``kinds``.

    Raises:
        ValueError: The model is not an embedding, a stack of blocks, and a head.
    """

    def __init__(self, workload: Workload) -> None:
        first, *middle, last = workload.blocks
        ends = first.layers[0].kind == "embedding" and any(layer.kind == "loss" for layer in last.layers)
        if not (ends and middle and first.repeat == last.repeat == 1):
            raise ValueError(f"pipeline: {workload.name} is not an embedding, blocks and a head; it cannot be cut")
        self.kinds = [first, *(Block(block.layers, 1, block.checkpointed) for block in middle), last]
        self.stack = [kind for kind, block in enumerate(middle, 1) for _ in range(block.repeat)]
        self.parameters = [sum(layer.parameters for layer in block.layers) for block in self.kinds]
        self.flops = [
            sum(forward_flops(layer, 1.0, workload.seq_length) for layer in block.layers) for block in self.kinds
        ]
        self._composed: dict[tuple[tuple[int, ...], tuple[int, ...]], dict[int, int]] = {}
        self._blocks: dict[tuple[tuple[int, int], ...], dict[int, int]] = {}

    def composed(self, bounds: tuple[int, ...], stages: tuple[int, ...]) -> dict[int, int]:
        """Return how many of each kind some stages have, in order; equal answers are one object."""
        if (bounds, stages) not in self._composed:
            found: Counter[int] = Counter()
            for stage in stages:
                found.update([0] * (stage == 0))
                found.update(self.stack[bounds[stage] : bounds[stage + 1]])
                found.update([len(self.kinds) - 1] * (stage == len(bounds) - 2))
            same = tuple(sorted(found.items()))
            self._composed[bounds, stages] = self._blocks.setdefault(same, dict(same))
        return self._composed[bounds, stages]


def planned(workload: Workload, ranks: int, stages: int, order: str) -> list[int]:
    """Return where each stage of ``workload`` begins, and the end: ``best`` of its flops."""
    stack = BlockStack(workload)
    before, *_, after = stack.flops
    return best(before, [stack.flops[kind] for kind in stack.stack], after, ranks=ranks, stages=stages, order=order)


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
        found = min(tried, default=(least, bounds))
        if found[0] >= least:
            return bounds
        least, bounds = found
