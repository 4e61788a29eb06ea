"""How ranks on several hosts connect to each other, each pair once, and prove that they belong to the job.

    connections = connect(meeting, identities)

Every rank listens on one address until all have come, then on none. Who connects must answer a challenge before what it
says is believed, and strangers cost the job nothing. The handshake:

    acceptor    nonce
    connector   rank, purpose, nonce, HMAC(key, "connector", both nonces, both ranks, purpose)
    acceptor    HMAC(key, "acceptor", the same)

The key is made of the job's secret (axo.comm.secret) and a word of this meeting, which rank 0 leaves in the store.

Two kinds of connections, as csrc/hosts/socket_wire.h wants them: to each rank one for its bytes; between two hosts, for
each of their ranks one (to the rank with the same number on the other host, modulo its ranks) for the pulse.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import hmac
import os
import random
import secrets
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch.distributed import PrefixStore, Store

from axo.comm import interfaces, secret
from axo.comm.rendezvous import Meeting
from axo.errors import Error, PeerLost, Timeout

_DATA, _PULSE = 0, 1  # the purpose of a connection
_WORD = 16  # bytes of a nonce
_CLAIM = struct.Struct(f"!IB{_WORD}s32s")  # rank, purpose, nonce, proof
_STRANGERS_WAIT_S = 5.0  # for the answer to a challenge
_MOST_STRANGERS = 32  # at a time, beside the ranks that may come
_RETRY_S, _LONGEST_RETRY_S, _LOOK_S, _PAUSE_S = 0.1, 2.0, 0.25, 0.002
_REFUSALS = 3  # of connections to a rank that has said where it listens, until it counts as lost
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")  # on the default route; nothing is sent there


class Connections(NamedTuple):
    """The descriptors of this rank's connections, by rank; -1 where there is none."""

    data: list[int]
    pulse: list[int]


def connect(meeting: Meeting, identities: Sequence[str]) -> Connections:
    """Connect this rank to all others. Collective over the ranks of a meeting.

    Args:
        meeting: The ranks, and where they meet.
        identities: By rank, the host that it is on (``_C.host_identity``).

    Raises:
        ValueError: The interface that is asked for does not exist.
        Timeout: Ranks could not be reached in time; names them, with host, address and reason.
        PeerLost: A rank has died or has given up meanwhile.
    """
    rank, size, who, left = meeting.rank, meeting.size, meeting.who, meeting.left
    if _one_machine(identities):
        own = "127.0.0.1"
    else:
        secret.check_several_hosts(warns=rank == 0)
        own = interfaces.own_address(_place_of(meeting.store))
    word = secrets.token_hex(_WORD) if rank == 0 else ""
    told = [text.split(" ") for text in meeting.gather(f"{own} {word}")]
    addresses = [address for address, _ in told]
    address = addresses[rank] or _address_towards(addresses, who)
    key = hashlib.sha256(secret.of_job() + told[0][1].encode() + meeting.round.encode()).digest()
    wanted = {(p, _DATA) for p in range(size) if p != rank}
    wanted |= {(p, _PULSE) for p in _pulse_partners(rank, identities)}
    at_once = _MOST_STRANGERS + sum(p > rank for p, _ in wanted)
    try:
        listener = socket.create_server((address, 0), family=_family(address), backlog=at_once)
    except OSError as error:
        raise Error(f"{who}: {address} cannot be listened on: {error.strerror}; AXO_INTERFACE names another") from None
    with listener:
        text = f"{address} {listener.getsockname()[1]}"
        places = [text.split(" ") for text in meeting.gather(text)]
        peers = _Peers(rank, key, [(at, int(port)) for at, port in places], listener, wanted, at_once)
        thread = threading.Thread(target=peers.run, args=(left(),), name="axo wire", daemon=True)
        thread.start()
        try:
            while not peers.tried.wait(_LOOK_S):
                meeting.check()
            peers.raise_failure(who, identities)
            meeting.gather()
        except BaseException as error:
            if isinstance(error, (PeerLost, Timeout)):
                meeting.give_up(error)
            peers.end(thread)
            peers.close()
            raise
        peers.end(thread)
    return Connections(*([peers.take(p, purpose) for p in range(size)] for purpose in (_DATA, _PULSE)))


def _one_machine(identities: Sequence[str]) -> bool:
    """Whether one machine plays several hosts."""
    return len({identity.partition(" ")[2] for identity in identities}) == 1


