"""How fast is a product: torch's own, CuPy's cuBLAS, the Triton kernel, and what the tuner chose, in one run.

    axo bench gemm --sizes 1024,2048,4096                    square products (the papers' empirical peak)
    axo bench gemm --models gpt-5b,gpt-320b --grid 2x2x2     a model's layers, as one rank of the grid sees them

``triton`` is the kernel alone, in the best of the tiles that the tuner tried, ``gluon`` the same of the kernel for
Hopper, ``tuned`` what the tuner chose. ``clock`` is the multiprocessors' in MHz behind some of torch's products.
``pct_peak``, of torch's, and ``own_pct``, of the faster of ours, are shares of what they can do at that clock, on a
Hopper; elsewhere of the advertised peak (docs/roofline.md: what an H100 should reach). ``accumulate_ratio``, of TN:
torch's product and ``add_`` onto an fp32 gradient, over the faster of the two where it adds by itself.

All three layouts; the error is against fp64 on a sample of rows. Times are of many calls back to back, so they hold the
host's part where that is the longer one; ``issued`` of a row has it alone. On a CPU the Triton kernel does not run
(``-``), and the tuner chooses among the layouts of the vendor library. Rivals are timed in turns; times are medians.
"""

from __future__ import annotations

import argparse
import ctypes
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch

from axo.grid import Grid
from axo_kernels import Tuner
from axo_kernels import device as devices
from axo_kernels.gemm.layout import LAYOUTS, Product, as_row_major, stored_shapes
from axo_kernels.gemm.matmul import vendor_matmul
from axo_kernels.gemm.tiles import TRIED, Config
from axo_kernels.tune.cache import Cache
from axo_kernels.tune.choice import Choice
from axo_kernels.tune.error_line import in_a_line
from axo_kernels.tune.model_shapes import layers
from axo_kernels.tune.timing import relative_error, sustained
from axo_kernels.tune.tuner import runner

from .lib import arguments, card
from .lib.accuracy import sum_limit
from .lib.arguments import Parser
from .lib.attempts import attempt_each, works
from .lib.clock import undisturbed
from .lib.table import Table, environment

COLUMNS = {
    "product": "s",
    "torch_tflops": ".3f",
    "pct_peak": ".1f",
    "clock": ".0f",
    "own_pct": ".1f",
    "cupy_ratio": ".3f",
    "triton_ratio": ".3f",
    "gluon_ratio": ".3f",
    "accumulate_ratio": ".3f",
    "tuned_ratio": ".3f",
    "error": ".1e",
    "chosen": "s",
}
# Of a contestant's whole product against fp64 (_error): the rounding of its result and of its sums.
PRODUCT_LIMITS = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 1e-5}
# Dense bf16 / fp16 peaks, FLOP/s, by what the device calls itself (vendors' documents).
PEAKS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "A100": 312e12,
    "B200": 2250e12,
    "MI250X": 191.5e12,
    "MI300X": 1307e12,
}


def main(given: list[str] | None = None) -> int:
    """Run the bench; returns 1 when a result is wrong or a product failed."""
    parser = Parser("axo bench gemm", __doc__, json=True)
    parser.add_argument("--sizes", default="", help="square sizes, comma-separated; some by default")
    parser.add_argument("--models", default="", help="models, comma-separated: gpt-5b ... gpt-640b, or 'all'")
    parser.add_argument("--grid", default="1x1x1", help="grids that cut the models' layers, comma-separated")
    parser.add_argument("--rows", type=int, default=2048, help="tokens of one data-parallel group")
    parser.add_argument("--shrink", type=int, default=1, help="divide hidden sizes (machines without a GPU)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--configs", type=int, default=TRIED, help="Triton configurations that the tuner tries")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    options = parser.parse_args(given)
    dtype = getattr(torch, options.dtype)
    try:
        device = arguments.device("--device", options.device)
        if not (options.sizes or options.models):
            options.sizes = "1024,2048,4096,8192,16384,32768,65536" if device.type == "cuda" else "256,512,1024"
        products = _products(options, dtype)
    except ValueError as error:
        parser.error(str(error))
    table = Table(COLUMNS, options.json, {"bench": "gemm"} | environment(device))
    measure(products, device, table, options.rounds, options.configs, options.seconds)
    return int(bool(table.failed) or any(not row["right"] for row in table.rows))


