"""Tells torch.distributed of the backend ``axo``.

torch 2.14 and later look a name that they do not know up among the entry points ``torch.distributed.backends``
(pyproject.toml names `register` there): ``init_process_group("axo")`` needs no import, and a program that does not ask
for the name pays nothing. ``import axo`` tells a torch.distributed that is loaded already; with torch 2.11 to 2.13 it
loads it for that, so planning begins as late as torch does there. It goes when torch 2.13 does. (The other entry
points, ``torch.backends``, would run in every program that imports torch.)
"""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ASKS = 14  # from torch 2.14 on


def register() -> None:
    """Register the backend now, unless torch.distributed is not loaded and will ask for it by name."""
    if "torch.distributed.distributed_c10d" not in sys.modules:
        torch = importlib.util.find_spec("torch")
        if torch is None or torch.origin is None:
            return
        version = re.search(r"__version__ = '2\.(\d+)", Path(torch.origin).with_name("version.py").read_text())
        if version is None or int(version[1]) >= _ASKS:
            return
    from torch.distributed import Backend

    # A list of devices: a plain string is iterated letter by letter by torch. Gloo and NCCL stay torch's defaults for
    # them. The GPU's communicator is made when a group first needs it.
    Backend.register_backend("axo", _create_backend, extended_api=True, devices=["cpu", "cuda"])


@dataclass(frozen=True)
class BackendOptions:
    """What Axo tells the backend of a process group that it makes itself.

    Attributes:
        meeting: How long its ranks may take to meet, in seconds.
        name: In what its errors say; "": torch's number.
    """

    meeting: float
    name: str = ""


def _create_backend(options: Any, own: Any) -> Any:
    """What torch calls for each new process group: torch's _DistributedBackendOptions in, a c10d Backend out."""
    from axo.comm import transports
    from axo.comm.device import ask_for_launch_order
    from axo.comm.extension import _C
    from axo.comm.rendezvous import store_of_this_start

    ask_for_launch_order()  # a communicator of GPUs may follow
    members, seconds = options.global_ranks_in_group, options.timeout.total_seconds()
    rank, size, key = options.group_rank, options.group_size, f"axo/{options.group_id or 'default'}"
    name = str(options.group_id) if members else "world"  # the default group has no list
    if not isinstance(own, BackendOptions):
        own = BackendOptions(seconds)
    store = store_of_this_start(options.store, rank, size, own.meeting)
    core = transports.host_core(store, key, rank, size, own.name or name, seconds, members, meeting=own.meeting)
    return _C.C10dBackend(store, key, core, int(seconds * 1000))
