"""Tile configurations: which block sizes a kernel may take on a device, and which one it takes when nobody has tuned.

A configuration is plain data. ``fits`` is the one predicate that states all its constraints; the shared memory that it
counts is an upper bound, which the compile matrix holds against what the compiler really used. Needs neither Triton nor
a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from axo_kernels.gemm.layout import Product


@dataclass(frozen=True)
class Target:
    """A device as the kernels see it.

    Attributes:
        arch: ``sm_90``, ``gfx942``, ...; ``cpu`` stands for the interpreter.
        units: Streaming multiprocessors, or compute units.
        shared_bytes: Shared memory that one program may use.
    """

    arch: str
    units: int
    shared_bytes: int

    @property
    def nvidia(self) -> bool:
        return self.arch.startswith("sm_")

    @property
    def warp_size(self) -> int:
        return 64 if self.arch.startswith("gfx9") else 32

    @property
    def served(self) -> bool:
        """Whether the kernels run on it at all: NVIDIA's GPUs before sm_80 have no bf16, and no asynchronous copies."""
        return not self.nvidia or int(self.arch[3:]) >= 80

    @property
    def descriptors(self) -> bool:
        """Whether host tensor descriptors turn into bulk copies (TMA)."""
        return self.nvidia and int(self.arch[3:]) >= 90


# Units and shared memory a program (bytes) from the vendors' documents; a running device reports its own.
TARGETS = {
    target.arch: target
    for target in (
        Target("sm_80", 108, 166_912),
        Target("sm_90", 132, 232_448),
        Target("sm_100", 148, 232_448),
        Target("gfx90a", 110, 65_536),
        Target("gfx942", 304, 65_536),
    )
}
CPU_TARGET = Target("cpu", 4, 1 << 30)


@dataclass(frozen=True)
class Config:
    """Tile sizes of one kernel.

    Attributes:
        block_m, block_n, block_k: The tile of C, and the depth of one step.
        group_m: Row tiles that are walked together before the next column tile (L2 reuse).
        warps, stages: Warps of a program; depth of the software pipeline.
        descriptors: Load and store through tensor descriptors.
        parts: Pieces in which a tile is stored (1 or 2); 2 halves the shared memory of the epilogue.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int = 8
    warps: int = 8
    stages: int = 3
    descriptors: bool = False
    parts: int = 1

    @property
    def name(self) -> str:
        kind = "tma" if self.descriptors else "ptr"
        return (
            f"{kind} {self.block_m}x{self.block_n}x{self.block_k} g{self.group_m} w{self.warps} s{self.stages}"
            f"{' p2' if self.parts == 2 else ''}"
        )

    def shared_bytes(
        self, itemsize: int, target: Target, out_itemsize: int | None = None, wide_epilogue: bool = False
    ) -> int:
        """Upper bound of the shared memory of one program, in bytes.

        The pipelined operands, and what the epilogue needs to turn the accumulators into rows: seen in compiled
        kernels, not documented. ``wide_epilogue``: it also reads a tile (accumulating, or a gate).
        """
        operands = (self.block_m + self.block_n) * self.block_k * itemsize
        tile = self.block_m * self.block_n
        if not target.nvidia:
            # AMD's pipeline keeps one of the stages in registers, and its matrix units' tiles are stored as they are
            scratch = min(tile * 4, 8192 * self.warps) if wide_epilogue else 0
            return max(1, self.stages - 1) * operands + scratch + 1024
        epilogue = tile // self.parts * (out_itemsize or itemsize) * (2 if wide_epilogue else 1)
        if self.descriptors and self.block_m < 128 and int(target.arch[3:]) >= 100:
            epilogue += epilogue // 2 + 256  # tcgen05 lays 64 rows out over 128 lanes
        # fp32 operands of the matrix units (TF32) cannot be transposed on the way there: a second copy
        return self.stages * operands * (2 if itemsize == 4 else 1) + epilogue + 1024

    def fits(
        self,
        target: Target,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
        wide_epilogue: bool = False,
    ) -> bool:
        """Say whether the kernel can run with this configuration on this device."""
        itemsize = dtype.itemsize
        accumulators = self.block_m * self.block_n // (self.warps * target.warp_size)
        out_itemsize = out_dtype.itemsize if out_dtype else None
        return (
            all(_power_of_two(size) for size in (self.block_m, self.block_n, self.block_k, self.warps))
            and min(self.block_m, self.block_n) >= 16
            and self.block_k * itemsize >= 32
            and self.stages >= 1
            and self.parts in (1, 2)
            and (not self.descriptors or target.descriptors or target.arch == "cpu")
            and (not self.descriptors or max(self.block_m, self.block_n, self.block_k) <= 256)
            # fp32 accumulators a thread: 256 registers are all there are (512 with the second file of gfx9)
            and accumulators <= (128 if target.nvidia else 256)
            and self.shared_bytes(itemsize, target, out_itemsize, wide_epilogue) <= target.shared_bytes
        )


def _power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


PURPOSES = ("plain", "wide", "fused")


def purpose_of(target: Target, wide_epilogue: bool, activation: str | None) -> str:
    """For which purpose a product takes its default: exact GELU over AMD's largest tiles spills (seen compiled)."""
    return "wide" if wide_epilogue or (activation == "gelu" and not target.nvidia) else "plain"


