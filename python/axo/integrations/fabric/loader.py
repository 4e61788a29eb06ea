"""A data loader whose batches are the same on all ranks along x and y, whatever data module is behind it.

A data rank is Gx*Gy ranks. The first of them (x = y = 0, in the first stage) reads; its batch goes to the others over
x, then over y, then to the other stages, in the format of ``axo.comm.values``. (With Tesseract a data rank is Gy ranks:
over y alone. The ranks of a context are one data rank here, whose first one reads.) So nothing depends on equal random
state, equal workers or equal file systems, and one rank's error is every peer's error.
Ranks that share a batch must keep their random generators equal, because generation samples with them. So the reader
uses a random state of its own, and reading does not change its generators.

Which samples a data rank reads is its sampler's business. One that a program has made itself for all ranks is cut anew;
datasets that split themselves over all ranks of torch, as litdata's do, are told of the data ranks instead.

State: ``{"epoch", "samples"}``, samples of all data ranks, so that a run goes on where it stopped on another grid
too. A loader that has a state of its own (:class:`ResumableLoader`, litdata's) keeps it; litdata's is of a number of
data ranks, and another number is refused.
"""

from __future__ import annotations

import copy
import itertools
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.data import _set_sampler_epoch, _update_dataloader, has_iterable_dataset
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from axo.comm import values
from axo.comm.connect import Communicators
from axo.errors import Refused
from axo.integrations.data_ranks import cut_for_data_ranks, in_one_order, rank_numbers


