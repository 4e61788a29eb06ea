"""Sums by push: the protocol in a model, and the kernels in Triton's interpreter, against fp64.

Ranks are played in one process, launch by launch: each has memory that all know by its address. Then by processes that
were forked, whose kernels run at once. Each room is NaN before its first use; inputs are scaled by the rank.
"""

import itertools
import multiprocessing

import pytest
import torch

from ..gemm.ring_model import visit
from .push_model import Machine, Push
from .test_strategies import close, draw


@pytest.mark.parametrize(
    "push",
    [
        Push(2, sums=False),
        Push(2, sums=True),
        Push(3, sums=False, programs=1),
        Push(3, sums=True, epochs=2, programs=1),
    ],
    ids=str,
)
def test_no_order_of_events_is_wrong(push):
    states, wrong = visit(Machine(push))
    assert not wrong and states > 1000, wrong


STALE, STUCK = "a read finds what is not the part, or of another epoch", "nobody can go on"
BROKEN = {
    "no release": STALE,
    "flag before store": STALE,
    "wrong owner": STALE,
    "wrong flag": STUCK,
    "stale epoch": STUCK,
    "part not waited for": STALE,
    "every tile sets the flag": STALE,
    "count kept": STUCK,
}
ALONE = {  # of a reduce-scatter, and of an all-reduce
    False: {"one slot": STALE, "waits for the very epoch": STUCK},
    True: {"sum to the wrong rank": STALE, "sum without release": STALE, "sum not waited for": STALE},
}


@pytest.mark.parametrize(
    "sums, broken, told", [(sums, *each) for sums in ALONE for each in (BROKEN | ALONE[sums]).items()]
)
def test_what_is_broken_is_found(sums, broken, told):
    assert visit(Machine(Push(2, sums, broken=broken)))[1] == told


class Played:
    """Ranks of one process, or forked from it: the memory of all lies at addresses that all know."""

    def __init__(self, size, shared=False):
        from axo_kernels.comm.communicator import FusedCommunicator, PeerMemory

        rooms = []  # of each allocation: a tensor of each rank

        class Rank(FusedCommunicator):
            allocations = 0

            def unreachable(self, device):
                return ""

            def peer_memory(self, nbytes, device):
                self.allocations += 1
                if len(rooms) < self.allocations:
                    every = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(size)]
                    for each in every:
                        each[_FLAGS:].fill_(255)  # NaN in any dtype
                    rooms.append([each.share_memory_() if shared else each for each in every])
                mine = rooms[self.allocations - 1]
                return PeerMemory(mine[self.rank][:nbytes], tuple(each.data_ptr() for each in mine))

        self.ranks = [Rank(rank, size, 30.0) for rank in range(size)]


_FLAGS = 256


def operands(rows, size, layout, dtype=torch.float32):
    """Of each rank, a and b; and the product that all of them sum to, in fp64. Whole numbers."""
    x, w = (each.mul(4).round().to(dtype) for each in draw(rows, (rows, 24 * size), (20, 24 * size)))
    parts = []
    for rank in range(size):
        mine = slice(rank * 24, rank * 24 + 24)
        a = x[:, mine] if layout != "TN" else x[:, mine].T.contiguous()
        parts.append((a, w[:, mine] if layout == "NT" else w[:, mine].T.contiguous()))
    return parts, x.double() @ w.double().T


def check_played_ranks():
    """Sizes that do not divide, ranks without rows, all layouts, and the same workspaces again and again."""
    from axo_kernels.fused.push import push
    from axo_kernels.gemm.layout import product_of

    for size, rows, dtype in (
        (2, 32, torch.float32),
        (3, 29, torch.float32),
        (4, 1, torch.float32),
        (4, 8, torch.bfloat16),
    ):
        played = Played(size)
        for operation, layout in itertools.product(("matmul_all_reduce", "matmul_reduce_scatter") * 3, ("NT", "TN")):
            if operation == "matmul_reduce_scatter" and rows % size:
                continue
            parts, expected = operands(rows, size, layout, dtype)
            bias = torch.arange(20).to(dtype) if operation == "matmul_all_reduce" else None
            kept = rows if bias is not None else rows // size
            outs = [torch.full((kept, 20), float("nan"), dtype=dtype) for _ in range(size)]
            steps = [
                push(operation, product_of(a, b, layout), a, b, out, comm, bias=None if comm.rank else bias)
                for (a, b), out, comm in zip(parts, outs, played.ranks, strict=True)
            ]
            assert len(list(itertools.zip_longest(*steps))) == (2 if bias is not None else 1)
            for rank, out in enumerate(outs):
                exact = expected + bias.double() if bias is not None else expected[rank * kept : (rank + 1) * kept]
                gap = (out.double() - exact).norm() / exact.norm()
                # in bf16 each part is rounded once, and the sum once
                assert gap < (1e-6 if dtype == torch.float32 else 1e-2), (size, rows, operation, layout, gap)
            for comm in played.ranks:
                comm.poll()
                for workspace in comm.workspaces.all():
                    assert not workspace.counters.any()


