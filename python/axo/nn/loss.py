"""Cross-entropy of logits whose vocabulary is split over x (with Tesseract, y); they are neither gathered nor copied.

    m = max_v l_v                          all-reduce (max) over x, fp32, one number a row
    s = sum_v exp(l_v - m)                 all-reduce (sum) over x, together with d (and t when smoothing)
    d = l_target - m;   t = sum_v (l_v - m)
    loss = log s - (1 - e) d - e t / V
    dl_v = exp(l_v - m) / s - (1 - e) [v = target] - e / V

(e = label_smoothing; m is never added to log s, which would cost digits where logits are large.) On GPUs statistics and
gradient are a kernel each (axo/nn/loss_kernels.py); elsewhere, and in fp64, they are taken in chunks of rows, so that
the largest temporary is one megabyte. The gradient goes into one tensor of the size of this rank's logits, or with
``inplace_backward`` into the logits themselves. Columns from ``vocab_size``
on are padding: they count for nothing and get a zero gradient.

Source: the vocabulary-parallel loss of Megatron-LM (arXiv:1909.08053, section 3); semantics of
``torch.nn.functional.cross_entropy``, with the classes in the last dim. Not here: class weights, class probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import nn

from axo.comm.connect import Communicators
from axo.matmul import cost
from axo.matmul.product import refuse_create_graph
from axo.overlap.autograd import wanted
from axo.placement import check_whole, chunk_bounds
from axo_kernels.device import gemm_kernels, runs_triton
from axo_kernels.gemm.layout import overlaps_itself

REDUCTIONS = ("mean", "sum", "none")
_CHUNK_ELEMENTS = 1 << 18  # 1 MiB in fp32: stays in the cache
_BLOCK = 4096  # columns that a program of a kernel takes at once


class CrossEntropyLoss(nn.Module):
    """``nn.CrossEntropyLoss`` for logits (..., V/Gx) and targets (...); arguments as for :func:`cross_entropy`."""

    def __init__(
        self,
        weight: None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        comms: Communicators,
        vocab_size: int | None = None,
        columns: int | None = None,
        inplace_backward: bool = False,
    ) -> None:
        super().__init__()
        _check(weight, reduction, label_smoothing)
        sizes = {"ignore_index": ignore_index, "vocab_size": vocab_size, "columns": columns}
        check_whole(type(self).__name__, None, {key: value for key, value in sizes.items() if value is not None})
        self.comms, self.ignore_index, self.reduction = comms, ignore_index, reduction
        self.label_smoothing, self.vocab_size, self.columns = label_smoothing, vocab_size, columns
        self.inplace_backward = inplace_backward

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """(..., V/Gx), (...) -> scalar, or (...) with reduction "none"."""
        return cross_entropy(
            input,
            target,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            comms=self.comms,
            vocab_size=self.vocab_size,
            columns=self.columns,
            inplace_backward=self.inplace_backward,
        )

    def cost(self, rows: int) -> list[cost.Call]:
        """Count its collectives on this rank, for ``rows`` targets of one data-parallel group."""
        smoothing = self.label_smoothing > 0
        return cost.cross_entropy(
            self.comms.grid,
            rows,
            smoothing=smoothing,
            arrangement=self.comms.arrangement,
            coords=self.comms.coords,
        )


def cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    comms: Communicators,
    vocab_size: int | None = None,
    columns: int | None = None,
    inplace_backward: bool = False,
) -> torch.Tensor:
    """Cross-entropy of this rank's rows; equal on all ranks that hold the same rows.

    Args:
        input: Logits (..., V/Gx), any float dtype; this rank's columns of a vocabulary cut as ``torch.chunk`` does.
        target: Ids (...), of the whole vocabulary.
        weight: Not supported; None.
        ignore_index, reduction, label_smoothing: As in torch. "mean" is over this rank's rows that are not ignored.
        comms: What ``axo.connect`` returned.
        vocab_size: Real vocabulary; columns from there on are padding. None: all columns are real.
        columns: Columns over all ranks; needed where they do not divide. None: this rank's times the axis' size.
        inplace_backward: Write the gradient into the logits' storage. Nothing may read the logits after backward.

    Returns:
        The loss, in fp32 (fp64 for fp64 logits). The mean over no rows is nan, as in torch.

    Raises:
        ValueError: An option or shape is wrong, or the ranks' columns are not a cut of ``columns``.
        RuntimeError: The logits are no floats, or the targets no int64 or int32. TypeError: One of them is no tensor.
        IndexError: A target is neither ``ignore_index`` nor of the vocabulary.
    """
    _check(weight, reduction, label_smoothing)
    for name, given in (("input", input), ("target", target)):
        if not isinstance(given, torch.Tensor):
            raise TypeError(f"cross_entropy: {name} is a {type(given).__name__}; pass a tensor")
    if input.dim() == 0 or input.shape[:-1] != target.shape:
        raise ValueError(
            f"cross_entropy: targets of shape {tuple(target.shape)} do not fit logits of shape {tuple(input.shape)};"
            " the classes are the last dim of the logits"
        )
    if target.dtype not in (torch.int64, torch.int32):
        raise RuntimeError(
            f"cross_entropy: the targets are {target.dtype}; pass ids of int64 or int32 (probabilities of classes are"
            " not supported)"
        )
    if not input.is_floating_point():
        raise RuntimeError(f"cross_entropy: the logits are {input.dtype}; they must be floating point")
    axis = comms.arrangement.inner
    columns = input.shape[-1] * comms.grid.size(axis) if columns is None else columns
    if inplace_backward and overlaps_itself(input):
        raise ValueError(
            f"cross_entropy: inplace_backward=True writes into the logits, and those of shape {tuple(input.shape)} have"
            f" strides {input.stride()}, so that elements share memory; leave it out, or pass logits.contiguous()"
        )
    options = VocabularyPart(
        comms, columns, vocab_size, ignore_index, label_smoothing, axis=axis, inplace=inplace_backward
    )
    losses = _CrossEntropy.apply(input, target, options)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum()


def _check(weight: torch.Tensor | None, reduction: str, label_smoothing: float) -> None:
    if weight is not None:
        raise ValueError("cross_entropy: class weights are not supported; use weight=None")
    if reduction not in REDUCTIONS:
        raise ValueError(f"cross_entropy: reduction={reduction!r} is not known; use one of {REDUCTIONS}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"cross_entropy: label_smoothing={label_smoothing} is not between 0 and 1")


class VocabularyPart:
    """This rank's columns of a vocabulary, and what the loss makes of them.

    Args:
        comms, columns, ignore_index, smoothing, inplace: As of :func:`cross_entropy`, smoothing: ``label_smoothing``.
        classes: Real columns, the first; None: all.
        axis: That splits the columns; None: none does.
        z_loss: The factor of a row's squared log sum exp.

    Raises:
        ValueError: There are more real columns than columns, or none.
    """

    def __init__(
        self,
        comms: Communicators,
        columns: int,
        classes: int | None,
        ignore_index: int,
        smoothing: float,
        *,
        axis: str | None,
        z_loss: float = 0.0,
        inplace: bool = False,
    ) -> None:
        self.comms, self.columns, self.classes = comms, columns, columns if classes is None else classes
        if not 0 < self.classes <= columns:
            raise ValueError(
                f"cross_entropy: vocab_size={classes} is not between 1 and the {columns} columns of the logits"
            )
        self.ignore_index, self.smoothing, self.z_loss, self.inplace = ignore_index, smoothing, z_loss, inplace
        self.axis = axis
        self.ranks = 1 if axis is None else comms.grid.size(axis)
        self.low, high = chunk_bounds(columns, self.ranks, 0 if axis is None else getattr(comms.coords, axis))
        self.width = high - self.low  # columns that this rank must have
        self.real = max(0, min(high, self.classes) - self.low)  # of them, those that are no padding

    def all_reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        """Reduce over the ranks that have the other columns."""
        return tensor if self.axis is None or self.ranks == 1 else self.comms.axis(self.axis).all_reduce(tensor, op)


def row_losses(
    logits: torch.Tensor, ids: torch.Tensor, options: VocabularyPart
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss of each row (0 where it is ignored), and what its gradient takes: a peak and a sum, (rows,) each."""
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    kept = ids != options.ignore_index
    _check_targets(ids, kept, options.classes)
    rows = ids.numel()
    peak = torch.full((rows + 3,), -torch.inf, dtype=wide, device=logits.device)
    sums = torch.zeros((3 if options.smoothing else 2, rows), dtype=wide, device=logits.device)
    if options.real and logits.shape[-1] == options.width:
        _statistics(logits.detach(), ids, peak, sums, options)
    own_peak, peak = _reduce_peak(peak, logits.shape[-1], options)
    _move_to_peak(sums, own_peak, peak, ids, options)
    sums = options.all_reduce(sums, "sum")
    total = sums[0].clone()
    losses = sums[0].log() - (1 - options.smoothing) * sums[1]
    if options.smoothing:
        losses -= options.smoothing / options.classes * sums[2]
    if options.z_loss:
        whole = total.log() + peak
        losses += options.z_loss * whole.square()
        total /= 1 + 2 * options.z_loss * whole  # the gradient's share of each column, that much larger
    return losses.masked_fill_(~kept, 0), peak, total


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, options: VocabularyPart) -> torch.Tensor:
        ids = target.reshape(-1).contiguous()  # kernels read them one after the other
        losses, peak, total = row_losses(logits, ids, options)
        ctx.options, ctx.used = options, False
        ctx.logits = logits.detach() if options.inplace else None  # not saved: its version is about to change
        ctx.save_for_backward(None if options.inplace else logits, ids, peak, total)
        return losses.view(target.shape)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        refuse_create_graph("cross_entropy")
        if not wanted(ctx, 0):
            return None, None, None
        options: VocabularyPart = ctx.options
        logits, ids, peak, total = ctx.saved_tensors
        if options.inplace:
            if ctx.used:
                raise RuntimeError("cross_entropy: inplace_backward=True has overwritten the logits; only one backward")
            logits = ctx.logits
        ctx.used, ctx.logits = True, None
        grad = logits if options.inplace else torch.empty_like(logits)
        scale = grad_output.reshape(-1).to(peak.dtype).masked_fill(ids == options.ignore_index, 0)
        logits_gradient(logits.detach(), grad, ids, peak, total, scale, options)
        return grad, None, None