class Position:
    """Where a run stands in its data, counted in samples of all data ranks."""

    def __init__(self) -> None:
        self._epoch = -1  # how often iteration has begun, less one
        self._given = 0  # batches given out in this epoch
        self._skip = 0  # samples to leave out when iteration begins
        self._resumed = False
        self._begun = 0  # in this process
        self._ahead = 0  # epochs whose orders were drawn before this process

    def batches(self, loader: Any, start: Callable[[], Iterator[Any]], each: int) -> Iterator[Any]:
        """One epoch of ``loader``: ``start()`` begins it, ``each`` samples are read at once by all data ranks.

        A dataset with ``set_epoch`` is told which epoch it is.

        Raises:
            ValueError: The run that is resumed stopped between two batches of this one.
        """
        self._epoch, self._given, self._begun = self._epoch + 1, 0, self._begun + 1
        skip, self._skip = self._skip, 0
        if skip % each:
            raise ValueError(
                f"data: the checkpoint was taken after {skip} samples of an epoch, which is not a multiple of the"
                f" {each} that the data ranks read at once; change the micro-batch size"
            )
        if isinstance(loader.batch_sampler, EachOnce):
            loader.batch_sampler.draw(self._ahead, loader.generator)
        self._ahead = 0
        if self._resumed:
            _set_sampler_epoch(loader, self._epoch)  # Fabric counts from the start of this process
        if hasattr(loader.dataset, "set_epoch"):
            loader.dataset.set_epoch(self._epoch)
        iterator = start()
        for _ in range(skip // each):
            next(iterator, None)
            self._given += 1
        for batch in iterator:
            self._given += 1
            yield batch

    def state_dict(self, each: int) -> dict[str, int]:
        return {"epoch": max(self._epoch, 0), "samples": self._given * each}

    def load_state_dict(self, state: Any) -> None:
        """Go on there.

        Raises:
            ValueError: ``state`` is of another kind.
        """
        if not isinstance(state, dict) or not {"epoch", "samples"} <= state.keys():
            raise ValueError("data: the checkpoint does not say where its run stood in the data; start a new run of it")
        self._epoch, self._skip, self._resumed = state["epoch"] - 1, state["samples"], True
        self._ahead = max(0, state["epoch"] - self._begun)


class ResumableLoader(DataLoader):
    """A ``DataLoader`` that a checkpoint can hold: its state is where it stands. With or without Axo."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._position = Position()

    def __iter__(self) -> Any:
        return self._position.batches(self, super().__iter__, self._each())

    def _each(self) -> int:
        ranks = [getattr(each, "num_replicas", 1) for each in (self.sampler, self.batch_sampler)]
        return (self.batch_size or 1) * max(ranks)

    def state_dict(self) -> dict[str, int]:
        return self._position.state_dict(self._each())

    def load_state_dict(self, state: Any) -> None:
        self._position.load_state_dict(state)


def split_in_order(loader: Any, comms: Communicators, *, stand_ins: bool = False) -> Any:
    """A loader of this data rank's samples, in the order of ``loader``'s own sampler. Every rank must call it.

    Batch after batch all data ranks together read what one device would read with a batch as large (:class:`EachOnce`).
    A batch sampler of a program's own is made anew with this rank's samples; where the data ranks do not divide them,
    the last ones begin again at the first. An iterable dataset is left as it is, as Fabric leaves it.
    """
    if has_iterable_dataset(loader) or isinstance(loader.sampler, DistributedSampler):
        return loader  # that sampler is cut anew where it is not this data rank's (axo.integrations.data_ranks)
    if type(loader.batch_sampler) is BatchSampler:
        cut = EachOnce(loader.sampler, loader.batch_size, loader.drop_last, comms, stand_ins=stand_ins)
        if len(cut.sampler) and not len(cut):
            raise Refused(
                f"data: {len(cut.sampler)} samples are less than one batch of {loader.batch_size} on each of"
                f" {comms.row_parts} data ranks, and the rest is dropped; use smaller batches, or fewer ranks"
            )
        return with_batches(loader, cut)
    sampler = in_one_order(loader.sampler, comms)
    mine = DistributedSamplerWrapper(sampler, num_replicas=comms.row_parts, rank=comms.row_part, shuffle=False)
    return _update_dataloader(loader, mine)


class EachOnce:
    """Batch sampler of a data rank: all of them together read each sample once, in as many batches on each of them.

    A batch of all data ranks is cut as evenly as it goes. Where the last one would leave a rank without a sample, the
    one before gives it some; where batches are of one sample, it takes the rest.

    Args:
        sampler: Of all samples. One that shuffles gets a generator that all ranks share. Every rank must call it.
        batch_size: Samples of a batch of one data rank.
        drop_last: Leave out the samples after the last full batch of all data ranks.
        stand_ins: Keep the batches of one device: a rank that the last one leaves without a sample reads the first of
            it again, which whoever computes with it must leave out (:meth:`stands_in`).

    Raises:
        axo.Refused: There are fewer samples than data ranks, and no stand-ins.
    """

    def __init__(
        self, sampler: Any, batch_size: int, drop_last: bool, comms: Communicators, *, stand_ins: bool = False
    ) -> None:
        self.sampler, self.batch_size, self.drop_last = in_one_order(sampler, comms), batch_size, drop_last
        self.stand_ins = stand_ins
        self.num_replicas, self.rank = comms.row_parts, comms.row_part
        self.sizes()

    def sizes(self) -> list[int]:
        """Samples of each batch of all data ranks."""
        ranks, whole = self.num_replicas, self.batch_size * self.num_replicas
        full, rest = divmod(len(self.sampler), whole)
        sizes = [whole] * full + ([rest] if rest and not self.drop_last else [])
        if sizes and sizes[-1] < ranks and not self.stand_ins:
            if len(sizes) == 1:
                raise Refused(
                    f"data: {rest} samples for {ranks} data ranks (z*data), which read each of them once; use a grid"
                    " with fewer of them"
                )
            moved = ranks - sizes[-1] if self.batch_size > 1 else -sizes.pop()
            sizes[-1] += max(moved, 0)
            sizes[-2 if moved > 0 else -1] -= moved
        return sizes

    def __len__(self) -> int:
        return len(self.sizes())

    def __iter__(self) -> Iterator[list[int]]:
        order = iter(self.sampler)
        for size in self.sizes():
            samples = list(itertools.islice(order, size))
            yield samples[self.rank :: self.num_replicas] or samples[:1]
        deque(order, 0)  # at its end torch's sampler draws once more, and the next epoch's order comes after that

    def draw(self, epochs: int, of_loader: torch.Generator | None) -> None:
        """Draw what so many epochs do that nobody reads: a seed of the loader's workers, and an order."""
        for _ in range(epochs if isinstance(self.sampler, RandomSampler) else 0):
            if of_loader is not None:
                torch.empty((), dtype=torch.int64).random_(generator=of_loader)
            deque(self.sampler, 0)

    def stands_in(self, number: int) -> bool:
        """Whether this rank's batch of that number has nothing of its own."""
        return self.stand_ins and len(self.sampler) - number * self.batch_size * self.num_replicas <= self.rank


def with_batches(loader: Any, batches: Any) -> Any:
    """``loader`` with another batch sampler, and whatever its class was made with."""
    other = copy.copy(loader)
    other.__dict__["batch_sampler"] = batches  # a DataLoader refuses to be changed
    return other


def _split_streams(dataset: Any, ranks: int, mine: int) -> None:
    """Let litdata's datasets, and those that one is mixed from, give each data rank its part, not each of all ranks."""
    for part in getattr(dataset, "_datasets", ()):
        _split_streams(part, ranks, mine)
    if not hasattr(dataset, "distributed_env"):
        return
    environment = copy.copy(dataset.distributed_env)  # a new one: litdata keeps what it has computed by the old
    environment.world_size, environment.global_rank = ranks, mine
    if environment.world_size % environment.num_nodes:
        environment.num_nodes = 1  # it only says which chunks ranks share, and may drop once read
    dataset.distributed_env = environment


def _data_ranks_of(state: Any) -> set[int]:
    """The numbers of ranks that a state of litdata's was taken for."""
    if not isinstance(state, dict):
        return set()
    own = {state["world_size"]} if isinstance(state.get("world_size"), int) else set()
    return own.union(*map(_data_ranks_of, state.values()))


class SharedLoader:
    """Wraps a loader for the ranks of ``comms``; attributes are those of the loader.

    Args:
        loader: A ``torch.utils.data.DataLoader``; its sampler has been split over the data ranks.
        comms: What ``axo.connect`` returned.
        given: Is told before each batch whether it is a stand-in (:meth:`EachOnce.stands_in`).
    """

    def __init__(self, loader: Any, comms: Communicators, given: Callable[[bool], None] | None = None) -> None:
        self.__dict__.update(loader.__dict__)  # as Fabric's own wrapper does: people read .dataset, .sampler
        self._loader = loader
        self._comms = comms
        self._given, self._skipped = given, 0
        self._peers = [axis for axis in ("x", "y") if axis not in comms.arrangement.rows and comms.grid.size(axis) > 1]
        self._reads = comms.arrangement.leads(comms.coords) and comms.stage == 0 and comms.context.rank == 0
        self._alone = not self._peers and comms.stages == 1 and comms.context.size == 1
        cut_for_data_ranks(loader, comms)
        self._random = torch.get_rng_state()
        self._own = None if hasattr(loader, "state_dict") else Position()
        _split_streams(loader.dataset, comms.row_parts, comms.row_part)

    def __len__(self) -> int:
        return len(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands in the data; right on a rank that reads, such as rank 0."""
        return self._loader.state_dict() if self._own is None else self._own.state_dict(self._each())

    def load_state_dict(self, state: Any) -> None:
        """Go on where ``state`` was taken.

        Raises:
            ValueError: It is of another kind of loader, or litdata's, of another number of data ranks.
        """
        ranks = self._comms.row_parts
        for other in _data_ranks_of(state) - {ranks}:
            raise ValueError(
                f"data: the checkpoint was taken with {other} data ranks (z*data), and this run has {ranks}; litdata's"
                f" datasets go on with the same number only: use a grid with z*data={other}, or LocalText"
            )
        (self._loader if self._own is None else self._own).load_state_dict(state)
        self._skipped = state.get("samples", 0) // self._each()

    def _each(self) -> int:
        size = self._loader.batch_size or getattr(self._loader.batch_sampler, "batch_size", 1)
        return size * self._comms.row_parts

    def __iter__(self) -> Iterator[Any]:
        source = self._read() if self._reads else None
        first, self._skipped, batches = self._skipped, 0, getattr(self._loader, "batch_sampler", None)
        for number in itertools.count(first):
            outcome = next(source) if source is not None else None
            kind, value = outcome if self._alone else self._share(outcome)  # type: ignore[misc]
            if kind == "end":
                return
            if kind == "error":
                raise value
            if self._given is not None:
                self._given(isinstance(batches, EachOnce) and batches.stands_in(number))
            yield value

    def _read(self) -> Iterator[tuple[str, Any]]:
        """("batch", it), ..., then ("end", None) or ("error", exception)."""
        try:
            with self._random_of_its_own():
                batches = self._start()
            while True:
                with self._random_of_its_own():
                    batch = next(batches, self)
                if batch is self:
                    yield "end", None
                    return
                yield "batch", batch
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            error.add_note(f"in {last.name}, {Path(last.filename).name}:{last.lineno}")  # peers get no traceback
            yield "error", error

    @contextmanager
    def _random_of_its_own(self) -> Iterator[None]:
        """A block under this loader's own generator state, in which ranks are data ranks."""
        outer = torch.get_rng_state()
        torch.set_rng_state(self._random)
        try:
            with nullcontext() if self._alone else rank_numbers(self._comms.row_part, self._comms.row_parts):
                yield
        finally:
            self._random = torch.get_rng_state()
            torch.set_rng_state(outer)

    def _start(self) -> Iterator[Any]:
        if self._own is None:
            return iter(self._loader)
        return self._own.batches(self._loader, lambda: iter(self._loader), self._each())

    def _share(self, outcome: Any) -> tuple[str, Any]:
        """The first rank's ``outcome``, on all ranks along x and y and of all stages."""
        kind, value = values.broadcast(outcome, self._broadcast, self._reads, self._comms.device)
        return kind, value

    def _broadcast(self, tensor: torch.Tensor) -> None:
        coords = self._comms.coords
        if self._comms.stage == 0 and self._comms.arrangement.leads(coords):
            self._comms.context.broadcast(tensor, root=0)
        for place, axis in enumerate(self._peers if self._comms.stage == 0 else ()):
            if not any(getattr(coords, later) for later in self._peers[place + 1 :]):
                self._comms.axis(axis).broadcast(tensor, root=0)
        self._comms.pipeline.broadcast(tensor, root=0)
