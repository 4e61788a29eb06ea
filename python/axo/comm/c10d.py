"""Tells torch.distributed of the backend ``axo``, without importing torch.

torch 2.14 and later look a name that they do not know up among the entry points ``torch.distributed.backends``
(pyproject.toml names `register` there): ``init_process_group("axo")`` needs no import, and a program that does not ask
for the name pays nothing. For torch 2.11 to 2.13 ``import axo`` has to do it, whichever of the two was imported first,
and must stay light where only planning is wanted. So: if torch.distributed is loaded, register now. If not, put one
finder at the head of ``sys.meta_path`` that waits for the module ``torch.distributed.distributed_c10d``; it lets the
ordinary finders locate it, lets it execute, registers, and has removed itself by then. It goes when torch 2.13 does.
(The other entry points, ``torch.backends``, would run in every program that imports torch.)
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

_TARGET = "torch.distributed.distributed_c10d"


def register() -> None:
    """Register the backend now if torch.distributed is loaded, else as soon as it is. Nothing else is loaded."""
    loaded = sys.modules.get(_TARGET)
    if loaded is not None and hasattr(loaded, "Backend"):
        _register(loaded)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register(distributed_c10d: ModuleType) -> None:
    # A list of devices: a plain string is iterated letter by letter by torch. Gloo and NCCL stay torch's defaults for
    # them. The GPU's communicator is made when a group first needs it.
    distributed_c10d.Backend.register_backend("axo", _create_backend, extended_api=True, devices=["cpu", "cuda"])


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


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisterAfter(spec.loader)
        return spec


class _RegisterAfter(importlib.abc.Loader):
    """The module's own loader, and the registration after it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Give the module its own loader back first: inspect and linecache ask it for the source.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _register(module)
