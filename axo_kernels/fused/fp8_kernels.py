"""The Triton kernel of a rounding to eight bits: one reading of bf16's two bytes, one writing of one.

    scale[i] = max_j |x[i, j]| / top, at least the smallest normal number;  1 where all are 0,  NaN where one is not
               finite;
    out[i, j] = round(x[i, j] / scale[i])

``j`` is the dim that a product sums over, along which ``out`` is contiguous, as tensor cores want both operands. The
largest is found in a first pass over a program's rows, which the second one reads out of the caches. With SCALED the
scale, one for all, is given. BITS, LOWEST: of the format, for Triton's interpreter, whose own conversion cuts what is
below the normal numbers and loses a carry; 0 on a GPU, which rounds to nearest by itself.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def round_kernel(
    x, out, scale, rows, columns, stride_row, stride_column, top,
    SCALED: tl.constexpr, BITS: tl.constexpr, LOWEST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """BLOCK_ROWS rows of i, all of j. x may be strided, out is ``(rows, columns)`` row by row, scale fp32."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_COLUMNS)
    inside = row[:, None] < rows
    source = x + row[:, None] * stride_row
    target = out + row[:, None] * columns.to(tl.int64)
    if SCALED:
        share = tl.full((BLOCK_ROWS,), 1.0, tl.float32) * tl.load(scale)
    else:
        largest = tl.zeros((BLOCK_ROWS,), tl.float32)
        bad = tl.zeros((BLOCK_ROWS,), tl.int32)
        for first in range(0, columns, BLOCK_COLUMNS):
            j = first + column
            offsets = j[None, :].to(tl.int64) * stride_column
            value = tl.load(source + offsets, mask=inside & (j[None, :] < columns), other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.abs(value), 1))
            bad = tl.maximum(bad, tl.max((tl.abs(value) < float("inf")).to(tl.int32) ^ 1, 1))
        share = tl.maximum(tl.div_rn(largest, tl.zeros_like(largest) + top), 1.1754943508222875e-38)
        share = tl.where(largest == 0, 1.0, share)
        share = tl.where(bad != 0, float("nan"), share)
        tl.store(scale + row, share, mask=row < rows)
    for first in range(0, columns, BLOCK_COLUMNS):
        j = first + column
        mask = inside & (j[None, :] < columns)
        offsets = j[None, :].to(tl.int64) * stride_column
        value = tl.load(source + offsets, mask=mask, other=0.0).to(tl.float32)
        value = tl.div_rn(value, tl.broadcast_to(share[:, None], value.shape))
        value = tl.minimum(tl.maximum(value, -top), top)  # where the scale is NaN, whatever it is
        if BITS > 0:
            exponent = ((value.to(tl.int32, bitcast=True) >> 23) & 255) - 127
            step = ((tl.maximum(exponent, LOWEST) - BITS + 127) << 23).to(tl.float32, bitcast=True)
            value = (value / step + 12582912.0 - 12582912.0) * step  # 1.5 * 2**23: nothing behind the point is left
        tl.store(target + j[None, :], value.to(out.dtype.element_ty), mask=mask)
