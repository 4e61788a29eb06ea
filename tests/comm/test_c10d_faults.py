"""What torch.distributed's users see of a lost, late or aborted rank over the backend ``axo``."""

import datetime
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

import axo
from tests.launcher import rank_outcomes, run_ranks


def start(**options):
    dist.init_process_group("axo", **options)
    return dist.get_rank()


def lost_peer():
    rank = start(timeout=datetime.timedelta(seconds=60))
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(axo.PeerLost, match="rank 1"):
        dist.all_reduce(torch.ones(10))
    assert error_now() == "REMOTE_ERROR"
    return time.monotonic() - began


def error_now():
    return dist.group.WORLD._get_backend(torch.device("cpu")).get_error().name


def mismatch():
    rank = start(timeout=datetime.timedelta(seconds=20))
    assert error_now() == "SUCCESS"
    with pytest.raises(axo.Mismatch):
        dist.all_reduce(torch.ones(4 + rank))
    assert error_now() == "COMM_ERROR"


def late_rank():
    rank = start(timeout=datetime.timedelta(seconds=60))
    dist.barrier()
    if rank == 0:
        options = dist.BarrierOptions()
        options.timeout, options.asyncOp = datetime.timedelta(milliseconds=200), False
        with pytest.raises(axo.Timeout):
            dist.group.WORLD._get_backend(torch.device("cpu")).barrier(options).wait()
    else:
        while error_now() == "SUCCESS":  # heard without calling anything that could fail
            time.sleep(0.01)
    assert error_now() == "TIMEOUT"


def failed_future():
    rank = start(timeout=datetime.timedelta(seconds=60))
    dist.barrier()
    if rank == 1:
        os._exit(0)
    with pytest.raises(RuntimeError, match="rank 1"):
        dist.all_reduce(torch.ones(10), async_op=True).get_future().wait()


def abort_reaches_every_call():
    start()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.supports_splitting and backend.supports_coalescing
    backend.abort()
    with pytest.raises(axo.Aborted):
        dist.barrier()


@pytest.mark.parametrize("check", [mismatch, late_rank, abort_reaches_every_call], ids=lambda check: check.__name__)
def test_on_four_ranks(check):
    run_ranks(check, 4)


@pytest.mark.parametrize("check", [lost_peer, failed_future], ids=lambda check: check.__name__)
def test_a_lost_peer_is_an_error(check):
    for outcome in rank_outcomes(check, 3):
        assert outcome.ok or outcome.rank == 1, outcome.describe() + outcome.traceback + outcome.output
