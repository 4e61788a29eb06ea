"""Runs a function on N CPU ranks, each a process forked from a zygote.

    from tests.launcher import run_ranks

    def check_sum(count):                      # a module-level function of the test module; runs on every rank
        comms = axo.connect("2x2x1x1")         # RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT are set
        return comms.world.all_reduce(torch.ones(count)).sum().item()

    def test_sum():
        assert run_ranks(check_sum, 4, 10) == [40.0] * 4            # the results in rank order

``run_ranks`` fails the test when a rank raises, dies or is late, and shows the first failing rank's traceback.
``rank_outcomes`` takes the same arguments and returns an ``Outcome`` a rank instead, for tests of what goes wrong:

    for outcome in rank_outcomes(check_bad_grid, 4):
        assert outcome.error == "ValueError" and "4 ranks" in outcome.message

``Command`` starts a program in a process of its own, forked from the zygote too: as ``subprocess.Popen`` without the
seconds that importing torch and LitGPT takes.

Why a zygote: 16 ranks fork in 0.2 s and spawn in 13 s; but a process that has run one parallel torch operation cannot
be forked (libgomp's pool is lost, and the child hangs). So a process that imports torch, axo and litgpt and never
computes forks the ranks, and pytest itself, which computes, does not. Each rank first calls
``torch.set_num_threads(1)``. The zygote and the ranks die with pytest. The rendezvous store lives in the pytest
process, so that no rank's death takes it along; every job has its own. ``AXO_TEST_SLOWNESS=3`` multiplies all time
limits on a busy machine.

Long because pytest's, the zygote's and the ranks' side of one protocol are read together.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import logging
import os
import pickle
import resource
import runpy
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

_GRACE_S = 15.0  # what the other ranks get to finish in once one has failed
_PR_SET_PDEATHSIG = 1
_CUT_OFF = -1  # in place of a world size: the job under way is to end
_HUGE_PAGE, _MADV_COLLAPSE, _GROWN_KIB = 1 << 21, 25, 48 << 10


@dataclass
class Outcome:
    """How one rank ended: with a value, an exception (``error``, ``message``), a signal, or not in time."""

    rank: int
    value: Any = None
    error: str | None = None  # name of the exception's class
    message: str = ""
    traceback: str = ""
    signal: str | None = None  # "SIGKILL", ...
    exit_code: int | None = None  # when the process left without a word
    timed_out: bool = False
    seconds: float = 0.0  # from the start of the job to the end of this rank
    output: str = ""  # stdout and stderr

    @property
    def ok(self) -> bool:
        return self.error is None and self.signal is None and self.exit_code is None and not self.timed_out

    def describe(self) -> str:
        if self.ok:
            return f"rank {self.rank}: finished after {self.seconds:.1f} s"
        if self.error:
            return f"rank {self.rank}: {self.error}: {self.message}"
        if self.timed_out:
            return f"rank {self.rank}: not finished after {self.seconds:.1f} s, killed"
        return f"rank {self.rank}: " + (f"died of {self.signal}" if self.signal else f"exit code {self.exit_code}")


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60,
    env: dict[str, str] | None = None,
    preload: tuple[str, ...] = (),
    hosts: dict[str, float] | None = None,
) -> list[Any]:
    """Call ``fn(*args)`` on every rank; return the results in rank order, or fail with the failing rank's traceback.

    ``preload`` names modules that take long to import and compute nothing when they are: the zygote imports them.
    ``hosts``: arguments of ``axo.comm.hosts.simulate``, such as {"ranks_per_host": 2}: the ranks play several hosts.
    """
    outcomes = rank_outcomes(fn, world_size, *args, timeout=timeout, env=env, preload=preload, hosts=hosts)
    failed = sorted((outcome for outcome in outcomes if not outcome.ok), key=lambda outcome: outcome.seconds)
    if failed:
        first = failed[0]
        lines = [f"{fn.__name__} failed on {len(failed)} of {world_size} ranks; first was {first.describe()}"]
        lines += [first.traceback, first.output] + [outcome.describe() for outcome in failed[1:]]
        raise AssertionError("\n".join(line for line in lines if line))
    return [outcome.value for outcome in outcomes]


def rank_outcomes(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60,
    env: dict[str, str] | None = None,
    preload: tuple[str, ...] = (),
    hosts: dict[str, float] | None = None,
) -> list[Outcome]:
    """Call ``fn(*args)`` on every rank; return how each rank ended, in rank order. Never raises for a rank."""
    return _running_zygote().run(fn, world_size, args, timeout * slowness(), env or {}, preload, hosts)


def slowness() -> float:
    """How many times as long as on a machine of its own anything may take."""
    return float(os.environ.get("AXO_TEST_SLOWNESS", "1"))


def _running_zygote() -> Zygote:
    global _zygote
    if _zygote is None or not _zygote.alive():
        _zygote = Zygote()
    return _zygote


class Command:
    """A program that runs as ``python -m module arguments``, in a session of its own, with what the zygote imported.

    It sees this process's environment, or ``env``, and its current folder. What must see Python start or end (its
    options, its streams' encodings, how long imports take) wants ``subprocess`` instead.

    Attributes:
        pid: Its process, and its session and process group.
        returncode: As that of ``subprocess.Popen``; None until ``poll`` or ``communicate`` has found it ended.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        prepare: Callable[[], None] | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        """``prepare``: a module-level function that the process calls before the program."""
        self._output, write_output = os.pipe()
        self._status, write_status = os.pipe()
        request = {
            "module": module,
            "arguments": arguments,
            "prepare": prepare and (prepare.__module__, prepare.__name__),
            "path": sys.path,
            "folder": os.getcwd(),
            "env": dict(os.environ) if env is None else env,
            "output": f"/proc/{os.getpid()}/fd/{write_output}",
            "status": f"/proc/{os.getpid()}/fd/{write_status}",
        }
        self.returncode: int | None = None
        try:
            _running_zygote().start(request)
            self.pid = self._told()
        finally:
            os.close(write_output)
            os.close(write_status)

    def _told(self) -> int:
        return struct.unpack("<i", os.read(self._status, 4))[0]  # first the process id, at the end the exit status

    def poll(self) -> int | None:
        """``returncode``, looked up."""
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.returncode = os.waitstatus_to_exitcode(self._told())
        return self.returncode

    def hang_up(self) -> bytes:
        """Read the first line of what it prints, close its output as ``| head -1`` does, and wait for its end."""
        with open(self._output, "rb") as output:
            line = output.readline()
        select.select([self._status], [], [], 240)
        self.poll()
        os.close(self._status)
        return line

    def communicate(self, timeout: float = 240) -> str:
        """Wait for its end; what it, and whatever it started, has printed on stdout and stderr.

        Raises:
            subprocess.TimeoutExpired: Not within ``timeout`` seconds (times ``slowness``); it has been killed.
        """
        text, deadline = b"", time.monotonic() + timeout * slowness()
        while True:
            if not select.select([self._output], [], [], max(0.0, deadline - time.monotonic()))[0]:
                os.killpg(self.pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout, text)
            if not (piece := os.read(self._output, 1 << 16)):
                break
            text += piece
        select.select([self._status], [], [])
        self.poll()
        os.close(self._output)
        os.close(self._status)
        return text.decode(errors="replace")


