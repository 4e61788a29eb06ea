"""The signalling protocol between two processes, with the real kernels in Triton's interpreter.

One process computes, the other stands for the communication stream; they share memory and nothing else. In each round
the communication side delivers the chunks of an all-gather in a random order, some late, and sets their flags; the
compute side's kernel waits for them, multiplies, and a second kernel produces chunks for a reduce-scatter and signals
them; the communication side waits for those in another random order. Two slots are reused by turns, behind an
acknowledgement that is itself an epoch. Values are whole numbers, so equality is exact; every slot is filled with NaN
before it is reused.
"""

import multiprocessing
import os
import random
import time

import pytest
import torch

ROWS, DEPTH, COLUMNS, CHUNKS = 12, 16, 16, 3
FIRST_EPOCH = 2**31 - 10  # wraps to negative numbers after 10 rounds


class Shared:
    """What both processes see."""

    def __init__(self, first_epoch):
        from axo_kernels.fused.chunks import chunk_order
        from axo_kernels.fused.workspace import Workspace

        cpu = torch.device("cpu")
        self.gather = Workspace("all_gather_matmul", chunk_order("all_gather", ROWS, CHUNKS, 0, 2), cpu, first_epoch)
        self.scatter = Workspace(
            "matmul_reduce_scatter", chunk_order("reduce_scatter", 2 * ROWS, CHUNKS, 0, 2), cpu, first_epoch
        )
        self.packed = torch.full((2, 2 * ROWS, DEPTH), float("nan")).share_memory_()
        self.produced = torch.full((2, 2 * ROWS, COLUMNS), float("nan")).share_memory_()
        # acknowledgements: what has been read of each direction
        self.read = torch.full((2,), first_epoch, dtype=torch.int32).share_memory_()
        for workspace in (self.gather, self.scatter):
            workspace.flags.share_memory_()

    def data(self, epoch, index):
        generator = torch.Generator().manual_seed((epoch * 4 + index) % 2**31)
        return torch.randint(-4, 5, [(2 * ROWS, DEPTH), (COLUMNS, DEPTH)][index % 2], generator=generator).float()


def reference_of(shared, epoch):
    """The gathered operand in rank order, and the other operand."""
    return shared.data(epoch, 0), shared.data(epoch, 1)


def word(workspace):
    """The epoch of a workspace in device memory, as a kernel of another process reads it."""
    return torch.tensor([workspace.epoch.read()], dtype=torch.int32)


def await_flag(flag, epoch, number):
    """Wait with the kernel, bounded: about 20 s in the interpreter."""
    from axo_kernels.fused.kernels import wait_flag_kernel

    status = torch.zeros(4, dtype=torch.int32)
    wait_flag_kernel[(1,)](flag, epoch, 0, status, 400_000, number)
    assert status[0] == 0, f"flag {number} of epoch {int(epoch)} not set: {status.tolist()}"


def set_flag(flag, epoch):
    from axo_kernels.fused.kernels import write_flag_kernel

    write_flag_kernel[(1,)](flag, epoch, 0)


def communicate(shared, rounds, seed, skip=None):
    """The communication side."""
    rng = random.Random(seed)
    epoch = word(shared.gather)
    two_before = epoch - 2
    turn = 0
    for round_number in range(rounds):
        epoch += 1
        two_before += 1
        turn ^= 1
        order = shared.gather.order
        if round_number >= 2:
            await_flag(shared.read[0:], two_before, 100)  # the slot's last reader is done
        slot = shared.packed[turn]
        slot.fill_(float("nan"))
        full, _ = reference_of(shared, int(epoch))
        by_rank = full.view(2, ROWS, DEPTH)
        for start, stop in order.bounds:  # the rank's own rows are there before the round begins
            slot[2 * start : start + stop] = by_rank[0, start:stop]
        set_flag(shared.read[1:], epoch)  # also: the round may begin
        for chunk in rng.sample(range(CHUNKS), CHUNKS):
            if rng.random() < 0.1:
                time.sleep(rng.random() * 0.01)
            start, stop = order.bounds[chunk]
            slot[start + stop : 2 * stop] = by_rank[1, start:stop]
            if (round_number, chunk) != skip:
                set_flag(shared.gather.flags[chunk:], epoch)
        a, b = full, reference_of(shared, int(epoch))[1]
        expected = a @ b.T
        for chunk in rng.sample(range(CHUNKS), CHUNKS):
            await_flag(shared.scatter.flags[chunk:], epoch, chunk)
            first, last = shared.scatter.order.packed(chunk)
            start, stop = shared.scatter.order.bounds[chunk]
            got = shared.produced[turn, first:last].view(2, stop - start, COLUMNS)
            assert torch.equal(got, expected.view(2, ROWS, COLUMNS)[:, start:stop]), (int(epoch), chunk)
        shared.produced[turn].fill_(float("nan"))


