"""Products whose operands are rounded to eight bits: e4m3 for what the forward pass multiplies, e5m2 for gradients.

    C[m, n] = sa[m] sb[n] sum_k A8[m, k] B8[k, n]         A ~ sa A8,  B ~ sb B8

``scaling="tensor"`` has one scale for an operand, ``"row"`` one for each row of A and column of B, which the sum over k
leaves alone: each of a layer's three products sums over another dim, so each operand is rounded again for each product.
Scales are the largest magnitude over the largest number of the format, so nothing overflows; what is not finite gives
NaN. Micikevicius et al., "FP8 formats for deep learning", 2022.

On an NVIDIA GPU from sm_89 on, and on AMD's gfx942, the product is torch._scaled_mm. Elsewhere it is emulated: the same
roundings, then a product in fp32. Nothing uses this unless it is called. Not here: scales of earlier steps (delayed
scaling), blocks of scales, and fused kernels.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch

from axo_kernels.comm.communicator import CommunicatorProtocol
from axo_kernels.gemm.layout import as_row_major, product_of

SCALINGS = ("tensor", "row")
MULTIPLE = 16  # of K and N, for torch._scaled_mm


class Rounded(NamedTuple):
    """``x ~ data * scale``: data in fp8, scale fp32, of one element, or of x's dims with 1 where it is summed over."""

    data: torch.Tensor
    scale: torch.Tensor


def formats(device: torch.device) -> tuple[torch.dtype, torch.dtype]:
    """The formats of what the forward pass multiplies, and of gradients; gfx942 has its own, without negative zero."""
    if device.type == "cuda" and torch.version.hip is not None:
        if torch.cuda.get_device_properties(device).gcnArchName.startswith("gfx94"):
            return torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
    return torch.float8_e4m3fn, torch.float8_e5m2


def rounded(x: torch.Tensor, dtype: torch.dtype, scaling: str, over: int = -1) -> Rounded:
    """Round to fp8.

    Args:
        x: Any floating-point matrix.
        dtype: Of :func:`formats`.
        scaling: ``"tensor"`` or ``"row"``.
        over: The dim that the product sums over, along which ``"row"`` keeps one scale.

    Raises:
        ValueError: The scaling is neither.
    """
    if scaling not in SCALINGS:
        raise ValueError(f"fp8: scaling={scaling!r}; use one of {', '.join(SCALINGS)}")
    wide = x.float()
    largest = wide.abs().amax() if scaling == "tensor" else wide.abs().amax(over, keepdim=True)
    top = torch.finfo(dtype).max
    scale = torch.where(largest == 0, 1.0, largest / top)  # what is NaN or inf stays, and makes the result NaN
    return Rounded((wide / scale).clamp(-top, top).to(dtype), scale)


