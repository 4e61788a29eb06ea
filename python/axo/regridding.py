"""regrid: a model and its optimizer go over to another grid of the same ranks, from memory to memory.

    model = axo.parallelize(model, comms)
    optimizer = torch.optim.AdamW(model.parameters())
    ...
    axo.regrid(model, optimizer, "1x1x4x2")      # between two steps, on every rank
    ...                                          # model, optimizer and comms are the same objects, on the new grid

The serial model that ``axo.parallelize`` was given is planned anew, without values, so a grid on which it cannot lie is
refused before anything has changed. Then every tensor (parameters, and what the optimizer keeps of their shape) is
looked at as boxes of the whole tensor. A rank keeps what it has of its new part and gets the rest from one rank that
has it: no byte is sent twice, which is the least that can be. What many ranks hold comes from different ones of them.

    parameter        old boxes of all ranks, new boxes of all ranks -> pieces (from, to, box)
    a bucket         the pieces of some parameters, packed by rank: one all-to-all of bytes
    then             the old shards of the bucket are freed

Not here: other ranks than before (a checkpoint, ``axo.checkpoint``), stages of a pipeline, offloaded state: refused.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from axo.checkpoint import state
from axo.checkpoint.boxes import Box, boxes_of, overlaps
from axo.comm.agree import ranks_that_differ
from axo.comm.connect import Communicators
from axo.grid import Grid
from axo.nn.layer import ParallelLayer
from axo.nn.replicated import Replicated
from axo.optim import step_hooks
from axo.optim.checks import state_checks, watch_replaced
from axo.overlap.model import engines
from axo.parallelization import parallelize
from axo.placement import Placement, placement_of
from axo.plans.serial import Serial

BUCKET_BYTES = 64 << 20


@torch.inference_mode(False)
def regrid(model: nn.Module, optimizer: Optimizer | None, grid: Grid | str) -> nn.Module:
    """Let ``model`` and ``optimizer`` lie on another grid, in place. Every rank calls it, between two steps.

    The objects stay: the model, its communicators (with all that holds them, such as a loss), the optimizer with its
    groups and options, and a schedule of its rate. The modules and parameters inside the model are new. So what has
    been done to them since ``axo.parallelize`` must be done again: hooks, activation checkpointing, compilation. The
    same holds for attributes and hooks of the model itself. Gradients are dropped, as ``zero_grad`` does. Rows are cut
    anew: ``axo.shard_batch``, or a sampler of ``comms.data_ranks`` parts. Another model on the same communicators
    cannot be used any more, nor another optimizer of this one, whose next step is refused.

    Args:
        model: What ``axo.parallelize`` returned.
        optimizer: Of its parameters; None: only the model moves.
        grid: Of as many ranks, or its text.

    Returns:
        ``model``.

    Raises:
        ValueError: The model cannot lie on that grid, or cannot move at all; nothing has changed then.
    """
    serial, comms = getattr(model, "_axo_serial", None), state.communicators(model)
    if serial is None or comms is None:
        raise ValueError(
            f"regrid: this {type(model).__name__} is not what axo.parallelize returned; give that model itself, or save"
            " a checkpoint and load it on the other grid"
        )
    wrong, asked = None, ""
    try:
        _check_movable(model, optimizer, comms, serial)
        grid = Grid.parse(grid)
        before = _Before(model, optimizer, comms, serial)
        asked = f"{grid} {before.described()}"
    except Exception as error:  # the others hear of it in the comparison
        wrong = error
    differ = ranks_that_differ(comms, asked)
    if wrong is not None:
        raise wrong
    assert isinstance(grid, Grid)
    if differ:
        raise ValueError(
            f"regrid: ranks {differ} ask for another grid than rank 0, have another optimizer or other state of it, or"
            f" cannot move (here: {grid}); call it alike on every rank, between two steps"
        )
    if grid == comms.grid:
        return model
    other = comms.on(grid)
    watch_old_parameters = watch_replaced(model)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the model itself says it all again
            parallelize(serial.model(before.parameters), other, **serial.options)
    except BaseException:
        other.close_axes()
        comms.introduce()
        raise
    for engine in engines(model):
        engine.uproot()
        step_hooks.forget(engine)
    step_hooks.forget(model)
    comms.become(other)
    parallelize(serial.model(before.parameters, model), comms, **serial.options)
    before.give(model, optimizer, comms)
    watch_old_parameters()
    if optimizer is not None:
        state_checks.forget(optimizer)
    return model


def _check_movable(model: nn.Module, optimizer: Optimizer | None, comms: Communicators, serial: Serial) -> None:
    """Refuse what cannot move, or not now.

    Raises:
        ValueError: Says why.
    """
    state.check_kinds(model, optimizer)
    shares = comms.context.size > 1 or comms.experts.size > 1
    if comms.stages > 1 or shares or serial.options.get("offload") is not None:
        what = f"{comms.stages} stages" if comms.stages > 1 else "state on a lower tier of memory"
        what = f"sequences over {comms.context.size} ranks" if comms.context.size > 1 else what
        what = f"experts over {comms.experts.size} ranks" if comms.experts.size > 1 else what
        raise ValueError(f"regrid: a model with {what} cannot move in memory; save a checkpoint, and load it there")
    if any(engine.holding or engine.gradients.deferred for engine in engines(model)):
        raise ValueError(
            "regrid: gradients of axo.no_sync wait for a backward pass outside of it; finish the step first"
        )


class _Before:
    """What a rank holds before the move: tensors with how they lie, and what is the same on all ranks."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, comms: Communicators, serial: Serial) -> None:
        self.grid, self.planned_buffers = comms.grid, serial.buffers
        self.parameters = dict(model.named_parameters())
        self.training = {name: module.training for name, module in model.named_modules()}
        self.buffers = dict(model.named_buffers())
        self.dropouts = state.dropout_state(model)
        self.names = [] if optimizer is None else state.parameter_names(model, optimizer)
        self.of_optimizer: dict[str, dict[Any, Any]] = {}
        self.placements: dict[tuple[str, object], Placement | None] = {}  # by name and key of the optimizer's state
        for name, parameter in self.parameters.items():
            self.placements[name, None] = placement_of(parameter)
            kept = {} if optimizer is None else optimizer.state.get(parameter, {})
            self.of_optimizer[name] = dict(kept)
            for key, value in kept.items():
                if isinstance(value, torch.Tensor) and value.dim():
                    assert optimizer is not None
                    self.placements[name, key] = state.state_parts(optimizer, name, key, value, parameter).placement

    def described(self) -> str:
        """What ranks must have alike to move together."""
        kept = {name: sorted(map(repr, values)) for name, values in self.of_optimizer.items()}
        return f"{kept} {self.names}"

    def give(self, model: nn.Module, optimizer: Optimizer | None, comms: Communicators) -> None:
        """Fill the model, whose parameters are on the meta device, and put its parameters into the optimizer."""
        new = self._allocate(model, comms)
        moves = _Moves(self.grid, comms)
        of_optimizer: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        if optimizer is not None:
            optimizer.state = of_optimizer
            for group, names in zip(optimizer.param_groups, self.names, strict=True):
                group["params"] = [new[name] for name in names]
        for name in list(self.parameters):
            old = self.parameters.pop(name)
            old.grad = None
            target = placement_of(new[name])
            moves.add(old, self.placements[name, None], new[name], target)
            for key, value in self.of_optimizer.pop(name).items():
                if (name, key) in self.placements:
                    lay = self.placements[name, key]
                    whole = value.shape if lay is None else lay.whole_shape
                    there = target.state if target is not None and tuple(whole) == target.whole_shape else None
                    shape = whole if there is None else there.local_shape(comms.grid, comms.coords)
                    part = value.new_empty(shape)
                    moves.add(value, lay, part, there)
                    value = part
                of_optimizer[new[name]][key] = value
        moves.finish()
        state.set_dropout_state(model, self.dropouts)
        for name, module in model.named_modules():
            module.training = self.training.get(name, module.training)

    def _allocate(self, model: nn.Module, comms: Communicators) -> dict[str, nn.Parameter]:
        """Room for every parameter, and the buffers that were there; the parameters by name.

        A buffer that both grids cut differently is the plan's; any other stays, whatever its shape has become.
        """
        real: dict[int, nn.Parameter] = {}
        old_of = {id(parameter): self.parameters[name] for name, parameter in model.named_parameters()}
        for prefix, module in model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    if id(parameter) not in real:
                        shard = torch.empty_like(parameter, device=old_of[id(parameter)].device)
                        real[id(parameter)] = nn.Parameter(shard, requires_grad=parameter.requires_grad)
                    module._parameters[name] = real[id(parameter)]
            for name, buffer in module._buffers.items():
                path = f"{prefix}.{name}".lstrip(".")
                before = self.buffers.get(path)
                if buffer is not None and before is not None:
                    if buffer.shape in (before.shape, self.planned_buffers.get(path)):
                        module._buffers[name] = before
        for module in model.modules():
            if isinstance(module, ParallelLayer):
                module._tag()
            elif isinstance(module, Replicated):
                module._attach()
        return dict(model.named_parameters())


