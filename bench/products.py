"""Which distributed product moves least, and which is fastest? Every algorithm of ``axo.matmul.algorithms``, alike.

    axo bench products                                        # counts and predictions: arithmetic, in a second
    axo bench products --plot docs/img/products.png           # and a picture of volume against shape
    axo bench products --measure 4 --shapes 512x512x512       # and timed on local CPU ranks, in turns, checked

``calls``, ``deliveries`` and ``volume`` are of one forward and one backward pass over all ranks; volume is in units of
m*n elements of C, memory in units of (m k + k n + m n) / p. ``predicted`` is the time that the machine's links take for
it, from the bandwidth of each axis (equation 10), without the products.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from axo.grid import Grid
from axo.matmul.algorithm import Algorithm, Shape, Transfer
from axo.matmul.registry import algorithms

RANKS = (4, 8, 16, 27, 64)
SHAPES = {"square": Shape(4096, 4096, 4096), "tall": Shape(65536, 4096, 4096), "flat": Shape(1024, 4096, 16384)}
COLUMNS = {
    "ranks": "d",
    "shape": "s",
    "algorithm": "s",
    "grid": "s",
    "calls": "d",
    "deliveries": "d",
    "volume": ".2f",
    "memory": ".2f",
    "predicted ms": ".3f",
    "ms": ".3f",
    "#wrong": "d",
}


def grids_of(algorithm: Algorithm, ranks: int) -> list[Grid]:
    """The grids of ``ranks`` ranks, data = 1, that the algorithm can use."""
    found = []
    for grid in Grid.all(ranks):
        if grid.data == 1:
            try:
                algorithm.check(grid)
            except ValueError:
                continue
            found.append(grid)
    return found


def volume(transfers: list[Transfer]) -> int:
    """Elements moved, over all ranks and both passes."""
    return sum(transfer.elements for transfer in transfers)


def best_grid(algorithm: Algorithm, ranks: int, shape: Shape) -> Grid | None:
    """The grid on which the algorithm moves fewest elements; None if it has none of this many ranks."""
    return min(grids_of(algorithm, ranks), key=lambda grid: volume(algorithm.cost(grid, shape)), default=None)


def predicted_seconds(machine: Any, grid: Grid, transfers: list[Transfer], itemsize: int) -> float:
    """What the links take: a rank's share of what each axis moves, at the bandwidth of the axis, and the latencies."""
    seconds = 0.0
    for transfer in transfers:
        groups = grid.world_size // grid.size(transfer.axis)
        if transfer.op == "send":
            groups = grid.world_size
        moved = transfer.elements / grid.world_size * itemsize
        seconds += moved / machine.bandwidth(grid, transfer.axis)
        ring, tree = machine.latency(grid, transfer.axis)
        one = {"broadcast": tree, "reduce": tree, "send": ring / max(1, grid.size(transfer.axis) - 1)}
        seconds += transfer.calls / groups * one.get(transfer.op, ring)
    return seconds


def rows(options: argparse.Namespace, shapes: dict[str, Shape]) -> list[dict[str, Any]]:
    from axo.perf.machine import load

    machine, found = load(options.machine), []
    for ranks in options.ranks:
        for label, shape in shapes.items():
            for name, algorithm in algorithms.items():
                grid = best_grid(algorithm, ranks, shape)
                if grid is None:
                    continue
                cost = algorithm.cost(grid, shape)
                parts = (shape.m * shape.k + shape.k * shape.n + shape.m * shape.n) / ranks
                found.append(
                    {
                        "ranks": ranks,
                        "shape": f"{label} {shape.m}x{shape.k}x{shape.n}",
                        "algorithm": name,
                        "grid": str(grid),
                        "calls": sum(transfer.calls for transfer in cost),
                        "deliveries": sum(transfer.deliveries for transfer in cost),
                        "volume": volume(cost) / (shape.m * shape.n),
                        "memory": algorithm.memory(grid, shape) / parts,
                        "predicted ms": 1e3 * predicted_seconds(machine, grid, cost, options.itemsize),
                    }
                )
    return found


def measure(grids: list[tuple[str, str]], shape: tuple[int, int, int], rounds: int) -> list[dict[str, Any]]:
    """On every rank: each algorithm on its grid, in turns; milliseconds of forward and backward, and wrong elements."""
    import torch

    import axo

    torch.set_num_threads(1)
    whole = Shape(*shape)
    generator = torch.Generator().manual_seed(0)
    # whole numbers from -2 to 2: fp32 sums of them are exact in any order
    a, b, grad = (torch.randint(-2, 3, whole.of(matrix), generator=generator).float() for matrix in "ABC")
    expected = {"C": a @ b, "A": grad @ b.T, "B": a.T @ grad}
    cases = []
    for name, text in grids:
        comms, algorithm = axo.connect(text), algorithms[name]
        slices = {
            matrix: layout.slices(comms.grid, comms.coords, whole.of(matrix))
            for matrix, layout in (("A", algorithm.a), ("B", algorithm.b), ("C", algorithm.c))
        }
        parts = [full[slices[matrix]].clone() for full, matrix in ((a, "A"), (b, "B"), (grad, "C"))]
        cases.append((comms, algorithm, slices, parts))
    times: list[list[float]] = [[] for _ in cases]
    wrong = [0] * len(cases)
    for _ in range(rounds + 1):
        for index, (comms, algorithm, slices, parts) in enumerate(cases):
            comms.world.barrier()
            start = time.perf_counter()
            c = algorithm.forward(comms, parts[0], parts[1], whole)
            grad_a, grad_b = algorithm.backward(comms, *parts, whole)
            spent = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            times[index].append(comms.world.all_reduce(spent, "max").item())
            got = {"C": c, "A": grad_a, "B": grad_b}
            bad = sum(int((got[matrix] != expected[matrix][slices[matrix]]).sum()) for matrix in "CAB")
            wrong[index] += int(comms.world.all_reduce(torch.tensor([bad])).item())
    for comms, *_ in cases:
        comms.close()
    return [
        {"ms": 1e3 * statistics.median(series[1:]), "#wrong": bad} for series, bad in zip(times, wrong, strict=True)
    ]


