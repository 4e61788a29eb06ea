"""The gradient scaler of Fabric's ``16-mixed``: made one that agrees over all ranks (``axo.overlap.scaler``)."""

from __future__ import annotations

from typing import Any

import torch

from axo.overlap.scaler import GradScaler


class AgreeingScaler(GradScaler):
    """An ``axo.GradScaler`` with the settings of another scaler.

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
            comms=comms,
        )


def agree_on_overflow(precision: Any, comms: Any) -> None:
    """Let the scaler of a Fabric precision plugin, if it has one, agree over all ranks."""
    scaler = getattr(precision, "scaler", None)
    if isinstance(scaler, torch.amp.GradScaler) and not isinstance(scaler, AgreeingScaler):
        precision.scaler = AgreeingScaler(comms, scaler)
