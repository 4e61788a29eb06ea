"""The collectives of a whole step, put together from what the planner counts for each layer; and its buckets."""

from collections import Counter
from collections.abc import Iterable

from axo.grid import Coords, Grid
from axo.matmul import cost
from axo.perf.layers import RoutingKind
from axo.perf.run_options import RunOptions
from axo.perf.workload import Workload


def step_calls(workload: Workload, grid: Grid, run: RunOptions, coords: Coords = cost.FIRST) -> list[cost.Call]:
    """Return every collective of one step of one micro-batch on the rank at ``coords``.

    Gradients come in the order of backward, since that decides which share a bucket.
    """
    rows = run.group_rows(grid)
    calls = []
    for block in reversed(workload.blocks):
        gathers = 1 if run.cached_gathers == 1.0 else 2
        for _ in range(block.repeat):
            for layer in reversed(block.layers):
                issued = layer.calls(grid, rows, run, recompute=block.reruns(run), gathers=gathers, coords=coords)
                if layer is block.unsummed(grid, run):
                    issued = [one for one in issued if (one.phase, one.op) != (cost.RECOMPUTE, "reduce_scatter")]
                calls += (1 if isinstance(layer, RoutingKind) else layer.mine) * issued
    return in_buckets(calls, run.bucket_bytes)


def beside(sent: dict[tuple[str, str], int], calls: Iterable[cost.Call]) -> dict[tuple[str, str], int]:
    """Bytes by operation and axis that were ``sent`` and are none of ``calls``; what is below 0 was not sent."""
    planned = Counter[tuple[str, str]]()
    for call in calls:
        planned[call.op, call.axis] += call.calls * call.elements * call.itemsize
    both = {*sent, *planned}
    return {key: more for key in both if (more := sent.get(key, 0) - planned[key])}


def in_buckets(calls: Iterable[cost.Call], bucket_bytes: int) -> list[cost.Call]:
    """Put the gradient reductions of a whole backward pass, in its order, into buckets as the engine does.

    Gradients of one item size that are reduced over the same axes, one after the other, share buckets of at most
    ``bucket_bytes`` (0: each by itself) if data is among these. What is no such reduction is given back as it is.
    """
    found: list[cost.Call] = []
    gradients: list[tuple[tuple[str, ...], cost.Call]] = []
    for call in calls:
        if call.purpose != cost.REDUCE_WEIGHT_GRAD:
            found.append(call)
        elif gradients and gradients[-1][0] + (call.axis,) in _VECTORS and _same_vector(gradients[-1][1], call):
            gradients[-1] = (*gradients[-1][0], call.axis), call
        else:
            gradients.append(((call.axis,), call))
    used: dict[tuple[tuple[str, ...], int], int] = {}
    for axes, call in gradients:
        kind, capacity = (axes, call.itemsize), bucket_bytes // call.itemsize if "data" in axes else 0
        held = used.get(kind, 0)
        if held and held + call.elements > capacity:
            found += _bucket(kind, used.pop(kind))
            held = 0
        used[kind] = held + call.elements
        if used[kind] >= capacity:
            found += _bucket(kind, used.pop(kind))
    for kind, elements in used.items():
        found += _bucket(kind, elements)
    return found


# The axes over which one vector's gradient goes, as far as they are larger than 1.
_VECTORS = {("z", "data"), ("x", "z"), ("x", "data"), ("x", "z", "data")}


def _same_vector(over_z: cost.Call, over_data: cost.Call) -> bool:
    return (over_z.elements, over_z.itemsize) == (over_data.elements, over_data.itemsize)


def _bucket(kind: tuple[tuple[str, ...], int], elements: int) -> list[cost.Call]:
    axes, itemsize = kind
    return [
        cost.Call(cost.BACKWARD, "all_reduce", axis, elements, itemsize, cost.REDUCE_WEIGHT_GRAD)
        for axis in axes
        if elements
    ]