def compute(shared, rounds, seed, skip=None):
    """The compute side. Its bound is short where the flag of ``skip`` is all that does not come."""
    from axo_kernels.comm.adapters import SoloCommunicator
    from axo_kernels.fused.segments import SegmentedProduct
    from axo_kernels.gemm.layout import Product
    from axo_kernels.gemm.tiles import Config

    comm = SoloCommunicator(timeout=30.0)
    config = Config(16, 16, 16, group_m=2, warps=1, stages=1)
    rng = random.Random(seed)
    product = Product("NT", COLUMNS, 2 * ROWS, DEPTH, torch.float32)
    mirrored = Product("NT", 2 * ROWS, COLUMNS, DEPTH, torch.float32)
    for round_number in range(rounds):
        for workspace in (shared.gather, shared.scatter):
            workspace.epoch.captured |= round_number == rounds // 2  # from then on the device counts
            workspace.advance()
        epoch, turn = shared.gather.epoch.read(), shared.gather.turn
        await_flag(shared.read[1:], word(shared.gather), 101)
        full, other = reference_of(shared, epoch)
        if rng.random() < 0.1:
            time.sleep(rng.random() * 0.01)
        if skip and round_number == skip[0]:
            comm = SoloCommunicator(timeout=0.02)
            for chunk in {*range(CHUNKS)} - {skip[1]}:
                await_flag(shared.gather.flags[chunk:], word(shared.gather), chunk)
        out = torch.full((COLUMNS, 2 * ROWS), float("nan"))
        SegmentedProduct(product, shared.gather, comm, None, config).launch(
            other, shared.packed[turn], out, along_n=True
        )
        shared.gather.check(0, comm.timeout)
        assert torch.equal(out, other @ full.T), epoch
        set_flag(shared.read[0:], word(shared.gather))
        SegmentedProduct(mirrored, shared.scatter, comm, None, config).launch(full, other, shared.produced[turn])
        assert not shared.scatter.counters.any(), "counters go back to zero"


def run_both(rounds, seed, skip=None):
    """Fork the communication side, compute here; returns the compute side's error, if any."""
    shared = Shared(FIRST_EPOCH)
    child = multiprocessing.get_context("fork").Process(target=communicate, args=(shared, rounds, seed, skip))
    child.start()
    try:
        compute(shared, rounds, seed + 1, skip)
        child.join(60)
        assert child.exitcode == 0, child.exitcode
    finally:
        child.kill()
        child.join()
    assert shared.gather.epoch.read() == (FIRST_EPOCH + rounds + 2**31) % 2**32 - 2**31
    return shared.gather.epoch.read()


def test_rounds_with_permuted_arrival_and_wrapping_epochs(interpreter):
    assert interpreter.run(run_both, 14, 1) < 0, "the epoch wrapped around"


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_five_hundred_rounds(interpreter):
    started = time.monotonic()
    assert interpreter.run(run_both, 500, 2, timeout=900.0) < 0
    print(f"500 rounds in {time.monotonic() - started:.1f} s")


def check_missing_signal():
    from axo_kernels import SignalTimeout

    with pytest.raises(SignalTimeout) as caught:
        run_both(8, 5, skip=(4, 1))
    return str(caught.value)


def test_a_peer_that_never_signals_is_reported(interpreter):
    message = interpreter.run(check_missing_signal)
    epoch = FIRST_EPOCH + 5
    assert message == (
        f"all_gather_matmul: rank 0 of 2 waited 0.02 s for chunk 1 (rows of rank 1) of epoch {epoch}; its flag stands "
        f"at {epoch - 1}: a peer has not signalled"
    )


def check_poisoned_rows():
    """What the missing chunk would have filled is NaN; all else is right."""
    from axo_kernels import SignalTimeout
    from axo_kernels.comm.adapters import SoloCommunicator
    from axo_kernels.fused.segments import SegmentedProduct
    from axo_kernels.gemm.layout import Product
    from axo_kernels.gemm.tiles import Config

    shared = Shared(0)
    full, other = reference_of(shared, 1)
    by_rank = full.view(2, ROWS, DEPTH)
    for start, stop in shared.gather.order.bounds:
        shared.packed[0, 2 * start : 2 * stop] = by_rank[:, start:stop].reshape(-1, DEPTH)
    shared.gather.advance()
    shared.gather.flags[:] = torch.tensor([1, 0, 1], dtype=torch.int32)
    out = torch.zeros(COLUMNS, 2 * ROWS)
    comm = SoloCommunicator(timeout=0.01)
    product = Product("NT", COLUMNS, 2 * ROWS, DEPTH, torch.float32)
    config = Config(16, 16, 16, group_m=2, warps=1, stages=1)
    SegmentedProduct(product, shared.gather, comm, None, config).launch(other, shared.packed[0], out, along_n=True)
    missing = torch.zeros(2 * ROWS, dtype=torch.bool)
    start, stop = shared.gather.order.bounds[1]
    missing[ROWS + start : ROWS + stop] = True
    assert out[:, missing].isnan().all() and torch.equal(out[:, ~missing], (other @ full.T)[:, ~missing])
    with pytest.raises(SignalTimeout, match="chunk 1"):
        shared.gather.check(0, comm.timeout)
    shared.gather.check(0, comm.timeout)  # reported once


