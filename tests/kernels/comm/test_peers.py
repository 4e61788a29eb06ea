"""How ranks meet to share memory: torch's process group and store, without GPUs."""

import threading

import torch
import torch.distributed as dist

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


def test_a_host_is_known_by_a_number_that_no_float_rounds():
    assert 0 < host_number() == int(float(host_number())) < 2**48
