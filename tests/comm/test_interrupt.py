"""Ctrl-C in a call that waits for a peer: KeyboardInterrupt at once, in Axo's calls and in torch.distributed's."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

import axo
from tests.launcher import rank_outcomes, run_ranks

# A tick of the engine is 25 ms and the handlers are asked four times a second; the rest is for a busy machine. Far
# less than the timeouts of 60 s.
SOON_S = 10.0


def interrupted(call):
    """The message with which SIGINT ends ``call``, after it has waited for a while."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    start = time.monotonic()
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        call()
    assert 0.3 <= time.monotonic() - start < SOON_S
    timer.join()


def waits_of_axo():
    comms = axo.connect("2x1x1x1", timeout=60)
    x, go = comms.x, comms.world.split(0, name="go")
    t = torch.ones(100_000)
    if comms.rank == 0:
        work = x.all_reduce(t, async_op=True)
        interrupted(work.wait)
        interrupted(lambda: work.synchronize(timeout=50))
        go.barrier()
        work.wait()  # the operation itself was not touched
        assert t[0].item() == 2.0
        interrupted(x.barrier)
        with pytest.raises(axo.Aborted, match=r"barrier #.* on 'x' .*was interrupted"):
            x.barrier()
    else:
        go.barrier()
        x.all_reduce(t)
        with pytest.raises(axo.Aborted, match=r"rank 0 of 2.* was interrupted"):
            x.recv(t, peer=0)
    return True


def waits_of_torch():
    dist.init_process_group("axo")
    pair = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        interrupted(lambda: dist.recv(torch.ones(3), src=1))
        interrupted(lambda: dist.barrier(group=pair))
        dist.distributed_c10d._get_default_store().set("interrupted", "yes")
    else:
        dist.distributed_c10d._get_default_store().wait(["interrupted"])
        with pytest.raises(axo.Aborted, match="was interrupted"):
            dist.all_reduce(torch.ones(3), group=pair)
    return True


def other_handlers_run(handled):
    comm = axo.connect("2x1x1x1", timeout=60).x
    if comm.rank == 0:
        seen = []
        signal.signal(signal.SIGUSR1, lambda *_: (seen.append(time.monotonic()), handled.touch()))
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        comm.barrier()
        return time.monotonic() - seen[0]
    while not handled.exists():  # the handler runs during the wait of rank 0, which ends after it
        time.sleep(0.05)
    time.sleep(0.6)
    comm.barrier()
    return 0.6


def connects_alone():
    if os.environ["RANK"] == "1":
        time.sleep(2)
        return
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
    interrupted(lambda: dist.init_process_group("axo", store=store, rank=0, world_size=2))


@pytest.mark.parametrize("check", [waits_of_axo, waits_of_torch], ids=lambda check: check.__name__)
def test_ctrl_c_ends_a_wait(check):
    assert all(run_ranks(check, 2))


def test_a_handler_that_returns_runs_while_the_call_goes_on(tmp_path):
    assert run_ranks(other_handlers_run, 2, tmp_path / "handled")[0] > 0.5


def test_ctrl_c_ends_the_rendezvous():
    for outcome in rank_outcomes(connects_alone, 2):
        assert outcome.ok, outcome.describe() + outcome.traceback
