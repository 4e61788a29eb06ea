"""Offload: a part of a rank's state lies on a lower tier, so that a model trains in less memory.

    offload = axo.Offload(optimizer=True, activations="all", dir="/scratch")
    model = axo.parallelize(model, comms, offload=offload)
    optimizer = offload.adamw(model.parameters(), lr=3e-4)

Files: ``options`` (what a user says; needs no torch until an optimizer is made), ``tier`` (where it lies: mapped files,
pinned memory), ``copy_stream`` (copies beside the computation), ``optimizer`` (AdamW in pieces), ``parameters`` (and
gradients), ``shards`` (weights on the way to a gather, and their gradients back), ``activations`` (saved tensors).
Names load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from axo.lazy import names_of

if TYPE_CHECKING:
    from axo.offload.optimizer import OffloadedAdamW
    from axo.offload.options import Offload

__all__ = ["Offload", "OffloadedAdamW"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = names_of(
        __name__, {"Offload": "axo.offload.options", "OffloadedAdamW": "axo.offload.optimizer"}
    )
