"""What options of the engine change in what layers send (``axo.matmul.cost``): ZeRO, and dtypes of what travels.

ZeRO on the data axis (see ``axo.overlap.zero`` for the algorithm):

    backward   stage 2: each all-reduce of gradients over data becomes a reduce-scatter of as many elements
    step       all_gather  data   ceil(r_i / Gdata) c_i of every parameter [r_i, c_i] of the rank, in buckets

Pure arithmetic, as there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from axo.grid import Grid
from axo.matmul.cost import (
    GATHER_WEIGHT,
    REDUCE_WEIGHT_GRAD,
    SCATTER_WEIGHT_GRAD,
    SUM_WEIGHT_BLOCK,
    Call,
    chunk,
    issued,
)

STEP = "step"
GATHER_PARAMETERS = "gather parameters"


def gather_parameters(
    shapes: Iterable[Sequence[int]], grid: Grid, *, itemsize: int = 4, bucket_bytes: int
) -> list[Call]:
    """Count the gathers after an optimizer step.

    Args:
        shapes: This rank's part of each parameter of one dtype, in the optimizer's order, the dim that is cut first.
        itemsize: Bytes an element of that dtype.
        bucket_bytes: Size of a bucket, all ranks' rows together; 0: each parameter by itself.
    """
    found: list[int] = []
    held = 0
    for rows, *others in shapes:
        mine = chunk(rows, grid.data) * math.prod(others)
        if held and (held + mine) * grid.data * itemsize > bucket_bytes:
            found.append(held)
            held = 0
        held += mine
    found.append(held)
    return issued([Call(STEP, "all_gather", "data", each, itemsize, GATHER_PARAMETERS) for each in found if each], grid)


def reduced_in(calls: Iterable[Call], itemsize: int) -> list[Call]:
    """Let the reductions of gradients have elements of ``itemsize`` bytes (``reduce_dtype``)."""
    gradients = (SCATTER_WEIGHT_GRAD, REDUCE_WEIGHT_GRAD, SUM_WEIGHT_BLOCK)
    return [call._replace(itemsize=itemsize) if call.purpose in gradients else call for call in calls]


def gathered_in_fp8(calls: Iterable[Call], columns: int, packed: int) -> list[Call]:
    """Let a weight of ``columns`` columns on a rank be gathered in fp8: ``packed`` bytes a row, with its scale."""
    return [
        call._replace(elements=call.elements // columns * packed, itemsize=1) if call.purpose == GATHER_WEIGHT else call
        for call in calls
    ]


def scatter_gradients(calls: Iterable[Call], grid: Grid) -> list[Call]:
    """Turn the reductions of gradients over data into those of stage 2.

    Apply it to ``axo.matmul.cost.in_buckets``. Exact where the rows of each gradient divide over data; else each
    gradient is padded to the longest rank's rows, which is a little more.
    """
    return [
        call._replace(op="reduce_scatter", elements=chunk(call.elements, grid.data) * grid.data)
        if call.purpose == REDUCE_WEIGHT_GRAD and call.axis == "data"
        else call
        for call in calls
    ]