def plot(path: Path, ranks: int) -> None:
    """Volume against m / n for k = n, an algorithm a line; below, who moves least for each pair of m / k and n / k."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    base, aspects = 4096, [2.0**e for e in range(-5, 7)]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    names = [name for name in algorithms if grids_of(algorithms[name], ranks)]
    for name in names:
        points = []
        for aspect in aspects:
            shape = Shape(int(base * aspect), base, base)
            grid = best_grid(algorithms[name], ranks, shape)
            assert grid is not None
            points.append(volume(algorithms[name].cost(grid, shape)) / base**2)
        left.plot(aspects, points, marker=".", label=name)
    left.set(xscale="log", yscale="log", xlabel="rows of activations / width of the weight, m / n (k = n)")
    left.set(ylabel="elements moved, forward and backward, in n^2", title=f"{ranks} ranks, each on its best grid")
    left.legend(fontsize=8, frameon=False)
    winners = []
    for high in aspects:
        row = []
        for wide in aspects:
            shape = Shape(int(base * wide), base, int(base * high))
            best = {name: best_grid(algorithms[name], ranks, shape) for name in names}
            row.append(
                min(range(len(names)), key=lambda i: volume(algorithms[names[i]].cost(best[names[i]], shape)))  # type: ignore[arg-type]
            )
        winners.append(row)
    colours = plt.get_cmap("tab10")
    right.pcolormesh(range(len(aspects) + 1), range(len(aspects) + 1), winners, cmap=colours, vmin=0, vmax=9)
    ticks = [index + 0.5 for index in range(0, len(aspects), 2)]
    right.set_xticks(ticks, [f"{aspects[i]:g}" for i in range(0, len(aspects), 2)])
    right.set_yticks(ticks, [f"{aspects[i]:g}" for i in range(0, len(aspects), 2)])
    right.set(xlabel="m / k", ylabel="n / k", title="who moves least")
    seen = sorted({index for row in winners for index in row})
    right.legend(
        [plt.Rectangle((0, 0), 1, 1, color=colours(index)) for index in seen],
        [names[index] for index in seen],
        fontsize=8,
        loc="lower left",
    )
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(arguments: list[str] | None = None) -> int:
    """Run the bench; returns 1 when a product is wrong."""
    import torch

    from axo.launch import launch_local

    from .table import Table, environment

    parser = argparse.ArgumentParser(prog="axo bench products", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=_numbers, default=list(RANKS), help="such as 4,8,64")
    parser.add_argument("--shapes", default=None, help="MxKxN, several by commas; default square, tall and flat")
    parser.add_argument("--machine", default="perlmutter", help="for the prediction: as in axo plan")
    parser.add_argument("--itemsize", type=int, default=2, help="bytes of an element, for the prediction")
    parser.add_argument("--measure", type=int, default=0, metavar="RANKS", help="time it on this many local ranks")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--plot", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None, help="append JSON lines to this file")
    options = parser.parse_args(arguments)
    shapes = SHAPES
    if options.shapes:
        try:
            given = [Shape(*(int(size) for size in text.split("x"))) for text in options.shapes.split(",")]
        except (TypeError, ValueError):
            parser.error(f"--shapes {options.shapes} is not of the form MxKxN,MxKxN")
        shapes = {"": given[0]} if len(given) == 1 else {str(index): shape for index, shape in enumerate(given)}
    if options.measure:
        options.ranks = [options.measure]
    table = Table(COLUMNS, options.json, environment(torch.device("cpu")) | {"bench": "products"})
    wrong = 0
    found = rows(options, shapes)
    for label, shape in shapes.items():
        mine = [row for row in found if row["shape"] == f"{label} {shape.m}x{shape.k}x{shape.n}"]
        if options.measure:
            cases = [(row["algorithm"], row["grid"]) for row in mine]
            for row, seen in zip(
                mine, launch_local(measure, options.measure, cases, tuple(shape), options.rounds), strict=True
            ):
                row.update(seen)
                wrong += seen["#wrong"]
        for row in mine:
            table.add(**row)
    if options.plot:
        plot(options.plot, max(options.ranks))
        print(options.plot, file=sys.stderr)
    return int(wrong > 0)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    raise SystemExit(main())
