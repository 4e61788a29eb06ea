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
from typing import Any

import torch

from axo.comm.connect import Communicators
from axo.matmul.products import LayerProducts, compute_dtype
from axo.matmul.shared_input import InputSum
from axo.overlap import Overlap
from axo.overlap.dispatch_modes import hidden
from axo.overlap.events import computed, span
from axo.overlap.exchange import Exchange
from axo.overlap.gathers import Gathered, version_of
from axo.overlap.gradients import LATER, NOW, SKIP, has_hooks, how
from axo.overlap.quantized import QuantizedWeight
from axo.placement import Placement
from axo_kernels.tune.choice import Choice

_unsafe_view = torch.ops.aten._unsafe_view.default  # a packet of overloads looks for the right one at every call
_NOTHING = contextlib.nullcontext()


class DistributedMatmul:
    """What one layer's product needs to know; holds communicators, never a tensor.

    Args:
        comms: The communicators of the grid.
        placement: Where the weight lies.
        in_axis: The axis that splits in_features, over which the output is summed; None: it stays a partial sum.
        out_axis: The axis that splits out_features, over which dI is summed; None: it stays a partial sum.
        grad_reduce: ``"mean"`` or ``"sum"`` over the data ranks.
        gather_cache: As in ``axo.Overlap``, for the engine of a layer that is part of no model's.

    Raises:
        ValueError: An option is not known.
    """

    def __init__(
        self,
        comms: Communicators,
        placement: Placement,
        *,
        in_axis: str | None,
        out_axis: str | None,
        grad_reduce: str = "mean",
        gather_cache: str | int = "all",
    ) -> None:
        overlap = Overlap(gather_cache=gather_cache, bucket_bytes=0)
        self.exchange = Exchange(comms, placement, grad_reduce, overlap)
        self.products = LayerProducts(comms, placement)
        self.in_axis, self.out_axis = in_axis, out_axis
        self.sums_output = self.exchange.size(in_axis) > 1
        self._one_rank = comms.grid.world_size == 1

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
        dtype = compute_dtype(input)
        exchange, products = matmul.exchange, matmul.products
        events = exchange.engine.events
        needs_input = ctx.needs_input_grad[0]
        rows = (input if input.dtype is dtype else input.to(dtype)).reshape(-1, input.shape[-1])
        bias_cast = None if bias is None else bias.to(dtype)
        partial = matmul.sums_output
        first_bias = None if partial else bias_cast
        fuses = products.fuses
        gathering = _gathering(matmul, rows, weight, first_bias) if fuses and exchange.waits_for_gather() else None
        block, held = exchange.forward_block(weight, dtype, recording=recording, wanted=needs_input, gather=gathering)
        output, fused = None if gathering is None else gathering.output, None
        if output is None and fuses and partial:
            with span(events, "compute", "forward", "", exchange.name):
                fused = products.fused_forward(rows, block, matmul.in_axis)
                output = products.forward(rows, block, first_bias) if fused is None else fused
        elif output is None:
            output = computed(events, "forward", exchange.name, products.forward, rows, block, first_bias)
        if partial:
            if fused is None:
                output = exchange.reduce(output, matmul.in_axis)
            if bias_cast is not None:
                with hidden():
                    output += bias_cast
        keep_for_backward(ctx, matmul, input, rows, weight, bias, held)
        ctx.input_sum = input_sum
        # not a view: an operation in place (``nn.ReLU(inplace=True)``) may come next, and torch forbids that on a view
        return _unsafe_view(output, [*input.shape[:-1], output.shape[-1]])

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad, rows, how_input, how_weight, how_bias = begin_backward(ctx, grad_output)
        matmul, exchange, products = ctx.matmul, ctx.matmul.exchange, ctx.matmul.products
        weight, bias, events = ctx.weight, ctx.bias, exchange.engine.events
        input_sum: InputSum | None = ctx.input_sum
        out_axis = matmul.out_axis if input_sum is None else None
        grad_input = grad_weight = grad_bias = None
        with no_autocast(grad.device):
            if how_input != SKIP:
                block = exchange.backward_block(ctx.held, weight, ctx.dtype)
                if products.fuses:
                    with span(events, "compute", "dI", "", exchange.name):
                        grad_input = products.start_fused_grad_input(grad, block, out_axis)
                        partial = products.grad_input(grad, block) if grad_input is None else None
                else:
                    partial = computed(events, "dI", exchange.name, products.grad_input, grad, block)
                if partial is not None:
                    grad_input = exchange.start_reduce(partial, out_axis)
                del block, partial
                ctx.held = None
                exchange.release_block()
            if how_weight != SKIP:
                behind = input_sum if grad_input is not None and input_sum is not None and _hides_sum(ctx) else None
                grad_weight = exchange.gradient(
                    how_weight, weight, lambda: _weight_product(ctx, how_weight, grad, rows), behind
                )
            if how_bias != SKIP:
                grad_bias = exchange.gradient(
                    how_bias, bias, lambda: exchange.vector_gradient(how_bias, bias, grad.sum(0, dtype=bias.dtype))
                )
        return (
            None if grad_input is None else grad_input.wait().view(ctx.input_shape).to(ctx.input_dtype),
            grad_weight,
            grad_bias,
            None,
            None,
            None,
        )


