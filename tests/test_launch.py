"""Local ranks: where their store listens. What goes wrong in a run is in test_cli and test_interrupt."""

from __future__ import annotations

import ctypes
import errno
import gc
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

import axo
from axo import launch
from axo.errors import CheckpointError, ResourceError, user_message
from axo.launch import STORE, launch_local
from tests.launcher import rank_outcomes, run_ranks

LISTEN = "0A"


def sockets_of(process: int) -> set[str]:
    """The inodes of the sockets that a process has open."""
    inodes = set()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        try:
            inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(descriptor)))
        except FileNotFoundError:
            continue  # the one that reads the folder
    return inodes


def listening_addresses() -> list[str]:
    """On a rank: after all have met, the addresses (hexadecimal) on which the launcher and the ranks listen."""
    import axo

    with axo.connect("2x1x1x1") as comms:
        comms.world.barrier()
        addresses = addresses_of(sockets_of(os.getpid()) | sockets_of(os.getppid()))
        comms.world.barrier()
    return addresses


def addresses_of(inodes: set[str]) -> list[str]:
    """Those of sockets that listen."""
    tables = [Path("/proc/self/net", table).read_text().splitlines()[1:] for table in ("tcp", "tcp6")]
    sockets = [line.split() for lines in tables for line in lines]
    return [fields[1].partition(":")[0] for fields in sockets if fields[3] == LISTEN and fields[9] in inodes]


def launch_two() -> list[str]:
    return launch_local(listening_addresses, 2)


def test_local_ranks_listen_on_no_port() -> None:
    assert run_ranks(launch_two, 1) == [[]]


LIGHTNING = """
import os, sys
import lightning as L
from axo.integrations.fabric.strategy import AxoStrategy
from tests.test_launch import addresses_of, open_to_another_user, sockets_of

fabric = L.Fabric(accelerator="cpu", strategy=AxoStrategy("2x1x1x1"))
before = sockets_of(os.getpid())  # Lightning starts MPI where mpi4py is installed, which listens everywhere
fabric.launch()
store = os.environ["AXO_STORE"].partition(" ")[2]
assert os.path.getsize(store) > 0 and fabric.strategy.reduce_boolean_decision(True)
told = addresses_of(sockets_of(os.getpid()) - before), open_to_another_user([os.path.dirname(store), store])
fabric.barrier()
os.write(1, f"told {told[0]} {told[1]} {store}\\n".encode())  # at once: both ranks write
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_ranks_that_lightning_starts_meet_in_a_file_too(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LIGHTNING)
    left = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "MASTER_PORT")}
    left["PYTHONPATH"] = str(Path(__file__).parent.parent)
    command = [sys.executable, tmp_path / "script.py"]
    done = subprocess.run(command, env=left, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("told")]
    assert len(lines) == 2 and len({*lines}) == 1 and lines[0].startswith("told [] [] /"), done.stdout
    assert not Path(lines[0].split()[-1]).parent.exists()


NOBODY = 65534  # another user


def open_to_another_user(places: list[str]) -> list[str]:
    """Those of ``places`` that another user can list, read or write."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        opened = []
        for place in places:
            for way in (os.listdir, Path.read_bytes, lambda path: path.open("ab")):
                with suppress(OSError):
                    way(Path(place))
                    opened.append(place)
        os.write(writer, "\n".join(opened).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as told:
        return told.read().split()


def read_by_another_user() -> list[str]:
    """On a rank: what another user can see or change of where the ranks meet."""
    with axo.connect("2x1x1x1") as comms:
        store = os.environ[STORE].partition(" ")[2]
        assert Path(store).stat().st_size > 0
        opened = open_to_another_user([os.path.dirname(store), store, "/proc/self/status"])
        comms.world.barrier()
    return opened


def launch_beside_another_user() -> list[str]:
    return launch_local(read_by_another_user, 2)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_reads_and_sets_no_key_of_a_local_run() -> None:
    assert run_ranks(launch_beside_another_user, 1) == [["/proc/self/status"]]


def test_shared_memory_that_cannot_be_written_is_named(monkeypatch) -> None:
    """multiprocessing's semaphores say neither where they lie nor what they are."""
    from torch.distributed.launcher import api

    def refused(*_: object) -> NoReturn:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(api, "elastic_launch", lambda *_: refused)
    with pytest.raises(OSError) as error:
        launch_local(listening_addresses, 2)
    assert user_message(error.value) == (
        "'/dev/shm' cannot be used: Read-only file system (the semaphores of local ranks lie there)"
    )


def test_a_save_that_failed_explains_itself() -> None:
    """A full disk: one line, no traceback. (What is left on it: tests/checkpoint/test_checkpoint_failures.py.)"""
    assert user_message(CheckpointError("checkpoint: runs was not written")) == "checkpoint: runs was not written"


def interrupt() -> NoReturn:
    raise KeyboardInterrupt


def what_cannot_be_sent() -> Any:
    return lambda: 1


def ask_the_launcher_to_end() -> None:
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)


