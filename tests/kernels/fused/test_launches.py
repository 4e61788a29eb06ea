"""How many launches, products, collectives and copied bytes an operation is, counted where torch dispatches them."""

import itertools
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from axo_kernels import adapt
from axo_kernels import device as devices
from axo_kernels.comm.peers import PeerMemory
from axo_kernels.fused.strategies import FusedPlan, run_all_gather, run_reduce_scatter, start_all_reduce
from axo_kernels.fused.workspace import empty_buffer
from bench.lib.simulated import SimulatedCommunicator
from tests.kernels.comm.test_device import Recorder, Stream

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

    def keep(self, workspace, packed, kept):
        self.issued.append(kept.nbytes)
        super().keep(workspace, packed, kept)

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
    wide = torch.randn((300, k), generator=generator)
    flat = tall.T.contiguous()
    for layout, a, b in (("TN", tall, wide.T), ("NN", flat, wide.T), ("NT", flat, wide)):
        out, products, collectives, copied = counted(
            rank, lambda comm, a=a, b=b, layout=layout: run_reduce_scatter(a, b, comm, layout, way)
        )
        torch.testing.assert_close(out, SIZE * (flat @ wide.T)[:rows])
        assert (products, collectives, copied) == (CHUNKS, CHUNKS, out.nbytes), "columns, each copied once"
    sides = (rank > 0) + (rank < SIZE - 1)
    for given in (None, bias):
        added = 0 if given is None else given
        (out, _), products, collectives, copied = counted(
            rank, lambda comm, given=given: run_all_gather(x, w, comm, "NT", "b", way, given, keep=False)
        )
        torch.testing.assert_close(out, (x @ w.T).repeat(1, SIZE) + added)
        assert (products, collectives, copied) == (1 + sides * CHUNKS, CHUNKS, 0)
        (_, kept), *_, copied = counted(
            rank, lambda comm, given=given: run_all_gather(x, w, comm, "NT", "b", way, given, keep=True)
        )
        assert torch.equal(kept, w.repeat(SIZE, 1)) and copied == kept.nbytes
        for layout, b in (("NT", x), ("NN", x.T.contiguous())):
            short = None if given is None else given[:7]
            (out, _), products, _, copied = counted(
                rank,
                lambda comm, b=b, layout=layout, short=short: run_all_gather(
                    w, b, comm, layout, "a", way, short, keep=False
                ),
            )
            torch.testing.assert_close(out, (w @ x.T).repeat(SIZE, 1) + (0 if short is None else short))
            assert (products, copied) == (1 + sides * CHUNKS, 0)

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
        last = [whole.nbytes] if keep else ["flag"]  # with the last flag, in the same launch
        assert comms[0].issued == [*["flag"] * (CHUNKS - 1), *last]
        assert kept is None if not keep else torch.equal(kept, whole)


class Launched(TorchDispatchMode):
    """What the host gives a GPU in an operation, against recorders: ``launches`` are products, kernels, copies,
    collectives and flags; ``orders`` what lets a stream wait for another."""

    def __init__(self):
        super().__init__()
        self.launches, self.orders = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::").removesuffix("_")
        self.launches += name in (*PRODUCTS, "add", "mul", "copy", "clone", "fill", "zero", "cat", "pad")
        return function(*args, **(kwargs or {}))

    def __getattr__(self, name):
        if name.endswith("_kernel"):
            return self
        raise AttributeError(name)

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.launches += 1

        return launch


def launches(monkeypatch, operation, strategy, chunks, rank, size=4, keep=True):
    """Launches of an operation's second call, which finds its workspace, and how often a stream is ordered."""
    monkeypatch.setattr(Recorder, "size", size)
    monkeypatch.setattr(Recorder, "rank", rank)
    recorder = Recorder()
    comm = adapt(recorder, window=lambda on, *like: empty_buffer(*like))
    comm.peer_memory = lambda nbytes, device: PeerMemory(torch.zeros(nbytes, dtype=torch.uint8), (0,) * size)
    comm._unreachable, comm.maximum = "", lambda values: values
    count = Launched()
    monkeypatch.setattr(devices, "runs_triton", lambda device: True)
    monkeypatch.setattr(devices, "signal_kernels", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(recorder.log))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: handle)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    windows = "windows" in strategy
    way = FusedPlan(strategy.split()[0], chunks, windows=windows)
    x, w = torch.ones(512, 16), torch.ones(256, 16)
    if operation == "wide reduce_scatter":
        x, w = torch.ones(256, 256), torch.ones(4096, 256)

    def once():
        if operation == "all_gather":
            run_all_gather(x, w, comm, "NT", "b", way, keep=keep)
        elif operation == "all_reduce":
            start_all_reduce(x, w, comm, "NT", way)[1]()
        else:
            run_reduce_scatter(x, w, comm, "NT", way)

    once()
    on = recorder if not windows else comm.windowed().communicator
    count.launches = 0
    on.log.clear()
    with count:
        once()
    calls = [entry for entry in on.log if not isinstance(entry, str)]  # collectives and flags
    return count.launches + len(calls), len(on.log) - len(calls)


@pytest.mark.parametrize(
    "operation, strategy, expected",
    [
        ("all_reduce", "serial", lambda c, sides: 2),
        ("reduce_scatter", "serial", lambda c, sides: 2),
        ("all_gather", "serial", lambda c, sides: 2),
        ("reduce_scatter", "push", lambda c, sides: 2),
        ("all_reduce", "push", lambda c, sides: 3),
        ("all_reduce", "split", lambda c, sides: 2 * c),
        ("reduce_scatter", "split", lambda c, sides: 2 * c),
        ("wide reduce_scatter", "split", lambda c, sides: 3 * c),
        ("all_reduce", "signal", lambda c, sides: 1 + 2 * c),
        ("reduce_scatter", "signal", lambda c, sides: 1 + 2 * c),
        ("all_gather", "signal", lambda c, sides: 2 + 2 * c),
        # the own product, then those of each chunk, which travels, and what is kept
        ("all_gather", "split", lambda c, sides: 1 + (2 + sides) * c),
        ("all_gather", "signal in windows", lambda c, sides: 2 + 2 * c),
        ("all_gather", "split in windows", lambda c, sides: 3 + (1 + sides) * c),
    ],
)
def test_how_many_launches_an_operation_is(monkeypatch, operation, strategy, expected):
    """On every rank, and with every number of chunks where nothing is cut, at most 6; else with each chunk a collective
    and what goes with it. Two chunks are at most 6 too, but for the gathers by products of each chunk."""
    for rank, chunks in itertools.product(range(SIZE), (2, 4, 8)):
        sides = (rank > 0) + (rank < SIZE - 1)  # of a rank, on which others' rows lie in a chunk
        count, orders = launches(monkeypatch, operation, strategy, chunks, rank)
        assert count == expected(chunks, sides), (rank, chunks, count)
        assert orders <= 2 + chunks
        if strategy in ("serial", "push"):
            assert count <= 6 and orders <= 1
        if strategy == "signal" or (strategy == "split" and operation != "all_gather"):
            assert count <= 6 or chunks > 2
