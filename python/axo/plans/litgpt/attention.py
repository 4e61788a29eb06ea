"""LitGPT's attention with soft-capped scores, right with a KV cache too.

    scores = softcap(q k^T * scale) + mask,   mask = 0 where a query may look, the lowest number elsewhere

With a cache LitGPT hands a boolean mask to that sum, where it counts as 0 or 1: queries then look at places of the
cache that are not filled yet, and generation differs from Hugging Face's (Gemma 2). Here such a mask hides them.
"""

from __future__ import annotations

from typing import Any

import torch


class _Softcapped:
    def scaled_dot_product_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, torch.finfo(q.dtype).min)
        return super().scaled_dot_product_attention(q, k, v, mask)  # type: ignore[misc]


def softcapped(kind: type) -> type:
    """LitGPT's attention class ``kind`` for a configuration with ``attention_logit_softcapping``."""
    made: Any = type(f"Softcapped{kind.__name__}", (_Softcapped, kind), {"__module__": kind.__module__})
    return made
