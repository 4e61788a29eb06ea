"""Put a parallel layer where a serial one was, with rank 0's values.

A serial layer on the meta device gives a parallel one on the meta device (``axo.init_weights`` or ``load_state_dict``
fills it). A real one gives up its tensors one by one: rank 0's is broadcast, each rank keeps its part, and the whole
tensor is freed when the serial layer is dropped. What else a plan replaces is its own business.
"""

from __future__ import annotations

from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import nn

from axo.comm.connect import Communicators
from axo.comm.memory import movable
from axo.errors import Refused
from axo.nn import Conv2d, Embedding, Features, GroupNorm, LayerNorm, Linear
from axo.nn.layer import ParallelLayer
from axo.placement import Placement

_HOOK_TABLES = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks"),
)


class Replacer:
    """Makes parallel layers for one model on one grid.

    Args:
        comms: The communicators of the grid.
        grad_reduce: Given to every layer.
        sequence_parallel: Given to every linear layer and embedding; norms of split tokens sum gradients over x.
    """

    def __init__(self, comms: Communicators, *, grad_reduce: str = "mean", sequence_parallel: bool = False) -> None:
        self.comms = comms
        self.grad_reduce = grad_reduce
        self.sequence_parallel = sequence_parallel and comms.grid.x > 1

    def linear(self, parent: nn.Module, child: str, name: str, *, transposed: bool = False, **options: Any) -> None:
        """Replace ``parent.child``, an ``nn.Linear``; ``options`` are fields of :class:`axo.nn.Features`."""
        features = Features(sequence_parallel=self.sequence_parallel, **options)
        self._replace(nn.Linear, Linear, parent, child, name, transposed=transposed, features=features)

    def embedding(self, parent: nn.Module, child: str, name: str, **options: Any) -> None:
        """Replace ``parent.child``, an ``nn.Embedding``; ``options`` as for :class:`axo.nn.Embedding`."""
        options = {"sequence_parallel": self.sequence_parallel, **options}
        self._replace(nn.Embedding, Embedding, parent, child, name, **options)

    def conv2d(self, parent: nn.Module, child: str, name: str, **options: Any) -> None:
        """Replace ``parent.child``, an ``nn.Conv2d``; ``options`` as for :class:`axo.nn.Conv2d`."""
        self._replace(nn.Conv2d, Conv2d, parent, child, name, **options)

    def group_norm(self, parent: nn.Module, child: str, name: str, *, axis: str) -> None:
        """Replace ``parent.child``, an ``nn.GroupNorm`` whose channels are split over ``axis``."""
        self._replace(nn.GroupNorm, GroupNorm, parent, child, name, axis=axis)

    def layer_norm(
        self, parent: nn.Module, child: str, name: str, *, axis: str | None = "y", sum_grad_over: tuple[str, ...] = ()
    ) -> None:
        """Replace ``parent.child``, an ``nn.LayerNorm``."""
        self._replace(nn.LayerNorm, LayerNorm, parent, child, name, axis=axis, sum_grad_over=sum_grad_over)

    def _replace(self, kind: type, new: Any, parent: nn.Module, child: str, name: str, **options: Any) -> None:
        """Replace ``parent.child``, of class ``kind``, by a ``new`` with the arguments that it has of torch's."""
        old: Any = getattr(parent, child)
        check_exact(old, kind, name)
        given = {each: getattr(old, each) for each in _of_torch(new) if each not in ("device", "dtype")}
        if "bias" in given:
            given["bias"] = old.bias is not None
        dtype = None if old.weight is None else old.weight.dtype
        made = new(
            **given, device="meta", dtype=dtype, comms=self.comms, grad_reduce=self.grad_reduce, name=name, **options
        )
        self.put(parent, child, made)

    def put(self, parent: nn.Module, child: str, new: ParallelLayer) -> None:
        """Give ``new`` the values, flags and hooks of ``parent.child`` and put it in its place.

        Raises:
            Refused: One of its parameters has hooks: these expect whole gradients.
        """
        old = getattr(parent, child)
        check_no_hooks(old, new.label())
        if new.placements and not any(parameter.is_meta for parameter in old.parameters(recurse=False)):
            new.to_empty(device=self.comms.device)
            self._take_values(new, old)
        for name, parameter in old.named_parameters(recurse=False):
            getattr(new, name).requires_grad_(parameter.requires_grad)
        new.__dict__.update(hooks_of(old))  # these very dicts: handles can still remove what is in them
        new.train(old.training)
        setattr(parent, child, new)

    @torch.no_grad()
    def _take_values(self, new: ParallelLayer, old: nn.Module) -> None:
        for name, placement in new.placements.items():
            getattr(new, name).copy_(self.part(getattr(old, name), placement))
        for name, buffer in old.named_buffers(recurse=False):
            getattr(new, name).copy_(self._from_rank_0(buffer))

    def part(self, tensor: torch.Tensor, placement: Placement) -> torch.Tensor:
        """This rank's part of rank 0's ``tensor``; on the meta device where that is. Every rank must call it."""
        if tensor.is_meta:
            return tensor.new_empty(placement.local_shape(self.comms.grid, self.comms.coords))
        return placement.take(self._from_rank_0(tensor))

    def _from_rank_0(self, tensor: torch.Tensor) -> torch.Tensor:
        full = tensor.detach().to(self.comms.device).contiguous()
        if self.comms.grid.world_size > 1:
            self.comms.world.broadcast(movable(full), root=0)
        return full


@cache
def _of_torch(new: Any) -> list[str]:
    """Names of the arguments that a layer has of torch's."""
    return [each.name for each in signature(new).parameters.values() if each.kind is each.POSITIONAL_OR_KEYWORD]


def hooks_of(module: nn.Module) -> dict[str, Any]:
    """The tables of hooks of a module, by attribute; empty where it has none."""
    tables = {name: getattr(module, name) for name in _HOOK_TABLES}
    return {**tables, "_is_full_backward_hook": module._is_full_backward_hook} if any(tables.values()) else {}


def check_no_hooks(module: nn.Module, label: str) -> None:
    """Refuse a layer whose parameters have gradient hooks.

    Raises:
        Refused: One has.
    """
    for name, parameter in module.named_parameters(recurse=False):
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise Refused(
                f"parallelize: {label}: its {name} has gradient hooks, and is about to become this rank's shard;"
                " register them after parallelize, on the shard"
            )


def check_exact(module: nn.Module, kind: type, name: str) -> None:
    """Refuse a module that is not of this very class: a subclass may compute something else.

    Raises:
        Refused: It is of another class.
    """
    if type(module) is not kind:
        raise Refused(
            f"parallelize: {name!r} is a {type(module).__module__}.{type(module).__qualname__}, and the plan knows only"
            f" torch.nn.{kind.__name__} there; quantised layers and adapters are not supported"
        )
