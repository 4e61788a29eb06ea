"""Which distributed product moves least? Every algorithm of ``algorithms``, alike.

    axo bench products                                        # counts: arithmetic, in a second
    axo bench products --plot docs/img/products.png           # and a picture of volume against shape

``calls``, ``deliveries`` and ``volume`` are of one forward and one backward pass over all ranks; volume is in units of
m*n elements of C, memory in units of (m k + k n + m n) / p.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from axo.grid import Grid
from axo.matmul.algorithm import Algorithm, Shape, Transfer

from ..lib.picture import panels
from . import algorithms

SHAPES = {"square": Shape(4096, 4096, 4096), "tall": Shape(65536, 4096, 4096), "flat": Shape(1024, 4096, 16384)}
COLUMNS = {"ranks": "d", "shape": "s", "algorithm": "s", "grid": "s", "calls": "d", "deliveries": "d"}
COLUMNS |= {"volume": ".2f", "memory": ".2f"}


def grids_of(algorithm: Algorithm, ranks: int) -> list[Grid]:
    """The grids of ``ranks`` ranks, data = 1, that the algorithm can use."""
    grids = []
    for grid in Grid.all(ranks):
        if grid.data == 1:
            try:
                algorithm.check(grid)
            except ValueError:
                continue
            grids.append(grid)
    return grids


def volume(transfers: list[Transfer]) -> int:
    """Elements moved, over all ranks and both passes."""
    return sum(transfer.elements for transfer in transfers)


def best_grid(algorithm: Algorithm, ranks: int, shape: Shape) -> Grid | None:
    """The grid on which the algorithm moves fewest elements; None if it has none of this many ranks."""
    return min(grids_of(algorithm, ranks), key=lambda grid: volume(algorithm.cost(grid, shape)), default=None)


def rows(options: argparse.Namespace, shapes: dict[str, Shape]) -> Iterator[dict[str, Any]]:
    """What each algorithm moves on its best grid."""
    for ranks, (label, shape), (name, algorithm) in itertools.product(
        options.ranks, shapes.items(), algorithms.items()
    ):
        grid = best_grid(algorithm, ranks, shape)
        if grid is None:
            continue
        cost = algorithm.cost(grid, shape)
        parts = (shape.m * shape.k + shape.k * shape.n + shape.m * shape.n) / ranks
        yield {
            "ranks": ranks, "shape": f"{label} {shape.m}x{shape.k}x{shape.n}", "algorithm": name, "grid": str(grid),
            "calls": sum(transfer.calls for transfer in cost),
            "deliveries": sum(transfer.deliveries for transfer in cost),
            "volume": volume(cost) / (shape.m * shape.n), "memory": algorithm.memory(grid, shape) / parts,
        }  # fmt: skip


def plot(path: Path, ranks: int) -> None:
    """Volume against m / n for k = n, an algorithm a line; below, who moves least for each pair of m / k and n / k."""
    base, aspects = 4096, [2.0**e for e in range(-5, 7)]
    names = [name for name in algorithms if grids_of(algorithms[name], ranks)]

    def moved(name: str, shape: Shape) -> int:
        grid = best_grid(algorithms[name], ranks, shape)
        assert grid is not None
        return volume(algorithms[name].cost(grid, shape))

    def least(wide: float, high: float) -> int:
        shape = Shape(int(base * wide), base, int(base * high))
        return min(range(len(names)), key=lambda i: moved(names[i], shape))

    winners = [[least(wide, high) for wide in aspects] for high in aspects]
    with panels(path, (12, 4.2), columns=2) as (left, right):
        lines: dict[tuple[float, ...], list[str]] = {}  # some are equal where k = n: one line with both names
        for name in names:
            points = tuple(moved(name, Shape(int(base * aspect), base, base)) / base**2 for aspect in aspects)
            lines.setdefault(points, []).append(name)
        for points, equal in lines.items():
            left.plot(aspects, points, marker=".", color=f"C{names.index(equal[0])}", label=", ".join(equal))
        left.set(xscale="log", yscale="log", xlabel="rows of activations / width of the weight, m / n (k = n)")
        left.set(ylabel="elements moved, forward and backward, in n^2", title=f"{ranks} ranks, each on its best grid")
        left.legend(fontsize=8, frameon=False)
        edges = range(len(aspects) + 1)
        right.pcolormesh(edges, edges, winners, cmap="tab10", vmin=0, vmax=9)
        ticks = [index + 0.5 for index in range(0, len(aspects), 2)]
        labels = [f"{aspect:g}" for aspect in aspects[::2]]
        right.set(xticks=ticks, xticklabels=labels, yticks=ticks, yticklabels=labels)
        right.set(xlabel="m / k", ylabel="n / k", title="who moves least")
        for index in sorted({index for row in winners for index in row}):
            right.plot([], [], "s", color=f"C{index}", label=names[index])
        right.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def main(arguments: list[str] | None = None) -> int:
    """Run the bench."""
    import torch

    from ..lib.arguments import Parser, numbers
    from ..lib.table import Table, environment

    parser = Parser("axo bench products", __doc__, json=True)
    parser.add_argument("--ranks", default="4,8,16,27,64", help="comma-separated")
    parser.add_argument("--shapes", default=None, help="MxKxN, several by commas; default: square, tall, flat")
    parser.add_argument("--plot", type=Path, default=None)
    options = parser.parse_args(arguments)
    options.ranks = numbers("--ranks", options.ranks)
    shapes = SHAPES
    if options.shapes:
        try:
            given = [Shape(*(int(size) for size in text.split("x"))) for text in options.shapes.split(",")]
        except (TypeError, ValueError):
            parser.error(f"--shapes {options.shapes} is not of the form MxKxN,MxKxN")
        shapes = {"": given[0]} if len(given) == 1 else {str(index): shape for index, shape in enumerate(given)}
    table = Table(COLUMNS, options.json, environment(torch.device("cpu")) | {"bench": "products"})
    for row in rows(options, shapes):
        table.add(**row)
    if options.plot:
        plot(options.plot, max(options.ranks))
        print(options.plot, file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
