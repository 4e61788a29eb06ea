"""ZeRO on the data axis: of G data ranks each keeps 1/G of the optimizer's state (stage 1), and of the gradients (2).

    backward   gradients are all-reduced over data (1), or reduce-scattered in buckets (2)
    step       each rank updates its rows of each parameter
    then       all-gather of the updated rows over data, in buckets, the next packed while one is under way

There is no wrapper, and the optimizer is the user's. Around every ``step`` each parameter is cut down to this rank's
rows while the optimizer works, so the optimizer makes state for these rows alone. That is right for updates that are
elementwise (SGD, Adam, AdamW, ...); others are refused (``axo.optim.update_trial``). Rows are cut as ``torch.chunk``
does, after what x, y and z have cut (``Placement.state``), so a checkpoint loads on any grid, with ZeRO or without.

With stage 2 a parameter's ``.grad`` holds this rank's rows only. A gradient that autograd itself adds up (a penalty on
a weight, say) comes whole; its rows are cut out at the end of backward.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models". Stage 3 is what the
axis z does. Not here: when a pass or a step begins and ends (``axo.overlap.engine`` calls).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from axo.comm.connect import Communicators
from axo.placement import chunk_bounds, chunk_size, placement_of

STAGES = (0, 1, 2)
Allocate = Callable[[tuple[int, ...], torch.dtype, torch.device], torch.Tensor]  # an uninitialised tensor
_UNDER_WAY = 2  # buckets that are gathered at a time


class _Narrowed(NamedTuple):
    """A parameter that is its rows only, and what it was."""

    parameter: torch.Tensor
    whole: torch.Tensor
    grad: torch.Tensor | None


class Zero:
    """Cuts optimizer state, and gradients, of the parameters whose placements name it.

    Args:
        comms: The communicators of the grid.
        stage: 1 or 2.
    """

    def __init__(self, comms: Communicators, stage: int) -> None:
        self.comms, self.stage = comms, stage
        self._ranks = comms.grid.data
        self._narrowed: list[_Narrowed] = []
        self._aside: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # parameters, and their rows' gradients

    def __deepcopy__(self, memo: dict[int, Any]) -> Zero:
        new = memo[id(self)] = Zero(self.comms, self.stage)
        return new

    # --- the step -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def narrow(self, optimizer: Optimizer) -> None:
        """Make the parameters with gradients that this cuts their rows, for the update that comes next."""
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            grad = parameter.grad
            if grad is None or _zero_of(parameter) is not self:
                continue
            whole, rows = parameter.data, self.rows_of(parameter)
            is_whole = grad.shape == whole.shape
            cut_state(optimizer, parameter, whole.shape, partial(self.rows_of, parameter))
            self._narrowed.append(_Narrowed(parameter, whole, grad if is_whole else None))
            parameter.data = rows
            parameter.grad = _placed(parameter, self.rows_of(parameter, grad)) if is_whole else grad

    def restore(self) -> list[torch.Tensor]:
        """Make parameters whole again, those too that a step has left as rows because it raised; give them."""
        narrowed, self._narrowed = self._narrowed, []
        for each in narrowed:
            each.parameter.data = each.whole
            if each.grad is not None:
                each.parameter.grad = each.grad
        return [each.parameter for each in narrowed]

    @torch.no_grad()
    def finish_step(self, allocate: Allocate, bucket_bytes: int) -> None:
        """The update is done: make the parameters whole, with all ranks' rows, in buckets of so many bytes."""
        under_way: list[Callable[[], None]] = []
        for bucket in self._buckets(self.restore(), bucket_bytes):
            under_way.append(self._start_gather(allocate, bucket))
            if len(under_way) == _UNDER_WAY:
                under_way.pop(0)()
        for finish in under_way:
            finish()

    def _buckets(self, parameters: list[torch.Tensor], limit: int) -> Iterator[list[torch.Tensor]]:
        """Parameters of one dtype and device, in order, up to ``limit`` bytes together."""
        kinds: dict[Any, list[torch.Tensor]] = {}
        for parameter in parameters:
            kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for of_kind in kinds.values():
            bucket: list[torch.Tensor] = []
            size = 0
            for parameter in of_kind:
                more = self._longest(parameter) * self._ranks * parameter.itemsize
                if bucket and size + more > limit:
                    yield bucket
                    bucket, size = [], 0
                bucket.append(parameter)
                size += more
            yield bucket

    def _start_gather(self, allocate: Allocate, bucket: list[torch.Tensor]) -> Callable[[], None]:
        first, ranks = bucket[0], self._ranks
        sizes = [self._longest(parameter) for parameter in bucket]
        mine = allocate((sum(sizes),), first.dtype, first.device)
        parts = allocate((ranks, sum(sizes)), first.dtype, first.device)
        for parameter, part in zip(bucket, mine.split(sizes), strict=True):
            rows = self.rows_of(parameter)
            part[: rows.numel()].view(rows.shape).copy_(rows)
            part[rows.numel() :].zero_()
        work = self.comms.data.all_gather(mine, parts.view(-1), async_op=True)

        def finish() -> None:
            work.wait()
            for parameter, part in zip(bucket, parts.split(sizes, 1), strict=True):
                dim, whole = parameter.placement.state_dim, parameter.detach()  # type: ignore[attr-defined]
                if dim == 0 and whole.shape[0] % ranks == 0 and whole.is_contiguous():
                    whole.view(ranks, -1).copy_(part)
                    continue
                for index in range(ranks):
                    low, high = chunk_bounds(whole.shape[dim], ranks, index)
                    rows = whole.narrow(dim, low, high - low)
                    rows.copy_(part[index, : rows.numel()].view(rows.shape))

        return finish

    # --- gradients of rows, of another engine's parameter too: two stages on a rank may share one -------------------

    def begin_backward(self, parameters: Iterable[torch.Tensor]) -> None:
        """Put rows' gradients aside: autograd may have whole ones to add up."""
        for parameter in parameters if self.stage == 2 else ():
            grad = parameter.grad
            if grad is not None and grad.shape != parameter.shape and _zero_of(parameter):
                self._aside[id(parameter)] = parameter, grad
                parameter.grad = None

    def end_backward(self, parameters: Iterable[torch.Tensor]) -> None:
        """Cut whole gradients that autograd has left, and bring back what was put aside."""
        for parameter in parameters if self.stage == 2 else ():
            if parameter.grad is not None and _zero_of(parameter) and parameter.grad.shape == parameter.shape:
                self._put(parameter, self.rows_of(parameter, parameter.grad).clone())
        aside, self._aside = self._aside, {}
        for owner, grad in aside.values():
            self._put(owner, grad if owner.grad is None else grad.add_(owner.grad))

    def _put(self, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        """Make a gradient of this rank's rows the parameter's."""
        whole = parameter.data
        parameter.grad = None
        parameter.data = self.rows_of(parameter)  # torch compares shapes when a gradient is given, not later
        try:
            parameter.grad = _placed(parameter, grad)
        finally:
            parameter.data = whole

    def rows_of(self, parameter: torch.Tensor, tensor: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's rows of ``tensor``, which is shaped as the parameter; default: of the parameter itself."""
        tensor = parameter.data if tensor is None else tensor
        dim = parameter.placement.state_dim  # type: ignore[attr-defined]
        low, high = chunk_bounds(tensor.shape[dim], self._ranks, self.comms.coords.data)
        return tensor.narrow(dim, low, high - low)

    def _longest(self, parameter: torch.Tensor) -> int:
        """Elements of the first rank's rows."""
        shape = list(parameter.shape)
        dim = parameter.placement.state_dim  # type: ignore[attr-defined]
        shape[dim] = chunk_size(shape[dim], self._ranks)
        return math.prod(shape)


def _placed(parameter: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    grad.placement = parameter.placement.state  # type: ignore[attr-defined]
    return grad


def _zero_of(parameter: torch.Tensor) -> Zero | None:
    """What cuts the optimizer's state of a parameter over data."""
    zero = getattr(placement_of(parameter), "zero", None)
    return zero if isinstance(zero, Zero) and parameter.dim() > 0 else None


def cut_state(
    optimizer: Optimizer, parameter: torch.Tensor, whole: torch.Size, take: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Cut state that was made, or loaded, for the whole parameter (Adagrad's at construction) down to its rows."""
    state = optimizer.state.get(parameter, {})
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() and value.shape == whole:
            rows = take(value)
            if rows.shape != whole:
                state[key] = rows.clone()


def set_gradient(parameter: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Make ``grad``, as a backward pass gives it, the parameter's; with stage 2 it is of this rank's rows."""
    zero = _zero_of(parameter)
    if zero is None or grad is None or zero.stage < 2:
        parameter.grad = grad
    else:
        zero._put(parameter, grad)


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """The parameter's gradient as a backward pass leaves it; one that somebody else has set comes whole, and is cut."""
    zero, grad = _zero_of(parameter), parameter.grad
    if grad is None or zero is None or zero.stage < 2 or grad.shape != parameter.shape:
        return grad
    return zero.rows_of(parameter, grad).clone()


def zero_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Zeros of the shape that the parameter's gradient has after a backward pass."""
    zero = _zero_of(parameter)
    rows = parameter if zero is None or zero.stage < 2 else zero.rows_of(parameter)
    return torch.zeros_like(rows, requires_grad=False)
