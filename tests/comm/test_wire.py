"""How ranks of several hosts connect: whom they believe, and what strangers and mistakes do."""

import asyncio
import contextlib
import os
import resource
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

import axo
from axo.comm import interfaces, rendezvous, secret, transports, wire
from axo.comm.rendezvous import Meeting, TimeLeft
from tests.launcher import rank_outcomes, run_ranks

SINGLES = {"ranks_per_host": 1}
SECRET, OTHER = "a" * 32, "b" * 32


def meet(identities, around=contextlib.nullcontext, seconds=30):
    """Connect ranks that are threads. Returns their connections, or what they raised."""
    store, ends = HashStore(), [None] * len(identities)

    def rank(r):
        try:
            left = TimeLeft(seconds)
            ends[r] = wire.connect(Meeting(store, "place", r, len(identities), f"rank {r}", left), identities)
        except Exception as error:
            ends[r] = error

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(len(identities))]
    for thread in threads:
        thread.start()
    with around(store):
        for thread in threads:
            thread.join()
    return ends


def identities(*ranks_of_hosts):
    return [f"host{h} one machine" for h, ranks in enumerate(ranks_of_hosts) for _ in range(ranks)]


def closed(ends):
    for end in ends:
        for descriptor in [*end.data, *end.pulse]:
            if descriptor >= 0:
                os.close(descriptor)


@pytest.mark.parametrize("hosts", [(1, 1), (2, 2), (3, 1), (3, 2), (1, 2, 2)], ids=str)
def test_every_pair_is_connected_once_and_every_host_has_a_pulse(hosts):
    named = identities(*hosts)
    ends = meet(named)
    for rank, end in enumerate(ends):
        assert [p for p, descriptor in enumerate(end.data) if descriptor < 0] == [rank]
        watched = [p for p, descriptor in enumerate(end.pulse) if descriptor >= 0]
        assert {named[p] for p in watched} == set(named) - {named[rank]}
    for rank, end in enumerate(ends):
        for peer, other in enumerate(ends):
            for ours, theirs in ((end.data[peer], other.data[rank]), (end.pulse[peer], other.pulse[rank])):
                assert (ours >= 0) == (theirs >= 0)
                if ours >= 0 and rank < peer:
                    one, two = socket.socket(fileno=os.dup(ours)), socket.socket(fileno=os.dup(theirs))
                    with one, two:
                        assert one.getsockname() == two.getpeername()
    closed(ends)


def test_ranks_that_cannot_be_reached_are_named(monkeypatch):
    async def nowhere(self, peer, purpose):
        self.reasons[peer] = "Connection refused"

    monkeypatch.setattr(wire._Peers, "_reach", nowhere)
    first, second = meet(identities(1, 1), seconds=1)
    assert isinstance(first, axo.Timeout) and "rank 1 (host host1, 127.0.0.1:" in str(first)
    assert isinstance(second, axo.Timeout) and "Connection refused" in str(second) and "AXO_INTERFACE" in str(second)


def test_interfaces(monkeypatch):
    monkeypatch.setenv("AXO_INTERFACE", "lo")
    assert interfaces.own_address("") == "127.0.0.1"
    monkeypatch.setenv("AXO_INTERFACE", "wrong0")
    with pytest.raises(ValueError, match=r"AXO_INTERFACE='wrong0' is no interface of this host; use one of .*lo"):
        interfaces.own_address("")
    monkeypatch.delenv("AXO_INTERFACE")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth0")
    assert interfaces.own_address("") == "127.0.0.1"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert [interfaces.own_address(host) for host in ("", "127.0.1.1", "no.such.host.invalid")] == ["", "", ""]


def connect_with(secrets):
    os.environ["AXO_SECRET"] = secrets[int(os.environ["RANK"])]
    return axo.connect("2x1x1x1", timeout=60).world.all_reduce(torch.ones(1)).item()


@pytest.mark.parametrize("hosts", [None, SINGLES], ids=["one-host", "two-hosts"])
def test_ranks_with_one_secret_meet(hosts):
    assert run_ranks(connect_with, 2, [SECRET, SECRET], hosts=hosts) == [2.0, 2.0]


@pytest.mark.parametrize("secrets", [(SECRET, OTHER), (SECRET, ""), ("", SECRET)], ids=["another", "none", "only"])
def test_a_rank_without_the_secret_is_refused_by_name(secrets):
    for outcome in rank_outcomes(connect_with, 2, secrets, hosts=SINGLES):
        assert outcome.error == "Error", outcome.describe()
        assert f"rank {1 - outcome.rank} does not prove that it knows this rank's secret" in outcome.message


def connect_again_with(secrets):
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}
    return connect_with(secrets)


