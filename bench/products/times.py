"""The distributed products by the clock: on local CPU ranks, over a limited link, with and without overlap.

A link: ranks play hosts, and what leaves a host is held to a rate (axo.comm.hosts.simulate). Each round runs every case
four times in turn, so that rivals meet the same machine:

    overlapped      as the algorithm is written: blocks travel while others are multiplied
    blocking        every collective is complete before the next line runs
    communication   overlapped, products left out
    products        collectives left out

Times are of the slowest rank, medians over rounds, the first round left out.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

import axo
from axo.comm.hosts import simulate
from axo.grid import Grid
from axo.matmul.algorithm import Algorithm, Shape

from . import algorithms

WAYS = ("overlapped", "blocking", "communication", "products")
STEPPED = ("cannon", "summa", "tesseract")  # q steps on a q x q grid, each of which sends and multiplies


class Link(NamedTuple):
    """How ranks are spread over hosts, and what leaves one in bytes a second; 0 ranks a host: all on one, no limit."""

    ranks_per_host: int
    rate: float


class Case(NamedTuple):
    """One product to time."""

    algorithm: str
    grid: str
    shape: Shape


class _Done:
    def __init__(self, result: Any) -> None:
        self._result = result

    def wait(self) -> Any:
        return self._result


class _Blocking:
    """A communicator whose operations are complete when they return; a send is when the caller waits for it."""

    def __init__(self, comm: axo.Communicator) -> None:
        self._comm, self.rank, self.size = comm, comm.rank, comm.size

    def __getattr__(self, op: str) -> Callable[..., Any]:
        call = getattr(self._comm, op)

        def complete(*args: Any, async_op: bool = False) -> Any:
            if op == "send":
                return call(*args, async_op=async_op)
            result = call(*args)
            return _Done(result) if async_op else result

        return complete


class _Silent:
    """A communicator that sends nothing and gives tensors of the right sizes."""

    def __init__(self, comm: axo.Communicator) -> None:
        self.rank, self.size = comm.rank, comm.size

    def __getattr__(self, op: str) -> Callable[..., Any]:
        def nothing(tensor: torch.Tensor, *_: Any, async_op: bool = False) -> Any:
            result = tensor
            if op == "all_gather":
                result = tensor.new_zeros(self.size, *tensor.shape)
            elif op == "reduce_scatter":
                result = tensor[: tensor.shape[0] // self.size]
            return _Done(result) if async_op else result

        return nothing


class _NoProducts(TorchFunctionMode):
    """Products give tensors of the right sizes and compute nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("matmul", "__matmul__"):
            return args[0].new_empty(args[0].shape[0], args[1].shape[1])
        if name == "addmm_":
            return args[0]
        return func(*args, **(kwargs or {}))


def times(cases: Sequence[Case], link: Link, rounds: int) -> list[dict[str, Any]]:
    """On every rank: for each case milliseconds by way, and elements of C, dA and dB that are wrong."""
    torch.set_num_threads(1)
    if link.ranks_per_host:
        simulate(link.ranks_per_host, rate=link.rate)
    connected = {grid: axo.connect(grid) for grid in dict.fromkeys(case.grid for case in cases)}
    prepared = [_Prepared(case, connected[case.grid]) for case in cases]
    seen: list[dict[str, list[float]]] = [{way: [] for way in WAYS} for _ in cases]
    wrong = [0] * len(cases)
    for _ in range(rounds + 1):
        for index, case in enumerate(prepared):
            for way in WAYS:
                spent, bad = case.run(way)
                seen[index][way].append(spent)
                wrong[index] += bad
    for comms in connected.values():
        comms.close()
    return [
        {way: 1e3 * statistics.median(series[1:]) for way, series in each.items()} | {"#wrong": bad}
        for each, bad in zip(seen, wrong, strict=True)
    ]


