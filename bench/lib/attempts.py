"""One measurement of many, whose error must not keep the others from being measured, and what helps a bench there."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import torch

from .table import Table


def attempt(what: str, call: Callable[[], object], device: torch.device, table: Table) -> bool:
    """Call; what it raises is a failure in the table.

    Returns:
        Whether the device still works.
    """
    with table.under_way(what):
        try:
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


def end_with_parent() -> None:
    """Let this process end when the one that started it has: it may be inside a kernel that never ends."""
    parent = os.getppid()

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()
