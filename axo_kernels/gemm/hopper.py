"""The matrix product for Hopper, written in Gluon: a warp that only loads, two warp groups that only multiply.

    C[m, n] = sum_k A[m, k] B[k, n] (+ bias[n])        or  C += ..., in fp32, for a master gradient

    producer    one warp, 24 registers: bulk copies (TMA) of the next steps' operands into a ring of STAGES buffers
    consumers   two warp groups, 240 registers each: asynchronous warp-group products (wgmma) out of the ring, one of
                which is always in flight while the next is issued; then bias, rounding, a bulk store

One kernel for NN, NT and TN: what differs is the block that a descriptor loads and whether it is read transposed. It is
persistent: programs walk over tiles in grouped order, and the producer runs ahead into the next tile. The two groups
share the work in one of two ways:

    PINGPONG    they take tiles in turns, so that one stores while the other multiplies: tiles of 128 x 128
    otherwise   each has half of the rows of the same tile, and both read the same B: tiles of 128 x 256, a quarter
                less traffic for each flop. Group 1 starts HEAD steps behind group 0, so that they do not store at once

Two barriers stand at each stage of the ring: ``full`` is raised by the copy engine when all bytes are there, ``empty``
by the groups that read the stage. A barrier tells only odd from even phases, so nobody may wait for a phase that is two
ahead: with PINGPONG a group begins with a tile when the other one has seen all of the tile before (``order``). A model
of all this visits every order of events for small rings (tests/kernels/gemm/ring_model.py). A group stores out of a
buffer of its own, and waits for the copy engine before it writes there again. Accumulating is done by the copy engine,
which adds to what is in memory: each element once a launch. The kernel can also meet a communication stream at flags
(gemm/flags.py), segment by segment, which the model has too, with a memory that is weak.

bf16 and fp16; bases and strides of 16 bytes; Hopper only (sm_90). No interpreter runs Gluon, so nothing here is trusted
before the tuner has compared it with torch's product on the GPU (axo_kernels.tune.trust).
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from axo_kernels.gemm.flags import proxy_fence, report, wait_until
from axo_kernels.gemm.kernels import grouped_tile

_grouped_tile, _wait_until, _report, _proxy_fence = (
    gluon.jit(each.fn) for each in (grouped_tile, wait_until, report, proxy_fence)
)


@builtin
def _added(descriptor, coord, source, _semantic=None):  # type: ignore[no-untyped-def]
    """Let the copy engine add a buffer of shared memory to memory; Gluon 3.6 has the operation, but no name for it."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    add = gl._core.ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(add, descriptor.handle, coord, source.handle)


# What Gluon has renamed since 3.6; 3.9 keeps some of the older names, which only raise.
_bulk_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_bulk_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_bulk_add = getattr(tma, "async_atomic_add", None) or _added
_group_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def _place(
    tile, segment, table, M, N, group_m,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SEGMENTS: gl.constexpr, ALONG_N: gl.constexpr, SIDE: gl.constexpr,
):  # fmt: skip
    """A tile's segment, not before ``segment``, and its first row and column: SIDE 1 where it is read, 2 written."""
    shift = 0
    if SEGMENTS:
        while gl.load(table + segment + 1) <= tile:  # there is always a column behind the last segment, of infinity
            segment += 1
        shift = gl.load(table + SIDE * SEGMENTS + segment)
        rows = gl.load(table + 3 * SEGMENTS + segment)
        tile -= gl.load(table + segment)
        if ALONG_N:
            N = rows
        else:
            M = rows
    tile_m, tile_n = _grouped_tile(tile, gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N), group_m)
    row = tile_m * BLOCK_M
    column = tile_n * BLOCK_N
    if ALONG_N:
        column += shift
    else:
        row += shift
    return segment, row, column