def fork_the_ranks_of_torchrun() -> None:
    """``prepare`` of a ``Command("torch.distributed.run", ...)`` whose ranks too need no Python of their own."""
    from torch.distributed.launcher import api

    launch = api.elastic_launch

    def elastic_launch(config: Any, entrypoint: str) -> Callable[..., Any]:
        config.start_method = "fork"
        return launch(config, _rank_of_torchrun)

    api.elastic_launch = elastic_launch  # type: ignore[assignment, misc]


def _rank_of_torchrun(*arguments: str) -> None:
    import torch
    from torch.distributed.elastic.multiprocessing.api import SignalException

    torch.set_num_threads(1)
    words = [word for word in arguments if word != "-u"]  # python -u [-m] PROGRAM ...
    module = words[0] == "-m"
    sys.argv = words[module:]
    try:
        if module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SignalException:
        raise
    except Exception as error:  # not torch's, which would tell of it in Axo's place
        sys.excepthook(type(error), error, error.__traceback__)
        atexit._run_exitfuncs()
        sys.stderr.flush()
        os._exit(1)


class Zygote:
    """The pytest side of the zygote: starts it, sends jobs, and hosts the store."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command = [sys.executable, "-c", "from tests.launcher import zygote_main; zygote_main()"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        atexit.register(self.close)

    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def start(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        _send(self._process.stdin, (0, command))

    def _cut_off(self) -> None:
        """End the job under way and drop its answer, or end the zygote."""
        assert self._process.stdin is not None and self._process.stdout is not None
        ended = False
        try:
            _send(self._process.stdin, (_CUT_OFF, None))
            come = select.select([self._process.stdout], [], [], 10)[0]
            ended = bool(come) and _receive(self._process.stdout) is not None
        finally:  # a second Ctrl-C too
            if not ended:
                self.close()

    def run(
        self, fn: Any, world_size: int, args: tuple, timeout: float, env: dict, preload: tuple, hosts: dict | None
    ) -> list[Outcome]:
        # One for each job: torch puts no prefix before the keys of a store that it finds running.
        # It listens at an IPv4 address: at torch's IPv6 one it would ask the name server for the name of each rank that
        # comes, one after another, and a packet that is lost there costs all ranks five seconds.
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
            port = listener.getsockname()[1]
            store = TCPStore(
                "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
        job = {
            "module": fn.__module__,
            "name": fn.__qualname__,
            "args": pickle.dumps(args),
            "timeout": timeout,
            "preload": preload,
            "hosts": hosts,
            "path": sys.path,
            "env": {
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",  # connect to that store, start none
                **env,
            },
        }
        assert self._process.stdin is not None and self._process.stdout is not None
        waiting = False
        try:
            _send(self._process.stdin, (world_size, job))
            waiting = True
            select.select([self._process.stdout], [], [])
            waiting = False
            outcomes = _receive(self._process.stdout)
        except BaseException:  # pytest's time limit, Ctrl-C: the next job must not be given this one's answer
            self._cut_off() if waiting else self.close()
            raise
        if outcomes is None:
            raise RuntimeError(f"the zygote died (exit code {self._process.wait()}); its output is above")
        for outcome in outcomes:
            if isinstance(outcome.value, bytes):
                outcome.value = pickle.loads(outcome.value)
        return outcomes


_IMPORTED = (
    *("pytest", "torch", "torch.distributed.fsdp", "torch.utils.serialization.config", "axo.comm.connect"),
    *("axo.parallelization", "litgpt.pretrain", "axo.integrations.fabric.strategy"),
    *("axo.integrations.litgpt.auto_grid", "axo.integrations.litgpt.command", "axo.integrations.litgpt.patches"),
    *("axo.plans.auto.plan", "axo.train.runner"),
    # What these would import when it is first needed, in each rank.
    *("torch.profiler._cupti_monitor", "torch._inductor.compiler_bisector", "torch.distributed.launcher", "pdb"),
    *("torch.distributed.elastic.rendezvous.static_tcp_rendezvous", "axo.integrations.litgpt.text_data"),
    *("axo.optim.scaler", "axo.overlap.no_sync", "fsspec.implementations.chained", "pydantic.type_adapter"),
    *("rich._emoji_codes", "matplotlib.backends.backend_agg"),
)
_zygote: Zygote | None = None
_largest = 0  # of the zygote's memory, in KiB, when it was last moved


def zygote_main() -> None:
    """Imports what ranks need, then forks ranks on request until pytest is gone. Computes nothing."""
    _die_with_parent()
    gc.disable()  # until _make_forks_cheap: imports make no garbage worth a search
    # Unbuffered: _run_job asks the descriptor whether pytest has said something more.
    requests, answers = os.fdopen(os.dup(0), "rb", buffering=0), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what ranks and imports print must not reach the answers
    for name in _IMPORTED:
        with contextlib.suppress(ImportError):  # LitGPT is an extra; the tests that need it say so
            importlib.import_module(name)
    _rewrite_asserts()
    _make_forks_cheap()
    keepers: set[int] = set()
    while (request := _receive(requests)) is not None:
        world_size, job = request
        if world_size == 0:
            keepers.add(_start_command(job))
        if world_size <= 0:
            continue
        sys.path[:] = job["path"]
        for name in (*job["preload"], job["module"]):
            _import_before_the_fork(name)
        _send(answers, _run_job(world_size, job, requests))
        keepers = {pid for pid in keepers if os.waitpid(pid, os.WNOHANG)[0] == 0}


def _start_command(command: dict[str, Any]) -> int:
    """Fork a process that forks the program and tells how it ends; its id."""
    keeper = os.fork()
    if keeper:
        return keeper
    try:
        _die_with_parent()
        status, output = (os.open(command[pipe], os.O_WRONLY) for pipe in ("status", "output"))
        pid = os.fork()
        if pid == 0:
            os.close(status)
            _command_main(command, output)
        os.close(output)
        os.write(status, struct.pack("<i", pid))
        os.write(status, struct.pack("<i", os.waitpid(pid, 0)[1]))
    finally:
        os._exit(0)


def _command_main(command: dict[str, Any], output: int) -> None:
    """The life of a program, from fork to exit. Never returns."""
    try:
        _die_with_parent()
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # the zygote's believe that they can seek
        sys.stderr = open(2, "w", 1, encoding="utf-8", closefd=False)
        os.environ.clear()
        os.environ.update(command["env"])
        os.chdir(command["folder"])
        sys.path[:] = command["path"]
        if command["prepare"]:
            module, name = command["prepare"]
            getattr(importlib.import_module(module), name)()
        run_as_program(command["module"], command["arguments"])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def run_as_program(module: str, arguments: Sequence[str]) -> None:
    """``python -m module arguments`` in this process, which was forked, to its end. Never returns."""
    code = 1
    try:
        sys.argv = [module, *arguments]
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _import_before_the_fork(name: str) -> None:
    """Once, instead of once a rank. What computes when it is imported must not be imported here."""
    if name not in sys.modules:
        try:
            importlib.import_module(name)
        except BaseException:  # such as a skip of the module
            pass  # the ranks will say so
        gc.freeze()
        _use_huge_pages()


def _make_forks_cheap() -> None:
    """Spare each rank 50 ms: what it inherits is neither searched for garbage nor taken down at its end."""
    from torch import cuda, mtia, xpu
    from torch._dynamo.utils import dump_compile_times
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    if not cuda.is_available():  # else each seed is kept for them, with the stack that it came from
        cuda.random._lazy_call = xpu.random._lazy_call = mtia._lazy_call = lambda *_, **__: None
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000, 10, 10)  # with Python's 700 a tenth of all tests' time goes into the search
    _use_huge_pages()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # of torch's operators; a rank's own do run
    atexit.unregister(dump_compile_times)
    with contextlib.suppress(ImportError):
        from lightning.fabric.plugins.environments import mpi

        # mpi4py is there for the benches: else each rank of Fabric starts MPI, to ask whether MPI has started it.
        mpi._MPI4PY_AVAILABLE.available = False
    dynamic_rendezvous.get_method_name = lambda *_: "?"  # for a log; it reads the sources of all modules
    logging._at_fork_reinit_lock_weakset.clear()  # type: ignore[attr-defined]  # no other thread holds these locks


def _use_huge_pages() -> None:
    """Move this process's memory into pages of 2 MiB: a fork copies, and its end drops, 512 times fewer entries.

    Again only where it has grown.
    """
    global _largest
    largest, libc = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, ctypes.CDLL(None)
    if largest < _largest + _GROWN_KIB:
        return
    _largest = largest
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, _, *name = line.split()
        if access != "rw-p" or name not in ([], ["[heap]"]):
            continue
        start, end = (int(address, 16) for address in addresses.split("-"))
        for page in range(-(-start // _HUGE_PAGE) * _HUGE_PAGE, end - _HUGE_PAGE + 1, _HUGE_PAGE):
            libc.madvise(ctypes.c_void_p(page), ctypes.c_size_t(_HUGE_PAGE), _MADV_COLLAPSE)  # refused: stays as it is


def _rewrite_asserts() -> None:
    """Let failing asserts in test modules show their values in ranks too, as pytest does in its own process."""
    try:
        from _pytest.assertion import install_importhook
        from _pytest.config import get_config

        config = get_config()
        config.parse([])
        install_importhook(config)
    except Exception as error:  # private to pytest; asserts work without it, only less talkative
        print(f"launcher: asserts in ranks show no values ({error!r})", file=sys.stderr)


def _run_job(world_size: int, job: dict, requests: Any) -> list[Outcome]:
    start = time.monotonic()
    selector = selectors.DefaultSelector()
    ranks: dict[int, tuple[int, Any]] = {}  # rank -> pid, output file
    group = 0
    for rank in range(world_size):
        reader, writer = os.pipe()
        output = tempfile.TemporaryFile()
        pid = os.fork()
        if pid == 0:
            selector.close()
            os.close(reader)
            _rank_main(rank, job, writer, output.fileno(), group)
        os.close(writer)
        group = group or pid
        _join_group(pid, group)
        ranks[rank] = (pid, output)
        selector.register(reader, selectors.EVENT_READ, rank)
    data = {rank: bytearray() for rank in ranks}
    outcomes: dict[int, Outcome] = {}
    deadline = start + job["timeout"]
    selector.register(requests, selectors.EVENT_READ)  # while a job runs pytest says no more than that it is to end
    while len(outcomes) < world_size:
        events = selector.select(max(0.0, deadline - time.monotonic()))
        for key, _ in events:
            if key.fileobj is requests:
                assert _receive(requests) in ((_CUT_OFF, None), None)  # None: pytest is gone
                selector.unregister(requests)
                deadline = 0.0
                continue
            piece = os.read(key.fd, 1 << 20)
            data[key.data] += piece
            if not piece:  # closed: this rank is gone, or will be at once
                selector.unregister(key.fd)
                os.close(key.fd)
                outcomes[key.data] = _reap(key.data, ranks[key.data], bytes(data[key.data]), start)
                if not outcomes[key.data].ok:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if not events and time.monotonic() >= deadline:
            _kill_late(selector, ranks, outcomes, data, start)
    try:
        os.killpg(group, signal.SIGKILL)  # whatever ranks have started
    except ProcessLookupError:
        pass
    selector.close()
    return [outcomes[rank] for rank in range(world_size)]


def _kill_late(selector: Any, ranks: dict, outcomes: dict, data: dict, start: float) -> None:
    late = {key.data: key.fd for key in list(selector.get_map().values()) if key.data is not None}
    for rank in late:
        os.kill(ranks[rank][0], signal.SIGUSR2)  # faulthandler: where it stands, on stderr
    time.sleep(0.5)
    for rank, fd in late.items():
        os.kill(ranks[rank][0], signal.SIGKILL)
        selector.unregister(fd)
        os.close(fd)
        outcomes[rank] = _reap(rank, ranks[rank], bytes(data[rank]), start)
        outcomes[rank].timed_out, outcomes[rank].signal = True, None


def _reap(rank: int, process: tuple[int, Any], data: bytes, start: float) -> Outcome:
    pid, output = process
    status = os.waitpid(pid, 0)[1]
    seconds = time.monotonic() - start
    output.seek(0)
    text = output.read().decode(errors="replace")
    output.close()
    if data:
        outcome = pickle.loads(data)
    elif os.WIFSIGNALED(status):
        outcome = Outcome(rank, signal=signal.Signals(os.WTERMSIG(status)).name)
    else:
        outcome = Outcome(rank, exit_code=os.WEXITSTATUS(status))
    outcome.seconds, outcome.output = seconds, text
    return outcome


def _rank_main(rank: int, job: dict, writer: int, output: int, group: int) -> None:
    """The life of a rank, from fork to exit. Never returns."""
    try:
        _die_with_parent()
        _join_group(0, group)
        os.dup2(output, 1)
        os.dup2(output, 2)
        faulthandler.enable(2, all_threads=True)
        faulthandler.register(signal.SIGUSR2, 2, all_threads=True)
        import torch

        torch.set_num_threads(1)
        os.environ.update(job["env"], RANK=str(rank), LOCAL_RANK=str(rank))
        sys.path[:] = job["path"]
        outcome = Outcome(rank)
        try:
            function: Any = importlib.import_module(job["module"])
            for part in job["name"].split("."):
                function = getattr(function, part)
            if job["hosts"]:
                importlib.import_module("axo.comm.hosts").simulate(**job["hosts"])
            outcome.value = pickle.dumps(function(*pickle.loads(job["args"])))
            atexit._run_exitfuncs()  # a normal end closes communicators; os._exit below would not
        except BaseException as error:
            outcome.error, outcome.message = type(error).__name__, str(error)
            outcome.traceback = traceback.format_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(pickle.dumps(outcome))
    finally:
        os._exit(0)


def _join_group(pid: int, group: int) -> None:
    try:
        os.setpgid(pid, group)
    except (PermissionError, ProcessLookupError):
        pass  # the other side was first, or the rank is gone already


def _die_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _send(stream: Any, message: Any) -> None:
    data = pickle.dumps(message)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def _receive(stream: Any) -> Any:
    """The next message; None at the stream's end."""
    data, count = bytearray(), 8
    while len(data) < count and (piece := stream.read(count - len(data))):
        data += piece
        if len(data) == 8:
            count += struct.unpack("<Q", data)[0]
    return pickle.loads(data[8:]) if len(data) == count > 8 else None
