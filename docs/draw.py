"""Draw the pictures of the README: `python docs/draw.py` writes docs/img/grid.svg and docs/img/rivals.svg.

grid.svg    a 2x2x2 grid and the product O = I W on it: which block of which matrix a rank holds.
rivals.svg  Axo beside Gloo, Open MPI, FSDP2, DTensor and DDP, from the last complete runs in bench/results/.

Both are drawn from data (the grid from axo.Grid, the bars from the result lines), never by hand.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from axo.grid import Grid

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs/img"
INK, FAINT = "#1f2933", "#7b8794"
COLOURS = {"I": "#9fc5e8", "W": "#f6c28b", "O": "#a8d5a2"}
SIDE = 92  # of one rank's cube, in pixels


def project(x: float, y: float, z: float) -> tuple[float, float]:
    """Isometric: x runs right and down, z left and down, y up."""
    return 330 + (x - z) * SIDE * math.cos(math.pi / 6), 250 + (x + z) * SIDE / 2 - y * SIDE


def face(
    corner: tuple[int, int, int], across: tuple[int, int, int], up: tuple[int, int, int], name: str, text: str
) -> str:
    """One cell of a face of the cube, its label lying on it."""
    corners = [corner, add(corner, across), add(add(corner, across), up), add(corner, up)]
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in (project(*point) for point in corners))
    origin, right, top = project(*corner), project(*add(corner, across)), project(*add(corner, up))
    a, b = ((end[i] - origin[i]) / SIDE for end in (right,) for i in (0, 1))
    c, d = ((origin[i] - top[i]) / SIDE for i in (0, 1))
    middle = [(project(*corners[0])[i] + project(*corners[2])[i]) / 2 for i in (0, 1)]
    return (
        f'<polygon points="{points}" fill="{COLOURS[name]}" stroke="{INK}" stroke-width="1.5"/>'
        f'<text transform="matrix({a:.3f} {b:.3f} {c:.3f} {d:.3f} {middle[0]:.1f} {middle[1]:.1f})" '
        f'text-anchor="middle" dominant-baseline="central" font-size="19">{text}</text>'
    )


def add(p: tuple[int, int, int], q: tuple[int, int, int]) -> tuple[int, int, int]:
    return p[0] + q[0], p[1] + q[1], p[2] + q[2]


def block(name: str, row: str, column: str) -> str:
    return f'{name}<tspan font-size="12" dy="5">{row},{column}</tspan>'


def draw_grid(grid: Grid) -> str:
    """The three faces of the grid's cube are the three matrices: I over (z, y), W over (y, x), O over (z, x)."""
    cells = []
    for y in range(grid.y):
        for x in range(grid.x):  # W [k over y, n over x] on the face that looks along z
            cells.append(face((x, y, grid.z), (1, 0, 0), (0, 1, 0), "W", block("W", f"y{y}", f"x{x}")))
        for z in range(grid.z):  # I [m over z, k over y] on the face that looks along x
            cells.append(face((grid.x, y, z + 1), (0, 0, -1), (0, 1, 0), "I", block("I", f"z{z}", f"y{y}")))
    for x in range(grid.x):
        for z in range(grid.z):  # O [m over z, n over x] on top
            cells.append(face((x, grid.y, z + 1), (1, 0, 0), (0, 0, -1), "O", block("O", f"z{z}", f"x{x}")))
    ranks = grid.x * grid.y * grid.z
    lines = [
        (f"{ranks} GPUs, each one small cube at (x, y, z)", INK, 17, "bold"),
        ("multiplies one block:  O = I W", INK, 17, "normal"),
        ("", INK, 10, "normal"),
        ("along y:  O is summed", "#3f7f3a", 16, "normal"),
        ("along x:  the gradient of I is summed", "#2f6d9f", 16, "normal"),
        ("along z:  W is gathered, its gradient scattered", "#a8641b", 16, "normal"),
        ("", INK, 10, "normal"),
        ("The next layer swaps x and y,", FAINT, 15, "normal"),
        ("so no activation ever moves.", FAINT, 15, "normal"),
        ("A fourth axis, data, repeats the cube.", FAINT, 15, "normal"),
    ]
    text, at = [], 130
    for line, colour, size, weight in lines:
        text.append(f'<text x="560" y="{at}" fill="{colour}" font-size="{size}" font-weight="{weight}">{line}</text>')
        at += size + 11
    axes = []
    for label, point in (
        ("x", (grid.x / 2, 0, grid.z + 0.3)),
        ("z", (grid.x + 0.3, 0, grid.z / 2)),
        ("y", (-0.12, grid.y / 2, grid.z + 0.12)),
    ):
        a, b = project(*point)
        axes.append(
            f'<text x="{a:.0f}" y="{b + 14:.0f}" text-anchor="middle" font-size="20" font-style="italic">{label}</text>'
        )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="130 40 830 440" font-family="Helvetica, Arial, sans-serif">'
        f"<title>The product O = I W on a {grid.x}x{grid.y}x{grid.z} grid</title>"
        f'<rect x="130" y="40" width="830" height="440" fill="white"/><g fill="{INK}">'
        + "\n".join([*cells, *axes, *text])
        + "</g></svg>\n"
    )


