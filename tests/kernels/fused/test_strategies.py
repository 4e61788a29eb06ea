"""Fused operations on ranks: every strategy and chunk count, forward and gradients, against serial fp64 products.

Each rank's inputs are its part of tensors that all ranks draw with one seed; upstream gradients are scaled by
``rank + 1`` where they may differ between ranks, so that a chunk from the wrong rank shows.
"""

import os

import pytest
import torch

from tests.launcher import rank_outcomes, run_ranks

STRATEGIES = ("serial", "split", "signal")
CHUNKS = (1, 2, 4, 7)
OPERATIONS = ("matmul_all_reduce", "gather_weights", "gather_activations", "matmul_reduce_scatter")


def close(got, expected):
    """fp32 sums of at most a few hundred products in another order: 1e-6 of the norm is ten times what they reach."""
    assert got.shape == expected.shape, (got.shape, expected.shape)
    gap = (got.double() - expected).norm() / expected.norm()
    assert gap < 1e-6, gap


def communicator(kind, timeout=30.0):
    import torch.distributed as dist

    from axo_kernels import adapt

    if kind == "axo":
        import axo

        size = int(os.environ["WORLD_SIZE"])
        comms = axo.connect(f"{size}x1x1x1")
        comm = adapt(comms.world, timeout)
        comm.kept = comms  # its communicators close when it goes
        return comm
    dist.init_process_group("gloo")
    return adapt(dist.group.WORLD, timeout)


def draw(seed, *shapes):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def leaf(tensor):
    return tensor.clone().requires_grad_()


def check_all_reduce(comm, strategy, chunks):
    from axo_kernels import matmul_all_reduce
    from axo_kernels.comm.adapters import SoloCommunicator

    rank, size = comm.rank, comm.size
    x, w, bias, g = draw(chunks, (29, 24 * size), (14 * size, 24 * size), (14 * size,), (29, 14 * size))
    mine = slice(rank * 24, rank * 24 + 24)
    a, b, c = leaf(x[:, mine]), leaf(w[:, mine]), leaf(bias)
    out = matmul_all_reduce(a, b, comm, "NT", c, strategy=strategy, chunks=chunks)
    record = comm.ran[-1]
    assert (record.operation, record.strategy) == ("matmul_all_reduce", strategy)
    assert record.chunks == chunks
    close(out.detach(), x.double() @ w.double().T + bias.double())
    out.backward(g)
    close(a.grad, g.double() @ w[:, mine].double())
    close(b.grad, g.double().T @ x[:, mine].double())
    close(c.grad, g.double().sum(0))
    # Algorithm 1's backward: the input is shared by the ranks, its gradient summed over them while dW is computed.
    rows = slice(rank * 14, rank * 14 + 14)
    a, b = leaf(x.view(29, 1, -1)), leaf(w[rows])
    out = matmul_all_reduce(a, b, SoloCommunicator(), grad_comm=comm, strategy=strategy, chunks=chunks)
    assert out.shape == (29, 1, 14)
    out.backward(g[:, rows].unsqueeze(1))
    if size > 1:
        assert comm.ran[-1].strategy == strategy and comm.ran[-1].layout == "NN"
    close(a.grad, (g.double() @ w.double()).unsqueeze(1))
    close(b.grad, g[:, rows].double().T @ x.double())


def check_gather_weights(comm, strategy, chunks):
    from axo_kernels import all_gather_matmul

    rank, size = comm.rank, comm.size
    x, w, bias, g = draw(chunks, (4, 5, 24), (15 * size, 24), (15 * size,), (4, 5, 15 * size))
    mine = slice(rank * 15, rank * 15 + 15)
    total = size * (size + 1) / 2
    for keep in (True, False):
        a, b, c = leaf(x), leaf(w[mine]), leaf(bias)
        out = all_gather_matmul(a, b, comm, "NT", c, keep=keep, strategy=strategy, chunks=chunks)
        assert comm.ran[-1].operation == "all_gather_matmul" and comm.ran[-1].strategy == strategy
        close(out.detach(), x.double() @ w.double().T + bias.double())
        out.backward(g * (rank + 1))
        assert comm.ran[-1].operation == "matmul_reduce_scatter" and comm.ran[-1].strategy == strategy
        close(a.grad, (rank + 1) * (g.double() @ w.double()))
        close(b.grad, total * (g.double().flatten(0, 1).T @ x.double().flatten(0, 1))[mine])
        close(c.grad, (rank + 1) * g.double().sum((0, 1)))


def check_gather_activations(comm, strategy, chunks):
    from axo_kernels import all_gather_matmul

    rank, size = comm.rank, comm.size
    x, w, g = draw(chunks, (9 * size, 24), (20, 24), (9 * size, 20))
    mine = slice(rank * 9, rank * 9 + 9)
    total = size * (size + 1) / 2
    for layout in ("NT", "NN"):
        a, b = leaf(x[mine]), leaf(w if layout == "NT" else w.T.contiguous())
        out = all_gather_matmul(a, b, comm, layout, gather="a", strategy=strategy, chunks=chunks)
        assert comm.ran[-1].strategy == strategy
        close(out.detach(), x.double() @ w.double().T)
        out.backward(g * (rank + 1))
        close(a.grad, total * (g.double() @ w.double())[mine])
        expected = (rank + 1) * (g.double().T @ x.double())
        close(b.grad, expected if layout == "NT" else expected.T)


def check_reduce_scatter(comm, strategy, chunks):
    for columns in (20, 200) if strategy == "split" else (20,):  # 200 of them are cut from 4 chunks on
        check_columns(comm, strategy, chunks, columns)


