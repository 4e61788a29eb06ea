"""How many products, collectives and copied bytes a split operation is, counted where torch dispatches them."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from axo_kernels.fused.strategies import FusedPlan, run_all_gather, run_reduce_scatter, start_all_reduce
from bench.lib.simulated import SimulatedCommunicator

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
SIZE, CHUNKS = 4, 3


class Counted(TorchDispatchMode):
    """Counts products, and the bytes that copies write."""

    def __init__(self):
        super().__init__()
        self.products, self.copied = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::").removesuffix("_")
        self.products += name in PRODUCTS
        result = function(*args, **(kwargs or {}))
        if name in ("copy", "clone", "_to_copy"):
            self.copied += result.nbytes
        return result


class Silent(SimulatedCommunicator):
    """Its collectives, which run on a thread of their own, are counted apart."""

    def __init__(self, rank):
        super().__init__(SIZE, 1e15, torch.device("cpu"))
        self.rank, self.collectives = rank, 0
        self.issued = []  # what the communication stream is given, in order

    def write_flag(self, workspace, number):
        self.issued.append("flag")
        super().write_flag(workspace, number)

    def copy(self, out, tensor):
        self.issued.append(tensor.nbytes)
        super().copy(out, tensor)

    def _run(self, effect, moved):
        self.collectives += 1
        return super()._run(effect, moved)


def counted(rank, operation):
    comm = Silent(rank)
    with Counted() as found:
        result = operation(comm)
    return result, found.products, comm.collectives, found.copied


@pytest.mark.parametrize("rank", range(SIZE))
def test_a_split_operation_is_one_product_a_chunk(rank):
    """All ranks hold the same here. Blocks and shards of 10 rows do not divide over 3 chunks."""
    generator = torch.Generator().manual_seed(rank)
    rows, shard, k = 10, 10, 12
    x, w, tall, bias = (
        torch.randn(shape, generator=generator) for shape in ((7, k), (shard, k), (k, SIZE * rows), (SIZE * shard,))
    )
    way = FusedPlan("split", CHUNKS)
    y = torch.randn((k, 6), generator=generator)
    for layout, a, b in (
        ("TN", tall, y),
        ("NN", tall.T.contiguous(), y),
        ("NT", tall.T.contiguous(), y.T.contiguous()),
    ):
        out, products, collectives, copied = counted(
            rank, lambda comm, a=a, b=b, layout=layout: run_reduce_scatter(a, b, comm, layout, way)
        )
        torch.testing.assert_close(out, SIZE * (tall.T @ y)[:rows])  # the simulation keeps the first block
        assert (products, collectives, copied) == (CHUNKS, CHUNKS, 0), layout
    sides = (rank > 0) + (rank < SIZE - 1)
    for given in (None, bias):
        added = 0 if given is None else given
        (out, _), products, collectives, copied = counted(
            rank, lambda comm, given=given: run_all_gather(x, w, comm, "NT", "b", way, given, keep=False)
        )
        torch.testing.assert_close(out, (x @ w.T).repeat(1, SIZE) + added)
        assert (products, collectives, copied) == (1 + sides * CHUNKS, CHUNKS, w.nbytes)
        (_, kept), *_, copied = counted(
            rank, lambda comm, given=given: run_all_gather(x, w, comm, "NT", "b", way, given, keep=True)
        )
        assert torch.equal(kept, w.repeat(SIZE, 1)) and copied == w.nbytes + kept.nbytes
        for layout, b in (("NT", x), ("NN", x.T.contiguous())):
            short = None if given is None else given[:7]
            (out, _), products, _, copied = counted(
                rank,
                lambda comm, b=b, layout=layout, short=short: run_all_gather(
                    w, b, comm, layout, "a", way, short, keep=False
                ),
            )
            torch.testing.assert_close(out, (w @ x.T).repeat(SIZE, 1) + (0 if short is None else short))
            assert (products, copied) == (1 + sides * CHUNKS, w.nbytes)

    def summed(comm):
        out, finish = start_all_reduce(x, w, comm, "NT", way)
        finish()
        return out

    out, products, collectives, copied = counted(rank, summed)
    torch.testing.assert_close(out, SIZE * (x @ w.T))
    assert (products, collectives, copied) == (CHUNKS, CHUNKS, 0)


@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("gather", ["a", "b"])
def test_a_signalled_gather_keeps_what_came_without_holding_the_product_up(rank, gather):
    """The product's own stream copies the own shard alone. What is kept is copied once, by the communication stream and
    behind the last flag."""
    generator = torch.Generator().manual_seed(rank)
    x, w = torch.randn((7, 12), generator=generator), torch.randn((10, 12), generator=generator)
    operands = (x, w) if gather == "b" else (w, x)
    for keep in (False, True):
        comms = []

        def operation(comm, keep=keep, comms=comms):
            comms.append(comm)
            return run_all_gather(*operands, comm, "NT", gather, FusedPlan("signal", CHUNKS), keep=keep)

        (out, kept), _, collectives, copied = counted(rank, operation)
        whole = w.repeat(SIZE, 1)
        torch.testing.assert_close(out, x @ whole.T if gather == "b" else whole @ x.T)
        assert (collectives, copied) == (CHUNKS, w.nbytes)
        *flags, first, second, third = comms[0].issued if keep else [*comms[0].issued, 0, 0, 0]
        assert flags == CHUNKS * ["flag"]
        assert kept is None if not keep else torch.equal(kept, whole) and first + second + third == kept.nbytes
