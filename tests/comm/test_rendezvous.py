"""A store that outlives its ranks, as torchrun's does: what one start leaves there, the next one does not read.

Ranks are threads here; tests/integrations/litgpt/test_kills.py does it with torchrun.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from axo.comm.rendezvous import store_of_this_start
from axo.errors import Timeout

RANKS = 4


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    return dist.HashStore()


def start(store, ranks=range(RANKS)):
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda rank: store_of_this_start(store, rank, RANKS, 20), ranks))


def test_starts_do_not_see_each_other(store):
    for _ in range(3):  # killed after they met, all of them
        views = start(store)
        assert not views[0].check(["address"])
        views[0].set("address", b"1")
        assert all(view.check(["address"]) for view in views)


def test_a_rank_that_was_killed_early_does_not_count(store):
    """Killed before it said anything, after its word, and after it had come where others had not."""
    first = start(store)
    first[0].set("address", b"1")
    store.set("axo/hello/3", "a dead rank's word")
    for _ in range(2):
        views = start(store)
        assert not any(view.check(["address"]) for view in views)
    with ThreadPoolExecutor(1) as pool:
        leader = pool.submit(store_of_this_start, store, 0, RANKS, 0.3)
        store_of_this_start(store, 2, RANKS, 20)  # comes to a rank 0 that then gives up
        assert isinstance(leader.exception(), Timeout)
    views = start(store)
    views[2].set("new", b"1")
    assert all(view.check(["new"]) for view in views)


def test_who_does_not_come_is_named(store):
    with ThreadPoolExecutor(2) as pool:
        leader = pool.submit(store_of_this_start, store, 0, 3, 0.3)
        pool.submit(store_of_this_start, store, 1, 3, 0.3)
        with pytest.raises(Timeout, match=r"rank 0 of 3\): ranks \[2\] have not come within 0.3 s"):
            leader.result()
    with pytest.raises(Timeout, match=r"rank 1 of 3\): rank 0 has not come within 0.2 s"):
        store_of_this_start(store, 1, 3, 0.2)


@pytest.mark.parametrize(
    "environment", [{}, {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "0"}]
)
def test_without_restarts_the_store_is_the_launchers(environment, monkeypatch):
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_MAX_RESTARTS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    store = dist.HashStore()
    assert store_of_this_start(store, 1, 2, 0.1) is store


PROGRAM = """
import os, signal
import axo
import torch
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
with axo.connect("1x1x1x2") as comms:
    gloo = torch.distributed.new_group(backend="gloo")
    ones = torch.ones(1)
    torch.distributed.all_reduce(ones, group=gloo)
    total = comms.world.all_reduce(ones).item()
    with open(f"{os.environ['SEEN']}{comms.rank}", "w") as file:
        file.write(f"{os.environ['TORCHELASTIC_RESTART_COUNT']} {total}")
os._exit(0)  # a thread of Gloo that lets go of a tensor while the interpreter ends aborts the process (docs/notes/facts.md)
"""


@pytest.mark.slow
def test_torchruns_second_start_meets_after_an_early_death(tmp_path):
    """Rank 1 dies before it comes to the store, where rank 0 waits for it; then both start again with that store."""
    (tmp_path / "program.py").write_text(PROGRAM)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", "--standalone"]
    done = subprocess.run(
        [*torchrun, tmp_path / "program.py"],
        env=os.environ | {"SEEN": f"{tmp_path}/seen"}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert [(tmp_path / f"seen{rank}").read_text() for rank in (0, 1)] == ["1 4.0", "1 4.0"]
