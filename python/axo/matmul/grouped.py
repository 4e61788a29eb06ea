"""The product of rows with the weights of experts that lie in one tensor, each expert's with its own rows.

    O[rows of i, n] = I[rows of i, k] @ W[i, n, k]^T        for each expert i of this rank, rows by expert

It runs as any layer's (``axo.matmul.product``): what travels between ranks, and when, is the same, with one gather of
all this rank's experts, one sum over the in axis, one gradient. In the place of one product there is a grouped one:
torch's own (``torch.nn.functional.grouped_mm``) where it takes these sizes, else a loop over experts.

Where experts lie on several ranks, rows come in pieces, each of some of this rank's experts, and go back so
(``axo.nn.experts``). The first product waits for a piece where it multiplies it; the last sends one on its way behind
the products of the next. In backward the gradients do the same the other way, and the weights' gradients are computed
behind what is still on its way.

Not here: a bias; fp8; what is chosen by a tuner.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from axo.comm.communicator import Communicator
from axo.comm.connect import Communicators
from axo.matmul.fused import FusedSum
from axo.matmul.product import DistributedMatmul
from axo.matmul.products import LayerProducts
from axo.overlap import Overlap
from axo.overlap.engine import Exchange
from axo.placement import Placement


class RowTransfer:
    """Rows to other ranks and from them, ``sent`` and ``received`` of each, one time each way.

    Gradients go the other way, times ``factor``.
    """

    def __init__(self, line: Communicator, sent: list[int], received: list[int], factor: float) -> None:
        self.line, self.sent, self.received, self.factor = line, sent, received, factor
        self._work: Any = None  # what is on its way

    def start(self, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Send ``rows``; what comes, which is not to be touched before ``wait``, into ``out`` if given."""
        return self._start(rows, self.sent, self.received, out)

    def start_back(self, grad: torch.Tensor) -> None:
        """Send gradients of what came; ``wait`` gives what comes."""
        self._start(grad if self.factor == 1 else grad * self.factor, self.received, self.sent, None)

    def _start(
        self, rows: torch.Tensor, sent: list[int], received: list[int], out: torch.Tensor | None
    ) -> torch.Tensor:
        out = rows.new_empty(sum(received), rows.shape[1]) if out is None else out
        self._work = self.line.all_to_all(rows.contiguous(), out, async_op=True, send_counts=sent, recv_counts=received)
        return out

    def wait(self) -> torch.Tensor:
        """What was on its way."""
        out: torch.Tensor = self._work.wait()
        self._work = None
        return out


