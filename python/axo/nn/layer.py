"""What every parallel layer shares: its shards, where they lie, how they are first filled, and how they are loaded.

A layer holds this rank's shards as plain parameters under torch's names, and one immutable placement a parameter
(``layer.placements["weight"]``, ``layer.weight.placement``). ``state_dict()`` gives whole tensors, gathered on every
rank, as a serial layer would; ``state_dict(keep_vars=True)`` the parameters themselves, which are shards.
``load_state_dict`` takes a shard or the whole tensor, which is then cut.

Not here: any arithmetic of a layer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from torch import nn

from axo.comm.agree import all_call, ranks_that_differ
from axo.comm.connect import Communicators, check_comms
from axo.comm.memory import physical_memory
from axo.errors import Refused
from axo.matmul import cost, engine_cost
from axo.nn import chain, torch_utils
from axo.nn.generator import source_generator
from axo.overlap.engine import Exchange
from axo.placement import Placement, is_split, placement_of
from axo.sharding import gather_features, unshard


class ParallelLayer(nn.Module):
    """Base of the parallel layers.

    Attributes:
        comms: The communicators of the grid.
        placements: Parameter name -> :class:`axo.Placement`.
        exchanges: What issues its collectives; the first is that of its weight.
        first_pass: Whether the layers that its input comes from are still to be checked (``axo.nn.chain``).
        first_without_history: Whether none of its inputs was without a history yet: then less is known.
        feature_dim: Which dim of activations holds the features: the last, or the channels of a convolution.
        in_axis, out_axis: The axes that split the features of input and output; None: not split.
        out_blocks: Feature blocks that the out axis splits one by one; None: one block.
        out_copies: For each of them, how many neighbours along the out axis hold the same part; None: one each.
        in_features_whole, out_features_whole: Features over all ranks; None where the input has none (token ids).
        gather_output: Whether all features of the output are returned on every rank.
    """

    exchanges: tuple[Exchange, ...] = ()
    first_pass = first_without_history = True
    feature_dim = -1
    in_axis: str | None = None
    out_axis: str | None = None
    out_blocks: tuple[int, ...] | None = None
    out_copies: tuple[int, ...] | None = None
    in_features_whole: int | None = None
    out_features_whole: int | None = None
    gather_output = False

    def _start(self, comms: Communicators, name: str | None, placements: dict[str, Placement]) -> None:
        """Take the place of ``nn.Module.__init__`` (the classes of torch.nn would allocate whole weights).

        Raises:
            ValueError: ``comms`` is not what ``axo.connect`` returns.
        """
        nn.Module.__init__(self)
        check_comms(type(self).__name__, comms)
        self.comms = comms
        self.name = name
        self.placements = placements

    def _add_parameters(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """Register an empty shard for each placement.

        Raises:
            MemoryError: This rank's shards are larger than the memory of their device, or there is too little left.
        """
        place, dtype = torch.device(device or torch.get_default_device()), dtype or torch.get_default_dtype()
        shapes = {name: each.local_shape() for name, each in self.placements.items()}
        size, room = sum(map(math.prod, shapes.values())) * dtype.itemsize, physical_memory(place)
        wrong = (
            f"{self.label()}: this rank's part takes {size / 2**30:,.1f} GiB, and {place} has"
            f" {(room or 0) / 2**30:,.1f} GiB; use a grid with more ranks along x, y or z, or a smaller layer"
        )
        if room is not None and size > room:
            raise MemoryError(wrong)
        for name, shape in shapes.items():
            try:
                tensor = torch.empty(shape, device=place, dtype=dtype)
            except RuntimeError as error:
                if "allocate memory" not in str(error):
                    raise
                raise MemoryError(wrong) from None
            self.register_parameter(name, nn.Parameter(tensor))
        self._tag()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter. One that replaces another must be this rank's shard, and gets its placement.

        Raises:
            ValueError: It is not of the shard's shape, or stands in for one that is split (``weight_orig``).
            Refused: It is another layer's, tied after the split, and lies otherwise.
        """
        of, _, kind = name.rpartition("_")
        if param is not None and kind in ("orig", "g", "v"):  # pruning, the old weight_norm and spectral_norm
            torch_utils.refuse_derived(f"{self.label()}: {name}", self.placements.get(of))
        before, placement = self._parameters.get(name), self.placements.get(name)
        told = hasattr(param, "placement")
        if before is not None and param is not None and placement is not None and not told:
            shape = placement.local_shape()
            if tuple(param.shape) != shape:
                raise ValueError(
                    f"{self.label()}: {name} of shape {tuple(param.shape)} must be this rank's shard, {shape};"
                    " axo.shard(whole, layer.placements[name]) cuts it"
                )
        tied = placement_of(param) if before is not None and param is not before else None
        differs = tied is not None and is_split(tied) and tied != self.placements.get(name)
        if differs and not torch_utils.is_own(param, ("torch.", __name__)):
            assert tied is not None
            raise Refused(
                f"{self.label()}: {name} is tied to a parameter of {tied.global_shape} that is split"
                " otherwise; tie them before axo.parallelize (on_grid, fabric.setup, Trainer.fit)"
            )
        super().register_parameter(name, param)
        if before is not None and param is not None and not told:
            self._tag()

    def _tag(self) -> None:
        for name, placement in self.placements.items():
            parameter = getattr(self, name)
            if parameter is not None:
                parameter.placement = placement
        if self.comms.everyone.size > 1:
            torch_utils.know(self)

    def serial(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """The layer of torch.nn that this one stands for: whole, on one rank, its parameters not filled yet."""
        raise NotImplementedError

    def _check_dtype(self, input: torch.Tensor, weight: torch.Tensor) -> None:
        """Refuse what torch's layer refuses: dtypes that differ where autocast does not make them one.

        Raises:
            RuntimeError, TypeError: As torch's layer does.
        """
        if not isinstance(input, torch.Tensor):
            raise TypeError(f"{self.label()}: the input is a {type(input).__name__}; pass a tensor")
        if torch.is_autocast_enabled(input.device.type) and _joins(input) and _joins(weight):
            return
        raise RuntimeError(
            f"{self.label()}: the input is {input.dtype} and the weight {weight.dtype}, which must be the same"
            " (autocast joins floats, but for float64); convert the input with input.to(layer.weight.dtype)"
        )

    def _first_pass(self, input: torch.Tensor, output: torch.Tensor) -> None:
        """Check once that the layers which made ``input`` fit this one; note in ``output`` that this one made it."""
        chain.leave(output, self)
        if chain.check(input, self):
            self.first_pass = False
        else:
            self.first_without_history = False

    def load_serial(self, serial: nn.Module, names: Iterable[str] | None = None) -> None:
        """Copy this rank's shards out of a whole layer: all of them, or those of ``names``."""
        with torch.no_grad():
            for name in self.placements if names is None else names:
                getattr(self, name).copy_(self.placements[name].take(getattr(serial, name).detach()))

    def reset_parameters(self) -> None:
        """Fill the shards with what the serial layer would get from rank 0's generator. Every rank must call it."""
        if not self.placements or any(getattr(self, name).is_meta for name in self.placements):
            return
        weight = getattr(self, next(iter(self.placements)))
        check_same_layers([self], self.comms, self.label())
        with source_generator(self.comms, weight.device):
            serial: Any = self.serial(weight.device, weight.dtype)
            serial.reset_parameters()
            self.load_serial(serial)

    def _gather_if_asked(self, output: torch.Tensor) -> torch.Tensor:
        """The output with all its features where ``gather_output`` says so; backward takes this rank's."""
        if not self.gather_output or self.out_axis is None or self.out_features_whole is None:
            return output
        blocks, copies = self.out_blocks, self.out_copies
        return gather_features(
            output, self.comms, self.out_axis, self.out_features_whole, blocks, copies, self.feature_dim
        )

    def described(self) -> str:
        """What ranks that build this layer together must have in common."""
        dtypes = [getattr(self, name).dtype for name in self.placements]
        options = [(exchange.op, exchange.overlap) for exchange in self.exchanges]
        return f"{type(self).__name__} {self.placements} {dtypes} {options}"

    def _gathers(self, input_grad: bool) -> int:
        """How often the weight is gathered in a step."""
        return 2 if input_grad and self.exchanges[0].engine.overlap.gather_cache in ("none", 0) else 1

    def flops(self, rows: int) -> float:
        """Return the flops of one forward pass on this rank; backward takes twice as many.

        Args:
            rows: Rows of one data-parallel group (all ranks along z together), as for ``cost``.
        """
        return 0.0

    def saved_bytes(self, rows: int, *, itemsize: int = 4) -> float:
        """Return the bytes of activations that autograd keeps of this layer for backward, on this rank.

        Args:
            rows: As for ``flops``.
            itemsize: Bytes an element of what it computes in; of a norm, of its input.
        """
        raise NotImplementedError(f"{self.label()}: what it keeps for backward is not counted")

    def _rows(self, rows: int) -> int:
        """This rank's part of the rows of a data-parallel group."""
        return cost.rows_of(self.comms.arrangement, self.comms.grid, rows, self.comms.coords)

    def _reduced(self, calls: list[cost.Call]) -> list[cost.Call]:
        """The calls with gradients in the dtype that this layer's engine reduces them in."""
        dtype = self.exchanges[0].engine.reduce_dtype
        return calls if dtype is None else engine_cost.reduced_in(calls, dtype.itemsize)

    def full_weight(self) -> torch.Tensor:
        """The whole weight, gathered from its shards. Every rank must call it."""
        weight: Any = self.weight
        if is_split(self.placements["weight"]):
            all_call(self.comms, "layer.full_weight()")
        return unshard(weight.detach(), self.placements["weight"])

    def label(self) -> str:
        """``Linear 'mlp.fc'``: how messages call this layer."""
        return label_of(self, self.name or (self.exchanges[0].name if self.exchanges else ""))

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._tag()  # a conversion may have made new parameters
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self.comms)] = self.comms  # a copy of a layer uses the same communicators
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        new._tag()
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{self.label()}: a parallel layer holds this rank's shards and is not pickled; every rank calls"
            " model.state_dict() (whole tensors), axo.checkpoint.save(...) or axo.checkpoint.save_pretrained(...)"
        )

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        gathered = [] if keep_vars else [name for name, where in self.placements.items() if is_split(where)]
        if any(not getattr(self, name).is_meta for name in gathered):
            all_call(self.comms, "model.state_dict()")
        for name, placement in self.placements.items() if not keep_vars else ():
            shard = destination.get(prefix + name)
            if shard is None:  # computed from others, which are saved
                continue
            whole = shard.new_empty(placement.whole_shape) if shard.is_meta else unshard(shard, placement)
            destination[prefix + name] = whole

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, placement in self.placements.items():
            value: Any = state_dict.get(prefix + name)
            if hasattr(value, "_load_tensor"):  # Lightning's lazily read checkpoints: read this one tensor now
                state_dict[prefix + name] = value = value._load_tensor()
            if not isinstance(value, torch.Tensor) or tuple(value.shape) != placement.whole_shape:
                continue
            if value.shape != getattr(self, name).shape:
                state_dict[prefix + name] = placement.take(value).clone()
        errors: list[str] = args[-1]
        before = len(errors)
        super()._load_from_state_dict(state_dict, prefix, *args)
        for name, placement in self.placements.items():  # torch names the shape of the shard
            for at in range(before, len(errors)):
                if errors[at].startswith(f"size mismatch for {prefix}{name}:"):
                    errors[at] += f" That is this rank's part of {list(placement.whole_shape)}."
        self._tag()


