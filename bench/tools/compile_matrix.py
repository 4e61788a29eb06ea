"""Compile every kernel for every target without a GPU, and read in the assembly what must be there.

    python -m bench.tools.compile_matrix            kernel x layout x dtype x target at the default configurations
    python -m bench.tools.compile_matrix --all      what the tuner may choose as well
    ... --out FILE --seconds 500                    stop after that time; the same command again goes on from there
    ... --out FILE --table docs/compiled.md         a page of registers, shared memory and programs a multiprocessor

Checked for each: the matrix instructions (mma.sync, wgmma, tcgen05.mma, v_mfma; of AMD's those of the full rate alone),
shared memory within the device's limit and within what tiles.py promised, programs a multiprocessor as promised,
asynchronous copies, 16-byte accesses, in defaults no register spilled and no scratch, on Hopper (16 bits) a product in
flight while the next is issued, on AMD products while the next step's operands are under way; for waiting
kernels a spin loop that has survived and reads with acquire at system scope; for signalling kernels one release at
system scope; for the kernel in Gluon what assembly.grouped_complaints says. The divisibility hints are those that the
JIT derives from aligned tensors; without them one looks at another kernel.

With --all: every configuration that the tuner may choose in bf16 or fp32 for the papers' GPT layers and for small
products (``shapes``); in fp16, which differs by the type in the instruction, for 8192^3 alone. A batch of products may
be given others, and so may a call without the tuner whose product is smaller than the default's tile.

What this cannot show: that a kernel is fast, or that the hardware does what the assembly says.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
import tokenize
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from axo_kernels.gemm.layout import LAYOUTS, Product
from axo_kernels.gemm.matmul import hints
from axo_kernels.gemm.tiles import (
    HOPPER,
    PIECES,
    PURPOSES,
    TARGETS,
    TRIED,
    Config,
    Target,
    accumulating,
    default_config,
    fused_candidates,
    resident,
    tried,
)
from axo_kernels.tune.model_shapes import MODELS, layers
from bench.lib.arguments import Parser
from bench.lib.table import read_rows
from bench.tools.assembly import (
    complaints,
    grouped_complaints,
    instructions,
    left_in_flight,
    loop_bodies,
    matrix_tiles,
    under_way,
)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# The shapes of --all. Of the papers' layers: ranks along x and y, tokens of a rank; of small products: rows and
# columns, and how long their sums are.
CUT, TOKENS = (1, 2, 4, 8), (2048, 16384)
SMALL, DEPTHS = (16, 128, 512, 1024), (128, 1024, 4096)
# Kernels without products; their case holds the tile of the kernel that they stand beside, or any.
_NO_PRODUCTS = ("flags", "combine", "goldfish", "sum", "keep")
# Cases handed out at a time; between batches the time is looked at.
_BATCH = 32
# K-contiguous, M- or N-contiguous: which strides are 1 in each layout
_UNIT = {"NN": ("stride_ak", "stride_bn"), "NT": ("stride_ak", "stride_bk"), "TN": ("stride_am", "stride_bn")}


@dataclass(frozen=True)
class Case:
    """One compilation. ``precision`` matters for fp32 only: ``tf32`` uses the matrix units of NVIDIA, ``ieee`` not."""

    kernel: str
    layout: str
    dtype: str
    target: str
    config: Config
    precision: str = "ieee"

    @property
    def name(self) -> str:
        return f"{self.target} {self.kernel} {self.layout} {self.dtype} {self.precision} {self.config.name}"


@dataclass
class Outcome:
    """What came of it; ``wrong`` is empty when all checks passed. ``loop``: instructions of a warp in a step of K of
    wgmma's products. ``tiles``: those of the matrix instructions. ``under_way``: on AMD, products between the loads of
    a step and the wait for them."""

    name: str
    seconds: float
    shared: int = 0
    registers: int = -1
    spilled: int = -1
    occupancy: int = -1
    loop: int = 0
    under_way: int = 0
    tiles: str = ""
    instructions: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def cases(everything: bool = False, dtypes: Iterable[str] = tuple(DTYPES), targets: Iterable[str] = ()) -> list[Case]:
    """List the matrix: default configurations, or everything that the tuner may choose."""
    found: dict[Case, None] = {}
    for arch in targets or TARGETS:
        target = TARGETS[arch]
        for dtype in dtypes:
            wide = dtype == "fp32"
            precisions = ("ieee", "tf32") if wide and target.nvidia else ("ieee",)
            for precision in precisions:
                for case in _of(target, dtype, precision):
                    found[case] = None
                if everything:
                    for described in (True, False) if target.descriptors else (False,):
                        for config in chosen(target, dtype, described):
                            kernel = "split" if config.split_k > 1 else "matmul"
                            for layout in LAYOUTS:
                                found[Case(kernel, layout, dtype, arch, config, precision)] = None
                    for case in _fused(target, dtype, precision):
                        found[case] = None
                    plain = default_config(target, DTYPES[dtype], False)
                    for pieces in PIECES:
                        found[Case("combine", "", dtype, arch, replace(plain, split_k=pieces))] = None
    return list(found)


@cache
def chosen(target: Target, dtype: str, described: bool) -> tuple[Config, ...]:
    """Every configuration that the tuner may choose for the products of :func:`shapes`, each once."""
    found: dict[Config, None] = {}
    for m, n, k in shapes() if dtype != "fp16" else ((8192, 8192, 8192),):
        found |= dict.fromkeys(tried(target, Product("NT", m, n, k, DTYPES[dtype]), described, TRIED))
    return tuple(found)


@cache
def shapes() -> tuple[tuple[int, int, int], ...]:
    """m, n, k: the three products of the papers' GPT layers, whole and as x and y cut them, and small products."""
    found = dict.fromkeys(product(SMALL, SMALL, DEPTHS))
    for model, x, y, tokens in product(MODELS, CUT, CUT, TOKENS):
        for layer in layers(model, (x, y, 1), tokens):
            found |= dict.fromkeys((one.m, one.n, one.k) for one in layer.products(torch.bfloat16).values())
    return tuple(found)


