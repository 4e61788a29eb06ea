"""Floating point operations of a training step.

`narayanan` is the formula by which the papers report: batch B, sequence s, l layers, hidden h, vocabulary V,

    F = 96 B s l h^2 (1 + s / (6 h) + V / (16 l h))        with full activation recomputation (72: without)

(Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters"). `step_flops` counts any workload: 2
a multiply-add, forward once, backward twice, the forward of a recomputed block once more. A token attends to the
tokens before it only, which is half of attention; the formula counts it in full, and so does ``full_attention``: then
both agree for a GPT. Norms, activations, softmax and the optimizer are not counted.
"""

from __future__ import annotations

from axo.perf.layers import seen
from axo.perf.workload import Workload


def narayanan(batch: float, seq_length: int, layers: int, hidden: int, vocab: int, *, recompute: bool = True) -> float:
    """Return the flops of one step: hardware flops with recomputation, model flops without.

    Without recomputation every term but the vocabulary's falls by a quarter; the vocabulary's head is never run again.
    """
    body = (96 if recompute else 72) * batch * seq_length * layers * hidden**2 * (1 + seq_length / (6 * hidden))
    return body + 6.0 * batch * seq_length * hidden * vocab


def step_flops(
    workload: Workload, batch_tokens: float, *, recompute: bool = False, full_attention: bool = False
) -> float:
    """Return the flops of one step.

    Args:
        recompute: The blocks of a stack run again before backward (hardware flops); else model flops.
        full_attention: Count scores that the causal mask drops, as the papers' formula does.
    """
    attended = workload.seq_length if full_attention else seen(workload.seq_length)
    return sum(
        block.repeat * (4 if recompute and block.stacked else 3) * layer.flops(batch_tokens, attended)
        for block in workload.blocks
        for layer in block.layers
    )


def newton_schulz_flops(shape: tuple[int, ...], steps: int) -> float:
    """Flops of ``steps`` steps of Newton-Schulz (``axo.optim.newton_schulz``) on a whole matrix."""
    m, k = sorted(shape)
    return steps * (4.0 * m * m * k + 2.0 * m**3)


def newton_schulz_bytes(shape: tuple[int, ...], itemsize: int) -> int:
    """Bytes of a whole matrix in work: as it came, two more of its size, two of its products."""
    m, k = sorted(shape)
    return itemsize * (3 * m * k + 2 * m * m)
