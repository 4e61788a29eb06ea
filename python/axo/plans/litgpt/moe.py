"""LitGPT's mixture of experts on a grid: every expert a dense MLP that all ranks share, the gate's choice on all alike.

    gate      router[m, E] = all-reduce_y(I[m, h/Gy] @ W[E, h/Gy]^T)     whole on every rank: the same bits, so the same
                                                                        experts for a token on all ranks along x and y
                                                                        (Tesseract's: E over y, and gathered)
    expert    a dense MLP (normal, normal, transposed) on the rows that chose it; all E are called, with no rows too
    output    y[rows] += probs[rows] * expert(I[rows])                   features over y

The choice is LitGPT's, and each rank calls its own experts (``axo.nn.experts``): all, unless they lie on several ranks
(``axo.connect(grid, experts=e)``). Of the gradient of a probability each rank along y has the part of its features: it
is summed over y where it enters the gate. Ranks along axes that split rows route their own; each calls its experts in
the same order, so that the weights that ranks gather from each other, or broadcast, are there.

Not here: capacity, balancing losses (LitGPT has none), sequence parallelism (refused: an expert's rows are no
sequence).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from litgpt.model import GroupedTopkRouter
from torch import nn

from axo.comm.connect import Communicators
from axo.nn import Features, Linear
from axo.nn.experts import SpreadExperts
from axo.plans.gradient import SumGradient, sum_gradient
from axo.plans.replace import Replacer
from axo.sharding import gather_features

_GATE = "the gate of a mixture of experts"


class GroupedRouter(Linear, GroupedTopkRouter):
    """``litgpt.model.GroupedTopkRouter`` (DeepSeek's): (rows, h/Gy) -> weights and experts, (rows, per token) each.

    Args:
        old: The serial router.
        comms, grad_reduce, name: As for :class:`axo.nn.Linear`.
    """

    def __init__(self, old: Any, *, comms: Communicators, grad_reduce: str, name: str) -> None:
        experts, hidden = old.weight.shape
        Linear.__init__(
            self, hidden, experts, False, "meta", old.weight.dtype,
            comms=comms, grad_reduce=grad_reduce, features=Features(whole_output=True), name=name,
        )  # fmt: skip
        self.config = old.config
        self.register_buffer("e_score_correction_bias", old.e_score_correction_bias.clone())

    def serial(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        with torch.device(device):
            return _SerialRouter(self.config).to(dtype)

    def forward(self, x: torch.Tensor) -> Any:
        logits = self.matmul(x.float(), self.weight, None)
        if self.gather_output and self.out_axis is not None:
            logits = gather_features(logits, self.comms, self.out_axis, self.out_features)
        scores = sum_gradient(logits, self.comms.y, _GATE).sigmoid()
        router: Any = self
        indices = router.get_topk_indices(scores)
        weights = scores.gather(1, indices)
        if self.config.norm_topk_prob:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights, indices


class _SerialRouter(GroupedTopkRouter):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, mean=0.0, std=0.02)  # what GPT._init_weights does


def replace_mixture(mlp: Any, name: str, replacer: Replacer) -> None:
    """Let the gate and the experts of a ``LLaMAMoE`` agree over the ranks; its linear layers are parallel already."""
    if isinstance(mlp.gate, GroupedTopkRouter):
        router = GroupedRouter(mlp.gate, comms=replacer.comms, grad_reduce=replacer.grad_reduce, name=f"{name}.gate")
        replacer.put(mlp, "gate", router)
    else:
        mlp.gate.register_forward_hook(SumGradient(replacer.comms.y, _GATE))
    for layer in mlp.experts.modules():
        if isinstance(layer, Linear):
            layer.matmul.products.rows_agree = False  # ranks along z send an expert other numbers of tokens
    mlp.spread_experts = SpreadExperts(mlp.experts, replacer.comms, replacer.grad_reduce)
    mlp.forward = partial(_forward, mlp)


def _forward(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    """``LLaMAMoE.forward`` whose experts may lie on other ranks: (B, T, h/Gy) -> (B, T, h/Gy)."""
    config, rows = mlp.config, x.flatten(0, 1)
    if config.n_expert_groups:
        weights, choices = mlp.gate(rows)
    else:
        weights, choices = torch.topk(mlp.gate(rows), config.n_expert_per_token)
        weights = weights.softmax(dim=1, dtype=torch.float).to(x.dtype)
    output = mlp.spread_experts(rows, weights * config.routed_scaling_factor, choices).view_as(x)
    return output + mlp.shared_experts(x) if config.n_shared_expert else output
