"""A model of how GPUs run the kernels of several communicators: can ranks that issue in one order wait for ever?

Each rank has a device of some units. A kernel begins when what its stream and the events say has come, when the units
that it needs are free, and when its place in the launch order has come, where there is one. A collective keeps its
units until it has begun on all its ranks; a kernel that spins on flags keeps its own until they are raised. Which of
the kernels that could begin does so first, and on which rank, is free: every choice is followed. What ends does so at
once, which loses no deadlock: it only frees units. States are the sets of kernels that have begun.

Priorities of streams say which of the kernels that could begin does so first. Every choice is followed, so whatever
priorities there are, what a device does with them is among what is looked at.

It knows the policies of csrc/device (own streams, one shared stream; with and without a launch order; what a shared
stream's operations come after) and nothing of speed. ``one_queue``: all streams of a device share one hardware queue,
in which a stream that waits for a flag holds back what was submitted after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


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
    """``units`` of each device; a collective takes one, a spinning kernel all but ``reserved``."""

    units: int
    reserved: int = 1
    one_queue: bool = False


@dataclass
class Kernel:
    rank: int
    name: str
    units: int = 0
    meets: tuple[str, int] | None = None  # the collective: communicator and number
    after_end: set[int] = field(default_factory=set)
    after_begin: set[int] = field(default_factory=set)
    spins_for: set[int] = field(default_factory=set)
    flagged: bool = False  # its stream waits for a flag, which no event shows


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
        self.stuck = self._search(most)
        return self.stuck

    def _search(self, most: int) -> list[str] | None:
        everything = (1 << len(self.kernels)) - 1
        follows = self._followers()
        seen = {0}
        states = [0]
        self.states = 0
        while states:
            begun = states.pop()
            self.states += 1
            begun, ended = self._settle(begun)
            able = self._able(begun, ended)
            if not able:
                if ended != everything:
                    return [f"{k.rank}: {k.name}" for i, k in enumerate(self.kernels) if not ended >> i & 1]
                continue
            # Where all that the rank has left comes after one kernel, that kernel is next whatever others do.
            sure = [i for i in able if not self._left(self.kernels[i].rank, begun) & ~(follows[i] | 1 << i)]
            # First where ranks differ: odd ones begin what they submitted last. It finds a deadlock sooner.
            for i in sure[:1] or sorted(able, key=lambda i: i if self.kernels[i].rank % 2 else -i):
                state = begun | 1 << i
                if state not in seen:
                    seen.add(state)
                    states.append(state)
            if len(seen) > most:
                raise RuntimeError(f"more than {most} states")
        return None

    def _settle(self, begun: int) -> tuple[int, int]:
        """Let end what can, and begin what takes no units."""
        while True:
            ended = self._ended(begun)
            free = [i for i in self._able(begun, ended) if not self.kernels[i].units]
            if not free:
                return begun, ended
            for i in free:
                begun |= 1 << i

    def _ended(self, begun: int) -> int:
        meetings: dict[tuple[str, int], bool] = {}
        for i, kernel in enumerate(self.kernels):
            if kernel.meets:
                meetings[kernel.meets] = meetings.get(kernel.meets, True) and bool(begun >> i & 1)
        ended = 0
        changed = True
        while changed:
            changed = False
            for i, kernel in enumerate(self.kernels):
                if ended >> i & 1 or not begun >> i & 1:
                    continue
                if kernel.meets and not meetings[kernel.meets]:
                    continue
                if all(ended >> j & 1 for j in kernel.spins_for):
                    ended |= 1 << i
                    changed = True
        return ended

    def _able(self, begun: int, ended: int) -> list[int]:
        able = []
        used: dict[int, int] = {}
        for i, kernel in enumerate(self.kernels):
            if begun >> i & 1 and not ended >> i & 1:
                used[kernel.rank] = used.get(kernel.rank, 0) + kernel.units
        held: set[int] = set()  # ranks whose one queue is held back
        for i, kernel in enumerate(self.kernels):
            if begun >> i & 1:
                continue
            if kernel.rank in held:
                continue
            ready = all(ended >> j & 1 for j in kernel.after_end) and all(begun >> j & 1 for j in kernel.after_begin)
            if ready and used.get(kernel.rank, 0) + kernel.units <= self.machine.units:
                able.append(i)
            elif kernel.flagged and self.machine.one_queue:
                held.add(kernel.rank)
        return able

    def _left(self, rank: int, begun: int) -> int:
        return sum(1 << i for i, k in enumerate(self.kernels) if k.rank == rank and k.units and not begun >> i & 1)

    def _followers(self) -> list[int]:
        """For each kernel, those that must come after its begin."""
        follows = [0] * len(self.kernels)
        for i in reversed(range(len(self.kernels))):
            for j in range(i + 1, len(self.kernels)):
                if i in self.kernels[j].after_end | self.kernels[j].after_begin:
                    follows[i] |= 1 << j | follows[j]
        return follows


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
        units = self.model.machine.units - self.model.machine.reserved if waits else 0
        return self._submit(Kernel(self.rank, name, units, spins_for=waits), "compute")

    def collective(self, axis: str, blocking: bool = False, flag_of: int | None = None, forked: int = -1) -> int:
        """One operation over an axis. ``flag_of``: after a flag of that kernel alone; ``forked``: see :meth:`fork`."""
        policy, communicator = self.model.policy, self.members[axis]
        number = self._numbers[axis] = self._numbers.get(axis, 0) + 1
        kernel = Kernel(self.rank, f"{communicator} #{number}", 1, meets=(communicator, number))
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
