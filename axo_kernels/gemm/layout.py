"""Layouts of a matrix product, and the checks that every product passes first.

With row-major names, ``C[M, N]`` is

    NN: A[M, K] @ B[K, N]        NT: A[M, K] @ B[N, K]^T        TN: A[K, M]^T @ B[K, N]

so that with a weight stored ``[out, in]`` the forward product is NT, the input gradient NN and the weight gradient TN
("Democratizing AI", section on BLAS kernel tuning). A product in one layout can be computed in another one by laying an
operand out again; :func:`relayout` says which operand. Leading dims are batch dims. Nothing here touches a kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

LAYOUTS = ("NN", "NT", "TN")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Coordinates and row counts travel to the device as 32-bit integers; offsets inside one tile do too.
_INT32 = 2**31 - 1
_TILE_ROWS = 256


@dataclass(frozen=True)
class Product:
    """The sizes of one product: ``C[batch, m, n] = A[batch, m, k] @ B[batch, k, n]``, stored by ``layout``."""

    layout: str
    m: int
    n: int
    k: int
    dtype: torch.dtype
    batch: int = 1

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """Bytes that have to move at least: each operand read once, the result written once."""
        return self.batch * (self.m * self.k + self.k * self.n + self.m * self.n) * self.dtype.itemsize

    @property
    def name(self) -> str:
        """For example ``NT 2048x4096x1024 bfloat16``; m x n x k."""
        batch = f"{self.batch}x" if self.batch > 1 else ""
        return f"{self.layout} {batch}{self.m}x{self.n}x{self.k} {str(self.dtype).removeprefix('torch.')}"


def check_layout(layout: str) -> None:
    """Refuse anything but NN, NT and TN."""
    if layout not in LAYOUTS:
        raise ValueError(f"matmul: layout={layout!r} is not a layout; use one of {', '.join(LAYOUTS)}")


def as_row_major(a: torch.Tensor, b: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """View the stored operands as ``A[..., M, K]`` and ``B[..., K, N]``; strides change, no byte moves."""
    if layout == "NT":
        return a, b.mT
    if layout == "TN":
        return a.mT, b
    check_layout(layout)
    return a, b


def product_of(a: torch.Tensor, b: torch.Tensor, layout: str) -> Product:
    """Read the sizes of a product off its operands, with every check that needs no other argument.

    Raises:
        ValueError: The layout is unknown, the operands disagree in dtype, device or sizes, or a size does not fit into
            the 32-bit coordinates of the kernels.
    """
    check_layout(layout)
    if a.dtype != b.dtype:
        raise ValueError(f"matmul: a is {a.dtype} and b is {b.dtype}; cast one of them, both must agree")
    if a.dtype not in DTYPES:
        raise ValueError(f"matmul: {a.dtype} is not supported; use torch.bfloat16, torch.float16 or torch.float32")
    if a.device != b.device:
        raise ValueError(f"matmul: a is on {a.device} and b is on {b.device}; move one of them")
    if a.dim() < 2 or b.dim() < 2:
        raise ValueError(f"matmul: a has {a.dim()} dims and b has {b.dim()}; both need at least 2")
    m, k = (a.shape[-1], a.shape[-2]) if layout == "TN" else (a.shape[-2], a.shape[-1])
    n, k_of_b = (b.shape[-2], b.shape[-1]) if layout == "NT" else (b.shape[-1], b.shape[-2])
    if k != k_of_b:
        raise ValueError(
            f"matmul {layout}: a {tuple(a.shape)} has K={k} and b {tuple(b.shape)} has K={k_of_b}; {layout} needs "
            f"{_WANTED[layout]}"
        )
    batch = _batch(a, b, layout)
    if max(m, n, k, batch) > _INT32:
        raise ValueError(f"matmul {layout}: M={m}, N={n}, K={k}, batch={batch}: each must be at most {_INT32}; cut it")
    return Product(layout, m, n, k, a.dtype, batch)


_WANTED = {"NN": "A[M, K] and B[K, N]", "NT": "A[M, K] and B[N, K]", "TN": "A[K, M] and B[K, N]"}


def _batch(a: torch.Tensor, b: torch.Tensor, layout: str) -> int:
    """Number of matrices: b may have none of a's leading dims (one weight for all), else they must be equal."""
    if b.dim() == 2 and layout != "TN":
        return math.prod(a.shape[:-2])
    if a.shape[:-2] != b.shape[:-2]:
        raise ValueError(
            f"matmul {layout}: leading dims {tuple(a.shape[:-2])} of a and {tuple(b.shape[:-2])} of b differ; make "
            f"them equal{', or give b two dims' if layout != 'TN' else ''}"
        )
    return math.prod(a.shape[:-2])


