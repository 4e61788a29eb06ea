"""Axo: a kernel and communication runtime for training with four-dimensional parallelism.

    grid = axo.Grid(x=2, y=2, z=2)
    comms = axo.connect(grid)
    model = axo.parallelize(model, comms, plan="litgpt")

Names load on first use, so that planning (``axo.perf``, ``axo.Grid``) works where neither torch nor the compiled
extension is installed. One thing happens at import: torch.distributed learns of the backend ``axo``, where it is loaded
already or would not ask for it by itself (see ``axo.comm.c10d``).
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

from axo.comm import c10d as _c10d

__version__ = "0.1.0"

# Public name -> the module that holds it. This table is the only place to add a name to.
_PUBLIC = {
    "AXES": "axo.grid",
    "Coords": "axo.grid",
    "Grid": "axo.grid",
    "Error": "axo.errors",
    "Refused": "axo.errors",
    "PeerLost": "axo.errors",
    "Timeout": "axo.errors",
    "Mismatch": "axo.errors",
    "Aborted": "axo.errors",
    "Communicator": "axo.comm.communicator",
    "DeviceCommunicator": "axo.comm.device",
    "DeviceOptions": "axo.comm.device",
    "Work": "axo.comm.work",
    "count_collectives": "axo.comm.counting",
    "empty_shared": "axo.comm.shared_memory",
    "group": "axo.comm.communicator",
    "Communicators": "axo.comm.connect",
    "connect": "axo.comm.connect",
    "AxoStrategy": "axo.integrations.fabric.strategy",
    "Placement": "axo.placement",
    "shard": "axo.sharding",
    "shard_batch": "axo.sharding",
    "shard_input": "axo.sharding",
    "to_dtensor": "axo.sharding",
    "unshard": "axo.sharding",
    "unshard_grad": "axo.sharding",
    "unshard_output": "axo.sharding",
    "clip_grad_norm_": "axo.optim.clip",
    "init_weights": "axo.nn.init",
    "parallelize": "axo.parallelize",
    "plan_report": "axo.plans.report",
    "regrid": "axo.regrid",
    "Overlap": "axo.overlap",
    "Offload": "axo.offload",
    "no_sync": "axo.overlap.no_sync",
    "GradScaler": "axo.optim.scaler",
    "token_weight": "axo.overlap.no_sync",
}
_MODULES = (
    "grid",
    "nn",
    "optim",
    "overlap",
    "offload",
    "perf",
    "matmul",
    "placement",
    "pipeline",
    "comm",
    "train",
    "settings",
    "errors",
    "checkpoint",
    "launch",
)

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        value = getattr(importlib.import_module(_PUBLIC[name]), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"axo.{name}")
    raise AttributeError(f"module 'axo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC, *_MODULES})


class _Package(types.ModuleType):
    """Lets a public function share its name with the module that holds it (``axo.parallelize``).

    The import system binds a submodule to its name in the package; for such a name the function wins.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if name in _PUBLIC and isinstance(value, types.ModuleType):
            value = getattr(value, name, value)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
_c10d.register()
