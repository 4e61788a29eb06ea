"""How ranks meet through torch.distributed's store, before there is any other connection between them.

    store = store_of_this_start(store, rank, size, seconds)         # nothing that dead ranks have left
    texts = Meeting(store, rank, size, who, left).gather("place", text)  # what each rank says; every rank has come

A rank that waits looks at the store now and then (``check``; a ``wait`` of the store with a time limit prints a warning
of torch's for each limit that passes, and raises another error for each kind of store). It learns of a rank that died,
where both are on one host, and of one that gave up.

Starts. torchrun may start its ranks several times (``--max-restarts``), and gives them the same store each time. What
an earlier start has left there does harm: Gloo waits for the addresses of dead ranks, and a count is too low where a
rank was killed before it counted. torchrun's number of a start does not help, since each host counts for itself. So the
ranks agree on a name:

    rank r      hello/r = a new word of its own;       waits for start/<word>;     come/<name>/r
    rank 0      start/<word> = the name, for every word that it sees, until each rank has come under that name

and keep all else under it. A word that a dead rank left gets an answer that nobody reads.

Life. A rank writes its process and thread into the store and others look at ``/proc``. That works inside one
process-id namespace of Linux; a rank of another one, or of another host, can only be missed.
"""

from __future__ import annotations

import functools
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from axo import __version__
from axo.comm import secret
from axo.comm.extension import _C
from axo.errors import Error, PeerLost, Timeout, raised
from axo.launch import STORE

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05  # between looks at the store
_CLOSER_LOOK_S = 0.25  # between looks at who has come, and who has died
_UNPROVED = (
    "does not prove that it knows this rank's secret; every rank of a job has the same AXO_SECRET or AXO_SECRET_FILE,"
    " or none has one"
)
_NOT_COME = "they died at start-up, or call something else first"


