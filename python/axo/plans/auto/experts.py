"""Mixtures of experts of transformers: ranks that hold other rows call the same experts, in the same order.

Their blocks call the experts that some row has chosen, by number. A rank where no row has chosen one would not take
part when the others gather that expert's weights and reduce its gradients, and its next call would meet theirs. So it
calls that expert too, with no rows, before the next one that has some or when the block ends; the sum of what comes
back, which is zero, is added to the block's output, so that backward goes there as well.

transformers is not imported here: a block is known by its package, and by ``experts``, an ``nn.ModuleList`` of modules
that take (rows, features). Experts that a program checkpoints one by one are called in backward as they stand.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn


def is_mixture(module: nn.Module) -> bool:
    """Whether ``module`` is a mixture of experts of transformers whose experts are modules of their own."""
    of_transformers = type(module).__module__.startswith("transformers.models.")
    return of_transformers and isinstance(getattr(module, "experts", None), nn.ModuleList)


class EveryExpert:
    """Hooks of one block and its experts.

    Args:
        block: For which :func:`is_mixture` holds.
    """

    def __init__(self, block: Any) -> None:
        self._experts: nn.ModuleList = block.experts
        self._next = len(self._experts)  # outside of the block's forward: nothing is to be called
        self._no_rows: torch.Tensor | None = None
        self._sum: torch.Tensor | None = None
        block.register_forward_pre_hook(self._begin)
        for number, expert in enumerate(self._experts):
            expert.register_forward_pre_hook(partial(self._before, number))
        block.register_forward_hook(self._end)

    def _begin(self, block: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        hidden = inputs[0]
        self._no_rows = hidden.reshape(-1, hidden.shape[-1])[:0].clone()  # the block may write to its input
        self._next, self._sum = 0, None

    def _before(self, number: int, expert: nn.Module, inputs: Any) -> None:
        if number >= self._next:
            self._call_until(number)
            self._next = number + 1

    def _end(self, block: nn.Module, inputs: Any, output: Any) -> Any:
        self._call_until(len(self._experts))
        total, self._sum, self._no_rows = self._sum, None, None
        if total is None:
            return output
        if isinstance(output, tuple):
            return output[0] + total, *output[1:]
        return output + total

    def _call_until(self, number: int) -> None:
        for skipped in range(self._next, number):
            self._next = skipped + 1  # the expert's own hook has nothing to do then
            output = self._experts[skipped](self._no_rows).sum()
            self._sum = output if self._sum is None else self._sum + output
