"""The goldfish mask against a loop over Python integers, its statistics, and the kernel in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from axo.nn.goldfish import goldfish_mask, goldfish_targets, torch_mask

MASK64 = (1 << 64) - 1


def slow_mask(row: list[int], k: int, h: int, ignore: int = -100) -> list[bool]:
    """The formula in Python's unbounded integers."""
    keep = []
    for i in range(len(row)):
        before = row[max(0, i - h) : i]
        if len(before) < h or ignore in before:
            keep.append(True)
            continue
        state = 0x243F6A8885A308D3
        for token in before:
            state = ((state ^ (token & MASK64)) * (-0x61C8864680B583EB & MASK64)) & MASK64
            state ^= state >> 33 & 0x7FFFFFFF
        keep.append((state >> 32 & 0x7FFFFFFF) % k != 0)
    return keep


@pytest.mark.parametrize("k, h", [(2, 13), (3, 4), (4, 1), (7, 50)])
def test_the_mask_is_the_formula(k, h):
    tokens = torch.randint(0, 50_000, (3, 200), generator=torch.Generator().manual_seed(k))
    tokens[1, 60:70] = -100
    expected = torch.tensor([slow_mask(row, k, h) for row in tokens.tolist()])
    assert torch.equal(goldfish_mask(tokens, k, h), expected)
    assert torch.equal(goldfish_mask(tokens.int(), k, h), expected)
    assert torch.equal(goldfish_mask(tokens.t().contiguous().t(), k, h), expected)
    assert not expected.all()


def test_the_same_tokens_lose_the_same_token_everywhere():
    generator = torch.Generator().manual_seed(0)
    passage = torch.randint(0, 256, (60,), generator=generator)
    masks = []
    for start in (0, 5, 31, 100):
        row = torch.randint(0, 256, (4, 200), generator=generator)
        row[2, start : start + 60] = passage
        masks.append(goldfish_mask(row, 2, 13)[2, start + 13 : start + 60])
    assert all(torch.equal(mask, masks[0]) for mask in masks)
    assert 0 < masks[0].sum() < masks[0].numel()


@pytest.mark.parametrize("k", [2, 3, 4, 10])
@pytest.mark.parametrize("vocabulary", [256, 50_000])
def test_one_of_k_is_left_out(k, vocabulary):
    tokens = torch.randint(0, vocabulary, (50, 4_013), generator=torch.Generator().manual_seed(1))
    dropped = 1 - goldfish_mask(tokens, k, 13)[:, 13:].float().mean().item()
    assert abs(dropped - 1 / k) < 0.02 / k


def test_text_loses_one_of_k_too():
    """Real text repeats itself, so its distinct contexts are what is spread evenly."""
    import axo.train.data

    text = b"".join(path.read_bytes() for path in axo.train.data.default_text()[:40])[:400_000]
    tokens = torch.tensor(list(text))
    keep = goldfish_mask(tokens, 2, 13)[13:]
    contexts = {text[i : i + 13]: bool(keep[i]) for i in range(len(text) - 13)}
    dropped = 1 - sum(contexts.values()) / len(contexts)
    assert abs(dropped - 0.5) < 0.01
    assert all(contexts[text[i : i + 13]] == bool(keep[i]) for i in range(0, len(text) - 13, 7))


def test_the_k_masks_share_the_tokens_among_them():
    tokens = torch.randint(0, 256, (1_000,), generator=torch.Generator().manual_seed(2))
    dropped = sum((~goldfish_mask(tokens, 3, 5, drop_value=value)).int() for value in range(3))
    assert torch.equal(dropped, (torch.arange(1_000) >= 5).int())


def test_targets_see_the_first_input_too():
    text = torch.randint(0, 256, (2, 101), generator=torch.Generator().manual_seed(3))
    targets = goldfish_targets(text[:, :-1], text[:, 1:], 2, 5)
    keep = goldfish_mask(text, 2, 5)[:, 1:]
    assert torch.equal(targets, torch.where(keep, text[:, 1:], -100))
    assert (targets == -100).any()


def _interpreted() -> None:
    from axo_kernels.device import runs_triton

    assert runs_triton(torch.device("cpu"))
    generator = torch.Generator().manual_seed(4)
    for shape, k, h in (((3, 700), 2, 13), ((2, 2, 256), 3, 4), ((257,), 5, 1), ((1, 10), 2, 13), ((2, 0), 2, 3)):
        tokens = torch.randint(0, 50_000, shape, generator=generator)
        if tokens.numel() > 100:
            tokens.view(-1)[40:43] = -100
        for ids in (tokens, tokens.int()):
            assert torch.equal(goldfish_mask(ids, k, h), torch_mask(ids, k, h)), (shape, k, h)
    strided = torch.randint(0, 99, (64, 6), generator=generator).t()
    assert torch.equal(goldfish_mask(strided, 2, 3), torch_mask(strided, 2, 3))


def test_the_kernel_gives_the_same_bits(interpreter):
    pytest.importorskip("triton", reason="Triton is not installed")
    interpreter.run(_interpreted)


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ((torch.zeros(4), 2, 3), TypeError, "int32 or int64"),
        ((torch.zeros(4, dtype=torch.int64), 1, 3), ValueError, "k=1"),
        ((torch.zeros(4, dtype=torch.int64), 2, 0), ValueError, "h=0"),
        ((torch.tensor(4), 2, 3), ValueError, "no dim"),
    ],
)
def test_bad_input(arguments, error, words):
    with pytest.raises(error, match=words):
        goldfish_mask(*arguments)
    ids = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match="differ"):
        goldfish_targets(ids, ids[:3])