def _products(options: argparse.Namespace, dtype: torch.dtype) -> list[Product]:
    found: dict[Product, None] = {}
    for size in arguments.numbers("--sizes", options.sizes):
        for layout in LAYOUTS:
            found[Product(layout, size, size, size, dtype)] = None
    names = options.models.split(",") if options.models else []
    if names == ["all"]:
        from axo_kernels.tune.model_shapes import MODELS

        names = list(MODELS)
    for name in names:
        for grid in options.grid.split(","):
            cut = Grid.parse(grid)
            for layer in layers(name, (cut.x, cut.y, cut.z), options.rows, options.shrink):
                found.update(dict.fromkeys(layer.products(dtype).values()))
    return list(found)


class RivalError(Exception):
    """Torch's own product does not run here: nothing to compare with, and no fault of ours."""


def measure(
    products: list[Product],
    device: torch.device,
    table: Table,
    rounds: int,
    configs: int,
    seconds: float,
    each: float | None = None,
    unfinished: str = "",
) -> int:
    """Measure into the table each product that it lacks; returns how many are left (:func:`attempt_each`).

    Args:
        each: Seconds of one product after which it hangs, and the process ends itself; None: never.
        unfinished: What could not be measured this time; such rows are measured again by a run that goes on.
    """
    earlier = {row["product"]: row for row in table.rows}  # the last of each
    measured = {name for name, row in earlier.items() if not row.get("unfinished")}
    table.rows.clear()
    tuner = Tuner(
        "first-step",
        configs=configs,
        cache=Cache("a bench keeps its own", devices.versions(), Path(os.devnull)),
        budget=0.3,
        rounds=9,
        progress=lambda done, total, name: table.begins(name),
    )
    cases = {}
    for product in sorted(products, key=lambda one: one.name in earlier):  # new ones first
        if device.type == "cuda" and 4 * product.bytes > torch.cuda.get_device_properties(device).total_memory:
            table.note(f"{product.name}: does not fit the memory, not measured")
        elif product.name not in measured:
            cases[product.name] = partial(_against_torch, product, device, table, tuner, rounds, unfinished)
    left = attempt_each(cases, "products", device, table, seconds, each)
    table.rows[:] = (earlier | {row["product"]: row for row in table.rows}).values()
    for rival in ("tuned", "triton", "gluon"):
        ratios = [row[f"{rival}_ratio"] for row in table.rows if row.get(f"{rival}_ratio")]
        if ratios:
            table.note(f"{rival} against torch: geometric mean {geometric_mean(ratios):.3f}, worst {min(ratios):.3f}")
        elif table.rows:
            table.note(f"{rival} against torch: not measured")
    return left


def _against_torch(product: Product, device: torch.device, table: Table, *given: Any) -> None:
    try:
        _one(product, device, table, *given)
    except RivalError as error:
        table.note(f"{product.name}: not measured: torch's own product fails: {error}", theirs=product.name)


