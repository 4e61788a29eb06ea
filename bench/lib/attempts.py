"""One measurement of many, whose error must not keep the others from being measured."""

from __future__ import annotations

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