def _of(target: Target, dtype: str, precision: str) -> Iterator[Case]:
    """The default configurations of one target and dtype; exact fp32 never uses descriptors."""
    exact = dtype == "fp32" and precision == "ieee"
    for described in (True, False) if target.descriptors and not exact else (False,):
        plain, wide, fused = (default_config(target, DTYPES[dtype], described, purpose) for purpose in PURPOSES)
        for layout in LAYOUTS:
            yield Case("matmul", layout, dtype, target.arch, plain, precision)
            yield Case("signal", layout, dtype, target.arch, fused, precision)
            if layout != "TN":
                yield Case("wait", layout, dtype, target.arch, fused, precision)
        yield Case("push", "NT", dtype, target.arch, fused, precision)
        yield Case("accumulate", "TN", dtype, target.arch, wide, precision)
        yield Case("epilogue", "NT", dtype, target.arch, wide, precision)
        yield Case("split", "TN", dtype, target.arch, replace(plain, split_k=4), precision)
    if dtype != "fp32" and target.hopper:
        for config in HOPPER:
            for layout in LAYOUTS:
                yield Case("matmul", layout, dtype, target.arch, config)
                if config.group_m == 8:  # which is no constant of the code
                    yield Case("signal" if layout == "TN" else "wait", layout, dtype, target.arch, config)
            yield Case("accumulate", "TN", dtype, target.arch, accumulating(config))
    if dtype == "bf16":
        yield Case("combine", "", dtype, target.arch, replace(default_config(target, DTYPES[dtype], False), split_k=4))
        yield Case("keep", "", dtype, target.arch, default_config(target, DTYPES[dtype], False))
        yield Case("sum", "", dtype, target.arch, default_config(target, DTYPES[dtype], False))
        yield Case("flags", "", dtype, target.arch, default_config(target, DTYPES[dtype], False))
        yield Case("goldfish", "", dtype, target.arch, default_config(target, DTYPES[dtype], False))


