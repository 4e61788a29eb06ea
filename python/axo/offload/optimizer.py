"""AdamW whose state lies on the lower tier, and whose step runs there: torch's fused AdamW on the CPU, in pieces.

    state of a parameter    exp_avg, exp_avg_sq (its shape), step; master (fp32) for a parameter of another dtype
    a CPU rank, fp32        a piece of parameter, gradient and state is updated where it lies
    else                    piece k+1 of the gradients comes down to the host | the host updates piece k | the
                            parameters of piece k-1 go up

The cuts do not show in the results: an update is elementwise, and pieces are cut at multiples of whole vectors. So they
are those of ``torch.optim.AdamW(..., fused=True)`` on the CPU, to the bit. On a GPU an fp32 parameter has its copy in
host memory, which saves its way down. A parameter may be changed between steps (by a checkpoint, by an average of
weights): a copy or master that does not round to its parameter any more is made from it anew.

ZeRO needs no case of its own: a parameter is its rows while a step runs (``axo.optim.zero``), and state is made for
these. Source: Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.optim.adamw import adamw

from axo.offload.copy_stream import CopyEvent, CopyStream, TensorPair
from axo.offload.parameters import home_of
from axo.offload.tier import Tier
from axo.placement import placement_of

PIECE = 1 << 21  # elements; a multiple of any vector
_ALIGNED = 64  # elements
_CHANGED = -1  # as a version: the parameter's value holds, not its master's
MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"


class _Place:
    """Where the state of one parameter lies.

    Attributes:
        moments: exp_avg and exp_avg_sq.
        master: What the host updates; None where that is the parameter itself.
        version: The parameter's when the master was last what it rounds to.
    """

    __slots__ = ("master", "moments", "version")

    def __init__(self, moments: list[torch.Tensor], master: torch.Tensor | None) -> None:
        self.moments, self.master, self.version = moments, master, _CHANGED


class _Part(NamedTuple):
    """A run of elements of one parameter; all of it where it is not contiguous."""

    parameter: torch.Tensor
    grad: torch.Tensor
    place: _Place
    step: torch.Tensor
    start: int
    stop: int
    stale: bool  # the parameter has changed since its master was last what it rounds to

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same elements of a tensor of the parameter's shape."""
        return tensor.view(-1)[self.start : self.stop] if self.parameter.is_contiguous() else tensor

    def first_of(self, buffer: torch.Tensor, offset: int) -> torch.Tensor:
        """Room for them in a flat buffer."""
        room = buffer[offset : offset + self.stop - self.start]
        return room if self.parameter.is_contiguous() else room.view(self.parameter.shape)


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW with its state on the lower tier; made by ``axo.Offload.adamw``.

    ``axo.checkpoint`` saves and loads it as any other, on any grid; a checkpoint of ``torch.optim.AdamW`` loads into it
    and the other way round.

    Args:
        params, lr, betas, eps, weight_decay, maximize: As of ``torch.optim.AdamW``.
        tier_of: The lower tier of a device.

    Attributes:
        offloaded_bytes: What lies on the lower tier.

    Raises:
        ValueError, OSError: As of ``axo.Offload.adamw``.
    """

    takes_shards = True  # torch's AdamW, whose update is elementwise, with memory of its own for parts
    loads_in_place = True  # a checkpoint reads into the state's own memory (axo.checkpoint.state)

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        tier_of: Callable[[torch.device], Tier],
    ) -> None:
        self._tier_of = tier_of
        self._places: dict[torch.Tensor, _Place] = {}
        self._routes: dict[torch.device, _Route] = {}
        self.offloaded_bytes = 0
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, and make room for its state.

        Raises:
            ValueError, OSError: As of ``axo.Offload.adamw``; the group is not added.
        """
        super().add_param_group(param_group)
        try:
            self._make_room([p for p in self.param_groups[-1]["params"] if p.requires_grad])
        except BaseException:
            self.param_groups.pop()
            raise

    # --- where the state lies -------------------------------------------------------------------------------------

    def _make_room(self, parameters: list[torch.Tensor]) -> None:
        rooms: dict[torch.Tensor, list[torch.Tensor]] = {}
        for p in parameters:
            if p.is_meta:
                raise ValueError(
                    "AdamW: a parameter is on the meta device; fill the model first (axo.init_weights, to_empty), then"
                    " make the optimizer"
                )
            tier, shape, dtype = self._tier(p), _state_shape(p), _state_dtype(p)
            size = math.prod(shape) * dtype.itemsize
            rooms[p] = [tier.block(size).view(dtype).view(shape) for _ in range(2 + _is_copied(p))]
        for p, (*moments, last) in rooms.items():  # all of them or none
            master = last if _is_copied(p) else None
            moments = moments if _is_copied(p) else [*moments, last]
            self._places[p] = _Place(moments, master)
            self.state[p] = {"step": torch.tensor(0.0), **dict(zip(MOMENTS, moments, strict=True))}
            if master is not None and p.dtype != master.dtype:
                self.state[p][MASTER] = master
            self.offloaded_bytes += sum(room.nbytes for room in rooms[p])

    def _tier(self, p: torch.Tensor) -> Tier:
        """Where the state of a parameter lies; of a GPU's weight that lies on the host, where the weight does."""
        home = home_of(p)
        return home.tier if home is not None and home.device != p.device else self._tier_of(p.device)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy the state of ``state_dict`` into this optimizer's, and take the options of its groups.

        Raises:
            ValueError: Its groups or shapes are others.
        """
        saved: dict[int, dict[str, Any]] = state_dict["state"]
        mine = [p for group in self.param_groups for p in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for p, number in zip(mine, numbers, strict=False):
            for key, value in saved.get(number, {}).items():
                have = self.state.get(p, {}).get(key)
                if key not in ("step", *MOMENTS, MASTER):
                    raise ValueError(f"AdamW: the state to load holds {key!r}, which AdamW without amsgrad has not")
                if have is not None and value.numel() != have.numel():
                    raise ValueError(
                        f"AdamW: {key!r} to load has shape {tuple(value.shape)}, and {tuple(have.shape)} is wanted"
                    )
        state = dict(self.state)
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self.state.update(state)
        for p, number in zip(mine, numbers, strict=True):
            place = self._places.get(p)
            if place is None:
                continue
            given = saved.get(number, {})
            for key, have in self.state[p].items():
                value = given.get(key)
                if value is None:
                    have.zero_()
                elif value.data_ptr() != have.data_ptr():  # else it was read into its place
                    have.copy_(value.reshape(have.shape))
            place.version = p._version if given.get(MASTER) is not None else _CHANGED

    # --- the step -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            owners = [p for p in group["params"] if p.grad is not None]
            self._make_room([p for p in owners if p not in self._places])
            kinds = dict.fromkeys((p.device, p.dtype) for p in owners)
            for device, dtype in kinds:
                of_kind = [p for p in owners if (p.device, p.dtype) == (device, dtype)]
                pieces = list(self._pieces(of_kind))
                if _is_copied(of_kind[0]):
                    self._step_on_host(group, self._tier(of_kind[0]), device, pieces)
                else:
                    self._step_in_place(group, self._tier(of_kind[0]), pieces)
                for p in of_kind:
                    self.state[p]["step"] += 1
                    self._places[p].version = p._version
        return loss

    def _pieces(self, parameters: list[torch.Tensor]) -> Iterator[list[_Part]]:
        """The parameters in order, cut into pieces of at most PIECE elements where that is possible."""
        piece: list[_Part] = []
        room = PIECE
        for p in parameters:
            assert p.grad is not None
            if p.grad.is_sparse:
                raise RuntimeError("AdamW does not take sparse gradients; use an embedding with sparse=False")
            grad = p.grad if p.grad.stride() == p.stride() else torch.empty_like(p).copy_(p.grad)
            start, place, step = 0, self._places[p], self.state[p]["step"]
            stale = place.version != p._version  # now: what is sent up changes the version too
            while start < p.numel():
                stop = min(start + room, p.numel()) if p.is_contiguous() else p.numel()
                piece.append(_Part(p, grad, place, step, start, stop, stale))
                room -= -(-(stop - start) // _ALIGNED) * _ALIGNED
                start = stop
                if room <= 0:
                    yield piece
                    piece, room = [], PIECE
        if piece:
            yield piece

    def _step_in_place(self, group: dict[str, Any], tier: Tier, pieces: list[list[_Part]]) -> None:
        for number, piece in enumerate(pieces):
            for part in pieces[number + 1] if number + 1 < len(pieces) else ():
                for moment in part.place.moments:
                    tier.soon(part.of(moment))
            values = [part.of(part.parameter).contiguous() for part in piece]
            _update(group, piece, values, [part.of(part.grad).contiguous() for part in piece])
            for part, value in zip(piece, values, strict=True):
                if not part.parameter.is_contiguous():
                    part.parameter.copy_(value)
                for moment in part.place.moments:
                    tier.rest(part.of(moment))
                home = home_of(part.parameter)
                if home is not None:
                    home.tier.rest(part.of(part.parameter))

    def _step_on_host(self, group: dict[str, Any], tier: Tier, device: torch.device, pieces: list[list[_Part]]) -> None:
        route = self._routes.get(device)
        if route is None:
            route = self._routes[device] = _Route(device)
        coming = route.bring(pieces[0], 0) if pieces else None
        for number, piece in enumerate(pieces):
            here, coming = coming, None
            if number + 1 < len(pieces):
                coming = route.bring(pieces[number + 1], number + 1)
                for part in pieces[number + 1]:
                    for tensor in _of_host(part):
                        tier.soon(tensor)
            assert here is not None
            here.done.synchronize()
            masters = [part.of(_master(part)) for part in piece]
            for part, master, value in zip(piece, masters, here.values, strict=True):
                if value is not None and part.place.version == _CHANGED:
                    master.copy_(value)
                elif value is not None:  # somebody else has changed the parameter, or its version alone
                    changed = master.to(value.dtype) != value
                    master.copy_(torch.where(changed, value.to(master.dtype), master))
            _update(group, piece, masters, [grad.to(masters[0].dtype) for grad in here.grads])
            route.send(piece, masters, number)
            for part in piece:
                for tensor in _of_host(part):
                    tier.rest(tensor)
        route.finish()


class _Arrived(NamedTuple):
    """A piece on the host: gradients, and the values of parameters whose masters may not be theirs."""

    grads: list[torch.Tensor]
    values: list[torch.Tensor | None]
    done: CopyEvent


class _Route:
    """The way of pieces between one device and the host, with two buffers for each thing that travels."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down, self._up = CopyStream(device), CopyStream(device)
        self._buffers: dict[tuple[str, int, torch.dtype], torch.Tensor] = {}
        self._sent: list[CopyEvent | None] = [None, None]

    def bring(self, piece: list[_Part], number: int) -> _Arrived:
        grads = self._rooms("grads", piece, number, piece[0].grad.dtype)
        pairs = [(room, part.of(part.grad)) for room, part in zip(grads, piece, strict=True)]
        values: list[torch.Tensor | None] = [None] * len(piece)
        if any(part.stale for part in piece):
            rooms = self._rooms("values", piece, number, piece[0].parameter.dtype)
            for index, (room, part) in enumerate(zip(rooms, piece, strict=True)):
                if part.stale:
                    values[index] = room
                    pairs.append((room, part.of(part.parameter)))
        return _Arrived(grads, values, self._down.copy(pairs))

    def send(self, piece: list[_Part], masters: list[torch.Tensor], number: int) -> None:
        dtype = piece[0].parameter.dtype
        if masters[0].dtype != dtype:
            before = self._sent[number % 2]
            if before is not None:
                before.synchronize()
            rounded = self._rooms("rounded", piece, number, dtype)
            masters = [room.copy_(master) for room, master in zip(rounded, masters, strict=True)]
        pairs: list[TensorPair] = [(part.of(part.parameter), value) for part, value in zip(piece, masters, strict=True)]
        self._sent[number % 2] = self._up.copy(pairs)

    def finish(self) -> None:
        """Let the computation go on after what was sent."""
        self._down.finish()
        self._up.finish()

    def _rooms(self, what: str, piece: list[_Part], number: int, dtype: torch.dtype) -> list[torch.Tensor]:
        sizes = [-(-(part.stop - part.start) // _ALIGNED) * _ALIGNED for part in piece]
        key = (what, number % 2, dtype)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < sum(sizes):
            pinned = self._device.type != "cpu"
            buffer = self._buffers[key] = torch.empty(sum(sizes), dtype=dtype, pin_memory=pinned)
        rooms, offset = [], 0
        for part, size in zip(piece, sizes, strict=True):
            rooms.append(part.first_of(buffer, offset))
            offset += size
        return rooms


def _update(group: dict[str, Any], piece: list[_Part], values: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
    beta1, beta2 = group["betas"]
    adamw(
        values,
        grads,
        [part.of(part.place.moments[0]) for part in piece],
        [part.of(part.place.moments[1]) for part in piece],
        [],
        [part.step.clone() for part in piece],  # torch counts it up; a parameter may be in several pieces
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )


def _master(part: _Part) -> torch.Tensor:
    assert part.place.master is not None
    return part.place.master


def _of_host(part: _Part) -> list[torch.Tensor]:
    return [part.of(tensor) for tensor in (*part.place.moments, _master(part))]


def _is_copied(p: torch.Tensor) -> bool:
    """Whether what the host updates is a copy of the parameter."""
    return p.device.type != "cpu" or p.dtype != _state_dtype(p)


def _state_dtype(p: torch.Tensor) -> torch.dtype:
    if not p.is_floating_point():
        raise ValueError(f"AdamW: a parameter of {p.dtype} cannot be trained; use a floating-point dtype")
    return p.dtype if p.dtype in (torch.float32, torch.float64) else torch.float32


def _state_shape(p: torch.Tensor) -> tuple[int, ...]:
    placement = placement_of(p)
    if placement is not None and placement.zero is not None:
        return placement.state.local_shape()
    return tuple(p.shape)
