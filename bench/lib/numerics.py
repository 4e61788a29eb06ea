"""Every kernel of ours on a device against fp64: layouts, dtypes, sizes for descriptors and for pointers, epilogues,
accumulation. A check that raises leaves the others their turn.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from axo_kernels import matmul
from axo_kernels.gemm.layout import LAYOUTS, Product, stored_shapes
from axo_kernels.tune.timing import relative_error

from .accuracy import matmul_reference, sum_limit
from .attempts import case

# Results as wide as the operands: twice the rounding of one element, and what the sum adds (accuracy.py).
ROUNDING_LIMITS = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 1e-6}
Multiply = Callable[..., torch.Tensor]


def numerics(device: torch.device, table: Any, dry: bool, only: list[tuple[torch.dtype, str]] | None = None) -> None:
    """Add a row for each check.

    Args:
        device: Where.
        table: For the rows.
        dry: Small sizes, and torch's own product where ours does not run.
        only: Of these pairs of dtype and layout; None: all.
    """
    sizes = [(1, 1, 1), (7, 128, 31), (101, 13, 97)] + ([] if dry else [(512, 768, 1024), (1000, 1001, 1003)])
    for dtype, limit in ROUNDING_LIMITS.items():
        for layout in LAYOUTS:
            if only is not None and (dtype, layout) not in only:
                continue
            for m, n, k in sizes:
                stored = stored_shapes(Product(layout, m, n, k, dtype))
                a, b = (torch.randn(shape, device=device).to(dtype) for shape in stored)
                reference, sums = matmul_reference(a, b, layout), sum_limit(k, dtype)
                multiply = partial(matmul, a, b, layout, backend=None if dry else "triton")
                name = f"{layout} {m}x{n}x{k} {dtype}"
                checks = {
                    name: (partial(_product, multiply, dtype), max(limit, sums) if a.itemsize == 4 else limit + sums),
                    f"{name} accumulated": (partial(_accumulated, multiply), sums),
                }
                if (m, n, k) == sizes[-1]:
                    for activation in ("gelu", "gelu_tanh", "silu_gate"):
                        # without the kernel torch rounds between the steps
                        bound = (3 if dry else 1) * limit
                        checks[f"{name} {activation}"] = (partial(_activated, multiply, dtype, activation), bound)
                for what, (error, bound) in checks.items():
                    row = partial(_row, table, what, error, reference, bound)
                    case(f"numerics: {what}", row, device, table)


def _row(table: Any, what: str, error: Callable[[torch.Tensor], float], reference: torch.Tensor, bound: float) -> None:
    table.add(check=what, error=error(reference), limit=bound)


def _product(multiply: Multiply, dtype: torch.dtype, reference: torch.Tensor) -> float:
    out = torch.full_like(reference, float("nan"), dtype=dtype)
    return relative_error(multiply(out), reference)


def _accumulated(multiply: Multiply, reference: torch.Tensor) -> float:
    # of the product's own sign: a sum near zero has no relative error to speak of
    master = torch.where(reference < 0, -1.0, 1.0).to(torch.float32)
    expected = reference + master
    multiply(master, accumulate=True)
    return relative_error(master, expected)


def _activated(multiply: Multiply, dtype: torch.dtype, activation: str, reference: torch.Tensor) -> float:
    # above zero, so that a single result (1x1x1) is not GELU's tail, where 1 + erf(x) has no digits left
    bias = (3 + torch.rand(reference.shape[1], device=reference.device)).to(dtype)
    exact = reference + bias.double()
    if activation == "silu_gate":
        gate = torch.randn(reference.shape, device=reference.device).to(dtype)
        expected, given = torch.nn.functional.silu(exact) * gate.double(), gate
    else:
        kind = "tanh" if activation == "gelu_tanh" else "none"
        expected, given = torch.nn.functional.gelu(exact, approximate=kind), None
    return relative_error(multiply(bias=bias, activation=activation, gate=given), expected)
