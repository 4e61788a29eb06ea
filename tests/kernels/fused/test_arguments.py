"""What fused operations take and what they refuse: communicators, dtypes, views, empty results, bad arguments.

One rank, unless said: its sum is the product itself, so the oracle is the product in fp64.
"""

import weakref

import pytest
import torch

from axo_kernels.comm.host_stream import DONE
from tests.kernels.fused.test_strategies import STRATEGIES, close, draw, leaf


def check_half_precision():
    """Whole numbers, whose sums each dtype holds: forward and gradients equal to the last bit, in any strategy."""
    from axo_kernels import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
    from axo_kernels.comm.adapters import SoloCommunicator

    comm = SoloCommunicator(timeout=30.0)
    generator = torch.Generator().manual_seed(4)
    for dtype in (torch.bfloat16, torch.float16):
        for operation in (all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter):
            x, w, g = (
                torch.randint(-2, 3, shape, generator=generator).to(dtype) for shape in ((13, 9), (7, 9), (13, 7))
            )
            for strategy in STRATEGIES:
                a, b = leaf(x), leaf(w)
                out = operation(a, b, comm, "NT", strategy=strategy, chunks=3)
                assert out.dtype == dtype and comm.ran[-1].strategy == strategy
                out.backward(g)
                found, expected = (out, a.grad, b.grad), (x.double() @ w.double().T, g.double() @ w.double())
                for got, exact in zip(found, (*expected, g.double().T @ x.double()), strict=True):
                    assert got.dtype == dtype and torch.equal(got.double(), exact), (dtype, operation, strategy)


def test_half_precision_through_every_strategy(interpreter):
    check_half_precision()
    interpreter.run(check_half_precision)


def check_views_and_nothing():
    """Operands that are views of the other order, through descriptors too; results without an element, at once."""
    from axo_kernels import matmul_all_reduce, matmul_reduce_scatter
    from axo_kernels.comm.adapters import SoloCommunicator
    from axo_kernels.fused.strategies import FusedPlan, run_reduce_scatter
    from axo_kernels.gemm.tiles import Config

    comm = SoloCommunicator(timeout=10.0)
    x, w = draw(1, (16, 32), (16, 16))
    tiles = Config(32, 32, 16, group_m=2, warps=1, stages=1, descriptors=True, parts=2)
    for a, b in ((x.T, w), (x.T.contiguous(), w.T.contiguous().T)):
        close(run_reduce_scatter(a, b, comm, "NT", FusedPlan("signal", 2, tiles)), x.T.double() @ w.double().T)
    for rows, columns in ((0, 3), (4, 0)):
        for operation in (matmul_all_reduce, matmul_reduce_scatter):
            for _ in range(2):
                out = operation(torch.ones(rows, 8), torch.ones(columns, 8), comm, strategy="signal", chunks=2)
                assert out.shape == (rows, columns)


def test_signal_kernel_with_views_and_with_nothing_to_do(interpreter):
    interpreter.run(check_views_and_nothing)


def test_signal_leaves_room_for_the_communication(monkeypatch):
    """On a GPU as small as the communication itself the collective could never start: refused, and not a candidate."""
    from axo_kernels import FusedCommunicator
    from axo_kernels.fused import segments
    from axo_kernels.gemm.layout import Product
    from axo_kernels.gemm.tiles import Target
    from axo_kernels.tune import choice
    from bench.lib.simulated import SimulatedCommunicator

    cuda = torch.device("cuda", 0)
    comm = SimulatedCommunicator(2, 1e9, torch.device("cpu"))
    monkeypatch.setattr(segments.devices, "target_of", lambda device: Target("sm_90", 4, 232_448))
    with pytest.raises(ValueError, match="leaves 4 multiprocessors to the communication, and cuda:0 has 4; use strat"):
        segments.programs_left(comm, cuda)
    assert segments.programs_left(comm, torch.device("cpu")) == 4
    monkeypatch.setattr(segments.devices, "target_of", lambda device: Target("sm_90", 16, 232_448))
    assert segments.programs_left(comm, cuda) == 12
    monkeypatch.setattr(choice.devices, "runs_triton", lambda device: True)
    product = Product("NT", 4096, 4096, 64, torch.bfloat16)
    for units, there in ((4, False), (132, True)):
        monkeypatch.setattr(choice.devices, "target_of", lambda device, units=units: Target("sm_90", units, 232_448))

        def candidates(reserved, caps=(), held=0):
            facts = {"reserved_units": reserved, "caps": caps, "held_units": held}
            on = type("On", (FusedCommunicator,), facts)(0, 2)
            asked = ("matmul_all_reduce", product, cuda, "b", on)
            return choice.fused_choices(*asked, lambda product, device: choice.Choice("vendor", "NT"), {"windows": ""})

        found = candidates(4)
        assert any(candidate.strategy == "signal" for candidate in found) == there
        assert any(candidate.strategy == "push" for candidate in found), "which waits for no collective"
        # Where the collectives can be capped, the product leaves what they take: every cap that leaves it anything.
        found = candidates(32, (4, 8, 16))
        assert {each.channels for each in found if each.strategy == "signal"} == ({4, 8, 16} if there else set())
        assert all(choice.from_json(each.to_json()) == each for each in found)
        held = candidates(120, (4, 8, 16), 120)
        assert {each.channels for each in held if each.strategy == "signal"} == ({4, 8} if there else set())
    assert any(each.name.endswith(" signal/2 on 8 channels") for each in found)
    for wrong in (-1, True, 1.5, "4"):
        assert choice.from_json({**found[-1].to_json(), "channels": wrong}) is None


