"""How ranks meet: late, in vain, with a bad environment, and through a store that outlives them, as torchrun's does.

What one start leaves in a store, the next one does not read. Ranks are threads there;
tests/integrations/litgpt/test_kills.py does it with torchrun.
"""

import itertools
import os
import re
import resource
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import axo
from axo.comm import connect, rendezvous, transports
from axo.comm.rendezvous import store_of_this_start
from axo.errors import Timeout
from tests.launcher import Command, fork_the_ranks_of_torchrun, rank_outcomes, run_ranks

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


def test_all_ranks_look_as_rarely_as_so_many_should(store, monkeypatch):
    looks, ranks_of = rendezvous._looks, []
    monkeypatch.setattr(rendezvous, "_looks", lambda ranks=1: ranks_of.append(ranks) or looks(ranks))
    start(store)
    assert ranks_of == [RANKS] * RANKS


def test_a_rank_that_was_killed_early_does_not_count(store):
    """Killed before it said anything, after its word, and after it had come where others had not."""
    first = start(store)
    first[0].set("address", b"1")
    store.set("axo/hello/3", "a dead rank's word")
    for _ in range(2):
        views = start(store)
        assert not any(view.check(["address"]) for view in views)
    with ThreadPoolExecutor(1) as pool:
        word = store.get("axo/hello/2")
        follower = pool.submit(store_of_this_start, store, 2, RANKS, 20)  # comes to a rank 0 that then gives up
        while store.get("axo/hello/2") == word:
            time.sleep(0.001)
        with pytest.raises(Timeout):
            store_of_this_start(store, 0, RANKS, 0.3)
        follower.result()
    views = start(store)
    views[2].set("new", b"1")
    assert all(view.check(["new"]) for view in views)


def test_who_does_not_come_is_named(store):
    with ThreadPoolExecutor(2) as pool:
        pool.submit(store_of_this_start, store, 1, 3, 20)
        leader = pool.submit(store_of_this_start, store, 0, 3, 2)
        with pytest.raises(Timeout, match=r"rank 0 of 3\): ranks \[2\] have not come within 2 s"):
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


