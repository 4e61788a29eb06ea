"""Products in fp8 on a device: right, against the emulation that CPUs run, and how fast beside bf16's.

    right   torch._scaled_mm of rounded operands against fp64 products of the same operands, all pairs of formats that a
            layer multiplies (forward, and gradients), one scale an operand and one a row
    fast    torch's bf16 product; the fp8 product of operands that are rounded already; with the rounding of both

Where a device has no fp8, ``right`` checks the emulation itself, and nothing is timed. Not here: gathers in fp8.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from axo_kernels.fused import fp8
from axo_kernels.gemm.layout import LAYOUTS, Product, as_row_major, stored_shapes
from axo_kernels.gemm.matmul import vendor_matmul
from axo_kernels.tune.timing import paired, relative_error

from .attempts import attempt_each, case

COLUMNS = {"product": "s", "scaling": "s", "torch_tflops": ".3f", "fp8_ratio": ".3f", "rounded_ratio": ".3f"}
SHAPES = ((8192, 8192, 8192), (4096, 16384, 4096), (4096, 4096, 16384))
# bf16 results are off by 2**-9, and tensor cores add fp8 products with fewer bits than fp32 has (DeepSeek-V3's report,
# 3.3.2: some 14 on Hopper). A wrong scale, format or operand is off by far more.
LIMIT = 1e-2


def right(device: torch.device, table: Any, dry: bool) -> None:
    """Every layout, scaling, pair of formats and dtype of the result."""
    narrow, wide = fp8.formats(device)
    for m, n, k in [(48, 32, 256)] + ([] if dry else [(512, 768, 1024), (1008, 1040, 2064)]):
        for layout in LAYOUTS:
            stored_a, stored_b = stored_shapes(Product(layout, m, n, k, torch.float32))
            a, b = as_row_major(torch.randn(stored_a, device=device), torch.randn(stored_b, device=device), layout)
            for scaling in fp8.SCALINGS:
                for formats in ((narrow, narrow), (wide, narrow)):
                    left, right = (fp8.rounded(x, formats[over != 1], scaling, over) for x, over in ((a, 1), (b, 0)))
                    exact = (left.data.double() @ right.data.double()) * left.scale.double() * right.scale.double()
                    for dtype in (torch.bfloat16, torch.float32):
                        kinds = " x ".join(str(kind).removeprefix("torch.float8_") for kind in formats)
                        name = f"fp8 {layout} {m}x{n}x{k} {kinds} a scale a {scaling} -> {dtype}"
                        case(f"fp8: {name}", partial(_check, name, left, right, dtype, exact, table), device, table)


def _check(name: str, left: Any, right: Any, dtype: torch.dtype, exact: torch.Tensor, table: Any) -> None:
    table.add(check=name, error=relative_error(fp8.multiply(left, right, dtype), exact), limit=LIMIT)


def measure(
    shapes: Sequence[tuple[int, int, int]],
    device: torch.device,
    table: Any,
    rounds: int,
    seconds: float,
    each: float | None = None,
) -> int:
    """Time each shape and scaling that the table lacks; returns how many are left (:func:`attempt_each`)."""
    if device.type == "cuda" and not fp8.runs(device):
        table.note("fp8: not measured, this device has no product in fp8")
        return 0
    measured = {(row["product"], row["scaling"]) for row in table.rows}
    cases = {
        f"fp8 {product.name} a scale a {scaling}": partial(_case, product, scaling, device, table, rounds)
        for product in (Product("NT", m, n, k, torch.bfloat16) for m, n, k in shapes)
        for scaling in fp8.SCALINGS
        if (product.name, scaling) not in measured
    }
    return attempt_each(cases, "products in fp8", device, table, seconds, each)


def _case(product: Product, scaling: str, device: torch.device, table: Any, rounds: int) -> None:
    a, b = (torch.randn(shape, device=device).to(product.dtype) for shape in stored_shapes(product))
    narrow, _ = fp8.formats(device)
    left, right = fp8.rounded(a, narrow, scaling, 1), fp8.rounded(b.T, narrow, scaling, 0)
    calls = (
        partial(vendor_matmul, a, b, "NT"),
        partial(fp8.multiply, left, right, product.dtype),
        partial(fp8.matmul_fp8, a, b, "NT", scaling=scaling),
    )
    plain, alone, whole = paired(calls, device, rounds)
    table.add(
        product=product.name,
        scaling=scaling,
        torch_tflops=product.flops / plain.seconds / 1e12,
        fp8_ratio=1 / alone.ratio,
        rounded_ratio=1 / whole.ratio,
    )