def _fused(target: Target, dtype: str, precision: str) -> Iterator[Case]:
    """The tiles that the tuner may choose for kernels that wait or signal."""
    exact = dtype == "fp32" and precision == "ieee"
    for described in (True, False) if target.descriptors and not exact else (False,):
        for layout in LAYOUTS:
            for config in fused_candidates(target, Product(layout, 8192, 8192, 8192, DTYPES[dtype]), described):
                yield Case("signal", layout, dtype, target.arch, config, precision)
                if layout != "TN":
                    yield Case("wait", layout, dtype, target.arch, config, precision)


def compile_case(case: Case) -> Outcome:
    """Compile and check one case."""
    started = time.perf_counter()
    try:
        names = _kernel_names(case)
        compiled = [_compile(case, name) for name in names]
    except Exception as error:
        return Outcome(case.name, time.perf_counter() - started, wrong=[f"does not compile: {str(error)[:300]}"])
    seconds = time.perf_counter() - started
    target = TARGETS[case.target]
    outcome = Outcome(case.name, round(seconds, 2), max(kernel.metadata.shared for kernel in compiled))
    plain = case.kernel in _NO_PRODUCTS
    warps = 1 if case.kernel == "flags" else 4 if plain else case.config.all_warps
    for name, kernel in zip(names, compiled, strict=True):
        text = kernel.asm["ptx"] if target.nvidia else kernel.asm["amdgcn"]
        # NVIDIA's matrix units leave a thread two of each eight columns of a tile; it loads their bias at once. Without
        # a gate the compiler writes this twice.
        constants = _arguments(case, name)[0]
        adds = target.nvidia and not plain and constants["HAS_BIAS"]
        bias_loads = case.config.block_n // (8 if constants["ACTIVATION"] == "silu_gate" else 4) if adds else 0
        counts, wrong = complaints(
            text, case.kernel, target, case.dtype, case.precision, case.config.descriptors, bias_loads,
            bool(case.config.groups),
        )  # fmt: skip
        outcome.instructions.update(counts)
        outcome.wrong += wrong
        outcome.registers, outcome.spilled = _resources(kernel, target)
        outcome.tiles = " ".join(matrix_tiles(text))
        default = case in _defaults() and not plain
        if not target.nvidia and not plain:
            outcome.under_way = under_way(text)
            if default and not outcome.under_way:
                outcome.wrong.append("each step waits for its operands before it multiplies")
        if case.target == "sm_90" and case.dtype != "fp32" and (case.config.descriptors or default):
            sass = disassembled(kernel)
            outcome.loop = max((instructions(body) for body in loop_bodies(sass) if "HGMMA" in body), default=0)
            if default and not left_in_flight(sass):
                outcome.wrong.append("no product is in flight while the next is issued")
            if case.config.groups:
                outcome.wrong += grouped_complaints(sass, accumulate=case.kernel == "accumulate")
    outcome.occupancy = resident(target, warps, outcome.registers, outcome.shared)
    outcome.wrong += _broken_promises(case, outcome, target)
    return outcome