class _Piece(NamedTuple):
    """A box that goes from one rank to another, and the boxes of the two that it is a part of, where they lie there."""

    source: int
    target: int
    box: Box
    owned: Box
    owned_at: tuple[slice | None, ...]
    wanted: Box
    wanted_at: tuple[slice | None, ...]

    def there(self, old: torch.Tensor) -> torch.Tensor:
        """It, in the part that the source has had."""
        return self.box.within(self.owned, old[self.owned_at])

    def here(self, new: torch.Tensor) -> torch.Tensor:
        """It, in the part that the target has."""
        return self.box.within(self.wanted, new[self.wanted_at])


class _Moves:
    """Moves tensors from how they lay on one grid to how they lie on another, a bucket at a time.

    Args:
        before: The grid on which they lay.
        comms: The communicators of the grid on which they lie.
    """

    def __init__(self, before: Grid, comms: Communicators) -> None:
        self._before, self._comms, self._rank = before, comms, comms.rank
        self._pieces: dict[Any, list[_Piece]] = {}
        self._bucket: list[tuple[torch.Tensor, torch.Tensor, list[_Piece]]] = []
        self._bytes = 0

    def add(self, old: torch.Tensor, lay: Placement | None, new: torch.Tensor, lies: Placement | None) -> None:
        """Move this rank's part ``old`` of a tensor; ``new`` is room for what it has of it now."""
        lay = lay or Placement(tuple(old.shape))
        lies = lies or Placement(lay.whole_shape)
        if (lay, lies) not in self._pieces:
            self._pieces[lay, lies] = list(self._planned(lay, lies))
        self._bucket.append((old, new.detach(), self._pieces[lay, lies]))
        self._bytes += math.prod(lay.global_shape) * old.itemsize // self._comms.grid.world_size  # as on all ranks
        if self._bytes >= BUCKET_BYTES:
            self.finish()

    @torch.no_grad()
    def finish(self) -> None:
        """Move what is in the bucket, and free where it was."""
        ranks, rank, device = self._comms.grid.world_size, self._rank, self._comms.device
        sent: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
        received: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
        for old, new, pieces in self._bucket:
            for piece in pieces:
                if piece.source == piece.target:
                    piece.here(new).copy_(piece.there(old))
                elif piece.source == rank:
                    sent[piece.target].append(piece.there(old))
                else:
                    received[piece.source].append(piece.here(new))
        send_counts, recv_counts = ([sum(part.nbytes for part in parts) for parts in side] for side in (sent, received))
        packed = [part.to(device).contiguous().reshape(-1).view(torch.uint8) for parts in sent for part in parts]
        source = torch.cat(packed) if packed else torch.empty(0, dtype=torch.uint8, device=device)
        target = torch.empty(sum(recv_counts), dtype=torch.uint8, device=device)
        self._comms.world.all_to_all(source, target, send_counts=send_counts, recv_counts=recv_counts)
        start = 0
        for part in (part for parts in received for part in parts):
            part.copy_(target[start : start + part.nbytes].clone().view(part.dtype).view(part.shape))
            start += part.nbytes
        for old, _, _ in self._bucket:
            if isinstance(old, nn.Parameter):  # the modules that held it are garbage, which nobody collects at once
                old.data = old.new_empty(0)
        self._bucket.clear()
        self._bytes = 0

    def _planned(self, lay: Placement, lies: Placement) -> Iterator[_Piece]:
        """The pieces of one tensor that this rank sends, receives or keeps, in an order that all ranks have."""
        shape, ranks = lay.whole_shape, range(self._before.world_size)
        parts = [boxes_of(shape, lay, self._before, self._before.coords(rank)) for rank in ranks]
        after = self._comms.grid
        for target in ranks:
            wanted = boxes_of(shape, lies, after, after.coords(target))
            for source, box, owned, need in _sources(wanted, parts, target):
                if self._rank in (source, target):
                    yield _Piece(source, target, box, owned, parts[source][owned], need, wanted[need])


