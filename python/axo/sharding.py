"""Between whole tensors and this rank's shards: parameters by their placement, activations as a layer splits them.

    shard(full, where)            cut; no communication                      differentiable
    unshard(local, where)         gather over the axes that split it         backward takes this rank's part
    unshard_grad(p)               the whole gradient of a parameter, after backward
    shard_batch(batch, comms)     this rank's rows of a whole batch, over data and z; no communication
    shard_input(layer, t)         rows alike, features over the layer's in axis; no communication
    unshard_output(layer, t)      the inverse for what the layer returns     backward takes this rank's part
    to_dtensor(p)                 a parameter seen as a DTensor; no communication

``where`` is a placement, or a layer: then its weight's. Gathers are exact also where parts are uneven: they travel
padded to the longest. Backward of a gather assumes that all ranks go on with the same computation.

For tests, checkpoints and the edges of a model; a training step has no need of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import PackedSequence

from axo.comm.connect import Communicators, check_comms
from axo.errors import Refused
from axo.grid import AXES, Coords
from axo.placement import Placement, Range, context_ranges, cut_ranges, local_ranges, placement_of, ranges_by_work

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class ShardedLayer(Protocol):
    """What a parallel layer says of itself; see ``axo.nn.layer.ParallelLayer``."""

    comms: Communicators
    placements: dict[str, Placement]
    feature_dim: int
    in_axis: str | None
    out_axis: str | None
    out_blocks: tuple[int, ...] | None
    out_copies: tuple[int, ...] | None
    in_features_whole: int | None
    out_features_whole: int | None

    def label(self) -> str:
        """How messages call it."""


def shard(full: torch.Tensor, where: Placement | ShardedLayer) -> torch.Tensor:
    """Cut this rank's part out of a whole tensor, as a tensor of its own.

    Raises:
        ValueError: The tensor is not of the placement's global shape.
    """
    return _placement(where).take(full).clone(memory_format=torch.contiguous_format)


def unshard(local: torch.Tensor, where: Placement | ShardedLayer) -> torch.Tensor:
    """Gather the whole tensor from all ranks' parts, on every rank. Every rank must call it.

    Raises:
        ValueError: The tensor is not of this rank's local shape.
    """
    placement = _placement(where)
    expected = placement.local_shape()
    if tuple(local.shape) != expected:
        raise ValueError(f"unshard: this rank's part has shape {tuple(local.shape)}, its placement says {expected}")
    return _Unshard.apply(local, placement)


def unshard_grad(parameter: torch.Tensor) -> torch.Tensor:
    """Gather the whole gradient of a parameter, as backward has left it in ``.grad``. Every rank must call it.

    Raises:
        ValueError: The parameter has no gradient or no placement, or what is given is not a parameter.
    """
    if not isinstance(parameter, torch.Tensor):
        raise ValueError(f"unshard_grad: a {type(parameter).__name__} is no parameter; pass one, such as layer.weight")
    grad = parameter.grad
    if grad is None:
        raise ValueError("unshard_grad: the parameter has no gradient; call it after backward")
    where = placement_of(grad) or placement_of(parameter)  # ZeRO-2's has its own
    if where is None:
        raise ValueError("unshard_grad: the tensor has no placement on a grid; pass a parameter of a parallel layer")
    return unshard(grad, where)


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, placement: Placement) -> torch.Tensor:
        ctx.placement = placement
        comms = placement.communicators
        grid = comms.grid
        axes = [axis for axis in AXES if axis in placement.axes and grid.size(axis) > 1]
        if not axes:
            return local.clone().view(placement.whole_shape)
        longest = placement.max_local_shape()
        parts = pad_to(local, longest).contiguous().unsqueeze(0).to(comms.device)
        for axis in axes:  # the axis gathered last is the outermost of the index
            parts = comms.axis(axis).all_gather(parts)
        full = local.new_empty(placement.global_shape)
        for index, outer_first in enumerate(product(*(range(grid.size(axis)) for axis in reversed(axes)))):
            where = dict(zip(reversed(axes), outer_first, strict=True))
            placement.put(full, parts[index], grid, Coords(*(where.get(axis, 0) for axis in AXES)))
        return full.view(placement.whole_shape)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.placement.take(grad_output).contiguous(), None


def shard_batch(batch: Any, comms: Communicators, *, positions: torch.Tensor | None = None) -> Any:
    """Cut a whole batch for a model made by ``axo.parallelize``: this rank's rows (dim 0), over data and z.

    Ranks along x and y get the same rows; with algorithm "tesseract" x splits rows too. The same by a sampler:
    ``DistributedSampler(data, num_replicas=comms.row_parts, rank=comms.row_part)``, and in a context
    :func:`cut_sequence` of its rows. With another algorithm than "axonn" call it after ``axo.parallelize``. In a
    context (``axo.connect(context=...)``) rows are cut over data and contexts, and dim 1, which is tokens, over the
    ranks of one: an early and a late piece each.

    Args:
        batch: A tensor ``(rows, ...)``, or mappings (which become dicts), dataclasses, lists and tuples of such; what
            is no tensor, such as an array of NumPy's, stays as it is.
        comms: What ``axo.connect`` returned.
        positions: Of a mapping in a context, to cut packed documents by work: of all tokens, ``(rows, tokens)``, from 0
            with each document. The result names the tokens of each rank, ``context_cut``, for a model of plan "auto",
            which must be given it, and ``axo.nn.context.pieces_of``.

    Raises:
        ValueError: The rows do not divide over the axes that split them, or are packed, nested or sparse; or
            ``positions`` are not of the rows and tokens of each tensor.
    """
    check_comms("shard_batch", comms)
    if positions is None or comms.context.size == 1:
        return _shard_batch(batch, partial(_part, comms, None, None))
    if not isinstance(batch, Mapping):
        raise ValueError(f"shard_batch: positions= is of mappings, and this batch is a {type(batch).__name__}")
    if positions.dim() != 2 or positions.shape[0] % comms.row_parts:
        raise ValueError(
            f"shard_batch: positions of shape {tuple(positions.shape)} are not (rows, tokens), of a multiple of"
            f" {comms.row_parts} rows"
        )
    rows = positions.shape[0] // comms.row_parts
    work = (positions.narrow(0, rows * comms.row_part, rows) + 1).sum(0).tolist()
    cut = ranges_by_work(work, comms.context.size)
    return _shard_batch(batch, partial(_part, comms, cut, positions.shape)) | {"context_cut": cut}


def _shard_batch(batch: Any, part: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(batch, PackedSequence) or (
        isinstance(batch, torch.Tensor) and (batch.is_nested or batch.layout != torch.strided)
    ):
        raise ValueError(
            f"shard_batch: rows of a packed, nested or sparse batch ({type(batch).__name__}) cannot be cut; cut the"
            " padded or dense one and convert the part"
        )
    if isinstance(batch, torch.Tensor):
        return part(batch)
    if isinstance(batch, Mapping):
        return {key: _shard_batch(value, part) for key, value in batch.items()}
    if is_dataclass(batch) and not isinstance(batch, type):
        mine = copy.copy(batch)
        for field in fields(batch):
            object.__setattr__(mine, field.name, _shard_batch(getattr(batch, field.name), part))
        return mine
    if isinstance(batch, list | tuple):
        parts_of = [_shard_batch(each, part) for each in batch]
        return type(batch)(*parts_of) if hasattr(batch, "_fields") else type(batch)(parts_of)
    return batch


def _part(
    comms: Communicators,
    cut: list[list[Range]] | None,
    of: tuple[int, ...] | None,
    tensor: torch.Tensor,
) -> torch.Tensor:
    """This rank's rows and tokens; ``of``: the (rows, tokens) that ``cut`` is of, of which one row is of all."""
    parts = comms.row_parts
    if not tensor.dim() or tensor.shape[0] % parts:
        raise ValueError(
            f"shard_batch: a tensor of shape {tuple(tensor.shape)} has no rows that divide over"
            f" {comms.arrangement.describe_rows(comms.grid)}; use a multiple of {parts} rows, or cut it yourself"
            " and weight the losses by axo.token_weight"
        )
    if of is not None and (
        (tensor.shape[0] != of[0] and 1 not in (tensor.shape[0], of[0])) or tensor.shape[1:2] not in ((), of[1:])
    ):
        raise ValueError(
            f"shard_batch: positions of (rows, tokens) = {tuple(of)} are not those of a tensor of shape"
            f" {tuple(tensor.shape)}; give one for each token of the batch"
        )
    rows = tensor.shape[0] // parts
    return cut_sequence(tensor.narrow(0, rows * comms.row_part, rows), comms, cut)


