"""What happens when an operation is complete, without anybody waiting for it: one thread, started at first use.

The core announces completed operations by number and never takes the GIL (csrc/torch/bindings.cpp); this thread
takes the numbers and calls what belongs to them, in the order of completion. A callback may issue collectives. It must
not wait for another future: only this thread completes them.
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
from collections.abc import Callable
from typing import Any

from axo.comm.extension import _C

_STOP = 0


class _Completions:
    def __init__(self) -> None:
        self.reset()
        os.register_at_fork(after_in_child=self.reset)  # the thread stays with the parent

    def reset(self) -> None:
        """Forget everything: nothing waits, no thread runs."""
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Callable[[], None]] = {}
        self._thread: threading.Thread | None = None

    def add(self, core: Any, callback: Callable[[], None]) -> None:
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = callback
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="axo futures", daemon=True)
                self._thread.start()
                atexit.register(self._stop)
        core.announce(number)

    def _run(self) -> None:
        while True:
            for number in _C.take_completed():
                if number == _STOP:
                    return
                self._waiting.pop(number)()

    def _stop(self) -> None:
        # A thread that comes back from the core while the interpreter ends would take the process down.
        if self._thread is None:  # a forked child that used none
            return
        _C.add_completed(_STOP)
        self._thread.join(timeout=5)


_completions = _Completions()  # the core's list is one a process, and so is the thread that empties it


def when_completed(core: Any, callback: Callable[[], None]) -> None:
    """Call ``callback`` on the futures' thread once the core's operation has ended, with or without an error."""
    _completions.add(core, callback)
