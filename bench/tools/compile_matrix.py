"""Compile every kernel for every target without a GPU, and read in the assembly what must be there.

    python -m bench.tools.compile_matrix            kernel x layout x dtype x target at the default configurations
    python -m bench.tools.compile_matrix --all      every configuration that the tuner may choose, as well
    ... --out FILE --seconds 500                    stop after that time; the same command again goes on from there

Checked for each: the matrix instructions (mma.sync, wgmma, tcgen05.mma, v_mfma), shared memory within the device's
limit and within what tiles.py promised, asynchronous copies; for waiting kernels a spin loop that has survived and
reads with acquire at system scope; for signalling kernels a release at system scope. Registers spilled to memory are
reported. The divisibility hints are those that the JIT derives from aligned tensors; without them one looks at another
kernel.

What this cannot show: that a kernel is fast, or that the hardware does what the assembly says.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from axo_kernels.gemm.layout import LAYOUTS, Product
from axo_kernels.gemm.tiles import PURPOSES, TARGETS, Config, Target, candidates, default_config, fused_candidates
from bench.tools.assembly import complaints

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KERNELS = ("matmul", "accumulate", "epilogue", "wait", "signal", "flags")
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
    """What came of it; ``wrong`` is empty when all checks passed."""

    name: str
    seconds: float
    shared: int = 0
    registers: int = -1
    spilled: int = -1
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
                    product = Product("NT", 8192, 8192, 8192, DTYPES[dtype])
                    for config in candidates(target, product, target.descriptors):
                        for layout in LAYOUTS:
                            found[Case("matmul", layout, dtype, arch, config, precision)] = None
                    for case in _fused(target, dtype, precision):
                        found[case] = None
    return list(found)


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
        yield Case("accumulate", "TN", dtype, target.arch, wide, precision)
        yield Case("epilogue", "NT", dtype, target.arch, wide, precision)
    if dtype == "bf16":
        yield Case("flags", "", dtype, target.arch, default_config(target, DTYPES[dtype], False))


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
        compiled = [_compile(case, name) for name in _kernel_names(case)]
    except Exception as error:
        return Outcome(case.name, time.perf_counter() - started, wrong=[f"does not compile: {str(error)[:300]}"])
    seconds = time.perf_counter() - started
    target = TARGETS[case.target]
    outcome = Outcome(case.name, round(seconds, 2), max(kernel.metadata.shared for kernel in compiled))
    itemsize = DTYPES[case.dtype].itemsize
    wide = case.kernel in ("accumulate", "epilogue")
    promised = case.config.shared_bytes(itemsize, target, 4 if case.kernel == "accumulate" else None, wide)
    if case.kernel == "flags":
        promised = target.shared_bytes
    for limit, whose in ((target.shared_bytes, case.target), (promised, "tiles.py")):
        if outcome.shared > limit:
            outcome.wrong.append(f"{outcome.shared} bytes of shared memory exceed the {limit} of {whose}")
    for kernel in compiled:
        text = kernel.asm["ptx"] if target.nvidia else kernel.asm["amdgcn"]
        counts, wrong = complaints(text, case.kernel, target, case.dtype, case.precision, case.config.descriptors)
        outcome.instructions.update(counts)
        outcome.wrong += wrong
        outcome.registers, outcome.spilled = _resources(kernel, target)
    return outcome


def _kernel_names(case: Case) -> tuple[str, ...]:
    if case.kernel == "flags":
        return ("wait_flag_kernel", "write_flag_kernel")
    if case.kernel in ("wait", "signal"):
        return ("segment_matmul_kernel",)
    return ("matmul_descriptor_kernel",) if case.config.descriptors else ("matmul_kernel",)


def _compile(case: Case, kernel_name: str) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from axo_kernels.fused import kernels as signal_kernels
    from axo_kernels.gemm import kernels as gemm_kernels

    kernel = getattr(gemm_kernels, kernel_name, None) or getattr(signal_kernels, kernel_name)
    target, config = TARGETS[case.target], case.config
    arch = int(case.target[3:]) if target.nvidia else case.target
    constants, types = _arguments(case, kernel_name)
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    unaligned = {"flags", "flag", "counters", "tiles", "bound", "number", "batch"}
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if name in types and name not in unaligned and not types[name].startswith("tensordesc")
    }
    return triton.compile(
        ASTSource(kernel, signature, {name: constants[name] for name in signature if name in constants}, attributes),
        target=GPUTarget("cuda" if target.nvidia else "hip", arch, target.warp_size),
        options={"num_warps": 1 if case.kernel == "flags" else config.warps, "num_stages": config.stages},
    )


def _arguments(case: Case, kernel_name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Constants and types by argument name, for whichever kernel has such an argument."""
    config, wait, signal = case.config, case.kernel == "wait", case.kernel == "signal"
    epilogue = case.kernel == "epilogue"
    kind = case.dtype
    out = "fp32" if case.kernel == "accumulate" else kind
    types = dict.fromkeys(("a", "b", "bias", "gate"), f"*{kind}") | {"c": f"*{out}"}
    types |= dict.fromkeys(("batch", "M", "N", "K", "tiles", "bound", "number"), "i32")
    types |= dict.fromkeys((f"stride_{x}" for x in "ab am ak bb bk bn cb cm gb gm".split()), "i32")
    types |= dict.fromkeys(("table", "flags", "flag", "counters", "epoch_address", "status"), "*i32")
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
    constants |= {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "GROUP_M": config.group_m,
        "NUM_PROGRAMS": 128, "EVEN_K": True, "HAS_BIAS": epilogue, "ACTIVATION": "silu_gate" if epilogue else "",
        "ACCUMULATE": case.kernel == "accumulate", "PRECISION": case.precision, "INTERPRETED": False, "FLATTEN": True,
        "A_TRANSPOSED": case.layout == "TN", "B_TRANSPOSED": case.layout == "NT", "PARTS": config.parts,
        "SEGMENTS": 16, "ALONG_N": wait and case.layout == "NT", "WAIT": wait, "SIGNAL": signal,
        "DESCRIPTORS": config.descriptors,
        "FENCE": wait and config.descriptors, "ALIGNMENT": 16,
    }  # fmt: skip
    return constants, {name: kind.replace(", ", ",") for name, kind in types.items()}


