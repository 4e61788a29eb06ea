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

from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from axo.comm.connect import Communicators, check_comms
from axo.matmul import cost
from axo.matmul.product import DistributedMatmul, no_autocast
from axo.matmul.products import LayerProducts
from axo.nn.layer import ParallelLayer, default_device, label_of
from axo.overlap import Overlap
from axo.overlap.engine import Exchange
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
        self.exchange = Exchange(
            comms, placements["weight"], grad_reduce, Overlap(gather_cache=gather_cache, bucket_bytes=0)
        )
        self.exchanges = (self.exchange,)
        left, _, top, _ = self._reversed_padding_repeated_twice
        padding_inside = (top, left) if self._pad_is_inside() else (0, 0)
        products = _Convolutions(
            self.exchange, placements["weight"], like.stride, padding_inside, like.dilation, like.groups
        )
        self.matmul = DistributedMatmul(self.exchange, products, in_axis=in_axis, out_axis=out_axis, owner="Conv2d")
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
        if getattr(input, "dtype", None) is not self.weight.dtype:
            self._check_dtype(input, self.weight)
        channels = self.weight.shape[1] * self.groups
        if input.dim() not in (3, 4) or input.shape[-3] != channels:
            raise ValueError(
                f"{self.label()}: input of shape {tuple(input.shape)} must be (N, {channels}, H, W), with this rank's"
                f" part of in_channels={self.in_channels} over {self.in_axis}={self.exchange.sizes[self.in_axis]};"
                " axo.shard_input(layer, tensor) cuts a whole one"
            )
        batch = input if input.dim() == 4 else input.unsqueeze(0)
        output = self.matmul(self._pad(batch), self.weight, self.bias)
        if self.first_pass:
            self._first_pass(input, output)
        output = self._gather_if_asked(output)
        return output if input.dim() == 4 else output.squeeze(0)

    def _pad(self, batch: torch.Tensor) -> torch.Tensor:
        """What a convolution's own zero padding cannot say is padded before it."""
        if self._pad_is_inside():
            return batch
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        return F.pad(batch, self._reversed_padding_repeated_twice, mode=mode)

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


class _Convolutions(LayerProducts):
    """The products of a convolution on this rank: with the kernel's area in k, in the place of a linear layer's.

    Args:
        exchange, placement: As for :class:`LayerProducts`.
        stride, padding, dilation, groups: Of the convolution; ``padding`` is what zeros it pads inside.
    """

    flat, row_dims = False, (0, 2, 3)

    def __init__(
        self,
        exchange: Exchange,
        placement: Placement,
        stride: tuple[int, ...],
        padding: tuple[int, ...],
        dilation: tuple[int, ...],
        groups: int,
    ) -> None:
        super().__init__(exchange, placement)
        self.fuses = False
        self._sizes, self._groups = (stride, padding, dilation), groups
        self._block_shape = (exchange.block_rows, *placement.local_shape()[1:])

    def forward(self, rows: torch.Tensor, block: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """(N, C, H, W), (n, columns), (n,) -> (N, n, H', W')."""
        with no_autocast(rows.device):
            return self._run("forward", F.conv2d, rows, self._kernel(block), bias, *self._sizes, self._groups)

    def grad_input(self, grad: torch.Tensor, block: torch.Tensor, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """(N, n, H', W'), (n, columns) -> (N, C, H, W), which is ``shape``."""
        assert shape is not None
        like = grad.new_empty(1).expand(shape)  # only its shape matters
        return self._run("grad_input", self._backward, grad, like, self._kernel(block), 0)

    def grad_weight(self, grad: torch.Tensor, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """(N, n, H', W'), (N, C, H, W) -> (n, columns), into ``out`` when given."""
        like = grad.new_empty(1).expand(self._block_shape)
        result = self._run("grad_weight", self._backward, grad, rows, like, 1).flatten(1)
        return result if out is None else out.copy_(result)

    def add_grad_weight(self, grad: torch.Tensor, rows: torch.Tensor, total: torch.Tensor) -> bool:
        """Not as it is computed."""
        return False

    def alone(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The layer on a grid of one rank, by torch."""
        return F.conv2d(input, weight, bias, *self._sizes, self._groups)

    def _kernel(self, block: torch.Tensor) -> torch.Tensor:
        return block.view(self._block_shape)

    def _backward(self, grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, which: int) -> torch.Tensor:
        """The gradient of the input (0) or of the weight (1)."""
        wanted = [which == 0, which == 1, False]
        result = torch.ops.aten.convolution_backward(
            grad, input, weight, None, *self._sizes, False, [0, 0], self._groups, wanted
        )
        return result[which]
