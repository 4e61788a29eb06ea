"""Sums by push: the protocol in a model, and the kernels in Triton's interpreter, against fp64.

Ranks are played in one process, launch by launch: each has memory that all know by its address. Then by processes that
were forked, whose kernels run at once. Each room is NaN before its first use; inputs are scaled by the rank.
"""

import itertools
import multiprocessing
import time

import pytest
import torch

from axo_kernels import SignalTimeout

from ..gemm.ring_model import visit
from .push_model import Machine, Push
from .test_strategies import close, draw


@pytest.mark.parametrize(
    "push",
    [
        Push(2, "rrr"),
        Push(2, "aaa", programs=1),
        Push(2, "aRaR", programs=1),
        Push(2, "RaaR", programs=1),
        Push(2, "raRa", programs=1),
        Push(3, "rrr", programs=1),
        Push(3, "aR", programs=1),
    ],
    ids=str,
)
def test_no_order_of_events_is_wrong(push):
    states, wrong = visit(Machine(push))
    assert not wrong and states > 500, (states, wrong)


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
    "one half": STALE,
}
ALONE = {  # of reduce-scatters, and where there are all-reduces
    "rrr": {"waits for the very epoch": STUCK, "two under way": STALE},
    "aRa": {"sum to the wrong rank": STALE, "sum without release": STALE, "sum not waited for": STALE},
}


@pytest.mark.parametrize(
    "operations, broken, told", [(each, *one) for each in ALONE for one in (BROKEN | ALONE[each]).items()]
)
def test_what_is_broken_is_found(operations, broken, told):
    assert visit(Machine(Push(2, operations, broken=broken)))[1] == told


class Played:
    """Ranks of one process, or forked from it: the memory of all lies at addresses that all know."""

    def __init__(self, size, shared=False):
        from axo_kernels.comm.communicator import FusedCommunicator
        from axo_kernels.comm.peers import PeerMemory

        rooms = []  # of each allocation: a tensor of each rank

        class Rank(FusedCommunicator):
            allocations = 0

            def unreachable(self, device):
                return ""

            def maximum(self, values):
                return values  # all ranks ask for the same

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
        (17, 1, torch.float32),  # a table of segments is wider than the ranks that have rows
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
                assert not comm.rooms[-1].counters.any() and len(comm.rooms) == 1


def test_played_ranks_agree_with_fp64(interpreter):
    interpreter.run(check_played_ranks)


