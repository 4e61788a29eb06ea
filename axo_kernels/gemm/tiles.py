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
    def xcds(self) -> int:
        """Parts of an MI300 or MI350 with an L2 of their own; 1 on other devices, and where the units are not whole
        parts: a wrong number would scatter what belongs together."""
        for part, most in _XCDS.get(self.arch, ()):
            if self.units % part == 0 and self.units <= part * most:
                return self.units // part
        return 1

    @property
    def hopper(self) -> bool:
        """Whether the kernel in Gluon runs on it (hopper.py)."""
        return self.arch == "sm_90"

    @property
    def descriptors(self) -> bool:
        """Whether host tensor descriptors turn into bulk copies (TMA)."""
        return self.nvidia and int(self.arch[3:]) >= 90


# Compute units of an XCD, and how many of these a GPU has: MI300X and MI300A, MI308X; MI350X and MI355X.
_XCDS = {"gfx942": ((38, 8), (20, 4)), "gfx950": ((32, 8),)}
# Units and shared memory a program (bytes) from the vendors' documents; a running device reports its own.
TARGETS = {
    target.arch: target
    for target in (
        Target("sm_80", 108, 166_912),
        Target("sm_90", 132, 232_448),
        Target("sm_100", 148, 232_448),
        Target("gfx90a", 110, 65_536),
        Target("gfx942", 304, 65_536),
        Target("gfx950", 256, 163_840),
    )
}
CPU_TARGET = Target("cpu", 4, 1 << 30)
_GROUPS = ("", "pingpong", "shared")
_NUMBERS = (  # of a configuration: field, least
    *((name, 1) for name in ("block_m", "block_n", "block_k", "group_m", "warps", "stages", "split_k")),
    ("waves_per_eu", 0),
)
_CHOICES = {
    "descriptors": (False, True), "flatten": (False, True), "groups": _GROUPS, "parts": (1, 2), "nonkdim": (0, 16, 32),
}  # fmt: skip


