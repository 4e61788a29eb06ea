"""``axo info``: versions, libraries, what this machine lacks, settings, sums on all axes of a grid.

Or flight files put together, or which rank of a run is slow.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from axo.cli.output import say, show_table
from axo.cores import usable_cores
from axo.files import printable
from axo.grid import AXES, Grid
from axo.settings import VARIABLES, settings


def info(
    grid: Annotated[
        str, typer.Option(metavar="XxYxZxDATA", help="Start these local ranks and check each axis.")
    ] = "1x1x1x1",
    flight: Annotated[bool, typer.Option("--flight", help="Put ranks' flight files together instead.")] = False,
    live: Annotated[bool, typer.Option("--live", help="Show which rank of a run is slow instead.")] = False,
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="With --flight: axo-flight-PID.jsonl of the ranks. With --live: the folder of a run."),
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
    if live:
        from axo.train import slow

        if files is None or len(files) != 1:
            raise ValueError("--live needs the folder of one run of axo train")
        header, rows, lines = slow.live(files[0])
        show_table(f"who waits for whom in {files[0]}", (header, rows))
        for line in lines:
            say(line)
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
    without = {"litgpt": "; axo train and axo litgpt need it: pip install '.[litgpt]'", "triton": "; GPUs need it"}
    for name in ("axo", "numpy", "litgpt", "triton", "torch"):
        try:
            found[name] = f"{version(name)}: ok"
        except PackageNotFoundError:
            found[name] = f"not installed{without.get(name, '')}"
    found |= _libraries()
    found |= {"compiler": _compiler(), "gpus": _gpus(), "files": _files(), "memory": _memory()}
    found["cores"] = f"{usable_cores()} usable of {os.cpu_count()}"
    return found


def _libraries() -> dict[str, str]:
    """What the compiled part says of this torch and machine: loops of reductions, the GPU's collective library."""
    import torch

    try:
        from axo.comm.extension import _C
    except ImportError as error:
        return {"torch": f"{torch.__version__}: {error}"}
    from axo.errors import Error

    found = {"cpu loops": _C.reduce_instruction_set(), "host": _C.host_name()}
    amd = torch.version.hip is not None
    try:
        found["rccl" if amd else "nccl"] = f"{_C.collective_library(amd)}: ok"
    except Error:
        found["rccl" if amd else "nccl"] = "not found; GPUs need it, CPUs do not"
    return found


def _compiler() -> str:
    if shutil.which("g++") is None:
        return "no g++: Axo runs, but cannot be installed again for another torch; sudo apt-get install g++"
    said = subprocess.run(["g++", "-dumpfullversion"], capture_output=True, text=True)
    return f"g++ {said.stdout.strip()}: ok"


def _gpus() -> str:
    import torch

    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    return f"{count}: ok" if count else "none that torch sees: ranks run on CPU cores"


def _files() -> str:
    """Open files: a rank holds some for each peer of this host, and stores and data loaders take more."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY or limit >= 1024:
        return f"{'any number' if limit == resource.RLIM_INFINITY else limit} may be open: ok"
    return f"only {limit} may be open; many ranks want more: ulimit -n 4096"


def _memory() -> str:
    """Free memory: what ranks share lies in it, too (sealed files without a name; /dev/shm is not used)."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    free, whole = (kib[name] * 1024 / 1e9 for name in ("MemAvailable", "MemTotal"))
    verdict = "ok" if free >= 2 else "little; a rank that has no memory left is killed"
    return f"{free:.1f} of {whole:.1f} GB free, what ranks share included: {verdict}"


def settings_table() -> tuple[list[str], list[list[str]]]:
    """The environment variables; those that are set with their values."""
    given = settings()
    rows = [[v.name, printable(given.get(v.name, "-")), v.default, v.meaning] for v in VARIABLES]
    return ["variable", "set to", "default", "meaning"], rows


def check_grid(grid: Grid) -> Iterator[str]:
    """Start ``grid.world_size`` local ranks, sum rank numbers on every axis, and tell the result line by line.

    Raises:
        axo.launch.RankFailed: A rank failed, or a sum was wrong.
    """
    from axo.launch import launch_local

    transport = launch_local(_check_rank, grid.world_size, grid)
    yield f"{'grid':<12} {grid}: {_ranks(grid.world_size)} over {transport}"
    for axis in AXES:
        yield f"{'axis ' + axis:<12} {_ranks(grid.size(axis))}, stride {grid.stride(axis)}, all_reduce ok"


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"


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
