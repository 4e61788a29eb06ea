"""Sequence parallelism: between a transposed and a normal layer, tokens are split over the axis that replicated them.

Without it a transposed layer all-reduces its output over x, and a normal layer the gradient of its input; what lies
between (residual sums, norms, dropout) is computed by all x ranks alike. With it

    scatter_sequence   [b, s, h] partial sums -> [b, s/Gx, h] sums     reduce-scatter; backward all-gather
    gather_sequence    [b, s/Gx, h] -> [b, s, h]                       all-gather; backward reduce-scatter

take the place of the two all-reduces: the same bytes on a ring, and what lies between keeps 1/Gx of the activations and
does 1/Gx of the work. Weights used there (norms, the transposed layer's bias) see a part of the tokens on each x rank,
so their gradients are summed over x too; dropout masks differ over x, ``Dropout(split=("x", "y", "z", "data"))``.

Source: "Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198), section 4.2.2. Not here:
sequences that do not divide over x (refused), and so generation token by token; attention over a split sequence.
"""

from __future__ import annotations

from typing import Any

import torch

from axo.comm.connect import Communicators
from axo.matmul.product import refuse_create_graph
from axo.matmul.products import compute_dtype
from axo.overlap.autograd import SKIP
from axo.overlap.engine import Exchange
from axo.placement import check_divides


def gather_sequence(tensor: torch.Tensor, comms: Communicators) -> torch.Tensor:
    """Gather tokens over x, in the dtype of autocast: (..., s/Gx, h) -> (..., s, h); backward reduce-scatters."""
    return tensor if comms.grid.x == 1 else _Move.apply(tensor.to(compute_dtype(tensor)), comms, True)


def scatter_sequence(tensor: torch.Tensor, comms: Communicators, *, owner: str = "Linear") -> torch.Tensor:
    """Add up partial sums and keep this rank's tokens: (..., s, h) -> (..., s/Gx, h); backward all-gathers.

    Raises:
        ValueError: The tokens do not divide over x.
    """
    if comms.grid.x == 1:
        return tensor
    if tensor.dim() < 2:
        raise ValueError(f"{owner}: sequence parallelism needs (..., tokens, features), got {tuple(tensor.shape)}")
    check_divides(owner, "sequence length", tensor.shape[-2], "x", comms.grid.x)
    return _Move.apply(tensor, comms, False)


class GatherTokens:
    """A forward hook, before a module or after it, that gathers the tokens of its first argument or of its output."""

    def __init__(self, comms: Communicators) -> None:
        self.comms = comms

    def __call__(self, module: Any, args: tuple[Any, ...], *output: torch.Tensor) -> Any:
        if output:
            return gather_sequence(output[0], self.comms)
        return (gather_sequence(args[0], self.comms), *args[1:])

    def __deepcopy__(self, memo: dict[int, Any]) -> GatherTokens:
        return self


class _Move(torch.autograd.Function):
    """Tokens over x: gathered, or summed and scattered; backward does the other."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, comms: Communicators, gather: bool) -> torch.Tensor:
        ctx.comms, ctx.gather = comms, gather
        return _all_gather(tensor, comms) if gather else _reduce_scatter(tensor, comms)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_create_graph("gather_sequence" if ctx.gather else "scatter_sequence")
        return (_reduce_scatter if ctx.gather else _all_gather)(grad, ctx.comms), None, None


def _all_gather(tensor: torch.Tensor, comms: Communicators) -> torch.Tensor:
    parts, tokens, features = comms.grid.x, tensor.shape[-2], tensor.shape[-1]
    batch = tensor.shape[:-2].numel()
    gathered = comms.x.all_gather(tensor.reshape(batch, tokens, features).contiguous())
    whole = gathered.view(parts, batch, tokens, features).transpose(0, 1)
    whole = whole.reshape(batch, parts * tokens, features)
    return torch.ops.aten._unsafe_view(whole, [*tensor.shape[:-2], parts * tokens, features])


def _reduce_scatter(tensor: torch.Tensor, comms: Communicators) -> torch.Tensor:
    parts, tokens, features = comms.grid.x, tensor.shape[-2] // comms.grid.x, tensor.shape[-1]
    batch = tensor.shape[:-2].numel()
    by_rank = tensor.reshape(batch, parts, tokens, features).transpose(0, 1).reshape(parts * batch, tokens, features)
    mine = comms.x.reduce_scatter(by_rank.contiguous())
    return torch.ops.aten._unsafe_view(mine, [*tensor.shape[:-2], tokens, features])


def add_bias(output: torch.Tensor, bias: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """Add a bias to tokens that are split over x: its gradient is summed over x too."""
    return _AddBias.apply(output, bias, exchange)


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, bias: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange, ctx.bias = exchange, bias
        return output + bias.to(output.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_create_graph("Linear")
        grad_bias = None
        how = ctx.exchange.how(ctx, 1, ("x",))
        if how != SKIP:
            mine = grad.reshape(-1, grad.shape[-1]).sum(0, dtype=ctx.bias.dtype)
            grad_bias = ctx.exchange.vector_gradient(how, ctx.bias, mine, ("x",))
        return grad, grad_bias, None