def check_columns(comm, strategy, chunks, n):
    from axo_kernels import matmul_reduce_scatter

    rank, size = comm.rank, comm.size
    x, w, g = draw(chunks, (11 * size, 24 * size), (n, 24 * size), (11 * size, n))
    mine, rows = slice(rank * 24, rank * 24 + 24), slice(rank * 11, rank * 11 + 11)
    for layout in ("NN", "NT", "TN"):
        a = leaf(x[:, mine] if layout != "TN" else x[:, mine].T.contiguous())
        b = leaf(w[:, mine] if layout == "NT" else w[:, mine].T.contiguous())
        out = matmul_reduce_scatter(a, b, comm, layout, strategy=strategy, chunks=chunks)
        assert comm.ran[-1].strategy == strategy and comm.ran[-1].chunks == chunks
        close(out.detach(), (x.double() @ w.double().T)[rows])
        out.backward(g[rows])
        grad_a, grad_b = g.double() @ w[:, mine].double(), g.double().T @ x[:, mine].double()
        close(a.grad, grad_a.T if layout == "TN" else grad_a)
        close(b.grad, grad_b if layout == "NT" else grad_b.T)


CHECKS = dict(
    zip(
        OPERATIONS,
        (check_all_reduce, check_gather_weights, check_gather_activations, check_reduce_scatter),
        strict=True,
    )
)


def check_operations(kind):
    """Every operation, strategy and chunk count on the same ranks."""
    comm = communicator(kind)
    for operation, check in CHECKS.items():
        comm.ran.clear()
        for strategy in STRATEGIES:
            for chunks in CHUNKS:
                check(comm, strategy, chunks)
        # each forward and its fused backward was recorded
        assert len(comm.ran) >= len(STRATEGIES) * len(CHUNKS) * 2, operation


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["gloo", "axo"])
def test_strategies_equal_serial(kind, size):
    run_ranks(check_operations, size, kind, timeout=180)


def check_signal_twice_over():
    """Many rounds back to back on the same workspaces, rows drawn anew: flags of one round never serve the next."""
    from axo_kernels import all_gather_matmul, matmul_reduce_scatter

    comm = communicator("gloo")
    generator = torch.Generator().manual_seed(3)
    for round_number in range(30):
        rows = int(torch.randint(4, 7, (1,), generator=generator))
        x = torch.randn(6, 8, generator=generator)
        w = torch.randn(rows * comm.size, 8, generator=generator)
        mine = w[comm.rank * rows : (comm.rank + 1) * rows] * 1.0
        out = all_gather_matmul(x, mine, comm, strategy="signal", chunks=3)
        close(out, x.double() @ w.double().T)
        out = matmul_reduce_scatter(w * 0.01 * (comm.rank + 1), x, comm, strategy="signal", chunks=4)
        total = 0.01 * comm.size * (comm.size + 1) / 2
        close(out, (total * w.double() @ x.double().T)[comm.rank * rows : (comm.rank + 1) * rows])
        assert round_number or comm.ran[-1].strategy == "signal"


def test_rounds_back_to_back():
    run_ranks(check_signal_twice_over, 2)


def check_silent_peer():
    """Rank 1 never takes part; rank 0 must say so after the bound."""
    import time

    from axo_kernels import SignalTimeout, all_gather_matmul

    comm = communicator("gloo", timeout=1.0)
    store = torch.distributed.distributed_c10d._get_default_store()
    x, w = torch.ones(4, 8), torch.ones(6, 8)
    all_gather_matmul(x, w, comm, strategy="signal", chunks=2)
    if comm.rank == 0:
        started = time.monotonic()
        with pytest.raises(SignalTimeout) as caught:
            all_gather_matmul(x, w, comm, strategy="signal", chunks=2)
        assert time.monotonic() - started < 20
        message = str(caught.value)
        assert "rank 0 of 2 waited 1 s for chunk 0 (rows of rank 1) of epoch 2; its flag stands at 1" in message
        store.set("reported", "")
        return "reported"
    store.wait(["reported"])
    return "silent"


def test_a_silent_peer_is_reported_with_rank_chunk_and_epoch():
    outcomes = rank_outcomes(check_silent_peer, 2)
    assert [outcome.value for outcome in outcomes] == ["reported", "silent"], [o.describe() for o in outcomes]


def check_strategy_in_interpreter(operation, strategy, chunks):
    """One rank, the real kernel: flags set by and waited for on the communication thread."""
    from axo_kernels.comm.adapters import SoloCommunicator

    comm = SoloCommunicator(timeout=30.0)
    CHECKS[operation](comm, strategy, chunks)
    assert comm.ran[-1].engine == "interpreter"


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("chunks", [1, 3])
def test_signal_kernel_alone(interpreter, operation, chunks):
    interpreter.run(check_strategy_in_interpreter, operation, "signal", chunks)


def _rank_in_interpreter(rank, size, store, operation):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    from axo_kernels import adapt

    comm = adapt(dist.group.WORLD, 60.0)
    CHECKS[operation](comm, "signal", 2)
    assert {record.engine for record in comm.ran} == {"interpreter"}
    dist.destroy_process_group()


def check_ranks_in_interpreter(operation, store):
    import multiprocessing

    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank_in_interpreter, args=(rank, 2, store, operation)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0, 0]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_signal_kernel_on_two_ranks(interpreter, operation, tmp_path):
    interpreter.run(check_ranks_in_interpreter, operation, str(tmp_path / "store"))
