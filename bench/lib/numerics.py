"""Every kernel of ours on a device against fp64: layouts, dtypes, sizes for descriptors and for pointers, epilogues,
accumulation. A check that raises leaves the others their turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch

from axo_kernels import matmul
from axo_kernels.gemm.layout import LAYOUTS, Product, stored_shapes
from axo_kernels.tune.timing import relative_error

from .accuracy import matmul_reference, sum_limit
from .attempts import case

# Results as wide as the operands: twice the rounding of one element, and what the sum adds (accuracy.py).
ROUNDING_LIMITS = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 1e-6}
Multiply = Callable[..., torch.Tensor]


class NumericCase(NamedTuple):
    """A product, and what is done behind its sum: "", "accumulated", or an activation."""

    product: Product
    behind: str
    limit: float
    multiply_by: str | None  # the backend: None where ours does not run

    @property
    def name(self) -> str:
        return f"{self.product.name} {self.behind}".strip()

    def draw(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, Multiply]:
        a, b = (torch.randn(shape, device=device).to(self.product.dtype) for shape in stored_shapes(self.product))
        return a, b, partial(matmul, a, b, self.product.layout, backend=self.multiply_by)

    def launch(self, device: torch.device) -> None:
        """The kernel alone: to compile it."""
        _, _, multiply = self.draw(device)
        self._error(multiply, torch.empty(self.product.m, self.product.n, dtype=torch.float64, device=device))

    def error(self, device: torch.device) -> float:
        a, b, multiply = self.draw(device)
        return self._error(multiply, matmul_reference(a, b, self.product.layout))

    def _error(self, multiply: Multiply, reference: torch.Tensor) -> float:
        if not self.behind:
            return _product(multiply, self.product.dtype, reference)
        if self.behind == "accumulated":
            return _accumulated(multiply, reference)
        return _activated(multiply, self.product.dtype, self.behind, reference)


def numeric_cases(dtype: torch.dtype, dry: bool) -> list[NumericCase]:
    """All checks of one dtype. ``dry``: small sizes, and torch's own product where ours does not run."""
    sizes = [(1, 1, 1), (7, 128, 31), (101, 13, 97)] + ([] if dry else [(512, 768, 1024), (1000, 1001, 1003)])
    limit, found = ROUNDING_LIMITS[dtype], []
    for layout in LAYOUTS:
        for m, n, k in sizes:
            sums = sum_limit(k, dtype)
            # without the kernel torch rounds between the steps of an activation
            bounds = {"": max(limit, sums) if dtype.itemsize == 4 else limit + sums, "accumulated": sums}
            if (m, n, k) == sizes[-1]:
                bounds |= dict.fromkeys(("gelu", "gelu_tanh", "silu_gate"), (3 if dry else 1) * limit)
            product = Product(layout, m, n, k, dtype)
            found += [NumericCase(product, *case, None if dry else "triton") for case in bounds.items()]
    return found


def numerics(
    device: torch.device, table: Any, dry: bool, dtypes: Iterable[torch.dtype] = tuple(ROUNDING_LIMITS)
) -> None:
    """Add a row for each check."""
    for dtype in dtypes:
        for one in numeric_cases(dtype, dry):
            case(f"numerics: {one.name}", partial(_row, table, one, device), device, table)


def _row(table: Any, one: NumericCase, device: torch.device) -> None:
    table.add(check=one.name, error=one.error(device), limit=one.limit)


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