def _resources(kernel: Any, target: Target) -> tuple[int, int]:
    """Registers a thread, and bytes (NVIDIA) or registers (AMD) spilled; -1 where it cannot be read."""
    if not target.nvidia:
        text = kernel.asm["amdgcn"]
        found = [re.search(rf"\.{name}:\s+(\d+)", text) for name in ("vgpr_count", "vgpr_spill_count")]
        return tuple(int(match.group(1)) if match else -1 for match in found)  # type: ignore[return-value]
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return -1, -1
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        shown = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=False)
    found = [re.search(rf"{name}:(\d+)", shown.stdout) for name in ("REG", "STACK")]
    return tuple(int(match.group(1)) if match else -1 for match in found)  # type: ignore[return-value]


def _fresh_cache() -> None:
    """Compile anew in each run, not out of Triton's cache."""
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
    if path is None or not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines or any(lines[0].get(key) != value for key, value in identity.items()):
        return {}
    names = {case.name for case in matrix}
    return {line["name"]: line for line in lines[1:] if line.get("name") in names and not line["wrong"]}


def _identity() -> dict[str, str]:
    """Triton's version, and a digest of what is compiled."""
    import triton

    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for name in ("axo_kernels/gemm/kernels.py", "axo_kernels/fused/kernels.py", "bench/tools/assembly.py"):
        digest.update((root / name).read_bytes())
    for function in (_compile, _arguments, _kernel_names):
        digest.update(inspect.getsource(function).encode())
    return {"triton": triton.__version__, "sources": digest.hexdigest()[:12]}


def main(arguments: list[str] | None = None) -> int:
    """Compile, print one line a failure and a summary, write JSON lines when asked to.

    Returns:
        0; 1 when a check failed; 3 when time was up before the end.
    """
    parser = argparse.ArgumentParser(prog="bench.tools.compile_matrix", description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="every configuration that the tuner may choose")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--out", type=Path, help="JSON lines; what stands there from a stopped run is not compiled again"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    options = parser.parse_args(arguments)
    matrix, identity = cases(options.all), _identity()
    found = earlier(options.out, matrix, identity)
    before = sum(line["seconds"] for line in found.values())
    missing = [case for case in matrix if case.name not in found]
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
    return 3 if len(found) < len(matrix) else 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
