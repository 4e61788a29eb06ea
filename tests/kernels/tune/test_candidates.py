"""How candidates of fused operations are tried: no rank waits for one that has failed, and nothing is left of it."""

import threading

import pytest
import torch

import axo_kernels.fused.strategies as strategies_module
from axo_kernels import FusedCommunicator, Tuner
from axo_kernels.comm.adapters import SoloCommunicator
from axo_kernels.comm.host_stream import DONE
from axo_kernels.fused.chunks import chunk_order
from axo_kernels.gemm.layout import Product
from axo_kernels.tune import tuner as tuner_module
from axo_kernels.tune.cache import Cache
from axo_kernels.tune.choice import FUSED
from axo_kernels.tune.timing import Timing
from bench.lib.simulated import SimulatedCommunicator

CPU = torch.device("cpu")


class Threads(FusedCommunicator):
    """One of two ranks that are threads; ``late`` is told of who has waited for the other until the limit."""

    def __init__(self, rank, meeting, late):
        super().__init__(rank, 2, timeout=30.0)
        self._meeting, self._given, self._late = *meeting, late

    def _exchanged(self, tensor):
        self._given[self.rank] = tensor.clone()
        try:
            self._meeting.wait(20)
            both = [each.clone() for each in self._given]
            self._meeting.wait(20)
        except threading.BrokenBarrierError:
            self._late.append(self.rank)
            raise
        return both

    def _all_reduce(self, tensor):
        tensor.copy_(sum(self._exchanged(tensor)))
        return DONE

    def _all_gather(self, out, tensor):
        out.copy_(torch.cat(self._exchanged(tensor)))
        return DONE

    def _broadcast(self, tensor):
        tensor.copy_(self._exchanged(tensor)[0])


def test_nobody_waits_for_a_rank_in_which_a_candidate_fails(tmp_path, monkeypatch):
    """Where a product of a chunk fails on one rank before its collective, the other knows before it begins its own."""
    late, choices, left, real = [], {}, {}, strategies_module.vendor_matmul

    def multiply(a, b, layout, out=None, bias=None):
        if threading.current_thread().name == "1" and a.shape[-2] == 16:  # of the four chunks of 64 rows
            raise RuntimeError("out of memory")
        return real(a, b, layout, out, bias)

    monkeypatch.setattr(strategies_module, "vendor_matmul", multiply)
    meetings = [(threading.Barrier(2), [None, None]) for _ in range(2)]
    product = Product("NT", 64, 32, 16, torch.float32)

    def rank(number):
        judge, on = (Threads(number, meeting, late) for meeting in meetings)
        tuner = Tuner("first-step", comm=judge, cache=Cache("a device", {}, tmp_path / str(number)), rounds=5)
        choices[number] = tuner.choose_fused("matmul_all_reduce", product, CPU, on=on)
        left[number] = {each.choice: each.why for each in tuner.left_out}

    threads = [threading.Thread(target=rank, args=(number,), name=str(number)) for number in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert not late and choices[0] == choices[1]
    assert left[0]["NT vendor split/4"] == "it failed, or was wrong, on another rank"
    assert left[1]["NT vendor split/4"] == "RuntimeError: out of memory"


def test_what_the_tuner_has_tried_is_given_back(tmp_path):
    """Its flags and buffers; of what stood before, nothing."""
    comm, product = SimulatedCommunicator(4, 1e15, CPU), Product("NT", 64, 32, 64, torch.float32)
    before = comm.workspaces.get("a sum", chunk_order("all_reduce", 64, 8, 0, 4), "", CPU)
    tuner = Tuner("first-step", cache=Cache("a device", {}, tmp_path), comm=FusedCommunicator(0, 1))
    assert tuner.choose_fused("matmul_reduce_scatter", product, CPU, on=comm)
    assert [*comm.workspaces.all()] == [before]


def test_a_room_that_grew_in_a_trial_is_as_large_as_before():
    comm = SoloCommunicator()
    with comm.trial(CPU):
        comm.peer_room(1000, CPU)
    assert not comm.rooms
    comm.peer_room(1000, CPU)
    (first,) = comm.rooms
    with comm.trial(CPU):
        assert comm.peer_room(900, CPU) is first
    assert comm.rooms == [first]
    with comm.trial(CPU):
        assert comm.peer_room(5000, CPU).capacity > 5000
    assert comm.rooms != [first] and comm.rooms[0].capacity == first.capacity


@pytest.mark.parametrize("operation", FUSED)
def test_no_fused_way_is_chosen_that_is_slower_than_the_serial_one(tmp_path, monkeypatch, operation):
    """The product, then the collective, is the first candidate of each operation. Times as an H100 took for a
    reduce-scatter of 2048 x 16384 x 4096: in four chunks 1.23 of it, in eight 2.2."""
    timed = []

    def clock(calls, device, rounds=0, warmup=0, budget=0):
        timed[:] = [call.args[-2] for call in calls]
        times = [{4: 1.23, 8: 2.2}.get(each.chunks, 1.0 if each.strategy == "serial" else 1.05) for each in timed]
        return [Timing(each, each, each) for each in times]

    monkeypatch.setattr(tuner_module, "paired", clock)
    tuner = Tuner("first-step", cache=Cache("a device", {}, tmp_path), comm=FusedCommunicator(0, 1))
    on = SimulatedCommunicator(4, 1e15, CPU)
    choice = tuner.choose_fused(operation, Product("NT", 256, 64, 64, torch.float32), CPU, on=on)
    assert choice.strategy == timed[0].strategy == "serial" and timed[0].is_torchs("NT")
    assert {each.strategy for each in timed} == {"serial", "split"}
