"""Communication as the papers write it: equations (1)-(9).

Ring collectives over G ranks, m = elements that each rank puts in, b = elements a second (equations (1)-(3)):

    t_AG = (G-1) m / b        t_RS = (G-1)/G m / b        t_AR = 2 (G-1)/G m / b

`layer_times` gives equations (4)-(9) of one layer, `communication_seconds` their sum over a model. What the planner
computes instead is in ``axo.perf.model``; tests hold the two together.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from axo.grid import AXES, Grid
from axo.perf.machine import Machine
from axo.perf.run_options import RunOptions
from axo.perf.workload import Workload


def ring_seconds(op: str, ranks: int, elements: float, bandwidth: float) -> float:
    """Return equations (1)-(3): time of a ring collective; ``bandwidth`` in elements (or bytes) a second.

    Raises:
        ValueError: An operation that has no ring equation.
    """
    if op not in _RING:
        raise ValueError(f"ring_seconds: op={op!r} has no ring equation; use one of {', '.join(_RING)}")
    return _RING[op](ranks) * elements / bandwidth


_RING = {
    "all_gather": lambda ranks: ranks - 1,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
}


class LayerTimes(NamedTuple):
    """Equations (4)-(8) of one layer, named as the papers name them."""

    ag_z: float
    rs_z: float
    ar_y: float
    ar_x: float
    ar_data: float

    @property
    def total(self) -> float:
        """Equation (9)."""
        return sum(self)


def layer_times(
    grid: Grid, m: float, k: float, n: float, bandwidth: dict[str, float] | float = 1.0, *, transposed: bool = False
) -> LayerTimes:
    """Return equations (4)-(8) for ``I[m, k] W[k, n]``, m = rows of one data-parallel group.

    Args:
        bandwidth: Elements a second: one figure (placement-agnostic) or one for each axis. A transposed layer swaps
            both the sizes and the bandwidths of x and y, so its ``ar_y`` runs over x.
    """
    b = dict.fromkeys(AXES, bandwidth) if not isinstance(bandwidth, dict) else bandwidth
    x, y = ("y", "x") if transposed else ("x", "y")
    gx, gy, gz, gd = grid.size(x), grid.size(y), grid.z, grid.data
    return LayerTimes(
        ag_z=ring_seconds("all_gather", gz, k * n / (gx * gy * gz), b["z"]),
        rs_z=ring_seconds("reduce_scatter", gz, k * n / (gx * gy), b["z"]),
        ar_y=ring_seconds("all_reduce", gy, m * n / (gz * gx), b[y]),
        ar_x=ring_seconds("all_reduce", gx, m * k / (gz * gy), b[x]),
        ar_data=ring_seconds("all_reduce", gd, k * n / (gx * gy * gz), b["data"]),
    )


def agnostic(machine: Machine) -> Machine:
    """Return ``machine`` with one bandwidth for every axis (the placement-agnostic model)."""
    return replace(
        machine,
        gpus_per_node=1,
        inter_gbs=machine.inter_gbs / machine.gpus_per_node,
        latency_intra_us=machine.latency_inter_us,
        cross_gbs={},
    )


def communication_seconds(
    workload: Workload, grid: Grid, machine: Machine, run: RunOptions, *, aware: bool = True
) -> float:
    """Return the papers' own figure of merit: equation (9) over all fully connected layers, seconds.

    Args:
        aware: Bandwidths by equation (10); False: one bandwidth for all axes (placement-agnostic).
    """
    on = machine if aware else agnostic(machine)
    bandwidth = {axis: on.bandwidth(grid, axis) / run.itemsize for axis in AXES}
    rows = run.batch_tokens / grid.data
    total = 0.0
    for block in workload.blocks:
        for layer in block.layers:
            if layer.kind == "linear":
                sizes = (rows * layer.rows, layer.in_features, layer.out_features)
                total += block.repeat * layer_times(grid, *sizes, bandwidth, transposed=layer.transposed).total
    return total
