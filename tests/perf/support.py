"""The collectives of a whole step, put together from what the planner counts for each layer."""

from axo.grid import Coords, Grid
from axo.matmul import cost
from axo.perf.layer_time import RunOptions, calls_of, ends_block
from axo.perf.workload import Workload


def step_calls(workload: Workload, grid: Grid, run: RunOptions, coords: Coords = cost.FIRST) -> list[cost.Call]:
    """Return every collective of one step of one micro-batch on the rank at ``coords``.

    Gradients come in the order of backward, since that decides which share a bucket.
    """
    rows = run.group_rows(grid)
    calls = []
    for block in reversed(workload.blocks):
        gathers = 1 if run.keeps else 2
        for _ in range(block.repeat):
            for layer in reversed(block.layers):
                issued = calls_of(
                    layer, grid, rows, run, checkpointed=block.checkpointed, gathers=gathers, coords=coords
                )
                if run.sequence_parallel and layer is ends_block(block.layers):
                    issued = [one for one in issued if (one.phase, one.op) != (cost.RECOMPUTE, "reduce_scatter")]
                calls += layer.experts * issued
    return cost.in_buckets(calls, run.bucket_bytes)