def die_when_asked_to_end() -> None:
    with launch.Termination() as ending:
        if os.environ["RANK"] == "0":
            os.kill(os.getppid(), signal.SIGTERM)
        while not ending.asked:
            time.sleep(0.01)
        os._exit(3)


def launch_badly() -> list[str]:
    told, rank_main = [], launch._rank_main

    def late(reports: str, *rest: Any) -> Any:
        os.kill(os.getppid(), signal.SIGTERM)  # before the launcher knows of this rank
        while not Path(reports, launch._ASKED).exists():
            time.sleep(0.01)
        return rank_main(reports, *rest)

    for function, ranks in (
        (interrupt, 2),
        (what_cannot_be_sent, 2),
        (interrupt, 0),
        (interrupt, "2"),
        (ask_the_launcher_to_end, 2),
        (sys.exit, 2),  # an end like any other
        (os._exit, 1),
        (die_when_asked_to_end, 2),
        (time.sleep, 1),
    ):
        launch._rank_main = late if function is time.sleep else rank_main
        arguments = {time.sleep: [60], os._exit: [3]}.get(function, [])
        try:
            launch_local(function, ranks, *arguments, terminate=True)  # type: ignore
        except BaseException as error:
            again = ", start again" if getattr(error, "lost", False) else ""
            told.append(f"{type(error).__name__}: {error}{again}")
    return told


def test_however_a_rank_ends_the_launch_does_too_and_says_why() -> None:
    interrupted, unsendable, none, text, asked, died, died_when_asked, late = run_ranks(launch_badly, 1)[0]
    assert asked == late == "Interrupted: SIGTERM"
    assert died == "RankFailed: rank 0 ended with exit code 3, start again"
    assert re.fullmatch("RankFailed: rank [01] ended with exit code 3", died_when_asked), "nobody wants it back"
    assert interrupted == "Interrupted: SIGINT"
    assert unsendable.startswith("RankFailed: rank 0: AttributeError: Can't pickle local object 'what_cannot_be_sent")
    assert none == "ValueError: launch: ranks=0 is no number of ranks; use a whole number of at least 1"
    assert "ranks='2' is no number" in text


def wait_to_be_asked(stopped: str) -> str:
    with launch.Termination() as ending:
        if os.environ["RANK"] == "1":
            Path(stopped).write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            wait_for(lambda: state_of(int(Path(stopped).read_text() or 0)) == "T")
            os.kill(os.getppid(), signal.SIGTERM)
        wait_for(lambda: ending.asked)
    return "ended in its own time"


def wait_for(condition: Callable[[], bool], seconds: float = 50) -> None:
    deadline = time.monotonic() + seconds
    while True:
        with suppress(OSError):
            if condition():
                return
        assert time.monotonic() < deadline
        time.sleep(0.01)