def _broken_promises(case: Case, outcome: Outcome, target: Target) -> list[str]:
    """What the compiler made that tiles.py did not count with: shared memory, programs a multiprocessor, spills."""
    wrong = []
    itemsize, wide = DTYPES[case.dtype].itemsize, case.kernel in ("accumulate", "epilogue")
    out = 4 if case.kernel in ("accumulate", "split") else None
    promised = case.config.shared_bytes(itemsize, target, out, wide)
    if case.kernel in _NO_PRODUCTS:
        promised = target.shared_bytes
    for limit, whose in ((target.shared_bytes, case.target), (promised, "tiles.py")):
        if outcome.shared > limit:
            wrong.append(f"{outcome.shared} bytes of shared memory exceed the {limit} of {whose}")
    if case.kernel in ("matmul", "accumulate", "epilogue", "split"):
        activation = _arguments(case, _kernel_names(case)[0])[0]["ACTIVATION"]
        sure = case.config.occupancy(target, itemsize, out, wide, activation)
        if outcome.occupancy < sure:
            wrong.append(f"{outcome.occupancy} programs fit a multiprocessor, tiles.py counts with {sure}")
    if outcome.spilled > 0 and case in _defaults():
        wrong.append(f"{outcome.spilled} bytes of registers spilled in a default")
    return wrong


@cache
def _defaults() -> frozenset[Case]:
    return frozenset(cases())


def _kernel_names(case: Case) -> tuple[str, ...]:
    if case.kernel == "flags":
        return ("wait_flag_kernel", "write_flag_kernel")
    if case.kernel in ("wait", "signal", "push") and not case.config.groups:
        return ("segment_matmul_kernel",)
    if case.kernel == "keep":
        return ("keep_rows_kernel",)
    if case.kernel in ("combine", "goldfish", "sum"):
        return (f"{case.kernel}_kernel",)
    if case.config.groups:
        return ("hopper_matmul_kernel",)
    return ("matmul_descriptor_kernel",) if case.config.descriptors else ("matmul_kernel",)


def _compile(case: Case, kernel_name: str) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    from axo_kernels.fused import kernels as signal_kernels
    from axo_kernels.gemm import kernels as gemm_kernels

    grouped = kernel_name == "hopper_matmul_kernel"
    if grouped:
        from axo_kernels.gemm import hopper as gemm_kernels  # type: ignore[no-redef]
    if case.kernel == "goldfish":
        from axo.nn import goldfish_kernels as gemm_kernels  # type: ignore[no-redef]
    kernel = getattr(gemm_kernels, kernel_name, None) or getattr(signal_kernels, kernel_name)
    target, config = TARGETS[case.target], case.config
    arch = int(case.target[3:]) if target.nvidia else case.target
    constants, types = _arguments(case, kernel_name)
    signature = {name: "constexpr" if name in constants else types.get(name, "constexpr") for name in kernel.arg_names}
    unaligned = {"flags", "flag", "counters", "tiles", "bound", "number", "batch", "group_m", "first_flag", "scale"}
    unaligned |= {"counted"}
    unaligned |= {"k", "ignore_index", "drop_value"}
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if name in types and name not in unaligned | constants.keys() and not types[name].startswith("tensordesc")
    }
    options = {"num_warps": 1 if case.kernel == "flags" else config.warps, "num_stages": config.stages}
    if case.kernel in ("combine", "goldfish", "keep"):
        options["num_warps"] = 4
    if case.kernel == "sum":
        options["num_warps"] = 8
    if grouped:
        options["maxnreg"] = gemm_kernels.REGISTERS  # type: ignore[attr-defined]
    return triton.compile(
        (GluonASTSource if grouped else ASTSource)(
            kernel, signature, {name: constants[name] for name in signature if name in constants}, attributes
        ),
        target=GPUTarget("cuda" if target.nvidia else "hip", arch, target.warp_size),
        options=options | hints(config),
    )