def cut_sequence(tensor: torch.Tensor, comms: Communicators, cut: list[list[Range]] | None = None) -> torch.Tensor:
    """This rank's tokens, ``(rows, tokens, ...)`` -> ``(rows, its tokens, ...)``: all of them outside of a context.

    A tensor of one dim has no tokens, and stays whole. ``cut``: the tokens of each rank; default: an early and a late
    piece.
    """
    if comms.context.size == 1 or tensor.dim() < 2:
        return tensor
    rank = comms.context.rank
    return cut_ranges(
        tensor, context_ranges(tensor.shape[1], comms.context.size, rank) if cut is None else cut[rank], 1
    )


def _refuse_context(what: str, comms: Communicators) -> None:
    if comms.context.size > 1:
        raise Refused(f"{what}: in a context rows are tokens too; cut batches by axo.shard_batch")


def shard_input(layer: ShardedLayer, tensor: torch.Tensor) -> torch.Tensor:
    """Cut out what ``layer`` takes on this rank: rows (dim 0) as ``shard_batch``, features over its in axis.

    Raises:
        ValueError: The last dim is not the layer's whole input size.
    """
    _check_order("shard_input", layer, tensor)
    _refuse_context("shard_input", layer.comms)
    dim, has_features = layer.feature_dim, layer.in_features_whole is not None
    if has_features and (tensor.dim() < -dim or tensor.shape[dim] != layer.in_features_whole):
        where = "a last dim" if dim == -1 else f"a dim {dim}"
        raise ValueError(
            f"{layer.label()}: shard_input needs {where} of {layer.in_features_whole}, got {tuple(tensor.shape)}"
        )
    splits: list[tuple[str, ...]] = [()] * tensor.dim()
    if has_features and layer.in_axis is not None:
        splits[dim] = (layer.in_axis,)
    if tensor.dim() > (-dim if has_features else 0):
        splits[0] = layer.comms.arrangement.rows
    return shard(tensor, Placement(tuple(tensor.shape), tuple(splits), comms=layer.comms))