@cache
def default_config(target: Target, dtype: torch.dtype, descriptors: bool, purpose: str = "plain") -> Config:
    """Configuration for large products when nothing was tuned.

    Args:
        target: The device.
        dtype: Of the operands.
        descriptors: Whether operands and result allow tensor descriptors.
        purpose: ``"plain"``; ``"wide"``: the epilogue reads a tile too (accumulating, a gate); ``"fused"``: the kernel
        that
            waits or signals.

    Hopper: 128x256x64 on 8 warps is the tile that public measurements of stock Triton put within 0.92 to 1.02 of cuBLAS
    at 8192^2 (read, not measured here); the others are the largest that compile without spilling registers.
    """
    if target.arch == "cpu":
        return Config(16, 16, 16, group_m=2, warps=1, stages=1, descriptors=descriptors)
    if dtype == torch.float32:
        return Config(64, 64, 32, warps=4, stages=3 if target.nvidia else 2, descriptors=descriptors)
    if not target.nvidia:
        if target.arch == "gfx942" and purpose == "plain":
            return Config(256, 256, 32, warps=8, stages=2)
        return Config(128, 128, 32, warps=4, stages=2)
    if descriptors:
        if purpose == "wide":
            return Config(128, 128, 64, warps=8, stages=4, descriptors=True, parts=2)
        return Config(128, 256, 64, warps=8, stages=3, descriptors=True, parts=2)
    if purpose == "wide":
        return Config(128, 64, 64, warps=4, stages=3)
    if int(target.arch[3:]) < 90:
        return Config(128, 128, 32 if purpose == "fused" else 64, warps=8, stages=3)
    return Config(128, 128, 64, warps=8, stages=4)


def shrink(config: Config, product: Product) -> Config:
    """Cut a tile that is larger than the product itself, so that a small product does not compute padding."""
    return replace(
        config,
        block_m=_cut(config.block_m, product.m),
        block_n=_cut(config.block_n, product.n),
    )


def _cut(block: int, size: int) -> int:
    """Smallest block of at least 64 (or the block itself, when smaller) that still covers the size."""
    while block > 64 and block // 2 >= size:
        block //= 2
    return block


