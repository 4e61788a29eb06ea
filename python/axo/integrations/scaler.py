"""The gradient scaler of ``16-mixed`` on shards: all ranks skip a step, or none.

A rank sees the gradients of its shards only, so an overflow may show on one rank alone. The flag that the scaler reads
is therefore reduced (max) over the world before it is used; scale and step stay equal on all ranks.
"""

from __future__ import annotations

from typing import Any

import torch


class AgreeingScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` whose overflow flag is that of any rank.

    Args:
        comms: What ``axo.connect`` returned.
        like: The scaler whose settings are taken over.
    """

    def __init__(self, comms: Any, like: torch.amp.GradScaler) -> None:
        super().__init__(
            like._device,
            init_scale=like._init_scale,
            growth_factor=like._growth_factor,
            backoff_factor=like._backoff_factor,
            growth_interval=like._growth_interval,
            enabled=like.is_enabled(),
        )
        self._comms = comms

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, torch.Tensor]:
        found = super()._unscale_grads_(*args, **kwargs)
        device = self._comms.device
        flag = torch.stack([each.to(device) for each in found.values()]).amax(0) if found else torch.zeros(1)
        flag = self._comms.world.all_reduce(flag.to(device), "max")
        if not found:
            return {device: flag}
        return {key: flag.to(key) for key in found}


def agree_on_overflow(precision: Any, comms: Any) -> None:
    """Let the scaler of a Fabric precision plugin, if it has one, agree over all ranks."""
    scaler = getattr(precision, "scaler", None)
    if isinstance(scaler, torch.amp.GradScaler) and not isinstance(scaler, AgreeingScaler):
        precision.scaler = AgreeingScaler(comms, scaler)
