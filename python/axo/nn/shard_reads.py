"""Refuse code that reads a split weight as if it were whole, where the model first runs.

A layer's weight is this rank's part of it. Modules around a layer may read ``layer.weight`` in their own forward: to
take its norm (DoRA), to shape an update like it (LoKr, LoHa), to look rows up in it, or since it is tied to another.
They would fail with sizes that nobody gave, or compute nonsense. So in the first pass with gradients, and the first one
without, a ``TorchFunctionMode`` sees every function of torch; one that takes a split parameter is refused unless Axo
calls it, or the module that owns the parameter. And a module with parameters of its own that is put in the place of a
split layer, or around it (an adapter, a new head), is refused where that happens: the layer's inputs and outputs are of
this rank, and nobody would reduce the gradients of the new parameters.

Not here: what reads weights outside of the model's forward, and compiled models, whose compiler would trace the mode.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.overrides import TorchFunctionMode

from axo.comm.connect import Communicators
from axo.errors import Refused
from axo.overlap.autograd import in_backward
from axo.overlap.gathers import EVALUATION, TRAINING
from axo.placement import is_split, placement_of

_SIZES = ("shape", "data", "T", "mT", "H", "mH")  # attributes that are of this rank's part
_SAFE = ("dim", "element_size", "is_complex", "is_floating_point", "type")  # methods that are not


def watch_first_passes(model: nn.Module, comms: Communicators) -> None:
    """Look at the first passes of ``model``, which a plan has made."""
    if comms.grid.world_size == 1:
        return
    _watch_registration()
    kinds = {TRAINING, EVALUATION}
    active: list[_ShardReads | None] = []

    def before(module: nn.Module, inputs: Any) -> None:
        kind = TRAINING if torch.is_grad_enabled() else EVALUATION
        looks = kind in kinds and not in_backward() and not caller(lambda name: name.startswith("torch._dynamo"))
        kinds.discard(kind)
        active.append(_ShardReads(module) if looks else None)
        if looks:
            active[-1].__enter__()  # type: ignore[union-attr]

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        mode = active.pop() if active else None
        if mode is not None:
            mode.__exit__(None, None, None)

    hooks: tuple[Any, ...] = (before, after)
    for hook in hooks:
        hook.eager_only = True
    model.register_forward_pre_hook(before)
    model.register_forward_hook(after, always_call=True)


class _ShardReads(TorchFunctionMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "__get__":
            reads = getattr(func.__self__, "__name__", "") in _SIZES
        else:
            reads = name not in _SAFE
        if reads:
            for value in (*args, *kwargs.values()):
                for each in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(each, nn.Parameter) and is_split(placement_of(each)):
                        self._check(each)
        return func(*args, **kwargs)

    def _check(self, weight: nn.Parameter) -> None:
        """Raise unless Axo reads it, or the module whose own parameter it is, by themselves or through what autograd
        calls there (a hook that packs saved tensors)."""
        reader = frame = caller(lambda name: not name.startswith("torch."))
        while frame is not None and frame.f_globals.get("__name__") != "torch.nn.modules.module":
            if frame.f_globals.get("__name__", "").partition(".")[0] in ("axo", "axo_kernels"):
                return
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and any(each is weight for each in module._parameters.values()):
                return  # a plan has split it for the code that it knows
            frame = frame.f_back
        if reader is None:
            return
        placement, code = placement_of(weight), reader.f_code
        name = next((name for name, each in self._model.named_parameters() if each is weight), "a parameter")
        path = name.split(".")[:-1]
        layer = f"*.{path[-1]}" if len(path) > 1 else ".".join(path)
        assert placement is not None
        raise Refused(
            f"forward: {code.co_qualname} ({Path(code.co_filename).name}:{reader.f_lineno}) reads {name!r} itself, of"
            f" which this rank holds {tuple(weight.shape)} of {placement.global_shape}; keep that layer whole by"
            f" plan={{{layer!r}: 'replicate'}}, or leave the module out that reads it"
        )


@functools.cache
def _watch_registration() -> None:
    register_module_module_registration_hook(_refuse_around)


def _refuse_around(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    """Refuse a module with parameters of its own in the place of a layer that is split, or around it."""
    layer = parent._modules.get(name)
    placements = getattr(layer, "placements", None)
    if (
        layer is None
        or module is None
        or not isinstance(placements, dict)
        or not any(map(is_split, placements.values()))
    ):
        return
    own = {id(parameter) for parameter in layer.parameters()}
    new = next((name for name, parameter in module.named_parameters() if id(parameter) not in own), None)
    writer = caller(lambda name: not name.startswith("torch."))
    if new is not None and writer is not None and writer.f_globals["__name__"].partition(".")[0] != "axo":
        raise Refused(
            f"{type(parent).__name__}.{name}: {type(module).__name__} has a parameter {new!r} that would be outside of"
            f" the grid, around or instead of the layer {name!r}, which is split over ranks; put it there before"
            " axo.parallelize (on_grid, fabric.setup, Trainer.fit)"
        )


def caller(wanted: Callable[[str], bool]) -> FrameType | None:
    """The nearest frame above those that watch reads whose module's name is wanted."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name not in (__name__, "axo.nn.torch_utils") and wanted(name):
            return frame
        frame = frame.f_back
    return None