def _one(product: Product, device: torch.device, table: Table, tuner: Tuner, rounds: int, unfinished: str = "") -> None:
    generator = torch.Generator(device).manual_seed(1)
    choice = tuner.choose(product, device)  # before the operands: it has its own for a while
    a, b = (
        torch.randn(shape, generator=generator, device=device).to(product.dtype) for shape in stored_shapes(product)
    )
    tuned = runner(choice, product.layout)
    calls: dict[str, Any] = {"torch": lambda: vendor_matmul(a, b, product.layout)}
    own_ratio = 1.0 if choice.is_torchs(product.layout) else None  # the same call: its ratio would be noise
    if own_ratio is None:
        calls["tuned"] = lambda: tuned(a, b)
    if devices.runs_triton(device) and device.type == "cuda":
        for name, grouped in (("triton", False), ("gluon", True)):
            config = _best_tile(tuner, product, grouped)
            if config is not None or not grouped:
                calls[name] = partial(runner(Choice("triton", product.layout, config), product.layout), a, b)
    left_out = [[one.choice, one.why] for one in tuner.left_out if one.name == f"matmul {product.name}"]
    other = _cupy(a, b, product, lambda why: left_out.append(["cupy", why]))
    if other is not None:
        calls["cupy"] = other
    checked = {name: call for name, call in calls.items() if name != "cupy"}
    errors = _checked(checked, lambda call: _error(call(), a, b, product.layout), calls, left_out, device)
    limits = dict.fromkeys(errors, PRODUCT_LIMITS[product.dtype])
    times, disturbed = undisturbed(partial(sustained, list(calls.values()), device, rounds), device)
    timings, added = dict(zip(calls, times, strict=True)), None
    if product.layout == "TN" and "triton" in calls:
        grouped_tile = _best_tile(tuner, product, True)
        adding = adding_calls(a, b, [None, *([grouped_tile] if grouped_tile else [])])
        added_errors = _checked(dict(adding), partial(adding_error, a=a, b=b), adding, left_out, device)
        errors |= {f"{name} accumulated": error for name, error in added_errors.items() if name != "torch"}
        limits |= {f"{name} accumulated": sum_limit(product.k, product.dtype) for name in added_errors}
        added = max((1 / one.ratio for one in sustained(list(adding.values()), device, rounds)[1:]), default=None)
    card_state = working(calls["torch"], timings["torch"].seconds, device)
    rate = product.flops / timings["torch"].seconds
    advertised, clock = peak_of(device), card_state.get("sm_mhz")
    peak = peak_at(device, clock)
    share = 100 / peak if peak and product.dtype != torch.float32 else None
    ratios = {"tuned_ratio": own_ratio} | {f"{name}_ratio": 1 / timing.ratio for name, timing in timings.items()}
    own = [timings[name].seconds for name in ("triton", "gluon") if name in timings]
    table.add(
        product=product.name,
        torch_tflops=rate / 1e12,
        pct_peak=share * rate if share else None,
        own_pct=share * product.flops / min(own) if share and own else None,
        clock=clock,
        pct_advertised=100 * rate / advertised if advertised else None,
        **ratios,
        accumulate_ratio=added,
        error=max(errors.values()),
        chosen=choice.name,
        right=all(error < limits[name] for name, error in errors.items() if name != "torch"),
        disturbed=disturbed,
        unfinished=unfinished or ("disturbed" if disturbed else None),
        layout=product.layout,
        m=product.m,
        n=product.n,
        k=product.k,
        card=card_state,
        left_out=left_out,
        seconds={name: timing.judged for name, timing in timings.items()},
        issued={name: timing.issued for name, timing in timings.items()},
        errors=errors,
    )


def working(call: Callable[[], object], seconds: float, device: torch.device) -> dict[str, Any]:
    """What the card says of itself while it does this: read at the end of some 50 ms of it, and before it rests."""
    if device.type != "cuda":
        return {}
    for _ in range(max(2, min(500, int(0.05 / seconds)))):
        call()
    middle = torch.cuda.Event()
    middle.record()
    for _ in range(max(2, min(500, int(0.02 / seconds)))):
        call()
    middle.synchronize()
    state = card.state(device)
    torch.cuda.synchronize(device)
    return state


def _checked(
    checked: dict[str, Any],
    error_of: Callable[[Any], float],
    calls: dict[str, Any],
    left_out: list[list[str]],
    device: torch.device,
) -> dict[str, float]:
    """The error of each rival; one that raises is left out of ``calls``, so that the others are timed.

    Raises:
        RuntimeError: The device has stopped working.
        RivalError: It was torch's own, with which the others are compared.
    """
    errors = {}
    for name, call in checked.items():
        try:
            errors[name] = error_of(call)
        except Exception as error:
            if name == "torch" and works(device):
                raise RivalError(in_a_line(error)) from error
            if not works(device):
                raise RuntimeError(f"{name}: {in_a_line(error)}") from error
            left_out.append([name, in_a_line(error)])
            del calls[name]
    return errors


def adding_calls(a: torch.Tensor, b: torch.Tensor, tiles: list[Config | None]) -> dict[str, Callable[[], torch.Tensor]]:
    """TN added to an fp32 gradient: by torch's product and sum, then by the kernel with each tile (None: default)."""
    master = torch.zeros((a.shape[1], b.shape[1]), dtype=torch.float32, device=a.device)
    calls: dict[str, Callable[[], torch.Tensor]] = {"torch": lambda: master.add_(torch.mm(a.T, b))}
    for tile in tiles:
        run = runner(Choice("triton", "TN", tile), "TN")
        calls["gluon" if tile and tile.groups else "triton"] = partial(run, a, b, out=master, accumulate=True)
    return calls


