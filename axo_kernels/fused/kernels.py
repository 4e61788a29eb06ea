"""Triton kernels that let a product and a communication stream meet at flags, inside one kernel's run time.

What a flag is stands in gemm/flags.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from axo_kernels.gemm.flags import proxy_fence, report, wait_until
from axo_kernels.gemm.kernels import descriptor_product, first_tile, grouped_tile, store_tile, tile_product


@triton.jit(do_not_specialize=["counted", "bound", "number"])
def wait_flag_kernel(flag, epoch_word, counted, status, bound, number):
    """One program on the communication stream: the portable form of the driver's stream wait."""
    epoch = tl.load(epoch_word) + counted
    seen = wait_until(flag, epoch, bound)
    if seen - epoch < 0:
        report(status, number, epoch, seen)


@triton.jit(do_not_specialize=["counted"])
def write_flag_kernel(flag, epoch_word, counted):
    """One program on the communication stream: everything before it in the stream is visible to who sees the flag."""
    epoch = tl.load(epoch_word) + counted
    tl.debug_barrier()
    tl.atomic_xchg(flag, epoch, sem="release", scope="sys")


@triton.jit(do_not_specialize=["counted"])
def keep_rows_kernel(
    packed, kept, table, flag, epoch_word, counted, columns, SEGMENTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """On the communication stream, behind the last chunk: set its flag as above, then copy the rows of each segment (of
    ``columns`` elements) from where they came to where they stand in rank order, which nothing but the end waits for.

    table: as below; programs of axis 1 have a segment each.
    """
    segment = tl.program_id(1)
    if (tl.program_id(0) == 0) & (segment == 0):
        epoch = tl.load(epoch_word) + counted
        tl.debug_barrier()
        tl.atomic_xchg(flag, epoch, sem="release", scope="sys")
    row = tl.zeros((), tl.int64) + columns
    source = packed + tl.load(table + SEGMENTS + segment) * row
    target = kept + tl.load(table + 2 * SEGMENTS + segment) * row
    count = tl.load(table + 3 * SEGMENTS + segment) * row
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        offsets = (tl.zeros((), tl.int64) + block) * BLOCK + tl.arange(0, BLOCK)
        tl.store(target + offsets, tl.load(source + offsets, mask=offsets < count), mask=offsets < count)


@triton.jit(do_not_specialize=["counted", "tiles", "bound"])
def segment_matmul_kernel(
    a, b, c, bias, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    table, flags, counters, epoch_word, counted, status, tiles, bound,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    XCDS: tl.constexpr, NUM_PROGRAMS: tl.constexpr, SEGMENTS: tl.constexpr, ALONG_N: tl.constexpr, WAIT: tl.constexpr,
    SIGNAL: tl.constexpr, PUSH: tl.constexpr, DESCRIPTORS: tl.constexpr, A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr, FENCE: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """A product computed segment by segment (chunks.py), waiting for, or setting, the flag of each chunk.

    table, int32 ``[6, SEGMENTS]``: first tile (padded with the largest integer), source row, target row, rows, flag
    (-1: none), tiles of that flag. Segments run along N (a gathered weight) when ALONG_N, else along M. A program waits
    once for each chunk, before its first tile there. The last tile of a chunk resets the chunk's counter and publishes
    the epoch. ALIGNMENT divides where every segment is read and written, and how many rows it has.

    With PUSH c gives a type and strides alone, and flags is a table of addresses, int64 ``[2, 2, SEGMENTS]``: by the
    epoch's parity, then by a segment's number, the room for it in its owner's memory, and its flag there.

    The two loops stay nested: flattened, the spin loop and the barriers make the compiler give up pipelining (seen in
    the PTX of Triton 3.6: 2 bulk loads instead of 6). Stores go through plain pointers: a bulk copy's completion, as
    compiled, covers reading the shared memory only, not the visibility of what was written, so a flag could overtake
    it.
    """
    epoch = tl.load(epoch_word) + counted
    if PUSH:
        flags += (epoch & 1) * 2 * SEGMENTS
    starts = tl.load(table + tl.arange(0, SEGMENTS))
    patience = bound
    waited = tl.full((), -1, tl.int32)
    poison = tl.zeros((), tl.float32)
    for tile in tl.range(first_tile(XCDS), tiles, NUM_PROGRAMS):
        segment = tl.sum((tile >= starts).to(tl.int32), axis=0) - 1
        entry = table + segment
        source = tl.load(entry + SEGMENTS)
        target = tl.load(entry + 2 * SEGMENTS)
        rows = tl.load(entry + 3 * SEGMENTS)
        # loaded numbers have no known divisor, and without one the columns of the result are stored, and those of an
        # operand stored [K, M] loaded, one by one
        source = tl.multiple_of(source, ALIGNMENT)
        target = tl.multiple_of(target, ALIGNMENT)
        rows = tl.multiple_of(rows, ALIGNMENT)
        number = tl.load(entry + 4 * SEGMENTS)
        within = tile - tl.load(entry)
        tiles_m = tl.cdiv(M if ALONG_N else rows, BLOCK_M)
        tiles_n = tl.cdiv(rows if ALONG_N else N, BLOCK_N)
        tile_m, tile_n = grouped_tile(within, tiles_m, tiles_n, GROUP_M)
        m0 = tile_m * BLOCK_M
        n0 = tile_n * BLOCK_N
        if WAIT:
            # once a chunk: what this program has acquired holds for all of its tiles there
            if number != waited:
                waited = number
                poison = 0.0
                if number >= 0:
                    seen = wait_until(flags + number, epoch, patience)
                    proxy_fence(FENCE)
                    if seen - epoch < 0:
                        report(status, number, epoch, seen)
                        poison = float("nan")
                        patience = 0  # the bound holds for the kernel, not for each of its chunks
        a_row = m0 if ALONG_N else m0 + source
        b_column = n0 + source if ALONG_N else n0
        c_row = m0 if ALONG_N else m0 + target
        c_column = n0 + target if ALONG_N else n0
        m_limit = (M if ALONG_N else rows) - m0
        n_limit = (rows if ALONG_N else N) - n0
        if DESCRIPTORS:
            acc = descriptor_product(
                a,
                b,
                a_row,
                b_column,
                0,
                K,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                A_TRANSPOSED,
                B_TRANSPOSED,
                PRECISION,
                INTERPRETED,
            )
        else:
            acc = tile_product(
                a + a_row.to(tl.int64) * stride_am, b + b_column.to(tl.int64) * stride_bn, m_limit, n_limit, K,
                stride_am, stride_ak, stride_bk, stride_bn, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, PRECISION, INTERPRETED,
            )  # fmt: skip
        if WAIT:
            acc += poison
        into = c
        if PUSH:
            into = tl.multiple_of(tl.load(flags + number).to(tl.pointer_type(c.dtype.element_ty)), 16)
        store_tile(
            acc, into + c_row.to(tl.int64) * stride_cm + c_column.to(tl.int64) * stride_cn, bias + c_column, c,
            m_limit, n_limit, stride_cm, stride_cn, 0, BLOCK_M, BLOCK_N, HAS_BIAS, "", False,
        )  # fmt: skip
        if SIGNAL:
            # Every warp's stores come before the counter, and through it before the flag of the last tile. Only this
            # GPU's programs use the counter, so its order is needed on this GPU alone. What the last tile has acquired
            # there, its release of the flag passes on to the system, as release and acquire are cumulative: one fence
            # for the system a chunk, not one a tile.
            tl.debug_barrier()
            done = tl.atomic_add(counters + number, 1, sem="acq_rel", scope="gpu")
            if done + 1 == tl.load(entry + 5 * SEGMENTS):
                tl.atomic_xchg(counters + number, 0, sem="relaxed", scope="gpu")
                tl.debug_barrier()
                flag = flags + number
                if PUSH:
                    flag = tl.load(flags + SEGMENTS + number).to(tl.pointer_type(tl.int32))
                tl.atomic_xchg(flag, epoch, sem="release", scope="sys")


@triton.jit(do_not_specialize=["counted", "first_flag", "bound", "scale"])
def sum_kernel(
    parts, out, flags, counters, epoch_word, counted, status, elements, block_elements, part_stride, half_stride,
    first_flag, bound, scale,
    PARTS: tl.constexpr, COPIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add what ranks have pushed into this one's memory: ``scale * sum over parts``, in their order, in fp32.

    Programs of axis 1 have a block of ``block_elements`` each, but for what is beyond ``elements``. A block's PARTS lie
    ``part_stride`` elements apart, as do the first parts of blocks, and those of odd epochs ``half_stride`` behind
    those of even ones; part p of block g has come when flag ``first_flag + g + p`` is set. Without COPIES the sum goes
    to its block of out. With them (and one block) out is a table of addresses, int64 ``[2, 2, COPIES]``: by the epoch's
    parity the room for each rank's copy, and its flag, which the last program sets.
    """
    epoch = tl.load(epoch_word) + counted
    group = tl.program_id(1)
    first = first_flag + group
    poison = tl.zeros((), tl.float32)
    patience = bound
    for number in range(first, first + PARTS):
        seen = wait_until(flags + number, epoch, patience)
        if seen - epoch < 0:
            report(status, number, epoch, seen)
            poison = float("nan")
            patience = 0
    start = group.to(tl.int64) * block_elements
    limit = min(block_elements, elements - start)
    apart = tl.zeros((), tl.int64) + part_stride
    parts += group * apart + (epoch & 1).to(tl.int64) * half_stride
    if COPIES:
        out += (epoch & 1) * 2 * COPIES
    for block in range(tl.program_id(0), tl.cdiv(limit, BLOCK), tl.num_programs(0)):
        offsets = (tl.zeros((), tl.int64) + block) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < limit
        total = tl.zeros((BLOCK,), tl.float32) + poison
        for part in tl.static_range(PARTS):
            total += tl.load(parts + part * apart + offsets, mask=mask, other=0.0).to(tl.float32)
        total *= scale
        if COPIES:
            for copy in range(COPIES):
                into = tl.multiple_of(tl.load(out + copy).to(tl.pointer_type(parts.dtype.element_ty)), 16)
                tl.store(into + offsets, total.to(parts.dtype.element_ty), mask=mask)
        else:
            tl.store(out + start + offsets, total.to(out.dtype.element_ty), mask=mask)
    if COPIES:
        # as behind a tile above: all programs' stores, through the counter, come before the flags
        tl.debug_barrier()
        done = tl.atomic_add(counters, 1, sem="acq_rel", scope="gpu")
        if done + 1 == tl.num_programs(0):
            tl.atomic_xchg(counters, 0, sem="relaxed", scope="gpu")
            tl.debug_barrier()
            for copy in range(COPIES):
                flag = tl.load(out + COPIES + copy).to(tl.pointer_type(tl.int32))
                tl.atomic_xchg(flag, epoch, sem="release", scope="sys")
