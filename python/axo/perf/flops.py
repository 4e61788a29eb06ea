"""Floating point operations of a training step.

`narayanan` is the formula by which the papers report: batch B, sequence s, l layers, hidden h, vocabulary V,

    F = 96 B s l h^2 (1 + s / (6 h) + V / (16 l h))        with full activation recomputation (72: without)

(Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters"). `step_flops` counts any workload: 2
a multiply-add, forward once, backward twice, the forward of a checkpointed block once more. A token attends to the
tokens before it only, which is half of attention; the formula counts it in full, and so does ``full_attention``: then
both agree for a GPT. Norms, activations, softmax and the optimizer are not counted.
"""

from __future__ import annotations

from axo.matmul import activations
from axo.perf.workload import Layer, Workload


def narayanan(batch: float, seq_length: int, layers: int, hidden: int, vocab: int, *, recompute: bool = True) -> float:
    """Return the flops of one step: hardware flops with recomputation, model flops without.

    Without recomputation every term but the vocabulary's falls by a quarter; the vocabulary's head is never run again.
    """
    body = (96 if recompute else 72) * batch * seq_length * layers * hidden**2 * (1 + seq_length / (6 * hidden))
    return body + 6.0 * batch * seq_length * hidden * vocab


def forward_flops(layer: Layer, rows: float, seq_length: int, *, full_attention: bool = False) -> float:
    """Return the flops of one layer's forward for ``rows`` tokens of a whole batch."""
    if layer.kind == "linear":
        whole = rows * layer.rows * layer.experts
        return activations.linear_flops(whole, layer.in_features, layer.out_features)
    if layer.kind == "attention":
        return 4.0 * rows * (seq_length if full_attention else seen(seq_length)) * layer.in_features
    return 0.0


def seen(seq_length: int) -> float:
    """Return how many tokens a token attends to under a causal mask, on average: itself and those before it."""
    return (seq_length + 1) / 2


def step_flops(
    workload: Workload, batch_tokens: float, *, recompute: bool | None = None, full_attention: bool = False
) -> float:
    """Return the flops of one step.

    Args:
        recompute: None: as the workload's blocks say (hardware flops); False: without recomputation (model flops).
        full_attention: Count scores that the causal mask drops, as the papers' formula does.
    """
    flops = 0.0
    for block in workload.blocks:
        again = block.checkpointed if recompute is None else recompute and block.repeat > 1
        one = sum(
            forward_flops(layer, batch_tokens, workload.seq_length, full_attention=full_attention)
            for layer in block.layers
        )
        flops += block.repeat * one * (4 if again else 3)
    return flops