def _pulse_partners(rank: int, identities: Sequence[str]) -> list[int]:
    """The ranks with which this rank shares the pulse of their hosts."""
    ranks: dict[str, list[int]] = {}
    for each, identity in enumerate(identities):
        ranks.setdefault(identity, []).append(each)
    own = ranks.pop(identities[rank])
    number = own.index(rank)
    partners = []
    for others in ranks.values():
        partners += [p for i, p in enumerate(others) if i == number % len(others) or i % len(own) == number]
    return sorted(partners)


def _place_of(store: Store) -> str:
    """The host of a store; "" where it has none."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return getattr(store, "host", "") or os.environ.get("MASTER_ADDR", "")


def _address_towards(addresses: Sequence[str], who: str) -> str:
    """The address of this host, where the place of meeting is this host itself: the one on the way to another."""
    for other in (*filter(None, addresses), *_ELSEWHERE):
        if address := interfaces.address_towards(other):
            return address
    raise Error(
        f"{who}: no network leads from this host to the others; AXO_INTERFACE names the interface to use"
        f" (there are {', '.join(interfaces.names())})"
    )


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


@dataclass
class _Peers:
    """The connections of one rank while they are made, on a thread with an event loop of its own."""

    rank: int
    key: bytes
    places: list[tuple[str, int]]
    listener: socket.socket
    wanted: set[tuple[int, int]]
    at_once: int  # connections whose challenge is not answered yet; of more, the one that has waited longest goes
    connected: dict[tuple[int, int], socket.socket] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)  # why a rank is not reached, as tried last
    refusals: Counter[int] = field(default_factory=Counter)  # of a rank that listened before
    failure: BaseException | None = None
    tried: threading.Event = field(default_factory=threading.Event)  # all are connected, or it has failed
    _over: threading.Event = field(default_factory=threading.Event)

    def run(self, seconds: float) -> None:
        try:
            asyncio.run(self._connect_all(seconds))
        except BaseException as error:
            self.failure = error
        self.tried.set()

    def end(self, thread: threading.Thread) -> None:
        self._over.set()
        thread.join()

    def close(self) -> None:
        for connection in self.connected.values():
            connection.close()

    def take(self, rank: int, purpose: int) -> int:
        connection = self.connected.pop((rank, purpose), None)
        if connection is None:
            return -1
        connection.setblocking(True)
        return connection.detach()

    def missing(self) -> list[int]:
        return sorted({rank for rank, purpose in self.wanted if (rank, purpose) not in self.connected})

    def raise_failure(self, who: str, identities: Sequence[str]) -> None:
        if isinstance(self.failure, OSError) and self.failure.errno == errno.EMFILE:
            raise Error(
                f"{who}: connections to {len(self.wanted)} ranks need as many files; raise the limit (ulimit -n)"
            )
        if self.failure is not None:
            raise self.failure
        if not (missing := self.missing()):
            return
        gone = [rank for rank in missing if self.refusals.get(rank, 0) >= _REFUSALS]
        each = [
            f"rank {rank} (host {identities[rank].partition(' ')[0]}, {self.places[rank][0]}:{self.places[rank][1]}:"
            f" {self.reasons.get(rank, 'it has not connected to this rank')})"
            for rank in gone or missing
        ]
        hint = "AXO_INTERFACE names the interface that reaches the other hosts"
        if gone:
            raise PeerLost(
                f"{who}: {each[0]} listens no more: it has ended, or another host has its address; {hint}", gone[0]
            )
        raise Timeout(f"{who}: no connection to {', '.join(each)}; {hint}")

    async def _connect_all(self, seconds: float) -> None:
        self.listener.setblocking(False)
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        tasks = [asyncio.create_task(self._accept_all())]
        tasks += [asyncio.create_task(self._reach(*each)) for each in self.wanted]
        try:
            # A rank that has all goes on to answer until the others have all: one of them may have to try again.
            while not self._over.is_set():
                await asyncio.sleep(_PAUSE_S)
                for task in tasks:
                    if task.done():
                        task.result()
                lost = any(times >= _REFUSALS for times in self.refusals.values())
                if len(self.connected) == len(self.wanted) or lost or loop.time() >= until:
                    self.tried.set()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept_all(self) -> None:
        """Challenge whoever comes; of strangers at most so many at a time."""
        loop = asyncio.get_running_loop()
        waiting: dict[asyncio.Task[None], None] = {}
        while True:
            if len(waiting) >= self.at_once:
                oldest = next(iter(waiting))
                oldest.cancel()
                await asyncio.wait([oldest])
            try:
                connection, _ = await loop.sock_accept(self.listener)
            except OSError as error:
                if error.errno == errno.EMFILE and not waiting:
                    raise
                if waiting:  # there are no more files, or no more memory
                    next(iter(waiting)).cancel()
                await asyncio.sleep(0.01)
                continue
            connection.setblocking(False)
            task = asyncio.create_task(self._challenge(connection))
            waiting[task] = None
            task.add_done_callback(lambda ended: waiting.pop(ended, None))

    async def _challenge(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with _closed_unless_kept(connection) as keep, contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_STRANGERS_WAIT_S):
                nonce = secrets.token_bytes(_WORD)
                await loop.sock_sendall(connection, nonce)
                peer, purpose, theirs, proof = _CLAIM.unpack(await _read(connection, _CLAIM.size))
                if not hmac.compare_digest(proof, self._proof(b"connector", nonce, theirs, peer, self.rank, purpose)):
                    return
                if (peer, purpose) not in self.wanted or peer < self.rank:
                    return
                await loop.sock_sendall(connection, self._proof(b"acceptor", nonce, theirs, peer, self.rank, purpose))
            keep(self.connected, (peer, purpose))

    async def _reach(self, peer: int, purpose: int) -> None:
        """Connect to a lower rank until it answers; see now and then that a higher one, which has to come, listens."""
        loop = asyncio.get_running_loop()
        address, port = self.places[peer]
        pause = _RETRY_S
        while peer < self.rank or not await self._comes(peer, purpose):
            connection = socket.socket(_family(address), socket.SOCK_STREAM)
            connection.setblocking(False)
            with _closed_unless_kept(connection) as keep:
                try:
                    async with asyncio.timeout(_STRANGERS_WAIT_S):
                        await loop.sock_connect(connection, (address, port))
                        if peer > self.rank:
                            continue
                        nonce, own = await _read(connection, _WORD), secrets.token_bytes(_WORD)
                        proof = self._proof(b"connector", nonce, own, self.rank, peer, purpose)
                        await loop.sock_sendall(connection, _CLAIM.pack(self.rank, purpose, own, proof))
                        answer = await _read(connection, 32)
                    if hmac.compare_digest(answer, self._proof(b"acceptor", nonce, own, self.rank, peer, purpose)):
                        keep(self.connected, (peer, purpose))
                        return
                    self.reasons[peer] = "what answers there is not of this job"
                except TimeoutError:
                    self.reasons[peer] = "no answer"
                except OSError as error:
                    if error.errno == errno.EMFILE:
                        raise
                    self.reasons[peer] = error.strerror or "it has closed the connection"
                    self.refusals[peer] += isinstance(error, ConnectionRefusedError)
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))  # not all ranks at once
            pause = min(2 * pause, _LONGEST_RETRY_S)

    async def _comes(self, peer: int, purpose: int) -> bool:
        await asyncio.sleep(_LOOK_S)
        return (peer, purpose) in self.connected

    def _proof(self, role: bytes, nonce: bytes, theirs: bytes, connector: int, acceptor: int, purpose: int) -> bytes:
        text = role + nonce + theirs + struct.pack("!IIB", connector, acceptor, purpose)
        return hmac.digest(self.key, text, "sha256")


_Line = tuple[int, int]  # a rank, and the purpose of the connection to it


@contextlib.contextmanager
def _closed_unless_kept(
    connection: socket.socket,
) -> Iterator[Callable[[dict[_Line, socket.socket], _Line], None]]:
    """Closes a connection at the end, unless it was put into a dictionary, in place of an earlier one there."""
    kept = False

    def keep(connected: dict[_Line, socket.socket], place: _Line) -> None:
        nonlocal kept
        kept = True
        if (earlier := connected.get(place)) is not None:
            earlier.close()
        connected[place] = connection

    try:
        yield keep
    finally:
        if not kept:
            connection.close()


async def _read(connection: socket.socket, size: int) -> bytes:
    """Exactly ``size`` bytes. Raises ConnectionError when fewer come."""
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < size:
        part = await loop.sock_recv(connection, size - len(data))
        if not part:
            raise ConnectionError(errno.ECONNRESET, "it has closed the connection")
        data += part
    return data
