"""The launchers of a run on several hosts, one a host: who is there, and what all of them do next.

    axo train --elastic 2:4 --hosts 10.0.0.1,10.0.0.2 ...     typed on each of these hosts

Each listens at its place in the list for as long as it lives, and they meet whenever their ranks have ended. The lowest
host that answers leads: it hears what each has to say, decides, and tells. So no host is needed by the others. Before
it is believed, each proves the job's secret on words that the other has made up:

    leader      word
    another     its word, what it says           sealed (axo.comm.secret) as a card, with the leader's word
    leader      the decision                     sealed as a decision, with both words

A host is there when its kernel takes a connection, which needs nothing of a launcher that waits for its ranks; one that
takes none is lost: at once where it refuses, else after ``_TRIES`` of ``_ANSWER_S``. One that is there is waited for.

Not here: what is decided (``elastic``); which of two halves goes on that no longer reach each other (each, if it has
MIN ranks, so a MIN above half of MAX lets one at most).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import re
import secrets
import socket
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from axo.comm import secret
from axo.errors import Error, Timeout

Said = dict[str, Any]
_PORT = 29400
_ANSWER_S, _TRIES = 0.3, 2  # for a kernel to take a connection
_LOOK_S, _AGAIN_S, _TELL_S = 0.02, 0.5, 5.0
_BUSY_S = 3.0  # after which one is told that the others do not answer
_START_S = 300.0  # for the launchers of all hosts to be started
_MOST, _PIECE = 1 << 20, 1 << 12  # bytes of a message, and of what is read and not kept
_WORD = 32  # hexadecimal digits
_BACKLOG, _REFUSALS = 1024, 60
_KEPT_ALIVE = {"SO_KEEPALIVE": 1, "TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 5000}
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def places_of(hosts: str) -> list[tuple[str, int]]:
    """The addresses and ports of HOST[:PORT],...

    Raises:
        ValueError: It is no such list.
    """
    try:
        parts = [urlsplit(f"//{each.strip()}") for each in hosts.split(",")]
        places = [(part.hostname or "", part.port or _PORT) for part in parts]
    except ValueError:
        places = []
    if not all(name for name, _ in places) or len(set(places)) != len(places) or not places:
        raise ValueError(f"train: hosts={hosts!r} is not HOST[:PORT],... with each host once; an IPv6 address has []")
    return places


def _is_loopback(place: tuple[str, int]) -> bool:
    """Whether this host alone is reached at ``place``; where a name is unknown, its host is as well another."""
    try:
        return ip_address(str(socket.getaddrinfo(*place, type=socket.SOCK_STREAM)[0][4][0])).is_loopback
    except OSError:
        return False


class Launchers:
    """This launcher among those of its run.

    Args:
        hosts: The list, the same on each host; this host is the one whose address is its own.

    Raises:
        ValueError: This host is not in it, or by a name of a loopback address; or something else listens there.

    Attributes:
        own: This host's number in the list.
    """

    def __init__(self, hosts: str) -> None:
        self.places = places_of(hosts)
        self.own, self._listener = self._listen(hosts)
        secret.check_several_hosts(warns=self.own == 0)
        self._leads = True
        self._said: dict[int, Said] = {}
        self._talks: dict[int, asyncio.Task[None]] = {}
        self._decision: asyncio.Future[Said]

    def _listen(self, hosts: str) -> tuple[int, socket.socket]:
        for number, place in enumerate(self.places):
            try:
                family, *_, address = socket.getaddrinfo(*place, type=socket.SOCK_STREAM)[0]
                if address[0] != place[0] and _is_loopback(place) and not all(map(_is_loopback, self.places)):
                    raise ValueError(
                        f"train: hosts: {place[0]} is {address[0]} on this host, which no other host reaches; name this"
                        " host by the address that others reach, or mend its /etc/hosts"
                    )
                return number, socket.create_server(address[:2], family=family, backlog=_BACKLOG)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise ValueError(
                        f"train: hosts: another program listens at {place[0]}:{place[1]}, such as another run; give"
                        " each run a port of its own: HOST:PORT,..."
                    ) from None
        raise ValueError(f"train: hosts={hosts}: none of them is this host; name each by the address that others reach")

    def meeting_place(self) -> tuple[str, int]:
        """This host's address, and a port that is free there."""
        address = self._listener.getsockname()[0]
        with socket.create_server((address, 0), family=self._listener.family) as free:
            return address, free.getsockname()[1]

    def agree(self, said: Said, decide: Callable[[dict[int, Said]], Said]) -> Said:
        """What all launchers do next. Each that lives calls it.

        Args:
            said: What this one has to say; ``ran``: whether it has had ranks.
            decide: Gives the decision, from what each host that is there has said; called where this host leads.

        Raises:
            axo.Timeout: A host has not been started; names it. axo.Error: The leader does not believe this one.
        """
        return asyncio.run(self._agree(said, decide))

    async def _agree(self, said: Said, decide: Callable[[dict[int, Said]], Said]) -> Said:
        loop = asyncio.get_running_loop()
        self._said, self._talks, self._leads, self._decision = {self.own: said}, {}, True, loop.create_future()
        began, tried, refused, every = loop.time(), -_AGAIN_S, 0, range(len(self.places))
        lines: dict[int, _Streams] = {}  # to other hosts
        self._answered = False

        def tell() -> None:
            if lines and not said["ran"] and not self._answered:
                names = ", ".join(self.places[host][0] for host in sorted(lines))
                print(
                    f"axo: {names}: there, but its ranks are at work; this host waits until they end, for example"
                    " as the file ranks in the run's folder there says how many it is to have",
                    flush=True,
                )

        telling = loop.call_later(_BUSY_S, tell)
        server = await asyncio.start_server(self._hear, sock=self._listener.dup(), limit=_MOST, backlog=_BACKLOG)
        try:
            while True:
                ran = any(each["ran"] for each in self._said.values())
                lines = {host: line for host, line in lines.items() if not line[0].at_eof()}
                absent = [host for host in every if host not in self._said and host not in lines]
                if absent and (tried < began or not (ran and self._leads)) and loop.time() - tried >= _AGAIN_S:
                    reached = zip(absent, await asyncio.gather(*map(self._reach, absent)), strict=True)
                    lines |= {host: line for host, line in reached if line is not None}
                    tried = loop.time()
                self._leads = min([self.own, *lines]) == self.own
                if not self._leads:
                    for talk in self._talks.values():
                        talk.cancel()  # they find the leader
                    self._said, self._talks = {self.own: said}, {}
                    leader = min(lines)
                    with contextlib.suppress(OSError, ValueError, secret.Stranger):
                        return await self._follow(*lines[leader], said)
                    lines.pop(leader)[1].close()
                    refused += 1
                    if refused == _REFUSALS:
                        raise Error(
                            f"train: hosts: {self.places[leader][0]} does not agree with this host; do both have the"
                            " same AXO_SECRET or AXO_SECRET_FILE, or none, and the same list of hosts?"
                        )
                    await asyncio.sleep(_LOOK_S)
                    continue
                awaited = [host for host in every if host not in self._said and (host in lines or not ran)]
                if not awaited:
                    self._decision.set_result(decide(dict(sorted(self._said.items()))))
                    if self._talks:
                        await asyncio.wait(self._talks.values(), timeout=_TELL_S)
                    return self._decision.result()
                busy = lines.keys() - self._said.keys()  # they are there, and come when their ranks have ended
                if not ran and not busy and loop.time() - began > _START_S:
                    names = ", ".join(self.places[host][0] for host in awaited)
                    raise Timeout(f"train: hosts: {names} did not come within {_START_S:.3g} s; start it there, too")
                await asyncio.sleep(_LOOK_S)
        finally:
            telling.cancel()
            server.close()
            for _, writer in lines.values():
                writer.close()

    async def _reach(self, host: int) -> _Streams | None:
        for _ in range(_TRIES):  # a packet may be lost
            with contextlib.suppress(TimeoutError):
                try:
                    async with asyncio.timeout(_ANSWER_S):
                        reader, writer = await asyncio.open_connection(*self.places[host], limit=_MOST)
                except OSError as error:
                    if isinstance(error, TimeoutError):
                        raise
                    return None
                _keep_alive(writer)
                return reader, writer
        return None

    async def _follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, said: Said) -> Said:
        """Tell the leader, once it comes, and hear what it has decided."""
        theirs, own = _word(await _line(reader)), secrets.token_hex(_WORD // 2)
        self._answered = True
        card = json.dumps(said | {"host": self.own, "word": own})
        writer.write(f"{secret.sealed(card, f'card {theirs}')}\n".encode())
        return json.loads(secret.opened((await _line(reader)).encode(), f"decision {theirs} {own}"))

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Where this host leads: hear what another has to say, and tell it what is decided."""
        _keep_alive(writer)
        task, own, host = asyncio.current_task(), secrets.token_hex(_WORD // 2), -1
        assert task is not None
        try:
            writer.write(f"{own}\n".encode())
            card = json.loads(secret.opened((await _line(reader)).encode(), f"card {own}"))
            place = f"decision {own} {_word(card['word'])}"
            if not self._leads or card["host"] not in range(len(self.places)):
                return
            host = card["host"]
            self._said[host], self._talks[host], self._answered = card, task, True
            asyncio.create_task(_end(reader)).add_done_callback(lambda _: task.cancel())  # it has ended
            decision = json.dumps(await asyncio.shield(self._decision))
            writer.write(f"{secret.sealed(decision, place)}\n".encode())
            await writer.drain()
        except (OSError, ValueError, KeyError, TypeError, secret.Stranger, asyncio.CancelledError):
            if self._talks.get(host) is task and not self._decision.done():
                del self._said[host], self._talks[host]
        finally:
            writer.close()


async def _line(reader: asyncio.StreamReader) -> str:
    """The next line of one that lives. Raises ConnectionError where the connection ends."""
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise ConnectionError(errno.ECONNRESET, "it has closed the connection")
    return line[:-1].decode(errors="replace")


async def _end(reader: asyncio.StreamReader) -> None:
    """Until the connection ends; what still comes is not kept."""
    while await reader.read(_PIECE):
        pass


def _word(text: str) -> str:
    """A word to seal with. Raises ValueError where it is none."""
    if not re.fullmatch(rf"[0-9a-f]{{{_WORD}}}", text):
        raise ValueError("it is no word of a launcher")
    return text


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    """Have the kernel end a connection to a host that answers nothing."""
    connection = writer.get_extra_info("socket")
    for name, value in _KEPT_ALIVE.items():
        level = socket.SOL_SOCKET if name.startswith("SO_") else socket.IPPROTO_TCP
        connection.setsockopt(level, getattr(socket, name), value)