def _arguments(case: Case, kernel_name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Constants and types by argument name, for whichever kernel has such an argument."""
    config, wait, push = case.config, case.kernel == "wait", case.kernel == "push"
    target = TARGETS[case.target]
    epilogue = case.kernel == "epilogue"
    kind = case.dtype
    out = "fp32" if case.kernel in ("accumulate", "split") else kind
    types = dict.fromkeys(("a", "b", "bias", "gate"), f"*{kind}") | {"c": f"*{out}"}
    types |= dict.fromkeys(("batch", "M", "N", "K", "tiles", "bound", "number", "group_m", "counted"), "i32")
    types |= dict.fromkeys((f"stride_{x}" for x in "ab am ak bb bk bn cb cm cs gb gm ps".split()), "i32")
    types["partial"] = "*fp32"
    types |= dict.fromkeys(("table", "flags", "flag", "counters", "epoch_word", "status"), "*i32")
    if push:
        types["flags"] = "*i64"
    constants: dict[str, Any] = {"stride_cn": 1}
    for name in _UNIT.get(case.layout, ()):
        del types[name]
        constants[name] = 1
    if config.descriptors:
        a = [config.block_k, config.block_m] if case.layout == "TN" else [config.block_m, config.block_k]
        b = [config.block_n, config.block_k] if case.layout == "NT" else [config.block_k, config.block_n]
        types["a"], types["b"] = f"tensordesc<{kind}{a}>", f"tensordesc<{kind}{b}>"
        if kernel_name == "matmul_descriptor_kernel":
            types["c"] = f"tensordesc<{out}{[config.block_m, config.block_n // config.parts]}>"
    if config.groups:
        from axo_kernels.gemm.hopper import block, layout_of

        rows = config.block_m if config.groups == "pingpong" else config.block_m // 2
        shapes = {
            "a": block(rows, config.block_k, case.layout == "TN"),
            "b": block(config.block_k, config.block_n, case.layout == "NT"),
            "c": [rows, config.block_n // config.parts],
        }
        for name, shape in shapes.items():
            held = out if name == "c" else kind
            types[name] = f"tensordesc<{held}{shape},{layout_of(shape, DTYPES[held])!r}>"
        if case.kernel not in ("wait", "signal"):
            constants |= dict.fromkeys(("table", "flags", "counters", "epoch_word", "status"))
    constants |= {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "GROUP_M": config.group_m,
        "SPLIT_K": config.split_k, "XCDS": target.xcds, "PIECES": config.split_k, "STAGES": config.stages,
        "PINGPONG": config.groups == "pingpong", "NUM_PROGRAMS": 128, "EVEN_K": True,
        "HAS_BIAS": epilogue, "ACTIVATION": "silu_gate" if epilogue else "", "ACCUMULATE": case.kernel == "accumulate",
        "PRECISION": case.precision, "INTERPRETED": False, "FLATTEN": config.flatten,
        "A_TRANSPOSED": case.layout == "TN", "B_TRANSPOSED": case.layout == "NT", "PARTS": config.parts,
        "SEGMENTS": 16 if not config.groups or case.kernel in ("wait", "signal") else 0,
        "ALONG_N": wait and case.layout == "NT", "WAIT": wait,
        "SIGNAL": push or case.kernel == "signal", "PUSH": push, "DESCRIPTORS": config.descriptors,
        "FENCE": wait and config.descriptors, "ALIGNMENT": 16,
    }  # fmt: skip
    if case.kernel == "combine":
        constants |= {"BLOCK_M": 32, "BLOCK_N": 128, "HAS_BIAS": True}
    if case.kernel == "sum":  # of an all-reduce over two ranks
        constants |= {"PARTS": 2, "COPIES": 2, "BLOCK": 2048}
        types |= {"parts": f"*{kind}", "out": "*i64", "scale": "fp32"}
        types |= dict.fromkeys(("elements", "block_elements", "part_stride", "half_stride", "first_flag"), "i32")
    if case.kernel == "keep":
        constants["BLOCK"] = 2048
        types |= {"packed": f"*{kind}", "kept": f"*{kind}", "columns": "i32"}
    if case.kernel == "goldfish":
        from axo.nn import goldfish

        constants |= {"H": 13, "BLOCK": goldfish.BLOCK}
        types = {"tokens": "*i64", "keep": "*u8"} | dict.fromkeys(("row_stride", "length"), "i32")
        types |= dict.fromkeys(("k", "ignore_index", "drop_value"), "i32")
    return constants, {name: kind.replace(", ", ",") for name, kind in types.items()}


def disassembled(kernel: Any) -> str:
    """SASS of a compiled kernel."""
    return _shown(kernel, "nvdisasm")


def _shown(kernel: Any, tool: str, *options: str) -> str:
    """What one of NVIDIA's tools, which Triton brings, says of a compiled kernel; empty where the tool is missing."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    if not path.exists():
        return ""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return subprocess.run([path, *options, file.name], capture_output=True, text=True, check=False).stdout


def _resources(kernel: Any, target: Target) -> tuple[int, int]:
    """Registers a thread, and bytes (NVIDIA) or registers (AMD) spilled; -1 where it cannot be read. What else lies in
    AMD's scratch memory counts as spilled."""
    if not target.nvidia:
        names = ("vgpr_count", "vgpr_spill_count", "private_segment_fixed_size")
        matches = [re.search(rf"\.{name}:\s+(\d+)", kernel.asm["amdgcn"]) for name in names]
        registers, spilled, scratch = (int(match.group(1)) if match else -1 for match in matches)
        return registers, max(spilled, scratch // 4)
    shown = _shown(kernel, "cuobjdump", "--dump-resource-usage")
    found = [re.search(rf"{name}:(\d+)", shown) for name in ("REG", "STACK")]
    return tuple(int(match.group(1)) if match else -1 for match in found)  # type: ignore[return-value]


def _fresh_cache() -> None:
    """Compile again in each run, without Triton's cache."""
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="axo-compile-")
    os.environ.pop("TRITON_INTERPRET", None)
    torch.set_num_threads(1)


def compile_all(matrix: list[Case], workers: int = 2, seconds: float = float("inf")) -> Iterator[Outcome]:
    """Compile in worker processes; yields outcomes in the order of the matrix, and stops after ``seconds``."""
    started = time.perf_counter()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_fresh_cache) as pool:
        for first in range(0, len(matrix), _BATCH):
            if time.perf_counter() - started > seconds:
                return
            yield from pool.map(compile_case, matrix[first : first + _BATCH], chunksize=2)


