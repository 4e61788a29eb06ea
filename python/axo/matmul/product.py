"""The 3D parallel product ``O[m, n] = I[m, k] @ W[n, k]^T + b[n]`` on one rank (Algorithm 1 of the AxoNN papers).

With (in, out) = (y, x) for a normal layer and (x, y) for a transposed one, a rank holds

    I   [m/(Gz*Gdata), k/Gin]      features over the in axis, rows over z and data, replicated over the out axis
    W   [n/Gout/Gz,    k/Gin]      its rows of its block
    b   [n/Gout]

and computes

    forward    W = all-gather_z(W);   O = all-reduce_in(I @ W^T) + b
    backward   dI = all-reduce_out(dO @ W)          started, then behind it
               dW = reduce-scatter_z(dO^T @ I)      and all-reduced over data
               db = sum of dO over rows, reduced over z and data

When things are issued and awaited, and whether the gathered weight is kept for backward, is up to the engine
(``axo.overlap``). Under autocast the shard is cast before it is gathered: communication is in the compute dtype too.

Not here: second derivatives (``create_graph=True`` is refused).
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch

from axo.matmul.fused import FusedSum
from axo.matmul.products import LayerProducts, compute_dtype
from axo.matmul.shared_input import InputSum
from axo.overlap.autograd import LATER, NOW, SKIP, has_hooks, hows, version_of
from axo.overlap.dispatch_modes import hidden
from axo.overlap.engine import Exchange
from axo.overlap.events import TracedWork
from axo.overlap.gathers import Gathered
from axo.quantized import QuantizedWeight

_unsafe_view = torch.ops.aten._unsafe_view.default  # a packet of overloads looks for the right one at every call
_NOTHING = contextlib.nullcontext()


class DistributedMatmul:
    """What one layer's product needs to know; holds communicators, never a tensor.

    Args:
        exchange: The layer's collectives.
        products: What it computes between them.
        in_axis: The axis that splits in_features, over which the output is summed; None: it stays a partial sum.
        out_axis: The axis that splits out_features, over which dI is summed; None: it stays a partial sum.
        owner: How messages call the layer.
    """

    def __init__(
        self,
        exchange: Exchange,
        products: LayerProducts,
        *,
        in_axis: str | None,
        out_axis: str | None,
        owner: str = "Linear",
    ) -> None:
        self.exchange, self.products, self.owner = exchange, products, owner
        self.in_axis, self.out_axis = in_axis, out_axis
        self.sums_output = exchange.sizes[in_axis] > 1
        self.sums_input_grad = exchange.sizes[out_axis] > 1
        self._one_rank = exchange.comms.grid.world_size == 1

    def __call__(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        input_sum: InputSum | None = None,
    ) -> torch.Tensor:
        """(..., k/Gin) -> (..., n/Gout). ``input_sum`` sums dI over ranks, with that of other layers; None: alone."""
        alone = self._one_rank and self.exchange.weight_phase is None
        if alone and not isinstance(weight, QuantizedWeight):  # autograd would keep what is made dense
            return self.products.alone(input, weight, bias)
        return _Product.apply(input, weight, bias, self, torch.is_grad_enabled(), input_sum)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        matmul: DistributedMatmul,
        recording: bool,
        input_sum: InputSum | None,
    ) -> torch.Tensor:
        dtype, exchange, products = compute_dtype(input), matmul.exchange, matmul.products
        rows = input if input.dtype is dtype else input.to(dtype)
        if products.flat:
            rows = rows.reshape(-1, input.shape[-1])
        bias_cast = None if bias is None else bias.to(dtype)
        sums, fuses = matmul.sums_output, products.fuses
        added = None if sums else bias_cast
        choice = products.gathering(rows, matmul.in_axis) if fuses and exchange.waits_for_gather() else None
        partial: torch.Tensor | None = None

        def gather() -> torch.Tensor:
            """The block, multiplied as it comes; called if the engine has it from nowhere else."""
            nonlocal partial
            assert choice is not None
            partial, gathered = products.gather_forward(choice, rows, exchange.shard(weight, dtype), added)
            return gathered

        block, held = exchange.forward_block(
            weight,
            dtype,
            recording=recording,
            wanted=ctx.needs_input_grad[0],
            gather=None if choice is None else gather,
        )
        output = products.fused_forward(rows, block, matmul.in_axis) if fuses and sums and partial is None else None
        if output is None:
            partial = products.forward(rows, block, added) if partial is None else partial
            output = exchange.reduce(partial, matmul.in_axis) if sums else partial
        if sums and bias_cast is not None:
            with hidden():
                output += bias_cast if products.flat else bias_cast.view(-1, 1, 1)
        keep_for_backward(ctx, matmul, input, rows, weight, bias, held)
        ctx.input_sum = input_sum
        if not products.flat:
            return output
        # not a view: an operation in place (``nn.ReLU(inplace=True)``) may come next, and torch forbids that on a view
        return _unsafe_view(output, [*input.shape[:-1], output.shape[-1]])

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad, rows, how_input, how_weight, how_bias = begin_backward(ctx, grad_output)
        matmul, exchange, products = ctx.matmul, ctx.matmul.exchange, ctx.matmul.products
        weight, bias = ctx.weight, ctx.bias
        input_sum: InputSum | None = ctx.input_sum
        sums = matmul.sums_input_grad and input_sum is None
        grad_input = grad_weight = grad_bias = None
        summing: FusedSum | TracedWork | None = None
        with no_autocast(grad.device):
            if how_input != SKIP:
                block = exchange.backward_block(ctx.held, weight, ctx.dtype)
                if products.fuses and sums:
                    summing = products.start_fused_grad_input(grad, block, matmul.out_axis)
                if summing is None:
                    grad_input = products.grad_input(grad, block, ctx.input_shape)
                    summing = exchange.start_reduce(grad_input, matmul.out_axis) if sums else None
                del block
                ctx.held = None
            if how_weight != SKIP:
                hides = how_input != SKIP and input_sum is not None and _hides_sum(ctx)
                behind = input_sum.products_behind() if hides and input_sum is not None else None
                grad_weight = exchange.gradient(
                    how_weight, weight, lambda: _weight_product(ctx, how_weight, grad, rows), behind
                )
            if how_bias != SKIP:
                grad_bias = exchange.gradient(
                    how_bias,
                    bias,
                    lambda: exchange.vector_gradient(how_bias, bias, grad.sum(products.row_dims, dtype=bias.dtype)),
                )
            if summing is not None:
                grad_input = summing.wait()
        if grad_input is not None:
            grad_input = grad_input.view(ctx.input_shape).to(ctx.input_dtype)
        return grad_input, grad_weight, grad_bias, None, None, None


def _hides_sum(ctx: Any) -> bool:
    """Whether dW runs behind the sum: this one took the shared input first, so its backward comes last."""
    return ctx.input_sum.exchange is ctx.matmul.exchange and hows(ctx, 1, 2) == [LATER]


def keep_for_backward(
    ctx: Any,
    matmul: DistributedMatmul,
    input: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    held: Gathered | None,
) -> None:
    """Keep what the backward pass needs of a forward: ``rows`` is ``input`` as it was multiplied."""
    ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weight)
    ctx.weight, ctx.bias, ctx.version, ctx.held = weight, bias, version_of(weight), held
    ctx.matmul, ctx.dtype, ctx.input_dtype, ctx.input_shape = matmul, rows.dtype, input.dtype, input.shape


def begin_backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, str, str, str]:
    """Check that a backward pass may run: its dO as it is multiplied, the rows, and how dI, dW and db are wanted.

    Raises:
        RuntimeError: ``create_graph=True``, or the weight has changed since the forward.
    """
    exchange = ctx.matmul.exchange
    owner = ctx.matmul.owner
    if torch.is_grad_enabled():
        refuse_create_graph(owner)
    if version_of(ctx.weight) != ctx.version:
        check_unchanged(f"{owner} {exchange.name!r}" if exchange.name else owner, ctx.weight, ctx.version)
    rows, _ = ctx.saved_tensors
    grad = grad_output
    if ctx.matmul.products.flat:
        grad = grad.reshape(ctx.input_shape[:-1].numel(), grad.shape[-1])  # may have 0 columns
    if torch.compiler.is_compiling():
        how_input, how_weight, how_bias = (NOW if needs else SKIP for needs in ctx.needs_input_grad[:3])
    else:
        how_input, how_weight, how_bias = exchange.hows(ctx)
    return grad, rows, how_input, how_weight, how_bias


def _weight_product(ctx: Any, how: str, grad: torch.Tensor, rows: torch.Tensor) -> torch.Tensor | None:
    """The gradient of the weight, on its way; None: it comes to .grad later."""
    exchange, products, weight = ctx.matmul.exchange, ctx.matmul.products, ctx.weight
    with no_autocast(grad.device):
        if how == NOW and exchange.leaves_whole():
            kept = _grad_to_add_to(ctx, grad.dtype)
            if kept is not None and products.add_grad_weight(grad, rows, kept):
                torch.autograd.graph.increment_version(weight.grad)
                return None
            return products.grad_weight(grad, rows).to(weight).view(weight.shape)
        scattering = products.scattering(grad) if products.fuses and exchange.waits_for_scatter(how, weight) else None
        if scattering is not None:
            into, shard = exchange.gradient_buffer(how, weight, rows.shape[1], grad, scattered=True)
            products.scatter_grad_weight(scattering, grad, rows, exchange.op, shard)
            return exchange.weight_gradient(how, weight, into, scattered=True)
        kept = exchange.kept_block(how, weight, grad.dtype) if exchange.engine.defers else None
        if kept is not None and products.add_grad_weight(grad, rows, kept):
            exchange.engine.expect(weight)
            return None
        into, grad_block = exchange.gradient_buffer(how, weight, math.prod(weight.shape[1:]), grad)
        products.grad_weight(grad, rows, grad_block)
        return exchange.weight_gradient(how, weight, into)


def _grad_to_add_to(ctx: Any, dtype: torch.dtype) -> torch.Tensor | None:
    """``.grad`` as (n, k), where autograd would only add this gradient of 16-bit ``dtype`` to it in fp32; else None."""
    kept = ctx.weight.grad if ctx.weight.is_leaf else None  # a transposed one is none
    if kept is None or kept.dtype != torch.float32 or dtype.itemsize != 2 or not kept.is_contiguous():
        return None
    if hows(ctx, 1, 2) != [LATER] or has_hooks(ctx.weight) or ctx.matmul.exchange.weight_phase is not None:
        return None
    if kept.is_cuda and torch.cuda.current_stream(kept.device) != torch.cuda.default_stream(kept.device):
        return None  # autograd adds on the stream of the parameter, and orders the two
    return kept.view(len(kept), -1)


def check_unchanged(owner: str, weight: torch.Tensor, version: int) -> None:
    """Refuse a backward pass through a weight that is no longer what the forward pass used.

    Raises:
        RuntimeError: It has changed.
    """
    if version_of(weight) != version:
        raise RuntimeError(
            f"{owner}: its weight has been modified by an inplace operation between forward and backward (version"
            f" {version_of(weight)}, not {version}); call backward before optimizer.step() or whatever changes it"
        )


def no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Switch autocast off where it is on: what runs inside has chosen its dtypes already."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return _NOTHING


def refuse_create_graph(owner: str) -> None:
    """Refuse a backward pass that is itself to be differentiated.

    Raises:
        RuntimeError: Called from a backward pass with ``create_graph=True``.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{owner}: backward(create_graph=True) is not supported, since the collectives of the backward pass have no"
            " derivative of their own; run it without create_graph, or that part of the model on a grid of 1x1x1x1"
        )