class _Prepared:
    """One case on this rank: its parts, and the expected ones."""

    def __init__(self, case: Case, comms: Any) -> None:
        self.shape, self.comms, self.algorithm = case.shape, comms, algorithms[case.algorithm]
        generator = torch.Generator().manual_seed(0)
        # whole numbers from -2 to 2: fp32 sums of them are exact in any order
        a, b, grad = (torch.randint(-2, 3, case.shape.of(matrix), generator=generator).float() for matrix in "ABC")
        layouts = (self.algorithm.a, self.algorithm.b, self.algorithm.c)
        slices = [
            layout.slices(comms.grid, comms.coords, case.shape.of(matrix))
            for layout, matrix in zip(layouts, "ABC", strict=True)
        ]
        self.parts = [whole[part].clone() for whole, part in zip((a, b, grad), slices, strict=True)]
        of_a, of_b, of_c = slices
        self.expected = [(a @ b)[of_c].clone(), (grad @ b.T)[of_a].clone(), (a.T @ grad)[of_b].clone()]
        self.views = {"overlapped": comms, "communication": comms}
        for way, kind in (("blocking", _Blocking), ("products", _Silent)):
            lines = {axis: kind(comms.axis(axis)) for axis in "xyz"}
            self.views[way] = SimpleNamespace(grid=comms.grid, coords=comms.coords, **lines)

    def run(self, way: str) -> tuple[float, int]:
        """Seconds of the slowest rank, and wrong elements over all of them."""
        world, view = self.comms.world, self.views[way]
        world.barrier()
        start = time.perf_counter()
        if way == "communication":
            with _NoProducts():
                found = self._both(view)
        else:
            found = self._both(view)
        spent = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        bad = 0
        if way in ("overlapped", "blocking"):
            bad = sum(int((got != want).sum()) for got, want in zip(found, self.expected, strict=True))
        return world.all_reduce(spent, "max").item(), int(world.all_reduce(torch.tensor([bad])).item())

    def _both(self, view: Any) -> list[torch.Tensor]:
        a, b, grad = self.parts
        c = self.algorithm.forward(view, a, b, self.shape)
        return [c, *self.algorithm.backward(view, a, b, grad, self.shape)]


def busiest(algorithm: Algorithm, grid: Grid, shape: Shape) -> tuple[float, float]:
    """Elements that leave the busiest rank in both passes, and the collectives that it takes part in."""
    sent = calls = 0.0
    for transfer in algorithm.cost(grid, shape):
        ranks, block = grid.world_size, transfer.elements / transfer.deliveries
        lines = 1 if transfer.op == "send" else ranks / grid.size(transfer.axis)
        each = transfer.deliveries / ranks
        if transfer.axis in algorithm.a.only:
            each = transfer.calls / lines  # one rank of a line holds the parts: it, or all others, send a block a call
        elif transfer.op == "send":
            each = -(-transfer.deliveries // ranks)  # whole blocks; in a skew some stay at home
        sent += each * block
        calls += transfer.calls / (ranks if transfer.op == "send" else lines)
    return sent, calls


def hidden(case: Case, seen: dict[str, float]) -> float | None:
    """The share that was hidden of what could be: 1 is all of it. None where nothing goes in steps, or one is small.

    Of q steps all but the first can send while another multiplies: communication along x and y, or products, whichever
    is less.
    """
    grid, cost = Grid.parse(case.grid), algorithms[case.algorithm].cost(Grid.parse(case.grid), case.shape)
    least, most = sorted((seen["communication"], seen["products"]))
    if case.algorithm not in STEPPED or grid.x == 1 or least < most / 4:
        return None
    whole = sum(transfer.elements for transfer in cost)
    stepped = sum(transfer.elements for transfer in cost if transfer.axis != "z") / whole
    could = (1 - 1 / grid.x) * min(stepped * seen["communication"], seen["products"])
    return (seen["communication"] + seen["products"] - seen["overlapped"]) / could


class Model(NamedTuple):
    """Milliseconds = link * (what leaves the busiest rank / rate) + call * collectives + product * flops of a rank."""

    link: float
    call: float
    product: float
    rate: float

    def milliseconds(self, case: Case) -> float:
        """Of both passes of a case."""
        return sum(weight * value for weight, value in zip(self, terms(case, self.rate), strict=False))


def terms(case: Case, rate: float) -> tuple[float, float, float]:
    """What :class:`Model` weighs: milliseconds of the link, collectives, 1e9 flop."""
    grid, shape = Grid.parse(case.grid), case.shape
    sent, calls = busiest(algorithms[case.algorithm], grid, shape)
    return 4e3 * sent / rate, calls, 6e-9 * shape.m * shape.k * shape.n / grid.world_size


def calibrated(cases: Sequence[Case], milliseconds: Sequence[float], rate: float) -> Model:
    """The weights that fit best, none negative: least squares of relative errors, over every choice of terms."""
    rows = torch.tensor([[*terms(case, rate)] for case in cases], dtype=torch.float64)
    rows /= torch.tensor(milliseconds, dtype=torch.float64)[:, None]
    ones, best, weights = torch.ones(len(cases), 1, dtype=torch.float64), float("inf"), [0.0, 0.0, 0.0]
    for kept in ([0, 1, 2], [0, 1], [0, 2], [1, 2], [0], [1], [2]):
        found = torch.linalg.lstsq(rows[:, kept], ones, driver="gelsd").solution
        error = float((rows[:, kept] @ found - ones).square().sum())
        if bool((found >= 0).all()) and error < best:
            best, weights = error, [0.0, 0.0, 0.0]
            for term, value in zip(kept, found.flatten().tolist(), strict=True):
                weights[term] = value
    return Model(weights[0], weights[1], weights[2], rate)
