"""A tensor that is whole on every rank and whose gradient is not: each rank's part of it comes from its own work."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from axo.comm.communicator import Communicator
from axo.matmul.product import refuse_create_graph


def sum_gradient(tensor: torch.Tensor, communicator: Communicator, what: str) -> torch.Tensor:
    """Give back ``tensor``; its gradient is summed over the ranks of ``communicator`` (``what``: whose, for errors)."""
    if communicator.size == 1:
        return tensor
    summed: torch.Tensor = _Sum.apply(tensor, communicator, what)
    return summed


class SumGradient:
    """A forward hook: each rank has a part of the output's gradient; it is summed before it goes on.

    Args:
        communicator: The ranks.
        what: Whose output, for errors.
        first: Features at the beginning whose gradient is complete already.
    """

    def __init__(self, communicator: Communicator, what: str, first: int = 0) -> None:
        self.communicator, self.what, self.first = communicator, what, first

    def __call__(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        if self.first == 0 or self.communicator.size == 1:
            return sum_gradient(output, self.communicator, self.what)
        shared = sum_gradient(output[..., self.first :], self.communicator, self.what)
        return torch.cat([output[..., : self.first], shared], -1)

    def __deepcopy__(self, memo: dict[int, Any]) -> SumGradient:
        return self


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, communicator: Communicator, what: str) -> torch.Tensor:
        ctx.communicator, ctx.what = communicator, what
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        refuse_create_graph(ctx.what)
        return ctx.communicator.all_reduce(grad.clone(memory_format=torch.contiguous_format)), None, None
