"""The launchers of several hosts agree: who leads, who is waited for, who is not believed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from axo.comm import secret
from axo.errors import Timeout
from axo.grid import Grid
from axo.train import TrainConfig, elastic, launchers
from axo.train.launchers import Launchers, places_of

Made = list[Launchers]


@pytest.fixture
def three(monkeypatch: Any) -> Iterator[Made]:
    """Launchers of one machine that play those of three hosts."""
    monkeypatch.setenv("AXO_SECRET", "s" * 32)
    sockets = [socket.create_server(("127.0.0.1", 0), backlog=64) for _ in range(3)]
    hosts = ",".join(f"127.0.0.1:{each.getsockname()[1]}" for each in sockets)
    numbered = iter(enumerate(sockets))
    monkeypatch.setattr(Launchers, "_listen", lambda self, hosts: next(numbered))
    yield [Launchers(hosts) for _ in sockets]
    for each in sockets:
        each.close()


def agree(*launchers: Launchers, ran: bool = False, apart: float = 0.0) -> dict[int, Any]:
    """What each decides, where each begins so many seconds after the one before."""
    decided: dict[int, Any] = {}

    def of(each: Launchers) -> None:
        said = {"ran": ran, "is": each.own}
        decided[each.own] = each.agree(said, lambda said: {"of": each.own, "is": [one["is"] for one in said.values()]})

    threads = [threading.Thread(target=of, args=(each,)) for each in launchers]
    for thread in threads:
        thread.start()
        time.sleep(apart)
    for thread in threads:
        thread.join(60)
    return decided


def all_say(hosts: Iterable[int]) -> dict[int, Any]:
    return {each: {"of": min(hosts), "is": list(hosts)} for each in hosts}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("apart", [0.0, 1.0])
def test_the_lowest_host_decides_for_all(three: Made, order: tuple[int, ...], apart: float) -> None:
    assert agree(*(three[i] for i in order), apart=apart) == all_say(range(3))
    assert agree(*three, ran=True) == all_say(range(3))  # again


@pytest.mark.parametrize("lost", range(3))
def test_a_launcher_that_has_ended_is_not_waited_for(three: Made, lost: int) -> None:
    left = [each for each in three if each.own != lost]
    three[lost]._listener.close()
    began, own = time.monotonic(), [each.own for each in left]
    assert agree(*left, ran=True) == all_say(own)
    assert time.monotonic() - began < 5


def test_a_host_that_is_there_is_waited_for(three: Made) -> None:
    decided = agree(*three, ran=True, apart=1.5)
    assert decided == all_say(range(3))


@pytest.mark.parametrize(("again", "busy"), [(0, 1), (1, 0)])
def test_a_host_that_comes_again_waits_for_those_that_run_and_says_so(
    three: Made, again: int, busy: int, monkeypatch: Any, capsys: Any
) -> None:
    """The lowest leads, as whoever leads needs to know nothing. Hosts that answer each other say nothing."""
    monkeypatch.setattr(launchers, "_BUSY_S", 1.0)
    three[2]._listener.close()
    decided: dict[str, Any] = {}
    fresh = threading.Thread(target=lambda: decided.update(agree(three[again])))
    fresh.start()
    time.sleep(2)
    assert not decided
    assert "127.0.0.1: there, but its ranks are at work; this host waits until they end" in capsys.readouterr().out
    decided |= agree(three[busy], ran=True)
    fresh.join(30)
    assert decided == all_say(range(2))
    assert agree(*three[:2], ran=True, apart=1.5) == all_say(range(2)) and not capsys.readouterr().out


def test_strangers_are_not_heard(three: Made) -> None:
    """One is silent, one sends what is no message, one a message that is not sealed, or sealed for another word."""
    strangers = []
    said = '{"host": 1, "ran": true, "is": "a stranger", "word": "w"}'
    for text in (b"", b"\xff\n", b"[]\n", said.encode() + b"\n", secret.sealed(said, "another word").encode() + b"\n"):
        strangers.append(stranger := socket.create_connection(three[0].places[0]))
        stranger.sendall(text)
    assert agree(*three) == all_say(range(3))
    for stranger in strangers:
        stranger.close()


def test_a_host_that_was_not_started_is_named(three: Made, monkeypatch: Any) -> None:
    monkeypatch.setattr(launchers, "_START_S", 1.0)
    for each in three[1:]:
        each._listener.close()
    with pytest.raises(
        Timeout, match=r"hosts: 127\.0\.0\.1, 127\.0\.0\.1 did not come within 1 s; start it there, too"
    ):
        three[0].agree({"ran": False}, lambda said: {})


@pytest.mark.parametrize("word", ["", "w", "0" * 31, "0" * 33, "G" * 32, "decision " + "0" * 32])
def test_nothing_is_sealed_with_what_is_no_word(three: Made, word: str) -> None:
    """Neither a card for a stranger who leads, nor a decision for a host of the run."""
    with pytest.raises(ValueError, match="no word of a launcher"):
        asyncio.run(follow(three[1], [word]))
    with socket.create_connection(three[0].places[0]) as other:
        replies = other.makefile("rwb")

        def tell() -> None:
            own = replies.readline()[:-1].decode()
            card = json.dumps({"host": 1, "ran": True, "is": 1, "word": word})
            replies.write(secret.sealed(card, f"card {own}").encode() + b"\n")
            replies.flush()

        teller = threading.Thread(target=tell)
        teller.start()
        assert agree(*three, apart=1.0) == all_say(range(3))
        teller.join(10)
        assert replies.readline() == b""


def test_a_card_is_no_decision(three: Made) -> None:
    """One host's card, sealed with the words of a talk, is not taken for what the leader of that talk has decided."""
    word = "0" * 32
    for place, believed in (("decision", True), ("card", False)):
        with pytest.raises(secret.Stranger) if not believed else contextlib.nullcontext():
            assert asyncio.run(follow(three[1], [word, place])) == {"failed": ""}


