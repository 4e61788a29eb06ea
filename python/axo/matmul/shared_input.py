"""Several layers that take one input, such as q, k and v: the gradient of the input is summed over ranks once.

By Algorithm 1 each layer would all-reduce its own dI over its out axis. The sum is the same, and less travels, where
the partial dI of all of them are added up on each rank first (what a column-parallel product of fused weights does):

    forward    I is cast to the compute dtype, and cut where layers take whole features, once for all
    backward   each layer leaves dI = dO @ W a partial sum, autograd adds them up;  dI = all-reduce_out(their sum),
               and behind it dW of the layer that came first, whose backward comes last

``axo.nn.share_input`` says which layers may share. Whether they do is found out in each pass: the input of one is the
very tensor that another has taken. A layer that takes another tensor sums its dI by itself.

Not here: algorithms that do not sum dI by an all-reduce; sequence parallelism, which sums it once as it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from axo.matmul.products import compute_dtype
from axo.overlap.engine import Exchange
from axo.overlap.weight_phase import DeferredProducts, WeightPhase


class InputSum:
    """The sum of the gradients of one input, of one forward pass. Holds no tensor: nodes of the graph hold it.

    Args:
        exchange: That of the layer which took the input first.
        axis: The axis that it sums over.
        shared: Where others find it.
    """

    def __init__(self, exchange: Exchange, axis: str | None, shared: SharedInput) -> None:
        self.exchange, self._axis = exchange, axis
        self._shared = weakref.ref(shared)
        self._task, self._products = -1, DeferredProducts()

    def products_behind(self) -> DeferredProducts:
        """Where to put products of weights that are to run while the sum of this backward pass travels."""
        task = torch._C._current_graph_task_id()
        if task != self._task:  # what is left of another was of a pass that an exception has ended
            self._task, self._products = task, DeferredProducts()
        return self._products

    def reduce(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """Sum the partial dI over ranks; what was put off runs meanwhile."""
        shared = self._shared()
        if shared is not None:
            shared.close(self)
        under_way = None if grad is None else self.exchange.start_reduce(grad, self._axis)
        WeightPhase.run(self.products_behind())
        return None if under_way is None else under_way.wait()


class SharedInput:
    """Held by layers that may take one input; finds out in each pass which of them do.

    Args:
        layers: How many.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._last: _SharedTensor | None = None  # until all layers have come, or another input, or backward

    def share(
        self,
        exchange: Exchange,
        axis: str | None,
        input: torch.Tensor,
        cut: Callable[[torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, InputSum]:
        """What a layer is to multiply instead of ``input``, and where its dI is summed.

        Args:
            exchange, axis: The layer's, and the axis over which it sums dI.
            cut: Takes this rank's features out of ``input``.
        """
        last, dtype = self._last, compute_dtype(input)
        if last is None or not last.serves(exchange, input, dtype):
            sum = InputSum(exchange, axis, self)
            tensor: torch.Tensor = _SumOverRanks.apply(cut(input.to(dtype)), sum)
            last = self._last = _SharedTensor(weakref.ref(input), input._version, tensor, sum, set())
        last.by.add(exchange)
        if len(last.by) == self._layers:
            self._last = None
        return last.tensor, last.sum

    def close(self, sum: InputSum) -> None:
        """No layer comes any more: hold the tensor no longer."""
        if self._last is not None and self._last.sum is sum:
            self._last = None

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedInput:
        new = memo[id(self)] = SharedInput(self._layers)
        return new


class _SharedTensor(NamedTuple):
    """An input, what stands for it, and who has taken it so far."""

    input: weakref.ref[torch.Tensor]
    version: int
    tensor: torch.Tensor
    sum: InputSum
    by: set[Exchange]

    def serves(self, exchange: Exchange, input: torch.Tensor, dtype: torch.dtype) -> bool:
        """Whether this layer takes the same tensor, unchanged, and for the first time."""
        same = self.input() is input and self.version == input._version and self.tensor.dtype == dtype
        return same and exchange not in self.by


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, sum: InputSum) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.sum = sum
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return ctx.sum.reduce(grad), None