def state_of(process: int) -> str:
    """As the system has it: R, S, T (stopped), Z ...; "" when there is no such process."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def launch_and_stop_one(stopped: str) -> tuple[str, list[int]]:
    noted: list[int] = []
    return launch_local(wait_to_be_asked, 2, stopped, terminate=True, noted=noted), noted


def test_a_stopped_rank_goes_on_when_all_are_asked_to_end(tmp_path: Path) -> None:
    stopped = tmp_path / "stopped"
    assert run_ranks(launch_and_stop_one, 1, str(stopped)) == [("ended in its own time", [signal.SIGTERM])]


def be_asked_as_the_launch_collects() -> int:
    collect = gc.collect

    def collects() -> int:
        gc.collect = collect
        signal.raise_signal(signal.SIGTERM)
        return collect()

    gc.collect = collects  # type: ignore[assignment]
    with pytest.raises(launch.Interrupted) as caught:
        launch_local(time.sleep, 1, 60, terminate=True)
    return caught.value.signal


def test_a_signal_before_the_ranks_is_theirs() -> None:
    """Python loses what a handler raises in a destructor, so that of the launch notes it."""
    assert run_ranks(be_asked_as_the_launch_collects, 1) == [signal.SIGTERM]


def stop_for_ever(stopped: str) -> None:
    Path(stopped).write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def launch_one_that_stops(stopped: str) -> None:
    launch_local(stop_for_ever, 1, stopped)


def kill_a_launcher(stopped: str) -> None:
    launcher = multiprocessing.get_context("fork").Process(target=launch_one_that_stops, args=(stopped,))
    launcher.start()
    wait_for(lambda: state_of(int(Path(stopped).read_text() or 0)) == "T")
    launcher.kill()
    wait_for(lambda: state_of(int(Path(stopped).read_text())) in ("", "Z"), 20)


def test_a_stopped_rank_dies_with_its_launcher(tmp_path: Path) -> None:
    run_ranks(kill_a_launcher, 1, str(tmp_path / "stopped"))


def launch_with_few_files() -> str:
    limit = len(os.listdir("/proc/self/fd")) + 9
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    with pytest.raises(ResourceError) as error:
        launch_local(handlers, 2)
    return str(user_message(error.value))


def test_too_few_files_are_told_at_once() -> None:
    message = run_ranks(launch_with_few_files, 1, timeout=25)[0]
    assert "files open (ulimit -n)" in message and "local ranks need at least 16 more" in message


def handlers() -> list[str]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    return [str(signal.getsignal(number)) for number in numbers]


def launch_one_with_and_without_nohup() -> list[list[str]]:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    first = launch_local(handlers, 1)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return [first, launch_local(handlers, 1)]


def test_no_signal_raises_within_a_rank() -> None:
    ended, ignored = str(signal.Handlers.SIG_DFL), str(signal.Handlers.SIG_IGN)
    without, with_nohup = run_ranks(launch_one_with_and_without_nohup, 1)[0]
    assert without == [ended, ended, ended, ended] and with_nohup == [ended, ended, ignored, ended]


def hang_up_the_launcher(begun: str) -> None:
    if os.environ["RANK"] == "0":
        while not os.path.exists(begun):
            time.sleep(0.01)
        os.kill(os.getppid(), signal.SIGHUP)
    time.sleep(60)


def lose_what_a_handler_raises(begun: str) -> list[Any]:
    """A signal comes while the launcher runs a destructor, out of which Python raises nothing."""
    monitor = LocalElasticAgent._monitor_workers

    class Slow:
        def __del__(self) -> None:
            Path(begun).touch()
            time.sleep(20)

    def monitor_late(*args: Any) -> Any:
        LocalElasticAgent._monitor_workers = monitor  # type: ignore[method-assign]
        Slow()  # freed at once
        return monitor(*args)

    LocalElasticAgent._monitor_workers = monitor_late  # type: ignore[method-assign]
    lost: list[Any] = []
    sys.unraisablehook = lambda found: lost.append(found.exc_type.__name__)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    before = handlers()
    try:
        launch_local(hang_up_the_launcher, 2, begun)
    except launch.Interrupted as error:
        return [error.signal, lost, handlers() == before]
    return ["went on", lost, handlers() == before]


def test_a_signal_that_python_loses_ends_the_launch_too(tmp_path: Path) -> None:
    assert run_ranks(lose_what_a_handler_raises, 1, str(tmp_path / "begun")) == [
        [signal.SIGHUP, ["SignalException"], True]
    ]


def ask_on_another_thread() -> list[str]:
    said: list[str] = []

    def ask() -> None:
        said.append(str(launch_local(os.getpid, 1) > 0))
        with pytest.raises(ValueError) as error:
            launch_local(os.getpid, 1, terminate=True)
        said.append(str(error.value))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return said


def test_a_launch_on_another_thread_passes_no_signal_on() -> None:
    ran, refused = run_ranks(ask_on_another_thread, 1)[0]
    assert ran == "True" and refused.startswith("launch: terminate=True passes on a signal, which only the main thread")


def signals_while_handlers_change() -> list[Any]:
    """A signal as the first handler is set, and one as the first is put back: what each raised, told, and left."""
    numbers = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
    set_one, noted, found = signal.signal, list[int](), list[Any]()

    def note(number: int, frame: Any) -> None:
        noted.append(number)

    def fail(number: int, frame: Any) -> None:
        raise ArithmeticError

    for when in (fail, note):
        for number in numbers:
            signal.signal(number, note)
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGUSR1"

        def set_with_a_signal(number: int, handler: Any, when: Any = when) -> Any:
            earlier = set_one(number, handler)
            if handler is when and number == signal.SIGINT:
                signal.raise_signal(signal.SIGINT if when is fail else signal.SIGTERM)
            return earlier

        signal.signal = set_with_a_signal  # type: ignore[assignment]
        raised = False
        try:
            with launch.handled(fail):
                os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""  # as torch's launcher does
        except ArithmeticError:
            raised = True
        signal.signal = set_one
        left = [signal.getsignal(number) is note for number in numbers]
        found.append((raised, list(noted), left, os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"]))
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
    return found


def test_a_signal_at_the_edge_of_a_launch_leaves_no_handler_behind() -> None:
    """The first came before anybody would have put them back; the second kept the rest from being put back."""
    all_back = ([True, True, True], "SIGUSR1")
    assert run_ranks(signals_while_handlers_change, 1)[0] == [
        (True, [], *all_back), (False, [signal.SIGTERM], *all_back),
    ]  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGQUIT], ids=lambda number: number.name)
def test_ranks_that_the_terminal_has_ended_were_interrupted(number: signal.Signals) -> None:
    """The launcher got the signal, too; Python may have lost it in a destructor."""
    cause = launch._cause([], {0: -number, 1: -number})
    assert isinstance(cause, launch.Interrupted) and cause.signal == number


@pytest.mark.parametrize(("given", "asked", "found"), [("1", 0, 1), ("", 2, 2), ("3", 2, 2)])
def test_threads_stay_below_the_limit_of_openmp(
    monkeypatch: pytest.MonkeyPatch, given: str, asked: int, found: int
) -> None:
    """With fewer threads than it has asked for, what torch computes is wrong: logits were not finite."""
    taken: list[int] = []
    monkeypatch.setenv("OMP_THREAD_LIMIT", given)
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    launch.set_threads(asked, 1)
    assert taken == [found]


def test_more_threads_than_openmp_may_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_THREAD_LIMIT", "3")
    with pytest.raises(ValueError, match="threads=4 is above OMP_THREAD_LIMIT=3: take fewer"):
        launch.set_threads(4, 1)


def lies_on_the_heap(grid: str) -> bool:
    """Whether malloc takes 20 MiB from its own heap; else from the system, to which it gives them back."""
    axo.connect(grid)
    block = torch.empty(5 << 20)
    heap = next(line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("[heap]"))
    start, end = (int(address, 16) for address in heap.split("-"))
    return start <= block.data_ptr() < end


def test_what_a_step_frees_on_the_cpu_is_there_for_the_next() -> None:
    assert run_ranks(lies_on_the_heap, 1, "1x1x1x1") == [True]
    assert run_ranks(lies_on_the_heap, 2, "1x1x2x1") == [True, True]


def put_aside_by_malloc() -> int:
    """How many of 64 small blocks that are freed malloc keeps apart, unmerged."""

    class Statistics(ctypes.Structure):  # mallinfo2 of malloc.h
        _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", *"abcdefg")]

    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Statistics
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    blocks, before = [libc.malloc(48) for _ in range(64)], libc.mallinfo2().smblks
    for block in blocks:
        libc.free(block)
    return libc.mallinfo2().smblks - before


def connected_and_put_aside() -> int:
    axo.connect("1x1x1x1")
    return put_aside_by_malloc()


def test_malloc_merges_the_small_blocks_of_a_step_as_they_are_freed() -> None:
    assert run_ranks(connected_and_put_aside, 1) == [0]


def test_thresholds_of_malloc_that_are_set_from_outside_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: pytest.fail("malloc was told"))
    for name, value in (("MALLOC_TRIM_THRESHOLD_", "0"), ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=131072")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            launch.keep_freed_memory()


class TellsItsEnd:
    """In a cycle, so that only the garbage collector ends it; notes in which process that was."""

    def __init__(self, path: Path) -> None:
        self.path, self.itself = path, self

    def __del__(self) -> None:
        with self.path.open("a") as file:
            file.write(f"{os.getpid()}\n")


def collect() -> int:
    return gc.collect()


def test_what_the_launcher_has_left_does_not_end_in_a_rank(tmp_path: Path) -> None:
    """A store of an earlier launch waits for its thread as it ends, which a forked rank has not: it would crash."""
    gc.disable()
    try:
        TellsItsEnd(tmp_path / "left")
        launch_local(collect, 2)
    finally:
        gc.enable()
    assert (tmp_path / "left").read_text().split() == [str(os.getpid())]


def be_killed_as_a_launcher(folder: str) -> None:
    tempfile.tempdir = folder
    with launch.own_folder() as own:
        Path(own, "report").write_text("x")
        os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_launcher_left_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what lives, what another user has, what is a link, and what is of another kind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for _ in range(2):
        rank_outcomes(be_killed_as_a_launcher, 1, str(tmp_path))
    (left,) = tmp_path.iterdir()  # the second start has removed what the first had left
    (tmp_path / "axo-ranks-link").symlink_to(left)
    (tmp_path / "axo-ranks-unlocked").mkdir()
    (tmp_path / "axo-ranks-odd").mkdir()
    os.mkfifo(tmp_path / "axo-ranks-odd" / launch._LOCK)
    kept = {"axo-ranks-link", "axo-ranks-unlocked", "axo-ranks-odd"}
    with monkeypatch.context() as another:
        another.setattr(os, "getuid", lambda: 12345)
        launch._remove_left_over(tempfile.gettempdir())
    assert {path.name for path in tmp_path.iterdir()} == kept | {left.name}
    with launch.own_folder() as first, launch.own_folder() as second:
        assert {path.name for path in tmp_path.iterdir()} == kept | {Path(first).name, Path(second).name}
    assert {path.name for path in tmp_path.iterdir()} == kept


def ignoring_the_ends_of_children() -> tuple[list[list[str]], bool]:
    """As a program finds it whose starter ignores them: it is inherited."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    return launch_local(listening_addresses, 2), signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN


def test_a_launcher_that_was_told_to_ignore_the_ends_of_children() -> None:
    assert run_ranks(ignoring_the_ends_of_children, 1) == [([], True)]
