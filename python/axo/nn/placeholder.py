"""Stands in a pipeline stage for a layer that another rank has: it passes its input through."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_RENAMED, _SHARED = "_axo_renamed", "_axo_shared"


class Placeholder(nn.Module):
    """In place of a module that another stage holds. It has no parameters, so names of the others stay what they are.

    Args:
        stands_for: The module, on the meta device: what ``axo.init_weights`` draws values for and drops, so that the
            layers of this stage get what they would get in the whole model. None: nothing is drawn here.
        gives: What a call returns: ``"input"``, ``"tuple"`` (of the input alone), or ``"zero"``, for what is added.
    """

    stands_for: nn.Module | None

    def __init__(self, stands_for: nn.Module | None = None, gives: str = "input") -> None:
        super().__init__()
        self.__dict__["stands_for"] = stands_for  # no child: its names are not of this stage
        self.gives = gives

    def forward(self, first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.gives == "zero":
            return first.new_zeros(())
        return (first,) if self.gives == "tuple" else first

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """What another stage holds, that stage loads: a state dict of the whole model may have it."""

    def extra_repr(self) -> str:
        return "" if self.stands_for is None else type(self.stands_for).__name__


def set_shared(model: nn.Module, names: dict[str, str], others: dict[str, str]) -> None:
    """Note in a stage's model which tensors another stage holds too.

    Args:
        names: Own name -> the name under which the whole model lists the tensor.
        others: The other stage's name of it -> the own.
    """
    model.__dict__[_RENAMED], model.__dict__[_SHARED] = names, others


def renamed(model: nn.Module) -> dict[str, str]:
    """Own name -> the name in the whole model, as ``set_shared`` was told; empty for a model that is whole."""
    return model.__dict__.get(_RENAMED, {})


def shared(model: nn.Module) -> dict[str, str]:
    """The other stage's name of a tensor -> the own, as ``set_shared`` was told."""
    return model.__dict__.get(_SHARED, {})


def is_stage(model: nn.Module) -> bool:
    """Whether ``model`` is one rank's part of a pipeline."""
    return any(isinstance(module, Placeholder) for module in model.modules())
