"""The experts of a mixture whose weights lie in one tensor for each projection, as transformers keeps them since 5.

    G[m, 2i] = I[m, h] @ gate_up_proj[e, 2i, h]^T     normal: h over y, gates and ups each over x
    A[m, i]  = act(gates) * ups                       (of experts without a gate: up_proj[e, i, h], act(G))
    O[m, h]  = A @ down_proj[e, h, i]^T               transposed: i over x, h over y

each expert e on the rows that have chosen it. A rank holds ``[E 2i/Gx/Gz, h/Gy]`` and ``[E h/Gy/Gz, i/Gx]``: the blocks
of all experts one behind the other, or of its own where they lie on several ranks (``axo.nn.experts``), cut over the
ranks along z that hold the same. They are gathered together, multiplied in one grouped product
(``axo.matmul.grouped``), and have one gradient. Rows come with all features, and choices with their weights.

Not here: biases, weights that are stored transposed, gates and ups in turn (such experts stay whole on every rank).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from axo.comm.connect import Communicators
from axo.grid import Grid
from axo.matmul import cost
from axo.matmul.grouped import GroupedMatmul, Piece
from axo.nn.experts import SpreadExperts
from axo.nn.layer import ParallelLayer
from axo.placement import Placement
from axo.plans.gradient import sum_gradient
from axo.plans.report import LayerPlan
from axo.sharding import cut_features, gather_features


class StackedExperts(ParallelLayer):
    """All experts of a mixture: (rows, h), numbers of experts and their weights, (rows, k) each -> (rows, h).

    Args:
        old: The serial module, of one of transformers' classes.
        comms, grad_reduce, name: As for :class:`axo.nn.Linear`.
    """

    down_proj: torch.Tensor

    def __init__(self, old: Any, *, comms: Communicators, grad_reduce: str, name: str) -> None:
        first = _first(old)
        count, wide, hidden = getattr(old, first).shape
        width, grid = old.down_proj.shape[2], comms.grid
        holders = comms.expert_holders(0) if comms.experts.size > 1 else None
        up, down = (
            Placement(
                (count * sum(blocks), columns), ((rows_over, "z"), (columns_over,)), blocks * count, comms,
                holders=holders, stack=count,
            )
            for blocks, columns, rows_over, columns_over in (
                ((width,) * (wide // width), hidden, "x", "y"), ((hidden,), width, "y", "x"),
            )
        )  # fmt: skip
        self._start(comms, name, {first: up, "down_proj": down})
        assert width % grid.x == 0 == hidden % grid.y
        self.num_experts, self._hidden, self._width, self._wide = count, hidden, width, wide
        self._first_matmul = GroupedMatmul(comms, up, in_axis="y", out_axis="x", grad_reduce=grad_reduce)
        self._last_matmul = GroupedMatmul(comms, down, in_axis="x", out_axis="y", grad_reduce=grad_reduce)
        self.exchanges = (self._first_matmul.exchange, self._last_matmul.exchange)
        self._serial: tuple[Any, ...] = (_empty(old),)  # in a tuple: no module of this one
        self._add_parameters("meta", old.down_proj.dtype)
        self.spread_experts = SpreadExperts([self] * count, comms, grad_reduce)

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
        """The weighted sum of what the chosen experts give of each row: (rows, h) -> (rows, h)."""
        if hidden_states.dtype is not self.down_proj.dtype:
            self._check_dtype(hidden_states, self.down_proj)
        rows = cut_features(hidden_states, self.comms, "y", self._hidden)
        weights = sum_gradient(top_k_weights, self.comms.y, self.label())
        return gather_features(self.spread_experts(rows, weights, top_k_index), self.comms, "y", self._hidden)

    def multiply(self, rows: torch.Tensor, pieces: Sequence[Piece]) -> torch.Tensor:
        """What this rank's experts give of ``rows``, or a stand-in where ``pieces`` send it: (m, h/Gy) -> (m, h/Gy)."""
        (first, last), serial = self.placements, self._serial[0]
        wide = self._first_matmul.of(pieces, first=True, last=False)(rows, getattr(self, first), None)
        inner = serial._apply_gate(wide) if serial.has_gate else serial.act_fn(wide)
        return self._last_matmul.of(pieces, first=False, last=True)(inner, getattr(self, last), None)

    def line(self, kind: str) -> LayerPlan:
        """The row of the plan's report; ``kind``: the serial class."""
        sent = -(-self._hidden // self.comms.grid.y) * self.down_proj.element_size() * (self.comms.grid.y > 1)
        why = "experts: their first projections normal, their last transposed"
        return LayerPlan(self.name or "", kind, "normal", False, False, sent, sent, why)

    def serial(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        new: nn.Module = copy.deepcopy(self._serial[0])
        return new.to_empty(device=device).to(dtype)

    def cost(self, received: Sequence[int], *, itemsize: int = 4) -> list[cost.Call]:
        """Count the collectives of the products on this rank in one step, without those of the exchange of rows.

        Args:
            received: Rows of each piece (``axo.nn.experts``): one where no rows travel.
            itemsize: Bytes an element of the dtype that they compute in.
        """
        grid, coords, holders = self.comms.grid, self.comms.coords, self.placements["down_proj"].holders
        grid, coords = (grid, coords) if holders is None else (holders.grid(grid), holders.among(coords))
        stack = self.num_experts // self.comms.experts.size
        calls = []
        for into, out, transposed in ((self._hidden, self._wide, False), (self._width, self._hidden, True)):
            sent = cost.FORWARD if transposed else cost.BACKWARD  # whose sums are taken piece by piece
            weights = cost.linear(grid, 0, into, stack * out, False, transposed=transposed, itemsize=itemsize,
                                  gathers=self._gathers(True), coords=coords)  # fmt: skip
            calls += [call for call in weights if call.axis in ("z", "data")]
            for rows in received:
                sums = cost.linear(grid, rows * grid.z, into, out, False, transposed=transposed, itemsize=itemsize)
                calls += [call for call in sums if call.axis in ("x", "y") and call.phase == sent]
            sums = cost.linear(grid, sum(received) * grid.z, into, out, False, transposed=transposed, itemsize=itemsize)
            calls += [call for call in sums if call.axis in ("x", "y") and call.phase != sent]
        return self._reduced(calls)

    def extra_repr(self) -> str:
        shapes = ", ".join(f"{name}={tuple(getattr(self, name).shape)}" for name in self.placements)
        return f"experts={self.num_experts}, hidden={self._hidden}, width={self._width}, on this rank: {shapes}"


def is_stack(module: nn.Module) -> bool:
    """Whether ``module`` is the experts of a mixture of transformers that :class:`StackedExperts` can be."""
    off = ("has_bias", "is_transposed", "has_post_expert_norm")
    if not type(module).__module__.startswith("transformers.models.") or not hasattr(module, "is_concatenated"):
        return False
    names = {name for name, _ in module.named_parameters()}
    plain = bool(module.is_concatenated) and not any(getattr(module, each, True) for each in off)
    return plain and names == {_first(module), "down_proj"}


def unfit(module: Any, grid: Grid, algorithm: str) -> str:
    """Why experts of such a class stay whole on a grid; empty: they need not."""
    hidden, width = module.down_proj.shape[1:]
    if algorithm != "axonn":
        return f"experts in one tensor are not split by algorithm {algorithm!r}"
    if width % grid.x or hidden % grid.y:
        return f"x={grid.x} does not divide the width {width}, or y={grid.y} not the {hidden} features, of its experts"
    return ""


def _first(module: Any) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


def _empty(module: nn.Module) -> nn.Module:
    """A copy on the meta device."""
    new = copy.copy(module)
    new._parameters = {name: nn.Parameter(p.to("meta")) for name, p in module.named_parameters(recurse=False)}
    return new