async def follow(launcher: Launchers, says: list[str]) -> Any:
    """What a launcher hears of a leader that says a word, and then something sealed as a card or a decision."""

    async def lead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(says[0].encode() + b"\n")
        line = await reader.readline()
        if line and says[1:]:
            own = json.loads(secret.opened(line[:-1], f"card {says[0]}"))["word"]
            writer.write(secret.sealed('{"failed": ""}', f"{says[1]} {says[0]} {own}").encode() + b"\n")
        writer.close()

    async with await asyncio.start_server(lead, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        try:
            return await launcher._follow(reader, writer, {"ran": False})
        finally:
            writer.close()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_host_that_was_not_started_is_named_beside_one_that_was(
    three: Made, monkeypatch: Any, order: tuple[int, ...]
) -> None:
    """The last of three; whoever leads has a connection of its own to the other where it starts after that."""
    monkeypatch.setattr(launchers, "_START_S", 3.0)
    three[2]._listener.close()
    raised: dict[int, str] = {}

    def of(each: Launchers) -> None:
        try:
            each.agree({"ran": False}, lambda said: {})
        except Timeout as error:
            raised[each.own] = str(error)
        each._listener.close()  # as the process ends

    threads = [threading.Thread(target=of, args=(three[i],), daemon=True) for i in order]
    for thread in threads:
        thread.start()
        time.sleep(1.0)
    for thread in threads:
        thread.join(20)
    assert sorted(raised) == [0, 1]
    assert raised[0].startswith("train: hosts: 127.0.0.1 did not come within 3 s")


def test_which_host_this_is_and_what_is_no_list(monkeypatch: Any) -> None:
    assert places_of("a,[fd77::1]:5,b:7") == [("a", launchers._PORT), ("fd77::1", 5), ("b", 7)]
    for wrong in ("", "a,,b", "a,a", "a:b", "a:99999", "fd77::1"):
        with pytest.raises(ValueError, match=r"is not HOST\[:PORT\],\.\.\. with each host once"):
            places_of(wrong)
    with pytest.raises(ValueError, match="none of them is this host"):
        Launchers("192.0.2.1,nowhere.invalid")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    first = Launchers(f"192.0.2.1,127.0.0.1:{port}")
    assert first.own == 1 and first.meeting_place()[0] == "127.0.0.1"
    with pytest.raises(ValueError, match=f"another program listens at 127.0.0.1:{port}, such as another run"):
        Launchers(f"192.0.2.1,127.0.0.1:{port}")
    first._listener.close()


def test_a_name_that_is_a_loopback_address_here_is_told(monkeypatch: Any) -> None:
    """As where /etc/hosts gives a host's own name 127.0.1.1."""
    names = {"one": "192.0.2.1", "two": "127.0.1.1", "three": "127.0.0.1"}

    def resolve(name: str, port: int, **options: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (names.get(name, name), port))]

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("AXO_SECRET", "s" * 32)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    for hosts in ("one,two", "two,one", "two,192.0.2.1"):
        with pytest.raises(ValueError, match=r"two is 127\.0\.1\.1 on this host, which no other host reaches"):
            Launchers(hosts)
    for hosts in (f"two:{port},three:{port}", f"two:{port}", f"127.0.0.1:{port},one"):  # all of one machine; an address
        own = Launchers(hosts)
        assert own.own == 0
        own._listener.close()


# --- what is decided --------------------------------------------------------------------------------------------------


def decision(elastic_: str, heard: dict[int, dict[str, Any]], hosts: int = 4) -> dict[str, Any]:
    """What a leader of a run of four ranks decides, of which each host had its share."""
    config = TrainConfig(grid=Grid(2, 1, 2, 1), batch_size=12, elastic=elastic_, out="run")
    names = SimpleNamespace(own=0, places=[(f"h{i}", 1) for i in range(hosts)], meeting_place=lambda: ("h0", 5))
    copies = elastic.StateCopies("/dev/shm/copies", config, partial(elastic.nearest, config))
    launches = elastic.Launches(copies, cast(Launchers, names))
    usual = launches._said | {"ran": True, "hosts": list(range(hosts)), "copies": {}, "signal": 0}
    return launches._decide({host: usual | {"place": (f"h{host}", 6)} | each for host, each in heard.items()})


