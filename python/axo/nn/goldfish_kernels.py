"""The Triton kernel of the goldfish mask: one program a block of positions of one row, h integer steps a position."""

from __future__ import annotations

import triton
import triton.language as tl

_SEED = tl.constexpr(0x243F6A8885A308D3)
_PRIME = tl.constexpr(-0x61C8864680B583EB)
_LOW31 = tl.constexpr((1 << 31) - 1)


@triton.jit(do_not_specialize=["k", "ignore_index", "drop_value"])
def goldfish_kernel(
    tokens, keep, row_stride, length, k, ignore_index, drop_value, H: tl.constexpr, BLOCK: tl.constexpr
):
    """Write 1 where a token counts, 0 where it is left out; see axo/nn/goldfish.py for the formula."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = position < length
    decided = inside & (position >= H)
    state = tl.full((BLOCK,), _SEED, tl.int64)
    unknown = tl.zeros((BLOCK,), tl.int1)
    for offset in range(H):
        token = tl.load(tokens + row * row_stride + position - H + offset, mask=decided, other=0).to(tl.int64)
        unknown = unknown | (token == ignore_index)
        state = (state ^ token) * _PRIME
        state = state ^ ((state >> 33) & _LOW31)
    bucket = ((state >> 32) & _LOW31) % k
    kept = (bucket != drop_value) | unknown | (position < H)
    tl.store(keep + row * length + position, kept.to(tl.uint8), mask=inside)
