"""Who has come to meet, as told through a store, and whether it still lives: for ranks that have no connection yet.

A rank writes its process and thread into the store and others look at ``/proc``. That works inside one process-id
namespace of Linux; a rank of another one, or of another host, can only be missed.
"""

from __future__ import annotations

import os
import threading

_EXITING = 4  # PF_EXITING in a thread's flags: set before the kernel frees the process's memory


def _space() -> str:
    try:
        return os.readlink("/proc/self/ns/pid") + "@" + open("/proc/sys/kernel/random/boot_id").read().strip()
    except OSError:
        return "unknown"


def present() -> str:
    """What the calling thread tells of itself."""
    return f"{os.getpid()} {threading.get_native_id()} {_space()}"


def gone(told: str) -> bool:
    """Whether the thread that told this is no more. False where that cannot be known."""
    pid, tid, space = told.split(" ", 2)
    if space == "unknown" or space != _space():
        return False
    try:
        with open(f"/proc/{pid}/task/{tid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    return fields[0] in "ZX" or bool(int(fields[6]) & _EXITING)
