"""What ``axo info`` shows: versions, libraries, settings, and whether every axis of a grid carries a sum."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from axo.grid import AXES, Grid
from axo.settings import Variable


def facts() -> dict[str, str]:
    """Return names and values for people to read."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for name in ("axo", "torch", "litgpt", "triton", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    found |= _libraries()
    found["cores"] = f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}"
    return found


def _libraries() -> dict[str, str]:
    """What the compiled part found on this machine: loops of the CPU's reductions, the GPU's collective library."""
    import torch

    try:
        from axo.comm.extension import _C
    except ImportError as error:
        return {"compiled": f"does not load: {error}"}
    from axo.errors import Error

    found = {"cpu loops": _C.reduce_instruction_set(), "host": _C.host_name()}
    amd = torch.version.hip is not None
    try:
        found["rccl" if amd else "nccl"] = _C.collective_library(amd)
    except Error:
        found["rccl" if amd else "nccl"] = "not found; GPUs need it, CPUs do not"
    return found


def settings_table(variables: Sequence[Variable], settings: dict[str, str]) -> Any:
    """The environment variables, as a table of rich: those that are set with their values."""
    from rich.table import Table

    table = Table(title="environment", title_justify="left")
    for column in ("variable", "set to", "default", "meaning"):
        table.add_column(column, overflow="fold", no_wrap=column == "variable")
    for variable in variables:
        table.add_row(variable.name, settings.get(variable.name, "-"), variable.default, variable.meaning)
    return table


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
