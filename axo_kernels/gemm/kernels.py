"""Triton kernels of the matrix product: one for plain pointers, one for tensor descriptors (TMA).

    C[batch, m, n] = act(sum_k A[batch, m, k] B[batch, k, n] + bias[n]) (* gate)  (+ C when accumulating, in fp32)

Both are persistent: programs walk over tiles in grouped order. With FLATTEN the loop over tiles and the loop over K are
one, so the loads of the next tile are issued before this tile's epilogue. With SPLIT_K above 1, for products of fewer
tiles than the device has programs, each tile's sum over K is cut into pieces, which go to C as fp32 partial sums one
behind the other; combine_kernel adds them in order, so that the same product has the same bits every time. Sums are
fp32. Which tile sizes to use is none of this file's business (tiles.py), nor are checks and launches (matmul.py).

``INTERPRETED`` is set under Triton's interpreter, which computes bf16 products wrongly (so operands become fp32 first)
and has no reduction through descriptors (so accumulating loads, adds and stores).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def grouped_tile(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Tile number -> (row tile, column tile), GROUP_M row tiles at a time so that both operands stay in the L2."""
    per_group = GROUP_M * tiles_n
    group = tile // per_group
    first = group * GROUP_M
    rows = min(tiles_m - first, GROUP_M)
    within = tile % per_group
    return first + within % rows, within // rows


@triton.jit
def first_tile(XCDS: tl.constexpr):
    """The tile that this program begins with. AMD deals programs out to its XCDs one by one, each with an L2 of its
    own: there neighbours in the order of tiles, which share operands, are put on the same XCD."""
    program = tl.program_id(0)
    if XCDS > 1:
        programs = tl.num_programs(0)
        xcd = program % XCDS
        program = xcd * (programs // XCDS) + min(xcd, programs % XCDS) + program // XCDS
    return program


@triton.jit
def piece_depth(K, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr):
    """How much of K each piece has, a multiple of the step; the last ones may have less, or nothing."""
    return tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K) * BLOCK_K


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """GELU (exact, as torch's default, or its tanh form) or SiLU of an fp32 tile."""
    if ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u)): nothing cancels, and exp may overflow to inf or underflow to 0
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "silu" or ACTIVATION == "silu_gate":
        x = x / (1.0 + tl.exp(-x))
    return x


