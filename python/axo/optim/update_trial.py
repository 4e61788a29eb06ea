"""Try whether an optimizer updates a part of a tensor as it would update that part of the whole tensor.

An optimizer steps on this rank's parts (of x, y and z, and of ZeRO's rows), so its update must be one of single
elements. That of Adafactor (means of rows), torch's Muon (products), LAMB (norms of tensors) or Prodigy (one step size
out of sums over all parameters) is not. No list of names knows them all, so it is tried, on the CPU within
milliseconds:

    whole      small tensors, one for each kind of parameter of each group, under an optimizer of the same class and
               options; a few steps with gradients whose size changes from element to element and from step to step
    parts      the same with each split dim cut in half: the first halves, and the last ones
    compared   what the parts have become with the same elements of the whole

What ZeRO cuts is cut as ``Zero`` does, after the optimizer was made: state of construction counts. The user's
optimizer, parameters and generators are not touched. Torch's own are tried once. Others also with fewer steps of larger
tensors, and with more steps of smaller ones. Not seen: what
begins later than the steps of ``_FURTHER`` in tensors wider than its dims.
"""

from __future__ import annotations

import copy
import inspect
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from axo.optim.step_hooks import TRIAL
from axo.optim.zero import cut_state
from axo.placement import chunk_bounds, placement_of

LIMIT = 1e-3  # of the largest change: equal updates differ by rounding, in fp32 at worst
KEY = "axo_shards"  # in each group of a state dict: whose shards they are
_TRIAL = (128, 12)  # the longest dim, and steps
# Some optimizers treat larger matrices otherwise, or later steps; the last, with a closure, which would undo what an
# optimizer does before it calls one.
_FURTHER = ((512, 2, False), (32, 40, False), (8, 128, False), (32, 12, True))
_OWN = ("state", "param_groups", "defaults")
_PLAIN = (bool, int, float, str, torch.dtype, type(None))


class CutShape(NamedTuple):
    """Parameters of a group that are cut alike: a small one's shape, and the dims that ranks cut, and ZeRO then."""

    group: int
    shape: tuple[int, ...]
    dims: tuple[int, ...]
    zero: tuple[int, ...]
    device: torch.device


class Differs(NamedTuple):
    """What a trial has shown: how far off an update is, as a share of the largest; or why none could be made."""

    share: float = 0.0
    reason: str = ""


def try_update(optimizer: Optimizer) -> Differs:
    """Compare updates of parts and of whole tensors, cut as this optimizer's parameters are.

    Returns:
        ``share`` is inf where a part cannot be updated at all, and ``reason`` the error then; with a share of 0 and a
        reason nothing is known.
    """
    if torch.compiler.is_compiling() or type(torch.empty(0)) is not torch.Tensor:  # a dry run's, without values
        return Differs()
    difference = _try(optimizer, *_TRIAL)
    foreign = not type(optimizer).__module__.startswith("torch.optim.")
    for most, steps, closures in _FURTHER if foreign else ():
        if difference.share <= LIMIT and not difference.reason and (_closure(optimizer) or not closures):
            trial = _try(optimizer, most, steps, closures)
            if not (closures and trial.reason and trial.share == 0):  # what it takes there may be no closure
                difference = trial
    return difference