def adding_error(call: Callable[[], torch.Tensor], a: torch.Tensor, b: torch.Tensor) -> float:
    """How far one of them is off, against fp64 on at most 64 rows, where it adds to ones."""
    master = call().fill_(1.0)  # where it adds to
    rows = torch.linspace(0, a.shape[1] - 1, min(64, a.shape[1]), device=a.device).long()
    call()
    return relative_error(master[rows], a.T[rows].double() @ b.double() + 1)


def _best_tile(tuner: Tuner, product: Product, grouped: bool) -> Config | None:
    """Of the tiles that the tuner has found right, the fastest, of the kernel for Hopper or of the others."""
    tiles = [
        (seconds, choice.config)
        for choice, seconds in tuner.seen.get(f"matmul {product.name}", [])
        if choice.config and bool(choice.config.groups) == grouped
    ]
    return min(tiles, key=lambda found: found[0])[1] if tiles else None


def peak_of(device: torch.device) -> float | None:
    """The advertised dense bf16 rate, FLOP/s; None where PEAKS lacks the device."""
    called = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((rate for name, rate in PEAKS.items() if name in called), None)


def peak_at(device: torch.device, mhz: float | None) -> float | None:
    """What a Hopper's multiprocessors can do at a clock in MHz, FLOP/s of dense bf16; elsewhere the advertised rate."""
    if device.type == "cuda" and devices.target_of(device).hopper and mhz:
        return devices.target_of(device).units * _FLOPS_A_CYCLE * mhz * 1e6
    return peak_of(device)


_FLOPS_A_CYCLE = 4096  # of a Hopper's multiprocessor: 132 of them at 1,830 MHz are the advertised 989 TFLOP/s


def _error(result: torch.Tensor, a: torch.Tensor, b: torch.Tensor, layout: str) -> float:
    """Relative Frobenius error against fp64 on at most 64 rows."""
    left, right = as_row_major(a, b, layout)
    rows = torch.linspace(0, left.shape[0] - 1, min(64, left.shape[0]), device=a.device).long()
    return relative_error(result[rows], left[rows].double() @ right.double())


def _cupy(a: torch.Tensor, b: torch.Tensor, product: Product, tell: Callable[[str], object] = print) -> Any:
    """CuPy's cuBLAS through gemmEx, on the same memory; None where CuPy is not installed or cannot do this dtype.

    Args:
        tell: Given why it is not measured, where it is installed.
    """
    if not a.is_cuda or torch.version.hip or product.dtype == torch.float32:
        return None
    try:
        import cupy
        from cupy_backends.cuda.libs import cublas
    except ModuleNotFoundError:
        return None
    except ImportError as error:  # of a library that it wants
        tell(f"not measured: {in_a_line(error)}")
        return None
    try:
        call = gemm_ex(cupy, cublas, a, b, product)
        apart = _error(call(), a, b, product.layout)
    except Exception as raised:  # another CuPy or cuBLAS than ours was written against: a baseline less, no more
        tell(f"not measured: {in_a_line(raised)}")
        return None
    if not apart < PRODUCT_LIMITS[product.dtype]:
        tell(f"not measured: its result is off by {apart:.1e}")
        return None
    return call


def gemm_ex(cupy: Any, cublas: Any, a: torch.Tensor, b: torch.Tensor, product: Product) -> Callable[[], torch.Tensor]:
    """The call of ``cupy_backends.cuda.libs.cublas.gemmEx`` for operands that are stored as the product's layout says.

    cuBLAS counts in columns: ``C^T = B^T A^T``. Scalars lie on the host. CuPy sets its own current stream first.
    """
    out = torch.empty((product.m, product.n), dtype=product.dtype, device=a.device)
    kind = 14 if product.dtype == torch.bfloat16 else 2  # CUDA_R_16BF, CUDA_R_16F
    one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
    m, n, k = product.m, product.n, product.k
    op_b, ldb = (1, k) if product.layout == "NT" else (0, n)
    op_a, lda = (1, m) if product.layout == "TN" else (0, k)
    handle = cupy.cuda.Device(a.device.index or 0).cublas_handle
    stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)

    def call() -> torch.Tensor:
        with stream:
            cublas.gemmEx(
                handle, op_b, op_a, n, m, k, ctypes.addressof(one), b.data_ptr(), kind, ldb, a.data_ptr(), kind, lda,
                ctypes.addressof(zero), out.data_ptr(), kind, n, 68, -1,  # CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT
            )  # fmt: skip
        return out

    return call


if __name__ == "__main__":
    raise SystemExit(main())
