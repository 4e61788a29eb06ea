"""What frameworks ask of ranks, answered for data ranks: peers along x and y work on the same rows, and count once.

Lightning, torchmetrics and accelerate take each rank for one with rows of its own. docs/litgpt.md has the table of who
asks for which number, and what it must be; here is what several of them need.

The ranks of a context, which hold pieces of the same sequences, are one data rank here too.

Not here: ranks as such. Barriers, agreements and files are of all ranks, as the frameworks have them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.utils.data import DistributedSampler, IterableDataset, IterDataPipe

from axo.comm import values
from axo.comm.connect import Communicators
from axo.errors import Refused
from axo.placement import placement_of


def gather(tensor: torch.Tensor, comms: Communicators) -> torch.Tensor:
    """``(row_parts, *tensor.shape)``: one part of each data rank, in their order. Every rank must call it.

    In backward each part gets the sum of what the data ranks computed for it, as in torch's ``all_gather``. The part of
    a context is its first rank's.
    """
    result: torch.Tensor = _Gather.apply(tensor, comms)  # type: ignore[no-untyped-call]
    return result


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, comms: Communicators) -> torch.Tensor:
        ctx.comms = comms
        parts = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(1, -1)
        for axis in reversed(comms.arrangement.rows):
            parts = comms.axis(axis).all_gather(parts)
        return parts.view(comms.row_parts, -1, *tensor.shape)[:, 0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        mine = reduce(grad, ctx.comms)[ctx.comms.row_part]
        return mine * (ctx.comms.context.rank == 0), None


def reduce(tensor: torch.Tensor, comms: Communicators, op: str = "sum") -> torch.Tensor:
    """A new tensor: ``op`` ("mean" too) over the data ranks, each of which counts once. Every rank must call it.

    The ranks of a context count together once: as their mean.
    """
    result = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    for axis in reversed(comms.arrangement.rows):
        result = comms.axis(axis).all_reduce(result, "sum" if op == "mean" else op)
    if op == "mean":
        result = result / comms.data_ranks
    elif op == "sum" and comms.context.size > 1:
        result = result.div(comms.context.size, rounding_mode=None if result.is_floating_point() else "floor")
    return result.view(tensor.shape)


def broadcast(value: Any, comms: Communicators, root: int) -> Any:
    """The ``root``'s value, on every rank of all. Every rank must call it.

    Raises:
        TypeError: It cannot be sent (``axo.comm.values``); on every rank.
    """
    everyone = comms.everyone
    send = functools.partial(everyone.broadcast, root=root)
    return values.broadcast(value, send, everyone.rank == root, comms.device)


def count_data_ranks(throughput: Any, comms: Communicators) -> None:
    """Let a Throughput of Lightning's take a data rank for its device: one with the peak of all its ranks."""
    throughput.world_size = comms.row_parts
    if throughput.available_flops is not None:
        throughput.available_flops *= comms.everyone.size // comms.row_parts


def whole_numel(parameters: Iterable[torch.Tensor]) -> int:
    """Elements of the whole parameters, of which this rank may hold parts."""
    placements = [(parameter, placement_of(parameter)) for parameter in parameters]
    return sum(
        parameter.numel() if placement is None else torch.Size(placement.global_shape).numel()
        for parameter, placement in placements
    )


def leaders(comms: Communicators) -> list[int]:
    """One rank of each data rank, in their order."""
    grid = comms.grid
    return [rank for rank in range(grid.world_size) if comms.arrangement.leads(grid.coords(rank))]


