"""A bench in a process of its own, for what may hang there: ended when it is late, or has been quiet for too long.

It prints JSON lines: ``{"begins": ...}`` before each case, then the case's rows; what else is printed (a compiler's
complaints) is none of its rows. It writes into a file, so that it never waits for its reader; its errors go where ours
go.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from typing import Any

from .attempts import end, show_where


class OutOfTimeError(TimeoutError):
    """What ran was not waited for any longer; nothing is said against it."""


class Trial:
    """One such process, which runs from now on.

    Args:
        command: What is run.
        env: Its environment; None: this process's.
        rows: Whether it prints rows; else what it prints goes where ours goes.
    """

    def __init__(self, command: list[str], env: dict[str, str] | None = None, *, rows: bool = True) -> None:
        self._file = tempfile.TemporaryFile() if rows else None
        self._started, self._killed = time.time(), False
        self.process = subprocess.Popen(command, stdout=self._file, env=env)

    def wait(self, until: float, quiet: float = float("inf")) -> str:
        """Wait for its end. Where it has said nothing for ``quiet`` seconds it is killed, after what a debugger finds.

        Args:
            until: When it is killed though nothing is wrong with it; by ``time.perf_counter``.
            quiet: Seconds.

        Returns:
            "" where it came to its end, else what became of it.

        Raises:
            OutOfTimeError: ``until`` has come before its end, and it has spoken in time.
        """
        while (code := self.process.poll()) is None:
            spoke = os.fstat(self._file.fileno()).st_mtime if self._file else self._started
            if (silent := time.time() - max(self._started, spoke)) > quiet:
                show_where(self.process.pid)
                self.kill()
                return f"has said nothing for {silent:.0f} s: a kernel that hangs"
            if time.perf_counter() > until:
                self.kill()
                raise OutOfTimeError("no time was left for it")
            time.sleep(0.05)
        return f"ended with {code}" if code else ""

    def said(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Its rows so far, and the line in which it has named last what begins; {} where it named nothing."""
        rows: list[dict[str, Any]] = []
        last: dict[str, Any] = {}
        assert self._file is not None
        self._file.seek(0)
        for line in self._file.read().decode(errors="replace").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                row = None
            if not isinstance(row, dict):
                print(line, flush=True)
            elif "begins" in row:
                last = row
            else:
                rows.append(row)
        return rows, last

    def kill(self) -> None:
        """End it; of one whose device does not let go of it no end is waited for."""
        if not self._killed:
            self._killed = True
            end(self.process)
