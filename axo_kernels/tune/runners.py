"""How each choice of the tuner is run: torch's product, one of copied operands, a Triton kernel, a fused operation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from axo_kernels.comm.adapters import SoloCommunicator
from axo_kernels.comm.communicator import FusedCommunicator
from axo_kernels.device import target_of
from axo_kernels.fused.fp8 import run_all_gather_fp8
from axo_kernels.fused.strategies import FusedPlan, run_all_gather, run_reduce_scatter, start_all_reduce
from axo_kernels.gemm.layout import as_row_major, laid_out, product_of, relayout, share_memory
from axo_kernels.gemm.matmul import Epilogue, describable, matmul, triton_matmul, vendor_matmul
from axo_kernels.gemm.repeat import Prepared
from axo_kernels.gemm.tiles import Config, accumulating
from axo_kernels.tune.choice import Choice

Runner = Callable[..., torch.Tensor]


def runner(choice: Choice, stored: str) -> Callable[..., torch.Tensor]:
    """Return a function of the stored operands that computes their product in the chosen way."""
    copy_a, copy_b = relayout(stored, choice.layout)
    compute: Runner = _Triton(choice) if choice.backend == "triton" else partial(vendor_matmul, layout=choice.layout)
    if not (copy_a or copy_b):
        return compute

    def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None, **rest: Any) -> torch.Tensor:
        if a.dim() > 2 and b.dim() == 2:  # leading dims are rows, which only a 2-D operand can be laid out by
            if out is not None or rest.get("gate") is not None:
                return vendor_matmul(a, b, stored, out, **rest)
            flat = run(a.flatten(0, -2), b, **rest)
            return flat.view(*a.shape[:-1], flat.shape[-1])
        return compute(laid_out(a) if copy_a else a, laid_out(b) if copy_b else b, out=out, **rest)

    return run


# Straight to torch, for what is called thousands of times a step: layout, b has two dims.
SHORTEST: dict[tuple[str, bool], Runner] = {
    ("NN", True): torch.matmul,
    ("NN", False): torch.matmul,
    ("NT", True): torch.nn.functional.linear,
    ("NT", False): lambda a, b: torch.matmul(a, b.mT),
    ("TN", True): lambda a, b: torch.matmul(a.mT, b),
    ("TN", False): lambda a, b: torch.matmul(a.mT, b),
}


class _Triton:
    """The Triton kernel, with the measured tile where a call has the alignment and epilogue it was measured with.

    What the first launch for some shapes, strides and alignment has looked up and checked is kept for the next ones.
    """

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self._prepared: dict[tuple[Any, ...], Prepared] = {}

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        accumulate: bool = False,
        **rest: Any,
    ) -> torch.Tensor:
        plain = not rest or all(value is None for value in rest.values())
        key = _key(a, b, out, bias, accumulate) if plain else None
        launch = self._prepared.get(key) if key is not None else None
        if launch is not None and (out is None or _apart(out, (a, b, bias), launch.spans)):
            if out is None:
                out = a.new_empty(launch.shape)
            launch(a, b, out, bias)
            return out
        rest |= {"out": out, "bias": bias, "accumulate": accumulate}
        config = self._config(a, b, **rest)
        if key is None or not _preparable(a, b, bias):
            return matmul(a, b, self.choice.layout, backend="triton", config=config, **rest)
        product, epilogue = product_of(a, b, self.choice.layout), Epilogue(out, bias, None, accumulate)
        epilogue.check(product, a, b)
        result, prepared = triton_matmul(a, b, product, epilogue, config)
        if prepared is not None:
            if len(self._prepared) >= _KEPT:
                self._prepared.clear()
            prepared.shape, prepared.spans = result.shape, tuple(map(_span, (result, a, b, bias)))
            self._prepared[key] = prepared
        return result

    def _config(self, a: torch.Tensor, b: torch.Tensor, **rest: Any) -> Config | None:
        config = self.choice.config
        grouped = config is not None and bool(config.groups)
        if grouped and rest.get("accumulate") and rest.get("activation") is None and rest.get("gate") is None:
            assert config is not None
            config = accumulating(config)
            left, right = as_row_major(a, b, self.choice.layout)
            if not describable(left, right, rest["out"], True):
                config = None
        elif rest.get("accumulate") or rest.get("gate") is not None or (grouped and rest.get("activation") is not None):
            config = None
        elif config is not None and config.descriptors:
            left, right = as_row_major(a, b, self.choice.layout)
            out = rest.get("out")
            if out is None:  # a result of torch's: its rows one behind the other
                out = left.new_empty((left.shape[-2], right.shape[-1]), device="meta")
            if not describable(left, right, out, False):
                config = None
        wider = rest.get("out_dtype") if rest.get("out") is None else rest["out"].dtype
        if config is not None and wider is not None and not config.fits(target_of(a.device), a.dtype, wider):
            config = None  # its epilogue was measured with a narrower result
        return config


_KEPT = 256  # launches of one choice: more strides than that are no layer's


def _key(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, bias: torch.Tensor | None, accumulate: bool
) -> tuple[Any, ...] | None:
    """What a launch is prepared for, with the device of each: what is on another must be refused. None where it has to
    be looked at anew, which no shape or stride says: gradients are wanted or operands cast, bases without 16 bytes,
    views that negate.
    """
    pointers = a.data_ptr() | b.data_ptr()
    if a.is_neg() or b.is_neg():
        return None
    into = behind = None
    if out is not None:
        pointers |= out.data_ptr()
        if out.is_neg():
            return None
        into = (out.shape, out.stride(), out.dtype, out.device)
    elif torch.is_autocast_enabled("cuda" if a.is_cuda else "cpu"):
        return None
    elif torch.is_grad_enabled() and (a.requires_grad or b.requires_grad or (bias is not None and bias.requires_grad)):
        return None
    if bias is not None:
        pointers |= bias.data_ptr()
        if bias.is_neg():
            return None
        behind = (bias.shape, bias.stride(), bias.dtype, bias.device)
    if pointers % 16:
        return None
    return (
        a.shape, a.stride(), a.dtype, a.device, b.shape, b.stride(), b.dtype, b.device, into, behind, accumulate
    )  # fmt: skip


def _preparable(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether a launch for such shapes, strides and dtypes can be prepared: no batch, no empty product, no numbers that
    torch's switches may multiply otherwise.
    """
    two = a.dim() == b.dim() == 2 and a.dtype.itemsize == 2 and a.numel() * b.numel() > 0
    return two and (bias is None or bias.is_contiguous())


