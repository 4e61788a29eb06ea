"""Products whose operands are rounded to eight bits: e4m3 for what the forward pass multiplies, e5m2 for gradients.

    C[m, n] = sa[m] sb[n] sum_k A8[m, k] B8[k, n]         A ~ sa A8,  B ~ sb B8

``scaling="tensor"`` has one scale for an operand, ``"row"`` one for each row of A and column of B, which the sum over k
leaves alone: each of a layer's three products sums over another dim, so each operand is rounded again for each product.
Scales are the largest magnitude over the largest number of the format, so nothing overflows; what is not finite gives
NaN. Micikevicius et al., "FP8 formats for deep learning", 2022.

On an NVIDIA GPU from sm_89 on, and on AMD's gfx942 and gfx950, the product is torch._scaled_mm. Elsewhere it is
emulated: the same roundings, then a product in fp32. Nothing uses this unless it is called. Not here: scales of earlier
steps (delayed scaling), blocks of scales, and fused kernels.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from axo_kernels.comm.communicator import FusedCommunicator
from axo_kernels.device import interpreted, runs_triton
from axo_kernels.fused.strategies import FusedPlan, gathered, split_gather
from axo_kernels.gemm.layout import as_row_major, product_of

SCALINGS = ("tensor", "row")
MULTIPLE = 16  # of K and N, for torch._scaled_mm
FULL, TILES = 256, 4  # rows from which on one a program fills a GPU; tiles in which one program looks for the largest
SCALE_BYTES = 16  # behind each row of a packed matrix: a scale of four, and zeros, so that rows stay aligned


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
    if x.dim() == 2 and x.numel() and runs_triton(x.device) and x.dtype != torch.float64:
        return _rounded_by_kernel(x, dtype, scaling, over % 2)
    wide = x.float()
    most = torch.amax if x.numel() else torch.sum  # which knows of nothing that it is 0
    largest = most(wide.abs()) if scaling == "tensor" else most(wide.abs(), over, keepdim=True)
    top = torch.finfo(dtype).max
    scale = _scale_of(largest, top)
    return Rounded((wide / scale).clamp(-top, top).to(dtype), scale)


def _scale_of(largest: torch.Tensor, top: float) -> torch.Tensor:
    """Not below the normal numbers: 1e-41 / top would be 0. What is NaN or inf stays, and makes the result NaN."""
    return torch.where(largest == 0, 1.0, (largest / top).clamp_min(torch.finfo(torch.float32).tiny))


def _rounded_by_kernel(x: torch.Tensor, dtype: torch.dtype, scaling: str, over: int) -> Rounded:
    """:func:`rounded` on a device; ``data`` lies along ``over``, as the product wants it."""
    from axo_kernels.fused import fp8_kernels as kernels

    lines, one = x if over == 1 else x.T, scaling == "tensor"
    rows, columns = lines.shape
    data = torch.empty((rows, columns), dtype=dtype, device=x.device)
    scale = torch.empty(() if one else (rows, 1), dtype=torch.float32, device=x.device)
    top = torch.finfo(dtype).max
    bits, lowest = (3, -6) if dtype == torch.float8_e4m3fn else (2, -14)
    format: dict[str, int] = {"BITS": bits if interpreted() else 0, "LOWEST": lowest}
    along = lines.stride(1) == 1  # else neighbours in memory are rows, and tiles are turned on their way
    if along and not one and rows >= FULL:
        block = max(16, min(4096, 1 << (columns - 1).bit_length()))
        kernels.round_rows_kernel[(rows,)](
            lines, data, scale, columns, lines.stride(0), top, **format, BLOCK=block, num_warps=8 if block > 1024 else 4
        )
    else:
        tile_rows, tile_columns = (8, 1024) if along else (64, 128)
        blocks, pieces = -(-rows // tile_rows), -(-columns // tile_columns)
        largest = torch.zeros(scale.numel(), dtype=torch.int32, device=x.device)
        sizes = (rows, columns, *lines.stride())
        tile: dict[str, Any] = {"ONE": one, "BLOCK_ROWS": tile_rows, "BLOCK_COLUMNS": tile_columns, "num_warps": 8}
        kernels.largest_kernel[(blocks * -(-pieces // TILES),)](lines, largest, *sizes, TILES=TILES, **tile)
        kernels.round_tiles_kernel[(blocks * pieces,)](lines, data, scale, largest, *sizes, top, **format, **tile)
    return Rounded(data, scale) if over == 1 else Rounded(data.T, scale if one else scale.T)


def multiply(a: Rounded, b: Rounded, out_dtype: torch.dtype, fast: bool = False) -> torch.Tensor:
    """``(M, K)`` with scales ``()`` or ``(M, 1)``, ``(K, N)`` with ``()`` or ``(1, N)`` -> ``(M, N)``, sums in fp32.

    A gradient (e5m2) is a, never b. ``fast``: on a GPU sums are kept in the tensor cores, which hold fewer bits: what
    the forward pass can afford.
    """
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
    rows, columns = a.data.contiguous(), b.data.T.contiguous().T  # B by columns; a packed weight's rows are longer
    if out_dtype == torch.bfloat16 or not (a.scale.dim() or b.scale.dim()):
        return torch._scaled_mm(rows, columns, a.scale, b.scale, out_dtype=out_dtype, use_fast_accum=fast)
    one = a.scale.new_ones(())  # with a scale a row it gives bf16 only
    result = torch._scaled_mm(rows, columns, one, one, out_dtype=torch.float32, use_fast_accum=fast)
    return (result * a.scale * b.scale).to(out_dtype)


def runs(device: torch.device) -> bool:
    """Whether torch._scaled_mm runs there."""
    if device.type != "cuda":
        return False
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.startswith(("gfx94", "gfx950"))
    return torch.cuda.get_device_capability(device) >= (8, 9)


def pack(rows: torch.Tensor, into: torch.Tensor, scaling: str) -> None:
    """Round the rows of a weight, ``(n, k)``, for the forward product, each with its scale, into one matrix of bytes.

    Args:
        into: ``(n, k + SCALE_BYTES)`` of uint8. k is a multiple of 16.
        scaling: ``"row"`` or ``"tensor"``: then all of these rows have one scale. Rows packed elsewhere do not matter.
    """
    k = rows.shape[1]
    into[:, k:].zero_()
    if rows.numel():
        data, scale = rounded(rows, formats(rows.device)[0], scaling, 1)
        into[:, :k] = data.view(torch.uint8)
        into[:, k : k + 4].view(torch.float32).copy_(scale)


def unpacked(matrix: torch.Tensor) -> Rounded:
    """What ``pack`` has packed, on any number of ranks: ``(n, k)``, with a scale ``(n, 1)``."""
    k = matrix.shape[1] - SCALE_BYTES
    return Rounded(matrix[:, :k].view(formats(matrix.device)[0]), matrix[:, k : k + 4].view(torch.float32))


def multiply_packed(a: torch.Tensor, matrix: torch.Tensor, scaling: str) -> torch.Tensor:
    """``(m, k)`` of numbers, (n, k) packed -> ``A W^T``, ``(m, n)`` in a's dtype."""
    if not len(a) * len(matrix):
        return a.new_zeros(len(a), len(matrix))
    return _multiply_rounded(_rounded_rows(a, scaling), matrix, a.dtype)