@triton.jit
def tile_product(
    a, b, m_limit, n_limit, K, stride_am, stride_ak, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One tile's sum over K. a and b point at the tile's first row and column; m_limit, n_limit: rows that exist."""
    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    a_offsets = rows[:, None] * stride_am + depth[None, :] * stride_ak
    b_offsets = depth[:, None] * stride_bk + columns[None, :] * stride_bn
    a_mask = rows[:, None] < m_limit
    b_mask = columns[None, :] < n_limit
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(tl.cdiv(K, BLOCK_K)):
        k = step * BLOCK_K
        a_tile = a + k.to(tl.int64) * stride_ak
        b_tile = b + k.to(tl.int64) * stride_bk
        if EVEN_K:
            x = tl.load(a_tile + a_offsets, mask=a_mask, other=0.0)
            y = tl.load(b_tile + b_offsets, mask=b_mask, other=0.0)
        else:
            x = tl.load(a_tile + a_offsets, mask=a_mask & (depth[None, :] < K - k), other=0.0)
            y = tl.load(b_tile + b_offsets, mask=b_mask & (depth[:, None] < K - k), other=0.0)
        if INTERPRETED:
            x = x.to(tl.float32)
            y = y.to(tl.float32)
        acc = tl.dot(x, y, acc, input_precision=PRECISION)
    return acc


@triton.jit
def store_tile(
    acc, c, bias, gate, m_limit, n_limit, stride_cm, stride_cn, stride_gm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """Epilogue through plain pointers; c, bias and gate point at the tile's first element."""
    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    mask = (rows[:, None] < m_limit) & (columns[None, :] < n_limit)
    if HAS_BIAS:
        acc += tl.load(bias + columns, mask=columns < n_limit, other=0.0).to(tl.float32)[None, :]
    acc = activate(acc, ACTIVATION)
    if ACTIVATION == "silu_gate":
        acc *= tl.load(gate + rows[:, None] * stride_gm + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    target = c + rows[:, None] * stride_cm + columns[None, :] * stride_cn
    if ACCUMULATE:
        acc += tl.load(target, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, acc.to(c.dtype.element_ty), mask=mask)


@triton.jit
def matmul_kernel(
    a, b, c, bias, gate, batch, M, N, K,
    stride_ab, stride_am, stride_ak, stride_bb, stride_bk, stride_bn, stride_cb, stride_cm, stride_cn,
    stride_gb, stride_gm, stride_cs,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SPLIT_K: tl.constexpr, XCDS: tl.constexpr, NUM_PROGRAMS: tl.constexpr, EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, ACCUMULATE: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRETED: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Plain pointers: any strides, any sizes, any device. The layout is in the strides; stride_cs: of a piece of C."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    for tile in tl.range(first_tile(XCDS), tiles * batch * SPLIT_K, NUM_PROGRAMS, flatten=FLATTEN):
        matrix = (tile // tiles).to(tl.int64)
        depth = K
        k0 = tl.zeros((), tl.int64)
        c_piece = c
        if SPLIT_K > 1:
            piece = matrix // batch
            matrix = matrix % batch
            per_piece = piece_depth(K, BLOCK_K, SPLIT_K)
            k0 = piece * per_piece
            depth = min(per_piece, K - k0.to(tl.int32))
            c_piece = c + piece * stride_cs
        tile_m, tile_n = grouped_tile(tile % tiles, tiles_m, tiles_n, GROUP_M)
        # the tile's first row and column in 64 bits: a tensor may have more than 2**31 elements
        m0 = tile_m * BLOCK_M
        n0 = tile_n * BLOCK_N
        m64 = m0.to(tl.int64)
        n64 = n0.to(tl.int64)
        acc = tile_product(
            a + matrix * stride_ab + m64 * stride_am + k0 * stride_ak,
            b + matrix * stride_bb + n64 * stride_bn + k0 * stride_bk, M - m0, N - n0, depth,
            stride_am, stride_ak, stride_bk, stride_bn, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, PRECISION, INTERPRETED,
        )  # fmt: skip
        store_tile(
            acc, c_piece + matrix * stride_cb + m64 * stride_cm + n64 * stride_cn, bias + n0,
            gate + matrix * stride_gb + m64 * stride_gm + n64, M - m0, N - n0, stride_cm, stride_cn, stride_gm,
            BLOCK_M, BLOCK_N, HAS_BIAS, ACTIVATION, ACCUMULATE,
        )  # fmt: skip


@triton.jit
def descriptor_product(
    a, b, m0, n0, k0, depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One tile's sum over K, from k0 on, with operands read through descriptors."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(tl.cdiv(depth, BLOCK_K)):
        k = k0 + step * BLOCK_K
        x = a.load([k, m0]).T if A_TRANSPOSED else a.load([m0, k])
        y = b.load([n0, k]).T if B_TRANSPOSED else b.load([k, n0])
        if INTERPRETED:
            x = x.to(tl.float32)
            y = y.to(tl.float32)
        acc = tl.dot(x, y, acc, input_precision=PRECISION)
    return acc


@triton.jit
def store_through_descriptor(
    acc, c, bias, gate, m0, n0, M, N, stride_gm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, ACCUMULATE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Epilogue of (a part of) a tile through the descriptor of C, which clips at the borders by itself."""
    columns = n0 + tl.arange(0, BLOCK_N)
    if HAS_BIAS:
        acc += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    acc = activate(acc, ACTIVATION)
    if ACTIVATION == "silu_gate":
        rows = m0 + tl.arange(0, BLOCK_M)
        mask = (rows[:, None] < M) & (columns[None, :] < N)
        offsets = rows[:, None].to(tl.int64) * stride_gm + columns[None, :]
        acc *= tl.load(gate + offsets, mask=mask, other=0.0).to(tl.float32)
    if ACCUMULATE and not INTERPRETED:
        # each element once a launch: the copy engine adds, nothing is read here
        c.atomic_add([m0, n0], acc.to(c.dtype))
    else:
        if ACCUMULATE:
            acc += c.load([m0, n0]).to(tl.float32)
        c.store([m0, n0], acc.to(c.dtype))


@triton.jit
def matmul_descriptor_kernel(
    a, b, c, bias, gate, M, N, K, stride_gm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SPLIT_K: tl.constexpr, XCDS: tl.constexpr, NUM_PROGRAMS: tl.constexpr,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, ACCUMULATE: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRETED: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Host tensor descriptors: TMA loads and stores on Hopper and later; one matrix, 16-byte bases and strides.

    a: blocks (BLOCK_M, BLOCK_K), or (BLOCK_K, BLOCK_M) when stored [K, M]; b: (BLOCK_K, BLOCK_N), or (BLOCK_N, BLOCK_K)
    when stored [N, K]; c: (BLOCK_M, BLOCK_N // PARTS). PARTS = 2 halves the shared memory of the epilogue. Pieces of C
    stand below each other, each of whole tiles.
    """
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    for tile in tl.range(first_tile(XCDS), tiles * SPLIT_K, NUM_PROGRAMS, flatten=FLATTEN):
        tile_m, tile_n = grouped_tile(tile % tiles, tiles_m, tiles_n, GROUP_M)
        m0 = tile_m * BLOCK_M
        n0 = tile_n * BLOCK_N
        k0 = 0
        depth = K
        row = m0
        if SPLIT_K > 1:
            piece = tile // tiles
            per_piece = piece_depth(K, BLOCK_K, SPLIT_K)
            k0 = piece * per_piece
            depth = min(per_piece, K - k0)
            row = m0 + piece * tiles_m * BLOCK_M
        acc = descriptor_product(
            a, b, m0, n0, k0, depth, BLOCK_M, BLOCK_N, BLOCK_K, A_TRANSPOSED, B_TRANSPOSED, PRECISION, INTERPRETED
        )
        if PARTS == 1:
            store_through_descriptor(
                acc, c, bias, gate, row, n0, M, N, stride_gm,
                BLOCK_M, BLOCK_N, HAS_BIAS, ACTIVATION, ACCUMULATE, INTERPRETED,
            )  # fmt: skip
        else:
            halves = acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1)
            left, right = halves.split()
            store_through_descriptor(
                left, c, bias, gate, row, n0, M, N, stride_gm,
                BLOCK_M, BLOCK_N // 2, HAS_BIAS, ACTIVATION, ACCUMULATE, INTERPRETED,
            )  # fmt: skip
            store_through_descriptor(
                right, c, bias, gate, row, n0 + BLOCK_N // 2, M, N, stride_gm,
                BLOCK_M, BLOCK_N // 2, HAS_BIAS, ACTIVATION, ACCUMULATE, INTERPRETED,
            )  # fmt: skip


@triton.jit
def combine_kernel(
    partial, c, bias, gate, M, N, stride_ps, stride_cm, stride_cn, stride_gm,
    PIECES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """Add the partial sums of each element in the order of K, and do what comes behind a sum; one tile a program.

    partial, fp32 ``[PIECES, rows, N]`` with rows of at least M, stride_ps elements from piece to piece.
    """
    tiles_n = tl.cdiv(N, BLOCK_N)
    m0 = tl.program_id(0) // tiles_n * BLOCK_M
    n0 = tl.program_id(0) % tiles_n * BLOCK_N
    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    m64 = m0.to(tl.int64)
    mask = (rows[:, None] < M - m0) & (columns[None, :] < N - n0)
    source = partial + m64 * N + n0 + rows[:, None] * N + columns[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for piece in tl.static_range(PIECES):
        acc += tl.load(source + piece * stride_ps.to(tl.int64), mask=mask, other=0.0)
    store_tile(
        acc, c + m64 * stride_cm + n0 * stride_cn, bias + n0, gate + m64 * stride_gm + n0, M - m0, N - n0,
        stride_cm, stride_cn, stride_gm, BLOCK_M, BLOCK_N, HAS_BIAS, ACTIVATION, ACCUMULATE,
    )  # fmt: skip
