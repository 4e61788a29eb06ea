"""torch's own utilities on the parameters of parallel layers: right, or refused with the name of what to call.

docs/overlap.md has the table. They are functions of plain tensors, so what they call is replaced, once a process, when
the first layer on more than one rank is made: ``torch.nn.utils.clip_grad._get_total_norm`` (gradients and parameters of
parallel layers are found by identity, all else goes to torch's own), ``convert_parameters._check_param_device``,
``parametrize.ParametrizationList.__init__``, ``init._calculate_fan_in_and_fan_out`` (of Xavier's and Kaiming's values),
``init.orthogonal_``, ``eye_``, ``dirac_`` and ``sparse_``, ``torch.amp.GradScaler._unscale_grads_``;
``torch.Tensor.norm``, which knows a part by its address; and of ``nn.Parameter`` alone the methods that say something
of all elements (``_OF_ALL``), elements by their numbers (``p[7]``) and ``p.data = whole``. Pruning and the old norms of
weights register parameters under other names, which the layers refuse (``refuse_derived``).

Not here: functions of ``torch`` (``torch.mean(p)``), which other packages know by identity, and ``p.data``,
``p.detach()``, ``p.grad`` and what is computed from a part (``p.abs().mean()``): plain tensors, whose ``shape`` is the
part's.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.compiler import is_compiling
from torch.nn.utils import clip_grad, convert_parameters, parametrize

from axo.errors import Refused
from axo.nn.shard_reads import caller
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


def _refuse_of_part(home: Any, name: str) -> None:
    """Let a method, which says something of all elements, or of those along a dim, refuse a part."""
    function, is_norm = getattr(home, name), name == "norm"
    at = 2 if name in ("norm", "quantile", "nanquantile", "topk", "kthvalue") else 1  # where a dim may stand

    @functools.wraps(function)
    def checked(*args: Any, **options: Any) -> Any:
        tensor: Any = args[0]
        dim = options.get("dim", args[at] if len(args) > at else None)
        # Of other tensors (a gradient, p.data) the whole norm alone: what models take along a dim is not looked at.
        plain = type(tensor) is torch.Tensor and dim is None and tensor.grad_fn is None
        if (plain or type(tensor) is nn.Parameter) and not is_compiling():
            second = args[1] if len(args) > 1 else None
            # A graph may be a loss's, in which a sum over elements is right (axo.overlap.losses).
            of_loss = tensor.requires_grad and torch.is_grad_enabled()
            sums = name == "sum" or (is_norm and options.get("p", second) == 1)
            reader = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
            elementwise = isinstance(second, torch.Tensor)  # max(p, q)
            if not (reader in _OWN or elementwise or (of_loss and sums)):
                _check_whole(name, tensor, None if name == "histc" else dim)
        return function(*args, **options)

    setattr(home, name, checked)


def _check_whole(what: str, tensor: torch.Tensor, dim: Any) -> None:
    """Refuse a part along ``dim``, which is of all dims by default."""
    with torch._C.DisableTorchFunction():  # a first pass watches reads (axo.nn.shard_reads)
        owner = _split_owner(tensor, dim)
    if owner is not None and not is_own(owner):
        raise Refused(
            f"{what}: of {_held(owner)}, or of its gradient, it would be that of a part;"
            " torch.nn.utils.get_total_norm([p]), or [p.grad], is the whole norm, axo.unshard(p, p.placement) the whole"
            " tensor, p.clone() the part by itself. In a loss take a plain sum over elements, whose gradients are"
            " right: instead of p.norm() ** 2 take p.square().sum()"
        )


def _split_owner(tensor: torch.Tensor, dim: Any) -> Any:
    """The parameter whose memory, or whose gradient's, ``tensor`` has, where it is a part along ``dim``; else None."""
    layers: weakref.WeakSet[nn.Module] = clip_grad._get_total_norm.layers  # type: ignore[attr-defined]
    address = _address(tensor)
    for owner in (p for layer in layers for p in layer._parameters.values() if address and p is not None):
        for each in (owner, owner.grad):
            if each is not None and each.numel() == tensor.numel() and _address(each) == address:
                placement = placement_of(owner)
                if placement is None or dim is None or isinstance(dim, bool) or tensor.dim() != len(placement.splits):
                    return owner if is_split(placement) or each.shape != owner.shape else None
                dims, split = dim if isinstance(dim, tuple | list) else (dim,), _split_dims(placement)
                return owner if not dims or any(split[one % len(split)] for one in dims) else None
    return None


