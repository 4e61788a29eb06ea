"""Numbers of ranks that streams and threads are told. Oracle: what torch's documentation says of them on one device."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import axo
from axo.checkpoint.ranks import rank_in
from axo.integrations import data_ranks
from tests.launcher import run_ranks


class Bounds(IterableDataset):
    """A stream as torch documents it: its bounds are set from outside, or by who makes it."""

    def __init__(self, start=0, end=8, by=1):
        self.start, self.end, self.by = start, end, by

    def __iter__(self):
        return iter(range(self.start, self.end, self.by))


def set_bounds(worker):
    dataset = get_worker_info().dataset
    dataset.start, dataset.end = 4 * worker, 4 * worker + 4


def streams_for_accelerate(grid):
    comms = axo.connect(grid)
    halves = DataLoader(Bounds(), batch_size=None, num_workers=2, worker_init_fn=set_bounds)
    read = sorted(map(int, data_ranks.uncut(halves, comms)))
    with pytest.raises(axo.Refused, match="accelerate cuts what it prepares: give it all rows, on every rank"):
        data_ranks.uncut(DataLoader(Bounds(comms.rank, by=2), batch_size=None), comms)
    return read


@pytest.mark.parametrize("grid", ["2x1x1x1", "1x1x2x1"])
def test_bounds_of_a_stream_are_its_own_and_not_those_of_ranks(grid):
    assert run_ranks(streams_for_accelerate, 2, grid) == [list(range(8))] * 2


def numbers_in_threads():
    """What other threads ask while one is told other numbers, and all when blocks have not ended in their order."""
    comms = axo.connect("2x1x1x1")
    group, entered, left = comms.checkpoint_group, threading.Event(), threading.Event()

    def asked():
        return dist.get_rank(), dist.get_world_size(), rank_in(group), os.environ["RANK"]

    def first():
        with data_ranks.rank_numbers(0, 1):
            entered.wait()
        left.set()

    def second():
        with data_ranks.rank_numbers(0, 1):
            entered.set()
            left.wait()

    with ThreadPoolExecutor() as pool:
        with data_ranks.rank_numbers(5, 7):
            inside, elsewhere = asked(), pool.submit(asked).result()
        for each in [pool.submit(first), pool.submit(second)]:
            each.result()
    return comms.rank, inside, elsewhere, asked()


def test_numbers_of_ranks_are_told_to_one_thread():
    for rank, inside, elsewhere, after in run_ranks(numbers_in_threads, 2):
        assert inside == (5, 7, rank, "5") and elsewhere == (rank, 2, rank, "5")
        assert after == (rank, 2, rank, str(rank))
