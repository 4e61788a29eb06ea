"""torch's own utilities on the parameters of parallel layers: right, or refused with the name of what to call.

docs/overlap.md has the table. They are functions of plain tensors, so what they call is replaced, once a process, when
the first layer on more than one rank is made: ``torch.nn.utils.clip_grad._get_total_norm`` (gradients and parameters of
parallel layers are found by identity, all else goes to torch's own), ``convert_parameters._check_param_device``,
``parametrize.ParametrizationList.__init__``, ``init._calculate_fan_in_and_fan_out`` (of Xavier's and Kaiming's values),
``init.orthogonal_``, ``eye_``, ``dirac_`` and ``sparse_``, ``torch.amp.GradScaler._unscale_grads_`` and
``torch.Tensor.norm``. Pruning and the old norms of weights register parameters under other names, which the layers
refuse (``refuse_derived``).

Not here: other methods of a parameter itself. ``p.std()`` is its shard's: methods of C have no place to look at it, and
a subclass that knew better would cost every use.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.utils import clip_grad, convert_parameters, parametrize

from axo.errors import Refused
from axo.optim.clip import total_norm
from axo.placement import Placement, is_split, placement_of


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
        owned = [(owners.get(id(tensor), tensor), tensor) for tensor in tensors]
        if not any(owner is not tensor or hasattr(tensor, "placement") for owner, tensor in owned):
            return self.torchs_own(tensors, norm_type, error_if_nonfinite, foreach)
        return total_norm(owned, norm_type, error_if_nonfinite, "get_total_norm")


def refuse_derived(what: str, placement: Placement | None) -> None:
    """Refuse to compute a weight from a parameter that is split: pruning, parametrizations.

    Raises:
        ValueError: It is.
    """
    if placement is not None and is_split(placement):
        raise ValueError(
            f"{what}: a parameter of shape {placement.global_shape} is split over ranks, so what is computed from it"
            " would be of this rank's part; do it before axo.parallelize, which then leaves the layer serial"
        )


def _start_parametrizations(self: nn.Module, modules: Any, original: Any, unsafe: bool = False) -> None:
    refuse_derived("register_parametrization", placement_of(original))
    _torchs_start(self, modules, original, unsafe)


def _check_param_device(param: torch.Tensor, old_param_device: int | None) -> int:
    placement = placement_of(param)
    if placement is not None and is_split(placement):
        raise ValueError(
            f"parameters_to_vector, vector_to_parameters: a parameter of shape {placement.global_shape} is split over"
            " ranks, so its vector would not be the model's; gather it by axo.unshard(p, p.placement), or write the"
            " whole model by axo.checkpoint.save and consolidate"
        )
    return _torchs_check(param, old_param_device)


def _of_whole(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    """One of torch.nn.init's, which refuses a part of a parameter; ``what`` it would make of it."""

    @functools.wraps(function)
    def checked(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        placement = placement_of(tensor)
        if placement is not None and is_split(placement):
            raise ValueError(
                f"torch.nn.init: a parameter of shape {placement.global_shape} is split over ranks, so its {what} would"
                " be of this rank's part; set first values before axo.parallelize, or by axo.init_weights(model,"
                " function)"
            )
        return function(tensor, *args, **options)

    return checked


def _norm(
    self: torch.Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> torch.Tensor:
    # A graph may be a loss's, in which a sum of sizes is right (axo.overlap.losses).
    if dim is None and self.grad_fn is None and not (p == 1 and self.requires_grad and torch.is_grad_enabled()):
        owner = _split_owner(self)
        if owner is not None:
            raise Refused(
                f"norm: of a parameter, or its gradient, of which this rank holds {tuple(self.shape)} of"
                f" {owner.placement.global_shape} it would be that of a part; torch.nn.utils.get_total_norm([p]), or"
                " [p.grad], is the whole norm, axo.unshard(p, p.placement) the whole tensor. In a loss take a plain sum"
                " over elements, whose gradients are right: instead of p.norm() ** 2 take p.square().sum()"
            )
    norm: torch.Tensor = _torchs_norm(self, p, dim, keepdim, dtype)
    return norm


def _split_owner(tensor: torch.Tensor) -> Any:
    """The parameter whose memory, or whose gradient's, ``tensor`` has, where that is a part; else None."""
    layers: weakref.WeakSet[nn.Module] = clip_grad._get_total_norm.layers  # type: ignore[attr-defined]
    address = _address(tensor)
    for owner in (p for layer in layers for p in layer._parameters.values() if address and p is not None):
        for each in (owner, owner.grad):
            if each is not None and _address(each) == address and each.numel() == tensor.numel():
                return owner if is_split(placement_of(owner)) or each.shape != owner.shape else None
    return None


def _address(tensor: torch.Tensor) -> int:
    has_one = type(tensor) in (torch.Tensor, nn.Parameter) and not is_functorch_wrapped_tensor(tensor)
    return tensor.data_ptr() if has_one else 0


def _is_in_parts(parameter: torch.Tensor) -> bool:
    """Whether other ranks have other parts of a model's gradients: its own, ZeRO-2's, or those of other stages."""
    placement, grad = placement_of(parameter), parameter.grad
    if placement is None or is_split(placement):
        return placement is not None
    return (grad is not None and grad.shape != parameter.shape) or placement.communicators.stages > 1


def _unscale_grads_(self: Any, optimizer: Any, *args: Any) -> Any:
    # axo.GradScaler calls this with what is no optimizer.
    if isinstance(optimizer, torch.optim.Optimizer) and any(
        _is_in_parts(p) for group in optimizer.param_groups for p in group["params"]
    ):
        raise ValueError(
            "torch.amp.GradScaler: gradients are split over ranks, so an overflow may show on one rank, which alone"
            " would leave its step out; use axo.GradScaler(comms=comms)"
        )
    return _torchs_unscale(self, optimizer, *args)


_torchs_norm = torch.Tensor.norm
_torchs_unscale: Any = torch.amp.GradScaler._unscale_grads_
_torchs_check = convert_parameters._check_param_device
_torchs_start: Any = parametrize.ParametrizationList.__init__


def know(layer: nn.Module) -> None:
    """Let torch's utilities see through the parameters of ``layer``."""
    norm: Callable[..., torch.Tensor] = clip_grad._get_total_norm
    if not isinstance(norm, _TotalNorm):
        norm = clip_grad._get_total_norm = nn.utils.get_total_norm = _TotalNorm()
        convert_parameters._check_param_device = _check_param_device
        parametrize.ParametrizationList.__init__ = _start_parametrizations  # type: ignore[method-assign]
        nn.init._calculate_fan_in_and_fan_out = _of_whole(nn.init._calculate_fan_in_and_fan_out, "fans")
        for name in ("orthogonal_", "eye_", "dirac_", "sparse_"):
            setattr(nn.init, name, _of_whole(getattr(nn.init, name), "rows and columns"))
        scaler: Any = torch.amp.GradScaler
        scaler._unscale_grads_ = _unscale_grads_
        torch.Tensor.norm = functools.wraps(_torchs_norm)(_norm)  # type: ignore[method-assign]
    norm.layers.add(layer)
