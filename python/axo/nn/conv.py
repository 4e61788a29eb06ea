"""A drop-in for ``nn.Conv2d`` whose channels are split over the grid as the features of a linear layer are.

    O[b, n, i, j] = sum over c, u, v of  I[b, c, i*s + u*d - p, j*s + v*d - p] * weight[n, c, u, v]  + bias[n]

| | normal | transposed |
|---|---|---|
| in_channels k split over  | y | x |
| out_channels n split over | x | y |
| ``weight`` on a rank      | ``[n/Gx/Gz, k/Gy, kh, kw]`` | ``[n/Gy/Gz, k/Gx, kh, kw]`` |
| ``bias`` on a rank        | ``[n/Gx]``          | ``[n/Gy]`` |

The batch is split over z and data; height and width are whole, so padding of every mode is exact. Algorithm 1 of the
AxoNN papers with the kernel's area in k: the weight is gathered over z, the output all-reduced over the in axis, the
input's gradient over the out axis behind the weight's, the weight's gradient reduce-scattered over z.

Not here: groups where x or y is above 1 (refused), 1-D and 3-D convolutions, second derivatives.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from axo.comm.connect import Communicators, check_comms
from axo.matmul import cost
from axo.matmul.product import check_unchanged, no_autocast, refuse_create_graph
from axo.matmul.products import compute_dtype
from axo.nn.layer import ParallelLayer, default_device, label_of
from axo.overlap import Overlap
from axo.overlap.dispatch_modes import hidden
from axo.overlap.events import span
from axo.overlap.exchange import Exchange
from axo.overlap.gathers import version_of
from axo.overlap.gradients import SKIP
from axo.placement import Placement, check_divides, check_whole
from axo.sharding import cut_features

Pair = int | tuple[int, int]
PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]


class Conv2d(ParallelLayer, nn.Conv2d):
    """Convolve with a kernel that the grid shares: (N, C/Gin, H, W) -> (N, out_channels/Gout, H', W').

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype: As
            in torch.
        comms: What ``axo.connect`` returned.
        transposed: Swap the roles of x and y. (Not torch's attribute of that name, which stays False.)
        grad_reduce: ``"mean"`` averages gradients over the Gz * Gdata data ranks, ``"sum"`` adds them.
        gather_cache: As in ``axo.Overlap``, for a layer that is part of no model's engine: ``"all"`` keeps the weight
            gathered over z from forward to backward, ``"none"`` gathers it again.
        scatter_input: Take all in_channels on every rank and cut this rank's; backward gathers their gradient.
        gather_output: Return all out_channels on every rank; backward takes this rank's slice of the gradient.
        name: How error messages call the layer.

    Raises:
        ValueError: Channels do not divide over their axis, groups are split, or an option is not known.
    """

    feature_dim = -3

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: str | Pair = 0,
        dilation: Pair = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        comms: Communicators,
        transposed: bool = False,
        grad_reduce: str = "mean",
        gather_cache: str | int = "all",
        scatter_input: bool = False,
        gather_output: bool = False,
        name: str | None = None,
    ) -> None:
        check_comms(type(self).__name__, comms)
        label = label_of(self, name)
        comms.arrangement.only_axonn(label)
        check_whole(label, 0, {"in_channels": in_channels, "out_channels": out_channels, "dilation": dilation})
        check_whole(label, 0, {} if isinstance(padding, str) else {"padding": padding})
        check_whole(label, 1, {"kernel_size": kernel_size, "stride": stride, "groups": groups})
        in_axis, out_axis = ("x", "y") if transposed else ("y", "x")
        # torch checks its own arguments, and works out the padding; on the meta device that costs nothing
        like = nn.Conv2d(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, "meta"
        )
        shape = tuple(like.weight.shape)
        placements = {"weight": Placement(shape, ((out_axis, "z"), (in_axis,) if groups == 1 else ()), comms=comms)}
        if bias:
            placements["bias"] = Placement((out_channels,), ((out_axis,),), comms=comms)
        self._start(comms, name, placements)
        grid = comms.grid
        if groups > 1 and grid.x * grid.y > 1:
            raise ValueError(
                f"{self.label()}: groups={groups} on x={grid.x}, y={grid.y} is not supported, since a group's channels"
                " must meet on one rank; use groups=1, or a grid with x=1 and y=1 (z and data may be any)"
            )
        check_divides(self.label(), "in_channels", in_channels, in_axis, grid.size(in_axis))
        check_divides(self.label(), "out_channels", out_channels, out_axis, grid.size(out_axis))
        for attribute in ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups"):
            setattr(self, attribute, getattr(like, attribute))
        self.transposed, self.output_padding, self.padding_mode = False, like.output_padding, padding_mode
        self._reversed_padding_repeated_twice = like._reversed_padding_repeated_twice
        self.in_axis, self.out_axis = in_axis, out_axis
        self.in_features_whole, self.out_features_whole = in_channels, out_channels
        self.scatter_input, self.gather_output = scatter_input, gather_output
        overlap = Overlap(gather_cache=gather_cache, bucket_bytes=0)
        self.exchange = Exchange(comms, placements["weight"], grad_reduce, overlap)
        self.exchanges = (self.exchange,)
        if not bias:
            self.register_parameter("bias", None)
        self._add_parameters(default_device(device, comms), dtype)
        self.reset_parameters()

    def serial(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        sizes = (self.in_channels, self.out_channels, self.kernel_size, self.stride, self.padding, self.dilation)
        more = (self.groups, self.bias is not None, self.padding_mode)
        return nn.utils.skip_init(nn.Conv2d, *sizes, *more, device=device, dtype=dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Convolve: (N, C/Gin, H, W) or (C/Gin, H, W) -> the same with out_channels/Gout.

        Raises:
            ValueError: The input has not this rank's part of in_channels.
        """
        if self.scatter_input and self.in_axis is not None and input.dim() >= 3:
            input = cut_features(input, self.comms, self.in_axis, self.in_channels, dim=-3)
        if input.dtype is not self.weight.dtype:
            self._check_dtype(input, self.weight)
        channels = self.weight.shape[1] * self.groups
        if input.dim() not in (3, 4) or input.shape[-3] != channels:
            raise ValueError(
                f"{self.label()}: input of shape {tuple(input.shape)} must be (N, {channels}, H, W), with this rank's"
                f" part of in_channels={self.in_channels} over {self.in_axis}={self.exchange.size(self.in_axis)};"
                " axo.shard_input(layer, tensor) cuts a whole one"
            )
        batch = input if input.dim() == 4 else input.unsqueeze(0)
        batch, padding = self._pad(batch)
        if self.comms.grid.world_size == 1 and self.exchange.weight_phase is None:
            output = F.conv2d(batch, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)
        else:
            output = _Convolution.apply(batch, self.weight, self.bias, self, padding, torch.is_grad_enabled())
        if self.first_pass:
            self._first_pass(input, output)
        output = self._gather_if_asked(output)
        return output if input.dim() == 4 else output.squeeze(0)

    def _pad(self, batch: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int]]:
        """What a convolution's own zero padding cannot say is padded before it."""
        left, right, top, bottom = self._reversed_padding_repeated_twice
        if self._pad_is_inside():
            return batch, (top, left)
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        return F.pad(batch, (left, right, top, bottom), mode=mode), (0, 0)

    def cost(
        self, batch: int, height: int, width: int, *, itemsize: int = 4, input_grad: bool = True
    ) -> list[cost.Call]:
        """Count this layer's collectives on this rank in one step.

        Args:
            batch: Samples of one data-parallel group (all ranks along z together).
            height, width: Of the input.
            itemsize: Bytes an element of the dtype that it computes in; the bias is reduced in its own, 4 bytes.
            input_grad: Whether the input needs a gradient.
        """
        left, right, top, bottom = self._reversed_padding_repeated_twice
        wide, high = width + left + right, height + top + bottom
        before = (height, width) if self._pad_is_inside() else (high, wide)
        reach = [d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel_size, strict=True)]
        after = [(size - r) // s + 1 for size, r, s in zip((high, wide), reach, self.stride, strict=True)]
        calls = cost.conv2d(
            self.comms.grid,
            batch,
            self.in_channels,
            self.out_channels,
            self.kernel_size[0] * self.kernel_size[1],
            before[0] * before[1],
            after[0] * after[1],
            self.bias is not None,
            in_pixels_whole=height * width,
            groups=self.groups,
            transposed=self.in_axis == "x",
            itemsize=itemsize,
            gathers=self._gathers(input_grad),
            input_grad=input_grad,
            scatter_input=self.scatter_input,
            gather_output=self.gather_output,
            coords=self.comms.coords,
        )
        return self._reduced(calls)

    def flops(self, rows: int) -> float:
        raise NotImplementedError(f"{self.label()}: its flops depend on the size of its images, and are not counted")

    def _pad_is_inside(self) -> bool:
        left, right, top, bottom = self._reversed_padding_repeated_twice
        return self.padding_mode == "zeros" and left == right and top == bottom

    def extra_repr(self) -> str:
        kind = "transposed" if self.in_axis == "x" else "normal"
        return f"{super().extra_repr()}, {kind}, grid={self.comms.grid}, weight on this rank={tuple(self.weight.shape)}"


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        layer: Conv2d,
        padding: tuple[int, int],
        recording: bool,
    ) -> torch.Tensor:
        dtype, exchange = compute_dtype(input), layer.exchange
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        batch = input.to(dtype)
        block, held = exchange.forward_block(weight, dtype, recording=recording, wanted=needs_input)
        block = block.view(exchange.block_rows, *weight.shape[1:])
        partial = exchange.size(layer.in_axis) > 1
        shift = None if bias is None else bias.to(dtype)
        with no_autocast(input.device), span(exchange.engine.events, "compute", "forward", "", exchange.name):
            own_shift = None if partial else shift
            output = F.conv2d(batch, block, own_shift, layer.stride, padding, layer.dilation, layer.groups)
        if partial:
            output = exchange.reduce(output, layer.in_axis)
            if shift is not None:
                with hidden():
                    output += shift.view(-1, 1, 1)
        ctx.save_for_backward(batch if needs_weight else None, weight)
        ctx.weight, ctx.bias, ctx.version, ctx.held = weight, bias, version_of(weight), held
        ctx.layer, ctx.padding, ctx.dtype = layer, padding, dtype
        ctx.input_dtype, ctx.input_shape = input.dtype, input.shape
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_create_graph("Conv2d")
        layer, exchange, weight = ctx.layer, ctx.layer.exchange, ctx.weight
        check_unchanged(layer.label(), weight, ctx.version)
        batch, _ = ctx.saved_tensors
        how_input, how_weight, how_bias = exchange.hows(ctx)
        events = exchange.engine.events
        grad_input = grad_weight = grad_bias = None
        shape = (exchange.block_rows, *weight.shape[1:])
        with no_autocast(grad_output.device):
            if how_input != SKIP:
                block = exchange.backward_block(ctx.held, weight, ctx.dtype).view(shape)
                like = grad_output.new_empty(1).expand(ctx.input_shape)  # only its shape matters
                with span(events, "compute", "dI", "", exchange.name):
                    partial = _convolution_backward(ctx, grad_output, like, block, 0)
                grad_input = exchange.start_reduce(partial, layer.out_axis)
                del block
                ctx.held = None
                exchange.release_block()
            if how_weight != SKIP:
                grad_weight = exchange.gradient(
                    how_weight, weight, lambda: _weight_product(ctx, how_weight, grad_output, batch, shape)
                )
            if how_bias != SKIP:
                grad_bias = exchange.gradient(
                    how_bias,
                    ctx.bias,
                    lambda: exchange.vector_gradient(
                        how_bias, ctx.bias, grad_output.sum((0, 2, 3), dtype=ctx.bias.dtype)
                    ),
                )
        return (
            None if grad_input is None else grad_input.wait().to(ctx.input_dtype),
            grad_weight,
            grad_bias,
            None,
            None,
            None,
        )


def _weight_product(
    ctx: Any, how: str, grad: torch.Tensor, batch: torch.Tensor, shape: tuple[int, ...]
) -> torch.Tensor | None:
    """The gradient of the weight, on its way; None: it comes to .grad later."""
    exchange, weight = ctx.layer.exchange, ctx.weight
    columns = math.prod(weight.shape[1:])  # this rank may have no rows
    with no_autocast(grad.device):
        into, grad_block = exchange.gradient_buffer(how, weight, columns, grad)
        like = grad.new_empty(1).expand(shape)
        with span(exchange.engine.events, "compute", "dW", "", exchange.name):
            grad_block.copy_(_convolution_backward(ctx, grad, batch, like, 1).flatten(1))
        return exchange.weight_gradient(how, weight, into)


def _convolution_backward(
    ctx: Any, grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, which: int
) -> torch.Tensor:
    """The gradient of the input (0) or of the weight (1)."""
    layer = ctx.layer
    wanted = [which == 0, which == 1, False]
    sizes = (layer.stride, ctx.padding, layer.dilation)
    return torch.ops.aten.convolution_backward(grad, input, weight, None, *sizes, False, [0, 0], layer.groups, wanted)[
        which
    ]
