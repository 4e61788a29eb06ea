"""``axo info``: versions, libraries, settings, and whether every axis of a grid carries a sum; or flight files."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from axo.cli.output import say, show_table
from axo.grid import AXES, Grid
from axo.settings import VARIABLES, settings


def info(
    grid: Annotated[
        str, typer.Option(metavar="XxYxZxDATA", help="Start these local ranks and check each axis.")
    ] = "1x1x1x1",
    flight: Annotated[bool, typer.Option("--flight", help="Put ranks' flight files together instead.")] = False,
    files: Annotated[
        list[Path] | None, typer.Argument(help="With --flight: axo-flight-PID.jsonl of the ranks.")
    ] = None,
) -> None:
    """Show versions, libraries and settings, and check that the ranks of a grid can talk; or read flight files."""
    if flight:
        from rich.console import Console

        from axo.comm.flight import render

        if not files:
            raise ValueError("--flight needs files, such as FOLDER/axo-flight-*.jsonl")
        render(files, Console())
        return
    if files:
        raise ValueError(f"{files[0]} is a flight file only with --flight before it")
    parsed = Grid.parse(grid)
    for name, value in facts().items():
        say(f"{name:<12} {value}")
    show_table("environment", settings_table())
    for line in check_grid(parsed):
        say(line)


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


def settings_table() -> tuple[list[str], list[list[str]]]:
    """The environment variables; those that are set with their values."""
    given = settings()
    rows = [[v.name, given.get(v.name, "-"), v.default, v.meaning] for v in VARIABLES]
    return ["variable", "set to", "default", "meaning"], rows


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
