"""Tesseract's product ``O[m, n] = I[m, k] @ W[n, k]^T + b[n]`` on one rank of a q x q x d grid, as layers run it.

With x = y = q and z = d (SUMMA: d = 1) a rank holds

    I   [m/(q d Gdata), k/q]     rows over x, z and data, features over y
    W   [n/q, k/q]               n over y, k over x, the same along z and data
    b   [n/q]                    over y

and computes, for t = 0 .. q-1 (``axo.matmul.tesseract`` with W stored as torch does)

    forward    I_t along y from y = t;  W_t along x from x = t;  O += I_t @ W_t^T
    backward   W_t along x;  dI_t = dO @ W_t, reduced along y to y = t
               I_t along y;  dW_t = dO^T @ I_t, reduced along x to x = t
               then dW summed over z and data; db = sum of dO over rows, reduced over x, z and data

2 q broadcasts forward; 2 q broadcasts and 2 q reduces backward; one sum over depth. Options of ``axo.Overlap``:
``all_gather`` lets the blocks of a step travel while the step before multiplies, ``all_reduce`` the sums of dI behind
the products of dW, ``reduce_scatter`` the sums of dW behind each other and the sum over depth behind the layers before.
No block is kept from forward to backward: a rank holds its own blocks and those of two steps.

Not here: second derivatives (refused); the tuner's choices, fused products.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from axo.comm.connect import Communicators
from axo.matmul.algorithm import accumulator, add_product, ahead
from axo.matmul.product import DistributedMatmul, begin_backward, keep_for_backward, no_autocast
from axo.matmul.products import LayerProducts, compute_dtype
from axo.matmul.shared_input import InputSum
from axo.overlap import Overlap
from axo.overlap.autograd import SKIP
from axo.overlap.dispatch_modes import hidden
from axo.overlap.engine import Exchange
from axo.overlap.events import TracedWork, span
from axo.placement import Placement


def layer_matmul(
    comms: Communicators,
    placement: Placement,
    *,
    in_axis: str | None,
    out_axis: str | None,
    grad_reduce: str = "mean",
    gather_cache: str | int = "all",
) -> DistributedMatmul:
    """The product of the algorithm that ``comms`` is arranged for.

    A weight that lies as Tesseract's embedding does is gathered over x, as axonn's over z, and multiplied at once.

    Args:
        comms: The communicators of the grid.
        placement: Where the weight lies.
        in_axis, out_axis: As for :class:`DistributedMatmul`.
        grad_reduce: ``"mean"`` or ``"sum"`` over the data ranks.
        gather_cache: As in ``axo.Overlap``, for the engine of a layer that is part of no model's.

    Raises:
        ValueError: An option is not known.
    """
    exchange = Exchange(comms, placement, grad_reduce, Overlap(gather_cache=gather_cache, bucket_bytes=0))
    blocks = comms.arrangement.square and placement.splits != comms.arrangement.table
    kind = BlockMatmul if blocks else DistributedMatmul
    matmul = kind(exchange, LayerProducts(exchange, placement), in_axis=in_axis, out_axis=out_axis)
    if comms.arrangement.square:
        matmul.products.rows_agree = False  # no product runs with a collective over z: its weight is not cut there
    return matmul


class BlockMatmul(DistributedMatmul):
    """What one layer's product needs to know; holds communicators, never a tensor."""

    def __call__(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, input_sum: InputSum | None = None
    ) -> torch.Tensor:
        assert input_sum is None  # dI is not summed by an all-reduce
        if self.exchange.comms.grid.world_size == 1:
            return self.products.alone(input, weight, bias)
        return _BlockProduct.apply(input, weight, bias, self, torch.is_grad_enabled())

    def broadcast(self, axis: str, mine: torch.Tensor, root: int) -> TracedWork:
        """Start to send the block of rank ``root`` along ``axis``; all blocks are of one shape."""
        engine = self.exchange.engine
        line, block = engine.communicators[axis], mine.contiguous()
        if line.rank != root:
            block = engine.pool.allocate(tuple(mine.shape), mine.dtype, mine.device)
        call, name = functools.partial(line.broadcast, block, root), self.exchange.name
        return engine.start(call, block, "broadcast", axis, name, pending=engine.overlap.all_gather)

    def reduce(self, axis: str, partial: torch.Tensor, root: int, op: str, overlapped: bool) -> TracedWork:
        """Start to add ``partial`` up over ``axis``; the sum is in it at rank ``root``."""
        engine = self.exchange.engine
        call, name = functools.partial(engine.communicators[axis].reduce, partial, root, op), self.exchange.name
        return engine.start(call, partial, "reduce", axis, name, pending=overlapped)