def _span(tensor: torch.Tensor | None) -> int:
    """Bytes from a tensor's base to the end of its last element; it has one."""
    if tensor is None:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _apart(out: torch.Tensor, others: tuple[torch.Tensor | None, ...], spans: tuple[int, ...]) -> bool:
    """Whether a result of these spans, the first its own, lies on none of what is read."""
    begin = out.data_ptr()
    end = begin + spans[0]
    for tensor, span in zip(others, spans[1:], strict=True):
        if tensor is not None and begin < tensor.data_ptr() + span and tensor.data_ptr() < end:
            if share_memory(out, tensor):
                return False
    return True


def way_of(choice: Choice, stored: str) -> FusedPlan:
    """How a fused operation runs as chosen, on operands stored as ``stored``."""
    own = choice.strategy in ("signal", "push")  # a kernel of its own, with these tiles
    multiply = None if own or choice.is_torchs(stored) else runner(choice, stored)
    config = choice.config if own else None
    return FusedPlan(choice.strategy, choice.chunks, config, multiply, choice.channels, choice.windows)


def run_alone(
    operation: str, gather: str, comm: FusedCommunicator, stored: str, choice: Choice, operands: list[torch.Tensor]
) -> None:
    """Run this rank's part of a fused operation, in which no peer waits for it: what fails of it fails here."""
    like = comm.windowed() if choice.windows else comm.capped(choice.channels)
    alone = SoloCommunicator(comm.timeout, like)
    run_fused(operation, gather, alone, stored, choice, operands)
    if operands[0].is_cuda:
        torch.cuda.synchronize(operands[0].device)
    alone.poll()


def run_fused(
    operation: str, gather: str, comm: FusedCommunicator, stored: str, choice: Choice, operands: list[torch.Tensor]
) -> torch.Tensor:
    """Run a fused operation to its end as chosen."""
    a, b = operands
    way = way_of(choice, stored)
    if operation == "all_gather_matmul_fp8":
        return run_all_gather_fp8(a, b, comm, way)[0]
    if operation in ("matmul_all_reduce", "matmul_all_reduce_behind_dw"):
        out, finish = start_all_reduce(a, b, comm, stored, way)
        if operation == "matmul_all_reduce_behind_dw":
            vendor_matmul(a, torch.ones_like(out), "TN")
        finish()
        return out
    if operation == "matmul_reduce_scatter":
        return run_reduce_scatter(a, b, comm, stored, way)
    return run_all_gather(a, b, comm, stored, gather, way, keep=operation == "all_gather_matmul_kept")[0]
