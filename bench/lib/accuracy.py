"""What a product should give: the exact one, and how far from it an fp32 sum of K products may be, derived.

The relative error is a quotient of Frobenius norms, and operands are independent with mean zero. Then the sum S_j of
the first j products has a norm of sqrt(j / K) of the whole sum's.

bf16, fp16: a product of two of them has at most 22 bits, so it is exact in fp32, and only additions err. Tensor cores
do not round, they cut: the result of an addition, and every product that is shifted to the exponent of the largest one
of its group, loses less than 2^-23 of that largest one (Fasi, Higham, Mikaitis and Pranesh, "Numerical behavior of
NVIDIA tensor cores", 2021; Hopper keeps at least as many bits). What is cut always makes the sum smaller, so the errors
add up with their sizes and not with their squares:

    |e| <= sum over j of 2^-23 |S_j|   so   ||e|| / ||S_K|| <= 2^-23 sum over j of sqrt(j / K) = 2^-23 (2 K / 3 + 1/2)

This holds however the additions are grouped, since a group has no more of them than products. Groups of 16, as Hopper
has, come to a sixteenth of it; rounding instead of cutting to about its square root.

fp32: products are rounded to nearest inside a fused multiply-add, so errors have no preferred sign, and an error of at
most 2^-24 |S_j| has a standard deviation of 2^-24 |S_j| / sqrt(3). Squares add up: three standard deviations are
3 * 2^-24 sqrt((K / 2) / 3).

Not here: rounding the result to bf16 or fp16, at most 2^-9 and 2^-12 of each element, which is far more.
"""

from __future__ import annotations

import math

import torch

from axo_kernels.gemm.layout import as_row_major


def sum_limit(k: int, dtype: torch.dtype, added: int = 1) -> float:
    """The largest relative error of an fp32 result.

    Args:
        k: Products in a sum.
        dtype: Of the operands.
        added: Further terms that are added to it (a bias, what was there before).
    """
    if dtype == torch.float32:
        return 3 * 2.0**-24 * math.sqrt((k + 2 * added) / 6)
    return 2.0**-23 * (2 * k / 3 + 0.5 + added)


def matmul_reference(a: torch.Tensor, b: torch.Tensor, layout: str = "NN") -> torch.Tensor:
    """The product in fp64, the oracle of the tests and of the benches."""
    left, right = as_row_major(a.double(), b.double(), layout)
    return torch.matmul(left, right)