def runs(name: str) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """(header, rows) of each run in bench/results/NAME.jsonl, the oldest first."""
    found: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    for line in (ROOT / "bench/results" / f"{name}.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "bench" in row:
            found.append((row, []))
        else:
            found[-1][1].append(row)
    return found


def collective_bars() -> tuple[str, list[tuple[str, dict[str, float]]]]:
    """all_reduce over two ranks: microseconds by size and rival, of the last run that has all three rivals."""
    for header, rows in reversed(runs("collectives")):
        times: dict[int, dict[str, float]] = {}
        for row in rows:
            if row.get("op") == "all_reduce" and row.get("ranks") == 2 and row.get("dtype", "float32") == "float32":
                times.setdefault(row["size"], {})[row["rival"]] = row["time_us"]
        whole = {size: by for size, by in times.items() if {"axo", "gloo", "mpi"} <= set(by)}
        if {1 << 10, 1 << 20, 1 << 28} <= set(whole):
            names = {1 << 10: "1 KiB", 1 << 20: "1 MiB", 1 << 28: "256 MiB"}
            bars = [
                (names[size], {"Axo": whole[size]["axo"], "Gloo": whole[size]["gloo"], "Open MPI": whole[size]["mpi"]})
                for size in names
            ]
            return f"{header['commit']}, {header['date']}", bars
    raise SystemExit("bench/results/collectives.jsonl has no run with axo, gloo and mpi at 1K, 1M and 256M")


def step_bars() -> tuple[str, list[tuple[str, dict[str, float]]]]:
    """A training step of two ranks: milliseconds of Axo, and of PyTorch's scheme over Gloo and over Axo."""
    for header, rows in reversed(runs("step")):
        by = {(row["case"], row["contestant"]): row["ms"] for row in rows}
        cases = [("z", "Axo 1x1x2x1", "FSDP2"), ("x", "Axo 2x1x1x1", "DTensor"), ("data", "Axo 1x1x1x2", "DDP")]
        if all((case, axo) in by for case, axo, _ in cases):
            return f"{header['commit']}, {header['date']}", [
                (
                    rival,
                    {
                        "Axo": by[case, axo],
                        f"{rival} over Axo": by[case, f"{rival} axo"],
                        f"{rival} over Gloo": by[case, f"{rival} gloo"],
                    },
                )
                for case, axo, rival in cases
            ]
    raise SystemExit("bench/results/step.jsonl has no run with the cases z, x and data")


def draw_rivals(path: Path) -> None:
    """Times relative to Axo's: a bar of 2 is a rival that takes twice as long."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "axo"
    import matplotlib.pyplot as plt

    (left_source, left), (right_source, right) = collective_bars(), step_bars()
    figure, (one, two) = plt.subplots(1, 2, figsize=(10, 3.6), width_ratios=(1, 1))
    colours = {"Axo": "#2f6d9f", "Gloo": "#b0b8c1", "Open MPI": "#d9a066"}
    for axes, bars, title in ((one, left, "all_reduce, 2 ranks"), (two, right, "training step, 2 ranks, bf16")):
        for group, (_, times) in enumerate(bars):
            for index, (name, time) in enumerate(times.items()):
                ratio = time / times["Axo"]
                colour = colours.get(name) or ("#d9a066" if name.endswith("over Axo") else "#b0b8c1")
                axes.bar(group + (index - 1) * 0.27, ratio, 0.25, color=colour)
                axes.text(
                    group + (index - 1) * 0.27,
                    ratio,
                    f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}",
                    ha="center",
                    va="bottom",
                    fontsize=8,
                )
        axes.set_xticks(range(len(bars)), [label for label, _ in bars])
        axes.set_title(title, fontsize=11)
        axes.set_ylabel("time, in units of Axo's")
        axes.spines[["top", "right"]].set_visible(False)
    one.set_yscale("log")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colours[name]) for name in ("Axo", "Gloo", "Open MPI")]
    one.legend(handles, ["Axo", "Gloo", "Open MPI"], frameon=False, fontsize=9)
    two.legend(handles, ["Axo", "PyTorch's scheme over Gloo", "the same over backend axo"], frameon=False, fontsize=9)
    two.set_ylim(0, 1.55 * max(max(times.values()) / times["Axo"] for _, times in right))
    figure.text(
        0.5,
        -0.01,
        f"2 CPU cores; medians of runs in turns; bench/results, commits {left_source} and {right_source}",
        ha="center",
        fontsize=8,
        color=FAINT,
    )
    figure.tight_layout()
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


def draw_all() -> None:
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / "grid.svg").write_text(draw_grid(Grid(x=2, y=2, z=2, data=1)))
    draw_rivals(IMAGES / "rivals.svg")


def main() -> None:
    draw_all()
    print(*(str(path.relative_to(ROOT)) for path in sorted(IMAGES.glob("*.svg"))), sep="\n")


if __name__ == "__main__":
    main()