def _closure(optimizer: Optimizer) -> inspect.Parameter | None:
    """What a step takes a closure as, under whatever name."""
    _, *takes = inspect.signature(type(optimizer).step).parameters.values()
    named = [one for one in takes if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    return next((one for one in named if one.name == "closure"), named[0] if named else None)


def _try(optimizer: Optimizer, most: int, steps: int, closures: bool = False) -> Differs:
    kinds = _kinds(optimizer, most)
    difference = Differs()
    with _disable_current_modes(), _undisturbed():
        for dtype in (torch.float64, torch.float32):  # some kernels know no fp64
            tensors = [_Small(kind, dtype, steps) for kind in kinds]
            try:
                whole = _run(optimizer, tensors, None, closures)
            except Exception as error:
                difference = Differs(0.0, f"{type(error).__name__}: {error}")
                continue
            halves = [_compare(optimizer, tensors, whole, half, closures) for half in (0, 1)]
            difference = max(halves, key=lambda one: one.share)
            if difference.share > LIMIT:
                again = _run(optimizer, tensors, None, closures, seed=1)
                if not all(map(torch.equal, whole, again)):
                    difference = Differs(0.0, "its steps draw random numbers")
            break
    if difference.reason and not closures and _closure(optimizer):  # whose default may stand for none
        by_closure = _try(optimizer, most, steps, closures=True)
        return difference if by_closure.reason else by_closure
    return difference


def _kinds(optimizer: Optimizer, longest: int) -> list[CutShape]:
    kinds: dict[CutShape, None] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if not parameter.is_floating_point() or not parameter.numel():
                continue
            shape: tuple[int, ...] = tuple(parameter.shape)
            dims: tuple[int, ...] = ()
            zero: tuple[int, ...] = ()
            placement = placement_of(parameter)
            if placement is not None and placement.comms is not None:
                grid, shape = placement.comms.grid, placement.global_shape
                dims = tuple(d for d, axes in enumerate(placement.splits) if any(grid.size(axis) > 1 for axis in axes))
                zero = (placement.state_dim,) if placement.state is not placement and grid.data > 1 else ()
            most = longest if len(shape) < 3 else max(longest // 8, 4)
            least = dict.fromkeys((*dims, *zero), 4)  # no half of a half is empty
            small = tuple(max(least.get(dim, 0), min(size, most)) for dim, size in enumerate(shape))
            device = torch.device("cpu") if parameter.is_meta else parameter.device
            kinds[CutShape(number, small, dims, zero, device)] = None
    return list(kinds)


class _Small:
    """A small tensor, and its gradients: of one sign in all steps, in each step of another size in each place."""

    def __init__(self, kind: CutShape, dtype: torch.dtype, steps: int) -> None:
        self.kind = kind
        place = torch.zeros(kind.shape, dtype=dtype, device=kind.device)
        for dim, size in enumerate(kind.shape):  # 0 to 1 along each dim, added up with other weights
            along = torch.arange(size, dtype=dtype, device=kind.device) / max(1, size)
            place += along.view(-1, *(1,) * (len(kind.shape) - dim - 1)) / (1 + dim)
        self.values = torch.cos(97 * place) * (0.2 + place)
        usual = torch.cos(61 * place) * (0.1 + place) ** 2
        self.gradients = [usual * torch.exp(1.5 * torch.sin(1.3 * step + 5 * place)) for step in range(steps)]

    def of(self, tensor: torch.Tensor, half: int | None) -> torch.Tensor:
        """That half of a tensor of its shape which a rank has while the optimizer works; None: all of it."""
        return _cut(_cut(tensor, self.kind.dims, half), self.kind.zero, half)


def _cut(tensor: torch.Tensor, dims: tuple[int, ...], half: int | None) -> torch.Tensor:
    for dim in dims if half is not None else ():
        low, high = chunk_bounds(tensor.shape[dim], 2, half or 0)
        tensor = tensor.narrow(dim, low, high - low)
    return tensor


def _run(
    optimizer: Optimizer, small: list[_Small], half: int | None, closures: bool, seed: int = 0
) -> list[torch.Tensor]:
    """The change of each small tensor, or of one half of it, in some steps; ``closures``: with a closure each."""
    torch.default_generator.manual_seed(seed)
    if _cuda():
        torch.cuda.manual_seed(seed)
    tensors: list[torch.Tensor] = [torch.nn.Parameter(_cut(one.values, one.kind.dims, half).clone()) for one in small]
    twin = _twin(optimizer, [one.kind.group for one in small], tensors)
    for one, tensor in zip(small, tensors, strict=True):
        whole, take = tensor.shape, partial(_cut, dims=one.kind.zero, half=half)
        tensor.data = take(tensor.data)
        cut_state(twin, tensor, whole, take)
    before = [tensor.detach().clone() for tensor in tensors]
    step: Any = type(twin).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step  # without the hooks of all optimizers
    wants = _closure(optimizer)
    asks = wants if wants is not None and (closures or wants.default is wants.empty) else None

    for number in range(len(small[0].gradients)):
        starts = [tensor.detach().clone() for tensor in tensors]

        def closure(number: int = number, starts: list[torch.Tensor] = starts) -> torch.Tensor:
            for one, tensor, start in zip(small, tensors, starts, strict=True):
                way = tensor.detach() - start  # of what asks for gradients elsewhere than where it stands
                tensor.grad = one.of(one.gradients[number], half) + 0.1 * tensor.detach() + torch.tanh(100 * way)
            return torch.ones(())

        closure()
        step(twin, **({asks.name: closure} if asks else {}))
    changes = [tensor.detach() - old for tensor, old in zip(tensors, before, strict=True)]
    if half is None and not any(change.any() for change in changes):
        raise ValueError("it left the small tensors as they were")
    if half is None and not all(change.isfinite().all() for change in changes):
        raise ValueError("it made the small tensors infinite")
    return changes


def _compare(
    optimizer: Optimizer, small: list[_Small], whole: list[torch.Tensor], half: int, closures: bool
) -> Differs:
    try:
        parts = _run(optimizer, small, half, closures)
    except Exception as error:
        return Differs(float("inf"), f"{type(error).__name__}: {error}")
    shares = [0.0]
    for one, change, part in zip(small, whole, parts, strict=True):
        off = float((one.of(change, half) - part).abs().amax())
        largest = max(float(change.abs().amax()), off)  # a part may move where the whole does not
        shares.append(off / largest if off else 0.0)
    return Differs(max(shares))


def _twin(optimizer: Optimizer, numbers: list[int], tensors: list[torch.Tensor]) -> Optimizer:
    """An optimizer of the same class and options for other parameters, each of the group with its number."""
    cls, groups = type(optimizer), []
    for index, group in enumerate(optimizer.param_groups):
        mine = [tensor for number, tensor in zip(numbers, tensors, strict=True) if number == index]
        if mine:
            groups.append({"params": mine} | _options(group))
    accepted = inspect.signature(cls.__init__).parameters
    named = {name: value for name, value in _options(groups[0]).items() if name in accepted}
    twin: Optimizer | None = None
    # Those that others hand their updates to (SAM, Lookahead), and may be made of.
    inner = {
        name: _twin(value, numbers, tensors) for name, value in vars(optimizer).items() if isinstance(value, Optimizer)
    }
    for given in [*inner.values(), *[groups[0]["params"]] * (len(groups) == 1), [dict(group) for group in groups]]:
        try:
            twin = cls(given, **named)
            break
        except Exception:  # it wants what no option says, or its parameters in another form
            continue
    if twin is None:
        twin = cls.__new__(cls)
        Optimizer.__init__(twin, [dict(group) for group in groups], copy.deepcopy(optimizer.defaults))
    for own, group in zip(twin.param_groups, groups, strict=True):
        own |= _options(group)
    for name, value in vars(optimizer).items():
        if name not in _OWN and _is_plain(value):
            setattr(twin, name, copy.copy(value))
        elif name in inner and type(getattr(twin, name, None)) is not type(value):
            if value.param_groups is optimizer.param_groups:
                inner[name].param_groups = twin.param_groups
            setattr(twin, name, inner[name])
    setattr(twin, TRIAL, True)
    return twin


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """A copy of a group's options, with a rate of 1 at least: what depends on the way so far shows in few steps then.

    The rate that a schedule begins with may be 0.
    """
    options = {key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", "param_names", KEY)}
    rate = options.get("lr")
    if rate is not None:
        options["lr"] = rate.clamp(min=1.0) if isinstance(rate, torch.Tensor) else max(rate, 1.0)
    return options


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, (*value.keys(), *value.values())))
    return isinstance(value, _PLAIN) or (isinstance(value, (list, tuple, set)) and all(map(_is_plain, value)))


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Put the process's generators back behind the body, and let no warning out of it."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (the global generator)
    try:
        with torch.random.fork_rng([torch.cuda.current_device()] if _cuda() else []), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def _cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()
