"""Cross-entropy of a head whose logits never exist whole: product, loss and gradients together, in chunks of rows.

    each chunk of r rows    L = I W^T + b               (r, V/Gx), summed over y;  L = c tanh(L / c) with a soft cap
                            losses                      as ``axo.nn.cross_entropy`` takes them, two all-reduces over x
                            dL, in the memory of L      for a loss that counts each row once
                            dI = dL W;  dW += dL^T I;  db += sum of dL over rows       dW and db in fp32
    backward                all three times the gradient of the summed loss; from there on as those of any layer

So a step multiplies as often as with whole logits, and instead of (tokens, V/Gx) keeps dI, as large as the input, and
dW, as large as the block of the weight. With reduction "none" the gradients need each row's factor: backward goes
through the chunks again. A z-loss adds z (log sum exp L)^2 to each row. What stands around a head (LoRA, scales) makes
L = scale (I W^T + b + mid factor^T + shift) of its logits (``Beside``), of which only ``mid`` is made for all rows.

Source: Liger's fused linear cross-entropy; ``torch.nn.functional.linear_cross_entropy`` (torch 2.15). Goldfish loss is
one of targets (``axo.nn.goldfish``). Not here: class weights, probabilities, a head whose tokens or tables another
algorithm cuts (Tesseract, SUMMA).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, cast

import torch

from axo import check
from axo.matmul import cost
from axo.matmul.activations import LOGITS_CHUNK
from axo.matmul.product import DistributedMatmul, check_unchanged, no_autocast, refuse_create_graph
from axo.matmul.products import compute_dtype
from axo.nn.linear import Linear
from axo.nn.loss import REDUCTIONS, VocabularyPart, logits_gradient, row_losses
from axo.overlap.autograd import SKIP, version_of
from axo.placement import chunk_size

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Beside(NamedTuple):
    """What a module around a head adds to its logits; gradients of these are those of this rank's rows and columns.

    Attributes:
        mid: ``(rows, r)``, whole on every rank; with ``factor``, or None.
        factor: ``(V/Gx, r)``.
        shift: ``(V/Gx,)``; with ``scale``, or None.
        scale: ``(V/Gx,)``.
    """

    mid: torch.Tensor | None = None
    factor: torch.Tensor | None = None
    shift: torch.Tensor | None = None
    scale: torch.Tensor | None = None

    def add_to(self, logits: torch.Tensor, part: slice) -> torch.Tensor | None:
        """Make the logits of these rows, in place, of what the head alone gives; return what ``scale`` multiplied."""
        if self.mid is not None and self.factor is not None:
            logits.addmm_(self.mid[part], self.factor.T)
        if self.shift is None or self.scale is None:
            return None
        shifted = logits.add_(self.shift).clone()
        logits.mul_(self.scale)
        return shifted

    def add_gradients(self, grad: torch.Tensor, shifted: torch.Tensor | None, part: slice, into: Beside) -> None:
        """Add up those of these rows, the gradient of whose logits becomes, in place, that of what the head gives."""
        if self.scale is not None and shifted is not None and into.scale is not None and into.shift is not None:
            into.scale.add_((grad * shifted).sum(0, dtype=into.scale.dtype))
            into.shift.add_(grad.mul_(self.scale).sum(0, dtype=into.shift.dtype))
        if self.mid is not None and self.factor is not None and into.mid is not None and into.factor is not None:
            into.mid[part] = grad @ self.factor
            into.factor.add_(grad.T @ self.mid[part])


class Around(Protocol):
    """A module around a head, whose own parameters reduce their gradients."""

    linear: Linear

    def beside(self, rows: torch.Tensor) -> Beside:
        """What it adds for rows ``(rows, in_features/Gin)``."""


def linear_cross_entropy(
    input: torch.Tensor,
    head: Linear | Around,
    target: torch.Tensor,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    vocab_size: int | None = None,
    chunk_rows: int | None = None,
) -> torch.Tensor:
    """``cross_entropy(head(input), target)`` of this rank's rows, without the logits of all of them at a time.

    Equal on all ranks that hold the same rows, which must call it together. One backward pass.

    Args:
        input: What the head takes (..., in_features/Gin).
        head: The layer whose logits they would be, or LitGPT's adapter around it; its parameters get their gradients as
            in any layer.
        target: Ids (...), of the whole vocabulary.
        reduction, ignore_index, label_smoothing: As in torch. "mean" is over this rank's rows that are not ignored.
        z_loss: The factor of a row's squared log sum exp.
        softcap: c in c tanh(l / c), which logits become before the loss; None: they stay.
        vocab_size: Real vocabulary; columns from there on are padding. None: all are real.
        chunk_rows: Rows of logits that exist at a time; None: so many that they take 8,388,608 elements.

    Returns:
        The loss, in fp32 (fp64 for fp64 input).

    Raises:
        ValueError: An option or a shape is wrong, or the head has hooks, or none of its vocabulary over one axis.
        RuntimeError: The targets are no int64 or int32. IndexError: One is not of the vocabulary.
    """
    check.one_of("linear_cross_entropy: reduction", reduction, REDUCTIONS)
    check.number("linear_cross_entropy: z_loss", z_loss, least=0)
    if softcap is not None:
        check.number("linear_cross_entropy: softcap", softcap, above=0)
    linear = _linear_of(head)
    if not isinstance(linear, Linear):
        raise ValueError(f"linear_cross_entropy: {misfit(head)}; pass an axo.nn.Linear")
    linear.comms.arrangement.only_axonn("linear_cross_entropy")
    if unfit := misfit(head):
        raise ValueError(f"linear_cross_entropy: {unfit}; call the head, then axo.nn.cross_entropy")
    rows = linear._cut(input)
    if rows.dim() == 0 or rows.shape[:-1] != target.shape or rows.shape[-1] != linear.weight.shape[1]:
        raise ValueError(
            f"linear_cross_entropy: input of shape {tuple(input.shape)} and targets of shape {tuple(target.shape)} do"
            f" not fit: the input must end in {linear.weight.shape[1]}, this rank's part of {linear.in_features}"
            " features"
        )
    if target.dtype not in (torch.int64, torch.int32):
        raise RuntimeError(f"linear_cross_entropy: the targets are {target.dtype}; pass ids of int64 or int32")
    vocabulary = VocabularyPart(
        linear.comms, linear.out_features, vocab_size, ignore_index, label_smoothing, axis=linear.out_axis,
        z_loss=z_loss,
    )  # fmt: skip
    plan = _Chunks(linear.matmul, vocabulary, softcap, _step(linear, chunk_rows), together=reduction != "none")
    ids, rows = target.reshape(-1).contiguous(), rows.reshape(-1, rows.shape[-1])
    beside = Beside() if linear is head else cast(Around, head).beside(rows)
    result = _LinearCrossEntropy.apply(rows, linear.weight, linear.bias, ids, plan, torch.is_grad_enabled(), *beside)
    if reduction == "none":
        return result.view(target.shape)
    if reduction == "sum":
        return result
    counted = (target != ignore_index).sum()
    return (result / counted.clamp(min=1)).masked_fill(counted == 0, math.nan)  # as in torch, whose gradients are zeros


def misfit(head: object) -> str:
    """Why a head's loss cannot be taken by :func:`linear_cross_entropy`; empty: it can."""
    linear = _linear_of(head)
    if not isinstance(linear, Linear):
        return f"the head is a {type(head).__name__}"
    if linear.comms.arrangement.name != "axonn":
        return f"{linear.label()} is of algorithm {linear.comms.arrangement.name!r}"
    reasons = {
        "multiplies in fp8": linear.matmul.exchange.fp8 is not None,
        "stores its weight the other way round": type(linear)._matrix is not Linear._matrix,
        "has row blocks or split tokens": linear.out_blocks is not None or linear.scatters_tokens,
        "has a vocabulary over more than one axis": linear.matmul.out_axis != linear.out_axis,
        "has hooks, which would see no logits": any(getattr(each, kind) for each in {head, linear} for kind in _HOOKS),
    }
    return next((f"{linear.label()} {reason}" for reason, so in reasons.items() if so), "")