def test_played_ranks_agree_with_fp64(interpreter):
    interpreter.run(check_played_ranks)


def check_alone():
    """One rank, forward and gradients; a mean; what is empty."""
    from axo_kernels import matmul_all_reduce, matmul_reduce_scatter
    from axo_kernels.comm.adapters import SoloCommunicator

    from .test_strategies import check_all_reduce, check_reduce_scatter

    comm = SoloCommunicator(timeout=30.0)
    check_all_reduce(comm, "push", 3)
    assert comm.ran[-1].engine == "interpreter"
    check_reduce_scatter(comm, "push", 1)
    for operation in (matmul_all_reduce, matmul_reduce_scatter):
        assert operation(torch.ones(0, 8), torch.ones(3, 8), comm, strategy="push").shape == (0, 3)
    comm.scale = 0.5
    x, w = draw(1, (6, 8), (4, 8))
    close(matmul_reduce_scatter(x, w, comm, strategy="push"), 0.5 * (x.double() @ w.double().T))
    close(matmul_all_reduce(x, w, comm, strategy="push"), x.double() @ w.double().T)


def test_one_rank_and_gradients(interpreter):
    interpreter.run(check_alone)


def one_of_two(played, rank, rounds):
    """Rounds back to back, with nothing between them but what the kernels wait for."""
    from axo_kernels.fused.strategies import FusedPlan, run_reduce_scatter, start_all_reduce

    comm = played.ranks[rank]
    for number in range(rounds):
        parts, expected = operands(8, 2, "NT")
        a, b = (each * (number + 1) for each in parts[rank])
        out = run_reduce_scatter(a, b, comm, "NT", FusedPlan("push"))
        close(out, (number + 1) ** 2 * expected[rank * 4 : rank * 4 + 4])
        out, finish = start_all_reduce(a, b, comm, "NT", FusedPlan("push"))
        finish()
        close(out, (number + 1) ** 2 * expected)
    comm.poll()


def check_processes(rounds):
    """Two processes, whose kernels run at once."""
    played = Played(2, shared=True)
    for _ in range(2):  # both allocations, before the fork: as large as any operation's
        for comm in played.ranks:
            comm.peer_memory(1 << 16, torch.device("cpu"))
    for comm in played.ranks:
        comm.allocations, comm.timeout = 0, 60.0
    child = multiprocessing.get_context("fork").Process(target=one_of_two, args=(played, 1, rounds))
    child.start()
    try:
        one_of_two(played, 0, rounds)
        child.join(60)
        assert child.exitcode == 0, child.exitcode
    finally:
        child.kill()
        child.join()


def test_processes_push_into_each_other(interpreter):
    interpreter.run(check_processes, 6)


def check_silent_peer():
    from axo_kernels import SignalTimeout
    from axo_kernels.fused.strategies import FusedPlan, run_reduce_scatter

    comm = Played(2).ranks[0]
    comm.timeout = 0.01
    parts, _ = operands(8, 2, "NT")
    out = run_reduce_scatter(*parts[0], comm, "NT", FusedPlan("push"))
    assert out.isnan().all()
    with pytest.raises(SignalTimeout) as caught:
        comm.poll()
    return str(caught.value)


def test_a_peer_that_does_not_push_is_reported(interpreter):
    assert interpreter.run(check_silent_peer) == (
        "matmul_reduce_scatter: rank 0 of 2 waited 0.01 s for the part of rank 1 of epoch 1; its flag stands at 0: a "
        "peer has not signalled"
    )


def check_refusals():
    from axo_kernels import all_gather_matmul, matmul_all_reduce
    from axo_kernels.comm.adapters import SoloCommunicator
    from bench.lib.simulated import SimulatedCommunicator

    x, w = torch.ones(4, 8), torch.ones(3, 8)
    link = SimulatedCommunicator(2, 1e15, torch.device("cpu"))
    with pytest.raises(ValueError, match="all_gather_matmul: strategy='push' is for sums; use 'split'"):
        all_gather_matmul(x, w, SoloCommunicator(), strategy="push")
    with pytest.raises(ValueError, match="memory that kernels of all ranks reach: SimulatedCommunicator has none; "):
        matmul_all_reduce(x, w, link, strategy="push")


def test_what_push_cannot_do_is_refused(interpreter):
    from axo_kernels import matmul_all_reduce
    from axo_kernels.comm.adapters import SoloCommunicator

    interpreter.run(check_refusals)
    with pytest.raises(
        ValueError, match="strategy='push' needs kernels of Triton's, and a device that runs them, not c"
    ):
        matmul_all_reduce(torch.ones(4, 8), torch.ones(3, 8), SoloCommunicator(), strategy="push")