@gluon.jit
def _acquired(
    segment, waited, patience, table, flags, counters, epoch, status, bound, SEGMENTS: gl.constexpr
):  # fmt: skip
    """Before a segment's first bulk load: wait for its flag, and order what it stands for before these loads. Returns
    the flag's number, and how long to wait for the next. One that is not set marks its counter, for the consumers."""
    number = gl.load(table + 4 * SEGMENTS + segment)
    if (number != waited) & (number >= 0):
        seen = _wait_until(flags + number, epoch, patience)
        if seen - epoch < 0:
            _report(status, number, epoch, seen)
            gl.store(counters + number, 1)
            patience = 0  # the bound holds for the kernel
        _proxy_fence(True)
    return number, patience


@gluon.jit
def _signalled(
    segment, table, flags, counters, epoch, HALVES: gl.constexpr, SEGMENTS: gl.constexpr
):  # fmt: skip
    """Count a part of a tile that has been stored, and set the flag of a chunk behind its last one.

    A bulk store is done, and seen by the thread that asked for it, when its group is; Gluon's own wait is for the
    buffer alone. Then the group's threads meet, so that the one that counts passes on what the other has seen.
    """
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1
    )
    _group_barrier()
    number = gl.load(table + 4 * SEGMENTS + segment)
    done = gl.atomic_add(counters + number, 1, sem="acq_rel", scope="gpu")
    if done + 1 == HALVES * gl.load(table + 5 * SEGMENTS + segment):
        gl.atomic_xchg(counters + number, 0, sem="relaxed", scope="gpu")
        gl.atomic_xchg(flags + number, epoch, sem="release", scope="sys")


@gluon.jit
def _produce(
    a, b, a_ring, b_ring, full, empty, M, N, k_steps, group_m, tiles, table, flags, counters, epoch, status, bound,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    NUM_PROGRAMS: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr,
    A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr,
    SEGMENTS: gl.constexpr, ALONG_N: gl.constexpr, WAIT: gl.constexpr,
):  # fmt: skip
    """Fill the ring with the operands of every step of every tile of this program, in order."""
    ROWS: gl.constexpr = BLOCK_M // HALVES
    BYTES: gl.constexpr = HALVES * a.block_type.nbytes + b.block_type.nbytes
    index = 0
    phase = 1  # a fresh barrier counts as one whose earlier phase is over
    segment = 0
    waited = -1
    patience = bound
    for tile in range(gl.program_id(0), tiles, NUM_PROGRAMS):
        segment, m0, n0 = _place(tile, segment, table, M, N, group_m, BLOCK_M, BLOCK_N, SEGMENTS, ALONG_N, 1)
        if WAIT:
            waited, patience = _acquired(
                segment, waited, patience, table, flags, counters, epoch, status, bound, SEGMENTS
            )
        for step in range(k_steps):
            k = step * BLOCK_K
            mbarrier.wait(empty.index(index), phase)
            ready = full.index(index)
            mbarrier.expect(ready, BYTES)
            for half in gl.static_range(HALVES):
                row = m0 + half * ROWS
                block = a_ring.index(index * HALVES + half)
                if A_TRANSPOSED:
                    _bulk_load(a, [k, row], ready, block)
                else:
                    _bulk_load(a, [row, k], ready, block)
            if B_TRANSPOSED:
                _bulk_load(b, [n0, k], ready, b_ring.index(index))
            else:
                _bulk_load(b, [k, n0], ready, b_ring.index(index))
            index += 1
            if index == STAGES:
                index = 0
                phase ^= 1