@pytest.mark.parametrize("size", [2, 16, 17, 24])
@pytest.mark.parametrize("rows", [1, 20, 480])
def test_tables_of_segments_and_of_owners_are_of_one_width(size, rows):
    """The kernel finds the addresses of every owner by the width of the table of segments."""
    from axo_kernels.fused.chunks import push_order
    from axo_kernels.fused.push import PushWorkspace, part_bytes
    from axo_kernels.fused.workspace import PeerRoom, table_width
    from axo_kernels.gemm.layout import Product

    product, device = Product("NT", rows, 4, 8, torch.float32), torch.device("cpu")
    comm, order = Played(size).ranks[size - 1], push_order(rows, size - 1, size)
    room = comm.peer_room(2 * size * part_bytes(product, size), device)
    assert isinstance(room, PeerRoom)
    workspace = PushWorkspace("a sum", order, product, comm.rank, room, device)
    width = table_width(order)
    assert workspace.owners.shape == (2, 2, width) and size <= width == 1 << (width - 1).bit_length()


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
    """Rounds back to back, with nothing between them but what the kernels wait for: of several shapes in one room."""
    from axo_kernels.fused.strategies import FusedPlan, run_reduce_scatter, start_all_reduce

    comm, way = played.ranks[rank], FusedPlan("push")
    for number in range(rounds):
        rows = 8 + 4 * (number % 2)
        parts, expected = operands(rows, 2, "NT")
        a, b = (each * (number + 1) for each in parts[rank])
        expected *= (number + 1) ** 2
        out = run_reduce_scatter(a, b, comm, "NT", way)
        close(out, expected[rank * rows // 2 : (rank + 1) * rows // 2])
        (first, end_first), (second, end_second) = (start_all_reduce(a * c, b, comm, "NT", way) for c in (1, 2))
        end_second()
        end_first()
        close(first, expected)
        close(second, 2 * expected)
    comm.poll()
    assert len(comm.rooms) == 1 and comm.rooms[0].epoch.read() == 3 * rounds + FIRST - 2**32


FIRST = 2**31 - 5  # the epochs come to the end of 32 bits on the way


def check_processes(rounds):
    """Two processes, whose kernels run at once."""
    played = Played(2, shared=True)
    for comm in played.ranks:  # before the fork, and as large as any operation's
        room = comm.peer_room(1 << 16, torch.device("cpu"))
        room.epoch.counted, comm.timeout = FIRST, 60.0
        room.flags.fill_(FIRST)
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


def check_tried_alone():
    """A rank's part of what others take part in, with nobody there: each strategy ends, and at once."""
    from axo_kernels.tune.choice import Choice
    from axo_kernels.tune.runners import run_alone

    a, b = operands(12, 3, "NT")[0][1]
    like = Played(3).ranks[1]
    for operation, strategy in itertools.product(
        ("matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul_kept"), ("serial", "split", "signal", "push")
    ):
        if "gather" in operation and strategy == "push":
            continue
        chunks = 2 if strategy in ("split", "signal") else 1
        started = time.monotonic()
        run_alone(operation, "b", like, "NT", Choice("triton", "NT", None, strategy, chunks), [a, b])
        assert time.monotonic() - started < 0.5 * like.timeout, (operation, strategy)
    assert not like.rooms and not [*like.workspaces.all()]


def test_a_rank_tries_its_part_alone(interpreter):
    interpreter.run(check_tried_alone)


def check_room():
    """One room for all shapes, which grows by half at least, and is kept if a graph has captured its addresses."""
    from axo_kernels.comm.adapters import SoloCommunicator
    from axo_kernels.fused.strategies import FusedPlan, run_reduce_scatter

    comm = SoloCommunicator(timeout=30.0)

    def scatter(rows):
        x, w = draw(rows, (rows, 8), (20, 8))
        close(run_reduce_scatter(x, w, comm, "NT", FusedPlan("push")), x.double() @ w.double().T)
        return [room.capacity for room in comm.rooms]

    assert scatter(32) == [2560] and scatter(3) == [2560] and scatter(33) == [3840]
    assert comm.rooms[0].epoch.read() == 1, "the new room's own"
    comm.rooms[0].epoch.captured = True
    assert scatter(49) == [5888] and [room.capacity for room in comm.captured_rooms] == [3840]
    comm.captured_rooms[0].workspaces.all().__next__().status.copy_(torch.tensor([1, 0, 3, 2]))
    with pytest.raises(SignalTimeout, match="waited 30 s for the part of rank 0 of epoch 3"):
        comm.poll()


def test_room_grows(interpreter):
    interpreter.run(check_room)


def check_large_strides():
    """Parts that lie more than 2**31 elements from the first: their addresses are counted in 64 bits."""
    from axo_kernels.fused.kernels import sum_kernel

    apart = 2**30 + 16
    parts = torch.empty(3 * apart, dtype=torch.uint8)  # never touched but where the parts are
    parts = parts.view(torch.int8)
    for number in range(3):
        parts[number * apart : number * apart + 8] = number + 1
    words, out = torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int8)
    sum_kernel[(1, 1)](
        parts, out, words, words[3:], words[4:], 0, words[4:], 8, 8, apart, 0, 0, 5, 1.0, PARTS=3, COPIES=0, BLOCK=8
    )
    assert out.tolist() == [6] * 8


def test_parts_far_apart(interpreter):
    interpreter.run(check_large_strides)


def check_silent_peer():
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