def unshard_output(layer: ShardedLayer, tensor: torch.Tensor) -> torch.Tensor:
    """Gather what ``layer`` returned: features over its out axis, then rows (dim 0) over the axes that split them.

    Ranks may hold different numbers of rows; the other dims must agree. Every rank must call it.
    """
    _check_order("unshard_output", layer, tensor)
    _refuse_context("unshard_output", layer.comms)
    dim, whole = layer.feature_dim, layer.out_features_whole
    if layer.out_axis is not None and whole is not None and tensor.shape[dim] != whole:
        tensor = gather_features(tensor, layer.comms, layer.out_axis, whole, layer.out_blocks, layer.out_copies, dim)
    return gather_rows(tensor, layer.comms) if tensor.dim() > -dim else tensor


def _check_order(owner: str, layer: object, tensor: object) -> None:
    if not hasattr(layer, "comms") or not isinstance(tensor, torch.Tensor):
        given = f"{type(layer).__name__}, {type(tensor).__name__}"
        raise ValueError(f"{owner}: takes (layer, tensor), the layer one of axo.nn's; got ({given})")


def gather_rows(tensor: torch.Tensor, comms: Communicators) -> torch.Tensor:
    """Gather dim 0 over the axes that split rows, of which ranks may hold different numbers; backward takes this
    rank's rows of the gradient. Every rank must call it."""
    gathered: torch.Tensor = _GatherRows.apply(tensor, comms)
    return gathered