def _sources(wanted: Iterable[Box], parts: Sequence[Iterable[Box]], rank: int) -> Iterator[tuple[int, Box, Box, Box]]:
    """From whom ``rank`` has each piece of the boxes that it wants: itself, else those behind it.

    Yields:
        The rank, the piece, the box of that rank and the wanted box that it is of.
    """
    missing = [(box, box) for box in wanted]
    for source in (rank, *range(rank + 1, len(parts)), *range(rank)):
        for owned in parts[source]:
            rest = []
            for piece, need in missing:
                shared = next((shared for _, _, shared in overlaps([piece], [owned])), None)
                if shared is None:
                    rest.append((piece, need))
                else:
                    yield source, shared, owned, need
                    rest += [(each, need) for each in _without(piece, shared)]
            missing = rest
        if not missing:
            return
    assert not any(math.prod(box.size) for box, _ in missing), f"nobody holds {missing}"


def _without(box: Box, hole: Box) -> Iterator[Box]:
    """What is left of ``box`` without ``hole``, which lies in it, as boxes."""
    for dim, (first, size) in enumerate(zip(*box, strict=True)):
        start, length = hole.offset[dim], hole.size[dim]
        for low, high in ((first, start), (start + length, first + size)):
            if low < high:
                yield Box(
                    (*hole.offset[:dim], low, *box.offset[dim + 1 :]),
                    (*hole.size[:dim], high - low, *box.size[dim + 1 :]),
                )