def _rounded_rows(a: torch.Tensor, scaling: str) -> Rounded:
    """The left operand of a product with a packed matrix, which wants a scale a row."""
    left = rounded(a, formats(a.device)[0], scaling, 1)
    return Rounded(left.data, left.scale.expand(len(a), 1).contiguous())


def _multiply_rounded(left: Rounded, matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    weight = unpacked(matrix)
    return multiply(left, Rounded(weight.data.T, weight.scale.T.contiguous()), dtype, fast=True)


def multiply_grad_packed(grad: torch.Tensor, matrix: torch.Tensor, scaling: str) -> torch.Tensor:
    """``(m, n)`` from behind, (n, k) packed -> ``dO W``, ``(m, k)`` in grad's dtype.

    Each row that is summed over has a scale of its own, so the gradient is multiplied with the scales, then rounded.
    """
    weight = unpacked(matrix)
    if not grad.numel():
        return grad.new_zeros(len(grad), weight.data.shape[1])
    left = rounded(grad.float() * weight.scale.T, formats(grad.device)[1], scaling, 1)
    ones = left.scale.new_ones((1, weight.data.shape[1]) if left.scale.dim() else ())
    return multiply(left, Rounded(weight.data, ones), grad.dtype)


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
        return multiply(rounded(a, narrow, scaling, 1), rounded(b, narrow, scaling, 0), a.dtype, fast=True)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        a, b = ctx.saved_tensors
        narrow, wide = formats(a.device)
        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_a = multiply(rounded(grad, wide, ctx.scaling, 1), rounded(b.T, narrow, ctx.scaling, 0), a.dtype)
        if ctx.needs_input_grad[1]:
            # as (dC^T A)^T: with a scale a row torch._scaled_mm takes e5m2 on the left only
            grad_b = multiply(rounded(grad.T, wide, ctx.scaling, 1), rounded(a, narrow, ctx.scaling, 0), b.dtype).T
        return grad_a, grad_b, None


def run_all_gather_fp8(
    a: torch.Tensor, shard: torch.Tensor, comm: FusedCommunicator, way: FusedPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """``A W^T`` and the packed W, whose rows are rounded, then gathered; without autograd.

    ``split`` multiplies its own rows while the first chunks travel, then each chunk as it comes. A is rounded once.
    """
    mine = shard.new_empty((shard.shape[0], shard.shape[1] + SCALE_BYTES), dtype=torch.uint8)
    pack(shard, mine, "row")
    if way.strategy == "signal":
        raise ValueError("all_gather_matmul_fp8: strategy='signal': no kernel of ours multiplies in fp8; use 'split'")
    _, order = way.begin("all_gather_matmul_fp8", a, "NT", "all_gather", len(mine), comm)
    if way.strategy == "serial":
        whole = gathered(mine, comm)
        return multiply_packed(a, whole, "row"), whole
    out = a.new_empty((len(a), comm.size * len(mine)))
    left = _rounded_rows(a, "row")  # a rank without rows has no scales, and gathers as the others do

    def part(_: torch.Tensor, rows: torch.Tensor, *, out: torch.Tensor, bias: None = None) -> torch.Tensor:
        """Rows of one rank (n, k) into (m, n), or of neighbours (ranks, n, k) into (ranks, m, n), as one product."""
        if out.numel():
            product = _multiply_rounded(left, rows.flatten(0, -2), a.dtype)
            out.copy_(product if rows.dim() == 2 else product.unflatten(1, rows.shape[:2]).transpose(0, 1))
        return out

    kept = split_gather(mine, a, out, comm, order, "b", part, None, keep=True)
    assert kept is not None
    return out, kept


def all_gather_matmul_fp8(
    a: torch.Tensor, shard: torch.Tensor, comm: FusedCommunicator, *, strategy: str = "serial", chunks: int = 4
) -> torch.Tensor:
    """``A W^T`` with W's rows gathered in fp8: half of bf16's bytes, and ``SCALE_BYTES`` more a row.

    Args:
        a: ``(M, K)``.
        shard: ``(N / size, K)``, this rank's rows of the weight; on a GPU ``"split"`` wants a multiple of 16 of them.
        comm: From ``axo_kernels.adapt``.
        strategy: ``"serial"`` or ``"split"``; ``Tuner.choose_fused("all_gather_matmul_fp8", ...)`` measures which.
        chunks: Pieces of the shard's rows; ignored by ``"serial"``.

    Returns:
        ``(M, N)``. The gradient of the shard is reduced over the ranks in the operands' dtype, as their sum.
    """
    product_of(a, shard, "NT")
    result: torch.Tensor = _AllGatherMatmulFp8.apply(a, shard, comm, FusedPlan(strategy, chunks))
    return result


class _AllGatherMatmulFp8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, shard, comm, way):  # type: ignore[no-untyped-def]
        out, whole = run_all_gather_fp8(a, shard, comm, way)
        ctx.save_for_backward(a, whole)
        ctx.comm, ctx.dtype = comm, shard.dtype
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        a, whole = ctx.saved_tensors
        narrow, wide = formats(a.device)
        grad_a = grad_shard = None
        if ctx.needs_input_grad[0]:
            grad_a = multiply_grad_packed(grad, whole, "row")
        if ctx.needs_input_grad[1]:
            block = multiply(rounded(grad.T, wide, "row", 1), rounded(a, narrow, "row", 0), ctx.dtype)
            grad_shard = block.new_empty((block.shape[0] // ctx.comm.size, block.shape[1]))
            ctx.comm.reduce_scatter(grad_shard, block).wait()
        return grad_a, grad_shard, None, None
