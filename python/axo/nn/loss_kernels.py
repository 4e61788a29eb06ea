"""The Triton kernels of the cross-entropy: statistics of a row in one pass over its logits, and their gradient.

    row_statistics    m = max_v l_v,  s = sum_v exp(l_v - m),  d = l_target - m,  t = sum_v (l_v - m)
    row_gradient      dl_v = g (exp(l_v - m) / s - (1 - e) [v = target] - e / V)

The maximum is found on the way: what has been added up around an older one is moved to the new one. Logits are read
once for each kernel and the gradient is written once.

Both take the (real) columns of one rank; see axo/nn/loss.py for what becomes of them over ranks. Statistics are fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def line_of(tensor, row, inner, outer_stride, row_stride):
    """Where a row begins: rows lie in groups of ``inner``, as those of (B, T, V) do that was cut out of more."""
    return tensor + (row // inner) * outer_stride + (row % inner) * row_stride


@triton.jit(do_not_specialize=["low", "inner"])
def row_statistics(
    logits, ids, peak, sums, inner, outer_stride, row_stride, sum_stride, real, low,
    SMOOTHING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of row ``program_id``: m into ``peak``; s, d (0 where another rank has the target) and t into lines of ``sums``.

    ``real``: columns that count; ``low``: the class of the first. Where all are -inf, sums are around 0.
    """
    row = tl.program_id(0).to(tl.int64)
    line = line_of(logits, row, inner, outer_stride, row_stride)
    highest = tl.full((), float("-inf"), tl.float32)
    around = tl.zeros((), tl.float32)  # what the sums are around: the highest so far, 0 while that is -inf
    total = tl.zeros((), tl.float32)
    shifted = tl.zeros((), tl.float32)
    for first in range(0, real, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(line + column, mask=column < real, other=float("-inf")).to(tl.float32)
        highest = tl.maximum(highest, tl.max(value, 0))
        new = tl.where(highest == float("-inf"), 0.0, highest)
        # Before the first finite value there is nothing to move: exp(0 - new) could be inf, and 0 inf is no number.
        moved = tl.where(total > 0, total * tl.exp(around - new), total)
        total = moved + tl.sum(tl.exp(value - new), 0)
        if SMOOTHING:
            shifted += first * (around - new) + tl.sum(tl.where(column < real, value - new, 0.0), 0)
        around = new
    local = tl.load(ids + row).to(tl.int64) - low
    mine = (local >= 0) & (local < real)
    picked = tl.load(line + local, mask=mine, other=0.0).to(tl.float32)
    tl.store(peak + row, highest)
    tl.store(sums + row, total)
    tl.store(sums + sum_stride + row, tl.where(mine, picked - around, 0.0))
    if SMOOTHING:
        tl.store(sums + 2 * sum_stride + row, shifted)


@triton.jit(do_not_specialize=["low", "inner", "out_inner", "sure", "even"])
def row_gradient(
    logits, out, ids, peak, total, scale, inner, outer_stride, row_stride, out_inner, out_outer_stride, out_row_stride,
    real, width, low, sure, even, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one block of columns of a row.

    ``scale`` is g, 0 for a row that is ignored; ``sure``: 1 - e; ``even``: e / V. Columns from ``real`` to ``width``
    get 0. ``out`` may be ``logits``.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    line = line_of(logits, row, inner, outer_stride, row_stride)
    value = tl.load(line + column, mask=column < real, other=float("-inf")).to(tl.float32)
    weight = tl.load(scale + row)
    local = tl.load(ids + row).to(tl.int64) - low
    share = tl.exp(value - tl.load(peak + row)) / tl.load(total + row) - even
    share = (share - tl.where(column == local, sure, 0.0)) * weight
    # An ignored row may hold anything, inf too; 0 * inf must not leak.
    share = tl.where(column < real, tl.where(weight == 0, 0.0, share), 0.0)
    to = line_of(out, row, out_inner, out_outer_stride, out_row_stride)
    tl.store(to + column, share.to(out.dtype.element_ty), mask=column < width)