def _linear_of(head: object) -> object:
    return cast(Around, head).linear if hasattr(head, "beside") else head


@contextmanager
def without_head(
    model: Any, *stages: Any, loss: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> Iterator[None]:
    """A forward pass in it ends with what ``model.lm_head`` takes: its product and the soft cap are the loss's to make.

    Args:
        stages: Parts of the model, which may have configurations of their own.
        loss: What is to be done with it there, and returned.
    """
    configs = [part.config for part in (model, *stages)]
    caps = [(config, cap) for config in configs if (cap := getattr(config, "final_logit_softcapping", None))]
    model.lm_head.forward = loss or _same
    for config, _ in caps:
        config.final_logit_softcapping = None
    try:
        yield
    finally:
        del model.lm_head.forward
        for config, cap in caps:
            config.final_logit_softcapping = cap


def _same(input: torch.Tensor) -> torch.Tensor:
    return input


def linear_cross_entropy_cost(
    head: Linear, rows: int, *, itemsize: int = 4, label_smoothing: bool = False, chunk_rows: int | None = None
) -> list[cost.Call]:
    """Count the collectives of one step of head and loss on this rank, for ``rows`` rows of a data-parallel group.

    Args:
        head, chunk_rows: As of :func:`linear_cross_entropy`, with reduction "mean" or "sum".
        rows: m, those of all ranks along z together.
        itemsize: Bytes an element of what the head computes in.
        label_smoothing: Whether there is any.
    """
    calls = [
        call
        for call in head.cost(rows, itemsize=itemsize)
        if call.purpose != cost.REDUCE_OUTPUT and (call.phase, call.purpose) != (cost.BACKWARD, cost.GATHER_WEIGHT)
    ]
    left, step, width = head._rows(rows), _step(head, chunk_rows), head.matmul.exchange.block_rows
    while left > 0:
        size = min(step, left)
        if head.in_axis is not None:
            calls.append(
                cost.Call(cost.FORWARD, "all_reduce", head.in_axis, size * width, itemsize, cost.REDUCE_OUTPUT)
            )
        if head.out_axis is not None:
            for elements in (size + 3, (3 if label_smoothing else 2) * size):
                calls.append(cost.Call(cost.FORWARD, "all_reduce", head.out_axis, elements, 4, cost.STATISTICS))
        left -= size
    return cost.issued(calls, head.comms.grid)


def _step(head: Linear, chunk_rows: int | None) -> int:
    if chunk_rows is not None:
        return check.whole_number("linear_cross_entropy: chunk_rows", chunk_rows, least=1)
    widest = chunk_size(head.out_features, head.matmul.exchange.sizes[head.out_axis])  # all ranks cut alike
    return max(1, LOGITS_CHUNK // max(1, widest))


class _HeadGradients(NamedTuple):
    """Of a loss: of the rows, of the block of the weight, of the bias, of what is beside; None: nobody wants it."""

    rows: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    beside: Beside


class _Chunks:
    """How the rows of one call go through head and loss.

    Args:
        matmul: The head's product.
        vocabulary: This rank's columns, and the options of the loss.
        softcap: As of :func:`linear_cross_entropy`.
        step: Rows of a chunk.
        together: Gradients come with the losses, of a loss that counts each row once.
    """

    def __init__(
        self, matmul: DistributedMatmul, vocabulary: VocabularyPart, softcap: float | None, step: int, *, together: bool
    ) -> None:
        self.matmul, self.vocabulary, self.softcap = matmul, vocabulary, softcap
        self.step, self.together = step, together

    def losses(
        self,
        rows: torch.Tensor,
        block: torch.Tensor,
        bias: torch.Tensor | None,
        ids: torch.Tensor,
        scale: torch.Tensor | None,
        wants: tuple[bool, bool, bool],
        beside: Beside,
    ) -> tuple[torch.Tensor, _HeadGradients]:
        """The loss of each row (r,), and the gradients of their sum, each times its ``scale``; None: no gradients."""
        wide = torch.promote_types(rows.dtype, torch.float32)
        losses = rows.new_zeros(ids.numel(), dtype=wide)
        products, wants = self.matmul.products, wants if scale is not None else (False, False, False)
        grads = _HeadGradients(
            torch.empty_like(rows) if wants[0] else None,
            torch.zeros_like(block, dtype=wide) if wants[1] else None,
            torch.zeros_like(bias, dtype=wide) if wants[2] and bias is not None else None,
            Beside(*(each if each is None else torch.zeros_like(each, dtype=wide) for each in beside)),
        )
        for part in self._parts(ids.numel()):
            logits = self._product(rows[part], block, bias)
            shifted, slope = beside.add_to(logits, part), self._cap(logits, scale is not None)
            losses[part], peak, total = row_losses(logits, ids[part], self.vocabulary)
            if scale is None:
                continue
            logits_gradient(logits, logits, ids[part], peak, total, scale[part], self.vocabulary)
            if slope is not None:
                logits.mul_(slope)
            beside.add_gradients(logits, shifted, part, grads.beside)
            if grads.rows is not None:
                grads.rows[part] = products.grad_input(logits, block)
            if grads.weight is not None and grads.weight.dtype == logits.dtype:
                grads.weight.addmm_(logits.T, rows[part])
            elif grads.weight is not None and not products.add_grad_weight(logits, rows[part], grads.weight):
                grads.weight.add_(products.grad_weight(logits, rows[part]))
            if grads.bias is not None:
                grads.bias.add_(logits.sum(0, dtype=wide))
        return losses, grads

    def _parts(self, rows: int) -> Iterator[slice]:
        return (slice(start, min(start + self.step, rows)) for start in range(0, rows, self.step))

    def _product(self, rows: torch.Tensor, block: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``I W^T + b`` of a chunk."""
        sums = self.matmul.sums_output
        logits = self.matmul.products.forward(rows, block, None if sums else bias)
        if sums:
            logits = self.matmul.exchange.reduce(logits, self.matmul.in_axis)
            logits = logits if bias is None else logits.add_(bias)
        return logits

    def _cap(self, logits: torch.Tensor, recorded: bool) -> torch.Tensor | None:
        """Cap a chunk's logits in place; the slope of the cap there, if gradients are to come."""
        if self.softcap is None:
            return None
        logits.div_(self.softcap).tanh_()
        slope = 1 - logits.square() if recorded else None
        logits.mul_(self.softcap)
        return slope


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        ids: torch.Tensor,
        chunks: _Chunks,
        recording: bool,
        *beside: torch.Tensor | None,
    ) -> torch.Tensor:
        dtype, exchange = compute_dtype(input), chunks.matmul.exchange
        rows = input.to(dtype)
        wants, any_wanted = tuple(ctx.needs_input_grad[:3]), any(ctx.needs_input_grad)
        again = recording and not chunks.together
        block, ctx.held = exchange.forward_block(weight, dtype, recording=recording, wanted=again and any_wanted)
        kept = (ids != chunks.vocabulary.ignore_index).to(torch.promote_types(dtype, torch.float32))
        scale = kept if recording and chunks.together and any_wanted else None
        around = Beside(*(each if each is None else each.to(dtype) for each in beside[:2]), *beside[2:])
        with no_autocast(rows.device):
            cast = None if bias is None else bias.to(dtype)
            losses, ctx.grads = chunks.losses(rows, block, cast, ids, scale, wants, around)
        ctx.chunks, ctx.dtype, ctx.used, ctx.weight, ctx.bias = chunks, dtype, False, weight, bias
        ctx.version, ctx.input_dtype, ctx.wants = version_of(weight), input.dtype, wants
        ctx.save_for_backward(*((rows, ids, *around) if again else ()))
        return losses.sum() if chunks.together else losses

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_create_graph("linear_cross_entropy")
        chunks: _Chunks = ctx.chunks
        matmul, exchange, weight, bias = chunks.matmul, chunks.matmul.exchange, ctx.weight, ctx.bias
        check_unchanged("linear_cross_entropy", weight, ctx.version)
        how_input, how_weight, how_bias = exchange.hows(ctx)
        with no_autocast(grad_output.device):
            grads = _scaled(ctx, grad_output) if chunks.together else _again(ctx, grad_output)
            summing = None
            if how_input != SKIP:
                assert grads.rows is not None
                summing = exchange.start_reduce(grads.rows, matmul.out_axis if matmul.sums_input_grad else None)
            grad_weight = grad_bias = None
            if how_weight != SKIP:
                grad_weight = exchange.gradient(how_weight, weight, lambda: _send(ctx, how_weight, grads.weight))
            if how_bias != SKIP:
                assert grads.bias is not None
                vector = grads.bias.to(bias.dtype)
                grad_bias = exchange.gradient(how_bias, bias, lambda: exchange.vector_gradient(how_bias, bias, vector))
            grad_input = None if summing is None else summing.wait().to(ctx.input_dtype)
        return grad_input, grad_weight, grad_bias, None, None, None, *grads.beside


def _scaled(ctx: Any, grad_output: torch.Tensor) -> _HeadGradients:
    """The gradients that came with the losses, times that of their sum, in place."""
    if ctx.used:
        raise RuntimeError("linear_cross_entropy: its gradients have been used up; only one backward")
    ctx.used, grads = True, ctx.grads
    ctx.grads = None
    for grad in (*grads[:3], *grads.beside):
        if grad is not None:
            grad.mul_(grad_output)
    return grads


def _again(ctx: Any, grad_output: torch.Tensor) -> _HeadGradients:
    """The gradients of losses that were given one by one."""
    chunks: _Chunks = ctx.chunks
    rows, ids, *beside = ctx.saved_tensors
    block = chunks.matmul.exchange.backward_block(ctx.held, ctx.weight, ctx.dtype)
    scale = grad_output.reshape(-1).masked_fill(ids == chunks.vocabulary.ignore_index, 0)
    cast = None if ctx.bias is None else ctx.bias.to(ctx.dtype)
    return chunks.losses(rows, block, cast, ids, scale, ctx.wants, Beside(*beside))[1]


def _send(ctx: Any, how: str, grad: torch.Tensor | None) -> torch.Tensor | None:
    """The gradient of the weight, on its way in the dtype of the product; None: it comes to .grad later."""
    assert grad is not None
    exchange, like = ctx.chunks.matmul.exchange, torch.empty(0, dtype=ctx.dtype, device=grad.device)
    into, block = exchange.gradient_buffer(how, ctx.weight, grad.shape[1], like)
    block.copy_(grad)
    return exchange.weight_gradient(how, ctx.weight, into)
