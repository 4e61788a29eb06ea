"""A serial model without its values, as it was before ``axo.parallelize``: what another grid is planned from.

Modules are copied, parameters stand on the meta device, and all else (configurations, functions, buffers) is shared.
Attributes that name modules of the model, in lists and dicts too, name the copies.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Mapping
from types import NoneType
from typing import Any

import torch
from torch import nn

_PLAIN = (NoneType, bool, int, float, str)


class Serial:
    """What ``axo.parallelize`` was given.

    Args:
        model: The serial model, before anything changes.
        options: The other arguments of ``axo.parallelize``.

    Attributes:
        buffers: Their shapes by name on the grid that the model lies on, as the plan has made them.
    """

    def __init__(self, model: nn.Module, options: dict[str, Any]) -> None:
        self.options = options
        self._model = without_values(model, {})
        self.buffers: dict[str, torch.Size] = {}

    def model(self, like: Mapping[str, torch.Tensor], root: nn.Module | None = None) -> nn.Module:
        """The serial model on the meta device, its parameters of the dtypes of ``like``, frozen where those are.

        Args:
            like: Parameters by name.
            root: A module that becomes the model; None: a new one.
        """
        memo: dict[int, Any] = {}
        for name, parameter in self._model.named_parameters():
            other = like.get(name, parameter)
            empty = torch.empty_like(parameter, dtype=other.dtype)
            memo[id(parameter)] = nn.Parameter(empty, requires_grad=other.requires_grad)
        return without_values(self._model, memo, root, copies=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Serial:
        return self


def without_values(
    model: nn.Module, memo: dict[int, Any], root: nn.Module | None = None, *, copies: bool = False
) -> nn.Module:
    """A copy of ``model`` with parameters on the meta device.

    Args:
        model: A serial model.
        memo: id of a parameter or module -> what stands for it in the copy.
        root: A module that becomes the copy; None: a new one.
        copies: Of other tensors too, such as buffers: who plans may write into them.
    """

    def module_of(old: nn.Module, new: nn.Module | None = None) -> nn.Module:
        new = object.__new__(type(old)) if new is None else new
        memo[id(old)] = new
        attributes: dict[str, Any] = {}
        for name, value in vars(old).items():  # mostly plain values, and tables of hooks that are empty
            is_empty = isinstance(value, dict) and not value
            attributes[name] = value if type(value) in _PLAIN else copy.copy(value) if is_empty else copied(value)
        new.__dict__.clear()
        new.__dict__.update(attributes)
        return new

    def copied(value: Any) -> Any:
        if id(value) in memo:
            return memo[id(value)]
        if isinstance(value, nn.Module):
            return module_of(value)
        if isinstance(value, nn.Parameter):
            empty = torch.empty_like(value, device="meta", requires_grad=False)
            new = memo[id(value)] = nn.Parameter(empty.as_subclass(torch.Tensor), requires_grad=value.requires_grad)
            return new
        if copies and isinstance(value, torch.Tensor):
            return memo.setdefault(id(value), value.clone())
        if isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
            return types.MethodType(value.__func__, copied(value.__self__))
        if isinstance(value, dict | list):
            table = memo[id(value)] = copy.copy(value)  # known before it is filled: it may hold itself
            for key, each in value.items() if isinstance(value, dict) else enumerate(value):
                table[key] = copied(each)
            return table
        if type(value) in (tuple, set):
            return type(value)(copied(each) for each in value)
        return value

    return module_of(model, root)
