"""What sequences over ranks send, beside torch's own context parallelism and the formulas of others.

Oracles: torch's ring (``torch.distributed.tensor.experimental``), run on CPU ranks with the CPU's operator, which its
dispatcher does not know; ``scaled_dot_product_attention`` on one rank. The table is that of docs/long.md
(``pytest -s tests/nn/test_context_rivals.py``).
"""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F

import axo
from axo.nn.context import Pieces
from tests.launcher import run_ranks
from tests.nn.support import assert_close

RANKS, TOKENS, HEADS, SIZE = 4, 256, 8, 16
LIMIT = 2e-2  # bf16
MOVED = {  # bytes that leave a rank on a ring algorithm, of those that it puts in
    "send": 1, "recv": 0, "all_gather": RANKS - 1, "reduce_scatter": (RANKS - 1) / RANKS,
    "all_to_all": (RANKS - 1) / RANKS,
}  # fmt: skip


def counting(plain, times, moved):
    def counted(tensor, *args, **options):
        moved[-1] += times * tensor.nbytes
        return plain(tensor, *args, **options)

    return counted


def torchs_own(method, query, key, value, grad):
    """Output and gradients, and bytes that leave this rank forward and backward."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as rival

    rival.set_rotate_method(method)
    moved, group = [0.0], dist.group.WORLD
    with pytest.MonkeyPatch.context() as patch:
        for name, op in (("permute_tensor", "send"), ("all_gather_single", "all_gather")):
            patch.setattr(functional, name, counting(getattr(functional, name), MOVED[op], moved))
        aten = torch.ops.aten
        output, lse, *_ = rival._templated_ring_attention(
            group, 2, aten._scaled_dot_product_flash_attention_for_cpu, query, key, value, is_causal=True, dropout_p=0.0
        )
        moved.append(0.0)
        gradients = rival._templated_ring_attention_backward(
            group, 2, aten._scaled_dot_product_flash_attention_for_cpu_backward.default, grad, "grad_out", query, key,
            value, output, lse, True, dropout_p=0.0,
        )  # fmt: skip
    return [output, *gradients[:3]], moved


def own(pieces, query, key, value, grad):
    mine = [each.clone().requires_grad_() for each in (query, key, value)]
    moved = []
    with axo.count_collectives() as counts:
        output = axo.nn.attention(*mine, pieces)
    moved.append(sum(MOVED[op] * count.bytes for (op, *_), count in counts.items()))
    with axo.count_collectives() as counts:
        output.backward(grad)
    moved.append(sum(MOVED[op] * count.bytes for (op, *_), count in counts.items()))
    return [output, *(each.grad for each in mine)], moved


def rivals():
    dist.init_process_group("axo")
    comms = axo.connect(f"1x1x{RANKS}x1", context=RANKS)
    torch.manual_seed(0)
    whole = [torch.randn(1, HEADS, TOKENS, SIZE).bfloat16().requires_grad_() for _ in range(3)]
    output = F.scaled_dot_product_attention(*whole, is_causal=True)
    direction = torch.randn(output.shape).bfloat16()
    expected = [output, *torch.autograd.grad(output, whole, direction)]
    lies = Pieces(TOKENS, comms.context)
    given = [lies.cut(each.detach(), comms.context.rank, 2).contiguous() for each in (*whole, direction)]
    sent = {}
    for name, method in (("torch, allgather", "allgather"), ("torch, alltoall", "alltoall")):
        results, sent[name] = torchs_own(method, *given)
        for one, other in zip(results, expected, strict=True):
            assert_close(one.float(), lies.cut(other, comms.context.rank, 2).float(), LIMIT, name)
    for kind in ("ring", "gather", "heads"):
        results, sent[kind] = own(Pieces(TOKENS, comms.context, kind), *given)
        for one, other in zip(results, expected, strict=True):
            assert_close(one.float(), lies.cut(other, comms.context.rank, 2).float(), LIMIT, kind)
    return sent


def test_no_rival_sends_less():
    """In bytes of n, keys and values of a rank's tokens. Formulas: arXiv:2309.14509, section 3.2, where a rank counts
    what it keeps too: DeepSpeed-Ulysses 4 N h / c elements forward, Megatron's sequence parallelism 4 N h."""
    n = 2 * HEADS * TOKENS // RANKS * SIZE * 2
    whole = TOKENS * HEADS * SIZE * 2
    for sent in run_ranks(rivals, RANKS):
        table = {name: [size / n for size in both] for name, both in sent.items()}
        assert table["ring"] == [RANKS - 1, 2 * (RANKS - 1)]
        assert table["gather"] == [RANKS - 1, RANKS - 1]
        assert sent["heads"] == [4 * whole / RANKS * (RANKS - 1) / RANKS] * 2  # the formula, but for what stays
        assert table["heads"][0] < RANKS - 1 < 4 * whole / n
        # fp32 gradients of keys travel all the way round, and those of a rank's own part too
        assert table["torch, alltoall"] == [RANKS - 1, RANKS - 1 + 2 * RANKS]
        assert table["torch, allgather"] == table["torch, alltoall"]
    print(table)