@dataclass(frozen=True)
class Config:
    """Tile sizes of one kernel.

    Attributes:
        block_m, block_n, block_k: The tile of C, and the depth of one step.
        group_m: Row tiles that are walked together before the next column tile (L2 reuse).
        warps, stages: Warps of a program; depth of the software pipeline.
        descriptors: Load and store through tensor descriptors.
        parts: Pieces in which a tile is stored (1 or 2); 2 halves the shared memory of the epilogue.
        flatten: One loop over tiles and depth, so that the next tile's loads come before this tile's stores.
        split_k: Pieces into which K is cut, for products of few tiles; their fp32 sums are added by a second kernel.
        groups: ``"pingpong"`` or ``"shared"``: the kernel for Hopper, with two groups of ``warps`` = 4 and one warp
            that loads (hopper.py); ``""``: the others.
        waves_per_eu, nonkdim: Hints for AMD's compiler: wavefronts a SIMD (0: its own choice), rows of the matrix
            instruction (16 or 32; 0: its own choice).
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int = 8
    warps: int = 8
    stages: int = 3
    descriptors: bool = False
    parts: int = 1
    flatten: bool = True
    split_k: int = 1
    groups: str = ""
    waves_per_eu: int = 0
    nonkdim: int = 0

    @property
    def name(self) -> str:
        kind = self.groups or ("tma" if self.descriptors else "ptr")
        extras = (
            (self.parts == 2, "p2"),
            (not self.flatten, "nested"),
            (self.split_k > 1, f"k{self.split_k}"),
            (self.waves_per_eu, f"e{self.waves_per_eu}"),
            (self.nonkdim, f"i{self.nonkdim}"),
        )
        return (
            f"{kind} {self.block_m}x{self.block_n}x{self.block_k} g{self.group_m} w{self.warps} s{self.stages}"
            f"{''.join(f' {extra}' for known, extra in extras if known)}"
        )

    def check(self, owner: str) -> None:
        """Refuse a field whose type or value no device has; :meth:`fits` asks one device.

        Raises:
            ValueError: The message begins with ``owner`` and names the field.
        """
        for name, least in _NUMBERS:
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{owner}: config has {name}={value!r}; use a whole number of at least {least}")
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if type(value) is not type(allowed[0]) or value not in allowed:
                raise ValueError(f"{owner}: config has {name}={value!r}; use one of {', '.join(map(repr, allowed))}")

    @property
    def all_warps(self) -> int:
        """Warps of a program: of Hopper's two groups and, counted as a third, the warp that loads."""
        return self.warps * (3 if self.groups else 1)

    def registers(self, target: Target, itemsize: int, activation: str = "", wide_epilogue: bool = False) -> int:
        """Upper bound of the registers of a thread: the sums, and what addresses and operands were seen to take.

        On AMD the error function of ``gelu`` takes many more, and so does an epilogue that reads a tile.
        """
        if self.groups:
            return 168  # what the program is launched with; setmaxnreg deals it out anew
        sums = self.block_m * self.block_n // (self.warps * target.warp_size)
        many = activation == "gelu" or wide_epilogue
        rest = 192 if itemsize == 4 else 128 if target.nvidia else 288 if many else 160
        return min(255 if target.nvidia else 512, sums + rest)

    def occupancy(
        self,
        target: Target,
        itemsize: int,
        out_itemsize: int | None = None,
        wide_epilogue: bool = False,
        activation: str = "",
    ) -> int:
        """Programs that a multiprocessor is sure to hold at once; what the compiler made is held against it."""
        if target.arch == "cpu":
            return 1
        shared = self.shared_bytes(itemsize, target, out_itemsize, wide_epilogue)
        registers = self.registers(target, itemsize, activation, wide_epilogue)
        return resident(target, self.all_warps, registers, shared)

    def shared_bytes(
        self, itemsize: int, target: Target, out_itemsize: int | None = None, wide_epilogue: bool = False
    ) -> int:
        """Upper bound of the shared memory of one program, in bytes.

        The pipelined operands, and what the epilogue needs to turn the accumulators into rows: seen in compiled
        kernels, not documented. ``wide_epilogue``: it also reads a tile (accumulating, or a gate).
        """
        if self.split_k > 1:  # stores fp32 sums, and nothing is behind them
            out_itemsize, wide_epilogue = 4, False
        operands = (self.block_m + self.block_n) * self.block_k * itemsize
        tile = self.block_m * self.block_n
        if not target.nvidia:
            # AMD's pipeline keeps one of the stages in registers, and its matrix units' tiles are stored as they are
            scratch = min(tile * 4, 8192 * self.warps) if wide_epilogue else 0
            return max(1, self.stages - 1) * operands + scratch + 1024
        if self.groups:
            rows = self.block_m if self.groups == "pingpong" else self.block_m // 2
            buffers = 2 * rows * self.block_n // self.parts * (out_itemsize or itemsize)
            return self.stages * (operands + 16) + buffers + 1024
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
        sizes = (self.block_m, self.block_n, self.block_k, self.warps)
        if not all(isinstance(size, int) and size > 0 and size & (size - 1) == 0 for size in sizes):
            return False
        itemsize = dtype.itemsize
        halves = 2 if self.groups == "shared" else 1
        accumulators = self.block_m * self.block_n // (self.warps * target.warp_size * halves)
        out_itemsize = out_dtype.itemsize if out_dtype else None
        return (
            min(self.block_m, self.block_n) >= 16
            and self.block_k * itemsize >= 32
            and min(self.stages, self.group_m) >= 1
            and self.parts in (1, 2)
            and (not self.descriptors or target.descriptors or target.arch == "cpu")
            and (not self.descriptors or max(self.block_m, self.block_n, self.block_k) <= 256)
            and self.split_k >= 1
            and (not self.groups or self._grouped_fits(target, itemsize))
            # fp32 accumulators a thread: 256 registers are all there are (512 with the second file of gfx9)
            and accumulators <= (128 if target.nvidia else 256)
            and self.shared_bytes(itemsize, target, out_itemsize, wide_epilogue) <= target.shared_bytes
        )

    def _grouped_fits(self, target: Target, itemsize: int) -> bool:
        """What the kernel for Hopper asks for beside the rest: 64 rows an instruction, and two stages, since a stage
        is given back while the next one is read."""
        rows = self.block_m // 2 if self.groups == "shared" else self.block_m
        return (
            self.groups in ("pingpong", "shared")
            and target.hopper
            and itemsize == 2
            and self.descriptors
            and self.warps == 4
            and rows >= 64
            and self.block_n <= 256
            and self.stages >= 2
            and self.split_k == 1
        )


