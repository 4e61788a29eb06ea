"""LitGPT's LoRA layers on a grid: the frozen layer as any other, the adapter beside it.

    O[m, n] = I[m, k] @ W[n, k]^T + b[n]  +  scaling * (drop(I) @ A[r, k]^T) @ B[n, r]^T

With (in, out) the axes of the layer's features, A is split over in like the features of I, and B over out like those of
O; the axes that split rows replicate both, for they are small. So

    forward    mid = all-reduce_in(I @ A^T)      [m, r], whole on every rank;   O += mid @ B^T
    backward   d mid = all-reduce_out(dO @ B)    then dA = d mid^T @ I and dI += d mid @ A
               dA and dB are reduced over z and data (Tesseract's: and x)

A fused projection of queries, keys and values has an adapter for each of those that are enabled: rows of A one after
the other, rows of B split by heads as those of W. Frozen weights have no gradient, and so none is communicated.

Dropout draws masks that agree where ranks hold the same activations. Merging is whole-layer arithmetic on every rank.

Not here: sequence parallelism (refused).
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from litgpt.lora import LoRALinear, LoRAQKVLinear
from torch import nn

from axo.matmul import cost
from axo.matmul.product import no_autocast, refuse_create_graph
from axo.matmul.products import compute_dtype
from axo.nn import Dropout, Features, Linear
from axo.nn.layer import ParallelLayer
from axo.nn.linear_loss import Beside
from axo.overlap.autograd import SKIP, wanted
from axo.overlap.engine import Exchange
from axo.placement import Placement
from axo.plans.litgpt.adapters import AroundLinear, own_gradients
from axo.plans.replace import Replacer
from axo.sharding import unshard


class AdaptedLinear(AroundLinear, LoRALinear):
    """``litgpt.lora.LoRALinear`` (and ``LoRAQKVLinear``) around an :class:`axo.nn.Linear`."""

    linear: Linear

    def __init__(self, old: Any, replacer: Replacer, name: str, transposed: bool, features: Features) -> None:
        AroundLinear.__init__(self, old, replacer, name, transposed, features)
        self.r, self.lora_alpha, self.merged = old.r, old.lora_alpha, old.merged
        self.scaling = getattr(old, "scaling", 0.0)
        self.enable_lora = _enabled(old)
        self.in_features, self.out_features = old.linear.in_features, old.linear.out_features
        # Rows of the output on this rank, block by block.
        whole = Placement((self.out_features,), (self._out_axes,), self.out_blocks, self.comms, self.out_copies)
        widths = [last - first for first, last in whole.ranges(0)]
        self.widths = widths if self.out_blocks else [sum(widths)]
        drop = old.lora_dropout.p if isinstance(old.lora_dropout, nn.Dropout) else 0.0
        split = (str(self.in_axis), *self.comms.arrangement.rows)
        self.lora_dropout = Dropout(drop, comms=self.comms, split=split) if drop else _same

    def _place(self, old: Any) -> dict[str, Placement]:
        if not hasattr(old, "lora_A"):
            return {}
        blocks, copies, shared = self.out_blocks or (old.linear.out_features,), self.out_copies, None
        rows = tuple(itertools.compress(blocks, _enabled(old)))
        if self.out_blocks:
            shared = tuple(itertools.compress(copies or (1,) * len(blocks), _enabled(old)))
        a = Placement((old.lora_A.shape[0], old.linear.in_features), ((), (str(self.in_axis),)), comms=self.comms)
        b = Placement((sum(rows), old.r), (self._out_axes,), rows if self.out_blocks else None, self.comms, shared)
        return {"lora_A": a, "lora_B": b}

    def serial(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        with torch.device("meta"):
            return self._fill(LoRALinear(1, 1, r=self.r, lora_alpha=self.lora_alpha), device, dtype)

    def reset_parameters(self) -> None:
        if self.placements:
            ParallelLayer.reset_parameters(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.linear(x)
        if self.placements and not self.merged:
            mid, added, first, row = self._mid(x), [], 0, 0
            factor = self._factor().to(mid.dtype)
            for width, on in zip(self.widths, self.enable_lora, strict=True):
                if on:
                    added.append(F.linear(mid[..., first : first + self.r], factor[row : row + width]))
                    first, row = first + self.r, row + width
                else:
                    added.append(mid.new_zeros(*mid.shape[:-1], width))
            output = output + (torch.cat(added, -1) if len(added) > 1 else added[0])
        return self._gather_if_asked(output)

    def beside(self, rows: torch.Tensor) -> Beside:
        """What the adapter adds to the rows of a head."""
        return Beside(self._mid(rows), self._factor()) if self.placements and not self.merged else Beside()

    def _mid(self, x: torch.Tensor) -> torch.Tensor:
        """``(..., in/Gin) -> (..., r)``, whole on every rank."""
        mid: torch.Tensor = _Down.apply(self.lora_dropout(x), self.lora_A, self)
        return mid

    def _factor(self) -> torch.Tensor:
        """B, scaled, of which this rank's gradient is reduced behind it."""
        factor: torch.Tensor = _Reduced.apply(self.lora_B, self.exchanges[1]) * self.scaling
        return factor

    @torch.no_grad()
    def get_lora_AB(self) -> torch.Tensor:
        """What the adapter adds to the whole weight, (out_features, in_features). Every rank must call it."""
        a, b = (unshard(getattr(self, name).detach(), self.placements[name]) for name in ("lora_A", "lora_B"))
        blocks, first, row = [], 0, 0
        for rows, on in zip(self.out_blocks or (self.out_features,), self.enable_lora, strict=True):
            if on:
                blocks.append(b[row : row + rows] @ a[first : first + self.r] * self.scaling)
                first, row = first + self.r, row + rows
            else:
                blocks.append(a.new_zeros(rows, self.in_features))
        return torch.cat(blocks)

    @torch.no_grad()
    def merge(self) -> None:
        """Add the adapter to the weight; from then on there is only the weight. Every rank must call it."""
        if self.placements and not self.merged:
            weight = self.linear.weight
            weight += self.linear.placements["weight"].take(self.get_lora_AB()).to(weight.dtype)
            self.merged = True

    def cost(
        self, rows: int, *, itemsize: int = 4, input_grad: bool = True, recompute: bool = False
    ) -> list[cost.Call]:
        """Count the adapter's own collectives on this rank in one step; those of ``linear`` are its own.

        Args:
            rows: m, rows of one data-parallel group (all ranks along z together).
            itemsize: Bytes an element of the dtype that it computes in.
            input_grad: Whether the input needs a gradient, which changes nothing: A does in any case.
            recompute: The forward runs again before backward.
        """
        if not self.placements or self.merged:
            return []
        grid, arrangement = self.comms.grid, self.comms.arrangement
        mid = cost.rows_of(arrangement, grid, rows, self.comms.coords) * self.placements["lora_A"].global_shape[0]
        phases = (cost.FORWARD, cost.RECOMPUTE) if recompute else (cost.FORWARD,)
        calls = [
            cost.Call(phase, "all_reduce", str(self.in_axis), mid, itemsize, cost.REDUCE_OUTPUT) for phase in phases
        ]
        if self.out_axis:
            calls.append(cost.Call(cost.BACKWARD, "all_reduce", self.out_axis, mid, itemsize, cost.REDUCE_INPUT_GRAD))
        return cost.issued(self._reduced(calls + own_gradients(self, itemsize)), grid)

    def extra_repr(self) -> str:
        return f"r={self.r}, scaling={self.scaling}, enabled={self.enable_lora}, grid={self.comms.grid}"


