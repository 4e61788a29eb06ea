"""What share of an H100's peak each default tile can reach, from arithmetic: a prediction to hold measurements against.

    python -m bench.roofline                            the papers' GPT layers on one H100
    python -m bench.roofline --grid 4x2x1 --rows 2048   as one rank of a grid sees them
    ... --json bench/results/roofline.jsonl             rows as JSON lines
    ... --count                                         compile the defaults first, and count their instructions anew

A tile's step of K takes the longest of four times, in clock cycles of one multiprocessor, since they overlap:

    products        BLOCK_M BLOCK_N BLOCK_K / 2,048 multiply-adds a cycle (dense bf16)
    shared memory   what wgmma reads: a warp group's 64 rows of A, and all of B again for each of them, at 128 bytes
    bulk copies     (BLOCK_M + BLOCK_N) BLOCK_K elements out of the L2, at 64 bytes (the port of a multiprocessor), or
                    their share of memory: rows and columns of a wave once each, at 3.35 TB/s for all multiprocessors
    issue slots     instructions of a step, as compiled, of the warps of one of the four schedulers. Where one loop
                    holds steps and epilogue, a step takes the shortest way through it, and a tile all the rest

A tile takes its steps and, where nothing else multiplies meanwhile, its epilogue: the longer of its bytes through
shared memory and of its instructions (the kernel for Hopper hides it behind the other group); where it adds to an fp32
gradient, that one's tile comes in first. The first steps of a program wait for memory once, those of a kernel that
waits or signals at every tile, since its loop over tiles holds one over steps. Such a kernel leaves LEFT_FREE
multiprocessors to the communication; waiting itself is not counted. Programs take tiles in waves; the last one takes as
long as a full one.

Left out of the defaults that the compile matrix has: ``epilogue`` (a bias with an activation and a gate), which no
layer of Axo asks a product for; the tiles for plain pointers, since descriptors describe every layer of these models;
fp32 and TF32, in which nobody trains them, and whose peaks are others than the bf16 one that the shares are of.
``split`` stands with ``matmul`` where K is cut; ``combine``, ``flags`` and the goldfish mask are no products.

It is an upper bound: no bank conflicts, no cold caches, no clock that falls under load (the share is of the peak at the
clock that runs). Where a measurement is far below, the largest term says where to look first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from axo.grid import Grid
from axo_kernels.gemm.layout import Product
from axo_kernels.gemm.tiles import HOPPER, PURPOSES, TARGETS, Config, accumulating, default_config, split_short
from axo_kernels.tune.model_shapes import layers

from .lib.arguments import Parser
from .lib.table import Table, read_rows

MODELS = ("gpt-5b", "gpt-10b", "gpt-20b", "gpt-40b", "gpt-80b", "gpt-320b")
COMPILED = Path(__file__).parent / "results" / "compile_matrix_defaults.jsonl"
COUNTED = Path(__file__).parent / "results" / "roofline.jsonl"
LEFT_FREE = 8  # multiprocessors: the middle of what the tuner tries
COLUMNS = {
    "product": "s",
    "kernel": "s",
    "config": "s",
    "tiles": "d",
    "waves": ".2f",
    "bound": "s",
    "step_cycles": ".0f",
    "issue_cycles": ".0f",
    "epilogue_pct": ".1f",
    "tail_pct": ".1f",
    "share_pct": ".1f",
    "ms": ".3f",
}


@dataclass(frozen=True)
class Machine:
    """An H100 SXM (NVIDIA's data sheet and Hopper white paper); rates a cycle, of one multiprocessor but for memory."""

    units: int = 132
    clock: float = 1.83e9
    products: int = 2048
    shared: int = 128
    port: int = 64
    memory: float = 3.35e12
    latency: int = 1000  # cycles from a bulk copy's issue to its data, out of memory
    handover: int = 600  # cycles of an epilogue beside its bytes: barriers, conversion, the copy's issue


@dataclass(frozen=True)
class Prediction:
    """Cycles of one step by what bounds it, and shares of the whole time; ``share`` is of the peak."""

    terms: dict[str, float]
    tiles: int
    waves: float
    epilogue: float
    tail: float
    share: float
    seconds: float

    @property
    def bound(self) -> str:
        return max(self.terms, key=lambda name: self.terms[name])


@dataclass(frozen=True)
class Count:
    """Instructions of one warp in a step of K, and beside the steps in a tile; 0: not known, and no bound."""

    step: float = 0.0
    tile: float = 0.0


def predict(
    product: Product,
    config: Config,
    count: Count | None = None,
    machine: Machine | None = None,
    kernel: str = "matmul",
) -> Prediction:
    """Predict one product.

    Args:
        product: bf16 or fp16.
        config: Of a kernel that loads through descriptors; its occupancy is one.
        count: As compiled.
        machine: An H100 by default.
        kernel: ``"matmul"``, ``"accumulate"`` (onto an fp32 gradient), ``"signal"`` or ``"wait"``.
    """
    machine, count = machine or Machine(), count or Count()
    every, fused = machine.units, kernel in ("signal", "wait")
    if fused:
        machine = replace(machine, units=every - LEFT_FREE)
    size = product.dtype.itemsize
    rows, columns = math.ceil(product.m / config.block_m), math.ceil(product.n / config.block_n)
    tiles = rows * columns * config.split_k
    steps = math.ceil(math.ceil(product.k / config.block_k) / config.split_k)
    at_once = min(tiles, machine.units)
    # tiles of a wave: GROUP_M rows of them, as many columns as that takes
    wave_rows = min(config.group_m, rows)
    wave_columns = min(columns, math.ceil(at_once / wave_rows))
    loaded = (wave_rows * config.block_m + wave_columns * config.block_n) * config.block_k * size
    halves = config.block_m / 64
    terms = {
        "products": config.block_m * config.block_n * config.block_k / machine.products,
        "shared memory": (config.block_m + halves * config.block_n) * config.block_k * size / machine.shared,
        "L2": (config.block_m + config.block_n) * config.block_k * size / machine.port,
        "memory": loaded / (machine.memory / machine.clock) * machine.units / at_once,
        "issue": count.step * (2 if config.groups else config.warps / 4),
    }
    if config.groups == "pingpong":  # one group multiplies at a time
        terms["issue"] = count.step
    step = max(terms.values())
    adds = kernel == "accumulate"
    out = config.block_m * config.block_n * (4 if adds or config.split_k > 1 else size)
    passes = 4 if adds and not config.groups else 2  # what it adds to comes in the same way; Hopper's adds in the L2
    stored = max(passes * out / machine.shared, count.tile * config.warps / 4) + machine.handover
    if passes == 4:
        stored += machine.latency
    shown = max(0.0, stored - step * steps) if config.groups else stored
    if fused or not (config.flatten or config.groups):
        shown += machine.latency
    per_tile = step * steps + shown
    waves = tiles / machine.units
    whole = math.ceil(waves) * per_tile + machine.latency + (stored if config.groups else 0)
    if config.split_k > 1:  # partial sums are written, read, and the result written
        moved = product.m * product.n * (8 * config.split_k + size)
        whole += moved / (machine.memory / machine.clock)
    if adds:  # the gradient is read and written whatever overlaps with it
        whole = max(whole, 8 * product.m * product.n / (machine.memory / machine.clock))
    useful = product.m * product.n * product.k / machine.products / every
    return Prediction(
        terms, tiles, waves, math.ceil(waves) * shown / whole, (math.ceil(waves) - waves) * per_tile / whole,
        useful / whole, whole / machine.clock,
    )  # fmt: skip


def shortest_step(sass: str) -> Count:
    """Instructions of a step and of a tile, of a kernel whose loop of products holds its epilogue behind a branch."""
    from bench.tools.assembly import loop_bodies  # Triton's tools are wanted here alone

    body = next((body for body in loop_bodies(sass) if "HGMMA" in body), "")
    lines = [line for line in body.splitlines() if re.match(r"\s*\.L_x_\d+:|\s+/\*[0-9a-f]{4,}\*/\s", line)]
    labels = {match.group(1): i for i, line in enumerate(lines) if (match := re.match(r"\s*(\.L_x_\d+):", line))}
    costs = [0 if re.match(r"\s*\.L_x_", line) else 1 for line in lines]
    first = next((i for i, line in enumerate(lines) if "HGMMA" in line), 0)

    def shortest(start: int, end: int) -> float:
        ways = [math.inf] * (end + 1)
        ways[start] = 0
        for i in range(start, end):
            after = ways[i] + costs[i]
            jump = re.search(r"\bBRA\b.*?(\.L_x_\d+)", lines[i])
            target = labels.get(jump.group(1), -1) if jump else -1
            if i < target <= end:
                ways[target] = min(ways[target], after)
            if not jump or re.search(r"@!?U?P", lines[i]):
                ways[i + 1] = min(ways[i + 1], after)
        return ways[end]

    step = shortest(0, first) + shortest(first, len(lines) - 1) + 1 if lines else 0.0
    return Count(step, sum(costs) - step)


def counted(most: int | None = None) -> dict[tuple[str, str, str], Count]:
    """Compile what has steps and epilogue in one loop: the defaults of plain and of accumulating products.

    Args:
        most: How many of them; all by default.
    """
    from bench.tools import compile_matrix

    found = {}
    for case in compile_matrix.cases(dtypes=("bf16",), targets=("sm_90",)):
        if case.kernel in ("matmul", "accumulate") and case.config.descriptors and not case.config.groups:
            (name,) = compile_matrix._kernel_names(case)
            compiled = compile_matrix.disassembled(compile_matrix._compile(case, name))
            found[case.kernel, case.layout, case.config.name] = shortest_step(compiled)
        if len(found) == most:
            break
    return found


def known_counts(compiled: Path = COMPILED, counts: Path = COUNTED) -> dict[tuple[str, str, str], Count]:
    """By kernel, layout and configuration, from the committed tables; nothing where they are missing."""
    found = {}
    for line in read_rows(compiled)[1:]:
        arch, kernel, layout, dtype, _, config = (line["name"].split(" ", 5) + [""] * 6)[:6]
        alone = config.split(" ")[0] in ("pingpong", "shared") or kernel in ("signal", "wait")
        if alone and (arch, dtype) == ("sm_90", "bf16") and line.get("loop", 0) > 0:
            found[kernel, layout, config] = Count(line["loop"])
    for line in read_rows(counts):
        if "step" in line:
            found[line["kernel"], line["layout"], line["config"]] = Count(line["step"], line["tile"])
    return found


def ways(product: Product) -> Iterator[tuple[str, Config]]:
    """The kernels and configurations that multiply so without the tuner, and Hopper's in that one's order of tiles."""
    target = TARGETS["sm_90"]
    plain, wide, fused = (default_config(target, product.dtype, True, purpose) for purpose in PURPOSES)
    yield "matmul", split_short(plain, product, target)
    grouped = [config for config in HOPPER if config.group_m == plain.group_m]  # the other order: by memory alone
    yield from (("matmul", config) for config in grouped)
    if product.layout == "TN":
        yield "accumulate", wide
        yield from (("accumulate", accumulating(config)) for config in grouped)
    yield "signal", fused
    if product.layout != "TN":
        yield "wait", fused


def predicted(product: Product, kernel: str, config: Config, known: dict[tuple[str, str, str], Count]) -> Prediction:
    """Predict one product with what is known of the kernel; pieces of K are looped over as signalled tiles are."""
    whole = replace(config, split_k=1)
    return predict(
        product,
        config,
        known.get(("signal" if config.split_k > 1 else kernel, product.layout, whole.name)),
        kernel=kernel,
    )


def products(grid: str, rows: int) -> Iterator[Product]:
    """The products of the papers' models, each once."""
    seen, cut = {}, Grid.parse(grid)
    for model in MODELS:
        for layer in layers(model, (cut.x, cut.y, cut.z), rows):
            seen.update(dict.fromkeys(layer.products(torch.bfloat16).values()))
    yield from seen


def main(given: list[str] | None = None) -> int:
    """Print the predictions, and for each configuration the geometric mean of its shares."""
    parser = Parser("axo bench roofline", __doc__, json=True)
    parser.add_argument("--grid", default="1x1x1", help="GxxGyxGz, which cuts the layers")
    parser.add_argument("--rows", type=int, default=4096, help="tokens of one data-parallel group")
    parser.add_argument("--count", action="store_true", help="compile, and count instructions anew")
    options = parser.parse_args(given)
    try:
        wanted = list(products(options.grid, options.rows))
    except ValueError as error:
        parser.error(str(error))
    header = {"bench": "roofline", "machine": "H100 SXM, predicted", "grid": options.grid, "rows": options.rows}
    table = Table(COLUMNS, options.json, header)
    known = known_counts()
    if options.count:
        for (kernel, layout, name), count in counted().items():
            known[kernel, layout, name] = count
            text = f"{kernel} {layout} {name}: {count.step:g} instructions a step, {count.tile:g} more a tile"
            table.note(text, kernel=kernel, layout=layout, config=name, step=count.step, tile=count.tile)
    shares: dict[tuple[str, str], list[float]] = {}
    for product in wanted:
        for kernel, config in ways(product):
            found = predicted(product, kernel, config, known)
            shares.setdefault((kernel, replace(config, split_k=1).name), []).append(found.share)
            table.add(
                product=product.name,
                kernel=kernel,
                config=config.name,
                tiles=found.tiles,
                waves=round(found.waves, 4),
                bound=found.bound,
                step_cycles=round(found.terms[found.bound], 1),
                issue_cycles=round(found.terms["issue"], 1),
                epilogue_pct=round(100 * found.epilogue, 3),
                tail_pct=round(100 * found.tail, 3),
                share_pct=round(100 * found.share, 3),
                ms=round(found.seconds * 1e3, 5),
            )
    for (kernel, name), each in shares.items():
        mean = math.exp(sum(map(math.log, each)) / len(each))
        least = 100 * min(each)
        table.note(
            f"{kernel} {name}: {100 * mean:.1f}% of the peak predicted, geometric mean of {len(each)} products, "
            f"{least:.1f} at least"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
