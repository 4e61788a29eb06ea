"""The words by which a kernel and a stream of another device, or of the same, meet while the kernel runs.

A flag is a 32-bit word that holds an epoch; it only grows, and is compared cyclically (``int32(flag - epoch) >= 0``, as
the stream-wait operation of the GPU driver does). Its release and acquire are at system scope, because the other side
may be a copy engine, a NIC or another GPU. Every wait is bounded: after ``bound`` reads it gives up, writes
``(1, flag number, epoch, value seen)`` into ``status`` and the tile is filled with NaN, so nothing wrong passes unseen.

``atomic_add(flag, 0)`` is the read: a plain load in a loop is deleted by the compiler, a volatile one hangs on AMD, and
atomic_cas loses its system scope there.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_until(flag, epoch, bound):
    """Spin until the flag has reached the epoch or the bound is used up; return the last value seen."""
    spins = 0
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    while (seen - epoch < 0) & (spins < bound):
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        spins += 1
    return seen


@triton.jit
def report(status, number, epoch, seen):
    """Leave a note for the host; the first word last, so that the others are there when it is read."""
    tl.store(status + 1, number)
    tl.store(status + 2, epoch)
    tl.store(status + 3, seen)
    tl.debug_barrier()
    tl.atomic_xchg(status, 1, sem="release", scope="sys")


@triton.jit
def proxy_fence(FENCE: tl.constexpr):
    """Order what was acquired by ordinary reads before bulk copies (TMA), which are another path to memory."""
    if FENCE:
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.u32 $0, 0;", "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.debug_barrier()
