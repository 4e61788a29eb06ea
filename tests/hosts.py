"""Several hosts on one machine, for tests: network namespaces with addresses, names and /dev/shm of their own.

    with Hosts(2) as hosts:
        ranks = hosts.start(python(program), ranks_per_host=2)
        hosts[1].pull_cable()
        ends = hosts.wait(ranks, 60)

Hosts share no network, process, name, /dev/shm or parent with each other; a bridge in a namespace of its own is the
switch between them. Whatever happens, the end of the ``with`` removes all of it: every host is the child of a process
whose end the kernel passes on. Needs root's rights to make namespaces: ``available()`` says why there are none.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.launcher import Command, _die_with_parent

_NETWORK = "10.77.0"
_PORT = 29400
_KEEPER = "mount -t tmpfs tmpfs /dev/shm && ip link set lo up && exec sleep infinity"


def available() -> str:
    """Why no hosts can be made here; "" where they can."""
    for tool in ("ip", "tc", "ss", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    done = subprocess.run(
        [*_unshare("--net", "--uts", "--mount", "--ipc", "--pid"), "ip", "link", "add", "br0", "type", "bridge"],
        capture_output=True,
        text=True,
    )
    return done.stderr.strip()


def _unshare(*kinds: str) -> list[str]:
    proc = ["--mount-proc"] if "--pid" in kinds else []
    return ["unshare", *kinds, "--fork", "--kill-child", *proc]


class _Namespace:
    """A process that keeps namespaces alive, and commands inside them."""

    def __init__(self, *kinds: str, script: str = "exec sleep infinity") -> None:
        self._keeper = subprocess.Popen([*_unshare(*kinds), "sh", "-c", script])
        children = Path(f"/proc/{self._keeper.pid}/task/{self._keeper.pid}/children")
        end = time.monotonic() + 20
        while time.monotonic() < end and self._keeper.poll() is None:
            if (told := children.read_text().split()) and Path(f"/proc/{told[0]}/comm").read_text() == "sleep\n":
                self.pid = int(told[0])
                return
            time.sleep(0.005)
        self.end()
        raise RuntimeError(f"a namespace of {kinds} was not made")

    def run(self, *command: str) -> None:
        subprocess.run(self.inside(*command), check=True)

    def inside(self, *command: str) -> list[str]:
        return ["nsenter", "-t", str(self.pid), "-a", "--", *command]

    def end(self) -> None:
        self._keeper.kill()
        self._keeper.wait()


class Program(Command):
    """Python code on a host, forked from the zygote: as ``subprocess.Popen`` of ``nsenter ... python -c``."""

    def __init__(self, keeper: int, output: Path, code: str, *arguments: str, env: dict[str, str]) -> None:
        where = {"HOST_KEEPER": str(keeper), "HOST_OUTPUT": str(output)}
        super().__init__("tests.program", code, *arguments, prepare=enter, env=env | where)
        os.close(self._output)  # it prints into a file

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not select.select([self._status], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a program on a host", timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def poll(self) -> int | None:
        running = self.returncode is None
        if super().poll() is not None and running:
            os.close(self._status)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def enter() -> None:
    """``prepare`` of a ``Program``: the process goes on as a child of itself on the host, as nsenter's does."""
    keeper, output, folder = os.environ.pop("HOST_KEEPER"), os.environ.pop("HOST_OUTPUT"), os.getcwd()
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), stream)
    libc = ctypes.CDLL(None, use_errno=True)
    for space in [os.open(f"/proc/{keeper}/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts", "ipc", "pid", "mnt")]:
        if libc.setns(space, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(space)
    os.chdir(folder)
    if child := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)
    _die_with_parent()