def test_a_gather_in_chunks_makes_no_second_copy_of_the_whole():
    """Beside what is kept lie the half of the chunks that travel, and the one that has come."""
    from axo_kernels.comm.communicator import FusedCommunicator
    from axo_kernels.fused.strategies import FusedPlan, run_all_gather

    class Twins(FusedCommunicator):
        """Rank 1 of two that hold the same."""

        def __init__(self):
            super().__init__(1, 2)
            self.travelling, self.most = [], 0

        def _all_gather(self, out, tensor):
            out.view(2, *tensor.shape).copy_(tensor.clone())
            self.travelling = [each for each in (*self.travelling, weakref.ref(out)) if each() is not None]
            self.most = max(self.most, sum(each().nbytes for each in self.travelling))
            return DONE

    x, shard = draw(3, (12, 16), (32, 16))
    for keep in (True, False):
        comm = Twins()
        out, whole = run_all_gather(x, shard, comm, "NT", "b", FusedPlan("split", 8), keep=keep)
        close(out, x.double() @ torch.cat([shard, shard]).double().T)
        assert whole is None or torch.equal(whole, torch.cat([shard, shard]))
        assert (whole is not None) == keep
        assert comm.most == 5 * 2 * shard.nbytes // 8 and not list(comm.workspaces.all())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_second_derivatives_are_refused_and_autocast_casts(strategy):
    from axo_kernels import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
    from axo_kernels.comm.adapters import SoloCommunicator

    comm = SoloCommunicator()
    x, w = draw(2, (6, 8), (4, 8))
    for operation in (all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter):
        a, b = leaf(x), leaf(w)
        out = operation(a, b, comm, strategy=strategy, chunks=2)
        with pytest.raises(RuntimeError, match=f"{operation.__name__}: backward.create_graph=True. is not supported"):
            torch.autograd.grad(out.sum(), a, create_graph=True)
        with torch.no_grad():
            assert not operation(a, b, comm, strategy=strategy, chunks=2).requires_grad
        with torch.autocast("cpu", torch.bfloat16):
            out = operation(a, b, comm, strategy=strategy, chunks=2)
        assert out.dtype == torch.bfloat16, "as torch's own product there, whatever the strategy"
        out.sum().backward()
        assert a.grad.dtype == b.grad.dtype == torch.float32


