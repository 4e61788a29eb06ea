"""LitGPT's attention with soft-capped scores, right with a KV cache too.

    scores = softcap(q k^T * scale) + mask,   mask = 0 where a query may look, the lowest number elsewhere

With a cache LitGPT hands a boolean mask to that sum, where it counts as 0 or 1: queries then look at places of the
cache that are not filled yet, and generation differs from Hugging Face's (Gemma 2). Here such a mask hides them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def with_hidden_places(
    attend: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """``attend``, an attention's ``scaled_dot_product_attention``, with a mask that can be added to scores."""
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, torch.finfo(q.dtype).min)
    return attend(q, k, v, mask)
