"""A backward pass in two phases: gradients of inputs first, products for gradients of weights when asked for.

    with phase.opened() as work:          # input phase: layers put their weights' products off, into ``work``
        torch.autograd.backward(output, grad)
    ...                                   # the gradient of the input is on its way to the stage before
    phase.run(work)                       # weight phase: the products alone; no collective, nothing twice

What zero-bubble schedules of pipelines need (Qi et al., "Zero Bubble Pipeline Parallelism"). torch's own way, to run
the graph twice with other inputs, would run an autograd Function's whole backward twice, recomputation too.

Not here: what becomes of a gradient; in a step of stages it is kept unreduced (``Engine.hold``), so that the weight
phase communicates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from axo.overlap.autograd import deliver

WeightProduct = Callable[[], torch.Tensor | None]  # the gradient, or None where it goes its own way to ``.grad``
DeferredProducts = list[tuple[torch.Tensor, WeightProduct]]


class WeightPhase:
    """Where the layers of one model put their weights' products, while it is open."""

    def __init__(self) -> None:
        self._work: DeferredProducts | None = None

    @contextmanager
    def opened(self) -> Iterator[DeferredProducts]:
        """Let layers put products off inside the block; gives where they go."""
        work: DeferredProducts = []
        self._work = work
        try:
            yield work
        finally:
            self._work = None

    def take(self, parameter: torch.Tensor, product: WeightProduct) -> bool:
        """Put the product for the gradient of ``parameter`` off, if this is open and autograd need not have it."""
        if self._work is None or not parameter.is_leaf:
            return False
        self._work.append((parameter, product))
        return True

    @staticmethod
    @torch.no_grad()
    def run(work: DeferredProducts) -> None:
        """Compute what was put off, in order, and add it to ``.grad``; each is let go of when it is done."""
        work.reverse()
        while work:
            parameter, product = work.pop()
            grad = product()
            if grad is not None:
                after = getattr(parameter, "_post_accumulate_grad_hooks", None)
                deliver(parameter, grad, (parameter._backward_hooks or {}, after or {}))
