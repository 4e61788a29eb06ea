"""torch's own utilities on the parameters of parallel layers: right, or refused with the name of what to call.

| of torch.nn.utils | on shards |
|---|---|
| ``clip_grad_norm_``, ``get_total_norm`` | the norm over all ranks, as ``axo.clip_grad_norm_`` takes it |
| ``clip_grads_with_norm_``, ``clip_grad_value_`` | elementwise: right as they are |
| ``parameters_to_vector``, ``vector_to_parameters`` | refused: a vector of shards is not the model's |
| ``torch.optim.swa_utils`` (EMA, SWA) | elementwise: right as it is |

They are functions of plain tensors, so two private functions that they call are replaced, once a process, when the
first layer on more than one rank is made: ``torch.nn.utils.clip_grad._get_total_norm`` (gradients and parameters of
parallel layers are found by identity, all else goes to torch's own) and ``convert_parameters._check_param_device``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn.utils import clip_grad, convert_parameters

from axo.nn.clip import total_norm
from axo.placement import placement_of


class _TotalNorm:
    """``torch.nn.utils.get_total_norm`` that knows the parameters of parallel layers."""

    def __init__(self) -> None:
        self.torchs_own = clip_grad._get_total_norm
        self.layers: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def __call__(
        self,
        tensors: torch.Tensor | Iterable[torch.Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        owners = {}
        for layer in self.layers:
            for parameter in layer._parameters.values():
                if parameter is not None:
                    owners[id(parameter)] = owners[id(parameter.grad)] = parameter
        found = [(owners.get(id(tensor), tensor), tensor) for tensor in tensors]
        if not any(owner is not tensor or hasattr(tensor, "placement") for owner, tensor in found):
            return self.torchs_own(tensors, norm_type, error_if_nonfinite, foreach)
        return total_norm(found, norm_type, error_if_nonfinite, "get_total_norm")


def _check_param_device(param: torch.Tensor, old_param_device: int | None) -> int:
    placement = placement_of(param)
    if placement is not None and any(placement.communicators.grid.size(axis) > 1 for axis in placement.axes):
        raise ValueError(
            f"parameters_to_vector, vector_to_parameters: a parameter of shape {placement.global_shape} is split over"
            " ranks, so its vector would not be the model's; gather it by axo.unshard(p, p.placement), or write the"
            " whole model by axo.checkpoint.save and consolidate"
        )
    return _torchs_check(param, old_param_device)


_torchs_check = convert_parameters._check_param_device


def know(layer: nn.Module) -> None:
    """Let torch's utilities see through the parameters of ``layer``."""
    norm: Callable[..., torch.Tensor] = clip_grad._get_total_norm
    if not isinstance(norm, _TotalNorm):
        norm = clip_grad._get_total_norm = nn.utils.get_total_norm = _TotalNorm()
        convert_parameters._check_param_device = _check_param_device
    norm.layers.add(layer)
