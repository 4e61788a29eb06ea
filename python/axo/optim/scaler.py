"""torch's gradient scaler for fp16 on shards: all ranks skip a step, or none.

A rank sees the gradients of its shards only, so an overflow may show on one rank alone. So the flag that torch's scaler
reads is first reduced (max) over all ranks of all stages; scale and steps stay equal on all.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import torch

from axo.comm.connect import Communicators, check_comms


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` whose overflow flag is that of any rank. Every rank must call it alike.

    Args:
        device: As in torch; default: that of the communicators.
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: As in torch.
        comms: What ``axo.connect`` returned.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        comms: Communicators,
    ) -> None:
        check_comms("GradScaler", comms)
        device = comms.device.type if device is None else device
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._comms = comms
        if enabled:  # in stages only the last one scales a loss, which torch waits for
            self._lazy_init_scale_growth_tracker(comms.device)  # type: ignore[attr-defined]

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        # torch copies the scale to the host without waiting; gradients there need it complete.
        with_grad = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        kinds = dict.fromkeys(p.grad.device.type for p in with_grad)
        if len(kinds) > 1 and getattr(optimizer, "_step_supports_amp_scaling", False):
            raise ValueError(
                f"GradScaler: a fused {type(optimizer).__name__} cannot take gradients on {' and '.join(kinds)};"
                " use axo.Offload(optimizer=True, parameters=True), or an optimizer with fused=False"
            )
        flags: dict[torch.device, torch.Tensor] = {}
        for kind in kinds:
            place = inv_scale.device if kind == inv_scale.device.type else torch.device(kind)
            of_kind = SimpleNamespace(param_groups=[{"params": [p for p in with_grad if p.grad.device.type == kind]}])
            scale, flag = inv_scale.to(place), found_inf.to(place)
            flags |= super()._unscale_grads_(cast("torch.optim.Optimizer", of_kind), scale, flag, allow_fp16)
        device = self._comms.device
        flag = torch.stack([each.to(device) for each in flags.values()]).amax(0) if flags else torch.zeros(1)
        flag = self._comms.everyone.all_reduce(flag.to(device), "max")
        if not flags:
            return {device: flag}
        return {key: flag.to(key) for key in flags}
