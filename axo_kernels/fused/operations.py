"""Products fused with communication, as autograd functions; strategies.py does the work.

    matmul_all_reduce       out = sum over ranks of A B             Algorithm 1's forward over y (NT)
                            dI = sum over grad_comm of dO W, its all-reduce overlapped with the product dW = dO^T I
    all_gather_matmul       out = A B with one operand gathered     weight shards over z, or activations
    matmul_reduce_scatter   out = this rank's rows of the sum       dW over z, or sequence-parallel outputs

Gradients follow the convention of tensor parallelism: a result that is the same on every rank has one gradient, also
the same on every rank, so the adjoint of the sum is the identity; the adjoint of a gather is a sum scattered, and the
other way round. Backward passes use the strategy and the chunk count of the forward pass (but for ``"push"``, whose
gathers are serial there). bf16, fp16, fp32, and under autocast its dtype; first derivatives only (create_graph=True is
refused). No tuning here: ``strategy`` and ``chunks`` are what is asked for, and what runs.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from axo_kernels.comm.communicator import FusedCommunicator
from axo_kernels.fused.strategies import (
    FusedPlan,
    gathered,
    gathers,
    run_all_gather,
    run_reduce_scatter,
    start_all_reduce,
)
from axo_kernels.gemm.layout import autocast, check_layout
from axo_kernels.gemm.matmul import BACKWARD, matmul


def matmul_all_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    comm: FusedCommunicator,
    layout: str = "NT",
    bias: torch.Tensor | None = None,
    *,
    grad_comm: FusedCommunicator | None = None,
    strategy: str = "serial",
    chunks: int = 4,
) -> torch.Tensor:
    """Multiply and sum over the ranks: ``(M, N)``, the same on every rank.

    Args:
        a: ``(..., M, K)`` (TN: ``(K, M)``).
        b: ``(N, K)`` for NT, ``(K, N)`` otherwise.
        comm: From ``axo_kernels.adapt``; the product's K is split over its ranks.
        bias: ``(N,)``, the same on every rank; added once.
        grad_comm: Ranks that share ``a``: its gradient is summed over them (Algorithm 1: x for a normal layer).
        strategy: ``"serial"``, ``"split"``, ``"signal"`` or ``"push"``.
        chunks: Pieces of M; ignored by ``"serial"`` and ``"push"``.
    """
    if grad_comm is not None:
        _check(grad_comm, "matmul_all_reduce", "grad_comm")
    a, b, lead = _operands("matmul_all_reduce", a, b, comm, layout, bias)
    out: torch.Tensor = _MatmulAllReduce.apply(a, b, bias, comm, grad_comm, layout, FusedPlan(strategy, chunks))
    return out if lead is None else out.view(*lead, out.shape[-1])


def all_gather_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    comm: FusedCommunicator,
    layout: str = "NT",
    bias: torch.Tensor | None = None,
    *,
    gather: str = "b",
    keep: bool = True,
    strategy: str = "serial",
    chunks: int = 4,
) -> torch.Tensor:
    """Gather one operand along its rows and multiply.

    Args:
        a: ``(..., M, K)``; with ``gather="a"`` this rank's rows of it.
        b: ``(N, K)`` for NT, ``(K, N)`` for NN; with ``gather="b"`` (NT only) this rank's rows of it.
        comm: From ``axo_kernels.adapt``.
        bias: ``(N,)`` of the whole result.
        gather: ``"b"``: weight shards; ``"a"``: activations, whose gathered rows stand in rank order.
        keep: Keep what was gathered for the backward pass; otherwise it is gathered again there.
        strategy, chunks: As in :func:`matmul_all_reduce`; chunks cut the shard's rows.

    Returns:
        ``(..., M, size * N)`` with ``gather="b"``, ``(size * M, ..., N)`` with ``gather="a"``.
    """
    a, b, lead = _operands("all_gather_matmul", a, b, comm, layout, bias, gathered=gather == "b")
    out: torch.Tensor = _AllGatherMatmul.apply(a, b, bias, comm, layout, gather, keep, FusedPlan(strategy, chunks))
    if lead is None:
        return out
    first = lead[0] * comm.size if gather == "a" else lead[0]
    return out.view(first, *lead[1:], out.shape[-1])


def matmul_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    comm: FusedCommunicator,
    layout: str = "NT",
    *,
    strategy: str = "serial",
    chunks: int = 4,
) -> torch.Tensor:
    """Multiply, sum over the ranks, keep this rank's block of rows: ``(M / size, N)``.

    Args:
        a: ``(..., M, K)`` (TN: ``(K, M)``); M (all leading dims together) must divide over the ranks.
        b: ``(N, K)`` for NT, ``(K, N)`` otherwise.
        comm: From ``axo_kernels.adapt``.
        strategy, chunks: As in :func:`matmul_all_reduce`; chunks cut the block's rows.

    Raises:
        ValueError: M does not divide over the ranks, or has fewer rows than chunks.
    """
    a, b, lead = _operands("matmul_reduce_scatter", a, b, comm, layout)
    if lead is not None and lead[0] % comm.size:
        raise ValueError(
            f"matmul_reduce_scatter: dim 0 of a has {lead[0]} rows, which do not divide over {comm.size} ranks; pad to "
            f"{-(-lead[0] // comm.size) * comm.size}"
        )
    out: torch.Tensor = _MatmulReduceScatter.apply(a, b, comm, layout, FusedPlan(strategy, chunks))
    return out if lead is None else out.view(lead[0] // comm.size, *lead[1:], out.shape[-1])


def _operands(
    operation: str,
    a: torch.Tensor,
    b: torch.Tensor,
    comm: FusedCommunicator,
    layout: str,
    bias: torch.Tensor | None = None,
    gathered: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Size | None]:
    """Check the arguments; return a as a matrix, b, and a's leading dims where it had more than two.

    ``gathered``: b is one rank's shard of the columns that ``bias`` belongs to.
    """
    check_layout(layout)
    _check(comm, operation)
    if b.dim() != 2:
        raise ValueError(f"{operation}: b has {b.dim()} dims; give one matrix, 2 dims")
    a, b = autocast(a, b)
    columns = b.shape[0 if layout == "NT" else -1] * (comm.size if gathered else 1)
    if bias is not None and tuple(bias.shape) != (columns,):
        raise ValueError(f"{operation}: bias has shape {tuple(bias.shape)}; use ({columns},), one value a column")
    if a.dim() == 2:
        return a, b, None
    if layout == "TN" or a.dim() < 2:
        raise ValueError(f"{operation}: a has {a.dim()} dims; {layout} takes {'2' if layout == 'TN' else 'at least 2'}")
    return a.flatten(0, -2), b, a.shape[:-1]


def _check(comm: FusedCommunicator, operation: str, name: str = "comm") -> None:
    if not isinstance(comm, FusedCommunicator):
        raise ValueError(
            f"{operation}: {name} is a {type(comm).__name__}; wrap it once with axo_kernels.adapt(...) and keep the "
            f"result, which holds workspaces and records"
        )


def _refuse_create_graph(operation: str) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{operation}: backward(create_graph=True) is not supported, since the collectives of the backward pass "
            "have no derivative of their own; run it without create_graph"
        )


def _bias_gradient(grad: torch.Tensor, bias_dtype: torch.dtype | None, wanted: bool) -> torch.Tensor | None:
    return grad.sum(0, dtype=torch.float32).to(bias_dtype) if wanted and bias_dtype is not None else None


class _MatmulAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, bias, comm, grad_comm, layout, way):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(a, b)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.rest = (grad_comm, layout, way)
        out, finish = start_all_reduce(a, b, comm, layout, way, bias)
        finish()
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        _refuse_create_graph("matmul_all_reduce")
        a, b = ctx.saved_tensors
        grad_comm, layout, way = ctx.rest
        wants_a, wants_b, wants_bias = ctx.needs_input_grad[:3]
        grad_a = grad_b = finish = None
        operands = {"a": a, "b": b, "grad": grad.contiguous()}
        (first, second, mode), (left, right, other_mode) = BACKWARD[layout]
        if wants_a and grad_comm is not None and grad_comm.size > 1:
            # Its chunks travel while the weight gradient is computed.
            rows = operands[first].shape[-1 if mode == "TN" else -2]
            fitting = replace(way, chunks=max(1, min(way.chunks, rows)))
            grad_a, finish = start_all_reduce(operands[first], operands[second], grad_comm, mode, fitting)
        elif wants_a:
            grad_a = matmul(operands[first], operands[second], mode)
        try:
            if wants_b:
                grad_b = matmul(operands[left], operands[right], other_mode)
            grad_bias = _bias_gradient(grad, ctx.bias_dtype, wants_bias)
        except BaseException:  # out of memory, say: the next operation finds the communicator as it was
            if grad_comm is not None:
                grad_comm.abandon()
            raise
        if finish is not None:
            finish()
        return grad_a, grad_b, grad_bias, None, None, None, None


class _AllGatherMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, bias, comm, layout, gather, keep, way):  # type: ignore[no-untyped-def]
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.rest = (comm, layout, gather, way)
        wanted = keep and any(ctx.needs_input_grad[:2])
        out, full = run_all_gather(a, b, comm, layout, gather, way, bias, keep=wanted)
        ctx.kept = full is not None
        shard, other = (a, b) if gather == "a" else (b, a)
        ctx.save_for_backward(full if full is not None else shard, other)
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        _refuse_create_graph("all_gather_matmul")
        kept, other = ctx.saved_tensors
        comm, layout, gather, way = ctx.rest
        grad = grad.contiguous()
        if not ctx.kept and ctx.needs_input_grad[1 if gather == "a" else 0]:
            kept = gathered(kept.contiguous(), comm)
        operands = {"a": kept, "b": other} if gather == "a" else {"a": other, "b": kept}
        operands["grad"] = grad
        gradients: list[torch.Tensor | None] = [None, None]
        for index, (left, right, mode) in enumerate(BACKWARD[layout]):
            if not ctx.needs_input_grad[index]:
                continue
            if "ab"[index] == gather:
                gradients[index] = run_reduce_scatter(operands[left], operands[right], comm, mode, way)
            else:
                gradients[index] = matmul(operands[left], operands[right], mode)
        grad_bias = _bias_gradient(grad, ctx.bias_dtype, ctx.needs_input_grad[2])
        return *gradients, grad_bias, None, None, None, None, None


class _MatmulReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, comm, layout, way):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(a, b)
        ctx.rest = (comm, layout, way)
        return run_reduce_scatter(a, b, comm, layout, way)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        _refuse_create_graph("matmul_reduce_scatter")
        a, b = ctx.saved_tensors
        comm, layout, way = ctx.rest
        way = way.of_gather
        operands = {"a": a, "b": b, "grad": grad.contiguous()}
        full: torch.Tensor | None = None
        gradients: list[torch.Tensor | None] = [None, None]
        for index, (left, right, mode) in enumerate(BACKWARD[layout]):
            if not ctx.needs_input_grad[index]:
                continue
            gather = "a" if left == "grad" else "b"
            if full is None and gathers(gather, mode):
                # The gathered gradient serves the other product too.
                gradients[index], full = run_all_gather(operands[left], operands[right], comm, mode, gather, way)
                continue
            if full is None:
                full = gathered(operands["grad"], comm)
            whole = operands | {"grad": full}
            gradients[index] = matmul(whole[left], whole[right], mode)
        return *gradients, None, None, None
