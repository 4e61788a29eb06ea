"""The distributed products by the clock: on local CPU ranks, over a limited link, with and without overlap.

A link: ranks play hosts, and what leaves a host is held to a rate (axo.comm.hosts.simulate). Each round runs every case
both ways in turn, so that rivals meet the same machine:

    overlapped      as the algorithm is written: blocks travel while others are multiplied
    blocking        every collective is complete before the next line runs

Times are of the slowest rank, medians over rounds, the first round left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

import axo
from axo.comm.hosts import simulate
from axo.matmul.algorithm import Shape

from ..lib.clock import slowest
from . import algorithms


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


def times(cases: Sequence[Case], link: Link, rounds: int) -> list[dict[str, Any]]:
    """On every rank: for each case milliseconds "overlapped" and "blocking", and elements of C, dA and dB, "#wrong"."""
    torch.set_num_threads(1)
    if link.ranks_per_host:
        simulate(link.ranks_per_host, rate=link.rate)
    connected = {grid: axo.connect(grid) for grid in dict.fromkeys(case.grid for case in cases)}
    prepared = [_Prepared(case, connected[case.grid]) for case in cases]
    for _ in range(rounds + 1):
        for case in prepared:
            case.run()
    for comms in connected.values():
        comms.close()
    return [
        {name: 1e3 * statistics.median(seconds[1:]) for name, seconds in case.seconds.items()} | {"#wrong": case.wrong}
        for case in prepared
    ]


class _Prepared:
    """One case on this rank: its parts, the expected ones, and what was measured of it."""

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
        lines = {axis: _Blocking(comms.axis(axis)) for axis in "xyz"}
        blocking = SimpleNamespace(grid=comms.grid, coords=comms.coords, **lines)
        self.views = {"overlapped": comms, "blocking": blocking}
        self.seconds: dict[str, list[float]] = {name: [] for name in self.views}
        self.wrong = 0

    def run(self) -> None:
        """Both passes, both ways: seconds of the slowest rank, and wrong elements over all of them."""
        world, (a, b, grad) = self.comms.world, self.parts
        for name, view in self.views.items():
            results: list[torch.Tensor] = []

            def both(view: Any = view, results: list[torch.Tensor] = results) -> None:
                results.append(self.algorithm.forward(view, a, b, self.shape))
                results.extend(self.algorithm.backward(view, a, b, grad, self.shape))

            self.seconds[name].append(slowest(world, both))
            bad = sum(int((got != want).sum()) for got, want in zip(results, self.expected, strict=True))
            self.wrong += int(world.all_reduce(torch.tensor([bad])).item())
