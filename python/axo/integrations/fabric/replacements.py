"""What Axo takes in place of an optimizer or a scaler that a program gave to Fabric: of the same settings."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

import axo
from axo.comm.connect import Communicators


def offloaded(optimizer: Optimizer, offload: axo.Offload) -> Optimizer:
    """The same AdamW, with its state on the lower tier.

    Raises:
        ValueError: It is another optimizer.
    """
    if type(optimizer) is not torch.optim.AdamW or optimizer.defaults["amsgrad"]:
        raise ValueError(
            f"AxoStrategy: offload.optimizer is of torch.optim.AdamW without amsgrad, and this is a"
            f" {type(optimizer).__qualname__}; use AdamW, or Offload(optimizer=False)"
        )
    settings = ("lr", "betas", "eps", "weight_decay", "maximize")
    groups = [{name: group[name] for name in ("params", *settings)} for group in optimizer.param_groups]
    return offload.adamw(groups, **{name: optimizer.defaults[name] for name in settings})


def agreeing(scaler: torch.amp.GradScaler, comms: Communicators) -> axo.GradScaler:
    """A gradient scaler of the same settings that skips a step on all ranks or on none."""
    names = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
    settings: dict[str, Any] = {name: getattr(scaler, f"_{name}") for name in names}
    return axo.GradScaler(scaler._device, enabled=scaler.is_enabled(), comms=comms, **settings)
