"""Products of a layer that run chunk by chunk with their collective, where the tuner measured that as faster.

    forward      O = sum over the in axis  of I W^T     the chunks of O travel while the next are computed
    grad_input   dI = sum over the out axis of dO W     the same, and the last ones behind the product dW
    gathered     O = I W^T, W gathered over z           the first shards are multiplied while the next travel
    grad_weight  dW = scattered over z, dO^T I          the chunks of dW travel while the next are computed

The last two are for a layer that would wait for its own collective: where the engine (``axo.overlap``) issues a gather
ahead of its block, or lets a reduce-scatter run behind the layers before, it hides all of it, and nothing is fused. So
they are asked for only where the engine issues no gathers ahead (a layer that is in no model's engine) or the option
is off, or where a gradient is wanted at once; and shares must be equal, since a padded buffer has no whole chunks. A
product that is summed over the in axis in chunks does not gather in chunks too.

The ranks of the axis must take the same decision at the same call, so it never depends on what one rank has on disk:
``cached`` uses what rank 0 has on disk, which all ranks read when the first layer is built; ``first-step`` measures
together (``axo.matmul.products``). Sizes that name an entry are equal on the ranks of the axis: rows are not split
over x and y, features that do not divide count as the largest share.

A layer's own way is always a candidate: product and then all-reduce for the forward pass, and for dI what the engine
does without this (``axo.overlap``), the all-reduce behind the product dW. Where it wins, nothing is fused. Bytes are
the same either way; a collective in C chunks is C calls, and a push none: its rows travel as the kernels store them.

Not here: when the engine can hide a collective (``axo.overlap.engine`` says).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from axo.comm.communicator import Communicator
from axo.comm.connect import Communicators
from axo.comm.shared_memory import empty_shared
from axo_kernels.comm.adapters import adapt
from axo_kernels.comm.communicator import FusedCommunicator
from axo_kernels.fused.strategies import run_all_gather, run_reduce_scatter, start_all_reduce, unreachable
from axo_kernels.gemm.layout import DTYPES, Product
from axo_kernels.tune.choice import FUSED, Choice, from_json, fused_name, usable
from axo_kernels.tune.runners import way_of
from axo_kernels.tune.tuner import Tuner

OPERATION = {
    "forward": "matmul_all_reduce",
    "grad_input": "matmul_all_reduce_behind_dw",
    "gathered": "all_gather_matmul_kept",
    "grad_weight": "matmul_reduce_scatter",
}
_GATHERED = "b"  # the weight is the second operand


class FusedSum:
    """A sum over the ranks on its way; ``wait`` gives it."""

    def __init__(self, out: torch.Tensor, finish: Callable[[], object]) -> None:
        self._out = out
        self._finish = finish

    def wait(self) -> torch.Tensor:
        """(m, n), complete."""
        self._finish()
        return self._out


class FusedProducts:
    """The fused products of one grid.

    Args:
        comms: The communicators of the grid.
        tuner: Decides, when ``first-step`` measures; it holds the ranks of x, y and z.
        entries: What rank 0 has on disk, by name.

    Attributes:
        calls: How many products ran fused.
        report: How each operation runs that was asked for, by its name in the cache: strategy and chunks, or why not.
    """

    def __init__(self, comms: Communicators, tuner: Tuner | None, entries: dict[str, Any]) -> None:
        self._comms = comms
        self._tuner = tuner
        self._entries = entries
        self._adapted: dict[tuple[str, str], FusedCommunicator] = {}
        self._sites: dict[Any, Choice | None] = {}
        self.calls = 0
        self.report: dict[str, str] = {}

    @property
    def possible(self) -> bool:
        """Whether any product could be fused at all."""
        return bool(self._entries) or self._tuner is not None

    def on(self, axis: str, op: str = "sum") -> FusedCommunicator:
        """The fused operations' view of an axis, whose reduce-scatters do ``op``; ``on(axis).ran`` tells what ran."""
        if (axis, op) not in self._adapted:
            line, store = self._comms.axis(axis), dist.distributed_c10d._get_default_store
            adapted = self._adapted[axis, op] = adapt(line, self._comms.timeout, op, window=_window, store=store)
            if op != "sum":
                sums = self.on(axis)  # one room for a line, whatever is done with its sums
                adapted.rooms, adapted.captured_rooms = sums.rooms, sums.captured_rooms
        return self._adapted[axis, op]

    def poll(self) -> None:
        """Raise what a kernel that waited for a flag has reported so far; waits for nothing.

        Every fused product begins with it, on its own axis; a backward pass ends with it, on all.

        Raises:
            SignalTimeout: A flag was not set within the grid's timeout; the message has rank, chunk and epoch.
        """
        for comm in self._adapted.values():
            comm.poll()

    def choice(self, kind: str, site: Hashable, axis: str, product: Product, device: torch.device) -> Choice | None:
        """How to compute ``product`` with its collective over ``axis``; None: the layer's own way.

        ``kind`` is one of ``OPERATION``, ``site`` what all ranks call the place by; ``product`` has the largest share
        of each size but the rows.
        """
        if product.dtype not in DTYPES:
            return None
        if self._tuner is None and axis != "z":  # the ranks of a line along x or y have the same rows
            if not product.flops:
                return None
            name = self._name(kind, axis, product)
            if (name, axis) not in self._sites:  # one axis may have what the other lacks
                self._sites[name, axis] = self._kept(kind, axis, product, device)
            choice = self._sites[name, axis]
        else:
            if site not in self._sites:  # on all ranks alike, also on one whose own product is empty
                judge = self.on(axis) if self._tuner is None else self._tuner.comm
                assert judge is not None
                m, n, k = (int(size) for size in judge.maximum([product.m, product.n, product.k]))
                largest = replace(product, m=m, n=n, k=k)
                if not largest.flops:
                    return None
                name = self._name(kind, axis, largest)
                if self._tuner is None:
                    self._sites[site] = self._kept(kind, axis, largest, device)
                else:
                    chosen = self._tuner.choose_fused(OPERATION[kind], largest, device, _GATHERED, on=self.on(axis))
                    self._sites[site] = self._fused(name, chosen)
            choice = self._sites[site] if product.flops or axis == "z" else None  # empty on the whole line of x or y
        return choice if choice is None or choice.chunks <= self._travelling(kind, product, axis) else None

    def _name(self, kind: str, axis: str, product: Product) -> str:
        return fused_name(OPERATION[kind], _GATHERED, self.on(axis), product)

    def _kept(self, kind: str, axis: str, product: Product, device: torch.device) -> Choice | None:
        """What rank 0 had on disk, where it can run here: chosen beside a push, or else without."""
        line, why = self.on(axis), "not measured"
        for push in (True, False):
            entry = self._entries.get(fused_name(OPERATION[kind], _GATHERED, line, product, push))
            kept = from_json(entry) if entry is not None else None
            if kept is None:
                continue
            if not usable(kept, product, device):
                why = f"'{kept.name}' cannot run here"
            elif kept.strategy == "push" and (lacking := unreachable(line, device)):
                why = f"push {lacking}"
            else:
                return self._fused(self._name(kind, axis, product), kept)
        return self._fused(self._name(kind, axis, product), None, why)

    def _fused(self, name: str, choice: Choice | None, why: str = "") -> Choice | None:
        """The choice, unless it is the layer's own way; ``why``: there is none."""
        if choice is not None and choice.strategy != "serial":
            self.report[name] = choice.name
            return choice
        self.report[name] = f"own way: {why if choice is None else 'measured as the fastest'}"
        return None

    def _travelling(self, kind: str, product: Product, axis: str) -> int:
        """The rows that are cut into chunks."""
        if kind == "gathered":
            return product.n
        return product.m // (self._comms.grid.size(axis) if kind == "grad_weight" else 1)

    def start(self, choice: Choice, a: torch.Tensor, b: torch.Tensor, axis: str, layout: str) -> FusedSum:
        """Begin the product and its sum over ``axis``."""
        self.calls += 1
        return FusedSum(*start_all_reduce(a, b, self.on(axis), layout, way_of(choice, layout)))

    def gather(
        self, choice: Choice, a: torch.Tensor, shard: torch.Tensor, bias: torch.Tensor | None, axis: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(m, k), (n / size, k), (n,) -> (m, n), and the (n, k) gathered over ``axis``."""
        self.calls += 1
        product, gathered = run_all_gather(a, shard, self.on(axis), "NT", _GATHERED, way_of(choice, "NT"), bias)
        assert gathered is not None
        return product, gathered

    def scatter(
        self, choice: Choice, a: torch.Tensor, b: torch.Tensor, axis: str, op: str, out: torch.Tensor
    ) -> torch.Tensor:
        """(m, n), (m, k) -> this rank's (n / size, k) of the product reduced over ``axis``, in ``out``."""
        self.calls += 1
        return run_reduce_scatter(a, b, self.on(axis, op), "TN", way_of(choice, "TN"), out)


def _window(line: Communicator, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return empty_shared(shape, dtype=dtype, device=device, comms=line)


def published(entries: dict[str, Any]) -> dict[str, Any]:
    """The entries of a cache that all ranks must see alike."""
    return {name: entry for name, entry in entries.items() if name.split(" ", 1)[0] in FUSED}
