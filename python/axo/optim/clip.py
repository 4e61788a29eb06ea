"""The norm of all gradients over all ranks, and clipping by it.

    total = (sum over parameters and elements of |g|^p)^(1/p);   g *= min(1, max_norm / (total + 1e-6))

Every element counts once. Where ranks along an axis hold copies of a parameter, the first of them (coordinate 0) adds
it; where neighbours share rows (``Placement.copies``), the first neighbour; where two stages share a table, the first
stage. One number is then all-reduced over all ranks of all stages, so all of them see the same bits. On CPU ranks two
more travel with it, which tell whether all were given the same ``max_norm``; on GPUs to look would wait for the device.

Semantics of ``torch.nn.utils.clip_grad_norm_``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Real

import torch

from axo.comm.connect import Communicators
from axo.placement import placement_of


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float | torch.Tensor,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale all gradients so that their common norm is at most ``max_norm``. Every rank must call it.

    A parameter without a placement (made outside Axo) is taken to be replicated on all ranks.

    Args:
        parameters: The model's parameters on this rank.
        max_norm: Largest norm that is left alone.
        norm_type: p > 0, or inf.
        error_if_nonfinite: Raise, on every rank, when the norm is nan or infinite.

    Returns:
        The norm before clipping (fp32), the same bits on every rank.

    Raises:
        ValueError: max_norm is negative or no number, or (CPU) not the same on all ranks, norm_type is not positive, or
            what is given are not parameters, or parameters of two grids.
        RuntimeError: The norm is not finite and error_if_nonfinite is set.
    """
    on_gpu = isinstance(max_norm, torch.Tensor) and max_norm.device.type != "cpu"  # to look would wait for it
    one = max_norm.numel() == 1 if isinstance(max_norm, torch.Tensor) else isinstance(max_norm, Real)
    if not one or not (on_gpu or max_norm >= 0):
        raise ValueError(
            f"clip_grad_norm_: max_norm={max_norm!r} is not a number of at least 0; inf measures and clips nothing"
        )
    max_norm = max_norm.reshape(()) if isinstance(max_norm, torch.Tensor) else max_norm
    several = isinstance(parameters, Iterable) and not isinstance(parameters, torch.Tensor)
    parameters = list(parameters) if several else [parameters]  # type: ignore[list-item]
    for parameter in parameters:
        if not isinstance(parameter, torch.Tensor):
            raise ValueError(f"clip_grad_norm_: a {type(parameter).__name__} is no parameter; pass model.parameters()")
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise ValueError(
                "clip_grad_norm_: a gradient is sparse, and only dense ones are clipped; use sparse=False where it"
                " comes from (an embedding, for example)"
            )
    norm = total_norm(
        [(p, p.grad) for p in parameters if p.grad is not None],
        norm_type,
        error_if_nonfinite,
        "clip_grad_norm_",
        _communicators(parameters, "clip_grad_norm_"),
        max_norm,
    )
    grads = [p.grad for p in parameters if p.grad is not None]
    if grads:
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for device in {grad.device for grad in grads}:  # a parameter's may lie on the host of a GPU
            torch._foreach_mul_([grad for grad in grads if grad.device == device], factor.to(device))
    return norm


def total_norm(
    owned: Sequence[tuple[torch.Tensor, torch.Tensor]],
    norm_type: float,
    error_if_nonfinite: bool,
    caller: str,
    comms: Communicators | None = None,
    max_norm: float | torch.Tensor = math.inf,
) -> torch.Tensor:
    """The common norm over all ranks of tensors, given with the parameters whose they are. Every rank must call it.

    Args:
        owned: (parameter, its gradient); or (parameter, the parameter itself).
        norm_type, error_if_nonfinite: As for :func:`clip_grad_norm_`.
        caller: How messages call what is computed.
        comms: The communicators of the grid; None: those of the parameters. If no parameter is on a grid, the norm is
            of this rank alone.
        max_norm: What it is compared with: on CPU ranks an error, on all of them, where it is not the same on all.
    """
    try:
        p = float(norm_type)
    except (TypeError, ValueError):
        p = math.nan
    if not p > 0:
        raise ValueError(f"{caller}: norm_type={norm_type!r} is not supported; use a positive number or inf")
    norm_type = p
    comms = comms or _communicators([parameter for parameter, _ in owned], caller)
    if comms is None:
        return torch.nn.utils.get_total_norm([tensor for _, tensor in owned], norm_type, error_if_nonfinite)
    total = _local_total(_counted(owned, comms), norm_type, comms.device)
    if comms.everyone.size > 1:
        reduced = _max if math.isinf(norm_type) else _sum
        total = reduced(torch.cat([total, *_witnesses(max_norm, reduced is _max, comms)]), comms)
        has_values = len(total) > 1 and type(total) is torch.Tensor  # a dry run's tensors have no values
        _check_witnesses(total[1:].tolist() if has_values else [], reduced is _max, caller, max_norm, comms)
        total = total[:1]
    norm = (total if math.isinf(norm_type) else total.pow(1.0 / norm_type)).float().squeeze(0)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"{caller}: the {norm_type}-norm of the gradients is {float(norm)}, so they cannot be clipped; pass"
            " error_if_nonfinite=False to go on"
        )
    return norm


