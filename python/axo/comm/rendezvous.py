"""How ranks meet through torch.distributed's store, before there is any other connection between them.

    store = store_of_this_start(store, rank, size, seconds)         # nothing that dead ranks have left
    texts = gather(store, "axo/connect", rank, size, seconds, ...)  # what each rank says; every rank has come

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

import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from axo.comm import secret
from axo.errors import Error, PeerLost, Timeout, raised

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05  # between looks at the store
_CLOSER_LOOK_S = 0.25  # between looks at who has come, and who has died
_EXITING = 4  # PF_EXITING in a thread's flags: set before the kernel frees the process's memory
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
    """The store at MASTER_ADDR and MASTER_PORT. Opened here where this is rank 0 and no launcher has opened it.

    Raises:
        ValueError: The variables are missing, or no port. Timeout: Nobody answers there within ``seconds``, or not all
            ranks have come.
    """
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(
            f"connect: RANK and WORLD_SIZE are set, but MASTER_ADDR={address!r} and MASTER_PORT={port!r} do not name a"
            " place to meet; start the ranks with torchrun, or set all four"
        )
    who = f"connect (rank {rank} of {world_size})"
    opens = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    left = TimeLeft(seconds)
    problem = _wait_for_listener(address, int(port), opens, seconds)
    if problem:
        raise Timeout(
            f"{who}: no store answers at {address}:{port} within {seconds:.3g} s ({problem}); MASTER_ADDR and"
            " MASTER_PORT name the host of rank 0 and a port that is open there"
        )
    limit = left()
    opened: list[dist.Store | Exception] = []

    def open_store() -> None:
        try:
            opened.append(next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=limit))))[0])
        except Exception as error:
            opened.append(error)

    # On a thread: where a stranger listens at that port and is silent, torch waits without a limit.
    thread = threading.Thread(target=open_store, name="axo store", daemon=True)
    thread.start()
    thread.join(limit + 1)
    found = opened[0] if opened else None
    if isinstance(found, dist.Store):
        return found
    if found is not None and not isinstance(found, RuntimeError):
        raise found
    why = "what listens there does not answer as a store does" if found is None else str(found).splitlines()[0]
    if "EADDRINUSE" in why:
        raise Timeout(f"{who}: another program listens at {address}:{port}; give a MASTER_PORT that is free there")
    raise Timeout(
        f"{who}: not all ranks reached the store at {address}:{port} within {seconds:.3g} s; a rank died at start-up,"
        f" or never came ({why})"
    )


def _wait_for_listener(address: str, port: int, opens: bool, seconds: float) -> str:
    """Why nobody listens there after ``seconds``; "" when somebody does, or when this rank may open the port."""
    problem = ["the name is being looked up"]

    def look() -> None:
        for waited in _looks():
            try:
                socket.create_connection((address, port), max(seconds - waited, 0.1)).close()
                problem.clear()
            except OSError as error:  # an unknown name, no way there, nobody
                problem[:] = [] if opens and isinstance(error, ConnectionRefusedError) else [str(error)]
            if not problem or waited >= seconds:
                return

    thread = threading.Thread(target=look, name="axo store", daemon=True)  # a look-up of a name has no time limit
    thread.start()
    thread.join(seconds + 1)
    return "".join(problem)


def gather(
    store: dist.Store, place: str, rank: int, size: int, seconds: float, who: str, text: str = "", hint: str = ""
) -> list[str]:
    """Leave ``text`` in the store and give the texts of all ranks, in their order. Collective.

    ``place``: a prefix of keys that these ranks use for nothing else; they may meet there again and again.
    ``who`` begins every error; ``hint`` ends that of a rank that did not come.

    Raises:
        Timeout: Ranks have not come within ``seconds``; names them. PeerLost: One came and died meanwhile, or gave up;
            says why.
    """
    round_ = next_round(store, place, rank)
    keys = [f"{round_}/{other}" for other in range(size)]
    secret.leave(store, keys[rank], f"{process_alive()}\n{text}")
    closer_look = 0.0  # at each rank; it costs the store a question a rank
    for waited in _looks():
        if store.check(keys):
            if store.check([f"{round_}/late"]):
                raise Timeout(f"{who}: this rank came too late: the others waited in vain, and have given up{hint}")
            told = store.multi_get(keys)
            return [_opened(data, keys, other, who).partition("\n")[2] for other, data in enumerate(told)]
        late = waited >= seconds
        if late or waited >= closer_look:
            closer_look = waited + _CLOSER_LOOK_S * (1 + size // 32)
            arrived = {
                other: _opened(store.get(key), keys, other, who) for other, key in enumerate(keys) if store.check([key])
            }
            if (gone := given_up(store, round_, who)) is not None:
                raise gone
            late = late or store.check([f"{round_}/late"])
            lost = [other for other, told in arrived.items() if process_gone(told.partition("\n")[0])]
            if lost and not late:
                if store.check(keys):  # all have come by now: that rank has read the texts and raised, or died later
                    continue
                process = arrived[lost[0]].partition(" ")[0]
                died = f"rank {lost[0]} (process {process}) died before all had come; waited {waited:.3f} s"
                raise PeerLost(f"{who}: {died}", lost[0])
            if late and len(arrived) < size:
                store.set(f"{round_}/late", "")
                missing = [other for other in range(size) if other not in arrived]
                raise Timeout(f"{who}: ranks {missing} have not come within {waited:.3g} s; {_NOT_COME}{hint}")
    raise AssertionError("looks do not end")


def _opened(data: bytes, keys: list[str], other: int, who: str) -> str:
    """What a rank has left in the store for the others."""
    try:
        return secret.opened(data, keys[other])
    except secret.Stranger:
        raise Error(
            f"{who}: rank {other} does not prove that it knows this rank's secret; every rank of a job has the same"
            " AXO_SECRET or AXO_SECRET_FILE, or none has one"
        ) from None


def give_up(store: dist.Store, round_: str, rank: int, error: Exception) -> None:
    """Tell those who wait in this round, or will, what this rank has raised."""
    secret.leave(store, f"{round_}/gave up", f"{rank} {raised(error)}")


def given_up(store: dist.Store, round_: str, who: str) -> PeerLost | None:
    """What the others of a round get when a rank has given up in it; None: none has."""
    if not store.check([f"{round_}/gave up"]):
        return None
    try:
        rank, _, error = secret.read(store, f"{round_}/gave up").partition(" ")
    except secret.Stranger:
        return None
    return PeerLost(f"{who}: rank {rank} {error}", int(rank))


def next_round(store: dist.Store, place: str, rank: int) -> str:
    """The name of a meeting at ``place``: it ends with how often this rank has met there, which is the same on all."""
    return f"{place}/{store.add(f'{place}/{rank}', 1)}"


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
    name = _lead(store, world_size, seconds) if rank == 0 else _follow(store, rank, world_size, seconds)
    return dist.PrefixStore(f"axo/started/{name}", store)


def _lead(store: dist.Store, world_size: int, seconds: float) -> str:
    name = uuid.uuid4().hex
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
            break
        if waited >= seconds:
            raise Timeout(
                f"connect (rank 0 of {world_size}): ranks {sorted(missing)} have not come within {seconds:.3g} s;"
                f" {_NOT_COME}"
            )
    return name


def _follow(store: dist.Store, rank: int, world_size: int, seconds: float) -> str:
    word = uuid.uuid4().hex
    store.set(f"axo/hello/{rank}", word)
    for waited in _looks():
        if store.check([f"axo/start/{word}"]):
            break
        if waited >= seconds:
            raise Timeout(
                f"connect (rank {rank} of {world_size}): rank 0 has not come within {seconds:.3g} s; it died at"
                " start-up, or calls something else first"
            )
    name = secret.read(store, f"axo/start/{word}")
    store.set(f"axo/come/{name}/{rank}", "1")
    return name


def process_alive() -> str:
    """What the calling thread tells of itself: its process, thread, and where these numbers mean something."""
    return f"{os.getpid()} {threading.get_native_id()} {_process_space()}"


def process_gone(told: str) -> bool:
    """Whether the thread that told this is no more. False where that cannot be known."""
    pid, tid, space = told.split(" ", 2)
    if space == "unknown" or space != _process_space():
        return False
    try:
        fields = Path(f"/proc/{pid}/task/{tid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    return fields[0] in "ZX" or bool(int(fields[6]) & _EXITING)


def _process_space() -> str:
    try:
        return os.readlink("/proc/self/ns/pid") + "@" + Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"
