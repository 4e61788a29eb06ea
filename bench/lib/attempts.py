"""One measurement of many, whose error must not keep the others from being measured, and what helps a bench there."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import torch

from .table import Table

HUNG = 86  # how a process ends that has ended itself


def attempt(
    what: str, call: Callable[[], object], device: torch.device, table: Table, seconds: float | None = None
) -> bool:
    """Call; what it raises is a failure in the table.

    Args:
        seconds: After which the process ends itself (:func:`bounded`); None: never.

    Returns:
        Whether the device still works.
    """
    with table.under_way(what):
        try:
            with bounded(what, seconds, device):
                call()
        except Exception as error:
            table.fail(what, error)
            return works(device)
        return True


def works(device: torch.device) -> bool:
    """Whether the device still takes work. After an illegal address, say, it takes none of this process."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception:
        return False
    return True


def case(what: str, call: Callable[[], object], device: torch.device, table: Table) -> None:
    """One case of a section, after which the next has its turn; none where it has failed in a run before.

    Raises:
        RuntimeError: The device has stopped working, so that the others would fail as well.
    """
    if what not in table.failed and not attempt(what, call, device, table):
        raise RuntimeError(f"the device has stopped working in {what}")


def attempt_each(
    cases: Mapping[str, Callable[[], object]],
    what: str,
    device: torch.device,
    table: Table,
    seconds: float,
    each: float | None = None,
    together: bool = False,
) -> int:
    """Measure cases by name but those that have failed before; one that fails leaves the rest their turn.

    Args:
        what: The cases in a word, for what is said of those that are left.
        seconds: After which none is begun any more.
        each: Seconds of one after which it hangs, and the process ends itself; None: never.
        together: With other ranks, which would wait for ever for one that has failed: it raises.

    Returns:
        How many are left for lack of time, or of a device that works.
    """
    started, waiting = time.perf_counter(), [name for name in cases if name not in table.failed]
    while waiting:
        if time.perf_counter() - started > seconds:
            table.note(f"stopped after {seconds:.0f} s: {len(waiting)} {what} not measured, from {waiting[0]} on")
            break
        name = waiting.pop(0)
        if together:
            cases[name]()
        elif not attempt(name, cases[name], device, table, each):
            table.note(f"the device stopped working: {len(waiting)} {what} not measured")
            break
    return len(waiting)


@contextlib.contextmanager
def bounded(what: str, seconds: float | None, device: torch.device) -> Iterator[None]:
    """End this process where this block takes longer on a GPU: a kernel that hangs holds whoever waits for it, and no
    exception tells. The table's file says what was under way, and whoever started the process may start it again.
    """
    if seconds is None or device.type != "cuda":
        yield
        return
    timer = threading.Timer(seconds, _give_up, (what, seconds))
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(seconds + 2 * _LOOK, exit=True)  # where whoever hangs lets no thread of ours run
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


_LOOK = 20  # seconds of the debugger


def _give_up(what: str, seconds: float) -> None:
    print(f"{what}: has not ended after {seconds:g} s, so this process does", flush=True)
    faulthandler.dump_traceback()
    show_where(os.getpid())
    os._exit(HUNG)


def run_within(command: list[str], timeout: float) -> int:
    """Run a command; returns how it ended.

    Of one that is late, the debugger says where its GPU is and it itself where its threads are (PYTHONFAULTHANDLER);
    then it is killed, and where the driver does not let go of it, it is left.

    Raises:
        subprocess.TimeoutExpired: It has not ended within so many seconds.
    """
    process = subprocess.Popen(command)
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        show_where(process.pid)
        for number in (signal.SIGABRT, signal.SIGKILL):
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LEAVING)
                break
        raise
    except BaseException:
        process.kill()
        raise


_LEAVING = 5.0  # seconds in which a process that is told to end does so


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process; where the driver does not let go of it, it is left."""
    process.kill()
    try:
        process.wait(_LEAVING)
    except subprocess.TimeoutExpired:
        print(f"process {process.pid} does not end", flush=True)


def show_where(pid: int) -> None:
    """Print where the GPU is in a process, by CUDA's debugger, where it is installed: after a kill nothing tells."""
    if shutil.which("cuda-gdb"):
        asked = ("-ex", "info cuda kernels", "-ex", "info cuda warps")
        command = ["timeout", "-s", "KILL", str(_LOOK), "cuda-gdb", "-p", str(pid), "-batch", *asked]
        subprocess.run(command, stdin=subprocess.DEVNULL, check=False)


def end_with_parent() -> None:
    """Let this process end when the one that started it has: it may be inside a kernel that never ends."""
    parent = os.getppid()

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()
