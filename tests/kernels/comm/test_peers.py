"""How ranks meet to share memory: torch's process group and store, without GPUs."""

import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from axo_kernels import FusedCommunicator
from axo_kernels.comm.peers import Peers, _Numbered, host_number


def test_exchanges_of_a_line_are_numbered_from_zero():
    """Called as torch calls them, from C++ and by each rank's own count of all that it has exchanged before."""
    store, values = dist.HashStore(), []
    line = Peers("a line", store, 1, 2)
    group = torch._C._distributed_c10d._resolve_process_group("axo a line")
    assert (group.rank(), group.size()) == (1, 2)

    def exchange(rank, before):
        numbered = line._store if rank else _Numbered(dist.PrefixStore("axo a line", store))
        own = dist.PrefixStore("memory", numbered)
        for number in range(3):
            own.set(f"{before + number}/{rank}", f"{number} of {rank}")
            values.append(own.get(f"{before + number}/{1 - rank}").decode())
        if hasattr(own, "barrier"):  # torch's own of 2.15 is one of the store
            own.barrier(str(before + 3), 2)

    other = threading.Thread(target=exchange, args=(1, 7))
    other.start()
    exchange(0, 4)
    other.join(20)
    assert not other.is_alive()
    assert sorted(values) == [f"{number} of {rank}" for number in range(3) for rank in range(2)]


def test_after_a_map_that_failed_on_one_rank_all_begin_anew(monkeypatch):
    """The other one had exchanged already: under the same name their numbers would stand apart from then on."""
    store, fails, rooms = dist.HashStore(), {0}, {}
    store.set_timeout(timedelta(seconds=1))

    def map_(peers, mine):
        rank = peers._group.rank()
        if rank in fails:
            fails.remove(rank)
            raise RuntimeError("no memory to map")
        own = dist.PrefixStore("memory", peers._store)
        rooms[rank] = rooms.get(rank, 6 + rank) + 1  # as torch counts all exchanges of a process
        own.set(f"{rooms[rank]}/{rank}", "an address")
        own.get(f"{rooms[rank]}/{1 - rank}")
        return rank

    monkeypatch.setattr(torch._C._distributed_c10d, "_register_process_group", lambda *given: None)  # once a process
    monkeypatch.setattr(Peers, "map", map_)
    monkeypatch.setattr(Peers, "allocate", staticmethod(lambda nbytes, device: torch.zeros(nbytes)))
    meeting, given, cpu, told = threading.Barrier(2, timeout=20), [None, None], torch.device("cpu"), {}

    class Rank(FusedCommunicator):
        def maximum(self, values):
            given[self.rank] = values
            meeting.wait()
            largest = [max(pair) for pair in zip(*given, strict=True)]
            meeting.wait()
            return largest

        def broadcast_text(self, text):
            given[self.rank] = text
            meeting.wait()
            first = given[0]
            meeting.wait()
            return first

    def rank(number):
        comm = Rank(number, 2)
        comm.store = lambda: store
        for _ in range(2):
            try:
                told.setdefault(number, []).append(comm.peer_memory(8, cpu))
            except ValueError as error:
                told.setdefault(number, []).append(type(error))

    other = threading.Thread(target=rank, args=(1,))
    other.start()
    rank(0)
    other.join(20)
    assert told == {0: [ValueError, 0], 1: [ValueError, 1]}


def test_a_host_is_known_by_a_number_that_no_float_rounds():
    assert 0 < host_number() == int(float(host_number())) < 2**48