def test_rows_of_a_missing_chunk_are_nan(interpreter):
    interpreter.run(check_poisoned_rows)


def check_the_next_operation_tells():
    """As on a GPU, where the host has gone on: a kernel gives up between two operations, of whatever strategy."""
    from axo_kernels import SignalTimeout, all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
    from axo_kernels.comm.adapters import SoloCommunicator
    from axo_kernels.fused.kernels import wait_flag_kernel

    comm = SoloCommunicator(timeout=5.0)
    x, w = torch.ones(6, 8), torch.ones(4, 8)
    epoch = 0
    for operation in (all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter):
        for strategy in ("serial", "split", "signal"):
            all_gather_matmul(x, w, comm, strategy="signal", chunks=2)
            comm.poll()
            epoch += 1 + (operation is all_gather_matmul and strategy == "signal")
            [workspace] = [each for each in comm.workspaces.all() if each.name.startswith("all_gather")]
            wait_flag_kernel[(1,)](workspace.flags[1:], word(workspace), 1, workspace.status, 3, 1)
            told = rf"all_gather_matmul b: rank 0 of 1 waited 5 s for chunk 1 of epoch {workspace.epoch.read() + 1}; "
            with pytest.raises(SignalTimeout, match=told):
                operation(x, w, comm, strategy=strategy, chunks=2)
            assert torch.equal(operation(x, w, comm, strategy=strategy, chunks=2), x @ w.T), "told once"
    assert workspace.epoch.read() == epoch


def test_the_next_operation_tells_what_a_kernel_has_reported(interpreter):
    interpreter.run(check_the_next_operation_tells)


def check_the_bound_holds_once():
    """Silent chunks of many tiles: each program waits once a chunk, spends its bound once, and then only looks."""
    from axo_kernels.comm.adapters import SoloCommunicator
    from axo_kernels.fused import kernels as signal_kernels
    from axo_kernels.fused.segments import SegmentedProduct
    from axo_kernels.gemm.layout import Product
    from axo_kernels.gemm.tiles import CPU_TARGET, Config

    shared, bounds, real = Shared(0), [], signal_kernels.wait_until
    shared.gather.advance()

    def counted(flag, epoch, bound):
        bounds.append(int(bound.handle.data[0]) if hasattr(bound, "handle") else int(bound))
        return real(flag, epoch, bound)

    signal_kernels.wait_until = counted
    try:
        tall, comm = torch.ones(16 * 24, DEPTH), SoloCommunicator(timeout=0.002)
        product = Product("NT", 16 * 24, 2 * ROWS, DEPTH, torch.float32)
        config = Config(16, 16, 16, group_m=2, warps=1, stages=1)
        SegmentedProduct(product, shared.gather, comm, None, config).launch(
            tall, shared.data(1, 0), torch.zeros(16 * 24, 2 * ROWS), along_n=True
        )
    finally:
        signal_kernels.wait_until = real
    programs = CPU_TARGET.units
    assert programs < 24, "every program has tiles of every chunk"
    assert len(bounds) == programs * CHUNKS and sorted(bounds)[-programs:] == [comm.spins] * programs
    assert not any(sorted(bounds)[:-programs])


def test_the_bound_holds_once_a_program(interpreter):
    interpreter.run(check_the_bound_holds_once)


def check_all_flags_set():
    """The same kernel with every flag set beforehand gives the same bits as with flags that arrive."""
    from axo_kernels.comm.adapters import SoloCommunicator
    from axo_kernels.fused.segments import SegmentedProduct
    from axo_kernels.gemm.layout import Product
    from axo_kernels.gemm.tiles import Config

    shared = Shared(6)
    shared.gather.advance()
    shared.gather.flags.fill_(7)
    generator = torch.Generator().manual_seed(0)
    packed, other = torch.randn(2 * ROWS, DEPTH, generator=generator), torch.randn(COLUMNS, DEPTH, generator=generator)
    product = Product("NT", COLUMNS, 2 * ROWS, DEPTH, torch.float32)
    config = Config(16, 16, 16, group_m=2, warps=1, stages=1)
    outs = [torch.empty(COLUMNS, 2 * ROWS) for _ in range(2)]
    comm = SoloCommunicator(timeout=30.0)
    segmented = SegmentedProduct(product, shared.gather, comm, None, config)
    segmented.launch(other, packed, outs[0], along_n=True)
    shared.gather.flags.share_memory_().fill_(6)
    child = multiprocessing.get_context("fork").Process(target=_set_late, args=(shared.gather,))
    child.start()
    segmented.launch(other, packed, outs[1], along_n=True)
    child.join()
    assert torch.equal(*outs)


def _set_late(workspace):
    for chunk in (2, 0, 1):
        time.sleep(0.05)
        set_flag(workspace.flags[chunk:], word(workspace))
    os._exit(0)


def test_waiting_changes_no_bit(interpreter):
    interpreter.run(check_all_flags_set)
