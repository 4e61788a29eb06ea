"""Start a function on N local ranks, and turn whatever goes wrong into one message.

TorchElastic launches and watches the ranks (``torch.distributed.launcher``). On a CPU they are forked from this process
after its imports, so eight of them cost little; that is safe only because this process never runs a parallel torch
operation and each rank sets its thread count before anything else. With a GPU they are spawned.

Each rank that fails writes a report. Where several fail, the cause is shown, not its consequences: an error of a rank's
own comes first, then a rank that a signal killed, then a peer that was lost. A signal (Ctrl-C, SIGTERM) ends all ranks.
With ``launch_local(..., terminate=True)`` ranks get SIGTERM, or the first Ctrl-C, too, and end in their own time
(``Termination``); one that is stopped (SIGSTOP) goes on for that. The next Ctrl-C ends them at once. A launcher that
dies takes its ranks with it.
The ranks meet at a store that listens on the loopback interface alone; torch's own listens on all of them. Under
torchrun nothing is launched: the process is a rank already, and the store is where torchrun put it.

Long because what a launch starts, what signals do to it and what it says of its end are read together.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import functools
import gc
import json
import logging
import multiprocessing
import os
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple

from axo import files, slurm
from axo.cores import usable_cores
from axo.errors import Aborted, PeerLost, ResourceError, Timeout, user_message

STORE = "AXO_STORE"  # of a rank's environment: the MASTER_PORT of its launch, and the file where its ranks meet
_IN_A_FILE = "axo-file"
_FOLDER = "axo-ranks-"  # how a launch's folder begins
_LOCK = ".launcher"  # a file in it, locked while the launcher or a rank that it has forked lives
_SHM = "/dev/shm"
_TOLD = "TORCHELASTIC_SIGNALS_TO_HANDLE"
_ASKED = "asked-to-end"  # a file among the reports: the signal's number
_LOST = "lost"  # another one: what a second Ctrl-C costs, in words
CONSEQUENCES = (PeerLost, Aborted)  # of what another rank did
_HOST_LOST = "is lost: its host"  # in the PeerLost of a host that answers nothing: no cause will be told
_GLOO_LOST_A_PEER = "gloo/transport"  # in the RuntimeError of torch's own collectives: trainers call some
_FREE_FILES = 16
_SIGNAL_AT_PARENTS_DEATH = 1  # PR_SET_PDEATHSIG of linux/prctl.h
_GRACE_SECONDS = 5  # for ranks to end after a signal, before SIGKILL
_CAUSE_FIRST_SECONDS = 1.0  # a rank that lost a peer waits this long, so that the launcher meets the cause first


class Interrupted(KeyboardInterrupt):
    """A signal ended a launch; all its ranks have ended.

    Attributes:
        signal: Its number.
        lost: What was not saved, in words; "": unknown, or nothing is saved.
    """

    def __init__(self, number: int, lost: str = "") -> None:
        super().__init__(signal.Signals(number).name)
        self.signal, self.lost = number, lost


# Called in a rank of ``launch_local`` when its function has returned; what they raise is the rank's error. atexit would
# not do: it runs nothing in forked processes.
BEFORE_A_RANK_ENDS: list[Callable[[], None]] = []
_reports: list[Path] = []  # of the launch of which this process is a rank


class RankFailed(RuntimeError):
    """A rank did not finish.

    Attributes:
        rank: Which.
        user_error: True when the message explains all (``axo.errors.user_message``): a traceback would only hide it.
        trace: The rank's traceback, or "".
        lost: The rank died without an error of its own, and nobody had asked for the end: another start may do better.
        signal: The number of the signal that killed it; 0: none did.
        consequence: It ended as a rank of another host did.
    """

    consequence = False

    def __init__(
        self, message: str, *, rank: int, user_error: bool = False, trace: str = "", lost: bool = False, signal: int = 0
    ) -> None:
        super().__init__(message)
        self.rank, self.user_error, self.trace, self.lost, self.signal = rank, user_error, trace, lost, signal


class Part(NamedTuple):
    """Which ranks of a run on several hosts, ``world`` in all, a launch starts, and where rank 0 opens the store."""

    first: int
    world: int
    address: str
    port: int


@dataclass(frozen=True)
class Rank:
    """Who this process is among the ranks of a launch."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def from_environment(cls) -> Rank | None:
        """Read what torchrun or SLURM sets; None outside of them.

        Raises:
            ValueError: The variables are no ranks.
        """
        slurm.adopt()
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            alone = os.environ.get("RANK", "0").strip().removeprefix("-")
            if not alone.isdecimal():  # nobody asks for it, but Lightning reads it with int() when it is imported
                raise ValueError(f"RANK={os.environ['RANK']!r} is not a whole number; without WORLD_SIZE, unset it")
            return None
        rank = _whole_number("RANK")
        world = _whole_number("WORLD_SIZE")
        if world < 1:
            raise ValueError(f"WORLD_SIZE={world} is no number of ranks; a launcher, such as torchrun, sets it")
        if rank >= world:
            raise ValueError(f"RANK={rank} is not a rank of WORLD_SIZE={world}; use 0 to {world - 1}")
        local, local_world = _whole_number("LOCAL_RANK", rank), _whole_number("LOCAL_WORLD_SIZE", world)
        if local_world < 1:
            raise ValueError(
                f"LOCAL_WORLD_SIZE={local_world} is no number of ranks; a launcher, such as torchrun, sets it"
            )
        return cls(rank, world, local, local_world)


