"""How ranks meet through torch.distributed's store, before there is any other connection between them.

    store = store_of_this_start(store, rank, size, seconds)                # nothing that dead ranks have left
    texts = Meeting(store, "place", rank, size, who, left).gather(text)    # what each rank says; every rank has come

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

import contextlib
import functools
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from axo import __version__
from axo.comm import secret
from axo.comm.extension import _C
from axo.errors import Error, PeerLost, Timeout, raised
from axo.launch import STORE

_T = TypeVar("_T")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05  # between looks at the store
_PAUSE = 1 / 32  # of what has been waited: a rank sees so much later that the last one has come
_ANSWER_S = 5e-5  # of a store to one look, which all ranks take
_CLOSER_LOOK_S = 0.25  # between looks at who has died
_NEAR = 32  # ranks on either side that a rank looks after
_ALL, _LATE, _LOST, _OVER = "all", "late", "lost", "over"  # how a step ends; over: for a rank between two steps
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


def admit_nobody_else() -> None:
    """Where this process has opened the store at MASTER_PORT, and all ranks are connected to it: end its listening.

    torch listens there as long as a job runs, and every stranger that holds a connection costs it a descriptor. In the
    place of its socket comes a file on which nothing ever happens; torch closes that one at the end. For commands of
    Axo's own on CPUs: the process cannot open the store again, nor connect to it once more, as NCCL does when it likes.
    """
    port = int(os.environ.get("MASTER_PORT", "0"))
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed by now
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as own:
                of_network = own.family in (socket.AF_INET, socket.AF_INET6)
                listens = of_network and own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) != 0
                is_store = listens and own.getsockname()[1] == port
            if is_store:
                nothing = os.eventfd(0)
                os.dup2(nothing, int(name), inheritable=False)
                os.close(nothing)


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
    """Ranks that meet in a store: they take the same steps there, and hear who will not take the next one.

    Each step has one end, by whoever is first to see it: all have come, some have not in time, or a rank is lost. So a
    rank that waits asks the store for one key, however many ranks there are.

    Args:
        store: Where.
        place: A prefix of keys, used for nothing else; ranks may meet there again and again.
        rank: This one.
        size: How many there are.
        who: Begins every error.
        left: How long this rank may still wait.
    """

    def __init__(self, store: dist.Store, place: str, rank: int, size: int, who: str, left: TimeLeft) -> None:
        self.store, self.rank, self.size, self.who, self.left = store, rank, size, who, left
        self.round = f"{place}/{self._ask(store.add, f'{place}/{rank}', 1)}"  # how often this rank has met there
        self._step = 0
        self._threads: dict[int, str] = {}  # of ranks that have come, as they tell of themselves

    def gather(self, text: str = "", hint: str = "") -> list[str]:
        """Leave ``text`` in the store and give the texts of all ranks, in their order. Collective.

        ``hint`` ends the error of a rank that did not come.

        Raises:
            Timeout: Ranks have not come in time; names them. PeerLost: One came and died meanwhile, or gave up; says
                why. ValueError: They run different versions of Axo or torch. Error: One has another secret.
        """
        keys = self._keys()
        own = keys[self.rank]
        self._ask(self.store.set, own, secret.sealed(f"{_C.this_thread()}\n{_program()}\n{text}", own))
        if self._ask(self.store.add, f"{self.round}/{self._step}/came", 1) >= self.size:
            self._end(_ALL)
        self._await_end(keys, hint)
        self._step += 1
        told = zip(range(self.size), keys, self._ask(self.store.multi_get, keys), strict=True)
        cards = [(*self._opened(*each).split("\n", 2), "", "")[:3] for each in told]  # an older Axo says less
        ranks: dict[str, list[int]] = {}
        for rank, (_, program, _) in enumerate(cards):
            ranks.setdefault(program, []).append(rank)
        if len(ranks) > 1:
            each = "; ".join(f"ranks {', '.join(map(str, of_program))}: {name}" for name, of_program in ranks.items())
            raise ValueError(f"{self.who}: the ranks run different programs ({each}); install the same on every host")
        self._threads = {rank: thread for rank, (thread, _, _) in enumerate(cards) if rank != self.rank}
        return [text for _, _, text in cards]

    def give_up(self, error: Exception) -> None:
        """Tell those who take the next step, or will, what this rank has raised, or which one it has lost."""
        if isinstance(error, PeerLost):
            self._end(_LOST, error.peer, str(error).removeprefix(f"{self.who}: "))
        elif isinstance(error, Timeout):
            words = str(error).removeprefix(f"{self.who}: ")
            self._end(_OVER, self.rank, f"rank {self.rank} gave up: {words}")
        else:
            self._end(_LOST, self.rank, f"rank {self.rank} {raised(error)}")

    def lost(self) -> tuple[int, str] | None:
        """A rank that will not take the next step, and what is to be said of it; None: none is known.

        -1 for one whose own time is over, and for a store that does not answer.
        """
        try:
            kind, rank, words = self._end()
            if not kind and (gone := self._dead()) is not None:
                kind, rank, words = self._end(_LOST, *gone)  # a rank that has told why it ends has done so by now
        except (PeerLost, Timeout) as error:
            return getattr(error, "peer", -1), str(error).removeprefix(f"{self.who}: ")
        if kind == _OVER and rank != self.rank:
            return -1, words
        return (rank, words) if kind == _LOST else None

    def check(self) -> None:
        """Raises PeerLost when a rank will not take the next step, Timeout when that is as its time is over."""
        if (gone := self.lost()) is not None:
            rank, words = gone
            raise Timeout(f"{self.who}: {words}") if rank < 0 else PeerLost(f"{self.who}: {words}", rank)

    def _await_end(self, keys: list[str], hint: str) -> None:
        """Until all have come."""
        seconds, closer_look = self.left(), _CLOSER_LOOK_S
        for waited in _looks(self.size):
            kind, rank, words = self._end()
            if not kind and waited >= min(seconds, closer_look):
                closer_look = waited + _CLOSER_LOOK_S
                if self._step == 0:
                    self._learn(keys)
                if waited >= seconds:
                    absent = self._absent(keys)
                    missing = [other for other, key in enumerate(keys) if key in absent]
                    kind, rank, words = self._end(_LATE if missing else _ALL, words=f"ranks {missing} have not come")
                elif (gone := self._dead()) is not None:
                    said = f"{gone[1]} before all had come; waited {waited:.3f} s"
                    kind, rank, words = self._end(_LOST, gone[0], said)
            if kind == _ALL:
                return
            if kind == _LOST:
                raise PeerLost(f"{self.who}: {words}", rank)
            if kind == _OVER:
                raise Timeout(f"{self.who}: {words}")
            if kind == _LATE and re.search(rf"\b{self.rank}\b", words):
                words = "this rank came too late: the others waited in vain, and have given up"
                raise Timeout(f"{self.who}: {words}{hint}")
            if kind == _LATE:
                raise Timeout(f"{self.who}: {words} within {waited:.3g} s; {_NOT_COME}{hint}")

    def _end(self, kind: str = "", rank: int = -1, words: str = "") -> tuple[str, int, str]:
        """How this step has ended, in three parts: first of all so. Without ``kind`` it may be that it has not."""
        key = f"{self.round}/{self._step}/end"
        if kind:
            data = self._ask(self.store.compare_set, key, "", secret.sealed(f"{kind}\n{rank}\n{words}", key))
        elif self._ask(self.store.check, [key]):
            data = self._ask(self.store.get, key)
        else:
            return "", -1, ""
        try:
            kind, told, words = secret.opened(data, key).split("\n", 2)
        except secret.Stranger:
            self._threads.clear()
            self._learn(self._keys())  # names a rank that has another secret
            raise Error(f"{self.who}: what the store has at {key!r} {_UNPROVED}") from None
        return kind, int(told), words

    def _keys(self) -> list[str]:
        return [f"{self.round}/{self._step}/{rank}" for rank in range(self.size)]

    def _absent(self, keys: list[str]) -> list[str]:
        """Those of ``keys`` that are not in the store: of a few that are missing, a few questions."""
        if self._ask(self.store.check, keys):
            return []
        half = len(keys) // 2
        return keys if half == 0 else self._absent(keys[:half]) + self._absent(keys[half:])

    def _learn(self, keys: list[str]) -> None:
        """Which of the next ranks have come. Launchers number the ranks of a host one after the other."""
        near = {other % self.size for other in range(self.rank - _NEAR, self.rank + _NEAR + 1)} - {self.rank}
        unknown = [keys[other] for other in sorted(near - self._threads.keys())]
        for key in sorted(set(unknown) - set(self._absent(unknown))) if unknown else ():
            other = int(key.rpartition("/")[2])
            self._threads[other] = self._opened(other, key, self._ask(self.store.get, key)).partition("\n")[0]

    def _dead(self) -> tuple[int, str] | None:
        """A rank of this host that has come, and is no more."""
        where = _C.this_thread().split(" ")[2:]
        for rank, thread in self._threads.items():
            if thread.split(" ")[2:] == where and _C.thread_gone(thread):
                return rank, f"rank {rank} (process {thread.partition(' ')[0]}) died"
        return None

    def _opened(self, rank: int, key: str, data: bytes) -> str:
        """What a rank has left in the store for the others."""
        try:
            return secret.opened(data, key)
        except secret.Stranger:
            raise Error(f"{self.who}: rank {rank} {_UNPROVED}") from None

    def _ask(self, call: Callable[..., _T], *arguments: object) -> _T:
        """What the store answers, which may be gone."""
        try:
            return call(*arguments)
        except dist.DistStoreError as error:
            raise Timeout(f"{self.who}: the store does not answer ({str(error).splitlines()[0]})") from None
        except dist.DistError as error:
            why = str(error).splitlines()[0]
            said = f"the store has gone: rank 0, or its launcher, has ended ({why})"
            raise PeerLost(f"{self.who}: {said}", 0) from None


def _looks(ranks: int = 1) -> Iterator[float]:
    """The seconds that have passed, again and again with pauses between: a signal is handled then.

    ``ranks``: how many look at one time.
    """
    start, least = time.monotonic(), max(_FIRST_PAUSE_S, ranks * _ANSWER_S)
    while True:
        yield (waited := time.monotonic() - start)
        time.sleep(min(max(waited * _PAUSE, least), _LONGEST_PAUSE_S))


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
    for waited in _looks(world_size):
        if store.check([f"axo/start/{word}"]):
            break
        if waited >= seconds:
            raise Timeout(
                f"connect (rank {rank} of {world_size}): rank 0 has not come within {seconds:.3g} s; it died at"
                " start-up, or calls something else first"
            )
    name = store.get(f"axo/start/{word}").decode()  # whoever has said it, the ranks prove themselves where they meet
    store.set(f"axo/come/{name}/{rank}", "1")
    return dist.PrefixStore(f"axo/started/{name}", store)


def _lead(store: dist.Store, name: str, world_size: int, seconds: float) -> None:
    """Tell ``name`` to every word that is there, until each rank has come under it."""
    missing = dict.fromkeys(range(1, world_size), "")  # rank: the word that was answered last
    for waited in _looks(world_size):
        for other, answered in list(missing.items()):
            if store.check([f"axo/come/{name}/{other}"]):
                del missing[other]
            elif store.check([f"axo/hello/{other}"]):
                word = store.get(f"axo/hello/{other}").decode()
                if word != answered:
                    store.set(f"axo/start/{word}", name)
                    missing[other] = word
        if not missing:
            return
        if waited >= seconds:
            raise Timeout(
                f"connect (rank 0 of {world_size}): ranks {sorted(missing)} have not come within {seconds:.3g} s;"
                f" {_NOT_COME}"
            )
