"""Gradients of micro-batches under ``axo.no_sync``: kept here, unreduced, until a micro-batch is synchronised.

``zero_grad`` drops what has been accumulated, so it must drop these gradients too. torch tells nobody of that call, so
it is read from ``.grad``. When a backward pass ends, a parameter whose gradient is kept here and whose ``.grad`` is
None gets negative zeros in ``.grad``. If these are gone or positive later, or if a ``.grad`` that had values is zero
now, ``zero_grad`` was called (scaling and clipping do neither). The negative zeros go when the next backward pass
begins.
"""

from __future__ import annotations

import torch

from axo.overlap.gathers import version_of
from axo.overlap.route import Reduction, Route

_HALF = (torch.bfloat16, torch.float16)


class Deferred:
    """A gradient of micro-batches that were not synchronised: unreduced, and how to reduce it.

    Args:
        route: The route of the layer whose gradient it is.
        parameter: What it is the gradient of, or of whose block.
        grad: That of the first micro-batch; halves are added up in fp32.
        reductions: What it is reduced over, for what z replicates; None: the gradient of a block.
    """

    __slots__ = ("_mark", "_seen", "_was_zero", "parameter", "reductions", "route", "runs_hooks", "tensor", "version")

    def __init__(
        self, route: Route, parameter: torch.Tensor, grad: torch.Tensor, reductions: tuple[Reduction, ...] | None
    ) -> None:
        self.route, self.parameter, self.reductions = route, parameter, reductions
        self.tensor = grad.float() if grad.dtype in _HALF else grad
        self.version = version_of(parameter)
        self.runs_hooks = True  # of the parameter, on the finished gradient
        self._mark: torch.Tensor | None = None
        self._seen: tuple[torch.Tensor, int] | None = None
        self._was_zero: torch.Tensor | None = None  # read only when it matters: that waits for a GPU

    def check_unchanged(self) -> None:
        """Refuse to go on with a parameter that is no longer what the gradient was taken of.

        Raises:
            RuntimeError: It has changed.
        """
        if self.version != version_of(self.parameter):
            raise RuntimeError(
                f"no_sync: {self.route.name or 'a parameter'} has changed while gradients of earlier micro-batches"
                " wait to be reduced; run the last backward of a step outside of axo.no_sync, before optimizer.step()"
            )

    def watch(self) -> None:
        """A backward pass has ended: remember what ``.grad`` is, and give it zeros if it is None."""
        grad = self.parameter.grad
        if grad is None:
            self._mark = grad = self.parameter.grad = torch.full_like(self.parameter, -0.0, requires_grad=False)
        self._seen = grad, version_of(grad)
        self._was_zero = _all_zero(grad) if self._mark is None else None

    def zeroed(self) -> bool:
        """Whether ``zero_grad`` was called since ``watch``."""
        if self._seen is None:
            return False
        (seen, version), grad = self._seen, self.parameter.grad
        if grad is None:
            return True
        if grad is seen and version_of(grad) == version:
            return False
        if self._was_zero is not None and bool(self._was_zero):
            return False
        return bool(_all_zero(grad))

    def unwatch(self) -> None:
        """A backward pass begins: take the zeros away again, unless something was added to them."""
        mark, seen, self._mark, self._seen = self._mark, self._seen, None, None
        if mark is not None and seen is not None and self.parameter.grad is mark and version_of(mark) == seen[1]:
            self.parameter.grad = None


def _all_zero(grad: torch.Tensor) -> torch.Tensor:
    """Whether there is something and all of it is +0.0, on the gradient's device."""
    if not grad.numel():
        return torch.zeros((), dtype=torch.bool)
    return (grad.ne(0) | grad.signbit()).any().logical_not()