def held(*files: int, step: int = 3, checksum: str = "c") -> dict[str, Any]:
    """A copy of four ranks' files, of which a host has these."""
    return {f"step-{step:08d}": ["run", checksum, {str(rank): int(rank in files) for rank in range(4)}]}


def test_ranks_of_a_lost_host_and_dead_ones_are_missing() -> None:
    plan = decision("2:4", {0: {}}, hosts=2)
    assert plan["hosts"] == {"0": 2} and plan["why"] == "host h1 is lost" and plan["event"] == "recovered"
    plan = decision("2:4", {0: {}, 1: {"ranks": 1, "why": "rank 3 was killed"}}, hosts=2)
    assert plan["hosts"] == {"0": 2, "1": 1} and plan["why"] == "rank 3 was killed"
    plan = decision("2:4", {0: {"ranks": 1, "why": "rank 0 was killed"}, 1: {}}, hosts=2)
    assert plan["hosts"] == {"0": 1, "1": 2} and plan["place"] == ("h0", 5)  # the host that has lost one has no other
    plan = decision("1:4", {0: {"ranks": 0, "why": "rank 0 was killed"}, 1: {}}, hosts=2)
    assert plan["hosts"] == {"1": 2} and plan["place"] == ("h1", 6)  # where rank 0 is
    plan = decision("1:4", {1: {"ranks": 1}, 2: {"ranks": 0, "why": "rank 2 was killed"}, 3: {"ranks": 0}})
    assert plan["hosts"] == {"1": 1} and plan["why"] == "host h0 is lost; rank 2 was killed"  # the others wait


def test_a_host_that_is_back_has_ranks_where_they_are_asked_for() -> None:
    fresh = {"ran": False, "hosts": []}
    plan = decision("2:4", {0: {"hosts": [0], "asked": 4}, 1: fresh}, hosts=2)
    assert plan["hosts"] == {"0": 2, "1": 2} and plan["event"] == "resized" and plan["why"] == "run/ranks said so"
    plan = decision("2:4", {0: {"hosts": [0], "asked": 4}}, hosts=2)
    assert plan["hosts"] == {"0": 2}  # nobody has come


def test_the_newest_copy_that_hosts_have_together_is_gone_on_from() -> None:
    """A host has the files of its rank and of the host before it."""
    folder = "/dev/shm/copies"
    plan = decision("1:4", {0: {"copies": held(0, 3)}, 2: {"copies": held(2, 1)}})
    assert plan["resume"] == f"{folder}/step-00000003" and plan["run"] == "run"
    later = held(0, 3) | held(0, 3, step=6)  # complete on one host alone
    assert decision("1:4", {0: {"copies": later}, 2: {"copies": held(2, 1)}})["resume"] == f"{folder}/step-00000003"
    other = held(0, 3, step=6) | held(0, 3)  # of another start
    plan = decision("1:4", {0: {"copies": other}, 2: {"copies": held(2, 1, step=6, checksum="d") | held(2, 1)}})
    assert plan["resume"] == f"{folder}/step-00000003"


@pytest.mark.parametrize(
    ("elastic_", "heard", "message"),
    [
        ("1:4", {0: {"copies": held(0, 3)}, 3: {"copies": held(3, 2)}}, "had the only copies of some shards"),
        ("3:4", {0: {}, 1: {}}, "h2 is lost; host h3 is lost; elastic=3:4 ends here: 2 ranks are left, and MIN is 3"),
        ("1:4", {0: {}, 1: {"options": "others"}, 2: {}, 3: {}}, "hosts h0, h1, h2, h3 have different options"),
        ("1:4", {0: {}, 1: {"failed": "loss is nan"}}, "loss is nan"),
        ("1:4", {0: {"late": "rank 0: Timeout: all_reduce"}, 1: {}, 2: {}, 3: {}}, "rank 0: Timeout: all_reduce"),
        ("1:4", {0: {"signal": 15}, 1: {}, 2: {}, 3: {}}, "a host was ended by SIGTERM"),
    ],
)  # fmt: skip
def test_what_ends_a_run(elastic_: str, heard: dict[int, Any], message: str) -> None:
    assert message in decision(elastic_, heard)["failed"]


def test_hosts_that_lost_each_other_for_a_while_go_on() -> None:
    late = {"late": "rank 0: PeerLost: rank 2 is lost: its host (ranks 2, 3) has answered nothing for 5 s"}
    plan = decision("2:4", {0: late, 1: late}, hosts=2)
    assert plan["hosts"] == {"0": 2, "1": 2} and plan["why"] == "hosts lost each other"
