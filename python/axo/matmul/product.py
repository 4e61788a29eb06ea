"""The 3D parallel product ``O[m, n] = I[m, k] @ W[n, k]^T + b[n]`` on one rank (Algorithm 1 of the AxoNN papers).

With (in, out) = (y, x) for a normal layer and (x, y) for a transposed one, a rank holds

    I   [m/(Gz*Gdata), k/Gin]      features over the in axis, rows over z and data, replicated over the out axis
    W   [n/Gout/Gz,    k/Gin]      its rows of its block
    b   [n/Gout]

and computes

    forward    W = all-gather_z(W);   O = all-reduce_in(I @ W^T) + b
    backward   dI = all-reduce_out(dO @ W)          started, then behind it
               dW = reduce-scatter_z(dO^T @ I)      and all-reduced over data
               db = sum of dO over rows, reduced over z and data

The gathered weight is kept for backward (one gather a step) unless ``gather_cache="none"`` (two). Under autocast the
shard is cast before it is gathered, so that communication is in the compute dtype too.

Not here: second derivatives (``create_graph=True`` is refused).
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from axo.matmul.exchange import Exchange, Pending, wait_all
from axo.matmul.local import LayerProducts, compute_dtype
from axo.placement import Placement

GATHER_CACHE = ("all", "none")


class DistributedMatmul:
    """What one layer's product needs to know; holds communicators, never a tensor.

    Args:
        comms: The communicators of the grid.
        placement: Where the weight lies.
        in_axis: The axis that splits in_features, over which the output is summed; None: it stays a partial sum.
        out_axis: The axis that splits out_features, over which dI is summed; None: it stays a partial sum.
        grad_reduce: ``"mean"`` or ``"sum"`` over the data ranks.
        gather_cache: ``"all"`` keeps the gathered weight for backward, ``"none"`` gathers it again.

    Raises:
        ValueError: An option is not known.
    """

    def __init__(
        self,
        comms: Any,
        placement: Placement,
        *,
        in_axis: str | None,
        out_axis: str | None,
        grad_reduce: str = "mean",
        gather_cache: str = "all",
    ) -> None:
        if gather_cache not in GATHER_CACHE:
            raise ValueError(f"gather_cache={gather_cache!r} is not known; use one of {GATHER_CACHE}")
        self.exchange = Exchange(comms, placement, grad_reduce)
        self.products = LayerProducts(comms, placement)
        self.in_axis = in_axis
        self.out_axis = out_axis
        self.keep_gathered = gather_cache == "all"

    def __call__(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """(..., k/Gin) -> (..., n/Gout)."""
        if self.exchange.comms.grid.world_size == 1:
            return self.products.alone(input, weight, bias)
        return _Product.apply(input, weight, bias, self)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, matmul: DistributedMatmul
    ) -> torch.Tensor:
        dtype = compute_dtype(input)
        exchange = matmul.exchange
        rows = input.to(dtype).reshape(-1, input.shape[-1])
        block = exchange.gather_weight(weight, dtype)
        bias_cast = None if bias is None else bias.to(dtype)
        if exchange.size(matmul.in_axis) == 1:
            output = matmul.products.forward(rows, block, bias_cast)
        else:
            output = exchange.reduce(matmul.products.forward(rows, block), matmul.in_axis)
            if bias_cast is not None:
                output += bias_cast
        needs_input, needs_weight, _, _ = ctx.needs_input_grad
        kept_block = block if needs_input and matmul.keep_gathered else None
        ctx.save_for_backward(rows if needs_weight else None, weight, kept_block)
        ctx.matmul, ctx.dtype, ctx.input_dtype, ctx.input_shape = matmul, dtype, input.dtype, input.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        return output.view(*input.shape[:-1], output.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_create_graph("Linear")
        rows, weight, block = ctx.saved_tensors
        matmul, exchange = ctx.matmul, ctx.matmul.exchange
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad = grad_output.reshape(ctx.input_shape[:-1].numel(), grad_output.shape[-1])  # may have 0 columns
        pending: list[Pending] = []
        grad_input = grad_weight = grad_bias = None
        with no_autocast(grad.device):
            if needs_input:
                if block is None:
                    block = exchange.gather_weight(weight, ctx.dtype)
                grad_input = exchange.start_reduce(matmul.products.grad_input(grad, block), matmul.out_axis)
                pending.append(grad_input)
            if needs_weight:
                buffer, grad_block = exchange.weight_gradient_buffer(weight.shape[1], grad)
                matmul.products.grad_weight(grad, rows, out=grad_block)
                grad_weight = exchange.start_weight_gradient(buffer)
                pending.append(grad_weight)
            if needs_bias:
                grad_bias = exchange.start_gradient(grad.sum(0, dtype=ctx.bias_dtype))
                pending.append(grad_bias)
            wait_all(*pending)
        return (
            None if grad_input is None else grad_input.wait().view(ctx.input_shape).to(ctx.input_dtype),
            None if grad_weight is None else exchange.finish_weight_gradient(grad_weight, weight.dtype),
            None if grad_bias is None else grad_bias.wait(),
            None,
        )


def no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Switch autocast off where it is on: what runs inside has chosen its dtypes already."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def refuse_create_graph(owner: str) -> None:
    """Refuse a backward pass that is itself to be differentiated.

    Raises:
        RuntimeError: Called from a backward pass with ``create_graph=True``.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{owner}: backward(create_graph=True) is not supported, since the collectives of the backward pass have no"
            " derivative of their own; run it without create_graph, or that part of the model on a grid of 1x1x1x1"
        )