def earlier(path: Path | None, matrix: list[Case], identity: dict[str, str]) -> dict[str, dict[str, Any]]:
    """What a stopped run has found right with the same kernels and the same Triton, by name; the rest is compiled."""
    lines = read_rows(path) if path else []
    if not lines or any(lines[0].get(key) != value for key, value in identity.items()):
        return {}
    names = {case.name for case in matrix}
    return {line["name"]: line for line in lines[1:] if line.get("name") in names and not line["wrong"]}


_SOURCES = (
    "python/axo/nn/goldfish_kernels.py",
    "axo_kernels/gemm/flags.py",
    "axo_kernels/gemm/kernels.py",
    "axo_kernels/gemm/hopper.py",
    "axo_kernels/fused/kernels.py",
    "bench/tools/assembly.py",
)


def sources() -> str:
    """A digest of what is compiled and of what is asked of it. Comments, docstrings and empty lines do not count.

    Of tiles.py what its promises are made of: which tiles are compiled stands in the names of the cases.
    """
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for name in _SOURCES:
        digest.update(_code((root / name).read_text(encoding="utf-8")).encode())
    promises = (Config.registers, Config.occupancy, Config.shared_bytes, resident)
    for part in (_compile, _arguments, _kernel_names, Target, *promises):
        digest.update(_code(textwrap.dedent(inspect.getsource(part))).encode())
    digest.update(repr(TARGETS).encode())
    return digest.hexdigest()[:12]


def _code(text: str) -> str:
    lines: list[str] = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False):
            spoken = node.body[0]
            lines[spoken.lineno - 1 : spoken.end_lineno] = [""] * (spoken.end_lineno - spoken.lineno + 1)  # type: ignore[operator]
    return "\n".join(stripped for line in lines if (stripped := line.rstrip()))