def _enabled(old: Any) -> list[bool]:
    """Which blocks of a serial layer's output have an adapter."""
    return list(old.enable_lora) if isinstance(old, LoRAQKVLinear) else [True]


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


class _Down(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, a: torch.Tensor, layer: AdaptedLinear) -> torch.Tensor:
        dtype = compute_dtype(x)
        rows = x.to(dtype).reshape(x.shape[:-1].numel(), x.shape[-1])
        with no_autocast(x.device):
            mid = layer.exchanges[0].reduce(rows @ a.to(dtype).t(), layer.in_axis)
        ctx.save_for_backward(rows, a)
        ctx.a, ctx.layer, ctx.shape, ctx.input_dtype = a, layer, x.shape, x.dtype  # recomputation gives another a
        return mid.view(*x.shape[:-1], mid.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad_mid: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_create_graph("LoRALinear")
        (rows, _), a, exchange = ctx.saved_tensors, ctx.a, ctx.layer.exchanges[0]
        needs_input, how = wanted(ctx, 0), exchange.how(ctx, 1)
        grad_input = grad_a = None
        with no_autocast(rows.device):
            grad = exchange.start_reduce(grad_mid.reshape(-1, a.shape[0]).clone(), ctx.layer.out_axis).wait()
            if how != SKIP:
                grad_a = exchange.gradient(how, a, lambda: exchange.vector_gradient(how, a, grad.t() @ rows))
            if needs_input:
                grad_input = (grad @ a.to(grad.dtype)).view(ctx.shape).to(ctx.input_dtype)
        return grad_input, grad_a, None


class _Reduced(torch.autograd.Function):
    """A parameter, whose gradient is reduced as that of a layer is."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.parameter, ctx.exchange = parameter, exchange
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        refuse_create_graph("LoRALinear")
        parameter, exchange, how = ctx.parameter, ctx.exchange, ctx.exchange.how(ctx, 0)
        if how == SKIP:
            return None, None
        return exchange.gradient(how, parameter, lambda: exchange.vector_gradient(how, parameter, grad)), None