def autocast(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast the operands as torch's own products do inside ``torch.autocast``."""
    kind = a.device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return a, b
    if torch.float64 in (a.dtype, b.dtype) or not a.is_floating_point():
        return a, b
    dtype = torch.get_autocast_dtype(kind)
    return a.to(dtype), b.to(dtype)


def check_offsets(tensor: torch.Tensor, name: str) -> None:
    """Refuse strides so large that the offsets inside one tile leave 32 bits; a dim of one row has no offsets.

    Sizes of whole tensors may exceed 2**31 elements: the start of each tile is computed in 64 bits.
    """
    strides = [abs(stride) for stride, size in zip(tensor.stride()[-2:], tensor.shape[-2:], strict=True) if size > 1]
    if sum(strides) * _TILE_ROWS > _INT32:
        raise ValueError(
            f"matmul: {name} {tuple(tensor.shape)} has strides of {' + '.join(map(str, strides))} elements; the "
            f"kernels take at most {_INT32 // _TILE_ROWS} together: make it contiguous or cut it"
        )


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements may lie in one place (an expanded dim, windows of ``as_strided``): no room to write into.

    Sure where it says no: each stride is longer than all that the smaller ones span.
    """
    span = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= span:
                return tensor.numel() > 0
            span += stride * (size - 1)
    return False


def share_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether an element of one tensor lies on one of the other; also where that is too hard to say."""
    one, other = first.untyped_storage(), second.untyped_storage()  # two may begin in one array of NumPy's
    start, begin = one.data_ptr(), other.data_ptr()
    if not first.numel() * second.numel() or start >= begin + other.nbytes() or begin >= start + one.nbytes():
        return False
    try:
        return np.shares_memory(_described(first), _described(second), max_work=10_000)
    except np.exceptions.TooHardError:
        return True


def _described(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """An array where the tensor lies, on any device: not to be read."""
    size = tensor.itemsize
    strides = tuple(stride * size for stride in tensor.stride())
    place = {"version": 3, "data": (tensor.data_ptr(), False), "typestr": f"|V{size}"}
    return np.asarray(SimpleNamespace(__array_interface__=place | {"shape": tuple(tensor.shape), "strides": strides}))


@cache
def relayout(have: str, want: str) -> tuple[bool, bool]:
    """Say which operands must be transposed, ``(copy a, copy b)``, to compute a ``have`` product as ``want``.

    ``A[M, K]`` becomes ``A[K, M]`` and the other way round, the same for b. These are the papers' "all three modes".
    """
    check_layout(have)
    check_layout(want)
    return (have == "TN") != (want == "TN"), (have == "NT") != (want == "NT")


def laid_out(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a stored operand into the other order: ``[.., R, C]`` to a contiguous ``[.., C, R]``."""
    return tensor.mT.contiguous()


def folded_rows(a: torch.Tensor, b: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Size]:
    """Fold a's leading dims into M where one matrix b serves all of them; return a as 2-D and the leading dims.

    A view where strides allow it, a copy otherwise. TN has no such form (its leading dims would be summed).
    """
    lead = a.shape[:-1]
    if layout == "TN" or b.dim() != 2 or a.dim() == 2:
        return a, lead
    return a.flatten(0, -2), lead


def stored_shapes(product: Product) -> list[tuple[int, ...]]:
    """Shapes of a and b as they are stored."""
    lead = (product.batch,) if product.batch > 1 else ()
    a = (product.k, product.m) if product.layout == "TN" else (product.m, product.k)
    b = (product.n, product.k) if product.layout == "NT" else (product.k, product.n)
    return [lead + a, lead + b]