def multiply(a: Rounded, b: Rounded, out_dtype: torch.dtype) -> torch.Tensor:
    """``(M, K)`` with scales ``()`` or ``(M, 1)``, ``(K, N)`` with ``()`` or ``(1, N)`` -> ``(M, N)``, sums in fp32."""
    if not runs(a.data.device):
        kind = a.data.device.type
        cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        # the sums of unscaled numbers are beyond fp16
        with torch.autocast(kind, enabled=False) if cast else nullcontext():
            return ((a.data.float() @ b.data.float()) * a.scale * b.scale).to(out_dtype)
    for size, name in ((a.data.shape[1], "K"), (b.data.shape[1], "N")):
        if size % MULTIPLE:
            up = -(-size // MULTIPLE) * MULTIPLE
            raise ValueError(f"fp8: {name}={size} is no multiple of {MULTIPLE}, which the GPU needs; pad to {up}")
    columns = b.data if b.data.stride(0) == 1 else b.data.T.contiguous().T  # it needs B stored by columns
    return torch._scaled_mm(a.data.contiguous(), columns, a.scale, b.scale, out_dtype=out_dtype)


def runs(device: torch.device) -> bool:
    """Whether torch._scaled_mm runs there."""
    if device.type != "cuda":
        return False
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.startswith("gfx94")
    return torch.cuda.get_device_capability(device) >= (8, 9)


def matmul_fp8(a: torch.Tensor, b: torch.Tensor, layout: str = "NT", *, scaling: str = "row") -> torch.Tensor:
    """Multiply two matrices in fp8; the gradients too, with e5m2 for what comes from behind.

    Args:
        a, b: Matrices of bf16, fp16 or fp32, stored as ``layout`` says (:func:`axo_kernels.matmul`).
        layout: ``"NN"``, ``"NT"`` or ``"TN"``.
        scaling: ``"row"`` or ``"tensor"``.

    Returns:
        ``(M, N)`` in the operands' dtype.

    Raises:
        ValueError: The operands do not fit together, are no matrices, or (on a GPU) K or N is no multiple of 16.
    """
    product_of(a, b, layout)
    if a.dim() != 2 or b.dim() != 2:
        raise ValueError(f"fp8: a has {a.dim()} dims and b has {b.dim()}; fold leading dims into rows")
    left, right = as_row_major(a, b, layout)
    result: torch.Tensor = _MatmulFp8.apply(left, right, scaling)
    return result


class _MatmulFp8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, scaling):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(a, b)
        ctx.scaling = scaling
        narrow, _ = formats(a.device)
        return multiply(rounded(a, narrow, scaling, 1), rounded(b, narrow, scaling, 0), a.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        a, b = ctx.saved_tensors
        narrow, wide = formats(a.device)
        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_a = multiply(rounded(grad, wide, ctx.scaling, 1), rounded(b.T, narrow, ctx.scaling, 0), a.dtype)
        if ctx.needs_input_grad[1]:
            grad_b = multiply(rounded(a.T, narrow, ctx.scaling, 1), rounded(grad, wide, ctx.scaling, 0), b.dtype)
        return grad_a, grad_b, None


def all_gather_matmul_fp8(a: torch.Tensor, shard: torch.Tensor, comm: CommunicatorProtocol) -> torch.Tensor:
    """``A W^T`` with W's rows gathered in fp8: half of bf16's bytes, and four more for each row's scale.

    Args:
        a: ``(M, K)``.
        shard: ``(N / size, K)``, this rank's rows of the weight.
        comm: From ``axo_kernels.adapt``.

    Returns:
        ``(M, N)``. The gradient of the shard is reduced over the ranks in the operands' dtype, as their sum.
    """
    product_of(a, shard, "NT")
    result: torch.Tensor = _AllGatherMatmulFp8.apply(a, shard, comm)
    return result


class _AllGatherMatmulFp8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, shard, comm):  # type: ignore[no-untyped-def]
        narrow, _ = formats(a.device)
        mine = rounded(shard, narrow, "row", 1)
        data = mine.data.new_empty((comm.size * shard.shape[0], shard.shape[1]))
        scale = mine.scale.new_empty((comm.size * shard.shape[0], 1))
        # as bytes: not every library knows the format
        works = [
            comm.all_gather(data.view(torch.uint8), mine.data.view(torch.uint8)),
            comm.all_gather(scale, mine.scale),
        ]
        for work in works:
            work.wait()
        ctx.save_for_backward(a, data, scale)
        ctx.comm, ctx.dtype = comm, shard.dtype
        return multiply(rounded(a, narrow, "row", 1), Rounded(data.T, scale.T), a.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        a, data, scale = ctx.saved_tensors
        narrow, wide = formats(a.device)
        grad_a = grad_shard = None
        if ctx.needs_input_grad[0]:
            # the sum is over the rows that have a scale each: the scales go to the gradient before it is rounded
            one = torch.ones((), dtype=torch.float32, device=a.device)
            left = rounded(grad.float() * scale.T, wide, "row", 1)
            grad_a = multiply(left, Rounded(data, one.expand(1, data.shape[1]).contiguous()), a.dtype)
        if ctx.needs_input_grad[1]:
            left, right = rounded(grad.T, wide, "row", 1), rounded(a, narrow, "row", 0)
            whole = multiply(left, right, ctx.dtype)
            grad_shard = whole.new_empty((whole.shape[0] // ctx.comm.size, whole.shape[1]))
            ctx.comm.reduce_scatter(grad_shard, whole).wait()
        return grad_a, grad_shard, None
