"""The collectives that bench/collectives.py times: for each its buffers, the call of each rival, and the check.

Buffers are made once: a call allocates nothing. Inputs are small whole numbers, whose results are exact in every
dtype that can be reduced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

BUS_FACTOR = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "sendrecv": lambda n: 1.0,
    "barrier": lambda n: 0.0,
}


class Buffers:
    """``whole`` of the size of the case, ``part`` of one rank's share, ``other`` as large as whole for a result."""

    def __init__(self, count: int, dtype: torch.dtype, comm: Any, *, shared: bool) -> None:
        import axo

        def make(elements: int) -> torch.Tensor:
            if not shared:
                return torch.zeros(elements, dtype=dtype)
            return axo.empty_shared((elements,), dtype=dtype).zero_()

        self.whole, self.part, self.other = make(count), make(count // comm.size), make(count)
        self.rank, self.size = comm.rank, comm.size


def axo_call(comm: Any, op: str, b: Buffers) -> Callable[[], Any]:
    return {
        "all_reduce": lambda: comm.all_reduce(b.whole),
        "all_gather": lambda: comm.all_gather(b.part, b.whole),
        "reduce_scatter": lambda: comm.reduce_scatter(b.whole, b.part),
        "all_to_all": lambda: comm.all_to_all(b.whole, b.other),
        "broadcast": lambda: comm.broadcast(b.whole),
        "reduce": lambda: comm.reduce(b.whole, 0),
        "gather": lambda: comm.gather(b.part, 0, b.whole if b.rank == 0 else None),
        "scatter": lambda: comm.scatter(b.whole if b.rank == 0 else None, 0, b.part),
        "sendrecv": lambda: _send_or_receive(b, comm.send, comm.recv),
        "barrier": comm.barrier,
    }[op]


def c10d_call(group: Any, op: str, b: Buffers) -> Callable[[], Any]:
    parts = list(b.whole.chunk(b.size)) if b.rank == 0 else None
    return {
        "all_reduce": lambda: dist.all_reduce(b.whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(b.whole, b.part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(b.part, b.whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(b.other, b.whole, group=group),
        "broadcast": lambda: dist.broadcast(b.whole, 0, group=group),
        "reduce": lambda: dist.reduce(b.whole, 0, group=group),
        "gather": lambda: dist.gather(b.part, parts, 0, group=group),
        "scatter": lambda: dist.scatter(b.part, parts, 0, group=group),
        "sendrecv": lambda: _send_or_receive(
            b, lambda t, peer: dist.send(t, peer, group), lambda t, peer: dist.recv(t, peer, group)
        ),
        "barrier": lambda: dist.barrier(group=group),
    }[op]


def _send_or_receive(b: Buffers, send: Callable[..., Any], receive: Callable[..., Any]) -> None:
    """Even ranks send to the next rank; with an odd number of ranks the last one rests."""
    if b.rank % 2:
        receive(b.whole, b.rank - 1)
    elif b.rank + 1 < b.size:
        send(b.whole, b.rank + 1)


def refused(call: Callable[[], Any]) -> bool:
    """Whether the rival does not take this dtype: Gloo says so on every rank, before it sends anything."""
    try:
        call()
    except (RuntimeError, ValueError, TypeError):
        return True
    return False


def count_wrong(call: Callable[[], Any], comm: Any, op: str, b: Buffers) -> int:
    """Elements that differ from what whole numbers must give, over all ranks. Leaves the buffers zero."""
    count, ranks, rank = b.whole.numel(), comm.size, comm.rank
    each = count // ranks
    base = torch.arange(5, dtype=torch.int16).repeat(count // 5 + 1)[:count]  # small: the check must not take longest
    mine = slice(rank * each, (rank + 1) * each)
    b.part.copy_(base[mine] + rank)
    if op in ("all_gather", "gather"):
        b.whole.zero_()
    else:
        b.whole.copy_(base + rank)
    call()
    total = ranks * base + ranks * (ranks - 1) // 2
    owner = torch.arange(ranks, dtype=torch.int16).repeat_interleave(each)
    at_root = rank == 0
    got, expected = {
        "all_reduce": (b.whole, total),
        "all_gather": (b.whole, base + owner),
        "reduce_scatter": (b.part, total[mine]),
        "all_to_all": (b.other, base[mine].repeat(ranks) + owner),
        "broadcast": (b.whole, base),
        "reduce": (b.whole, total) if at_root else (base, base),
        "gather": (b.whole, base + owner) if at_root else (base, base),
        "scatter": (b.part, base[mine]),
        "sendrecv": (b.whole, base + (rank - 1 if rank % 2 else rank)),
        "barrier": (base, base),
    }[op]
    wrong = (got != expected.to(got.dtype)).sum().reshape(1)
    for tensor in (b.whole, b.part, b.other):
        tensor.zero_()
    return int(comm.all_reduce(wrong))