def _whole_number(name: str, default: int = 0) -> int:
    text = os.environ.get(name, str(default))
    if not text.strip().isdecimal():
        raise ValueError(f"{name}={text!r} is not a whole number of at least 0; a launcher, such as torchrun, sets it")
    return int(text)


def record_failure(error: BaseException) -> None:
    """Under torchrun: leave ``error`` where its report of the first failure finds it (TORCHELASTIC_ERROR_FILE)."""
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        try:
            raise error  # the handler writes the traceback of what is being handled
        except BaseException:
            get_error_handler().record_exception(error)


@functools.cache
def let_the_cause_end_first() -> None:
    """Under torchrun or ``launch``, before a rank ends with what another one's error has caused: wait, once.

    Torchrun ends the others, and reports, as soon as it sees one that has ended.
    """
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        time.sleep(_CAUSE_FIRST_SECONDS)


def set_threads(threads: int, local_ranks: int) -> None:
    """Give this rank ``threads`` CPU threads; 0: its share of the cores, at least one. Call before any operation.

    Never more than OMP_THREAD_LIMIT allows: a product that gets fewer threads than torch has asked for leaves parts of
    its result as they were in memory (seen with oneDNN's bf16 products on AMX).

    Raises:
        ValueError: ``threads`` is above that limit.
    """
    import torch

    given = os.environ.get("OMP_THREAD_LIMIT", "").strip()
    limit = int(given) if given.isdecimal() and int(given) else sys.maxsize
    if threads > limit:
        raise ValueError(f"threads={threads} is above OMP_THREAD_LIMIT={given}: take fewer, or unset that variable")
    torch.set_num_threads(threads or min(limit, max(1, usable_cores() // local_ranks)))


def keep_freed_memory() -> None:
    """Let malloc keep what a step frees on the CPU for the next one, as it does once a block of 32 MiB has been freed.

    Before that, glibc returns freed blocks to the system sooner (its thresholds begin at 128 KiB and grow with the
    largest block freed), and a step pays for a page fault in every 4 KiB of activations that it writes. Nor are small
    blocks put aside unmerged (fastbins): each large block that a step frees would merge them all again. Thresholds that
    are set from outside hold.
    """
    asked = "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"
    if any(name in os.environ for name in asked) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not every C library has it
    if mallopt is not None:
        largest_put_aside, trim, mmap = 1, -1, -3  # M_MXFAST, M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
        mallopt(mmap, 32 << 20)
        mallopt(trim, 64 << 20)
        mallopt(largest_put_aside, 0)


class Termination:
    """A context of a rank in which the first SIGTERM, SIGINT (Ctrl-C) or SIGUSR1 is only noted; a later one ends it.

    SLURM sends SIGUSR1 before a job's time is over (``--signal=USR1@120``). Where AXO_FLIGHT_DIR is set, that asks for
    the flight recorder's file instead.

    A second one within ``SAME_SIGNAL`` seconds counts as the first: ``timeout``, batch systems and terminals signal the
    whole process group, so the rank gets the signal directly and once more from its launcher, which passes it on.

    Attributes:
        asked: Whether it has come.
        by: What has come, in words: SIGTERM, Ctrl-C or SIGUSR1. number: Its number.
        progress: Gives the steps that are done and the newest checkpoint with its step, for the words of the end.
    """

    SAME_SIGNAL = 5.0

    @staticmethod
    def signals() -> list[signal.Signals]:
        """Those that are noted."""
        usr1 = [] if os.environ.get("AXO_FLIGHT_DIR") else [signal.SIGUSR1]
        return [signal.SIGTERM, signal.SIGINT, *usr1]

    def __init__(self) -> None:
        self.asked = False
        self.by, self.number = "SIGTERM", int(signal.SIGTERM)
        self.progress: Callable[[], tuple[int, Path | None, int]] | None = None
        self._since = 0.0

    def __enter__(self) -> Termination:
        for number in self.signals():
            signal.signal(number, self._note)
        return self

    def __exit__(self, *error: Any) -> None:
        for number in self.signals():
            signal.signal(number, signal.SIG_DFL)

    def _note(self, number: int, frame: Any) -> None:
        if not self.asked:
            self.asked, self.number, self._since = True, number, time.monotonic()
            self.by = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            if os.environ.get("RANK", "0") == "0":
                self.tell_lost()
                # Not print: the signal may have come while the stream's buffer is written.
                os.write(2, f"\n{self.by}: this step is finished and saved first; Ctrl-C again ends at once\n".encode())
        elif time.monotonic() - self._since > self.SAME_SIGNAL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def tell_lost(self) -> None:
        """Tell the launcher what would be lost if all ranks ended now."""
        if not (self.asked and _reports and self.progress):
            return
        done, checkpoint, step = self.progress()
        lost = f"steps lost: {done}, all of them; there is no checkpoint yet"
        if checkpoint is not None:
            lost = f"steps lost: {done - step}; the last checkpoint is {checkpoint}, of step {step}"
        Path(_reports[0], _LOST).write_text(lost)


def launch_local(
    function: Callable[..., Any],
    ranks: int,
    *args: Any,
    fork: bool = True,
    terminate: bool = False,
    noted: list[int] | None = None,
    part: Part | None = None,
) -> Any:
    """Run ``function(*args)`` on ``ranks`` new local ranks; return what rank 0 returned.

    Args:
        function: Runs on each rank.
        ranks: How many.
        args: For the function.
        fork: Fork the ranks; else spawn them.
        terminate: Pass SIGTERM and the first Ctrl-C on to the ranks and wait for them, as they end with
            :class:`Termination`; call it on the main thread then.
        noted: Gets the number of each signal that has come, also where the ranks ended well.
        part: They are these of a run on several hosts, each of which starts its own; None: they are all.

    Raises:
        ValueError: ``ranks`` is no number of ranks, or ``terminate`` is asked for on another thread.
        axo.errors.ResourceError: This process may not open the files that it takes.
        RankFailed: A rank raised or died; all others have been ended.
        Interrupted: A signal came, or nobody reads what rank 0 prints; all ranks have been ended.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"launch: ranks={ranks!r} is no number of ranks; use a whole number of at least 1")
    if terminate and threading.current_thread() is not threading.main_thread():
        raise ValueError("launch: terminate=True passes on a signal, which only the main thread gets; call it there")
    _check_files()
    rendezvous_handler_registry.register(_IN_A_FILE, _meet_in_a_file)
    elastic = "torch.distributed.elastic"
    for name in (elastic, f"{elastic}.agent.server.api", "torch.multiprocessing.spawn"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # it would print a traceback a rank; RankFailed says it once

    ended: list[int] = []  # by a second Ctrl-C

    def lost() -> str:
        told = Path(reports, _LOST)
        return told.read_text() if told.exists() else ""

    def end(number: int, frame: Any) -> None:
        if noted is not None:
            noted.append(number)
        first = not Path(reports, _ASKED).exists()
        again = terminate and number == signal.SIGINT and not first
        # Before anything is raised: what is raised while a destructor runs is lost.
        _pass_on(Path(reports), number, signal.SIGKILL if again else number)
        ended.extend([number] * again)
        if not terminate or again or number not in Termination.signals():
            raise SignalException(f"signal {number}", signal.Signals(number))

    # torch 2.11 knows no such field: ranks that are told to end have its 30 s there
    has_grace = "shutdown_timeout" in LaunchConfig.__dataclass_fields__
    grace: dict[str, Any] = {"shutdown_timeout": _GRACE_SECONDS} if has_grace else {}
    with own_folder() as reports:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id="axo",
            rdzv_backend=_IN_A_FILE,
            rdzv_endpoint="127.0.0.1:0",
            rdzv_configs={"folder": reports},
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.1,
            start_method="fork" if fork else "spawn",
            **grace,
            signals_to_handle="",  # they are handled here
            logs_specs=DefaultLogsSpecs(log_dir=str(Path(reports, "logs"))),  # else a folder is left in /tmp
        )
        try:
            with handled(end, Termination.signals() if terminate else ()):
                gc.collect()  # what earlier launches left (stores with threads) may end here, but not in a forked rank
                return elastic_launch(config, _rank_main)(reports, function, args, part)[0]
        except ChildFailedError as error:
            failures = {(part.first if part else 0) + rank: each.exitcode for rank, each in error.failures.items()}
            asked = int(Path(reports, _ASKED).read_text() or signal.SIGTERM) if Path(reports, _ASKED).exists() else 0
            if ended or (asked and -asked in failures.values()):  # the latter: before a rank noted it
                raise Interrupted(asked, lost()) from None
            told = [json.loads(path.read_text(encoding="utf-8")) for path in Path(reports).glob("*.json")]
            cause = _cause(told, failures)
            if asked and isinstance(cause, RankFailed):
                cause.lost = False
            raise cause from None
        except SignalException as error:
            raise Interrupted(error.sigval, lost()) from None
        except OSError as error:
            if error.filename is None and error.errno in (errno.EROFS, errno.EACCES, errno.ENOENT, errno.ENOSPC):
                raise OSError(
                    error.errno, f"{error.strerror} (the semaphores of local ranks lie there)", _SHM
                ) from None
            raise


@contextlib.contextmanager
def own_folder(place: str | None = None, name: str = "") -> Iterator[str]:
    """A folder for one launch in ``place`` (None: that of temporary files), which holds a lock in it.

    Those whose launchers were killed are removed first, there and in memory. ``name``: as on other hosts; "": any.
    """
    for each in (tempfile.gettempdir(), _SHM):
        _remove_left_over(each)
    while True:
        with contextlib.ExitStack() as end:
            if name and place:
                os.mkdir(folder := f"{place}/{_FOLDER}{name}", 0o700)
            else:
                folder = tempfile.mkdtemp(prefix=_FOLDER, dir=place)
            end.callback(shutil.rmtree, folder, ignore_errors=True)
            path = Path(folder, _LOCK)
            lock = files.open_own(path)
            try:
                with contextlib.suppress(OSError):  # no locks there: nobody will take this folder for a dead one's
                    if not (files.lock(lock) and files.is_open(path, lock)):  # another launch did, before it was locked
                        continue
                yield folder
                return
            finally:
                os.close(lock)


def meet_in_a_file(environment: Any, hosts: int) -> None:
    """Let the ranks that this process is to start meet in a file of its own, as those of ``axo.launch`` do.

    Args:
        environment: Lightning's, which says who starts the ranks, and their MASTER_PORT.
        hosts: On how many of them. Ranks of several, or of another launcher, meet where that one says.
    """
    if hosts == 1 and not environment.creates_processes_externally:
        kept = contextlib.ExitStack()
        atexit.register(kept.close)
        os.environ[STORE] = f"{environment.main_port} {Path(kept.enter_context(own_folder()), 'store')}"


def _remove_left_over(place: str) -> None:
    """Remove folders of this user whose launchers have died: their locks are free."""
    for path in Path(place).glob(f"{_FOLDER}*"):
        with contextlib.suppress(OSError, ValueError):  # another user's, gone by now, or no folder of ours
            if path.lstat().st_uid != os.getuid() or path.is_symlink():
                continue
            lock = files.open_own(path / _LOCK, create=False)
            try:
                if files.lock(lock):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _check_files() -> None:
    """Refuse what torch's store would try again for five minutes, or abort the process over."""
    limit, used = resource.getrlimit(resource.RLIMIT_NOFILE)[0], len(os.listdir("/proc/self/fd"))
    if limit != resource.RLIM_INFINITY and limit - used < _FREE_FILES:
        raise ResourceError(
            f"launch: this process may have {limit} files open (ulimit -n) and has {used}; local ranks need at least"
            f" {_FREE_FILES} more"
        )


@contextlib.contextmanager
def handled(handler: Callable[[int, Any], None], noted: Iterable[signal.Signals] = ()) -> Iterator[None]:
    """Let ``handler`` have the signals that end a launch, or that its ranks note; those who had them get them back.

    Torch's launcher tells its ranks which it handles itself, in the environment, which is put back, too.
    """
    hangs_up = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN  # nohup's command goes on
    ending = {signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, *([signal.SIGHUP] if hangs_up else []), *noted}
    on_main = threading.current_thread() is threading.main_thread()  # the others cannot
    told = os.environ.get(_TOLD)
    before: dict[signal.Signals, Any] = {}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        for number in ending if on_main else ():
            before[number] = signal.getsignal(number)
            signal.signal(number, handler)
        if on_main and signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:  # as some starters leave it: the system
            before[signal.SIGCHLD] = signal.SIG_IGN  # would forget how ranks have ended
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        yield
    finally:
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, ending)  # may raise what came just before
        finally:
            for number, earlier in before.items():
                if earlier is not None:  # one that Python did not set, and cannot set again
                    signal.signal(number, earlier)
            os.environ.pop(_TOLD, None)
            if told is not None:
                os.environ[_TOLD] = told
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _meet_in_a_file(parameters: Any) -> Any:
    """What TorchElastic makes a rendezvous of ours from: a store in a file of the launch's own folder.

    Nobody listens on a port, so no other user can reach it. The ranks get a free port too: rank 0 opens it where a
    program asks torch for a store of its own (``init_method="env://"``).
    """
    from torch.distributed import FileStore
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    class OneAgent(StaticTCPRendezvous):
        """This process is the only agent, so there is nobody to wait for."""

        use_agent_store = False

        def get_backend(self) -> str:
            return _IN_A_FILE

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    agent = OneAgent("127.0.0.1", port, 0, 1, parameters.run_id, 0)
    agent._store = FileStore(str(Path(parameters.get("folder"), "agent")), -1)
    return agent


def _pass_on(reports: Path, number: int, sent: int) -> None:
    """Note a signal in ``reports``, and send one to the ranks that live. Each has left its process id there."""
    with contextlib.suppress(OSError):  # a full disk
        Path(reports, _ASKED).write_text(str(number))
    for file in reports.glob("*.pid"):
        try:
            os.kill(int(file.stem), sent)
            os.kill(int(file.stem), signal.SIGCONT)  # it may be stopped, and its peers would wait for it
        except ProcessLookupError:
            pass


def end_with(parent: int) -> None:
    """Let the system kill this process when ``parent``, which started it, has ended; also while it is stopped."""
    ctypes.CDLL(None).prctl(_SIGNAL_AT_PARENTS_DEATH, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _rank_main(reports: str, function: Callable[..., Any], args: tuple[Any, ...], part: Part | None) -> Any:
    gc.freeze()  # what a forked rank has inherited is never collected in it: a store's end waits for a thread it lacks
    launcher = multiprocessing.parent_process()
    assert launcher is not None and launcher.pid is not None
    end_with(launcher.pid)  # torch asks for SIGINT, which a stopped process does not get
    # The default action ends a rank even while it is blocked outside of Python.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # the launcher's handler would raise anywhere in a rank
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    _reports[:] = [Path(reports)]
    if part is None:
        os.environ[STORE] = f"{os.environ['MASTER_PORT']} {Path(reports, 'store')}"
    else:
        os.environ |= {"RANK": str(part.first + int(os.environ["RANK"])), "WORLD_SIZE": str(part.world)}
        os.environ |= {"MASTER_ADDR": part.address, "MASTER_PORT": str(part.port)}
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # rank 0 opens it
    Path(reports, f"{os.getpid()}.pid").touch()
    if Path(reports, _ASKED).exists():  # the signal came before this rank could be found
        os.kill(os.getpid(), int(Path(reports, _ASKED).read_text() or signal.SIGTERM))
    try:
        result = function(*args)
        for each in BEFORE_A_RANK_ENDS:
            each()
        if os.environ["RANK"] != "0":
            return None
        ForkingPickler.dumps(result)  # what cannot be sent is this rank's error, which says so
        return result
    except BaseException as error:
        unread = nobody_reads(error)
        if isinstance(error, SystemExit) and not unread:
            if error.code is None:  # torch takes only 0 for an end, and would wait for a result for ever
                return None
            raise
        if unread or type(error) is KeyboardInterrupt:  # for the latter torch would wait for a result for ever
            error = Interrupted(signal.SIGPIPE if unread else signal.SIGINT)
        _write_report(Path(reports), error)
        if _is_consequence(error) and _HOST_LOST not in str(error):
            let_the_cause_end_first()
        raise SystemExit(1) from None  # torch would leave a file in /tmp for any other exception


def nobody_reads(error: BaseException) -> bool:
    """Whether ``error`` says that nobody reads any more what this process prints; then it prints no more.

    rich turns the BrokenPipeError of its console into SystemExit.
    """
    cause = error.__context__ if isinstance(error, SystemExit) else error
    if not isinstance(cause, BrokenPipeError):
        return False
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    closed = error is not cause or any(events & (select.POLLERR | select.POLLNVAL) for _, events in poll.poll(0))
    if closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes at exit
    return closed


def _is_consequence(error: BaseException) -> bool:
    return isinstance(error, CONSEQUENCES) or (type(error) is RuntimeError and _GLOO_LOST_A_PEER in str(error))


def _write_report(reports: Path, error: BaseException) -> None:
    rank = int(os.environ["RANK"])
    message = user_message(error)
    report = {
        "rank": rank,
        "time": time.monotonic(),
        "kind": type(error).__name__,
        "message": message or str(error),
        "user_error": message is not None,
        "signal": error.signal if isinstance(error, Interrupted) else 0,
        "consequence": _is_consequence(error),
        "trace": "" if isinstance(error, (Timeout, MemoryError)) else traceback.format_exc(),
    }
    unfinished = reports / f".{rank}"
    unfinished.write_text(json.dumps(report), encoding="utf-8")
    unfinished.rename(reports / f"{rank}.json")


def _cause(reports: list[dict[str, Any]], exit_codes: dict[int, int]) -> RankFailed | Interrupted:
    """Choose what to tell of the failures of one launch."""
    own = [report for report in reports if not report["consequence"]]
    for report in own:
        if report["signal"]:
            return Interrupted(report["signal"])
    for rank, code in exit_codes.items():
        # A killed rank lets others fail in many ways, in libraries that know no PeerLost too; not by wrong input.
        killed = code < 0 and code != -signal.SIGTERM and not any(report["user_error"] for report in own)
        if (killed or not own) and all(report["rank"] != rank for report in reports):
            if -code in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):  # of the terminal: the launcher got it, too
                return Interrupted(-code)
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            hint = "; is there enough memory?" if code == -signal.SIGKILL else ""
            lost, killer = code != -signal.SIGTERM, max(0, -code)
            return RankFailed(f"rank {rank} {how}{hint}", rank=rank, lost=lost, signal=killer)
    if not reports:
        return RankFailed("a rank ended without saying why", rank=-1)
    report = min(own or reports, key=lambda report: report["time"])
    if report["user_error"]:
        return RankFailed(report["message"], rank=report["rank"], user_error=True)
    message = f"rank {report['rank']}: {report['kind']}: {report['message']}"
    failed = RankFailed(message, rank=report["rank"], trace=report["trace"])
    failed.consequence = not own
    return failed