def _joins(tensor: torch.Tensor) -> bool:
    """Whether autocast makes this tensor's dtype that of others."""
    return tensor.is_floating_point() and tensor.dtype is not torch.float64


def label_of(layer: nn.Module, name: str | None) -> str:
    """``Linear 'mlp.fc'``: how messages call a layer."""
    return f"{type(layer).__name__} {name!r}" if name else type(layer).__name__


def is_parallel(model: nn.Module) -> bool:
    """Whether ``model`` holds a parallel layer."""
    return any(isinstance(module, ParallelLayer) for module in model.modules())


def refuse_context(model: nn.Module) -> None:
    """Refuse a model in a context, or with experts on several ranks, to a trainer that makes communicators of its own.

    Raises:
        Refused: It does.
    """
    for layer in (module for module in model.modules() if isinstance(module, ParallelLayer)):
        if max(layer.comms.context.size, layer.comms.experts.size) > 1:
            what = (
                "a context (axo.connect(context=...))" if layer.comms.context.size > 1 else "axo.connect(experts=...)"
            )
            raise Refused(
                f"a model in {what} is trained by a loop of your own, or by axo train; AxoStrategy takes whole models"
            )


def default_device(device: torch.device | str | None, comms: Communicators) -> torch.device:
    """``device`` if given, else torch's default device if one was set, else that of the communicators."""
    if device is not None:
        return torch.device(device)
    default = torch.get_default_device()
    return default if default.type != "cpu" else comms.device


def check_same_layers(layers: Sequence[ParallelLayer], comms: Communicators, owner: str) -> None:
    """Compare what the ranks have built: sizes, splits, dtypes and options of each parallel layer.

    Two layers of different sizes can have shards of shapes that fit each other: they would run, and compute nonsense.

    Raises:
        ValueError: They differ; on every rank.
    """
    differ = ranks_that_differ(comms, "\n".join(layer.described() for layer in layers))
    if differ:
        shown = "; ".join(f"{layer}, {getattr(layer, next(iter(layer.placements))).dtype}" for layer in layers[:3])
        raise ValueError(
            f"{owner}: ranks {differ} have built something else than rank 0; give every rank the same sizes, dtypes and"
            f" options (this rank: {shown})"
        )