@gluon.jit
def _store(
    values, c, bias, buffer, row, column, N,
    COLUMNS: gl.constexpr, HAS_BIAS: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    """Write a part of a tile; returns while the copy engine still reads the buffer."""
    if HAS_BIAS:
        layout: gl.constexpr = gl.SliceLayout(0, values.type.layout)
        columns = column + gl.arange(0, COLUMNS, layout=layout)
        values += gl.load(bias + columns, mask=columns < N, other=0.0).to(gl.float32).expand_dims(0)
    tma.store_wait(0)
    _group_barrier()  # of this group alone: who asked the copy engine knows that the buffer is free
    buffer.store(values.to(c.dtype))
    fence_async_shared()
    _group_barrier()
    if ACCUMULATE:
        _bulk_add(c, [row, column], buffer)
    else:
        _bulk_store(c, [row, column], buffer)


@gluon.jit
def _consume(
    a_ring, b_ring, c, bias, buffers, full, empty, order, M, N, k_steps, group_m, tiles, table, flags, counters, epoch,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, NUM_PROGRAMS: gl.constexpr,
    STAGES: gl.constexpr, HALVES: gl.constexpr, PARTS: gl.constexpr, HEAD: gl.constexpr,
    A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr,
    HAS_BIAS: gl.constexpr, ACCUMULATE: gl.constexpr,
    SEGMENTS: gl.constexpr, ALONG_N: gl.constexpr, WAIT: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    """Multiply what the ring brings, tile by tile, and store."""
    ROWS: gl.constexpr = BLOCK_M // HALVES
    STRIDE: gl.constexpr = 1 if HALVES == 2 else 2  # tiles from one of this group's to its next
    FIRST: gl.constexpr = 0 if HALVES == 2 else WHO
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    if HALVES == 2 and WHO == 1:
        mbarrier.wait(order.index(1), 0)
    turn = FIRST
    segment = 0
    for tile in range(gl.program_id(0) + FIRST * NUM_PROGRAMS, tiles, STRIDE * NUM_PROGRAMS):
        segment, row, column = _place(tile, segment, table, M, N, group_m, BLOCK_M, BLOCK_N, SEGMENTS, ALONG_N, 2)
        position = turn * k_steps
        index = position % STAGES
        phase = (position // STAGES) & 1
        if HALVES == 1:
            mbarrier.wait(order.index(WHO), (turn // 2 + 1 - WHO) & 1)
        acc = gl.zeros((ROWS, BLOCK_N), gl.float32, LAYOUT)
        for step in range(k_steps):
            mbarrier.wait(full.index(index), phase)
            x = a_ring.index(index * HALVES + (WHO if HALVES == 2 else 0))
            y = b_ring.index(index)
            if A_TRANSPOSED:
                x = x.permute((1, 0))
            if B_TRANSPOSED:
                y = y.permute((1, 0))
            acc = warpgroup_mma(x, y, acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=1, deps=[acc])
            # the product of the step before is done on all of the group's warps: its stage may be filled anew
            mbarrier.arrive(empty.index((index + STAGES - 1) % STAGES), count=1, pred=step > 0)
            if HALVES == 2 and WHO == 0:
                mbarrier.arrive(order.index(1), count=1, pred=(turn == 0) & (step == min(HEAD, k_steps) - 1))
            index += 1
            if index == STAGES:
                index = 0
                phase ^= 1
        if HALVES == 1:
            mbarrier.arrive(order.index(1 - WHO), count=1)
        values = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
        mbarrier.arrive(empty.index((index + STAGES - 1) % STAGES), count=1)
        if WAIT:
            number = gl.load(table + 4 * SEGMENTS + segment)
            if number >= 0:
                values += gl.where(gl.load(counters + number, volatile=True) != 0, float("nan"), 0.0)
        if HALVES == 2:
            row += WHO * ROWS
        buffer = buffers.index(WHO)
        if PARTS == 1:
            _store(values, c, bias, buffer, row, column, N, BLOCK_N, HAS_BIAS, ACCUMULATE)
        else:
            left, right = values.reshape((ROWS, 2, BLOCK_N // 2)).permute((0, 2, 1)).split()
            HALF: gl.constexpr = BLOCK_N // 2
            _store(left, c, bias, buffer, row, column, N, HALF, HAS_BIAS, ACCUMULATE)
            _store(right, c, bias, buffer, row, column + HALF, N, HALF, HAS_BIAS, ACCUMULATE)
        if SEGMENTS and not WAIT:
            _signalled(segment, table, flags, counters, epoch, HALVES, SEGMENTS)
        turn += STRIDE
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["group_m", "counted", "tiles", "bound"])
def hopper_matmul_kernel(
    a, b, c, bias, M, N, K, group_m,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    NUM_PROGRAMS: gl.constexpr, STAGES: gl.constexpr, PINGPONG: gl.constexpr, PARTS: gl.constexpr,
    A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr, HAS_BIAS: gl.constexpr, ACCUMULATE: gl.constexpr,
    table=None, flags=None, counters=None, epoch_word=None, counted=0, status=None, tiles=0, bound=0,
    SEGMENTS: gl.constexpr = 0, ALONG_N: gl.constexpr = False, WAIT: gl.constexpr = False,
):  # fmt: skip
    """Host descriptors; group_m: row tiles that are walked together, no constant of the code, which would be compiled
    for each. a: blocks (rows, BLOCK_K), or (BLOCK_K, rows) when stored [K, M], with the rows of one group;
    b: (BLOCK_K, BLOCK_N), or (BLOCK_N, BLOCK_K) when stored [N, K]; c: (rows of one group, BLOCK_N // PARTS).

    With SEGMENTS it computes segment by segment, and waits for, or sets, the flag of each chunk: table and all behind
    it are those of segment_matmul_kernel (fused/kernels.py). Tiles must not cross the ends of segments. With WAIT the
    warp that loads is the only one that waits, and a chunk that has not come marks its counter, by which the groups
    know, until the host has reported it. Without, each group counts what it has stored.
    """
    HALVES: gl.constexpr = 1 if PINGPONG else 2
    HEAD: gl.constexpr = STAGES // 2
    a_ring = gl.allocate_shared_memory(a.dtype, [STAGES * HALVES] + a.block_type.shape, a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)
    buffers = gl.allocate_shared_memory(c.dtype, [2] + c.block_type.shape, c.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    order = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=HALVES)
    for group in gl.static_range(2):
        mbarrier.init(order.index(group), count=1)
    fence_async_shared()
    k_steps = gl.cdiv(K, BLOCK_K)
    epoch = 0
    if SEGMENTS:
        epoch = gl.load(epoch_word) + counted
    else:
        tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    gl.warp_specialize(
        [
            (_consume, (
                a_ring, b_ring, c, bias, buffers, full, empty, order, M, N, k_steps, group_m, tiles, table,
                flags, counters, epoch, BLOCK_M, BLOCK_N, NUM_PROGRAMS, STAGES, HALVES, PARTS, HEAD, A_TRANSPOSED,
                B_TRANSPOSED, HAS_BIAS, ACCUMULATE, SEGMENTS, ALONG_N, WAIT, 0,
            )),
            (_consume, (
                a_ring, b_ring, c, bias, buffers, full, empty, order, M, N, k_steps, group_m, tiles, table,
                flags, counters, epoch, BLOCK_M, BLOCK_N, NUM_PROGRAMS, STAGES, HALVES, PARTS, HEAD, A_TRANSPOSED,
                B_TRANSPOSED, HAS_BIAS, ACCUMULATE, SEGMENTS, ALONG_N, WAIT, 1,
            )),
            (_produce, (
                a, b, a_ring, b_ring, full, empty, M, N, k_steps, group_m, tiles, table, flags, counters, epoch, status,
                bound, BLOCK_M, BLOCK_N, BLOCK_K, NUM_PROGRAMS, STAGES, HALVES, A_TRANSPOSED, B_TRANSPOSED,
                SEGMENTS, ALONG_N, WAIT,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


# What each thread of the three warp groups is launched with: 2 * 240 + 24, dealt out evenly.
REGISTERS = 168
_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


def block(rows: int, columns: int, transposed: bool) -> list[int]:
    """The block that a descriptor loads of an operand stored as it is, or transposed."""
    return [columns, rows] if transposed else [rows, columns]


def descriptor(matrix: torch.Tensor, shape: list[int]) -> TensorDescriptor:
    """Describe a row-major matrix, loaded or stored in blocks, as the tensor cores want them in shared memory."""
    return TensorDescriptor.from_tensor(matrix, shape, layout_of(shape, matrix.dtype))


def layout_of(shape: list[int], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How a block lies in shared memory: swizzled, as both the copy engine and the tensor cores understand."""
    return gl.NVMMASharedLayout.get_default_for(shape, _TYPES[dtype])