class TimeLeft:
    """How long a rank may still wait, where several waits share one limit.

    Args:
        seconds: The limit, from now on.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def __call__(self) -> float:
        """Seconds, at least 0.1: what has come already is still found."""
        return max(self._end - time.monotonic(), 0.1)


def launchers_store(rank: int, world_size: int, seconds: float) -> dist.Store:
    """The file that ``axo.launch`` names, else the store at MASTER_ADDR and MASTER_PORT.

    The latter is opened here where this is rank 0 and no launcher has opened it.

    Raises:
        ValueError: The variables are missing, or no port. Timeout: Nobody answers there within ``seconds``, or not all
            ranks have come.
    """
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    launch, _, file = os.environ.get(STORE, "").partition(" ")
    if file and launch == port:  # not where a rank of axo.launch has started torchrun, which gives a port of its own
        return dist.FileStore(file, -1)  # -1: its folder is removed by who made it
    if not address or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(
            f"connect: RANK and WORLD_SIZE are set, but MASTER_ADDR={address!r} and MASTER_PORT={port!r} do not name a"
            " place to meet; start the ranks with torchrun, or set all four"
        )
    who = f"connect (rank {rank} of {world_size})"
    opens = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    left = TimeLeft(seconds)
    problem = _on_a_thread(lambda: _no_listener(address, int(port), opens, seconds), seconds + 1)
    if problem != "":
        raise Timeout(
            f"{who}: no store answers at {address}:{port} within {seconds:.3g} s"
            f" ({problem or 'the name is being looked up'}); MASTER_ADDR and MASTER_PORT name the host of rank 0 and a"
            " port that is open there"
        )
    limit = left()
    place = f"env://?rank={rank}&world_size={world_size}"  # a launcher may not say them in the environment
    opened = _on_a_thread(lambda: next(iter(dist.rendezvous(place, timeout=timedelta(seconds=limit))))[0], limit + 1)
    if isinstance(opened, dist.Store):
        return opened
    if opened is not None and not isinstance(opened, RuntimeError):
        raise opened
    why = "what listens there does not answer as a store does" if opened is None else str(opened).splitlines()[0]
    if "EADDRINUSE" in why:
        raise Timeout(f"{who}: another program listens at {address}:{port}; give a MASTER_PORT that is free there")
    raise Timeout(
        f"{who}: not all ranks reached the store at {address}:{port} within {seconds:.3g} s; a rank died at start-up,"
        f" or never came ({why})"
    )


@functools.cache
def _program() -> str:
    """What ranks must have in common: Axo, the sources of its extension, and torch."""
    return f"axo {__version__} of sources {_C.sources_digest}, torch {torch.__version__}"


def _on_a_thread(call: Callable[[], Any], seconds: float) -> Any:
    """What ``call`` has returned or raised after ``seconds``; None: it still waits, as it has no limit of its own.

    The look-up of a name has none, nor has torch where a stranger listens and is silent.
    """
    ended: list[Any] = []

    def run() -> None:
        try:
            ended.append(call())
        except Exception as error:
            ended.append(error)

    thread = threading.Thread(target=run, name="axo store", daemon=True)
    thread.start()
    thread.join(seconds)
    return ended[0] if ended else None


def _no_listener(address: str, port: int, opens: bool, seconds: float) -> str:
    """Why nobody listens there after ``seconds``; "" when somebody does, or when this rank may open the port."""
    problem = ""
    for waited in _looks():
        try:
            socket.create_connection((address, port), max(seconds - waited, 0.1)).close()
            return ""
        except OSError as error:  # an unknown name, no way there, nobody
            problem = "" if opens and isinstance(error, ConnectionRefusedError) else str(error)
        if not problem or waited >= seconds:
            break
    return problem


class Meeting:
    """Ranks that meet in a store, at places: prefixes of keys that they use for nothing else, again and again.

    Args:
        store: Where.
        rank: This one.
        size: How many there are.
        who: Begins every error.
        left: How long this rank may still wait.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, who: str, left: TimeLeft) -> None:
        self.store, self.rank, self.size, self.who, self.left = store, rank, size, who, left

    def round(self, place: str) -> str:
        """The name of a meeting at ``place``: it ends with how often this rank has met there, which all agree on."""
        return f"{place}/{self.store.add(f'{place}/{self.rank}', 1)}"

    def give_up(self, round_: str, error: Exception) -> None:
        """Tell those who wait in this round, or will, what this rank has raised."""
        secret.leave(self.store, f"{round_}/gave up", f"{self.rank} {raised(error)}")

    def given_up(self, round_: str) -> PeerLost | None:
        """What the others of a round get when a rank has given up in it; None: none has."""
        if not self.store.check([f"{round_}/gave up"]):
            return None
        try:
            rank, _, error = secret.read(self.store, f"{round_}/gave up").partition(" ")
        except secret.Stranger:
            return None
        return PeerLost(f"{self.who}: rank {rank} {error}", int(rank))

    def gather(self, place: str, text: str = "", hint: str = "", within: str = "") -> list[str]:
        """Leave ``text`` in the store and give the texts of all ranks, in their order. Collective.

        ``hint`` ends the error of a rank that did not come. ``within``: a round that this is a part of; who gives up in
        that is heard here too.

        Raises:
            Timeout: Ranks have not come in time; names them. PeerLost: One came and died meanwhile, or gave up; says
                why. ValueError: They run different versions of Axo or torch.
        """
        store, round_, seconds = self.store, self.round(place), self.left()
        keys = [f"{round_}/{other}" for other in range(self.size)]
        secret.leave(store, keys[self.rank], f"{_C.this_thread()}\n{_program()}\n{text}")
        closer_look = 0.0  # at each rank; it costs the store a question a rank
        for waited in _looks():
            if store.check(keys):
                if store.check([f"{round_}/late"]):
                    came_late = "this rank came too late: the others waited in vain, and have given up"
                    raise Timeout(f"{self.who}: {came_late}{hint}")
                break
            if waited < min(seconds, closer_look):
                continue
            closer_look = waited + _CLOSER_LOOK_S * (1 + self.size // 32)
            arrived = {
                other: self._opened(store.get(key), key, other) for other, key in enumerate(keys) if store.check([key])
            }
            for each in filter(None, (round_, within)):
                if (gone := self.given_up(each)) is not None:
                    raise gone
            late = waited >= seconds or store.check([f"{round_}/late"])
            lost = [other for other, told in arrived.items() if _C.thread_gone(told.partition("\n")[0])]
            if lost and not late:
                if store.check(keys):  # all have come by now: that rank has read the texts and raised, or died later
                    continue
                died = f"rank {lost[0]} (process {arrived[lost[0]].partition(' ')[0]}) died before all had come"
                raise PeerLost(f"{self.who}: {died}; waited {waited:.3f} s", lost[0])
            if late and len(arrived) < self.size:
                store.set(f"{round_}/late", "")
                missing = [other for other in range(self.size) if other not in arrived]
                raise Timeout(f"{self.who}: ranks {missing} have not come within {waited:.3g} s; {_NOT_COME}{hint}")
        texts = zip(store.multi_get(keys), keys, range(self.size), strict=True)
        told = [(*self._opened(*each).split("\n", 2), "", "")[:3] for each in texts]  # an older Axo says less
        ranks: dict[str, list[int]] = {}
        for rank, (_, program, _) in enumerate(told):
            ranks.setdefault(program, []).append(rank)
        if len(ranks) > 1:
            each = "; ".join(f"ranks {', '.join(map(str, of_program))}: {name}" for name, of_program in ranks.items())
            raise ValueError(f"{self.who}: the ranks run different programs ({each}); install the same on every host")
        return [text for _, _, text in told]

    def _opened(self, data: bytes, key: str, rank: int) -> str:
        """What a rank has left in the store for the others."""
        try:
            return secret.opened(data, key)
        except secret.Stranger:
            raise Error(f"{self.who}: rank {rank} {_UNPROVED}") from None


def _looks() -> Iterator[float]:
    """The seconds that have passed, again and again with pauses between: a signal is handled then."""
    start, pause = time.monotonic(), _FIRST_PAUSE_S
    while True:
        yield time.monotonic() - start
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def may_be_repeated() -> bool:
    """Whether these ranks are torchrun's, and may be the second ones that use its store."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and restarts != "0"


def store_of_this_start(store: dist.Store, rank: int, world_size: int, seconds: float) -> dist.Store:
    """A view of the launcher's store that no earlier start has seen. Collective where starts may be repeated.

    Raises:
        Timeout: Ranks have not come within ``seconds``; rank 0 names them.
    """
    if world_size == 1 or not may_be_repeated():
        return store
    word = uuid.uuid4().hex
    if rank == 0:
        _lead(store, word, world_size, seconds)
        return dist.PrefixStore(f"axo/started/{word}", store)
    store.set(f"axo/hello/{rank}", word)
    for waited in _looks():
        if store.check([f"axo/start/{word}"]):
            break
        if waited >= seconds:
            raise Timeout(
                f"connect (rank {rank} of {world_size}): rank 0 has not come within {seconds:.3g} s; it died at"
                " start-up, or calls something else first"
            )
    try:
        name = secret.read(store, f"axo/start/{word}")
    except secret.Stranger:
        raise Error(f"connect (rank {rank} of {world_size}): rank 0 {_UNPROVED}") from None
    store.set(f"axo/come/{name}/{rank}", "1")
    return dist.PrefixStore(f"axo/started/{name}", store)


def _lead(store: dist.Store, name: str, world_size: int, seconds: float) -> None:
    """Tell ``name`` to every word that is there, until each rank has come under it."""
    missing = dict.fromkeys(range(1, world_size), "")  # rank: the word that was answered last
    for waited in _looks():
        for other, answered in list(missing.items()):
            if store.check([f"axo/come/{name}/{other}"]):
                del missing[other]
            elif store.check([f"axo/hello/{other}"]):
                word = store.get(f"axo/hello/{other}").decode()
                if word != answered:
                    secret.leave(store, f"axo/start/{word}", name)
                    missing[other] = word
        if not missing:
            return
        if waited >= seconds:
            raise Timeout(
                f"connect (rank 0 of {world_size}): ranks {sorted(missing)} have not come within {seconds:.3g} s;"
                f" {_NOT_COME}"
            )