BAD = {
    "strategy='magic'; use one of serial, split, signal": {"strategy": "magic"},
    "chunks=0; use a whole number of at least 1": {"strategy": "split", "chunks": 0},
    "chunks=2.0; use a whole number of at least 1": {"strategy": "split", "chunks": 2.0},
    r"bias has shape \(4,\); use \(3,\), one value a column": {"bias": torch.ones(4)},
    "9 chunks do not fit 4 rows; use between 1 and 4": {"strategy": "split", "chunks": 9},
    "layout='XX' is not a layout": {"layout": "XX"},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments(message):
    from axo_kernels import matmul_all_reduce
    from axo_kernels.comm.adapters import SoloCommunicator

    with pytest.raises(ValueError, match=message):
        matmul_all_reduce(torch.ones(4, 8), torch.ones(3, 8), SoloCommunicator(), **BAD[message])


def test_bad_communicators_and_shapes():
    from axo_kernels import adapt, all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
    from axo_kernels.comm.adapters import SoloCommunicator

    with pytest.raises(ValueError, match=r"comm is a int; wrap it once with axo_kernels.adapt"):
        matmul_all_reduce(torch.ones(4, 8), torch.ones(3, 8), 3)
    with pytest.raises(ValueError, match=r"grad_comm is a int; wrap it once"):
        matmul_all_reduce(torch.ones(4, 8), torch.ones(3, 8), SoloCommunicator(), grad_comm=3)
    with pytest.raises(ValueError, match="all_gather_matmul: b has 3 dims; give one matrix, 2 dims"):
        all_gather_matmul(torch.ones(4, 8), torch.ones(2, 3, 8), SoloCommunicator())
    with pytest.raises(ValueError, match="adapt: int has no rank, size"):
        adapt(3)
    with pytest.raises(ValueError, match="use gather='a' with NN or NT, or gather='b' with NT"):
        all_gather_matmul(torch.ones(4, 8), torch.ones(8, 3), SoloCommunicator(), "NN", strategy="split")
    with pytest.raises(ValueError, match="a has 3 dims; TN takes 2"):
        matmul_reduce_scatter(torch.ones(4, 8, 2), torch.ones(8, 3), SoloCommunicator(), "TN")
    with pytest.raises(ValueError, match=r"all_gather_matmul: bias has shape \(5,\); use \(3,\)"):
        all_gather_matmul(torch.ones(4, 8), torch.ones(3, 8), SoloCommunicator(), bias=torch.ones(5))
    with pytest.raises(ValueError, match="adapt: timeout=0 is no bound for a wait; use seconds of more than 0"):
        adapt(None, 0)
    for operation in (all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter):  # leading dims without a column
        assert not operation(torch.ones(2, 3, 0), torch.ones(4, 0), SoloCommunicator(), strategy="split").any()
    # one piece is not cut: the default of 4 chunks fits one row
    assert matmul_reduce_scatter(torch.ones(1, 8), torch.ones(3, 8), SoloCommunicator()).shape == (1, 3)
    assert all_gather_matmul(torch.ones(4, 8), torch.ones(1, 8), SoloCommunicator()).shape == (4, 1)


def test_what_fails_after_the_fork_ends_it():
    """Else every later operation would go to a stream that nobody joins."""
    from axo_kernels.fused.strategies import FusedPlan, run_all_gather
    from bench.lib.simulated import SimulatedCommunicator

    comm = SimulatedCommunicator(2, 1e15, torch.device("cpu"))
    comm.write_flag = lambda workspace, number: 1 // 0
    operands = torch.ones(8, 4), torch.ones(6, 4), comm, "NT", "a", FusedPlan("signal", 2)
    with pytest.raises(ZeroDivisionError):
        run_all_gather(*operands)
    del comm.write_flag
    run_all_gather(*operands)
    assert not comm._forked


def test_ranks_ask_each_other_equally_often_whatever_one_of_them_lacks(monkeypatch):
    """Each rank alone, of which some step fails, and beside one that has all: the maxima that they take part in."""
    from axo_kernels import FusedCommunicator
    from axo_kernels.comm import communicator as module

    cuda, raised = torch.device("cuda", 0), []

    class Rank(FusedCommunicator):
        def __init__(self, of_others):
            super().__init__(0, 2)
            self.asked, self.of_others, self.store = 0, of_others, lambda: 1 // 0

        def maximum(self, values):
            self.asked += 1
            return [max(value, self.of_others) for value in values]

        def broadcast_text(self, text):
            return text

    def no_host():
        raise OSError("no /proc")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(raised))
    for runs, others, told in ((True, 1.0, "not that of another rank"), (False, 0.0, "not cuda:0")):
        monkeypatch.setattr(module.devices, "runs_triton", lambda device, runs=runs: runs)
        comm = Rank(others)
        assert comm.unreachable(cuda).endswith(told) and comm.unreachable(cuda) and comm.asked == 1
    monkeypatch.setattr(module, "host_number", no_host)
    comm = Rank(-1e300)
    comm.on_one_host()
    assert comm.asked == 1
    with pytest.raises(ValueError, match="division"):  # and not ZeroDivisionError, of which the others know nothing
        comm.peer_memory(256, cuda)
    assert comm.asked == 2
    raised.append(True)
    comm = Rank(0.0)
    with pytest.raises(RuntimeError, match="run it once before the capture"):
        comm.unreachable(cuda)
    assert comm._unreachable is None and not comm.asked