def _communicators(parameters: Iterable[torch.Tensor], caller: str) -> Communicators | None:
    comms: Communicators | None = None
    for parameter in parameters:
        placement = placement_of(parameter)
        if placement is None:
            continue
        if comms is not None and placement.comms is not comms:
            raise ValueError(f"{caller}: the parameters lie on different grids; clip each grid by itself")
        comms = placement.comms or placement.communicators
    return comms


def _counted(owned: Iterable[tuple[torch.Tensor, torch.Tensor]], comms: Communicators) -> list[torch.Tensor]:
    """What this rank counts: nothing where it is not the first holder, less rows that others count."""
    counted, is_first = list[torch.Tensor](), not any(comms.coords)
    for parameter, tensor in owned:
        placement, grad = placement_of(parameter), tensor.detach()
        if placement is not None and grad.shape != parameter.shape:  # ZeRO-2 cuts it once more, over data
            placement = placement.state
        if not grad.numel() or not (is_first if placement is None else placement.is_first_holder(comms.coords)):
            continue
        if placement is None or (placement.counted and placement.copies is None):
            counted.append(grad)
        elif placement.counted:
            counted += [grad[a:b] for a, b in placement.counted_rows()]
    return counted


def _local_total(grads: list[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Sum of |g|^p over this rank's elements (for p = inf the maximum), as one fp64 number."""
    if not grads:
        return torch.zeros(1, dtype=torch.float64, device=device)
    wide = [torch.promote_types(g.dtype, torch.float32) for g in grads]
    each = [torch.linalg.vector_norm(g, norm_type, dtype=w).double() for g, w in zip(grads, wide, strict=True)]
    norms = torch.stack([norm.to(device) for norm in each])
    if math.isinf(norm_type):
        return norms.max().reshape(1)
    return norms.pow(norm_type).sum().reshape(1)


def _witnesses(max_norm: float | torch.Tensor, largest: bool, comms: Communicators) -> list[torch.Tensor]:
    """Two numbers in [0, 1] that tell, once they are reduced, whether all ranks have the same ``max_norm``.

    v and v^2, whose sums give the variance; or v and 1 - v, whose maxima give the largest and the smallest.
    """
    if comms.device.type != "cpu":
        return []
    v = 1.0 / (1.0 + float(max_norm))
    return [torch.tensor([v, 1.0 - v if largest else v * v], dtype=torch.float64)]


def _check_witnesses(
    reduced: list[float], largest: bool, caller: str, max_norm: float | torch.Tensor, comms: Communicators
) -> None:
    if not reduced:
        return
    first, second = reduced
    n = comms.everyone.size
    # The variance of equal numbers is rounding alone: three sums and products of n terms, each below n * 2^-53 of them.
    if second != 1.0 - first if largest else n * second - first * first > n * 2**-50 * first * first:
        raise ValueError(
            f"{caller}: ranks were given different values of max_norm (this one: {float(max_norm):g}), and would scale"
            " their gradients apart; every rank must pass the same"
        )


def _sum(total: torch.Tensor, comms: Communicators) -> torch.Tensor:
    return comms.everyone.all_reduce(total, "sum")


def _max(total: torch.Tensor, comms: Communicators) -> torch.Tensor:
    """The largest over all ranks, nan above all: as bits, which order numbers >= 0 so; a max of floats may lose nan."""
    return comms.everyone.all_reduce(total.abs().view(torch.int64), "max").view(torch.float64)
