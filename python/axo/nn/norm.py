"""Drop-ins for ``nn.LayerNorm`` and ``nn.RMSNorm`` over a hidden dim that an axis splits (y, for the residual stream).

    mean = sum_h(x) / h                  (LayerNorm only; else 0)
    rstd = (sum_h((x - mean)^2) / h + eps)^(-1/2)
    x^   = (x - mean) * rstd;   y = x^ * w + b
    dx   = rstd * (g - x^ * sum_h(g x^)/h - sum_h(g)/h),   g = dy * w      (last term: LayerNorm only)
    dw   = sum over rows of dy * x^,   db = sum over rows of dy            both reduced over the axes that split rows

The sums over h, one or two numbers a token, are all-reduced over the axis in fp32 (fp64 for fp64 inputs). LayerNorm
takes the mean first and then the squares around it, two small all-reduces: the sum of squares alone would lose digits
where the mean is large beside the deviation. Weights are split like the hidden dim and replicated elsewhere. A
LayerNorm whose hidden dim nobody splits runs torch's kernel; in fp32, where its gradients do not travel either, it is
torch's own. (torch's RMSNorm is several operations on a CPU, which keep more for backward than this one.)

Not here: norms over more than the last dim.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from axo.comm.connect import Communicators
from axo.matmul import activations, cost
from axo.matmul.product import refuse_create_graph
from axo.nn.layer import ParallelLayer, default_device, label_of
from axo.overlap.autograd import SKIP
from axo.overlap.engine import Exchange
from axo.placement import Placement, check_divides, check_whole

_layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default


class _Norm(ParallelLayer):
    """What both norms share."""

    centered: bool
    unit_offset = False
    features: int  # h

    def _build(
        self,
        normalized_shape: int | tuple[int, ...],
        parameters: tuple[str, ...],
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        comms: Communicators,
        axis: str | None,
        sum_grad_over: tuple[str, ...],
        grad_reduce: str,
        name: str | None,
    ) -> None:
        shape = tuple(normalized_shape) if isinstance(normalized_shape, Iterable) else (normalized_shape,)
        check_whole(label_of(self, name), 0, {"normalized_shape": normalized_shape})
        placement = Placement(shape[-1:], ((axis,) if axis else (),), comms=comms)
        self._start(comms, name, dict.fromkeys(parameters, placement))
        if len(shape) != 1:
            raise ValueError(f"{self.label()}: normalized_shape={shape} has {len(shape)} dims; use one")
        if axis is not None:
            check_divides(self.label(), "normalized_shape", shape[0], axis, comms.grid.size(axis))
        self.features = shape[0]
        self.in_axis = self.out_axis = axis
        self.in_features_whole = self.out_features_whole = self.features
        self.local_features = placement.local_shape()[0]
        self.sum_grad_over = sum_grad_over
        self.exchange = Exchange(comms, placement, grad_reduce)
        self.exchanges = (self.exchange,)
        over = (*sum_grad_over, *([axis] if axis else []))
        self.is_silent = self.exchange.silent and not self.exchange.reductions_of(over)
        for absent in {"weight", "bias"} - set(parameters):
            self.register_parameter(absent, None)
        self._add_parameters(default_device(device, comms), dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise: (..., h/G) -> (..., h/G).

        Raises:
            ValueError: The last dim is not this rank's part of the hidden dim.
        """
        if not isinstance(input, torch.Tensor):
            self._check_dtype(input, self.weight)
        if input.dim() == 0 or input.shape[-1] != self.local_features:
            raise ValueError(
                f"{self.label()}: input of shape {tuple(input.shape)} must end in {self.local_features}, this"
                f" rank's part of {self.out_features_whole} over {self.out_axis}={self.exchange.sizes[self.out_axis]}"
            )
        weight: Any = self.weight  # looked up once a pass: nn.Module's lookup is slow
        bias: Any = self.bias
        alike = weight is not None and input.dtype is weight.dtype
        if not alike:
            self._check_norm_dtype(input)
        output = self._normalize(input, weight, bias)
        if self.first_pass:
            self._first_pass(input, output)
        return output

    def _normalize(self, input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        output: torch.Tensor = _Normalize.apply(input, weight, bias, self)
        return output

    def _check_norm_dtype(self, input: torch.Tensor) -> None:
        """torch's norms take halves beside fp32 weights; no integers, and LayerNorm no fp64 beside other weights."""
        wide = torch.float64 in (input.dtype, input.dtype if self.weight is None else self.weight.dtype)
        if not input.is_floating_point() or (self.centered and wide and self.weight is not None):
            weight = "" if self.weight is None else f" and the weight {self.weight.dtype}"
            raise RuntimeError(f"{self.label()}: the input is {input.dtype}{weight}; give both one floating dtype")

    def cost(self, rows: int, *, recompute: bool = False) -> list[cost.Call]:
        """Count this layer's collectives on this rank in one step.

        Args:
            rows: Rows of one data-parallel group that come here; where tokens are split over x, a part of them.
            recompute: The forward runs again before backward.
        """
        return self._reduced(
            cost.norm(
                self.comms.grid,
                rows,
                self.features,
                kind="layernorm" if self.centered else "rmsnorm",
                recompute=recompute,
                axis=self.out_axis,
                arrangement=self.comms.arrangement,
                vectors=len(self.placements),
                sum_grad_over=self.sum_grad_over,
                coords=self.comms.coords,
            )
        )

    def saved_bytes(self, rows: int, *, itemsize: int = 4) -> float:
        return activations.norm(self._rows(rows), self.local_features, itemsize, centered=self.centered)

    def extra_repr(self) -> str:
        return f"{self.features}, eps={getattr(self, 'eps', None)}, split over {self.out_axis}, grid={self.comms.grid}"


class LayerNorm(_Norm, nn.LayerNorm):
    """Layer normalisation over a split hidden dim.

    Args:
        normalized_shape: Whole hidden size h.
        eps, elementwise_affine, bias, device, dtype: As in torch.
        comms: What ``axo.connect`` returned.
        axis: The axis that splits h; None: every rank has all of it.
        sum_grad_over: Axes whose ranks normalise different things with the same weight (heads over x).
        grad_reduce: ``"mean"`` averages gradients over the Gz * Gdata data ranks, ``"sum"`` adds them.
        name: How error messages call the layer.

    Raises:
        ValueError: h does not divide over the axis.
    """

    centered = True

    def __init__(
        self,
        normalized_shape: int | tuple[int, ...],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        comms: Communicators,
        axis: str | None = "y",
        sum_grad_over: tuple[str, ...] = (),
        grad_reduce: str = "mean",
        name: str | None = None,
    ) -> None:
        parameters = () if not elementwise_affine else ("weight", "bias") if bias else ("weight",)
        self._build(normalized_shape, parameters, device, dtype, comms, axis, sum_grad_over, grad_reduce, name)
        self.normalized_shape, self.eps, self.elementwise_affine = (self.features,), eps, elementwise_affine
        self.reset_parameters()

    def serial(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        return nn.LayerNorm(
            self.normalized_shape, self.eps, self.elementwise_affine, self.bias is not None, device=device, dtype=dtype
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.comms.grid.world_size == 1:
            return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        return super().forward(input)

    def _normalize(self, input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        if self.is_silent and weight is not None and input.dtype is weight.dtype is torch.float32:
            return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)
        return super()._normalize(input, weight, bias)


class RMSNorm(_Norm, nn.RMSNorm):
    """Root-mean-square normalisation over a split hidden dim.

    Args:
        normalized_shape: Whole hidden size h.
        eps, elementwise_affine, device, dtype: As in torch.
        comms: What ``axo.connect`` returned.
        axis: The axis that splits h; None: every rank has all of it.
        sum_grad_over: Axes whose ranks normalise different things with the same weight (heads over x).
        grad_reduce: ``"mean"`` averages gradients over the Gz * Gdata data ranks, ``"sum"`` adds them.
        add_unit_offset: Multiply by ``1 + weight`` (Gemma).
        name: How error messages call the layer.

    Raises:
        ValueError: h does not divide over the axis.
    """

    centered = False

    def __init__(
        self,
        normalized_shape: int | tuple[int, ...],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        comms: Communicators,
        axis: str | None = "y",
        sum_grad_over: tuple[str, ...] = (),
        grad_reduce: str = "mean",
        add_unit_offset: bool = False,
        name: str | None = None,
    ) -> None:
        parameters = ("weight",) if elementwise_affine else ()
        self._build(normalized_shape, parameters, device, dtype, comms, axis, sum_grad_over, grad_reduce, name)
        self.normalized_shape, self.eps, self.elementwise_affine = (self.features,), eps, elementwise_affine
        self.unit_offset = add_unit_offset
        self.reset_parameters()

    def serial(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        return nn.RMSNorm(self.normalized_shape, self.eps, self.elementwise_affine, device=device, dtype=dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.comms.grid.world_size == 1 and not self.unit_offset:
            return F.rms_norm(input, self.normalized_shape, self.weight, self.eps)
        return super().forward(input)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, norm: _Norm
    ) -> torch.Tensor:
        exchange, axis, h = norm.exchange, norm.out_axis, norm.features
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        # CUDA autocast runs layer_norm in fp32 and returns fp32; nothing else changes the dtype.
        lifted = norm.centered and x.is_cuda and torch.is_autocast_enabled("cuda") and x.dtype != torch.float64
        ctx.input_dtype, ctx.norm, ctx.wide = x.dtype, norm, wide
        ctx.parameters = weight, bias
        xw = x.to(wide)
        mean: torch.Tensor | None
        ctx.whole = norm.centered and exchange.sizes[axis] == 1
        if ctx.whole:
            scale, shift = (None if p is None else p.to(wide) for p in (weight, bias))
            y, mean, rstd = torch.native_layer_norm(xw, (h,), scale, shift, _epsilon(norm, wide))
            ctx.save_for_backward(x, weight, mean, rstd)
            return y.to(wide if lifted else x.dtype)
        mean = None
        if norm.centered:
            mean = exchange.reduce(xw.sum(-1, keepdim=True), axis) / h
            xw = xw - mean
        rstd = torch.rsqrt(exchange.reduce(xw.square().sum(-1, keepdim=True), axis) / h + _epsilon(norm, wide))
        y = xw * rstd
        if weight is not None:
            y = y * _scale(weight, norm, wide)
        if bias is not None:
            y = y + bias.to(wide)
        ctx.save_for_backward(x, weight, mean, rstd)
        return y.to(wide if lifted else x.dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        norm: _Norm = ctx.norm
        refuse_create_graph(type(norm).__name__)
        x, weight, mean, rstd = ctx.saved_tensors
        exchange, h = norm.exchange, norm.features
        how_input, how_weight, how_bias = exchange.hows(ctx, norm.sum_grad_over)
        needs_input = how_input != SKIP
        grad = grad_output.to(ctx.wide)
        if ctx.whole:
            outputs = [needs_input, how_weight != SKIP, how_bias != SKIP]
            wide = [None if p is None else p.to(ctx.wide) for p in (weight, ctx.parameters[1])]
            grads = list(_layer_norm_backward(grad, x.to(ctx.wide), (h,), mean, rstd, *wide, outputs))
            for index, how in ((1, how_weight), (2, how_bias)):
                if how != SKIP:
                    parameter = ctx.parameters[index - 1]
                    grads[index] = exchange.vector_gradient(how, parameter, grads[index], norm.sum_grad_over)
            return grads[0].to(ctx.input_dtype) if needs_input else None, grads[1], grads[2], None
        normalized = (x.to(ctx.wide) if mean is None else x.to(ctx.wide) - mean) * rstd
        sums = scaled = grad_input = grad_weight = grad_bias = None
        if needs_input:
            scaled = grad if weight is None else grad * _scale(weight, norm, ctx.wide)
            columns = [(scaled * normalized).sum(-1)] + ([scaled.sum(-1)] if norm.centered else [])
            sums = exchange.start_reduce(torch.stack(columns), norm.out_axis)
        if how_weight != SKIP:
            dw = (grad * normalized).reshape(-1, grad.shape[-1]).sum(0)
            grad_weight = exchange.vector_gradient(how_weight, ctx.parameters[0], dw, norm.sum_grad_over)
        if how_bias != SKIP:
            db = grad.reshape(-1, grad.shape[-1]).sum(0)
            grad_bias = exchange.vector_gradient(how_bias, ctx.parameters[1], db, norm.sum_grad_over)
        if sums is not None and scaled is not None:
            means = sums.wait().unsqueeze(-1) / h
            grad_input = scaled - normalized * means[0]
            if norm.centered:
                grad_input -= means[1]
            grad_input = (grad_input * rstd).to(ctx.input_dtype)
        return grad_input, grad_weight, grad_bias, None


def _scale(weight: torch.Tensor, norm: _Norm, wide: torch.dtype) -> torch.Tensor:
    return 1 + weight.to(wide) if norm.unit_offset else weight.to(wide)


def _epsilon(norm: _Norm, wide: torch.dtype) -> float:
    """What keeps the root from zero; torch's default for RMSNorm is the epsilon of the dtype computed in."""
    eps: float | None = norm.eps  # type: ignore[assignment]
    return torch.finfo(wide).eps if eps is None else eps