@dataclass
class Host:
    """One host. ``address``: on the wire to the others; ``port``: its end at the switch."""

    name: str
    address: str
    port: str
    _inside: _Namespace
    _switch: _Namespace

    def run(self, *command: str) -> None:
        """Run a command on this host, as its owner."""
        self._inside.run(*command)

    def command(self, *command: str) -> list[str]:
        """A command line that runs ``command`` on this host."""
        return self._inside.inside(*command)

    def pull_cable(self) -> None:
        """Nothing passes from or to this host any more."""
        self._switch.run("ip", "link", "set", self.port, "down")

    def put_cable_back(self) -> None:
        self._switch.run("ip", "link", "set", self.port, "up")

    def limit(self, rate: str) -> None:
        """Limit what comes to this host, and what leaves it, to a rate such as ``20mbit``."""
        shape = ["root", "tbf", "rate", rate, "burst", "64kb", "latency", "400ms"]
        self._switch.run("tc", "qdisc", "replace", "dev", self.port, *shape)
        self._inside.run("tc", "qdisc", "replace", "dev", "eth0", *shape)

    def processes(self) -> list[int]:
        """What runs on this host, by the numbers of this machine, but for its keeper."""
        space = os.readlink(f"/proc/{self._inside.pid}/ns/pid")
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return [pid for pid in pids if pid != self._inside.pid and _link(f"/proc/{pid}/ns/pid") == space]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes of this host. Its kernel lives on: it closes what SIGKILL ends."""
        for pid in self.processes():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def lose_power(self) -> None:
        """All of it ends, and nobody is told."""
        self.pull_cable()
        self.signal(signal.SIGKILL)


Process = Program | subprocess.Popen[str]


class Hosts(list[Host]):
    """Hosts on one switch, named ``host0`` and so on; see the module."""

    def __init__(self, count: int, names: list[str] | None = None) -> None:
        super().__init__()
        self._namespaces: list[_Namespace] = []
        self._names = names or [f"host{i}" for i in range(count)]
        self._running: list[Process] = []
        self._folder = Path(tempfile.mkdtemp(prefix="axo-hosts-"))

    def __enter__(self) -> Hosts:
        try:
            switch = self._keep(_Namespace("--net"))
            switch.run("ip", "link", "add", "br0", "type", "bridge")
            switch.run("ip", "link", "set", "br0", "up")
            for i, name in enumerate(self._names):
                script = f"hostname '{name}' && {_KEEPER}"
                inside = self._keep(_Namespace("--net", "--uts", "--mount", "--ipc", "--pid", script=script))
                port, address = f"h{i}", f"{_NETWORK}.{i + 1}"
                switch.run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(inside.pid))
                switch.run("ip", "link", "set", port, "master", "br0", "up")
                inside.run("ip", "addr", "add", f"{address}/24", "dev", "eth0")
                inside.run("ip", "-6", "addr", "add", f"fd77::{i + 1}/64", "dev", "eth0", "nodad")
                inside.run("ip", "link", "set", "eth0", "up")
                self.append(Host(name, address, port, inside, switch))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running:
            process.kill()
        for namespace in reversed(self._namespaces):
            namespace.end()
        for process in self._running:
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _keep(self, namespace: _Namespace) -> _Namespace:
        self._namespaces.append(namespace)
        return namespace

    def start(
        self, command: list[str], ranks_per_host: int, outputs: str = "rank", only: Sequence[int] | None = None,
        **environment: str | None,
    ) -> list[Process]:  # fmt: skip
        """Start ranks of ``command`` on every host, as torchrun would: RANK, WORLD_SIZE, MASTER_ADDR and so on.

        That of ``python`` is forked from the zygote, which spares each rank seconds of imports.

        ``outputs``: how the files begin in which they print; another name for ranks that run beside others. ``only``:
        these ranks; None: all. A variable that is None is not set.
        """
        size = len(self) * ranks_per_host
        started: list[Process] = []
        for rank in range(size) if only is None else only:
            host = self[rank // ranks_per_host]
            own: dict[str, str | None] = {
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_RANK": str(rank % ranks_per_host),
                "LOCAL_WORLD_SIZE": str(ranks_per_host),
                "MASTER_ADDR": self[0].address,
                "MASTER_PORT": str(_PORT),
                "PYTHONPATH": str(Path(__file__).parent.parent),
                **environment,
            }
            (path := self._folder / f"{outputs}{rank}.txt").write_text("")
            env = {name: value for name, value in (os.environ | own).items() if value is not None}
            process: Process
            if command[:2] == python("")[:2]:
                process = Program(host._inside.pid, path, *command[2:], env=env)
            else:
                with path.open("w") as output:
                    process = subprocess.Popen(
                        host.command(*command), env=env, stdout=output, stderr=subprocess.STDOUT, text=True
                    )
            started.append(process)
            self._running.append(process)
        return started

    def output(self, rank: int, outputs: str = "rank") -> str:
        """What a rank has printed so far."""
        return (self._folder / f"{outputs}{rank}.txt").read_text()

    def wait_for(self, text: str, ranks: list[int], seconds: float) -> None:
        """Wait until each of the ranks has printed a text."""
        end = time.monotonic() + seconds
        while missing := [rank for rank in ranks if text not in self.output(rank)]:
            if time.monotonic() > end:
                raise AssertionError(f"ranks {missing} have not printed {text!r}:\n{self.output(missing[0])}")
            time.sleep(0.01)

    def wait(self, ranks: list[Process], seconds: float) -> list[int]:
        """Wait for ranks to end. Returns their exit codes."""
        end = time.monotonic() + seconds
        for rank in ranks:
            rank.send_signal(signal.SIGCONT)  # nsenter stops when what it waits for does, and is not woken with it
        try:
            return [rank.wait(max(end - time.monotonic(), 0.1)) for rank in ranks]
        except subprocess.TimeoutExpired:
            text = "\n".join(f"rank {i}: {rank.poll()}\n{self.output(i)[-2000:]}" for i, rank in enumerate(ranks))
            raise AssertionError(f"ranks have not ended within {seconds} s:\n{text}") from None


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def python(program: str, *arguments: Any) -> list[str]:
    """The command line of a Python program."""
    return [sys.executable, "-c", program, *map(str, arguments)]