def cut_to_fit(
    config: Config,
    target: Target,
    dtype: torch.dtype,
    out_dtype: torch.dtype | None = None,
    wide_epilogue: bool = False,
) -> Config:
    """Take stages, then depth, then columns and rows off a default that was chosen for a device with more memory.

    The defaults are those of :data:`TARGETS`; an RTX or an L4, say, has less than half of their shared memory.
    """
    while not config.fits(target, dtype, out_dtype, wide_epilogue):
        if config.stages > 2:
            config = replace(config, stages=config.stages - 1)
        elif config.block_k * dtype.itemsize > 64:
            config = replace(config, block_k=config.block_k // 2)
        elif max(config.block_m, config.block_n) > 32:
            side = "block_n" if config.block_n >= config.block_m else "block_m"
            config = replace(config, **{side: getattr(config, side) // 2})
        else:
            break
    return config


def candidates(
    target: Target,
    product: Product,
    descriptors: bool,
    out_dtype: torch.dtype | None = None,
    wide_epilogue: bool = False,
) -> list[Config]:
    """Return every configuration that the tuner may choose for this product, best guesses first.

    The list is ordered by the estimated share of useful work: waves that are full, tiles that are not padding.
    """
    if target.arch == "cpu":
        return []
    seen: dict[Config, float] = {}
    for block_m, block_n, warps in _SHAPES["nvidia" if target.nvidia else "amd"]:
        for block_k, stages in _DEPTHS["nvidia" if target.nvidia else "amd"]:
            for kind in (True, False) if descriptors else (False,):
                config = Config(
                    block_m, block_n, block_k, warps=warps, stages=stages, descriptors=kind, parts=2 if kind else 1
                )
                if config.fits(target, product.dtype, out_dtype, wide_epilogue):
                    seen[config] = estimate(config, product, target)
    return sorted(seen, key=lambda config: -seen[config])


_SHAPES = {
    "nvidia": ((128, 256, 8), (256, 128, 8), (128, 128, 8), (128, 128, 4), (64, 256, 4), (128, 64, 4), (64, 64, 4)),
    "amd": ((256, 256, 8), (256, 128, 8), (128, 256, 8), (128, 128, 4), (128, 64, 4), (64, 128, 4), (64, 64, 4)),
}
_DEPTHS = {"nvidia": ((64, 4), (64, 3), (32, 4)), "amd": ((32, 2), (64, 2))}


def fused_candidates(target: Target, product: Product, descriptors: bool) -> list[Config]:
    """Configurations that the tuner may choose for a kernel that waits or signals, best guesses first.

    Few, since each is timed with every chunk count; tiles under 128x64 would make too many visits to the counters.
    """
    if target.arch == "cpu":
        return []
    default = cut_to_fit(default_config(target, product.dtype, descriptors, "fused"), target, product.dtype)
    found = {default: estimate(default, product, target)}
    if product.dtype != torch.float32:
        for block_m, block_n, warps in ((256, 128, 8), (128, 128, 8 if target.nvidia else 4), (128, 64, 4)):
            config = replace(default, block_m=block_m, block_n=block_n, warps=warps)
            if config.fits(target, product.dtype):
                found[config] = estimate(config, product, target)
    return sorted(found, key=lambda config: -found[config])


def estimate(config: Config, product: Product, target: Target) -> float:
    """Guess the share of the peak that a configuration reaches, between 0 and 1; only its order matters.

    Three losses: the last wave is not full, tiles at the border compute padding, and a small tile reads its operands
    more often (intensity, in flops a byte, against 256 flops a byte of shared memory traffic).
    """
    tiles_m = -(-product.m // config.block_m)
    tiles_n = -(-product.n // config.block_n)
    tiles = tiles_m * tiles_n * product.batch
    waves = -(-tiles // target.units)
    full = tiles / (waves * target.units)
    useful = product.m * product.n / (tiles_m * config.block_m * tiles_n * config.block_n)
    intensity = 2 * config.block_m * config.block_n / ((config.block_m + config.block_n) * product.dtype.itemsize)
    depth = product.k / (product.k + 2 * config.block_k)
    kind = 1.0 if config.descriptors or not target.descriptors else 0.85
    return full * useful * min(1.0, intensity / 85) * depth * kind
