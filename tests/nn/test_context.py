"""Attention over sequences whose tokens lie on several ranks equals torch's own on one.

Oracles: ``torch.nn.functional.scaled_dot_product_attention`` with a mask that is written out here, and autograd.
"""

import contextlib
import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import axo
from axo.arrangement import TESSERACT
from axo.matmul import cost
from axo.nn import context_attention as module
from axo.nn.context import Pieces, next_labels, pieces_of, with_documents
from axo.placement import context_ranges, ranges_by_work
from tests.launcher import run_ranks
from tests.nn.support import assert_close, assert_counted

LIMIT = 1e-5


def whole_batch(length, heads=4, groups=2, values=8, dtype=torch.float32):
    torch.manual_seed(length)
    shapes = ((heads, 8), (groups, 8), (groups, values))
    return [torch.randn(2, count, length, size).to(dtype).requires_grad_() for count, size in shapes]


def seen(length, window=None, documents=None):
    """Which key each query sees: (1 or rows, 1, length, length)."""
    query, key = torch.arange(length)[:, None], torch.arange(length)
    mask = (key <= query) & (key > query - (window or length))
    mask = mask[None, None]
    return mask if documents is None else mask & (documents[:, None, :, None] == documents[:, None, None, :])


def serial(query, key, value, mask):
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