def late_over_a_file(folder):
    rank = int(os.environ["RANK"])
    dist.init_process_group("axo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    if rank == 1:
        time.sleep(1.5)
    with axo.connect("2x1x1x1") as comms:
        return comms.x.all_reduce(torch.ones(1)).item()


def test_a_late_rank_over_a_file_store(tmp_path):
    assert run_ranks(late_over_a_file, 2, tmp_path) == [2.0, 2.0]


def one_gives_up():
    options = axo.DeviceOptions() if os.environ["RANK"] == "1" else None
    axo.connect("3x1x1x1", device_options=options)


def test_a_rank_that_gives_up_is_told_to_those_who_wait():
    outcomes = rank_outcomes(one_gives_up, 3)
    assert outcomes[1].error == "ValueError"
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error == "PeerLost" and "rank 1 raised ValueError: connect: device_options" in outcome.message
        assert outcome.seconds < 30  # not the 60 s of meeting_timeout


def replace_in_rank_1(where, action):
    if os.environ["RANK"] == "1":
        place, name = {
            "gather": (transports, "host_core"),
            "core": (transports._C, "create_host_communicator"),
            "split": (connect.Communicators, "_line"),
        }[where]
        setattr(place, name, action)


def one_stalls(where, folder, first, short=2, long=20):
    """Rank 1 comes to no meeting after the first of connect; of the others the time of ``first`` ends first."""

    def stall(*_):
        while len(os.listdir(folder)) < 2:
            time.sleep(0.05)
        os._exit(0)

    replace_in_rank_1(where, stall)
    start = time.monotonic()
    with pytest.raises(Timeout) as caught:
        axo.connect("3x1x1x1", meeting_timeout=short if os.environ["RANK"] == str(first) else long)
    seconds = time.monotonic() - start
    open(f"{folder}/{os.environ['RANK']}", "w").close()
    while len(os.listdir(folder)) < 2:  # a rank that gave up says so: nobody may find it out from its end
        time.sleep(0.05)
    return str(caught.value), seconds


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("where", ["gather", "core", "split"])
def test_the_meeting_timeout_bounds_every_meeting(where, first, tmp_path):
    outcomes = rank_outcomes(one_stalls, 3, where, str(tmp_path), first)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.ok, outcome.describe() + outcome.traceback
        message, seconds = outcome.value
        assert seconds < 25, message  # it was the 600 s of an operation
        if outcome.rank != first:
            assert seconds < 20, message  # it heard of the other one
        words = r"ranks \[1\]|not arrived: 1\b|rank 1 has not come"
        assert outcome.rank == 2 or re.search(words, message), message
    if first == 2 and where == "core":
        # By the member's own message, or, where the leader looked there first, by the store: never "died".
        assert re.search(r"rank 2 (\(process \d+\) )?gave up: .*timed out; ", outcomes[0].value[0])


def one_stalls_and_the_leader_sleeps(folder):
    """As above; rank 0 is stopped while the time of rank 2 ends, and so reads the store before rank 2's message."""
    if os.environ["RANK"] == "0":
        subprocess.Popen(["sh", "-c", f"sleep 1; kill -STOP {os.getpid()}; sleep 3; kill -CONT {os.getpid()}"])
    return one_stalls("core", folder, 2, 2.5, 20)


def test_a_leader_that_slept_says_who_has_not_come(tmp_path):
    outcomes = rank_outcomes(one_stalls_and_the_leader_sleeps, 3, str(tmp_path))
    message, seconds = outcomes[0].value
    assert "rank 2" in message and "not arrived: 1;" in message and seconds < 20, message


def one_raises(where):
    def fail(*_):
        raise ValueError("no way")

    def raise_file_limit(*arguments):
        """May open no more files than it needs until its peers' come."""
        limit = len(os.listdir("/proc/self/fd")) + 3
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        return create(*arguments)

    create = transports._C.create_host_communicator
    if where == "files":
        replace_in_rank_1("core", raise_file_limit)
    elif where == "size":
        if os.environ["RANK"] == "1":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    else:
        replace_in_rank_1(where, fail)
    axo.connect("3x1x1x1")


@pytest.mark.parametrize("where", ["core", "split", "files", "size"])
def test_a_rank_that_raises_between_meetings_is_lost_to_its_peers_with_its_error(where):
    outcomes = rank_outcomes(one_raises, 3, where)
    cause = {
        "files": "ResourceError: rendezvous of 'world': this process may not open",
        "size": "ResourceError: shared memory: cannot size a segment of ",
    }.get(where, "ValueError: no way")
    assert f"{outcomes[1].error}: {outcomes[1].message}".startswith(cause), outcomes[1].describe()
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error == "PeerLost" and outcome.seconds < 30, outcome.describe()
        assert re.search(r"rank 1( \(process \d+\))? raised " + re.escape(cause), outcome.message), outcome.describe()


def too_late(folder):
    """Rank 1 comes when rank 0 has waited in vain."""
    if os.environ["RANK"] == "1":
        while not os.listdir(folder):
            time.sleep(0.05)
        axo.connect("2x1x1x1")
    with pytest.raises(Timeout, match=r"ranks \[1\] have not come"):
        axo.connect("2x1x1x1", meeting_timeout=0.2)
    open(f"{folder}/gone", "w").close()


def test_a_rank_that_comes_too_late_is_told_at_once(tmp_path):
    first, second = rank_outcomes(too_late, 2, str(tmp_path))
    assert first.ok, first.describe()
    assert second.error == "Timeout" and "the others waited in vain, and have given up" in second.message


def limits_after_connect():
    comms = axo.connect("2x1x1x1", timeout=500, meeting_timeout=100)
    again = axo.connect("2x1x1x1", timeout=400)  # over the first one's process group
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    lines = (comms.x, comms.world, again.x)  # the two worlds are the process group's one
    return [line.set_timeout(1) for line in lines], backend.options._timeout.total_seconds()


def test_a_rank_that_came_last_and_ended_at_once_has_come(monkeypatch):
    """All grids are known then, and why it ended: each rank finds the same error in them."""
    store = dist.HashStore()
    where = rendezvous._C.this_thread().split(" ", 2)[2]
    store.set("meeting/1/0/0", f"1 2 {where}\n{rendezvous._program()}\nmine")
    assert store.add("meeting/1/0/came", 1) == 1

    def gone(told):  # while this rank looked who is alive, the last one came
        if not store.check(["meeting/1/0/end"]):
            store.set("meeting/1/0/2", f"1 3 {where}\n{rendezvous._program()}\nits own")
            store.set("meeting/1/0/end", "all\n-1\n")
        return told.startswith("1 ")

    monkeypatch.setattr(rendezvous._C, "thread_gone", gone)
    meeting = rendezvous.Meeting(store, "meeting", 1, 3, "connect", rendezvous.TimeLeft(20))
    assert meeting.gather("this") == ["mine", "this", "its own"]


class CountingStore:
    """A store that knows for how many keys it was asked."""

    def __init__(self, store):
        self.store, self.calls, self.keys = store, 0, 0

    def __getattr__(self, name):
        def call(*arguments):
            self.calls += 1
            self.keys += len(arguments[0]) if isinstance(arguments[0], list) else 1
            return getattr(self.store, name)(*arguments)

        return call


def test_of_4096_ranks_each_asks_for_one_key_at_a_look():
    ranks, own = 4096, 2000
    counting = CountingStore(store := dist.HashStore())
    for rank in set(range(ranks)) - {own, own + 1}:
        store.set(f"meeting/1/0/{rank}", f"{rank} {rank} elsewhere\n{rendezvous._program()}\n{rank}")
    store.add("meeting/1/0/came", ranks - 2)
    with ThreadPoolExecutor(1) as pool:
        left = rendezvous.TimeLeft(20)
        waiting = pool.submit(lambda: rendezvous.Meeting(counting, "meeting", own, ranks, "connect", left).gather("it"))
        time.sleep(1)
        texts = rendezvous.Meeting(store, "meeting", own + 1, ranks, "connect", left).gather("last")
    assert waiting.result() == texts == [{own: "it", own + 1: "last"}.get(rank, str(rank)) for rank in range(ranks)]
    assert counting.keys < ranks + counting.calls + 300  # all once; those near this one, who are looked after
    assert counting.calls < 200


@pytest.mark.parametrize(("ranks", "most_looks"), [(8, 150), (4096, 22)])
def test_a_look_is_a_thirtieth_late_and_the_looks_of_many_ranks_are_few(ranks, most_looks, monkeypatch):
    """In the first second, by a clock that only pauses move."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(rendezvous, "time", clock)
    looks = list(itertools.takewhile(lambda waited: waited < 1, rendezvous._looks(ranks)))
    assert len(looks) <= most_looks
    late = [after - before - before / 32 for before, after in itertools.pairwise(looks)]
    assert max(late) <= (0.001001 if ranks == 8 else 0.0501)


def test_a_store_that_is_gone_is_one_error():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    meeting = rendezvous.Meeting(store, "meeting", 1, 2, "connect (rank 1 of 2)", rendezvous.TimeLeft(20))
    del server
    with pytest.raises(axo.PeerLost, match=r"connect \(rank 1 of 2\): the store has gone: rank 0, or") as caught:
        meeting.gather()
    assert "frame #" not in str(caught.value) and "\n" not in str(caught.value)


def test_operations_keep_their_own_time_limit():
    assert run_ranks(limits_after_connect, 2) == [([500, 500, 400], 500)] * 2


def limits_itself():
    dist.init_process_group("axo")
    comms = axo.connect("2x1x1x1", timeout=500)  # over the process group's world, whose limit is another
    assert comms.world.set_timeout(0.2) == 500 and comms.world.set_timeout(0.2) == 0.2
    if comms.rank == 0:
        with pytest.raises(Timeout, match="all_reduce"):
            comms.world.all_reduce(torch.ones(1))
    comms.x.barrier()  # has its own limit; the peer lives until here


def test_a_limit_that_is_set_holds_for_operations():
    run_ranks(limits_itself, 2)


def port_of_nobody():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


@pytest.mark.parametrize(
    ("environment", "error", "message"),
    [
        ({"RANK": "abc"}, ValueError, r"RANK='abc' is not a whole number of at least 0"),
        ({"RANK": "-1"}, ValueError, r"RANK='-1' is not a whole number of at least 0"),
        ({"WORLD_SIZE": "0"}, ValueError, r"WORLD_SIZE=0 is no number of ranks"),
        ({"RANK": "2"}, ValueError, r"RANK=2 is not a rank of WORLD_SIZE=2; use 0 to 1"),
        ({"MASTER_PORT": "70000"}, ValueError, r"MASTER_PORT='70000' do not name a place to meet"),
        ({"MASTER_PORT": "0"}, ValueError, r"MASTER_PORT='0' do not name a place to meet"),
        ({"MASTER_ADDR": ""}, ValueError, r"MASTER_ADDR='' and MASTER_PORT='\d+' do not name a place to meet"),
        ({}, Timeout, r"connect \(rank 1 of 2\): no store answers at 127.0.0.1:\d+ within 1 s \(.*refused"),
        ({"MASTER_ADDR": "no-such-host.invalid"}, Timeout, r"no store answers at no-such-host.invalid:\d+ within 1 s"),
        ({"MASTER_ADDR": "no-such-host.invalid", "RANK": "0"}, Timeout, r"rank 0 of 2\): no store answers at"),
        (
            {"RANK": "0"},
            Timeout,
            r"0 of 2\): not all ranks reached the store at 127.0.0.1:\d+ within 1 s",
        ),
    ],
)
def test_a_bad_start_is_one_error_soon(environment, error, message, monkeypatch):
    usual = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port_of_nobody()}
    for name, value in (usual | environment).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    start = time.monotonic()
    with pytest.raises(error, match=message) as caught:
        axo.connect("2x1x1x1", meeting_timeout=1)
    assert time.monotonic() - start < 15  # a busy machine; torch's own tries took a minute and more
    assert "frame #" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rank", "message"),
    [("0", "another program listens at 127.0.0.1"), ("1", "what listens there does not answer as a store does")],
)
def test_a_stranger_at_the_port_is_one_error_soon(rank, message, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(silent.getsockname()[1])}
        for name, value in (here | {"RANK": rank, "WORLD_SIZE": "2"}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        start = time.monotonic()
        with pytest.raises(Timeout, match=message):
            axo.connect("2x1x1x1", meeting_timeout=1)
        assert time.monotonic() - start < 15


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"grid": None}, "connect: grid=None is not a grid; pass a text such as '2x2x2x1', or an axo.Grid"),
        ({"grid": (1, 1, 1, 1)}, r"connect: grid=\(1, 1, 1, 1\) is not a grid"),
        ({"timeout": None}, "connect: timeout=None is not a number of seconds"),
        ({"timeout": "5"}, "connect: timeout='5' is not a number of seconds"),
        ({"meeting_timeout": True}, "connect: meeting_timeout=True is not a number of seconds"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        axo.connect(**({"grid": "1x1x1x1"} | arguments))


def one_asks_for_a_wrong_time():
    axo.connect("2x1x1x1", timeout=-1 if os.environ["RANK"] == "1" else 600)


def test_a_wrong_time_is_told_to_those_who_wait():
    first, second = rank_outcomes(one_asks_for_a_wrong_time, 2)
    assert second.error == "ValueError" and "timeout=-1" in second.message
    assert first.error == "PeerLost" and "rank 1 raised ValueError: connect: timeout=-1" in first.message


LATE = """
import os, time
import axo, torch
if os.environ["RANK"] == "1":
    time.sleep(1.5)
with axo.connect("2x1x1x1") as comms:
    comms.world.all_reduce(torch.ones(1))
"""


def test_waiting_for_a_late_rank_prints_nothing(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(LATE)
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program)]
    command = Command(*torchrun, prepare=fork_the_ranks_of_torchrun)
    output = command.communicate()
    assert command.returncode == 0 and not output.strip(), output[-3000:]


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
"""


@pytest.mark.slow
def test_torchruns_second_start_meets_after_an_early_death(tmp_path, monkeypatch):
    """Rank 1 dies before it comes to the store, where rank 0 waits for it; then both start again with that store."""
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setenv("SEEN", f"{tmp_path}/seen")
    torchrun = ["torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", "--standalone"]
    command = Command(*torchrun, str(tmp_path / "program.py"), prepare=fork_the_ranks_of_torchrun)
    output = command.communicate()
    assert command.returncode == 0, output[-3000:]
    assert [(tmp_path / f"seen{rank}").read_text() for rank in (0, 1)] == ["1 4.0", "1 4.0"]
