"""Mixtures of experts of transformers: ranks that hold other rows call the same experts, in the same order.

Their blocks call, in order of number, only the experts that some row has chosen. On some ranks an expert may have no
row. If such a rank left the expert out, the others would gather its weights and reduce its gradients alone, and this
rank's next collective would meet the wrong one. So the rank calls that expert too, with no rows: before the next expert
that has rows, before a shared expert, or at the end of the block. The sum of what comes back, which is zero, is added
to the block's output, so that backward goes there as well.

transformers is not imported here: a block is known by its package, and by ``experts``, an ``nn.ModuleList`` or
``nn.ModuleDict`` of modules that take (rows, features). Experts that a program checkpoints one by one are called in
backward as they stand.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn


def is_mixture(module: nn.Module) -> bool:
    """Whether ``module`` is a mixture of experts of transformers whose experts are modules of their own."""
    of_transformers = type(module).__module__.startswith(("transformers.models.", "transformers_modules."))
    return of_transformers and isinstance(getattr(module, "experts", None), nn.ModuleList | nn.ModuleDict)


class EveryExpert:
    """Hooks of one block and its experts.

    Args:
        block: For which :func:`is_mixture` holds.
        gathers: Whether a forward pass without gradients communicates too: over z.
    """

    def __init__(self, block: Any, gathers: bool) -> None:
        experts = block.experts
        self._experts = list(experts.values() if isinstance(experts, nn.ModuleDict) else experts)
        self._gathers = gathers
        self._next = len(self._experts)  # outside of the block's forward: nothing is to be called
        self._no_rows: torch.Tensor | None = None
        self._sum: torch.Tensor | None = None
        block.register_forward_pre_hook(self._begin)
        for number, expert in enumerate(self._experts):
            expert.register_forward_pre_hook(partial(self._before, number))
        for other in block.children():
            if other is not experts:
                other.register_forward_pre_hook(self._before_other)
        block.register_forward_hook(self._end)
        block.register_forward_hook(self._forget, always_call=True)  # a recomputation stops before the end

    def _begin(self, block: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if not self._gathers and not torch.is_grad_enabled():
            return
        hidden = inputs[0]
        self._no_rows = hidden.reshape(-1, hidden.shape[-1])[:0].clone()  # the block may write to its input
        self._next = 0

    def _before(self, number: int, expert: nn.Module, inputs: Any) -> None:
        if number >= self._next:
            self._call_until(number)
            self._next = number + 1

    def _before_other(self, other: nn.Module, inputs: Any) -> None:
        if self._next > 0:  # the experts' turn is over: each rank that has rows has called one
            self._call_until(len(self._experts))

    def _end(self, block: nn.Module, inputs: Any, output: Any) -> Any:
        self._call_until(len(self._experts))
        if self._sum is None:
            return output
        if isinstance(output, tuple):
            return output[0] + self._sum, *output[1:]
        return output + self._sum

    def _forget(self, block: nn.Module, inputs: Any, output: Any) -> None:
        self._next, self._no_rows, self._sum = len(self._experts), None, None

    def _call_until(self, number: int) -> None:
        for skipped in range(self._next, number):
            self._next = skipped + 1  # the expert's own hook has nothing to do then
            output = self._experts[skipped](self._no_rows).sum()
            self._sum = output if self._sum is None else self._sum + output