@dataclass(frozen=True)
class Piece:
    """Rows of some of this rank's experts.

    Attributes:
        experts: Whose; pieces lie in their order.
        sizes: Rows of each.
        order: Where the rows that came lie by expert, ``(m,)``; None: they lie so.
        inverse: The inverse of ``order``.
        there, back: How they come, and go; None: they are here, and stay.
    """

    experts: range
    sizes: Sequence[int]
    order: torch.Tensor | None = None
    inverse: torch.Tensor | None = None
    there: RowTransfer | None = None
    back: RowTransfer | None = None

    def by_expert(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows that came, by expert."""
        return rows if self.order is None else rows.index_select(0, self.order)

    def as_they_came(self, rows: torch.Tensor) -> torch.Tensor:
        """The inverse."""
        return rows if self.inverse is None else rows.index_select(0, self.inverse)


class GroupedMatmul(DistributedMatmul):
    """The product of one stacked weight.

    Args:
        comms: The communicators of the grid.
        placement: Where the weight lies; a ``stack``.
        in_axis, out_axis: As for :class:`DistributedMatmul`.
        grad_reduce: ``"mean"`` or ``"sum"`` over the data ranks.
    """

    def __init__(
        self, comms: Communicators, placement: Placement, *, in_axis: str, out_axis: str, grad_reduce: str
    ) -> None:
        exchange = Exchange(comms, placement, grad_reduce, Overlap(bucket_bytes=0))
        products = GroupedProducts(exchange, placement, in_axis, out_axis)
        super().__init__(exchange, products, in_axis=in_axis, out_axis=out_axis, owner="Experts")
        self._one_rank = False  # autograd's own product is of one weight

    def of(self, pieces: Sequence[Piece], *, first: bool, last: bool) -> GroupedMatmul:
        """That of one call: of rows that come, and whose results go, in ``pieces``.

        Args:
            pieces: All of the rows.
            first: Rows are waited for where they are on their way, and the gradients of them sent.
            last: Results are sent, and the gradients of them waited for.
        """
        new = copy.copy(self)
        new.products = of_call = copy.copy(self.products)
        assert isinstance(of_call, GroupedProducts)
        of_call.pieces, of_call.arrived = pieces, None
        of_call.arrives = first and pieces[0].there is not None
        of_call.leaves = last and pieces[0].back is not None
        of_call.fuses = of_call.arrives or of_call.leaves
        new.sums_output = self.sums_output or of_call.leaves
        new.sums_input_grad = self.sums_input_grad or of_call.arrives
        return new


class GroupedProducts(LayerProducts):
    """The three products of a stacked weight, in pieces.

    Attributes:
        pieces: Of the call.
        arrives, leaves: Whether its rows are on their way, and its results are to be sent.
        arrived: What stands for the gradients of results that were sent, and these, once they are here: by expert.
    """

    pieces: Sequence[Piece]
    arrives = leaves = False
    arrived: tuple[torch.Tensor, torch.Tensor] | None = None

    def __init__(self, exchange: Exchange, placement: Placement, in_axis: str, out_axis: str) -> None:
        super().__init__(exchange, placement)
        assert placement.stack is not None
        self._experts = placement.stack // (1 if placement.holders is None else placement.holders.places)
        self._in_axis, self._out_axis = in_axis, out_axis
        self.fuses = False

    def forward(self, rows: torch.Tensor, block: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """(m, k), (E n, k) -> (m, n)."""
        pieces = self._each(rows, block)
        return _joined([self._run("forward", product, mine, part, piece.sizes) for piece, mine, part in pieces])

    def fused_forward(self, rows: torch.Tensor, block: torch.Tensor, axis: str | None) -> torch.Tensor | None:
        """As ``forward``, the results sent; a stand-in for them. None where they stay."""
        if not self.leaves:
            return None
        for piece, mine, part in self._each(rows, block):
            output = self._exchange.reduce(self._run("forward", product, mine, part, piece.sizes), self._in_axis)
            assert piece.back is not None
            piece.back.start(piece.as_they_came(output))
        return rows.new_empty(()).expand(len(rows), len(block) // self._experts)

    def _each(self, rows: torch.Tensor, block: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor, torch.Tensor]]:
        """Each piece, its rows by expert once they are here, and the weights of its experts, (E, n, k)."""
        stack = block.unflatten(0, (self._experts, -1))
        for piece, mine in zip(self.pieces, self._split(rows), strict=True):
            if self.arrives:
                assert piece.there is not None
                piece.there.wait()
                mine = piece.by_expert(mine)
            yield piece, mine, stack[piece.experts.start : piece.experts.stop]

    def grad_input(self, grad: torch.Tensor, block: torch.Tensor, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """(m, n), (E n, k) -> (m, k)."""
        grad, stack = self._by_expert(grad), block.unflatten(0, (self._experts, -1))
        return self._run("grad_input", product, grad, stack.transpose(1, 2), self._sizes())

    def start_fused_grad_input(self, grad: torch.Tensor, block: torch.Tensor, axis: str | None) -> FusedSum | None:
        """As ``grad_input``, sent where the rows came from, the last piece first; None where they did not come."""
        if not self.arrives:
            return None
        stack, grads = block.unflatten(0, (self._experts, -1)).transpose(1, 2), self._split(self._by_expert(grad))
        for piece, mine in list(zip(self.pieces, grads, strict=True))[::-1]:
            part = stack[piece.experts.start : piece.experts.stop]
            grad_rows = self._exchange.reduce(self._run("grad_input", product, mine, part, piece.sizes), self._out_axis)
            assert piece.there is not None
            piece.there.start_back(piece.as_they_came(grad_rows))
        return FusedSum(grad.new_empty(()).expand(len(grad), block.shape[1]), lambda: None)

    def grad_weight(self, grad: torch.Tensor, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """(m, n), (m, k) -> (E n, k), into ``out`` when given."""
        grad = self._by_expert(grad)
        if self.arrives:
            parts = zip(self.pieces, self._split(rows), strict=True)
            rows = _joined([piece.by_expert(mine) for piece, mine in parts])
        if out is None:
            out = grad.new_empty(self._experts * grad.shape[1], rows.shape[1])
        self._run("grad_weight", weight_product, grad, rows, self._sizes(), out.unflatten(0, (self._experts, -1)))
        self.arrived = None
        return out

    def _by_expert(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradients of results, those that were sent too, which are waited for in the order of their way."""
        if not self.leaves:
            return grad
        if self.arrived is None or self.arrived[0] is not grad:
            parts = []
            for piece in self.pieces[::-1]:
                assert piece.back is not None
                parts.append(piece.by_expert(piece.back.wait()))
            self.arrived = grad, _joined(parts[::-1])
        return self.arrived[1]

    def _split(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return rows.split([sum(piece.sizes) for piece in self.pieces])

    def _sizes(self) -> list[int]:
        return [size for piece in self.pieces for size in piece.sizes]

    def gathering(self, rows: torch.Tensor, in_axis: str | None) -> None:
        """No product runs with the gather of its weight."""

    def scattering(self, grad: torch.Tensor) -> None:
        """Nor with the sum of its gradient."""

    def add_grad_weight(self, grad: torch.Tensor, rows: torch.Tensor, total: torch.Tensor) -> bool:
        """Not as it is computed."""
        return False


def product(rows: torch.Tensor, weights: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Multiply the rows of each expert by its weight, transposed: (m, k), (E, n, k) -> (m, n).

    Args:
        rows: By expert.
        weights: In any strides.
        sizes: Rows of each expert.
    """
    if _has_grouped(rows, *weights.shape[1:]):
        return F.grouped_mm(rows.contiguous(), weights.transpose(1, 2), offs=_ends(sizes, rows))
    output = rows.new_empty(len(rows), weights.shape[1])
    for part, weight, into in zip(rows.split(list(sizes)), weights, output.split(list(sizes)), strict=True):
        torch.mm(part, weight.t(), out=into)
    return output


def weight_product(grad: torch.Tensor, rows: torch.Tensor, sizes: Sequence[int], out: torch.Tensor) -> None:
    """The gradient of each expert's weight: (m, n), (m, k) -> (E, n, k), into ``out``."""
    if _has_grouped(rows, grad.shape[1], rows.shape[1]):
        out.copy_(F.grouped_mm(grad.contiguous().t(), rows.contiguous(), offs=_ends(sizes, rows)))
        return
    for of_results, of_rows, into in zip(grad.split(list(sizes)), rows.split(list(sizes)), out, strict=True):
        torch.mm(of_results.t(), of_rows, out=into)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _ends(sizes: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(like.device, non_blocking=True)


def _has_grouped(rows: torch.Tensor, n: int, k: int) -> bool:
    """Whether torch has one call for it: of features that are multiples of 16 bytes; on GPUs since sm_80 in bf16."""
    if (n * rows.itemsize) % 16 or (k * rows.itemsize) % 16 or not len(rows) or rows.dtype is torch.float64:
        return False
    if rows.is_cuda:
        return rows.dtype is torch.bfloat16 and torch.cuda.get_device_capability(rows.device) >= (8, 0)
    return rows.device.type == "cpu"