def _statistics(
    logits: torch.Tensor, ids: torch.Tensor, peak: torch.Tensor, sums: torch.Tensor, options: VocabularyPart
) -> None:
    """Fill in this rank's peak and its sums (s, d and t around that peak), one a row."""
    rows = _rows_for_kernels(logits)
    if rows is None:
        for start, chunk in _row_chunks(logits):
            _chunk_statistics(chunk[:, : options.real], start, ids, peak, sums, options)
        return
    _kernels().row_statistics[(ids.numel(),)](
        rows, ids, peak, sums, *_steps(rows), sums.stride(0), options.real, options.low,
        SMOOTHING=options.smoothing > 0, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip


def logits_gradient(
    logits: torch.Tensor,
    grad: torch.Tensor,
    ids: torch.Tensor,
    peak: torch.Tensor,
    total: torch.Tensor,
    scale: torch.Tensor,
    options: VocabularyPart,
) -> None:
    """Fill in the gradient; ``scale`` is that of each row's loss, 0 where it is ignored."""
    sure, even = 1 - options.smoothing, options.smoothing / options.classes
    rows, out = _rows_for_kernels(logits), _rows_for_kernels(grad)
    if rows is not None and out is not None:
        width = rows.shape[2]
        _kernels().row_gradient[(ids.numel(), -(-width // _BLOCK))](
            rows, out, ids, peak, total, scale, *_steps(rows), *_steps(out), options.real, width, options.low,
            sure, even, BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
        return
    local = ids - options.low
    mine = (local >= 0) & (local < options.real)
    local.masked_fill_(~mine, 0)
    hit = torch.where(mine, -sure * scale, 0)
    for (start, source), (_, target) in zip(_row_chunks(logits), _row_chunks(grad), strict=True):
        part = slice(start, start + source.shape[0])
        share = source[:, : options.real].to(peak.dtype, copy=True)
        share.sub_(peak[part, None]).exp_().div_(total[part, None])
        if options.smoothing:
            share.sub_(even)
        share.mul_(scale[part, None])
        if options.real:
            share.scatter_add_(1, local[part, None], hit[part, None])
        # An ignored row may hold anything, inf too; 0 * inf must not leak.
        share.masked_fill_((scale[part] == 0)[:, None], 0)
        target[:, : options.real] = share
        target[:, options.real :].zero_()


def _rows_for_kernels(tensor: torch.Tensor) -> torch.Tensor | None:
    """(groups, rows, V) of (..., V), a view; None where kernels cannot take it."""
    if not runs_triton(tensor.device) or tensor.dtype == torch.float64 or not tensor.numel() or tensor.stride(-1) != 1:
        return None
    if tensor.is_neg():  # a kernel would read what lies in memory
        return None
    for groups in (1, tensor.shape[0]):  # the second for logits without their last position, (B, T, V)[:, :-1]
        try:
            return tensor.view(groups, -1, tensor.shape[-1])
        except RuntimeError:  # these dims do not merge
            continue
    return None


def _steps(rows: torch.Tensor) -> tuple[int, int, int]:
    """How many rows a group has, and from one group, and one row, to the next."""
    return rows.shape[1], rows.stride(0), rows.stride(1)


@cache
def _kernels() -> ModuleType:
    assert gemm_kernels() is not None  # there is Triton
    from axo.nn import loss_kernels

    return loss_kernels


def _chunk_statistics(
    chunk: torch.Tensor, start: int, ids: torch.Tensor, peak: torch.Tensor, sums: torch.Tensor, options: VocabularyPart
) -> None:
    """Fill in this rank's peak and its sums (d and t around that peak) for the rows of one chunk (r, real columns)."""
    part = slice(start, start + chunk.shape[0])
    wide = chunk.to(peak.dtype, copy=True)
    torch.amax(wide, 1, out=peak[part])
    local = ids[part] - options.low
    mine = (local >= 0) & (local < options.real)
    wide.sub_(_finite(peak[part])[:, None])
    picked = wide.gather(1, local.masked_fill(~mine, 0)[:, None]).squeeze(1)
    sums[1, part] = torch.where(mine, picked, 0)
    if options.smoothing:
        sums[2, part] = wide.sum(1)
    sums[0, part] = wide.exp_().sum(1)


def _move_to_peak(
    sums: torch.Tensor, own_peak: torch.Tensor, peak: torch.Tensor, ids: torch.Tensor, options: VocabularyPart
) -> None:
    """Turn sums around this rank's peak into sums around the peak over x."""
    down = _finite(own_peak) - peak
    local = ids - options.low
    sums[0] *= down.exp()
    sums[1] += torch.where((local >= 0) & (local < options.real), down, 0)
    if options.smoothing:
        sums[2] += options.real * down


def _finite(peak: torch.Tensor) -> torch.Tensor:
    """Peaks to take off: where all of this rank's columns are -inf, or there are none, nothing."""
    return torch.where(peak == -torch.inf, 0, peak)


def _reduce_peak(peak: torch.Tensor, width: int, options: VocabularyPart) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's peaks and those over x. Three more numbers ride along, so that all ranks agree on bad columns."""
    own = peak[:-3].clone()
    wrong = width != options.width or options.classes > options.columns
    for place, number in enumerate((float(wrong), options.columns, -options.columns), len(own)):
        peak[place : place + 1].fill_(number)  # peak[place] = number would copy from the host, and wait for the GPU
    peak = options.all_reduce(peak, "max")
    agreed = (peak[-3] == 0) & (peak[-2] == -peak[-1])
    if agreed.device.type != "cpu":
        torch._assert_async(agreed)
    elif not bool(agreed):
        raise ValueError(
            f"cross_entropy: this rank's {width} columns of logits are not its part of {options.columns} columns over"
            f" {options.axis}={options.ranks} with vocab_size={options.classes}; pass columns= with all ranks' columns"
        )
    return own, peak[:-3]


def _check_targets(ids: torch.Tensor, kept: torch.Tensor, classes: int) -> None:
    valid = ~kept | ((ids >= 0) & (ids < classes))
    if ids.device.type != "cpu":
        torch._assert_async(valid.all())
    elif not bool(valid.all()):
        bad = int(ids[~valid][0])
        raise IndexError(f"cross_entropy: target {bad} is out of range; the vocabulary has {classes} entries")


def _row_chunks(tensor: torch.Tensor, start: int = 0) -> Iterator[tuple[int, torch.Tensor]]:
    """Views (r, V) of consecutive rows of (..., V), with the number of their first row; never a copy."""
    if not tensor.numel():
        return
    if tensor.dim() == 1:
        tensor = tensor.unsqueeze(0)
    if tensor.dim() > 2:
        try:
            tensor = tensor.view(-1, tensor.shape[-1])
        except RuntimeError:  # the leading dims do not merge: one at a time
            for part in tensor.unbind(0):
                yield from _row_chunks(part, start)
                start += part[..., 0].numel()
            return
    step = max(1, _CHUNK_ELEMENTS // max(1, tensor.shape[-1]))
    for first in range(0, tensor.shape[0], step):
        yield start + first, tensor[first : first + step]
