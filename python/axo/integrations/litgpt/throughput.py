"""What LitGPT's training commands say of their speed, right on a grid and for mixtures of experts.

    Measured TFLOPs         a micro-batch's flops, as LitGPT counts them, times the data ranks
    flops_per_sec, ...      LitGPT's "device" is a data rank: Gx*Gy ranks that work as one
    device/mfu              hence of the peak of Gx*Gy ranks, not of one

LitGPT counts the flops of a copy of the model on the meta device. There a mixture of experts cannot ask which tokens
chose an expert. It need not: each token goes to ``n_expert_per_token`` experts of one size, so one expert is given all
these rows, and the count is that of any routing.

The functions are LitGPT's own and Fabric's; names that LitGPT looks up in its module are put in front of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


@contextlib.contextmanager
def counted(module: Any, peers: int) -> Iterator[None]:
    """Let ``module``, a training command of litgpt's, count as said above.

    Args:
        module: Such as ``litgpt.pretrain``.
        peers: Gx * Gy, the ranks of a data rank.
    """
    made = {"ThroughputMonitor": lambda stock: _monitor(stock, peers), "measure_flops": _measure}
    stock = {name: getattr(module, name) for name in made if hasattr(module, name)}
    try:
        for name, function in stock.items():
            setattr(module, name, made[name](function))
        yield
    finally:
        for name, function in stock.items():
            setattr(module, name, function)


def _monitor(stock: Any, peers: int) -> Callable[..., Any]:
    def monitor(*args: Any, **options: Any) -> Any:
        made = stock(*args, **options)
        if made.available_flops is not None:  # unknown on CPU
            made.available_flops *= peers
        return made

    return monitor


def _measure(stock: Callable[..., int]) -> Callable[..., int]:
    def measure(model: nn.Module, *args: Any, **options: Any) -> int:
        with _routed_evenly(model):
            return stock(model, *args, **options)

    return measure


@contextlib.contextmanager
def _routed_evenly(model: nn.Module) -> Iterator[None]:
    """Give the first expert of each mixture on the meta device the rows of all."""
    from litgpt.model import LLaMAMoE

    class Even(LLaMAMoE):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = x.reshape(-1, x.shape[-1])
            routed = self.gate(rows)
            chosen = routed[0] if isinstance(routed, tuple) else torch.topk(routed, self.config.n_expert_per_token)[0]
            each = self.experts[0](rows.repeat(chosen.shape[1], 1)).view(chosen.shape[1], *rows.shape)
            y = (each * chosen.t().unsqueeze(-1)).sum(0).view_as(x)
            return y + self.shared_experts(x) if self.config.n_shared_expert else y

    on_meta = all(parameter.is_meta for parameter in model.parameters())
    mixtures = [part for part in model.modules() if on_meta and type(part) is LLaMAMoE]
    try:
        for part in mixtures:
            part.__class__ = Even
        yield
    finally:
        for part in mixtures:
            part.__class__ = LLaMAMoE