def positions(length):
    """Of two rows of documents of unequal lengths, some of one token."""
    rows = []
    for starts in ({0, 1, 2, length // 2}, {0, length // 3, length - 1}):
        place, row = 0, []
        for token in range(length):
            place = 0 if token in starts else place
            row.append(place)
            place += 1
        rows.append(row)
    return torch.tensor(rows)


def biased(mask, slopes):
    """The mask with ALiBi's biases, as a float."""
    length = mask.shape[-1]
    away = (torch.arange(length) - torch.arange(length)[:, None]) * slopes[:, None, None]
    return torch.where(mask, away, -torch.inf)


def attend(
    comms, kind, length, window=None, packed=False, dtype=torch.float32, limit=LIMIT, alibi=None, by_work=False, **sizes
):
    what = f"{kind}, {length} tokens, window {window}, packed {packed}, slopes {alibi}, by work {by_work}"
    place = positions(length)
    whole = whole_batch(length, dtype=dtype, **sizes)
    mask = seen(length, window, (place == 0).cumsum(1) if packed else None)
    output = serial(*whole, mask if alibi is None else biased(mask, alibi).to(dtype))
    direction = torch.randn(output.shape).to(dtype)
    expected = [output, *torch.autograd.grad(output, whole, direction)]
    context = comms.context

    ranges = ranges_by_work((place + 1).sum(0).tolist(), context.size) if by_work else None

    def cut(tensor, dim=2):
        mine = (
            axo.placement.context_ranges(length, context.size, context.rank) if ranges is None else ranges[context.rank]
        )
        return torch.cat([tensor.narrow(dim, 0, 0), *(tensor.narrow(dim, a, b - a) for a, b in mine)], dim)

    mine = [cut(each.detach()).requires_grad_() for each in whole]
    pieces = pieces_of(cut(place, 1), context, kind, ranges)
    assert pieces.length == length
    if packed:
        pieces = with_documents(pieces, cut(place, 1))
    with axo.count_collectives() as counts:
        output = axo.nn.attention(*mine, pieces, window=window, alibi=alibi)
        output.backward(cut(direction))
    rows, heads, _, size = mine[0].shape
    shape = (rows, pieces.longest, heads, mine[1].shape[1], size)
    sizes = {"value_size": mine[2].shape[3], "itemsize": mine[0].itemsize}
    calls = cost.attention(comms.grid, *shape, context=context.size, kind=kind, **sizes)
    assert_counted(counts, calls)
    found = [output, *(each.grad for each in mine)]
    for name, one, other in zip(("output", "query", "key", "value"), found, expected, strict=True):
        assert_close(one, cut(other), limit, f"{what}: {name} on rank {context.rank}")


def every_kind(context):
    comms = axo.connect(f"1x1x{context}x1", context=context)
    for kind, length in itertools.product(("gather", "ring", "heads"), (1, 3, 16, 37)):
        for window, packed in ((None, False), (5, False), (None, True), (4, True)):
            attend(comms, kind, length, window, packed)
        attend(comms, kind, 37, packed=True, by_work=True)
        attend(comms, kind, 37, 5, True, values=6)
        for window, packed in ((None, False), (5, True)):
            attend(comms, kind, 37, window, packed, alibi=0.5 ** torch.arange(1.0, 5))
    attend(comms, "ring", 37, heads=3, groups=1)
    attend(comms, "heads", 37, heads=4, groups=1)
    module._QUERIES = 4  # several ranges of queries in a piece
    for kind in ("gather", "ring", "heads"):
        attend(comms, kind, 61, 7, True)
        attend(comms, kind, 80, packed=True, by_work=True)
        attend(comms, kind, 32, dtype=torch.bfloat16, limit=2e-2)


@pytest.mark.parametrize("context", [2, 4])
def test_every_kind_equals_torch(context):
    run_ranks(every_kind, context, context)


def attended(lengths, cut, monkeypatch):
    """Scores that each rank computes for packed documents, counted where the operator is called."""
    length, ranks = sum(lengths), len(cut)
    numbers = torch.cat([torch.full((size,), number) for number, size in enumerate(lengths)])[None]
    monkeypatch.setattr(module, "_QUERIES", 32)
    counts = []
    for rank in range(ranks):
        alone = replace(Pieces(length, SimpleNamespace(size=ranks, rank=rank), documents=numbers), cut_by=cut)
        parts = module._Parts(module._LocalExchange(alone), 1.0, None)
        of = [parts.of(alone.ranges(other), torch.zeros(1)) for other in range(ranks)]
        counts.append(sum((q.stop - q.start) * (k.stop - k.start) for part in of for q, k, *_ in part))
    return max(counts) / (sum(counts) / ranks)


@pytest.mark.parametrize(
    ("lengths", "before", "after"),
    [
        ([4096], 1.0, 1.0),
        ([2600, *[34] * 44], 2.3, 1.1),
        ([*[64] * 32, 2048], 1.8, 1.0),
        ([500, 700, 300, 2000, 596], 1.6, 1.1),
    ],
)
def test_pieces_cut_by_work_are_balanced(monkeypatch, lengths, before, after):
    """Eight ranks; the fullest's share of attention over the mean, with pieces of equal tokens, and cut by work."""
    work = [place + 1 for size in lengths for place in range(size)]
    by_work = ranges_by_work(work, 8)
    even = [context_ranges(len(work), 8, rank) for rank in range(8)]
    tokens = [sum(high - low for low, high in ranges) for ranges in by_work]
    assert max(tokens) - min(tokens) <= 8 and sum(tokens) == len(work)
    assert sorted(token for ranges in by_work for low, high in ranges for token in range(low, high)) == [
        *range(len(work))
    ]
    shares = [attended(lengths, cut, monkeypatch) for cut in (even, by_work)]
    print(f"{len(lengths)} documents: {shares[0]:.2f} -> {shares[1]:.2f}")
    assert shares[0] >= before and shares[1] <= after + 0.01, shares


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_what_gpus_compute_beside_flash_attention(monkeypatch, causal, masked):
    """Ranges with a mask, and all of fp32, are written out there: the same as the operator of CPUs gives."""
    query, keys, grad = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 14), torch.randn(2, 4, 6, 6)
    mask = torch.zeros(6, 6).masked_fill(~seen(6, 3)[0, 0], -1e30) if masked else None
    rest = (keys, causal and not masked, mask, 0.3)
    expected = module._forward(query, *rest)
    gradients = module._backward(grad, query, *expected, *rest)
    monkeypatch.setattr(module, "_on_cpu", lambda tensor: False)
    output = module._forward(query, *rest)
    found = module._backward(grad, query, *output, *rest)
    for one, other in zip((*output, *found), (*expected, *gradients), strict=True):
        assert_close(one, other, LIMIT, f"causal {causal}, mask {masked}")


def mistakes():
    comms = axo.connect("1x1x4x1", context=2)
    tokens = torch.zeros(2, 3 + 2 * (comms.rank == 1), dtype=torch.int64)
    with (
        pytest.raises(ValueError, match="no pieces of the same sequences of")
        if comms.rank < 2
        else contextlib.nullcontext()
    ):
        pieces_of(tokens, comms.context)
    pieces = pieces_of(tokens[:, :3], comms.context, "heads")
    for heads, count, error in ((3, 3, "cannot give a rank's 3 heads"), (4, 2, "2 tokens are not the 3 that rank")):
        with pytest.raises(ValueError, match=error):
            axo.nn.attention(*torch.zeros(3, 2, heads, count, 8), pieces)
    slopes = torch.ones(4, requires_grad=True)
    with pytest.raises(axo.Refused, match="alibi gets no gradient, and these slopes require one"):
        axo.nn.attention(*torch.zeros(3, 2, 4, 3, 8), pieces, alibi=slopes)
    with torch.no_grad():
        axo.nn.attention(*torch.zeros(3, 2, 4, 3, 8), pieces, alibi=slopes)
    batch = {"ids": torch.zeros(4, 32), "count": torch.zeros(4), "more": [torch.zeros(4, 32, 3)]}
    assert axo.shard_batch(batch, comms, positions=torch.zeros(4, 32))["ids"].shape == (2, 16)
    for shape, error in (
        ((4, 28), r"of \(rows, tokens\) = \(4, 28\) are not those of a tensor of shape \(4, 32\)"),
        ((2, 32), r"of \(rows, tokens\) = \(2, 32\) are not those"),
        ((3, 32), r"shape \(3, 32\) are not \(rows, tokens\), of a multiple of 2 rows"),
        ((32,), r"shape \(32,\) are not \(rows, tokens\)"),
    ):
        with pytest.raises(ValueError, match=error):
            axo.shard_batch(batch, comms, positions=torch.zeros(shape))
    with pytest.raises(ValueError, match="context='star' is not known"):
        pieces_of(tokens[:, :3], comms.context, "star")
    with pytest.raises(ValueError, match="numbers of 6 tokens beside 3 tokens of this rank; cut labels"):
        next_labels(torch.zeros(2, 6, dtype=torch.int64), pieces)
    with pytest.raises(axo.Refused, match="algorithm"):
        comms.arrange(TESSERACT)
    with pytest.raises(ValueError, match="context=3 ranks that share sequences do not divide z=4"):
        axo.connect("1x1x4x1", context=3)
    with pytest.raises(ValueError, match="rank 0 asks for context=1 and rank 3 for 2"):
        axo.connect("1x1x4x1", context=1 + (comms.rank == 3))


def test_mistakes():
    run_ranks(mistakes, 4)