class _BlockProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        matmul: BlockMatmul,
        recording: bool,
    ) -> torch.Tensor:
        dtype = compute_dtype(input)
        exchange = matmul.exchange
        needs_input = ctx.needs_input_grad[0]
        rows = input.to(dtype).reshape(-1, input.shape[-1])
        block, held = exchange.forward_block(weight, dtype, recording=recording, wanted=needs_input)
        with hidden(), span(exchange.engine.events, "compute", "forward", "", exchange.name):
            total = accumulator(rows, rows.shape[0], block.shape[0])
            steps = range(exchange.sizes["x"])
            fetch = lambda t: (matmul.broadcast("y", rows, t), matmul.broadcast("x", block, t))  # noqa: E731
            for _, (rows_t, block_t) in ahead(steps, fetch):
                add_product(total, rows_t, block_t.t())
            output = total.to(dtype)
            if bias is not None:
                output += bias.to(dtype)
        keep_for_backward(ctx, matmul, input, rows, weight, bias, held)
        return torch.ops.aten._unsafe_view(output, [*input.shape[:-1], output.shape[-1]])  # no view, as there

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad, rows, _, how_weight, how_bias = begin_backward(ctx, grad_output)
        matmul, exchange = ctx.matmul, ctx.matmul.exchange
        weight, bias, needs_input = ctx.weight, ctx.bias, ctx.needs_input_grad[0]
        grad_input = grad_weight = grad_bias = None
        with no_autocast(grad.device):
            block = exchange.backward_block(ctx.held, weight, ctx.dtype) if needs_input else None
            ctx.held = None
            sums = _Backward(matmul, grad, block, rows if how_weight != SKIP else None)
            if how_weight != SKIP:
                into, sums.grad_block = exchange.gradient_buffer(
                    how_weight, weight, rows.shape[1], sums.reduced(grad[:0])
                )
            sums.run()
            if how_weight != SKIP:
                grad_weight = exchange.weight_gradient(how_weight, weight, into)
            if how_bias != SKIP:
                grad_bias = exchange.vector_gradient(how_bias, bias, grad.sum(0, dtype=bias.dtype))
            if needs_input:
                grad_input = sums.grad_input().view(ctx.input_shape).to(ctx.input_dtype)
        return grad_input, grad_weight, grad_bias, None, None


class _Backward:
    """The 2 q steps of one backward pass: those of dI first, whose sums travel behind those of dW.

    Args:
        matmul: Its communicators and options.
        grad: dO, (m, n/q).
        block: This rank's W, (n/q, k/q); None: no dI is wanted.
        rows: This rank's I, (m, k/q); None: no dW is wanted.

    Attributes:
        grad_block: Where dW goes, (n/q, k/q).
    """

    grad_block: torch.Tensor

    def __init__(
        self, matmul: BlockMatmul, grad: torch.Tensor, block: torch.Tensor | None, rows: torch.Tensor | None
    ) -> None:
        self.matmul, self.grad, self.block, self.rows = matmul, grad, block, rows
        self.exchange, self.overlap = matmul.exchange, matmul.exchange.engine.overlap
        self.reduced = self.exchange.engine.gradients.cast  # to the dtype that gradients are reduced in
        self.sums: list[TracedWork] = []

    def run(self) -> None:
        """Multiply. Afterwards dW is summed over x; dI may be on its way."""
        q, events, name = self.exchange.sizes["x"], self.exchange.engine.events, self.exchange.name
        steps = [*range(q if self.block is not None else 0), *range(q, 2 * q if self.rows is not None else q)]
        weight_sums = []
        for step, (received,) in ahead(steps, self._fetch):
            if step < q:
                with span(events, "compute", "dI", "", name):
                    partial = self.grad @ received
                self.sums.append(self.matmul.reduce("y", partial, step, "sum", self.overlap.all_reduce))
            else:
                with span(events, "compute", "dW", "", name):
                    partial = self._grad_weight(received, step - q)
                op = self.exchange.op
                weight_sums.append(self.matmul.reduce("x", partial, step - q, op, self.overlap.reduce_scatter))
        for each in weight_sums:
            each.wait()

    def _fetch(self, step: int) -> tuple[TracedWork]:
        q = self.exchange.sizes["x"]
        if step < q:
            assert self.block is not None
            return (self.matmul.broadcast("x", self.block, step),)
        assert self.rows is not None
        return (self.matmul.broadcast("y", self.rows, step - q),)

    def _grad_weight(self, rows_t: torch.Tensor, t: int) -> torch.Tensor:
        """This rank's part of dW_t; where the sum is to be, it lies in its last place."""
        mine = t == self.exchange.comms.coords.x
        if mine and self.grad_block.dtype == self.grad.dtype:
            return torch.mm(self.grad.t(), rows_t, out=self.grad_block)
        partial = self.reduced(self.grad.t() @ rows_t)
        return self.grad_block.copy_(partial) if mine else partial

    def grad_input(self) -> torch.Tensor:
        """This rank's block of dI, complete."""
        blocks = [each.wait() for each in self.sums]
        return blocks[self.exchange.comms.coords.y]
