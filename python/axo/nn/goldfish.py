"""Goldfish loss: which tokens of a text count in the loss, decided by the text itself.

    keep[i] = hash(t[i-h], ..., t[i-1]) mod k != 0        i >= h and all h tokens known
    keep[i] = True                                        elsewhere

A share 1/k of the tokens is left out of the loss, so a model cannot learn to repeat a passage word for word: it has to
guess at each token left out. Because the hash sees the h preceding tokens and nothing else, a passage that occurs in
many documents, batches or ranks loses the same tokens everywhere, and no state has to be shared.

The hash folds the tokens one by one into 64 bits, s = (s ^ t) * P mod 2^64, then s ^= s >> 33 (an unsigned shift), and
takes 31 of the upper bits; it costs h integer steps a token. torch and Triton compute the same bits.

Source: Hans et al., "Be like a Goldfish, Don't Memorize!" (arXiv:2406.10209); k=2, h=13 as in the AxoNN paper's study.
Not here: the loss itself; a token left out gets the loss's ignore_index.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch

from axo_kernels.device import gemm_kernels, runs_triton

IGNORE_INDEX = -100
_SEED = 0x243F6A8885A308D3  # the first digits of pi: any odd-looking start serves
_PRIME = -0x61C8864680B583EB  # 2^64 / golden ratio, odd, as a signed number
_LOW31 = (1 << 31) - 1
BLOCK = 256


def goldfish_mask(
    tokens: torch.Tensor, k: int = 2, h: int = 13, *, ignore_index: int = IGNORE_INDEX, drop_value: int = 0
) -> torch.Tensor:
    """Say which tokens count in the loss.

    Args:
        tokens: Token ids (..., T) in reading order, int32 or int64, in T without gaps.
        k: One of k tokens is left out, on average; at least 2.
        h: Tokens that decide; at least 1.
        ignore_index: Stands where a token is not known (a prompt's label); what follows within h tokens is kept.
        drop_value: The value of the hash mod k that leaves a token out, in [0, k): k disjoint masks are possible.

    Returns:
        bool (..., T), True where the token counts; on the tokens' device.

    Raises:
        ValueError: k, h or drop_value is out of range, or tokens has no dim.
        TypeError: tokens is not int32 or int64.
    """
    _check(tokens, k, h, drop_value)
    if runs_triton(tokens.device) and tokens.numel():
        return _triton_mask(tokens, k, h, ignore_index, drop_value)
    return torch_mask(tokens, k, h, ignore_index=ignore_index, drop_value=drop_value)


def goldfish_targets(
    inputs: torch.Tensor, targets: torch.Tensor, k: int = 2, h: int = 13, *, ignore_index: int = IGNORE_INDEX
) -> torch.Tensor:
    """Return the targets of next-token prediction with the tokens left out replaced by ``ignore_index``.

    Args:
        inputs, targets: Token ids (..., T); ``targets[..., j]`` follows ``inputs[..., j]``. inputs give the one token
            more of context that targets lack.
        k, h, ignore_index: As for :func:`goldfish_mask`.

    Raises:
        ValueError: The shapes differ, or as for :func:`goldfish_mask`.
    """
    if inputs.shape != targets.shape:
        raise ValueError(
            f"goldfish: inputs of shape {tuple(inputs.shape)} and targets of shape {tuple(targets.shape)} differ"
        )
    tokens = torch.cat([inputs[..., :1].to(targets.dtype), targets], dim=-1)
    keep = goldfish_mask(tokens, k, h, ignore_index=ignore_index)[..., 1:]
    return targets.masked_fill(~keep, ignore_index)


def torch_mask(
    tokens: torch.Tensor, k: int, h: int, *, ignore_index: int = IGNORE_INDEX, drop_value: int = 0
) -> torch.Tensor:
    """The mask in plain torch: what the kernel is tested against, and what runs where Triton does not."""
    length = tokens.shape[-1]
    keep = torch.ones(tokens.shape, dtype=torch.bool, device=tokens.device)
    if length <= h:
        return keep
    wide = tokens.to(torch.int64)
    state = torch.full((*tokens.shape[:-1], length - h), _SEED, dtype=torch.int64, device=tokens.device)
    hashed = torch.ones_like(state, dtype=torch.bool)
    for offset in range(h):
        token = wide[..., offset : offset + length - h]
        hashed &= token != ignore_index
        state = (state ^ token) * _PRIME
        state ^= (state >> 33) & _LOW31  # int64 shifts copy the sign; the mask makes it an unsigned shift
    bucket = ((state >> 32) & _LOW31) % k
    keep[..., h:] = (bucket != drop_value) | ~hashed
    return keep


def _triton_mask(tokens: torch.Tensor, k: int, h: int, ignore_index: int, drop_value: int) -> torch.Tensor:
    rows = tokens.reshape(-1, tokens.shape[-1])
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    keep = torch.empty(rows.shape, dtype=torch.bool, device=tokens.device)
    length = rows.shape[1]
    grid = (rows.shape[0], -(-length // BLOCK))
    kernel = _kernels().goldfish_kernel
    kernel[grid](
        rows, keep.view(torch.uint8), rows.stride(0), length, k, ignore_index, drop_value, H=h, BLOCK=BLOCK
    )  # fmt: skip
    return keep.view(tokens.shape)


@cache
def _kernels() -> ModuleType:
    assert gemm_kernels() is not None
    from axo.nn import goldfish_kernels

    return goldfish_kernels


def _check(tokens: torch.Tensor, k: int, h: int, drop_value: int) -> None:
    if tokens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"goldfish: tokens are {tokens.dtype}; token ids must be int32 or int64")
    if tokens.dim() == 0:
        raise ValueError("goldfish: tokens has no dim; pass ids of shape (..., T)")
    if k < 2:
        raise ValueError(f"goldfish: k={k} would leave out every token or none; use k of at least 2")
    if h < 1:
        raise ValueError(f"goldfish: h={h} tokens decide nothing; use h of at least 1")
    if not 0 <= drop_value < k:
        raise ValueError(f"goldfish: drop_value={drop_value} is not in [0, k={k})")