def test_a_rank_with_another_secret_is_refused_where_starts_may_be_repeated():
    for outcome in rank_outcomes(connect_again_with, 2, (SECRET, OTHER)):
        assert outcome.error == "Error" and outcome.seconds < 20, outcome.describe()
        assert f"rank {1 - outcome.rank} does not prove that it knows this rank's secret" in outcome.message


class ReadingStore:
    """A store that keeps what was written to it."""

    def __init__(self, store):
        self.store, self.written = store, {}

    def __getattr__(self, name):
        def call(key, *values):
            if name in ("set", "compare_set"):
                self.written[key] = values[-1]
            return getattr(self.store, name)(key, *values)

        return call


def test_a_rank_whose_time_is_over_says_so_before_it_goes():
    """Those who try its port in vain would call it dead."""
    store, named = HashStore(), identities(1, 1)
    meetings = [Meeting(store, "place", r, 2, f"rank {r}", TimeLeft(seconds)) for r, seconds in enumerate((20, 1))]
    reach = wire._Peers._reach

    async def never(peers, peer, purpose):
        await (asyncio.sleep(60) if peers.rank == 1 else reach(peers, peer, purpose))

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(wire._Peers, "_reach", never)
        ends = [pool.submit(wire.connect, meeting, named) for meeting in meetings]
        assert "rank 1: no connection to rank 0 (host host0, 127.0.0.1:" in str(ends[1].exception())
        error = ends[0].exception()
    assert isinstance(error, axo.Timeout) and "rank 0: rank 1 gave up: no connection to rank 0" in str(error)


@pytest.mark.parametrize("end", ["all", "late", "gave up"])
def test_all_that_ranks_leave_in_a_store_is_sealed(end, monkeypatch):
    monkeypatch.setenv("AXO_SECRET", SECRET)
    store = ReadingStore(HashStore())

    def come(rank):
        if end == "gave up" and rank == 1:
            return Meeting(store, "key/hosts/2/d4cbb29", 1, 2, "rank 1", TimeLeft(5)).give_up(ValueError("no"))
        return transports.host_core(store, "key", rank, 2, "world", 20, meeting=0.5 if end == "late" else 20).shutdown()

    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(come, rank) for rank in range(1 if end == "late" else 2)]
        for rank in ranks[:1] if end != "all" else []:
            with pytest.raises(axo.Timeout if end == "late" else axo.PeerLost):
                rank.result()
        if end == "all":
            assert [rank.result() for rank in ranks] == [None, None]
    assert len(store.written) >= 2
    assert all(text.startswith("sealed ") for text in store.written.values()), store.written


def test_a_secret_is_checked(monkeypatch, tmp_path):
    monkeypatch.setenv("AXO_SECRET", "short")
    with pytest.raises(ValueError, match="AXO_SECRET has 5 characters, and a secret has 16 to 4096"):
        secret.of_job()
    monkeypatch.delenv("AXO_SECRET")
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    monkeypatch.setenv("AXO_SECRET_FILE", str(file))
    file.chmod(0o644)
    with pytest.raises(ValueError, match="may be read or changed by others; chmod 600"):
        secret.of_job()
    file.chmod(0o600)
    assert secret.of_job() == SECRET.encode()
    monkeypatch.setenv("AXO_SECRET_FILE", str(tmp_path / "none"))
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        secret.of_job()


def test_a_job_of_several_hosts_without_a_secret_is_warned_or_refused(monkeypatch):
    with pytest.warns(UserWarning, match="spans several hosts and has no secret.*AXO_SECRET"):
        secret.check_several_hosts(warns=True)
    monkeypatch.setenv("AXO_REQUIRE_SECRET", "1")
    with pytest.raises(ValueError, match="AXO_REQUIRE_SECRET=1, and this job has no secret"):
        secret.check_several_hosts(warns=False)
    monkeypatch.setenv("AXO_SECRET", SECRET)
    secret.check_several_hosts(warns=True)


def die_with_a_child(told):
    """The child lives until the other rank knows, or far longer than a test takes."""
    comm = axo.connect("2x1x1x1", timeout=120).world
    comm.barrier()
    if comm.rank == 1:
        if os.fork() == 0:
            end = time.monotonic() + 60
            while not told.exists() and time.monotonic() < end:
                time.sleep(0.01)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        comm.all_reduce(torch.ones(10))
    finally:
        told.touch()


def test_a_forked_child_does_not_hide_the_death_of_its_parent(tmp_path):
    survivor = rank_outcomes(die_with_a_child, 2, tmp_path / "told", hosts=SINGLES)[0]
    assert survivor.error == "PeerLost" and survivor.seconds < 20, survivor.describe()


