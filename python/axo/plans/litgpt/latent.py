"""LitGPT's multi-head latent attention (DeepSeek's MLA) on a grid: latents whole on every rank, heads over x.

    q_a_proj, kv_a_proj_with_mqa   latent[m, r] = all-reduce_y(I[m, h/Gy] @ W[r, h/Gy]^T)    whole on every rank
    q_a_norm, kv_a_norm            whole
    q_b_proj, kv_b_proj            normal: each takes its features of the latent over y and leaves its heads over x
    proj                           transposed

The part of the keys that carries positions comes from ``kv_a_proj_with_mqa`` too, and all heads share it: each rank
along x has the gradient of its heads, so these are summed over x. A KV cache holds this rank's heads.

With algorithm "tesseract" heads are over y instead; latents are cut over y and gathered.

Not here, refused: sequence parallelism.
"""

from __future__ import annotations

from typing import Any

import torch

from axo.comm.connect import Communicators
from axo.nn.context import pad
from axo.plans.gradient import SumGradient

# Layer -> options of the parallel layer that takes its place.
LINEARS: dict[str, dict[str, Any]] = {
    "q_a_proj": {"whole_output": True},
    "q_b_proj": {"scatter_input": True},
    "kv_a_proj_with_mqa": {"whole_output": True},
    "kv_b_proj": {"scatter_input": True},
    "proj": {"transposed": True},
}


def attend(
    stock: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """LitGPT's ``scaled_dot_product_attention``, for which a CPU has an operator where values are as wide as keys; for
    others torch writes all scores out."""
    wide = pad(v, q.shape[-1], -1) if q.is_cpu and v.shape[-1] < q.shape[-1] else v
    output: torch.Tensor = stock(q, k, wide, mask)
    return output[..., : v.shape[-1]]


def sum_shared_gradient(attention: Any, comms: Communicators) -> None:
    """Let all ranks that share the heads have the whole gradient of what these share."""
    hook = SumGradient(comms.axis(comms.arrangement.inner), "latent attention", attention.config.kv_lora_rank)
    attention.kv_a_proj_with_mqa.register_forward_hook(hook)
