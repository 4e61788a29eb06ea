"""What share of an H100's peak each default tile can reach, from arithmetic: a prediction to hold measurements against.

    python -m bench.roofline                            the papers' GPT layers on one H100
    python -m bench.roofline --grid 4x2x1 --rows 2048   as one rank of a grid sees them

A tile's step of K takes the longest of four times, in clock cycles of one multiprocessor, since they overlap:

    products        BLOCK_M BLOCK_N BLOCK_K / 2,048 multiply-adds a cycle (dense bf16)
    shared memory   what wgmma reads: a warp group's 64 rows of A, and all of B again for each of them, at 128 bytes
    bulk copies     (BLOCK_M + BLOCK_N) BLOCK_K elements out of the L2, at 64 bytes (the port of a multiprocessor), or
                    their share of memory: rows and columns of a wave once each, at 3.35 TB/s for all multiprocessors
    issue slots     instructions of the loop, as compiled, of the warps of one of the four schedulers; known for the
                    kernel for Hopper alone, since the loop of the other one holds its epilogue too

A tile takes its steps and, where nothing else multiplies meanwhile, its epilogue: the result through shared memory and
out (the kernel for Hopper hides it behind the other group). The first steps of a program wait for memory once. Programs
take tiles in waves; the last one takes as long as a full one.

It is an upper bound: no bank conflicts, no cold caches, no clock that falls under load (the share is of the peak at the
clock that runs). Where a measurement is far below, the largest term says where to look first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from axo.grid import Grid
from axo_kernels.gemm.layout import Product
from axo_kernels.gemm.tiles import HOPPER, TARGETS, Config, default_config, split_short
from axo_kernels.tune.model_shapes import layers

from .lib.arguments import Parser
from .lib.table import Table

MODELS = ("gpt-5b", "gpt-10b", "gpt-20b", "gpt-40b", "gpt-80b", "gpt-320b")
COMPILED = Path(__file__).parent / "results" / "compile_matrix_defaults.jsonl"
COLUMNS = {
    "product": "s",
    "config": "s",
    "tiles": "d",
    "waves": ".2f",
    "bound": "s",
    "step_cycles": ".0f",
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


def predict(product: Product, config: Config, instructions: float = 0.0, machine: Machine | None = None) -> Prediction:
    """Predict one product.

    Args:
        product: bf16 or fp16.
        config: Of a kernel that loads through descriptors; its occupancy is one.
        instructions: Of one warp in a step of K; 0: not known, and no bound.
        machine: An H100 by default.
    """
    machine = machine or Machine()
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
        "issue": instructions * (2 if config.groups else config.warps / 4),
    }
    if config.groups == "pingpong":  # one group multiplies at a time
        terms["issue"] = instructions
    step = max(terms.values())
    out = config.block_m * config.block_n * (4 if config.split_k > 1 else size)
    stored = 2 * out / machine.shared + machine.handover
    shown = max(0.0, stored - step * steps) if config.groups else stored
    per_tile = step * steps + shown
    waves = tiles / machine.units
    whole = math.ceil(waves) * per_tile + machine.latency + (stored if config.groups else 0)
    if config.split_k > 1:  # partial sums are written, read, and the result written
        moved = product.m * product.n * (8 * config.split_k + size)
        whole += moved / (machine.memory / machine.clock)
    useful = product.m * product.n * product.k / machine.products / machine.units
    return Prediction(
        terms, tiles, waves, math.ceil(waves) * shown / whole, (math.ceil(waves) - waves) * per_tile / whole,
        useful / whole, whole / machine.clock,
    )  # fmt: skip


def compiled_instructions(path: Path = COMPILED) -> dict[tuple[str, str], float]:
    """Instructions of a warp in a step, by layout and configuration, from the committed table of compiled kernels."""
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[1:]]
    found = {}
    for line in lines:
        arch, kernel, layout, dtype, _, config = (line["name"].split(" ", 5) + [""] * 6)[:6]
        grouped = config.split(" ")[0] in ("pingpong", "shared")
        if grouped and (arch, kernel, dtype) == ("sm_90", "matmul", "bf16") and line.get("loop", 0) > 0:
            found[layout, config] = float(line["loop"])
    return found


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
    options = parser.parse_args(given)
    try:
        wanted = list(products(options.grid, options.rows))
    except ValueError as error:
        parser.error(str(error))
    table = Table(COLUMNS, options.json, {"bench": "roofline", "machine": "H100 SXM, predicted"})
    target = TARGETS["sm_90"]
    known = compiled_instructions()
    shares: dict[str, list[float]] = {}
    for product in wanted:
        default = default_config(target, product.dtype, True)
        for config in (split_short(default, product, target), *HOPPER):
            found = predict(product, config, known.get((product.layout, config.name), 0.0))
            shares.setdefault(config.name if config.split_k == 1 else default.name, []).append(found.share)
            table.add(
                product=product.name,
                config=config.name,
                tiles=found.tiles,
                waves=found.waves,
                bound=found.bound,
                step_cycles=found.terms[found.bound],
                epilogue_pct=100 * found.epilogue,
                tail_pct=100 * found.tail,
                share_pct=100 * found.share,
                ms=found.seconds * 1e3,
            )
    for name, each in shares.items():
        mean = math.exp(sum(map(math.log, each)) / len(each))
        table.note(f"{name}: {100 * mean:.1f}% of the peak predicted, geometric mean of {len(each)} products")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
