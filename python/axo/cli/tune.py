"""``axo tune``: measure a model's products once, show what was chosen, and write the tuner's cache.

What is measured, and how, is in axo_kernels; the layers read the cache at their first call (``AXO_TUNE=cached``, the
default).

Not here: fused operations, which need the ranks of their axis: ``AXO_TUNE=first-step`` measures those inside a run.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from axo.cli.output import check_file, is_stdout, say, show_table, write
from axo.grid import Grid

if TYPE_CHECKING:
    import torch

    from axo_kernels.tune.model import Row
    from axo_kernels.tune.model_shapes import LinearShape

DTYPES = ("bfloat16", "float16", "float32")


def tune(
    model: Annotated[str, typer.Option(help="gpt-5b, gpt-10b, ... gpt-640b: the papers' models.")],
    grid: Annotated[str, typer.Option(metavar="XxYxZxDATA", help="What cuts the model's layers.")] = "1x1x1x1",
    rows: Annotated[int, typer.Option(help="Tokens of one data-parallel group; z cuts them.")] = 2048,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N; default: a GPU where there is one.")] = "",
    shrink: Annotated[int, typer.Option(help="Divide the hidden size, for machines without a GPU.")] = 1,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the rows here too; - for stdout.")] = None,
) -> None:
    """Measure a model's products, print a table, and write the tuner's cache."""
    cuts = Grid.parse(grid)
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    for name, value in (("rows", rows), ("shrink", shrink)):
        if value < 1:
            raise ValueError(f"--{name} {value} is not at least 1")
    quiet = is_stdout(json_out)
    check_file(json_out)
    measured = _measure(model, cuts, rows, dtype, device, shrink, quiet)
    if json_out is not None:
        write(json_out, measured)
        if not quiet:
            say(f"rows written to {json_out}")


def _measure(model: str, grid: Grid, rows: int, dtype: str, device: str, shrink: int, quiet: bool) -> dict[str, Any]:
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from axo_kernels import Tuner
    from axo_kernels import device as devices
    from axo_kernels.tune.cache import Cache
    from axo_kernels.tune.model import tune_model
    from axo_kernels.tune.model_shapes import layers

    place = _device(device)
    kind = getattr(torch, dtype)
    cut = layers(model, (grid.x, grid.y, grid.z), rows, shrink)
    _check_memory(cut, kind, place)
    cache = Cache(devices.device_name(place), devices.versions())
    started = time.perf_counter()
    # On a terminal only; stderr, so that stdout can be piped.
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    hidden = quiet or not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=hidden) as bar:
        task = bar.add_task("", total=3 * len(cut))

        def show(done: int, total: int, name: str) -> None:
            bar.update(task, description=f"{name} ({done} of {total})")

        tuner = Tuner("first-step", cache=cache, progress=show)
        found: list[Row] = []
        for row in tune_model(cut, tuner, dtype=kind, device=place):
            found.append(row)
            bar.advance(task)
    seconds = time.perf_counter() - started
    result = {
        "model": model, "grid": str(grid), "rows": rows, "dtype": dtype, "shrink": shrink,
        "device": devices.device_name(place), "versions": devices.versions(), "seconds": round(seconds, 2),
        "measured": tuner.measured, "cache": str(cache.path), "products": [asdict(row) for row in found],
    }  # fmt: skip
    if not quiet:
        table = [
            [row.layer, row.product, f"{1e3 * row.torch_seconds:.3f}", row.chosen, f"{1e3 * row.chosen_seconds:.3f}",
             f"{row.gain:.2f}"]
            for row in found
        ]  # fmt: skip
        title = f"{model} cut by {grid}, {rows} rows, {dtype}"
        show_table(title, (["layer", "product", "torch ms", "chosen", "ms", "gain"], table))
        kept = "choices are in" if cache.path.exists() else "could not be kept in"
        say(f"{tuner.measured} products measured in {seconds:.1f} s on {result['device']}; {kept} {cache.path}")
    return result


def _device(name: str) -> torch.device:
    """The device that was asked for, with its index.

    Raises:
        ValueError: There is no such device here.
    """
    import torch

    try:
        place = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ValueError(f"device {name!r} is not known; use cpu, cuda or cuda:N") from None
    if place.type == "cuda":
        count = torch.cuda.device_count()
        if (place.index or 0) >= count:
            raise ValueError(f"device {name!r} is not there: {count} GPUs are visible; use --device cpu")
        return torch.device("cuda", place.index if place.index is not None else torch.cuda.current_device())
    if place.type != "cpu":
        raise ValueError(f"device {name!r} has no products to tune; use cpu, cuda or cuda:N")
    return place


def _check_memory(cut: list[LinearShape], dtype: torch.dtype, place: torch.device) -> None:
    """Refuse a product whose operands, results and fp32 draws do not fit beside each other.

    Raises:
        ValueError: One does not.
    """
    import os

    import torch

    if place.type == "cuda":
        there = torch.cuda.mem_get_info(place)[0]
    else:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    for layer in cut:
        needed = max(3 * each.bytes + 4 * each.n * each.k for each in layer.products(dtype).values())
        if needed > there:
            raise ValueError(
                f"layer '{layer.name}' needs {needed / 1e9:.1f} GB and {there / 1e9:.1f} GB are free on {place}; use a"
                f" larger --grid, fewer --rows, or --shrink"
            )