def _held(parameter: Any) -> str:
    """``'weight' of Linear 'mlp.fc', of which this rank holds (8, 8) of (16, 8)``."""
    layers: Any = clip_grad._get_total_norm.layers  # type: ignore[attr-defined]
    owners = {id(p): (n, m) for m in layers for n, p in m._parameters.items()}
    name, layer = owners.get(id(parameter), ("", None))
    of = f"{name!r} of {getattr(layer, 'label', layer._get_name)()}" if layer else "a parameter"
    return f"{of}, of which this rank holds {tuple(parameter.shape)} of {parameter.placement.global_shape}"


def is_own(owner: object, passed: tuple[str, ...] = ("torch.",)) -> bool:
    """Whether Axo or torch reads it (but for ``passed``), a module whose own it is, or one that takes shards."""
    frame = caller(lambda name: not name.startswith(passed))
    reader = None if frame is None else frame.f_locals.get("self")
    return (
        frame is None
        or getattr(reader, "takes_shards", False) is True
        or frame.f_globals.get("__name__", "").partition(".")[0] in (*_OWN, "torch")
        or (isinstance(reader, nn.Module) and any(each is owner for each in reader._parameters.values()))
    )


def _refuse_elements(name: str) -> None:
    """Let ``p[...]``, or its assignment, refuse elements by their numbers along a dim that is split."""
    function = getattr(torch.Tensor, name)

    @functools.wraps(function)
    def checked(self: nn.Parameter, index: Any, *value: Any) -> Any:
        if "placement" in self.__dict__ and _is_by_number(index, placement_of(self)) and not is_own(self, ()):
            raise Refused(
                f"p[...]: of {_held(self)}, elements may be another rank's; axo.unshard(p, p.placement) is the"
                " whole tensor, p.copy_(axo.shard(whole, p.placement)) writes this rank's part of it"
            )
        return function(self, index, *value)

    setattr(nn.Parameter, name, checked)


def _is_by_number(index: Any, placement: Placement | None) -> bool:
    """Whether ``index`` numbers elements, or masks them, along a dim that is split; slices are of the part."""
    if placement is None or not is_split(placement):
        return False
    each, split = index if isinstance(index, tuple) else (index,), _split_dims(placement)
    if any(isinstance(one, torch.Tensor | list) or one is ... for one in each):
        return not all(one is ... or isinstance(one, slice) for one in each)
    return any(isinstance(one, int) and split[dim] for dim, one in zip(range(len(split)), each, strict=False))


def _split_dims(placement: Placement) -> list[bool]:
    grid = placement.communicators.grid
    return [any(grid.size(axis) > 1 for axis in axes) for axes in placement.splits]


def _set_data(parameter: torch.Tensor, data: torch.Tensor) -> None:
    split = is_split(placement_of(parameter)) and data.numel() and data.shape != parameter.shape
    if split and not is_own(parameter):
        raise Refused(
            f"p.data = ...: shape {tuple(data.shape)} for {_held(parameter)}; axo.shard(whole, p.placement) cuts it"
        )
    _torchs_data.__set__(parameter, data)


def _address(tensor: torch.Tensor) -> int:
    has_one = type(tensor) in _PLAIN and not is_functorch_wrapped_tensor(tensor)
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


# Of a part they are not the whole's, nor a share of it; a sum is where a loss takes it.
_OF_ALL = (
    "mean nanmean std var prod sum nansum max min amax amin aminmax argmax argmin median nanmedian"
    " mode quantile nanquantile logsumexp norm count_nonzero histc topk kthvalue trace"
).split()
_PLAIN = (torch.Tensor, nn.Parameter)
_OWN = ("axo", "axo_kernels")  # packages that know what a part is
_torchs_data: Any = torch.Tensor.data
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
        for name in _OF_ALL:
            _refuse_of_part(torch.Tensor if name == "norm" else nn.Parameter, name)
        for name in ("__getitem__", "__setitem__"):
            _refuse_elements(name)
        nn.Parameter.data = property(lambda self: _torchs_data.__get__(self), _set_data)  # type: ignore[assignment]
    norm.layers.add(layer)
