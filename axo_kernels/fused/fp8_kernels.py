"""The Triton kernels of a rounding to eight bits: bf16's two bytes read once, or twice, and one written.

    scale[i] = max_j |x[i, j]| / top, at least the smallest normal number;  1 where all are 0,  NaN where one is not
               finite;
    out[i, j] = round(x[i, j] / scale[i])

``j`` is the dim that a product sums over, along which ``out`` is contiguous, as tensor cores want both operands. Where
x is so too and has rows enough for all multiprocessors, a program takes a row: it finds the largest, then reads the row
again out of the caches (:func:`round_rows_kernel`). Else programs that walk all of j would leave most of a device idle,
and wait for each load: pieces of j are looked through side by side (:func:`largest_kernel`), then tiles are rounded,
and turned on their way where neighbours in memory are rows (:func:`round_tiles_kernel`).

BITS, LOWEST: of the format, for Triton's interpreter, whose own conversion cuts what is below the normal numbers and
loses a carry, and which has no fused multiply-add; 0 on a GPU, which rounds to nearest by itself.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _magnitude(value):  # type: ignore[no-untyped-def]
    """The bits of |value| in fp32: integers in the order of the numbers, then inf, then NaN."""
    return value.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale_of(largest, top):  # type: ignore[no-untyped-def]
    """The scale of what has a largest :func:`_magnitude`."""
    most = largest.to(tl.float32, bitcast=True)
    scale = tl.maximum(tl.div_rn(most, tl.zeros_like(most) + top), 1.1754943508222875e-38)
    scale = tl.where(largest == 0, 1.0, scale)
    return tl.where(largest < 0x7F800000, scale, float("nan"))


@triton.jit
def _fma(x, y, z, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    if BITS > 0:
        return (x.to(tl.float64) * y.to(tl.float64) + z.to(tl.float64)).to(tl.float32)
    else:
        return tl.fma(x, y, z)


@triton.jit
def _rounded(value, scale, BITS: tl.constexpr, LOWEST: tl.constexpr):  # type: ignore[no-untyped-def]
    """``value / scale`` as IEEE rounds it, then to the format's numbers.

    A division of its own for each element is a call with a branch, dozens of cycles that do not overlap. With the
    rounded reciprocal, a remainder that a fused multiply-add gives exactly corrects a quotient to a unit in the last
    place, and then to the nearest (Markstein, 1990). Small scales are lifted, so that remainders are normal numbers.
    """
    lift = tl.where(scale < 5.421010862427522e-20, 1.8446744073709552e19, 1.0)  # 2**-64, 2**64
    divisor = scale * lift
    inverse = tl.div_rn(tl.zeros_like(divisor) + 1.0, divisor)
    value = value.to(tl.float32) * lift
    quotient = value * inverse
    for _ in tl.static_range(2):  # the remainder's sign is turned: else what is left of -0 would be +0
        quotient = _fma(_fma(quotient, divisor, -value, BITS), -inverse, quotient, BITS)
    if BITS > 0:
        bits = quotient.to(tl.int32, bitcast=True)
        step = ((tl.maximum(((bits >> 23) & 255) - 127, LOWEST) - BITS + 127) << 23).to(tl.float32, bitcast=True)
        near = (tl.abs(quotient) / step + 12582912.0 - 12582912.0) * step  # 1.5 * 2**23: no fraction left
        quotient = (near.to(tl.int32, bitcast=True) | (bits & -2147483648)).to(tl.float32, bitcast=True)
    return quotient


@triton.jit
def round_rows_kernel(
    x, out, scale, columns, stride_row, top, BITS: tl.constexpr, LOWEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of i, all of j. x has rows that are contiguous, out is ``(rows, columns)`` row by row, scale fp32."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    source, target = x + row * stride_row, out + row * columns
    largest = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, columns, BLOCK):
        value = tl.load(source + first + column, mask=first + column < columns, other=0.0)
        largest = tl.maximum(largest, _magnitude(value))
    share = _scale_of(tl.max(largest, 0), top)
    tl.store(scale + row, share)
    for first in range(0, columns, BLOCK):
        inside = first + column < columns
        value = _rounded(tl.load(source + first + column, mask=inside, other=0.0), share, BITS, LOWEST)
        tl.store(target + first + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def largest_kernel(
    x, largest, rows, columns, stride_row, stride_column,
    ONE: tl.constexpr, TILES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """BLOCK_ROWS rows of i, TILES tiles of j: the largest :func:`_magnitude`, into int32 of zeros, one or one a row."""
    blocks = tl.cdiv(rows, BLOCK_ROWS)
    row = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    first = (tl.program_id(0) // blocks).to(tl.int64) * (TILES * BLOCK_COLUMNS)
    most = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.int32)
    for tile in tl.static_range(TILES):
        column = first + tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        inside = (row[:, None] < rows) & (column[None, :] < columns)
        value = tl.load(x + row[:, None] * stride_row + column[None, :] * stride_column, mask=inside, other=0.0)
        most = tl.maximum(most, _magnitude(value))
    if ONE:
        tl.atomic_max(largest, tl.max(tl.max(most, 1), 0), sem="relaxed")
    else:
        tl.atomic_max(largest + row, tl.max(most, 1), mask=row < rows, sem="relaxed")


@triton.jit
def round_tiles_kernel(
    x, out, scale, largest, rows, columns, stride_row, stride_column, top,
    ONE: tl.constexpr, BITS: tl.constexpr, LOWEST: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile of x, which may be strided; out is ``(rows, columns)`` row by row, largest of :func:`largest_kernel`."""
    blocks = tl.cdiv(rows, BLOCK_ROWS)
    row = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    piece = (tl.program_id(0) // blocks).to(tl.int64)
    column = piece * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    value = tl.load(x + row[:, None] * stride_row + column[None, :] * stride_column, mask=inside, other=0.0)
    place = row * 0 if ONE else row
    share = _scale_of(tl.load(largest + place, mask=row < rows, other=0), top)
    if piece == 0:
        tl.store(scale + place, share, mask=row < rows)
    value = _rounded(value, share[:, None], BITS, LOWEST)
    tl.store(out + row[:, None] * columns + column[None, :], value.to(out.dtype.element_ty), mask=inside)
