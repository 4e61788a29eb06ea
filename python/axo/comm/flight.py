"""The flight recorder from Python: where a process writes the last operations of its communicators, and when.

With AXO_FLIGHT_DIR set, a rank writes its file there when an operation fails and on SIGUSR1
(``csrc/base/flight_recorder.h`` says what is in it). ``axo info --flight FILES`` reads them.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from axo.comm.extension import _C


def arm() -> None:
    """Do as AXO_FLIGHT_DIR says. Called before a communicator is made.

    Raises:
        ValueError: It names no folder.
    """
    folder = os.environ.get("AXO_FLIGHT_DIR", "")
    if not folder:
        return
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"AXO_FLIGHT_DIR={folder!r} is not a folder; make it first, or unset the variable")
    # A program that has a handler of its own for the signal keeps it.
    taken = signal.getsignal(signal.SIGUSR1) not in (signal.SIG_DFL, None)
    _C.set_flight_directory(str(path.resolve()), 0 if taken else int(signal.SIGUSR1))


def lines() -> list[str]:
    """The last operations of every living communicator of this process, one JSON object a line."""
    return _C.flight_lines().splitlines()


def write() -> str:
    """Write this process's file now; its path, or "" when AXO_FLIGHT_DIR is not set."""
    return _C.write_flight_file()
