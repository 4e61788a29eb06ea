"""A model of how GPUs run the kernels of several communicators: can ranks that issue in one order wait for ever?

Each rank has a device of some multiprocessors. A kernel is thread blocks, each of which wants a multiprocessor for
itself; they begin one at a time, in their order, so a kernel may be there in part. The first may begin when what its
stream and the events say has come, and its place in the launch order, where there is one: "begun" is a kernel all of
whose blocks have. A collective has a block for each channel; it ends when all blocks of all its ranks have begun. Till
then it keeps its multiprocessors (``wait_for_each_other``), or a channel's block ends as soon as that channel has begun
on all ranks. A kernel that spins on flags keeps its own until they are raised.

Which of the blocks that could begin does so first, and on which rank, is free: every choice is followed, but for those
that a device with ``priorities`` does not have. What ends does so at once, which loses no deadlock: it only frees
multiprocessors. A state is how many blocks of each kernel have begun.

It knows the policies of csrc/device (own streams, one shared stream; with and without a launch order; what a shared
stream's operations come after) and nothing of speed. ``one_queue``: all streams of a device share one hardware queue,
in which a stream that waits for a flag holds back what was submitted after it. That blocks come in the order of their
channels is what devices do; CUDA does not promise it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True)
class Policy:
    """How communicators use streams.

    Attributes:
        shared: Pending operations of all communicators are on one stream; else each has its own.
        chained: An operation comes after the last one of any communicator (an event), not of its own alone.
        ordered: The library lets a kernel begin only after all that were launched before it have begun.
    """

    shared: bool
    chained: bool
    ordered: bool


@dataclass(frozen=True)
class Machine:
    """What one device has, and what kernels take of it.

    Attributes:
        units: Multiprocessors.
        reserved: Those that a kernel which spins leaves free.
        channels: Of a collective that nobody has capped.
        priorities: Blocks of communication streams begin before those that were submitted later; else all are equal.
        wait_for_each_other: The channels of one collective end together; else each by itself.
        one_queue: See above.
    """

    units: int
    reserved: int = 1
    channels: int = 1
    priorities: bool = False
    wait_for_each_other: bool = True
    one_queue: bool = False


@dataclass
class Kernel:
    rank: int
    name: str
    blocks: int = 0
    high: bool = False  # on a stream that has priority
    meets: tuple[str, int] | None = None  # the collective: communicator and number
    after_end: set[int] = field(default_factory=set)
    after_begin: set[int] = field(default_factory=set)
    spins_for: set[int] = field(default_factory=set)
    flagged: bool = False  # its stream waits for a flag, which no event shows


class State(NamedTuple):
    """Sets of kernels, a bit each: ``blocks`` has four bits for the number of blocks that have begun."""

    blocks: int
    started: int
    begun: int
    ended: int
    ready: int  # not begun, and nothing but multiprocessors is lacking


BITS = 4


def _bits(mask: int) -> Iterable[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _mask(numbers: Iterable[int]) -> int:
    return sum(1 << number for number in numbers)


class Model:
    """Kernels of all ranks, in the order in which each rank submits them."""

    def __init__(self, machine: Machine, policy: Policy) -> None:
        self.machine = machine
        self.policy = policy
        self.kernels: list[Kernel] = []
        self.states = 0  # that the last search has looked at
        self.stuck: list[str] | None = None  # what it has found

    def deadlock(self, most: int = 300_000) -> list[str] | None:
        """The kernels that have not ended in a state where nothing can go on; None when there is none.

        Raises:
            RuntimeError: More than ``most`` states.
        """
        self._prepare()
        self.stuck = self._search(most)
        return self.stuck

    def _prepare(self) -> None:
        """Every set of kernels as a mask."""
        kernels, count = self.kernels, len(self.kernels)
        assert all(kernel.blocks < 1 << BITS for kernel in kernels)
        first_begun = [set(kernel.after_begin) for kernel in kernels]
        for i, kernel in enumerate(kernels) if self.machine.one_queue else ():
            if kernel.flagged:  # what was submitted later stands behind it
                for j in range(i + 1, count):
                    if kernels[j].rank == kernel.rank:
                        first_begun[j].add(i)
        self._after_end = [_mask(kernel.after_end) for kernel in kernels]
        self._after_begin = [_mask(before) for before in first_begun]
        self._spins = [_mask(kernel.spins_for) for kernel in kernels]
        self._next: list[list[int]] = [[] for _ in kernels]  # who may have waited for it
        for i, kernel in enumerate(kernels):
            for before in kernel.after_end | first_begun[i] | kernel.spins_for:
                self._next[before].append(i)
        meetings: dict[tuple[str, int], int] = {}
        for i, kernel in enumerate(kernels):
            if kernel.meets:
                meetings[kernel.meets] = meetings.get(kernel.meets, 0) | 1 << i
        self._meeting = [meetings[kernel.meets] if kernel.meets else 0 for kernel in kernels]
        self._high = _mask(i for i, kernel in enumerate(kernels) if kernel.high)
        ranks = range(1 + max(kernel.rank for kernel in kernels))
        self._of_rank = [_mask(i for i, k in enumerate(kernels) if k.rank == rank and k.blocks) for rank in ranks]
        self._follows = [0] * count  # what must come after its begin
        for i in reversed(range(count)):
            for j in range(i + 1, count):
                if (self._after_end[j] | self._after_begin[j]) >> i & 1:
                    self._follows[i] |= 1 << j | self._follows[j]

    def _search(self, most: int) -> list[str] | None:
        everything = (1 << len(self.kernels)) - 1
        first = self._settled(State(0, 0, 0, 0, 0), range(len(self.kernels)))
        seen = {first.blocks}
        states = [first]
        self.states = 0
        while states:
            state = states.pop()
            self.states += 1
            able = self._able(state)
            if not able:
                if state.ended != everything:
                    return [f"{k.rank}: {k.name}" for i, k in enumerate(self.kernels) if not state.ended >> i & 1]
                continue
            # First where ranks differ: odd ones begin what they submitted last. It finds a deadlock sooner.
            for i in sorted(able, key=lambda i: i if self.kernels[i].rank % 2 else -i):
                after = self._begin(state, i)
                if after.blocks not in seen:
                    seen.add(after.blocks)
                    states.append(after)
            if len(seen) > most:
                raise RuntimeError(f"more than {most} states")
        return None

    def _able(self, state: State) -> list[int]:
        """Kernels of which a block may begin; one alone where which is first makes no difference."""
        able: list[int] = []
        for mask in self._of_rank:
            ready = state.ready & mask
            if not ready:
                continue
            free = self.machine.units - self._used(state, mask)
            if not free:
                continue
            if self.machine.priorities and ready & self._high:
                first = ready & self._high
                ready &= self._high | (first & -first) - 1  # what was submitted before it may have begun before it came
            left = mask & ~state.begun
            for i in _bits(ready):
                # All that this rank has left comes after it, or fits beside it: it takes nothing from anybody.
                if not left & ~(self._follows[i] | 1 << i) or self._to_come(state, left) <= free:
                    return [i]
                able.append(i)
        return able

    def _used(self, state: State, mask: int) -> int:
        """Multiprocessors of a rank that are held."""
        used = 0
        for i in _bits(state.started & ~state.ended & mask):
            used += self._count(state, i)
            if self._meeting[i] and not self.machine.wait_for_each_other:
                used -= min(self._count(state, peer) for peer in _bits(self._meeting[i]))
        return used

    def _to_come(self, state: State, left: int) -> int:
        return sum(self.kernels[i].blocks - self._count(state, i) for i in _bits(left))

    @staticmethod
    def _count(state: State, i: int) -> int:
        return state.blocks >> BITS * i & (1 << BITS) - 1

    def _begin(self, state: State, i: int) -> State:
        """A block more of a kernel, and what follows from it."""
        state = state._replace(blocks=state.blocks + (1 << BITS * i), started=state.started | 1 << i)
        if self._count(state, i) < self.kernels[i].blocks:
            return state
        state = state._replace(begun=state.begun | 1 << i, ready=state.ready & ~(1 << i))
        return self._settled(state, [i, *self._next[i]])

    def _settled(self, state: State, changed: Iterable[int]) -> State:
        """Let end what can, begin what takes no multiprocessor, and note what is ready, after these have changed."""
        blocks, started, begun, ended, ready = state
        look = list(changed)
        while look:
            i = look.pop()
            had_begun, had_ended = begun, ended
            if not (begun | ready) >> i & 1 and not self._after_end[i] & ~ended and not self._after_begin[i] & ~begun:
                if self.kernels[i].blocks:
                    ready |= 1 << i
                else:
                    begun |= 1 << i
            if begun >> i & 1 and not self._meeting[i] & ~begun and not self._spins[i] & ~ended:
                ended |= self._meeting[i] | 1 << i
            for k in _bits(begun & ~had_begun | ended & ~had_ended):
                look += self._next[k]
        return State(blocks, started, begun, ended, ready)


class Rank:
    """What one rank submits, as csrc/device/core.cpp orders it."""

    def __init__(self, model: Model, rank: int, members: dict[str, str]) -> None:
        self.model, self.rank, self.members = model, rank, members  # axis -> the communicator's name
        self._streams: dict[str, set[int]] = {}
        self._last: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        self._launched: int | None = None

    def _submit(self, kernel: Kernel, stream: str, after: Iterable[int] = ()) -> int:
        number = len(self.model.kernels)
        kernel.after_end |= self._streams.get(stream, set()) | set(after)
        self.model.kernels.append(kernel)
        self._streams[stream] = {number}
        return number

    def compute(self, name: str = "compute", spins_for: Iterable[int] = ()) -> int:
        """A kernel on the compute stream; one that spins keeps its units until those have ended."""
        waits = set(spins_for)
        blocks = self.model.machine.units - self.model.machine.reserved if waits else 0
        return self._submit(Kernel(self.rank, name, blocks, spins_for=waits), "compute")

    def collective(
        self, axis: str, blocking: bool = False, flag_of: int | None = None, forked: int = -1, cap: int = 0
    ) -> int:
        """One operation over an axis.

        Args:
            axis: Of the communicator.
            blocking: On the caller's stream.
            flag_of: After a flag of that kernel alone.
            forked: See :meth:`fork`.
            cap: Channels of a communicator beside the axis's own; 0: that one.
        """
        policy, communicator = self.model.policy, self.members[axis]
        if cap:
            axis, communicator = f"{axis} capped", f"{communicator} capped"
        number = self._numbers[axis] = self._numbers.get(axis, 0) + 1
        channels = cap or self.model.machine.channels
        kernel = Kernel(self.rank, f"{communicator} #{number}", channels, not blocking, (communicator, number))
        kernel.flagged = flag_of is not None
        stream = "compute" if blocking else "shared" if policy.shared else axis
        after: set[int] = set()
        if flag_of is not None:
            kernel.after_begin.add(flag_of)
        elif not blocking:
            after |= self._streams.get("compute", set())
        if forked >= 0:
            after.add(forked)
        chain = "" if policy.shared and policy.chained else axis
        if chain in self._last:
            after.add(self._last[chain])
        if policy.ordered and self._launched is not None:
            kernel.after_begin.add(self._launched)
        self._last[chain] = self._launched = self._submit(kernel, stream, after)
        return self._launched

    def fork(self) -> int:
        """The point of the compute stream that follow() orders the communicator's stream after; -1: its beginning."""
        return max(self._streams.get("compute", set()), default=-1)

    def wait(self, works: Iterable[int]) -> None:
        """The compute stream comes after these."""
        self._streams["compute"] = self._streams.get("compute", set()) | set(works)
