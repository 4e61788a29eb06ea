"""A tensor that is whole on every rank and whose gradient is not: each rank's part of it comes from its own work."""

from __future__ import annotations

from typing import Any

import torch

from axo.matmul.product import refuse_create_graph


def sum_gradient(tensor: torch.Tensor, communicator: Any, what: str) -> torch.Tensor:
    """Give back ``tensor``; its gradient is summed over the ranks of ``communicator`` (``what``: whose, for errors)."""
    summed: torch.Tensor = _Sum.apply(tensor, communicator, what)
    return summed


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, communicator: Any, what: str) -> torch.Tensor:
        ctx.communicator, ctx.what = communicator, what
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        refuse_create_graph(ctx.what)
        return ctx.communicator.all_reduce(grad.clone(memory_format=torch.contiguous_format)), None, None