def gather_features(
    tensor: torch.Tensor,
    comms: Communicators,
    axis: str,
    features: int,
    blocks: tuple[int, ...] | None = None,
    copies: tuple[int, ...] | None = None,
    dim: int = -1,
) -> torch.Tensor:
    """Gather ``dim`` over ``axis``: (..., features/G) -> (..., features); backward takes this rank's features.

    Of features that several ranks hold (``copies``) the first of them gets the gradient, the others zero.
    """
    if comms.grid.size(axis) == 1:
        return tensor
    where = Placement((features,), ((axis,),), blocks, comms, copies)
    return _GatherFeatures.apply(tensor, comms, axis, where, dim)


def cut_features(
    tensor: torch.Tensor, comms: Communicators, axis: str, features: int, *, dim: int = -1
) -> torch.Tensor:
    """Take this rank's part of ``dim``: (..., features) -> (..., features/G); backward gathers over ``axis``.

    All ranks along the axis hold the same tensor, and get the same gradient.

    Raises:
        ValueError: ``dim`` is not of size ``features``.
    """
    if tensor.shape[dim] != features:
        raise ValueError(f"cut_features: dim {dim} of shape {tuple(tensor.shape)} is not of size {features}")
    if comms.grid.size(axis) == 1:
        return tensor
    return _CutFeatures.apply(tensor, comms, axis, dim)


class _CutFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, comms: Communicators, axis: str, dim: int) -> torch.Tensor:
        ctx.comms, ctx.axis, ctx.features, ctx.dim = comms, axis, tensor.shape[dim], dim
        ((low, high),) = Placement((tensor.shape[dim],), ((axis,),), comms=comms).ranges(0)
        return tensor.narrow(dim, low, high - low).contiguous()

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.no_grad():
            return gather_features(grad_output, ctx.comms, ctx.axis, ctx.features, dim=ctx.dim), None, None, None


