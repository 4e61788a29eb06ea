"""Causal attention of sequences whose tokens lie on the ranks of a context (``axo.nn.context``).

    O = softmax(scale Q K^T + mask) V,     Q [B, H, t, d], K [B, G, t, d], V [B, G, t, e] of this rank's t tokens

G divides H, and e is d, or less (latent attention). Three exchanges, with n = B G t (d + e) elements of keys and values
and c ranks:

    gather   all-gather of K, V (n put in); backward reduce-scatter of their gradient (c n)
    ring     c - 1 times n to the next rank while the piece at hand is attended to; backward the same, and behind it
             c - 1 times n of the gradients that each piece collects on its way
    heads    all-to-all to whole sequences of H/c heads, and back (Ulysses)

Attention of a range of queries to a range of keys is torch's operator, which gives the log-sum-exp l of its scores too.
Parts are put together in fp32, ``l = log(exp l1 + exp l2), O = exp(l1 - l) O1 + exp(l2 - l) O2``, and backward
computes each part again from the l of all. Ranges that no query sees (later ones, beyond a window, of other documents)
are left out; a mask exists only for the ranges where it hides something, ``_QUERIES`` queries at a time.

Ring: arXiv:2310.01889; its pieces as in zigzag ring attention; heads: arXiv:2309.14509. Not here: dropout, attention
that is not causal, second derivatives. The GPU's ran on two ranks of one H100.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from axo.comm.communicator import group
from axo.errors import Refused
from axo.matmul.product import refuse_create_graph
from axo.matmul.products import compute_dtype
from axo.nn.context import Pieces, check_heads, pad
from axo.placement import Range

_QUERIES = 1024  # whose mask is made at once
_aten = torch.ops.aten

# A model's own attention: queries, keys and values of all tokens, a mask that is added to scores -> output.
Own = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Any]
# What a rank does with keys and values [B, G, tokens, d + e] of these ranges: nothing, or the gradient of them.
Attend = Callable[[Sequence[Range], torch.Tensor], Any]


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pieces: Pieces,
    *,
    scale: float | None = None,
    window: int | None = None,
    alibi: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend to all tokens up to each query's own: ``(B, H, t, d)`` -> ``(B, H, t, e)``, in the dtype of autocast.

    Args:
        query: Of this rank's tokens, ``(B, H, t, d)``.
        key: Of the same, ``(B, G, t, d)``; H/G neighbouring heads of queries attend to one of these.
        value: ``(B, G, t, e)``, e at most d.
        pieces: How the batch lies on the ranks, and what they exchange; its documents do not see each other.
        scale: Of scores; default: ``d ** -0.5``.
        window: A query sees this many tokens, its own among them; None: all.
        alibi: Slopes of this rank's heads of queries, ``(H,)``: ``slope * (key's place - query's)`` is added to scores.

    Raises:
        ValueError: The tokens are not this rank's, or keys and values have others.
        Refused: Heads do not divide over the ranks, for kind "heads"; or slopes would need a gradient.
    """
    heads, groups, ranks = query.shape[1], key.shape[1], pieces.ranks
    check_heads("attention", pieces.kind, heads, groups, ranks)
    if query.shape[2] != pieces.tokens():
        raise ValueError(
            f"attention: {query.shape[2]} tokens are not the {pieces.tokens()} that rank {pieces.communicator.rank} of"
            f" {ranks} has of {pieces.length}"
        )
    if alibi is not None and alibi.shape != (heads,):
        raise ValueError(f"attention: alibi of shape {tuple(alibi.shape)} has no slope for each of {heads} heads")
    if alibi is not None and alibi.requires_grad and torch.is_grad_enabled():
        raise Refused("attention: alibi gets no gradient, and these slopes require one; give alibi.detach()")
    if key.shape[:3] != value.shape[:3] or key.shape[2:] != query.shape[2:] or value.shape[3] > key.shape[3]:
        raise ValueError(
            f"attention: queries {tuple(query.shape)}, keys {tuple(key.shape)} and values {tuple(value.shape)} differ"
            " in tokens or size"
        )
    query, key, value = (each.to(compute_dtype(each)).contiguous() for each in (query, key, value))
    keys, scale = torch.cat((key, value), -1), query.shape[-1] ** -0.5 if scale is None else scale
    if pieces.kind != "heads":
        exchange = _RingExchange(pieces) if pieces.kind == "ring" else _GatherExchange(pieces)
        return _Attention.apply(query, keys, _Parts(exchange, scale, window, alibi))
    keys = keys.repeat_interleave(max(1, ranks // groups), 1)
    query, keys = (_Swap.apply(each, pieces, True) for each in (query, keys))
    slopes = None if alibi is None else alibi.chunk(ranks)[pieces.communicator.rank]
    parts = _Parts(_LocalExchange(pieces.on_one_rank), scale, window, slopes)
    return _Swap.apply(_Attention.apply(query, keys, parts), pieces, False)


def own_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pieces: Pieces,
    own: Own,
    *,
    window: int | None = None,
) -> Any:
    """A model's own attention of this rank's queries to keys and values that are gathered, and a mask of all scores.

    For what no operator does (soft caps of scores). Returns what ``own`` does.
    """
    query, key, value = (each.to(compute_dtype(each)) for each in (query, key, value))
    whole = _GatherKeys.apply(torch.cat((key, value), -1), _GatherExchange(pieces))
    every = torch.arange(pieces.length, device=query.device)
    mask = _mask(pieces, pieces.positions(query.device), every, window, query)
    key, value = whole.split((key.shape[-1], value.shape[-1]), -1)
    return own(query, key, value, mask)


def _mask(
    pieces: Pieces, queries: torch.Tensor, keys: torch.Tensor, window: int | None, like: torch.Tensor
) -> torch.Tensor:
    """What is added to scores of tokens at these positions: ``(1 or B, 1, queries, keys)``; hidden ones are finite, so
    that a query that sees none of them has weight 0 and not NaN."""
    seen = keys <= queries[:, None]
    if window is not None:
        seen &= keys > queries[:, None] - window
    seen = seen[None, None]
    if pieces.documents is not None:
        documents = pieces.documents[:, None]
        seen = seen & (documents[:, :, queries, None] == documents[:, :, None, keys])
    return like.new_zeros(seen.shape).masked_fill_(~seen, torch.finfo(like.dtype).min / 2)


class _LocalExchange:
    """Keys and values that are on this rank already; also how the exchanges look."""

    def __init__(self, pieces: Pieces) -> None:
        self.pieces, self.communicator = pieces, pieces.communicator

    def forward(self, keys: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Attend to the keys and values of all ranks; what backward needs of them."""
        attend([(0, self.pieces.length)], keys)
        return keys

    def backward(self, kept: torch.Tensor, attend: Attend) -> torch.Tensor:
        """The gradient of this rank's keys and values, of all ranks' queries."""
        gradient: torch.Tensor = attend([(0, self.pieces.length)], kept)
        return gradient.to(kept.dtype)


class _GatherExchange(_LocalExchange):
    def forward(self, keys: torch.Tensor, attend: Attend) -> torch.Tensor:
        return super().forward(self.gather(keys), attend)

    def backward(self, kept: torch.Tensor, attend: Attend) -> torch.Tensor:
        return self.scatter(super().backward(kept, attend))

    def gather(self, keys: torch.Tensor) -> torch.Tensor:
        mine = pad(keys, self.pieces.longest, 2).contiguous().unsqueeze(0)
        return self.pieces.join(list(self.communicator.all_gather(mine)), 2)

    def scatter(self, gradient: torch.Tensor) -> torch.Tensor:
        parts = torch.stack([self.pieces.cut(gradient, rank, 2) for rank in range(self.pieces.ranks)])
        mine = self.communicator.reduce_scatter(parts).squeeze(0)
        return mine[:, :, : self.pieces.tokens()]


class _RingExchange(_LocalExchange):
    """Keys and values go from each rank to the next, c - 1 times; gradients of those of a rank begin at the next one,
    and come to it last."""

    def forward(self, keys: torch.Tensor, attend: Attend) -> torch.Tensor:
        for rank, present in self._round(keys):
            attend(self.pieces.ranges(rank), present)
        return keys

    def backward(self, kept: torch.Tensor, attend: Attend) -> torch.Tensor:
        own, arriving = torch.empty(0), None
        for rank, present in self._round(kept):
            gradient = pad(attend(self.pieces.ranges(rank), present), self.pieces.longest, 2)
            if rank == self.communicator.rank:
                own = gradient
                continue
            gradient = gradient if arriving is None else gradient.add_(arriving())
            arriving = self._pass_on(gradient.to(kept.dtype))
        gradient = own if arriving is None else own.add_(arriving())
        return gradient[:, :, : kept.shape[2]].to(kept.dtype)

    def _round(self, keys: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Each rank, this one first, with its keys and values; those of the next are on their way meanwhile."""
        pieces = self.pieces
        present = pad(keys, pieces.longest, 2).contiguous()
        for step in range(pieces.ranks):
            arriving = self._pass_on(present) if step + 1 < pieces.ranks else None
            rank = (self.communicator.rank - step) % pieces.ranks
            yield rank, present[:, :, : pieces.tokens(rank)]
            if arriving is not None:
                present = arriving()

    def _pass_on(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Send to the next rank and receive from the one before; call what comes back for that."""
        communicator, received = self.communicator, torch.empty_like(tensor)
        with group():
            sent = communicator.send(tensor, (communicator.rank + 1) % communicator.size, async_op=True)
            taken = communicator.recv(received, (communicator.rank - 1) % communicator.size, async_op=True)

        def wait() -> torch.Tensor:
            sent.wait()
            taken.wait()
            return received

        return wait


@dataclass(frozen=True)
class _Parts:
    """The attention of one call, as parts of ranges of queries and of keys."""

    exchange: _LocalExchange
    scale: float
    window: int | None
    alibi: torch.Tensor | None = None

    def of(self, keys: Sequence[Range], like: torch.Tensor) -> Iterator[tuple[slice, slice, bool, torch.Tensor | None]]:
        """Parts to compute where keys of these ranges are at hand: which of this rank's queries, which of these keys,
        whether each query sees those up to its own alone, and else a mask, if one is needed, as ``like``."""
        pieces = self.exchange.pieces
        for at, first, end in self._queries():
            lowest, clear = self._seen(first, end)
            sights = ((lowest, min(clear, first), False), (max(lowest, clear), first, False), (first, end, True))
            place = 0
            for low, high in keys:
                for start, stop, beside in sights:
                    start, stop = max(start, low), min(stop, high)
                    if start >= stop:
                        continue
                    mask = None
                    if start < clear or self.alibi is not None:
                        queries, theirs = (
                            torch.arange(*each, device=like.device) for each in ((first, end), (start, stop))
                        )
                        mask = _mask(pieces, queries, theirs, self.window, like)
                        if self.alibi is not None:
                            mask = mask + (self.alibi[:, None, None] * (theirs - queries[:, None])).to(like.dtype)
                    mine = slice(at, at + end - first)
                    yield mine, slice(place + start - low, place + stop - low), beside and mask is None, mask
                place += high - low

    def _queries(self) -> Iterator[tuple[int, int, int]]:
        """Ranges of this rank's queries: where each begins among them, and its tokens, from and to."""
        begins, pieces = 0, self.exchange.pieces
        masks = self.window is not None or pieces.documents is not None or self.alibi is not None
        for low, high in pieces.ranges():
            step = _QUERIES if masks else max(1, high - low)
            for first in range(low, high, step):
                yield begins + first - low, first, min(first + step, high)
            begins += high - low

    def _seen(self, first: int, end: int) -> tuple[int, int]:
        """The first token that any of these queries sees, and that from which on all see what is before them."""
        lowest, clear = (0, 0) if self.window is None else (first - self.window + 1, end - self.window)
        if self.exchange.pieces.documents is None:
            return max(0, lowest), clear
        earliest, latest = self.exchange.pieces.document_starts
        return max(lowest, earliest[first]), max(clear, latest[end - 1])


class _Attention(torch.autograd.Function):
    """(B, H, t, d), and [K, V] (B, G, t, d + e) -> (B, H, t, e): the parts that each exchange brings, put together."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, keys: torch.Tensor, parts: _Parts) -> torch.Tensor:
        fp32 = torch.promote_types(query.dtype, torch.float32)
        total = query.new_zeros(*query.shape[:3], keys.shape[3] - query.shape[3], dtype=fp32)
        lse = query.new_full(query.shape[:3], -torch.inf, dtype=fp32)

        def attend(ranges: Sequence[Range], present: torch.Tensor) -> None:
            for mine, theirs, causal, mask in parts.of(ranges, query) if query.numel() else ():
                output, its_lse = _forward(query[:, :, mine], present[:, :, theirs], causal, mask, parts.scale)
                both = torch.logaddexp(lse[:, :, mine], its_lse)
                before, now = ((each - both).exp_().unsqueeze(-1) for each in (lse[:, :, mine], its_lse))
                total[:, :, mine] = total[:, :, mine] * before + output * now
                lse[:, :, mine] = both

        kept = parts.exchange.forward(keys, attend)
        output = total.to(query.dtype)
        ctx.parts = parts
        ctx.save_for_backward(query, kept, output, lse)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_create_graph("attention")
        query, kept, output, lse = ctx.saved_tensors
        of_query = torch.zeros_like(query, dtype=lse.dtype)

        def attend(ranges: Sequence[Range], present: torch.Tensor) -> torch.Tensor:
            of_keys = torch.zeros_like(present, dtype=lse.dtype)
            for mine, theirs, causal, mask in ctx.parts.of(ranges, query) if query.numel() else ():
                dq, dkv = _backward(
                    grad[:, :, mine], query[:, :, mine], output[:, :, mine], lse[:, :, mine], present[:, :, theirs],
                    causal, mask, ctx.parts.scale,
                )  # fmt: skip
                of_query[:, :, mine] += dq
                of_keys[:, :, theirs] += dkv
            return of_keys

        of_keys = ctx.parts.exchange.backward(kept, attend)
        return of_query.to(query.dtype), of_keys, None


def _forward(
    query: torch.Tensor, keys: torch.Tensor, causal: bool, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of one part, by the device's operator."""
    key, value = _by_head(query, keys)
    wide = pad(value, key.shape[-1], -1)  # as operators want it
    if _on_cpu(query):
        output, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, wide, 0.0, causal, attn_mask=mask, scale=scale
        )
        return output[..., : value.shape[-1]], lse
    if mask is None and query.dtype != torch.float32:
        output, lse = _aten._scaled_dot_product_flash_attention(query, key, wide, 0.0, causal, scale=scale)[:2]
        return output[..., : value.shape[-1]], lse
    scores = _scores(query, key, causal, mask, scale)
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp().to(value.dtype) @ value, lse


def _backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    keys: torch.Tensor,
    causal: bool,
    mask: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of queries, and of [K, V], from one part; ``output`` and ``lse`` are those of all parts together."""
    key, value = _by_head(query, keys)
    size = value.shape[-1]
    value, output, grad = (pad(each, key.shape[-1], -1) for each in (value, output, grad))
    if _on_cpu(query):
        gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, output, lse, 0.0, causal, attn_mask=mask, scale=scale
        )
    elif mask is None and query.dtype != torch.float32:
        unused = torch.zeros(2, dtype=torch.uint64, device=query.device)
        gradients = _aten._scaled_dot_product_flash_attention_backward(
            grad, query, key, value, output, lse.contiguous(), None, None, query.shape[2], key.shape[2], 0.0, causal,
            unused, unused, scale=scale,
        )  # fmt: skip
    else:
        weights = (_scores(query, key, causal, mask, scale) - lse.unsqueeze(-1)).exp()
        of_weights = (grad @ value.mT).float() - (grad.float() * output).sum(-1, keepdim=True)
        of_scores = (weights * of_weights * scale).to(key.dtype)
        gradients = (of_scores @ key, of_scores.mT @ query, weights.to(grad.dtype).mT @ grad)
    dq, dk, dv = gradients
    return dq, torch.cat([each.unflatten(1, (keys.shape[1], -1)).sum(2) for each in (dk, dv[..., :size])], -1)


def _on_cpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _by_head(query: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Keys and values of each head of queries."""
    size = query.shape[-1]
    return keys.repeat_interleave(query.shape[1] // keys.shape[1], 1).split((size, keys.shape[-1] - size), -1)


def _scores(
    query: torch.Tensor, key: torch.Tensor, causal: bool, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """All scores in fp32: on GPUs, for ranges with a mask and for fp32, of which flash attention takes neither."""
    scores = (query @ key.mT).float() * scale
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores.masked_fill_(later, -torch.inf)
    return scores if mask is None else scores + mask


class _Swap(torch.autograd.Function):
    """(B, H, t, d) <-> (B, H/c, length, d): this rank's tokens of all heads, or all tokens of its heads."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, pieces: Pieces, to_heads: bool) -> torch.Tensor:
        ctx.pieces, ctx.to_heads, communicator = pieces, to_heads, pieces.communicator
        if to_heads:
            parts = pad(tensor, pieces.longest, 2).unflatten(1, (pieces.ranks, -1)).movedim(1, 0).contiguous()
            return pieces.join(list(communicator.all_to_all(parts)), 2)
        parts = torch.stack([pieces.cut(tensor, rank, 2) for rank in range(pieces.ranks)])
        heads = communicator.all_to_all(parts).movedim(0, 1).flatten(1, 2)
        return heads[:, :, : pieces.tokens()]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_create_graph("attention")
        return _Swap.apply(grad, ctx.pieces, not ctx.to_heads), None, None


class _GatherKeys(torch.autograd.Function):
    """(B, G, t, d) -> (B, G, length, d): of all tokens; backward adds up the gradients of all ranks' queries."""

    @staticmethod
    def forward(ctx: Any, keys: torch.Tensor, exchange: _GatherExchange) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.gather(keys)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        refuse_create_graph("attention")
        return ctx.exchange.scatter(grad), None