def connect_as_another_program():
    if os.environ["RANK"] == "2":
        rendezvous._program = lambda: "axo 0.0.9 of sources 0123456789abcdef, torch 2.11.0"
    axo.connect("4x1x1x1", timeout=60)


@pytest.mark.parametrize("hosts", [None, SINGLES], ids=["one-host", "four-hosts"])
def test_ranks_of_different_programs_are_refused_on_every_rank(hosts):
    for outcome in rank_outcomes(connect_as_another_program, 4, hosts=hosts):
        assert outcome.error == "ValueError", outcome.describe()
        assert "the ranks run different programs (ranks 0, 1, 3: axo " in outcome.message
        assert "; ranks 2: axo 0.0.9 of sources 0123456789abcdef, torch 2.11.0)" in outcome.message


def knock(kind, address):
    """One stranger. Returns a socket that it goes on to hold, or None."""
    stranger = socket.create_connection(address, 5)
    if kind == "held":
        return stranger
    with stranger, contextlib.suppress(OSError):
        if kind == "reset":
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        elif kind == "short":
            stranger.sendall(b"\0")
        elif kind == "garbage":
            stranger.sendall(os.urandom(256))
        elif kind == "false":  # as rank 1, with a proof that is none
            stranger.recv(16)
            stranger.sendall(wire._CLAIM.pack(1, 0, bytes(16), bytes(32)))
        elif kind == "slow":
            stranger.recv(1)
            stranger.sendall(b"\0")
    return None


def knock_many(count, address):
    """In a process of its own: strangers of six kinds take turns; of those that hold on, 500 do at a time."""
    held = []
    for i in range(count):
        with contextlib.suppress(OSError):
            if (holds := knock(("held", "reset", "short", "garbage", "slow", "false")[i % 6], address)) is not None:
                held.append(holds)
        if len(held) > 500:
            held.pop(0).close()


def meet_among_strangers(count):
    """Under a limit of 256 files rank 0 listens while strangers come; then rank 1 does. Gives what both have got."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))
    reach, over, before = wire._Peers._reach, threading.Event(), len(os.listdir("/proc/self/fd"))
    places = []

    async def reach_later(self, peer, purpose):
        while not over.is_set():
            await asyncio.sleep(0.01)
        await reach(self, peer, purpose)

    wire._Peers._reach = reach_later

    @contextlib.contextmanager
    def strangers(store):
        while not store.check(["place/1/1/0"]):  # the second step
            time.sleep(0.001)
        address, port = store.get("place/1/1/0").decode().split("\n")[2].split(" ")
        places.append((address, int(port)))
        if (child := os.fork()) == 0:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            knock_many(count, places[0])
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        over.set()
        yield

    ends = meet(identities(1, 1), strangers, seconds=600)
    closed(ends)
    with pytest.raises(ConnectionRefusedError):  # nobody listens any more
        socket.create_connection(places[0], 5)
    return [len(os.listdir("/proc/self/fd")) - before, *(type(end).__name__ for end in ends)]


@pytest.mark.parametrize("count", [500, pytest.param(100_000, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])])
def test_strangers_cost_no_descriptor_of_256(count):
    (got,) = run_ranks(meet_among_strangers, 1, count, timeout=900)
    assert got == [0, "Connections", "Connections"]


def one_dies_while_connections_are_made(victim, hidden):
    if int(os.environ["RANK"]) == victim:
        wire._Peers.run = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    if hidden:  # as on another host
        rendezvous.Meeting._dead = lambda _: None
    axo.connect("3x1x1x1", timeout=60, meeting_timeout=60)


@pytest.mark.parametrize("hidden", [False, True], ids=["one-machine", "hosts"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies_while_connections_are_made_is_named_soon(victim, hidden):
    for outcome in rank_outcomes(one_dies_while_connections_are_made, 3, victim, hidden, hosts=SINGLES):
        if outcome.rank != victim:
            assert outcome.error == "PeerLost" and outcome.seconds < 30, outcome.describe()
            assert f"rank {victim} (" in outcome.message, outcome.message


def connect_on_an_interface_that_one_lacks():
    if os.environ["RANK"] == "2":
        interfaces.own_address = lambda meeting: interfaces._address_of("AXO_INTERFACE", "wrong0")
    wire._one_machine = lambda identities: False
    axo.connect("4x1x1x1", timeout=60, meeting_timeout=60)


def test_an_error_of_one_rank_is_heard_by_all_before_the_time_is_over():
    for outcome in rank_outcomes(connect_on_an_interface_that_one_lacks, 4, hosts=SINGLES):
        assert outcome.error == ("ValueError" if outcome.rank == 2 else "PeerLost"), outcome.describe()
        assert "AXO_INTERFACE='wrong0' is no interface of this host" in outcome.message and outcome.seconds < 40