def resident(target: Target, warps: int, registers: int, shared: int) -> int:
    """Programs that fit one multiprocessor at once, by registers, threads and shared memory; at least 1.

    NVIDIA: 65,536 registers, 64 warps, and 1 KiB of shared memory kept for each program. AMD (CDNA): 4 SIMDs, each with
    512 registers a lane and 8 waves.
    """
    if target.nvidia:
        by_registers = 65_536 // (-(-registers // 8) * 8 * warps * 32)
        by_memory = (target.shared_bytes + 1024) // (shared + 1024)
        return max(1, min(by_registers, by_memory, 64 // warps, 32))
    waves = min(8, 512 // max(1, -(-registers // 8) * 8))
    return max(1, min(waves * 4 // warps, target.shared_bytes // max(1, shared)))


PURPOSES = ("plain", "wide", "fused")


def purpose_of(target: Target, wide_epilogue: bool, activation: str | None) -> str:
    """For which purpose a product takes its default: exact GELU over AMD's largest tiles spills (seen compiled)."""
    return "wide" if wide_epilogue or (activation == "gelu" and not target.nvidia) else "plain"


@cache
def default_config(target: Target, dtype: torch.dtype, descriptors: bool, purpose: str = "plain") -> Config:
    """Configuration for large products when nothing was tuned.

    Args:
        target: The device.
        dtype: That of the operands.
        descriptors: Whether operands and result allow tensor descriptors.
        purpose: ``"plain"``; ``"wide"``: the epilogue reads a tile too (accumulating, a gate); ``"fused"``: the kernel
            that waits or signals.

    Hopper: 128x256x64 on 8 warps is the tile that public measurements of stock Triton put within 0.92 to 1.02 of cuBLAS
    at 8192^2 (read, not measured here); the others are the largest that compile without spilling registers.
    """
    if target.arch == "cpu":
        return Config(16, 16, 16, group_m=2, warps=1, stages=1, descriptors=descriptors)
    if dtype == torch.float32:
        # in full precision deeper steps spill there
        depth = 16 if target.nvidia and int(target.arch[3:]) >= 90 and not descriptors else 32
        return Config(64, 64, depth, warps=4, stages=3 if target.nvidia else 2, descriptors=descriptors)
    if not target.nvidia:
        if target.arch in ("gfx942", "gfx950") and purpose == "plain":
            return Config(256, 256, 32, warps=8, stages=2)
        # an MI200 waits for its operands behind one product of 16 there, with a stage more behind 8 to 14 (compiled)
        return Config(128, 128, 32, warps=4, stages=3 if target.arch == "gfx90a" and purpose == "fused" else 2)
    if descriptors:
        if purpose == "wide":
            return Config(128, 128, 64, warps=8, stages=4, descriptors=True, parts=2)
        return Config(128, 256, 64, warps=8, stages=3, descriptors=True, parts=2)
    if purpose == "wide":
        return Config(128, 64, 64, warps=8 if int(target.arch[3:]) >= 90 else 4, stages=3)
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


def accumulating(config: Config) -> Config:
    """A configuration of the kernel for Hopper with room for fp32 results, which a master gradient has."""
    return replace(config, stages=3 if config.block_m * config.block_n > 128 * 128 else 4, parts=2)


def split_short(config: Config, product: Product, target: Target) -> Config:
    """Cut K where the tiles are fewer than half of the multiprocessors, so that more of these have work.

    Pieces keep eight steps at least; a piece costs its fp32 sums, written and read once more.
    """
    tiles = -(-product.m // config.block_m) * -(-product.n // config.block_n)
    pieces = 1
    while (
        product.batch == 1
        and not config.groups
        and 2 * pieces * tiles <= target.units
        and product.k >= 16 * pieces * config.block_k
        and pieces < PIECES[-1]
    ):
        pieces *= 2
    return replace(config, split_k=pieces) if pieces > 1 and target.arch != "cpu" else config


# Into how many pieces K may be cut.
PIECES = (2, 4, 8)


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


def candidates(target: Target, product: Product, descriptors: bool) -> list[Config]:
    """Return the configurations that are worth a try for this product, best guesses first; :func:`tried` says how far
    the tuner goes.

    The list is ordered by the estimated share of useful work: waves that are full, tiles that are not padding. Behind
    the best guess stand its variants: another order of tiles and nested loops, on AMD the compiler's hints. A guess
    that cuts K has fewer tiles than the device has programs, and so no order and no loop of them to vary.
    """
    if target.arch == "cpu":
        return []
    # not in the cache: bench.kernels empties HOPPER where that kernel hangs
    grouped = [config for config in HOPPER if config.fits(target, product.dtype)] if descriptors else []
    configs = [*grouped, *_tiles(target, product.dtype, descriptors)]
    shorts = [short for config in configs if (short := split_short(config, product, target)) != config]
    configs += [short for short in shorts if short.fits(target, product.dtype)]  # fp32 sums take more room
    configs.sort(key=lambda config: -estimate(config, product, target))
    plain = next((config for config in configs if not config.groups), None)
    if plain is not None:
        place = configs.index(plain) + 1
        orders = [replace(plain, group_m=16), replace(plain, flatten=False)] if plain.split_k == 1 else []
        hints = [] if target.nvidia else [replace(plain, nonkdim=16), replace(plain, waves_per_eu=2)]
        configs[place:place] = [*orders, *hints]
    return configs


@cache
def _tiles(target: Target, dtype: torch.dtype, descriptors: bool) -> tuple[Config, ...]:
    """All tiles of the plain language that fit a device."""
    vendor = "nvidia" if target.nvidia else "amd"
    configs = []
    for block_m, block_n, warps in _SHAPES[vendor]:
        for block_k, stages in _DEPTHS[vendor]:
            for kind in (True, False) if descriptors else (False,):
                configs.append(
                    Config(
                        block_m, block_n, block_k, warps=warps, stages=stages, descriptors=kind, parts=2 if kind else 1
                    )
                )
    return tuple(config for config in configs if config.fits(target, dtype))


def tried(target: Target, product: Product, descriptors: bool, count: int) -> list[Config]:
    """The configurations that the tuner times and may choose: the first ``count`` of those in the plain language, and
    all of the kernel for Hopper, whose ways of hiding stores the estimate does not know: they take nobody's place."""
    configs = candidates(target, product, descriptors)
    plain = [config for config in configs if not config.groups][:count]
    return [config for config in configs if config.groups or config in plain]


# How many the tuner tries where nobody asks for more.
TRIED = 8


# The kernel in Gluon: tiles of its own for each group, in turns, or the halves of a larger one; each walked in rows of
# 8 tiles and of 16. It has no loop to flatten: the warp that loads runs ahead into the next tile by itself. Not the
# default: over 27 deep GPT shapes on an H100 it had 0.996 of cuBLAS's speed, the plain kernel 1.002 (docs/gpu.md).
HOPPER = tuple(
    Config(block_m, block_n, 64, group_m, warps=4, stages=stages, descriptors=True, parts=parts, groups=groups)
    for groups, block_m, block_n, stages, parts in (
        ("shared", 128, 256, 4, 2),
        ("shared", 256, 128, 4, 2),
        ("pingpong", 128, 128, 5, 1),
    )
    for group_m in (8, 16)
)
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
    estimates = {default: estimate(default, product, target)}
    if product.dtype != torch.float32:
        for block_m, block_n, warps in ((256, 128, 8), (128, 128, 8 if target.nvidia else 4), (128, 64, 4)):
            config = replace(default, block_m=block_m, block_n=block_n, warps=warps)
            if config.fits(target, product.dtype):
                estimates[config] = estimate(config, product, target)
    grouped = HOPPER if descriptors else ()
    return [
        *sorted(estimates, key=lambda config: -estimates[config]),
        *(config for config in grouped if config.group_m == 8 and config.fits(target, product.dtype)),
    ]


def estimate(config: Config, product: Product, target: Target) -> float:
    """Guess the share of the peak that a configuration reaches, between 0 and 1; only its order matters.

    Losses: the last wave is not full, tiles at the border compute padding, a small tile reads its operands more often
    (intensity, in flops a byte, against 256 flops a byte of shared memory traffic), and pieces of K are written, read
    and added (at 200 flops a byte of memory). Filling the pipeline costs no less where its steps are shorter than 64:
    there are more of them, each with its barrier. docs/roofline.md says what share of the peak to expect.
    """
    tiles_m = -(-product.m // config.block_m)
    tiles_n = -(-product.n // config.block_n)
    tiles = tiles_m * tiles_n * product.batch
    slots = target.units * config.occupancy(target, product.dtype.itemsize)
    work = tiles * config.split_k
    full = work / (-(-work // slots) * slots) if slots <= work else min(1.0, work / target.units)
    useful = product.m * product.n / (tiles_m * config.block_m * tiles_n * config.block_n)
    intensity = 2 * config.block_m * config.block_n / ((config.block_m + config.block_n) * product.dtype.itemsize)
    per_piece = product.k / config.split_k
    depth = per_piece / (per_piece + 2 * max(64, config.block_k))
    pieces = 1.0 if config.split_k == 1 else product.k / (product.k + 200 * 4 * config.split_k)
    kind = 1.0 if config.descriptors or not target.descriptors else 0.85
    return full * useful * min(1.0, intensity / 85) * depth * kind * pieces