class _GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, comms: Communicators, axis: str, features: Placement, dim: int
    ) -> torch.Tensor:
        parts, longest = comms.grid.size(axis), features.max_local_shape()[0]
        shape = list(tensor.shape)
        moved = tensor.movedim(dim, -1)
        rows = moved.reshape(moved.shape[:-1].numel(), moved.shape[-1])  # this rank may have no features
        gathered = comms.axis(axis).all_gather(pad_to(rows, (rows.shape[0], longest)).contiguous())
        gathered = gathered.view(parts, *moved.shape[:-1], longest)
        shape[dim] = features.global_shape[0]
        full = tensor.new_empty(shape)  # contiguous as the serial layer's output, and no view
        for part in range(parts):
            ranges = features.ranges(0, comms.grid, comms.coords._replace(**{axis: part}))
            for (a, b), (c, d) in zip(ranges, local_ranges(ranges), strict=True):
                full.narrow(dim, a, b - a).movedim(dim, -1).copy_(gathered[part, ..., c:d])
        ctx.features, ctx.dim = features, dim
        return full

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dim = ctx.dim
        pieces = [grad_output.narrow(dim, a, b - a) for a, b in ctx.features.ranges(0)]
        grad = torch.cat(pieces or [grad_output.narrow(dim, 0, 0)], dim)
        if ctx.features.copies is not None:
            counted = torch.zeros(grad.shape[dim], dtype=torch.bool, device=grad.device)
            for a, b in ctx.features.counted_rows():
                counted[a:b] = True
            grad = (grad.movedim(dim, -1) * counted).movedim(-1, dim)
        return grad, None, None, None, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, comms: Communicators) -> torch.Tensor:
        me, parts = comms.data_rank, comms.data_ranks
        ctx.rows = (0, tensor.shape[0])
        if parts == 1:
            return tensor.clone()
        counts = torch.zeros(parts, dtype=torch.int64, device=comms.device)
        counts[me] = tensor.shape[0]
        axes = [axis for axis in reversed(comms.arrangement.rows) if comms.grid.size(axis) > 1]
        for axis in axes:
            counts = comms.axis(axis).all_reduce(counts)
        rows = counts.tolist()
        gathered = pad_to(tensor, (max(rows), *tensor.shape[1:])).contiguous()
        for axis in axes:
            gathered = comms.axis(axis).all_gather(gathered)
        pieces = gathered.split(max(rows)) if max(rows) else [gathered] * parts
        ctx.rows = (sum(rows[:me]), rows[me])
        return torch.cat([piece[:count] for piece, count in zip(pieces, rows, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad_output.narrow(0, *ctx.rows).contiguous(), None


def to_dtensor(parameter: torch.Tensor) -> DTensor:
    """View a parameter as a DTensor on ``comms.checkpoint_mesh``: same storage, no copy.

    Collective on its first use on a grid, when the mesh is made.

    Raises:
        ValueError: It has no placement, some data ranks alone hold it or its row blocks are split one by one, which no
            DTensor can say, or it is not on the grid's device.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placement = placement_of(parameter)
    if placement is None or placement.comms is None:
        raise ValueError("to_dtensor: the tensor has no placement on a grid; pass a parameter of a parallel layer")
    comms = placement.comms
    if placement.holders is not None or placement.stack is not None:
        which = "a weight of an expert that some ranks hold" if placement.stack is None else "a tensor of experts"
        raise ValueError(f"to_dtensor: {which} is not a DTensor; use axo.unshard")
    if parameter.device.type != comms.device.type:
        raise ValueError(
            f"to_dtensor: the parameter lies on {parameter.device} and its grid is on {comms.device}, so a DTensor"
            " would be a copy; use axo.unshard or axo.checkpoint"
        )
    outer = placement.splits[placement.block_dim][:1] if placement.blocks is not None else ()
    if any(comms.grid.size(axis) > 1 for axis in outer):
        raise ValueError(
            f"to_dtensor: a fused parameter, whose row blocks {placement.blocks} are split one by one over"
            f" {outer[0]}={comms.grid.size(outer[0])}, is not a DTensor; use axo.unshard"
        )
    mesh = comms.checkpoint_mesh
    dim_of = {axis: dim for dim, axes in enumerate(placement.splits) for axis in axes}
    placements = [Shard(dim_of[axis]) if axis in dim_of else Replicate() for axis in mesh.mesh_dim_names or ()]
    shape = torch.Size(placement.global_shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(parameter.detach(), mesh, placements, run_check=False, shape=shape, stride=stride)


def pad_to(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """``tensor`` with zeros after the end of each dim that is shorter than ``shape``."""
    missing = [want - have for want, have in zip(shape, tensor.shape, strict=True)]
    if not any(missing):
        return tensor
    return F.pad(tensor, [amount for size in reversed(missing) for amount in (0, size)])


def _placement(where: Placement | ShardedLayer) -> Placement:
    if isinstance(where, Placement):
        placement = where
    elif isinstance(getattr(where, "placements", None), dict):
        placement = where.placements["weight"]
    else:
        hint = "; pass its .placement" if hasattr(where, "placement") else ""
        raise ValueError(f"{type(where).__name__} is neither a placement nor a parallel layer{hint}")
    _ = placement.communicators
    return placement
