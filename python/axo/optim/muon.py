"""Muon whose matrices lie on the grid: ``torch.optim.Muon``, but for where its products are made.

    optimizer = axo.optim.Muon(axo.optim.muon_groups(model), lr=1e-3, adjust_lr_fn="match_rms_adamw")

    B <- B + (1 - mu)(g - B);   U = g + mu (B - g) with nesterov, else B;   O = orthogonalized U
    W <- (1 - lr wd) W - lr' O

Momentum is elementwise, so each rank keeps that of its shard (with ZeRO, of its rows of it). O takes the whole matrix,
in one of three ways:

    gathered       every rank gathers U and works on it: one gather, the flops of one rank on all of them
    owned          matrices are dealt out; each goes to the rank that owns it, and O comes back: two exchanges for as
                   many matrices as there are ranks, and each is worked on once
    distributed    nobody has it whole (``axo.optim.newton_schulz``): some 15 products that send more than a gather
                   does, and no buffer above a shard

``method="auto"`` takes what costs least by the bytes and flops that :func:`cost` counts, and distributes a matrix whose
work does not fit ``memory``. Matrices that no axis splits are worked on where they lie, on every rank.

What is no matrix of a hidden layer (embeddings, head, norms, biases) belongs to AdamW: in groups with
``use_muon=False`` of the same optimizer, as :func:`muon_groups` makes them, or in an optimizer of its own.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks"; Liu et al., "Muon is scalable for LLM
training" (``match_rms_adamw``; owners). Not here: parameters of more dims, which torch's refuses too.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from axo import check
from axo.comm.connect import Communicators
from axo.comm.counting import Count
from axo.errors import Refused
from axo.grid import Coords, Grid
from axo.optim import newton_schulz
from axo.optim.newton_schulz import FIRST, Cost
from axo.perf.flops import newton_schulz_bytes, newton_schulz_flops
from axo.placement import Placement, placement_of
from axo.sharding import unshard

METHODS = ("auto", "gathered", "owned", "distributed")
ADJUSTMENTS = (None, "original", "match_rms_adamw", "spectral_unclamped")
DTYPES = (torch.bfloat16, torch.float32, torch.float64)
HEADS = ("lm_head", "head", "embed_out", "classifier", "score")
_OF_MUON = ("momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn")
_OF_ADAMW = {"betas": (0.9, 0.999), "eps": 1e-8}


class Muon(Optimizer):
    """Muon over matrices on a grid, and AdamW over what is none. All ranks must step together.

    Args:
        params: Parameters, named ones, or groups. Those of a group with ``use_muon=False`` are updated by AdamW, with
            the group's ``lr``, ``betas``, ``eps`` (1e-8) and ``weight_decay``; all others must have two dims.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: As of ``torch.optim.Muon``.
        ns_dtype: What the products are made in, and what travels; torch's is bfloat16.
        method: "auto", "gathered", "owned" or "distributed", for all matrices.
        memory: Of "auto": bytes that a rank may take to work on one matrix.
        flops_per_byte: Of "auto": the flops that a rank does while one byte comes to it.

    Raises:
        ValueError: An option is not known or out of range, or a parameter is no matrix.
        Refused: "distributed", and some rows of a matrix lie on several ranks.
    """

    takes_shards = True

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Iterable[dict[str, Any]],
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_dtype: torch.dtype = torch.bfloat16,
        method: str = "auto",
        memory: int = 4 << 30,
        flops_per_byte: float = 4000.0,
    ) -> None:
        check.number("Muon: lr", float(lr), least=0)
        for name, value in (("weight_decay", weight_decay), ("momentum", momentum), ("eps", eps)):
            check.number(f"Muon: {name}", value, least=0)
        check.whole_number("Muon: ns_steps", ns_steps, least=1, most=99)
        check.one_of("Muon: adjust_lr_fn", adjust_lr_fn, ADJUSTMENTS)
        check.one_of("Muon: ns_dtype", ns_dtype, DTYPES)
        check.one_of("Muon: method", method, METHODS)
        check.whole_number("Muon: memory", memory, least=1)
        check.number("Muon: flops_per_byte", flops_per_byte, above=0)
        if len(ns_coefficients) != 3:
            raise ValueError(f"Muon: ns_coefficients={ns_coefficients} are not three numbers")
        self._matrix_updates = _MatrixUpdates(ns_dtype, method, memory, flops_per_byte)
        defaults: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        defaults |= {"ns_coefficients": tuple(ns_coefficients), "eps": eps, "ns_steps": ns_steps}
        super().__init__(params, defaults | {"adjust_lr_fn": adjust_lr_fn, "use_muon": True})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, of Muon or, with ``use_muon=False``, of AdamW.

        Raises:
            ValueError: A parameter of Muon is no matrix.
            Refused: It is of all experts of a mixture.
        """
        by_muon = check.one_of("Muon: use_muon", param_group.get("use_muon", True), (True, False))
        super().add_param_group(param_group if by_muon else _OF_ADAMW | param_group)
        group = self.param_groups[-1]
        if not by_muon:
            for name in _OF_MUON:
                del group[name]
            return
        check.one_of("Muon: adjust_lr_fn", group["adjust_lr_fn"], ADJUSTMENTS)
        for parameter in group["params"]:
            if parameter.dim() != 2:
                self.param_groups.pop()
                raise ValueError(
                    f"Muon: a parameter of shape {tuple(parameter.shape)} is no matrix; give what is no matrix of a"
                    " hidden layer to AdamW, in a group with use_muon=False (axo.optim.muon_groups(model) makes the"
                    " groups)"
                )
            placement = placement_of(parameter)
            if placement is not None and placement.stack is not None:
                self.param_groups.pop()
                raise Refused("Muon: experts in one tensor are not supported")

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the same options; torch's own leaves out what it does not know."""
        return super().__getstate__() | {"_matrix_updates": copy.deepcopy(self._matrix_updates)}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all parameters that have a gradient. All ranks must call it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        matrices = []
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                if parameter.grad.is_sparse or parameter.is_complex():
                    raise RuntimeError("Muon takes neither sparse gradients nor complex parameters")
            if group["use_muon"]:
                matrices += [_Matrix(parameter, group, self.state[parameter]) for parameter in parameters]
            else:
                self._adamw(group, parameters)
        self._matrix_updates.update(matrices)
        return loss

    def _adamw(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                state |= {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(parameter)}
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        adamw(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def muon_groups(
    model: nn.Module, *, heads: Iterable[str] = HEADS, adamw: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """The groups of a model for :class:`Muon`: matrices of hidden layers; other weights, and vectors, by AdamW.

    Other weights are those of embeddings, of the head, and of more dims than two. Vectors do not decay.

    Args:
        model: After ``axo.parallelize``.
        heads: Names of modules that are the head, as the last part of their names in the model; what a
            Hugging Face model calls its output embeddings is one too.
        adamw: Options of AdamW's groups: ``lr``, ``betas``, ``eps``, ``weight_decay``.

    Raises:
        ValueError: An option is not one of AdamW's.
    """
    for name in adamw or {}:
        check.one_of("muon_groups: adamw", name, ("lr", "betas", "eps", "weight_decay"))
    names, output = tuple(heads), getattr(model, "get_output_embeddings", lambda: None)()
    edges = {
        id(parameter)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) or module is output or name.rpartition(".")[2] in names
        for parameter in module.parameters()
    }
    hidden, others, vectors = [], [], []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.dim() < 2:
            vectors.append(parameter)
        elif parameter.dim() > 2 or id(parameter) in edges or getattr(placement_of(parameter), "stack", None):
            others.append(parameter)
        else:
            hidden.append(parameter)
    by_adamw = {"use_muon": False} | (adamw or {})
    groups = [{"params": hidden}, by_adamw | {"params": others}, by_adamw | {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


# --- which rank works on which matrix ---------------------------------------------------------------------------------


def rounds(placements: list[Placement], grid: Grid) -> list[list[int]]:
    """Deal matrices out to the ranks that share them: in each round the i-th of a list is the i-th rank's.

    Large ones come first, so that the matrices of a round take about as long.

    Args:
        placements: Of matrices that the same axes split.
        grid: The grid.

    Returns:
        For each round the numbers of its matrices.
    """
    ranks = math.prod(grid.size(axis) for axis in newton_schulz.split_axes(placements[0], grid))
    order = sorted(range(len(placements)), key=lambda each: -newton_schulz_flops(placements[each].global_shape, 1))
    return [order[start : start + ranks] for start in range(0, len(order), ranks)]


def sharers(placement: Placement, grid: Grid, coords: Coords) -> list[int]:
    """The ranks that have the parts of a matrix between them, of which the one at ``coords`` is one, in order."""
    axes = newton_schulz.split_axes(placement, grid)
    kept = {axis: value for axis, value in coords._asdict().items() if axis not in axes}
    return [rank for rank in range(grid.world_size) if kept.items() <= grid.coords(rank)._asdict().items()]


def cost(
    placements: list[Placement],
    grid: Grid,
    method: str,
    *,
    ns_steps: int = 5,
    itemsize: int = 2,
    coords: Coords = FIRST,
) -> Cost:
    """Count what one step takes on matrices that the same axes split, on the rank at ``coords``.

    Args:
        placements: Where each lies (with ZeRO ``Placement.state``).
        grid: The grid.
        method: "gathered", "owned" or "distributed".
        ns_steps: Of Newton-Schulz.
        itemsize: Bytes an element of what the products are made in.
        coords: The rank that counts; with "owned" the first has the most to do.
    """
    if method == "owned":
        return _owned_cost(placements, grid, ns_steps, itemsize, coords)
    if method == "gathered":
        costs = [newton_schulz.gather_cost(each, grid, ns_steps, itemsize) for each in placements]
    else:
        costs = [newton_schulz.distributed_cost(each, grid, ns_steps, itemsize, coords) for each in placements]
    sent: dict[tuple[str, str], Count] = {}
    for each in costs:
        for key, count in each.sent.items():
            sent[key] = sent.get(key, Count()).plus(*count)
    memory = max(each.memory for each in costs)
    return Cost(sent, sum(each.moved for each in costs), sum(each.flops for each in costs), memory)


def _owned_cost(placements: list[Placement], grid: Grid, steps: int, itemsize: int, coords: Coords) -> Cost:
    me = grid.rank(*coords)
    elements, moved, flops, memory = 0, 0, 0.0, 0
    ranks = sharers(placements[0], grid, coords)
    turns = rounds(placements, grid)
    for turn in turns:
        there = back = 0  # elements of other ranks' matrices that leave here, and of this rank's own that come here
        for owner, number in zip(ranks, turn, strict=False):
            own, shape = math.prod(placements[number].local_shape(grid, coords)), placements[number].global_shape
            if owner == me:
                back = _others(placements[number], grid, ranks, me)
                flops += newton_schulz_flops(shape, steps)
                memory = max(memory, newton_schulz_bytes(shape, itemsize))
            else:
                there += own
        elements += there + back
        moved += 2 * max(there, back) * itemsize  # one way, and the other
    count = Count(2 * len(turns), elements, elements * itemsize)
    return Cost({("all_to_all", "world"): count}, moved, flops, memory)


def _others(placement: Placement, grid: Grid, ranks: list[int], me: int) -> int:
    """Elements of a matrix on the other ranks."""
    return sum(math.prod(placement.local_shape(grid, grid.coords(rank))) for rank in ranks if rank != me)


@dataclass
class _Matrix:
    """One parameter in a step: this rank's shard, its group's options, its state."""

    parameter: torch.Tensor
    group: dict[str, Any]
    state: dict[str, Any]

    @property
    def placement(self) -> Placement | None:
        """Where its shards lie; None: it is whole here."""
        placement = placement_of(self.parameter)
        if placement is None or placement.comms is None:
            return None
        return placement.state if newton_schulz.split_axes(placement.state, placement.comms.grid) else None

    def direction(self, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
        """Update the momentum; this rank's shard of what is to be orthogonalized."""
        grad, momentum = self.parameter.grad, self.group["momentum"]
        assert grad is not None
        if "momentum_buffer" not in self.state:
            self.state["momentum_buffer"] = torch.zeros_like(grad)
        buffer = self.state["momentum_buffer"]
        buffer.lerp_(grad, 1 - momentum)
        wanted = grad.lerp(buffer, momentum) if self.group["nesterov"] else buffer
        return wanted.to(device or wanted.device, dtype)

    def orthogonalize(self, whole: torch.Tensor) -> torch.Tensor:
        return newton_schulz.orthogonalize(whole, *self._options())

    def orthogonalize_shards(self, part: torch.Tensor, placement: Placement) -> torch.Tensor:
        return newton_schulz.orthogonalize_shards(part, placement, *self._options())

    def _options(self) -> tuple[newton_schulz.Coefficients, int, float]:
        return self.group["ns_coefficients"], self.group["ns_steps"], self.group["eps"]

    def apply(self, orthogonal: torch.Tensor) -> None:
        """Take the step: this rank's shard of the orthogonalized matrix."""
        placement = placement_of(self.parameter)
        n, k = self.parameter.shape if placement is None else placement.global_shape
        ratio = {
            "match_rms_adamw": 0.2 * math.sqrt(max(n, k)),
            "spectral_unclamped": math.sqrt(n / k),
        }.get(self.group["adjust_lr_fn"], math.sqrt(max(1, n / k)))
        lr = float(self.group["lr"])
        self.parameter.mul_(1 - lr * self.group["weight_decay"])
        self.parameter.add_(orthogonal.to(self.parameter.device), alpha=-lr * ratio)


class _MatrixUpdates:
    """Where the products of a step are made; arguments as of :class:`Muon`."""

    def __init__(self, dtype: torch.dtype, method: str, memory: int, flops_per_byte: float) -> None:
        self.dtype, self.method, self.memory, self.flops_per_byte = dtype, method, memory, flops_per_byte
        self._cheapest: dict[tuple[Any, ...], str] = {}  # by number of steps and placements: counting takes a while

    def __deepcopy__(self, memo: dict[int, Any]) -> _MatrixUpdates:
        return _MatrixUpdates(self.dtype, self.method, self.memory, self.flops_per_byte)

    def update(self, matrices: list[_Matrix]) -> None:
        """Take the step of all matrices."""
        shared: dict[tuple[int, tuple[str, ...]], list[tuple[_Matrix, Placement]]] = {}
        for matrix in matrices:
            placement = matrix.placement
            if placement is None:
                matrix.apply(matrix.orthogonalize(matrix.direction(self.dtype)))
            else:
                axes = newton_schulz.split_axes(placement, placement.communicators.grid)
                shared.setdefault((id(placement.comms), axes), []).append((matrix, placement))
        for alike in shared.values():
            for method, chosen in self._chosen(alike):
                getattr(self, f"_{method}")(chosen)

    def _chosen(self, alike: list[tuple[_Matrix, Placement]]) -> Iterator[tuple[str, list[tuple[_Matrix, Placement]]]]:
        """The method of each of the matrices that the same axes split: the same on all ranks."""
        large: list[tuple[_Matrix, Placement]] = []
        fitting: list[tuple[_Matrix, Placement]] = []
        for matrix, placement in alike:
            uneven = placement.copies or placement.holders  # not one part of the rows on each rank
            if self.method == "distributed" and uneven:
                raise Refused(
                    f"Muon: method='distributed' and a matrix {placement.global_shape} of which several ranks have the"
                    " same rows (keys and values of heads that share them), or some have none (experts that lie on"
                    " several ranks); use 'owned', 'gathered' or 'auto'"
                )
            work = newton_schulz_bytes(placement.global_shape, self.dtype.itemsize)
            is_large = self.method == "auto" and work > self.memory and not uneven
            (large if is_large else fitting).append((matrix, placement))
        if large:
            yield "distributed", large
        if fitting:
            yield self._cheapest_of(fitting) if self.method == "auto" else self.method, fitting

    def _cheapest_of(self, matrices: list[tuple[_Matrix, Placement]]) -> str:
        placements, steps = [placement for _, placement in matrices], matrices[0][0].group["ns_steps"]
        key = (steps, str(placements[0].communicators.grid), *placements)
        if key not in self._cheapest:
            grid, size = placements[0].communicators.grid, self.dtype.itemsize
            uneven = any(placement.copies or placement.holders for placement in placements)
            methods = ("gathered", "owned") if uneven else METHODS[1:]
            costs = {each: cost(placements, grid, each, ns_steps=steps, itemsize=size) for each in methods}
            self._cheapest[key] = min(methods, key=lambda method: self._time(costs[method]))
        return self._cheapest[key]

    def _time(self, cost: Cost) -> float:
        """What a method takes, in flops."""
        return cost.flops + self.flops_per_byte * cost.moved

    def _gathered(self, matrices: list[tuple[_Matrix, Placement]]) -> None:
        for matrix, placement in matrices:
            whole = matrix.orthogonalize(unshard(matrix.direction(self.dtype), placement))
            matrix.apply(placement.take(whole))

    def _distributed(self, matrices: list[tuple[_Matrix, Placement]]) -> None:
        for matrix, placement in matrices:
            part = matrix.direction(self.dtype, placement.communicators.device)
            matrix.apply(matrix.orthogonalize_shards(part, placement))

    def _owned(self, matrices: list[tuple[_Matrix, Placement]]) -> None:
        comms = matrices[0][1].communicators
        turns = rounds([placement for _, placement in matrices], comms.grid)
        coming = _Turn(comms, [matrices[number] for number in turns[0]], self.dtype)
        for number in range(len(turns)):
            turn = coming
            whole = turn.receive()
            if number + 1 < len(turns):  # the next matrices come while this one is worked on
                coming = _Turn(comms, [matrices[each] for each in turns[number + 1]], self.dtype)
            turn.give_back(whole)


class _Turn:
    """One round of owned matrices: each goes to the rank that owns it, and comes back orthogonalized.

    The i-th matrix is owned by the i-th of the ranks that share it; the last round may have fewer than ranks.
    """

    def __init__(self, comms: Communicators, matrices: list[tuple[_Matrix, Placement]], dtype: torch.dtype) -> None:
        self.comms, self.dtype = comms, dtype
        self.ranks = sharers(matrices[0][1], comms.grid, comms.coords)
        self.matrices = dict(zip(self.ranks, matrices, strict=False))  # by owner
        self.parts = {owner: matrix.direction(dtype, comms.device) for owner, (matrix, _) in self.matrices.items()}
        self.shapes = dict[int, tuple[int, ...]]()  # of the other ranks' parts of the matrix that this rank owns
        if comms.rank in self.matrices:
            placement = self.matrices[comms.rank][1]
            self.shapes = {rank: placement.local_shape(comms.grid, comms.grid.coords(rank)) for rank in self.ranks}
            del self.shapes[comms.rank]
        self.coming = self._exchange(self.parts, self.shapes)

    def receive(self) -> torch.Tensor | None:
        """The whole matrix that this rank owns; None: it owns none."""
        parts = self.coming()
        if self.comms.rank not in self.matrices:
            return None
        placement, grid = self.matrices[self.comms.rank][1], self.comms.grid
        own = self.parts[self.comms.rank]
        whole = own.new_empty(placement.global_shape)
        for rank, part in {**parts, self.comms.rank: own}.items():
            placement.put(whole, part, grid, grid.coords(rank))
        return whole

    def give_back(self, whole: torch.Tensor | None) -> None:
        """Orthogonalize it, and take the step of all matrices of the round."""
        parts = dict[int, torch.Tensor]()
        if whole is not None:
            matrix, placement = self.matrices[self.comms.rank]
            result, grid = matrix.orthogonalize(whole), self.comms.grid
            parts = {rank: placement.take(result, grid, grid.coords(rank)) for rank in (self.comms.rank, *self.shapes)}
        shapes = {owner: tuple(part.shape) for owner, part in self.parts.items() if owner != self.comms.rank}
        orthogonal = parts | self._exchange(parts, shapes)()
        for owner, (matrix, _) in self.matrices.items():
            matrix.apply(orthogonal[owner])

    def _exchange(
        self, parts: dict[int, torch.Tensor], shapes: dict[int, tuple[int, ...]]
    ) -> Callable[[], dict[int, torch.Tensor]]:
        """Send each part to its rank; what waits for those of ``shapes`` and gives them, by the rank they come from."""
        me, ranks = self.comms.rank, range(self.comms.world.size)
        sent = [0 if rank == me or rank not in parts else parts[rank].numel() for rank in ranks]
        received = [math.prod(shapes[rank]) if rank in shapes else 0 for rank in ranks]
        flat = [parts[rank].reshape(-1) for rank in ranks if sent[rank]]
        empty = torch.empty(0, dtype=self.dtype, device=self.comms.device)
        target = empty.new_empty(sum(received))
        source = torch.cat(flat) if flat else empty
        work = self.comms.world.all_to_all(source, target, True, send_counts=sent, recv_counts=received)

        def arrived() -> dict[int, torch.Tensor]:
            work.wait()
            pieces = zip(ranks, target.split(received), strict=True)
            return {rank: piece.view(shapes[rank]) for rank, piece in pieces if rank in shapes}

        return arrived