def _identity() -> dict[str, str]:
    """Triton's version, and a digest of what is compiled."""
    import triton

    return {"triton": triton.__version__, "sources": sources()}


def page(matrix: list[Case], found: dict[str, dict[str, Any]]) -> str:
    """Markdown: of each kernel and configuration the most over layouts, and the fewest programs a multiprocessor."""
    rows: dict[tuple[str, str, str, str], list[dict[str, Any]]] = {}
    for case in matrix:
        if case.name in found and case.dtype != "fp16":
            dtype = "tf32" if case.precision == "tf32" else case.dtype
            rows.setdefault((case.target, case.kernel, dtype, case.config.name), []).append(found[case.name])
    text = _PAGE
    for (arch, kernel, dtype, config), lines in rows.items():
        most = {name: max(line[name] for line in lines) for name in ("registers", "spilled", "shared")}
        text += f"| {arch} | {kernel} | {dtype} | {config} | {most['registers']} | {most['spilled']} "
        text += f"| {most['shared'] / 1024:.1f} | {min(line['occupancy'] for line in lines)} "
        text += f"| {' '.join(sorted({line['tiles'] for line in lines}))} "
        text += f"| {min(line['under_way'] for line in lines) or ''} |\n"
    return text


_PAGE = """# What the compiler made of the kernels

For readers who tune tiles: all defaults, compiled for six GPUs without one. Registers are a thread's, spilled
bytes a thread's (registers on AMD), shared memory a program's in KiB; programs are those that one multiprocessor holds
at once. Then the tile (m, n, k) of the matrix instruction, and on AMD how many of these a wave issues while the next
step's operands are under way. fp16 is as bf16, but for up to 24 registers on AMD and 4 on NVIDIA. Written by
`make compile-defaults ARGS="--out bench/results/compile_matrix_defaults.jsonl --table docs/compiled.md"`.

| GPU | kernel | dtype | configuration | registers | spilled | shared KiB | programs | instruction | under way |
|---|---|---|---|---|---|---|---|---|---|
"""


def main(arguments: list[str] | None = None) -> int:
    """Compile, print one line a failure and a summary, write JSON lines when asked to.

    Returns:
        0; 1 when a check failed; 3 when time was up before the end.
    """
    parser = Parser("bench.tools.compile_matrix", __doc__)
    parser.add_argument("--all", action="store_true", help="every configuration that the tuner may choose")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--out", type=Path, help="JSON lines; what stands there from a stopped run is not compiled again"
    )
    parser.add_argument("--table", type=Path, help="write a page with a row for each kernel and configuration")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    options = parser.parse_args(arguments)
    matrix, identity = cases(options.all), _identity()
    found = earlier(options.out, matrix, identity)
    before = sum(line["seconds"] for line in found.values())
    # fp16 compiles as bf16 does: last, where time may run out
    missing = sorted((case for case in matrix if case.name not in found), key=lambda case: case.dtype == "fp16")
    started = time.perf_counter()
    for outcome in compile_all(missing, options.workers, options.seconds):
        found[outcome.name] = asdict(outcome)
        if outcome.wrong:
            print(f"{outcome.name}: {'; '.join(outcome.wrong)}", flush=True)
    bad = sum(bool(line["wrong"]) for line in found.values())
    summary = identity | {
        "cases": len(matrix), "compiled": len(found), "wrong": bad,
        "with_spills": sum(line["spilled"] > 0 for line in found.values()),
        "seconds": round(time.perf_counter() - started, 1), "compiler_seconds_before": round(before, 1),
        "workers": options.workers, "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    print(json.dumps(summary))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        lines = [summary, *(found[case.name] for case in matrix if case.name in found)]
        options.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    if options.table:
        options.table.write_text(page(matrix, found), encoding="utf-8")
    return 3 if len(found) < len(matrix) else 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
