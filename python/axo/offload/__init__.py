"""Offload: a part of a rank's state lies on a lower tier, so that a model trains in less memory.

    offload = axo.Offload(optimizer=True, activations="all", dir="/scratch")
    model = axo.parallelize(model, comms, offload=offload)
    optimizer = offload.adamw(model.parameters(), lr=3e-4)

Files: ``options`` (what a user says), ``tier`` (where it lies: mapped files, pinned memory), ``lane`` (copies beside
the computation), ``optimizer`` (AdamW in pieces), ``parameters`` (and gradients), ``activations`` (saved tensors).
"""

from axo.offload.optimizer import OffloadedAdamW
from axo.offload.options import Offload

__all__ = ["Offload", "OffloadedAdamW"]