def _hides_sum(ctx: Any) -> bool:
    """Whether dW runs behind the sum: this one took the shared input first, so its backward comes last."""
    return ctx.input_sum is not None and ctx.input_sum.first is ctx.matmul and how(ctx, 1) == LATER


def keep_for_backward(
    ctx: Any,
    matmul: DistributedMatmul,
    input: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    held: Gathered | None,
) -> None:
    """Keep what the backward pass needs of a forward: ``rows`` is ``input`` in two dims and in the compute dtype."""
    ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weight)
    ctx.weight, ctx.bias, ctx.version, ctx.held = weight, bias, version_of(weight), held
    ctx.matmul, ctx.dtype, ctx.input_dtype, ctx.input_shape = matmul, rows.dtype, input.dtype, input.shape


def begin_backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, str, str, str]:
    """Check that a backward pass may run: its dO in two dims, the rows, and how dI, dW and db are wanted.

    Raises:
        RuntimeError: ``create_graph=True``, or the weight has changed since the forward.
    """
    exchange = ctx.matmul.exchange
    refuse_create_graph("Linear")
    if version_of(ctx.weight) != ctx.version:
        check_unchanged(f"Linear {exchange.name!r}" if exchange.name else "Linear", ctx.weight, ctx.version)
    rows, _ = ctx.saved_tensors
    grad = grad_output.reshape(ctx.input_shape[:-1].numel(), grad_output.shape[-1])  # may have 0 columns
    if torch.compiler.is_compiling():
        how_input, how_weight, how_bias = (NOW if needs else SKIP for needs in ctx.needs_input_grad[:3])
    else:
        how_input, how_weight, how_bias = exchange.hows(ctx)
    return grad, rows, how_input, how_weight, how_bias


def _weight_product(ctx: Any, how: str, grad: torch.Tensor, rows: torch.Tensor) -> torch.Tensor | None:
    """The gradient of the weight, on its way; None: it comes to .grad later."""
    exchange, products, weight = ctx.matmul.exchange, ctx.matmul.products, ctx.weight
    events = exchange.engine.events
    with no_autocast(grad.device):
        if exchange.leaves_whole(how):
            if _adds(ctx, grad, rows, _grad_to_add_to(ctx, grad.dtype)):
                torch.autograd.graph.increment_version(weight.grad)
                return None
            whole = computed(events, "dW", exchange.name, products.grad_weight, grad, rows)
            return whole.to(weight).view(weight.shape)
        scattering = products.scattering(grad) if products.fuses and exchange.waits_for_scatter(how, weight) else None
        if scattering is not None:
            into, shard = exchange.shard_buffer(how, weight, rows.shape[1], grad)
            with span(events, "compute", "dW", "", exchange.name):
                products.scatter_grad_weight(scattering, grad, rows, exchange.op, shard)
            return exchange.shard_gradient(weight, into)
        if _adds(ctx, grad, rows, exchange.kept_block(how, weight, grad.dtype)):
            exchange.engine.gradients.added(weight)
            return None
        into, grad_block = exchange.gradient_buffer(how, weight, rows.shape[1], grad)
        computed(events, "dW", exchange.name, products.grad_weight, grad, rows, grad_block)
        return exchange.weight_gradient(how, weight, into)


def _adds(ctx: Any, grad: torch.Tensor, rows: torch.Tensor, kept: torch.Tensor | None) -> bool:
    """Whether the product could be added to ``kept``, the fp32 sum so far, as it was computed."""
    exchange, products = ctx.matmul.exchange, ctx.matmul.products
    adding = None if kept is None else products.adding(grad, rows)
    if adding is not None:
        computed(exchange.engine.events, "dW", exchange.name, products.add_grad_weight, adding, grad, rows, kept)
    return adding is not None


def _grad_to_add_to(ctx: Any, dtype: torch.dtype) -> torch.Tensor | None:
    """``.grad`` as (n, k), where autograd would only add this gradient of 16-bit ``dtype`` to it in fp32; else None."""
    kept = ctx.weight.grad
    if kept is None or kept.dtype != torch.float32 or dtype.itemsize != 2 or not kept.is_contiguous():
        return None
    if how(ctx, 1) != LATER or has_hooks(ctx.weight) or ctx.matmul.exchange.weight_phase is not None:
        return None
    if kept.is_cuda and torch.cuda.current_stream(kept.device) != torch.cuda.default_stream(kept.device):
        return None  # autograd adds on the stream of the parameter, and orders the two
    return kept.view(len(kept), -1)


def _gathering(
    matmul: DistributedMatmul, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> _Gathering | None:
    choice = matmul.products.gathering(rows, matmul.in_axis)
    return None if choice is None else _Gathering(matmul, choice, rows, weight, bias)


class _Gathering:
    """The forward product while its weight is gathered: called only if the engine has the block from nowhere else."""

    def __init__(
        self,
        matmul: DistributedMatmul,
        choice: Choice,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> None:
        self.matmul, self.choice, self.rows, self.weight, self.bias = matmul, choice, rows, weight, bias
        self.output: torch.Tensor | None = None

    def __call__(self) -> torch.Tensor:
        """The block; the product is in ``output``."""
        exchange, products = self.matmul.exchange, self.matmul.products
        shard = exchange.shard(self.weight, self.rows.dtype)
        with span(exchange.engine.events, "compute", "forward", "", exchange.name):
            self.output, block = products.gather_forward(self.choice, self.rows, shard, self.bias)
        return block


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
