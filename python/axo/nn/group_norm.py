"""A drop-in for ``nn.GroupNorm`` over channels that an axis splits, each group whole on one rank.

    y = (x - mean) * rstd * w + b        mean and rstd over a group's channels and all pixels of an image

Groups are blocks of channels, so with num_groups a multiple of the axis's size they fall on ranks as the channels of
``axo.nn.Conv2d`` do, and nothing is sent but the gradients of weight and bias, over the axes that split rows. They are
split like the channels and replicated elsewhere.

Not here: groups that several ranks share (refused), inputs other than (N, C, H, W).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from axo.comm.connect import Communicators
from axo.matmul import cost
from axo.matmul.product import refuse_create_graph
from axo.nn.layer import ParallelLayer, default_device, label_of
from axo.overlap.autograd import SKIP
from axo.overlap.engine import Exchange
from axo.placement import Placement, check_divides, check_whole


class GroupNorm(ParallelLayer, nn.GroupNorm):
    """Group normalisation over split channels: (N, C/G, H, W) -> the same.

    Args:
        num_groups, num_channels, eps, affine, device, dtype: As in torch, of all ranks together.
        comms: What ``axo.connect`` returned.
        axis: The axis that splits the channels; None: every rank has all of them.
        grad_reduce: ``"mean"`` averages gradients over the Gz * Gdata data ranks, ``"sum"`` adds them.
        name: How error messages call the layer.

    Raises:
        ValueError: The groups do not divide over the axis, or the channels not over the groups.
    """

    feature_dim = -3

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        comms: Communicators,
        axis: str | None = "x",
        grad_reduce: str = "mean",
        name: str | None = None,
    ) -> None:
        label = label_of(self, name)
        check_whole(label, 1, {"num_groups": num_groups})
        check_whole(label, 0, {"num_channels": num_channels})
        nn.GroupNorm(num_groups, num_channels, eps, affine, "meta", dtype)  # torch checks its own arguments
        placement = Placement((num_channels,), ((axis,) if axis else (),), comms=comms)
        self._start(comms, name, dict.fromkeys(("weight", "bias") if affine else (), placement))
        ranks = comms.grid.size(axis) if axis else 1
        check_divides(self.label(), "num_groups", num_groups, axis or "x", ranks)
        self.num_groups, self.num_channels, self.eps, self.affine = num_groups, num_channels, eps, affine
        self.local_groups, self.local_channels = num_groups // ranks, num_channels // ranks
        self.in_axis = self.out_axis = axis
        self.in_features_whole = self.out_features_whole = num_channels
        self.exchange = Exchange(comms, placement, grad_reduce)
        self.exchanges = (self.exchange,)
        if not affine:
            self.register_parameter("weight", None)
            self.register_parameter("bias", None)
        self._add_parameters(default_device(device, comms), dtype)
        self.reset_parameters()

    def serial(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        return nn.GroupNorm(self.num_groups, self.num_channels, self.eps, self.affine, device, dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise: (N, C/G, H, W) -> (N, C/G, H, W).

        Raises:
            ValueError: The input has not this rank's part of num_channels.
        """
        if input.dim() != 4 or input.shape[1] != self.local_channels:
            raise ValueError(
                f"{self.label()}: input of shape {tuple(input.shape)} must be (N, {self.local_channels}, H, W), with"
                f" this rank's part of num_channels={self.num_channels} over {self.in_axis}"
            )
        if self.comms.grid.world_size == 1 or self.weight is None:  # nothing to reduce
            output = F.group_norm(input, self.local_groups, self.weight, self.bias, self.eps)
        else:
            output = _GroupNormalize.apply(input, self.weight, self.bias, self)
        if self.first_pass:
            self._first_pass(input, output)
        return output

    def cost(self) -> list[cost.Call]:
        """Count this layer's collectives on this rank in one step: the gradients of weight and bias."""
        calls = [call for _ in self.placements for call in cost.replicated_grad(self.local_channels, 4)]
        return self._reduced(cost.issued(calls, self.comms.grid))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, split over {self.out_axis}, grid={self.comms.grid}"


class _GroupNormalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, norm: GroupNorm) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        # CUDA autocast runs group_norm in fp32 and returns fp32; nothing else changes the dtype.
        lifted = x.is_cuda and torch.is_autocast_enabled("cuda")
        images, channels, height, width = x.shape
        ctx.sizes = images, channels, height * width, norm.local_groups
        output, mean, rstd = torch.ops.aten.native_group_norm(
            x.to(wide).contiguous(), weight.to(wide), bias.to(wide), *ctx.sizes, norm.eps
        )
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.parameters, ctx.norm, ctx.wide = (weight, bias), norm, wide
        return output.to(wide if lifted else x.dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_create_graph("GroupNorm")
        x, weight, mean, rstd = ctx.saved_tensors
        exchange = ctx.norm.exchange
        hows = exchange.hows(ctx)
        outputs = [each != SKIP for each in hows]
        grads = list(
            torch.ops.aten.native_group_norm_backward(
                grad_output.to(ctx.wide).contiguous(),
                x.to(ctx.wide).contiguous(),
                mean,
                rstd,
                weight.to(ctx.wide),
                *ctx.sizes,
                outputs,
            )
        )
        for index, parameter in enumerate(ctx.parameters, 1):
            if hows[index] != SKIP:
                grads[index] = exchange.vector_gradient(hows[index], parameter, grads[index])
        return grads[0].to(x.dtype) if outputs[0] else None, grads[1], grads[2], None
