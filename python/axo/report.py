"""What ``axo info`` shows: versions, cores, and whether every axis of a grid carries a sum between local ranks."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from axo.grid import AXES, Grid


def facts() -> dict[str, str]:
    """Return names and values for people to read."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for name in ("axo", "torch", "litgpt", "triton", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    found["cores"] = f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}"
    return found


def check_grid(grid: Grid) -> Iterator[str]:
    """Start ``grid.world_size`` local ranks, sum rank numbers on every axis, and tell the result line by line.

    Raises:
        axo.launch.RankFailed: A rank failed, or a sum was wrong.
    """
    from axo.launch import launch_local

    transport = launch_local(_check_rank, grid.world_size, grid)
    yield f"{'grid':<12} {grid}: {grid.world_size} rank{'s' if grid.world_size > 1 else ''} over {transport}"
    for axis in AXES:
        yield f"{'axis ' + axis:<12} {grid.size(axis)} ranks, stride {grid.stride(axis)}, all_reduce ok"


def _check_rank(grid: Grid) -> str:
    import torch

    import axo

    torch.set_num_threads(1)
    with axo.connect(grid) as comms:
        for axis in AXES:
            total = comms.axis(axis).all_reduce(torch.tensor([comms.rank], dtype=torch.int64))
            expected = sum(grid.ranks(axis, comms.rank))
            if int(total) != expected:
                raise RuntimeError(f"all_reduce over {axis} gave {int(total)} instead of {expected}")
        return comms.world.transport
