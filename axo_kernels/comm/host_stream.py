"""A communication stream for CPUs: one thread that runs what it is given, in order.

It stands for what a CUDA stream is on a GPU. An error stops what follows and is raised by ``join``. The thread is made
by the process that uses it (never before a fork), sleeps when it has nothing to do, and ends with the process.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait


class SignalTimeout(RuntimeError):
    """A flag was not set within its bound; the message names rank, chunk and epoch."""


class StreamWork(Future[None]):
    """Pending work on a host stream."""

    def wait(self) -> None:
        """Block until the work is done; raise what it raised."""
        self.result()


DONE = StreamWork()  # complete already
DONE.set_result(None)


class HostStream:
    """The thread and its queue."""

    def __init__(self, name: str) -> None:
        self.process = os.getpid()
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], StreamWork] | None] = queue.SimpleQueue()
        self._pending: list[StreamWork] = []
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, call: Callable[[], None]) -> StreamWork:
        """Run ``call`` after everything submitted before."""
        work = StreamWork()
        self._pending.append(work)
        self._queue.put((call, work))
        return work

    def join(self) -> None:
        """Block until everything submitted is done; raise the first error and forget it."""
        pending, self._pending = self._pending, []
        wait(pending)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def stop(self) -> None:
        """Skip whatever has not begun and end the thread."""
        self._error = self._error or RuntimeError("the host stream was stopped")
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            call, work = item
            if self._error is None:
                try:
                    call()
                except BaseException as error:
                    self._error = error
            if self._error is None:
                work.set_result(None)
            else:
                work.set_exception(self._error)
