"""Axo: a kernel and communication runtime for training with four-dimensional parallelism.

    grid = axo.Grid(x=2, y=2, z=2)
    comms = axo.connect(grid)
    model = axo.parallelize(model, comms, plan="litgpt")

Names load on first use, so that planning (``axo.perf``, ``axo.Grid``) works where neither torch nor the compiled
extension is installed. One thing happens at import: torch.distributed learns of the backend ``axo``, where it is loaded
already or would not ask for it by itself (see ``axo.comm.c10d``).
"""

from __future__ import annotations

from axo.comm import c10d as _c10d
from axo.lazy import names_of

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
    "parallelize": "axo.parallelization",
    "plan_report": "axo.plans.report",
    "regrid": "axo.regridding",
    "Overlap": "axo.overlap",
    "Offload": "axo.offload",
    "no_sync": "axo.overlap.no_sync",
    "GradScaler": "axo.optim.scaler",
    "token_weight": "axo.overlap.no_sync",
}

__all__ = ["__version__", *_PUBLIC]

__getattr__, __dir__ = names_of(__name__, _PUBLIC)
_c10d.register()
