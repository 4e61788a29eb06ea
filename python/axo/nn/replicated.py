"""Modules that stay serial inside a parallel model: whole weights on every rank, complete gradients.

Ranks that work on the same rows compute the same with them; gradients are reduced over the axes that split rows, as
those of parallel layers are, before they are added to ``.grad``. Values are rank 0's.

A module keeps its class's code: it becomes an instance of a subclass made for it, which re-attaches the reduction to
parameters that torch makes again (``to_empty``, ``deepcopy``).

Not here: overlap; each parameter is reduced by itself, when autograd has its gradient. Every rank must use the
same parameters in each backward.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any, Self

import torch
from torch import nn

from axo.comm.connect import Communicators
from axo.comm.memory import movable
from axo.matmul import cost, engine_cost
from axo.nn import torch_utils
from axo.overlap.engine import Exchange
from axo.placement import Placement, placement_of


class Replicated:
    """Mixed into the class of a module whose own parameters are whole on every rank."""

    comms: Communicators
    exchange: Exchange
    placements: dict[str, Placement]
    sum_over: tuple[str, ...]

    def _attach(self) -> None:
        """Give each own parameter its placement and the reduction of its gradient."""
        module: Any = self
        torch_utils.know(module)
        for name, placement in self.placements.items():
            parameter = getattr(module, name)
            if getattr(parameter, "placement", None) is placement:
                continue
            parameter.placement, parameter.sum_over = placement, self.sum_over
            reduce_gradient(parameter, self.exchange)

    def cost(self) -> list[cost.Call]:
        """Count the collectives of this module's own parameters on this rank in one step."""
        calls: list[cost.Call] = []
        for name in self.placements:
            parameter = getattr(self, name)
            if parameter.requires_grad:
                size = parameter.numel(), parameter.dtype.itemsize
                calls += [
                    cost.Call(cost.BACKWARD, "all_reduce", axis, *size, cost.REDUCE_WEIGHT_GRAD)
                    for axis in self.sum_over
                ]
                calls += cost.replicated_grad(*size, self.comms.arrangement)
        dtype = self.exchange.engine.reduce_dtype
        calls = calls if dtype is None else engine_cost.reduced_in(calls, dtype.itemsize)
        return cost.issued(calls, self.comms.grid)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[misc]
        self._attach()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self.comms)] = self.comms
        memo[id(self.exchange)] = self.exchange
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        for parameter in new._parameters.values():  # type: ignore[attr-defined]
            if parameter is not None:
                parameter.__dict__.pop("placement", None)
        new._attach()
        return new


class ReduceGradient:
    """A gradient hook: the mean (or sum) over the data ranks; in a pipeline's step of all micro-batches together.

    Args:
        exchange: The exchange for the parameter's placement.
        parameter: What the hook is registered on.
    """

    def __init__(self, exchange: Exchange, parameter: torch.Tensor) -> None:
        self.exchange, self.parameter = exchange, weakref.ref(parameter)

    def __call__(self, grad: torch.Tensor) -> torch.Tensor:
        if not self.exchange.vector_reductions and self.exchange.vector_copies is None:
            return grad
        parameter, engine = self.parameter(), self.exchange.engine
        if engine.holding and parameter is not None:
            engine.gradients.keep_vector(self.exchange, parameter, grad)
            return torch.zeros_like(grad)
        return self.exchange.reduce_now(grad.clone())

    def __deepcopy__(self, memo: dict[int, Any]) -> ReduceGradient:
        return self


def reduce_gradient(parameter: torch.Tensor, exchange: Exchange) -> None:
    """Reduce each gradient of ``parameter`` as ``exchange`` says, whether it wants one now or later."""
    if not (parameter.is_floating_point() or parameter.is_complex()):
        return  # codes of a quantized weight, a mask: they have none
    wanted = parameter.requires_grad
    parameter.requires_grad_(True).register_hook(ReduceGradient(exchange, parameter))
    parameter.requires_grad_(wanted)


def replicate(
    module: nn.Module, comms: Communicators, grad_reduce: str = "mean", *, sum_over: tuple[str, ...] = ()
) -> nn.Module:
    """Keep a module as it is, its own parameters replicated on all ranks with rank 0's values. Every rank must call it.

    A parameter that another module has and that has a placement already (a tied one) is left alone.

    Args:
        sum_over: Axes whose ranks use the same parameters on different things (heads over x).

    Raises:
        ValueError: A tied parameter is summed over other axes where it came first.
    """
    own = dict(module.named_parameters(recurse=False))
    sum_over = tuple(axis for axis in sum_over if getattr(comms.grid, axis) > 1)
    for name, parameter in own.items():
        first = getattr(parameter, "sum_over", ())
        tied = hasattr(parameter, "placement") and not isinstance(module, Replicated)
        if tied and first != sum_over:
            raise ValueError(
                f"{type(module).__name__}.{name}: its gradient is to be summed over {sum_over or 'no axis'}, but"
                f" another module has the same parameter, summed over {first or 'no axis'}; give each module its own"
            )
    if comms.grid.world_size > 1:
        for tensor in (*own.values(), *module.buffers(recurse=False)):
            if not tensor.is_meta:
                _from_rank_0(tensor, comms)
    placements = {
        name: Placement(tuple(parameter.shape), comms=comms)
        for name, parameter in own.items()
        if placement_of(parameter) is None
    }
    if not placements:
        return module
    serial = type(module)
    if not isinstance(module, Replicated):  # one that goes over to another grid has its class already
        module.__class__ = type(f"Replicated{serial.__name__}", (Replicated, serial), {"__module__": serial.__module__})
    kept: Any = module
    kept.comms, kept.placements = comms, placements
    kept.exchange = Exchange(comms, Placement((1,), comms=comms), grad_reduce)
    kept.exchange.vector_reductions, kept.sum_over = kept.exchange.reductions_of(sum_over), sum_over
    kept.exchanges = (kept.exchange,)
    kept._attach()
    return module


@torch.no_grad()
def _from_rank_0(tensor: torch.Tensor, comms: Communicators) -> None:
    value = tensor.detach().to(comms.device, copy=True).contiguous()
    if value.numel():
        comms.world.broadcast(movable(value), root=0)
        tensor.copy_(value)