def sync_metrics(comms: Communicators) -> None:
    """Let every torchmetrics metric of the process gather one state of each data rank."""
    from torchmetrics import metric
    from torchmetrics.utilities.distributed import gather_all_tensors

    firsts = leaders(comms)

    def gather_of_data_ranks(result: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        parts = gather_all_tensors(result, group)
        return parts if len(parts) < comms.grid.world_size else [parts[rank] for rank in firsts]

    metric.gather_all_tensors = gather_of_data_ranks


class _RankNumbers(threading.local):
    """The (rank, ranks) that torch's default group tells this thread; None: its own."""

    told: tuple[int, int] | None = None


_numbers_here = _RankNumbers()
_in_environment: list[dict[str, str]] = []  # RANK and WORLD_SIZE as they were, and of each block under way
_torchs_default_group = distributed_c10d._get_default_group


def _default_group() -> Any:
    group: Any = _torchs_default_group()
    return group if _numbers_here.told is None else _Group(group, *_numbers_here.told)


@contextlib.contextmanager
def rank_numbers(part: int, parts: int) -> Iterator[None]:
    """A block in which torch's default group, RANK and WORLD_SIZE say that this is rank ``part`` of ``parts``.

    For datasets and samplers that cut themselves; workers that start inside of it inherit the numbers. Other threads
    ask torch as before; the environment is one for all of them, and is as it was when the last has left.
    """
    names, before = ("RANK", "WORLD_SIZE"), _numbers_here.told
    numbers = dict(zip(names, (str(part), str(parts)), strict=True))
    # What get_rank and get_world_size ask, under whatever name a program knows them.
    distributed_c10d._get_default_group = _default_group
    _in_environment[:0] = [] if _in_environment else [{name: os.environ[name] for name in names if name in os.environ}]
    _in_environment.append(numbers)
    os.environ.update({name: numbers[name] for name in _in_environment[0]})
    _numbers_here.told = part, parts
    try:
        yield
    finally:
        _numbers_here.told = before
        del _in_environment[next(i for i, each in enumerate(_in_environment) if each is numbers)]
        os.environ.update({name: _in_environment[-1][name] for name in _in_environment[0]})
        if len(_in_environment) == 1:
            _in_environment.clear()


class _Group:
    """A process group with other numbers."""

    def __init__(self, group: Any, part: int, parts: int) -> None:
        self._group, self._part, self._parts = group, part, parts

    def rank(self) -> int:
        return self._part

    def size(self) -> int:
        return self._parts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


class WholeStream(IterableDataset):
    """A stream that reads as the only rank would, whatever it asks torch or the environment: another cuts its rows."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        with rank_numbers(0, 1):
            rows = iter(self.dataset)
        while True:
            with rank_numbers(0, 1):
                row = next(rows, self)
            if row is self:
                return
            yield row

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Of the stream itself, as a ``worker_init_fn`` that cuts it sets its bounds."""
        super().__setattr__(name, value) if name == "dataset" else setattr(self.dataset, name, value)


def uncut(loader: Any, comms: Communicators) -> Any:
    """A loader for accelerate, which cuts what it reads: a stream's rows are all of them, a DistributedSampler's too.

    Every rank must call it.

    Raises:
        axo.Refused: As for :func:`cut_for_data_ranks`.
    """
    if comms.everyone.size == 1:
        return loader
    cut_for_data_ranks(loader, comms, whole=True)
    dataset = loader.dataset
    hugging_faces = type(dataset).__module__.partition(".")[0] == "datasets"
    if isinstance(dataset, IterableDataset) and not isinstance(dataset, IterDataPipe) and not hugging_faces:
        loader = copy.copy(loader)
        loader.__dict__["dataset"] = WholeStream(dataset)  # a DataLoader refuses to be changed
    return loader


def cut_for_data_ranks(loader: Any, comms: Communicators, *, whole: bool = False) -> None:
    """See that what ``loader`` reads from is not cut by rank: a DistributedSampler is cut anew.

    Every rank must call it. ``whole``: not by data rank either.

    Raises:
        axo.Refused: Something else of it holds the numbers of ranks, under whatever names.
    """
    sampler = getattr(loader, "sampler", None)
    batches = getattr(loader, "batch_sampler", None)
    dataset = loader.dataset
    sources = (sampler, batches, getattr(batches, "sampler", None), dataset, getattr(dataset, "_distributed", None))
    right = (1, 0) if whole else (comms.row_parts, comms.row_part)
    for each, name in zip(sources, _rank_names(sources, comms, whole), strict=True):
        parts = next((value for name in _PARTS if isinstance(value := getattr(each, name, None), int)), None)
        part = getattr(each, "rank", None)
        if name and comms.everyone.size in _numbers(each).values():
            parts, part = comms.everyone.size, _numbers(each)[name]
        of_pieces = comms.context.size > 1 and parts == comms.data_ranks
        of_parts = parts == comms.row_parts and comms.arrangement.leads(comms.coords)
        of_ranks = parts == comms.everyone.size or of_pieces or of_parts
        if parts is None or not of_ranks or (parts, part) == right:
            continue
        if type(each) is not DistributedSampler:
            raise Refused(
                f"data: {type(each).__name__} has part {part} of {parts}, but "
                + (
                    "accelerate cuts what it prepares: give it all rows, on every rank"
                    if whole
                    else f"ranks along x and y read the same rows: this rank's is part {comms.row_part} of"
                    f" {comms.row_parts} (comms.row_part of comms.row_parts)"
                )
            )
        epoch = each.epoch
        each.__init__(each.dataset, *right, each.shuffle, each.seed, each.drop_last)  # type: ignore[misc]
        each.set_epoch(epoch)


def in_one_order(sampler: Any, comms: Communicators) -> Any:
    """``sampler``; one that would draw from this rank's generator gets another, which all ranks have alike.

    Every rank must call it.
    """
    if getattr(sampler, "generator", sampler) is None:
        seed = torch.randint(1 << 62, (1,), dtype=torch.int64).to(comms.device)  # no order is given: rank 0's
        sampler.generator = torch.Generator().manual_seed(int(comms.everyone.broadcast(seed, root=0)))
    return sampler


def _numbers(source: Any) -> dict[str, int]:
    return {name: value for name, value in getattr(source, "__dict__", {}).items() if type(value) is int}


def _rank_names(sources: Sequence[Any], comms: Communicators, whole: bool) -> list[str | None]:
    """For each source the name of a number that is the rank, on every rank; None where it has none, or may have one."""
    if comms.row_parts == comms.everyone.size and not whole:
        return [None] * len(sources)
    keys = [
        {name: zlib.crc32(f"{place} {name}".encode()) % _SLOTS for name in _numbers(source)}
        for place, source in enumerate(sources)
    ]
    is_rank = torch.zeros(_SLOTS, dtype=torch.int64, device=comms.device)
    for source, slots in zip(sources, keys, strict=True):
        for name, slot in slots.items():
            is_rank[slot] |= _numbers(source)[name] == comms.everyone.rank
    everywhere = comms.everyone.all_reduce(is_rank, "min").tolist()
    return [next((name for name, slot in slots.items() if everywhere[slot]), None) for slots in keys]


_SLOTS = 4096  # for names of numbers: two that share one are taken for each other
_PARTS = ("num_replicas", "world_size")
