"""A model of sums by push (axo_kernels/fused/push.py), and every order of their events: ranks, kernels, weak memory.

Each rank runs its kernels one behind the other, of several operations back to back, which need not be alike: a product
of two programs, whose tiles go to their owners' rooms; the sum; of an all-reduce the gather. A store is *on its way*
until it is performed, at any time and in any order; a release, and the end of a kernel, come after all stores of their
program (of all programs, through the counter that the last tile has acquired). A flag holds the epoch that it has
reached. What a read finds must be the right rank's, whole, and of the very epoch: also not yet of a later one.
:func:`visit` looks at all states.

Not here: numbers, addresses, and how long a wait lasts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..gemm.ring_model import Wrong, _put

Instruction = tuple[Any, ...]


@dataclass(frozen=True)
class Push:
    """Operations of a few ranks, and what may be broken in them.

    Attributes:
        size: Ranks.
        operations: Back to back in one room: "a" an all-reduce, "r" a reduce-scatter, "R" one whose parts lie across
            where an all-reduce has parts and sums.
        programs: Of a product; each has one tile for each owner.
        broken: A mutation, by name; "": none.
    """

    size: int
    operations: str
    programs: int = 2
    broken: str = ""

    def sums(self, epoch: int) -> bool:
        """Whether the operation is an all-reduce."""
        return self.operations[epoch - 1] == "a"

    def part(self, owner: int, rank: int, program: int, epoch: int) -> tuple[str, int, int]:
        """Where a tile lies: whose room, which half, which place in it."""
        across = self.size if self.operations[epoch - 1] == "R" else 0
        return f"room {owner}", self.half(epoch), across + rank * self.programs + program

    def sum_of(self, to: int, rank: int, epoch: int) -> tuple[str, int, int]:
        return f"room {to}", self.half(epoch), self.size * self.programs + rank

    def half(self, epoch: int) -> int:
        return 0 if self.broken == "one half" else epoch % 2

    def product(self, rank: int, program: int, epoch: int) -> Iterator[Instruction]:
        for step in range(self.size):
            owner = (rank + 1 + step) % self.size
            place = (owner + 1) % self.size if self.broken == "wrong owner" else owner
            number = owner if self.broken == "wrong flag" else rank
            reached = epoch - 1 if self.broken == "stale epoch" else epoch
            flag = ("flag", f"parts {owner}", number, reached, owner)
            if self.broken == "flag before store":
                yield flag
            yield "store", self.part(place, rank, program, epoch), (rank, epoch)
            if self.broken != "flag before store":
                yield flag

    def sum(self, rank: int, epoch: int) -> Iterator[Instruction]:
        for part in range(self.size):
            if self.broken != "part not waited for":
                yield "wait", f"parts {rank}", part, epoch
        for part in range(self.size):
            for program in range(self.programs):
                yield "read", self.part(rank, part, program, epoch), (part, epoch)
        for peer in range(self.size) if self.sums(epoch) else ():
            to = rank if self.broken == "sum to the wrong rank" else peer
            yield "store", self.sum_of(to, rank, epoch), (rank, epoch)
        for peer in range(self.size) if self.sums(epoch) else ():
            yield "release", f"sums {peer}", rank, epoch

    def gather(self, rank: int, epoch: int) -> Iterator[Instruction]:
        for owner in range(self.size):
            if self.broken != "sum not waited for":
                yield "wait", f"sums {rank}", owner, epoch
            yield "read", self.sum_of(rank, owner, epoch), (owner, epoch)

    def kernels(self, rank: int) -> list[list[list[Instruction]]]:
        """Of each kernel of a rank the programs."""
        every = []
        for epoch in range(1, len(self.operations) + 1):
            if self.broken == "two under way" and epoch > 1:  # this product before the sum of the one before
                every.insert(-1, [list(self.product(rank, program, epoch)) for program in range(self.programs)])
                every.append([list(self.sum(rank, epoch))])
                continue
            every.append([list(self.product(rank, program, epoch)) for program in range(self.programs)])
            every.append([list(self.sum(rank, epoch))])
            if self.sums(epoch):
                every.append([list(self.gather(rank, epoch))])
        return every


class State(NamedTuple):
    """Everything that decides what can happen next; hashable."""

    at: tuple[tuple[int, ...], ...]  # of each rank: its kernel, then the next instruction of each program
    flags: frozenset[tuple[tuple[str, int], int]]  # epochs reached, above 0
    rooms: frozenset[tuple[Any, Any]]  # what was performed
    coming: frozenset[tuple[int, int, Any, Any]]  # stores on their way: rank, program, room, content
    counts: tuple[tuple[int, ...], ...]  # of each rank: tiles finished for each owner


class Machine:
    """What one step does to a state."""

    def __init__(self, push: Push) -> None:
        self.push = push
        self.kernels = [push.kernels(rank) for rank in range(push.size)]

    def start(self) -> State:
        at = tuple((0, *[0] * len(kernels[0])) for kernels in self.kernels)
        return State(at, frozenset(), frozenset(), frozenset(), ((0,) * self.push.size,) * self.push.size)

    def after(self, state: State) -> Iterator[State]:
        """Every state that can come next."""
        for store in state.coming:
            yield self._performed(state, store)
        for rank, (kernel, *programs) in enumerate(state.at):
            if kernel == len(self.kernels[rank]):
                continue
            every = self.kernels[rank][kernel]
            for program, (at, instructions) in enumerate(zip(programs, every, strict=True)):
                if at < len(instructions):
                    moved = state._replace(at=_put(state.at, rank, _put(state.at[rank], program + 1, at + 1)))
                    following = self._instruction(moved, rank, program, instructions[at])
                    if following is not None:
                        yield following
            ended = all(at == len(one) for at, one in zip(programs, every, strict=True))
            if ended and not any(store[0] == rank for store in state.coming):
                width = len(self.kernels[rank][kernel + 1]) if kernel + 1 < len(self.kernels[rank]) else 0
                yield state._replace(at=_put(state.at, rank, (kernel + 1, *[0] * width)))

    @staticmethod
    def _performed(state: State, store: tuple[int, int, Any, Any]) -> State:
        _, _, room, content = store
        rooms = frozenset(each for each in state.rooms if each[0] != room) | {(room, content)}
        return state._replace(rooms=rooms, coming=state.coming - {store})

    def _instruction(self, state: State, rank: int, program: int, instruction: Instruction) -> State | None:
        """The state behind an instruction; None while it must wait."""
        name, *words = instruction
        broken = self.push.broken
        if name == "wait":
            whose, number, epoch = words
            reached = dict(state.flags).get((whose, number), 0)
            passes = reached == epoch if broken == "waits for the very epoch" else reached >= epoch
            return state if passes else None
        if name == "read":
            room, content = words
            if dict(state.rooms).get(room) != content:
                raise Wrong("a read finds what is not the part, or of another epoch")
            return state
        if name == "store":
            return state._replace(coming=state.coming | {(rank, program, *words)})
        if name == "flag":  # behind a tile: counted, and set by the last one
            whose, number, epoch, owner = words
            if broken != "no release" and any(store[:2] == (rank, program) for store in state.coming):
                return None  # the count releases, and the last one's flag with all that it has acquired
            done = state.counts[rank][owner] + 1
            last = done == self.push.programs
            kept = done if not last or broken == "count kept" else 0
            state = state._replace(counts=_put(state.counts, rank, _put(state.counts[rank], owner, kept)))
            return self._flag(state, whose, number, epoch) if last or broken == "every tile sets the flag" else state
        assert name == "release"
        whose, number, epoch = words
        if broken != "sum without release" and any(store[0] == rank for store in state.coming):
            return None
        return self._flag(state, whose, number, epoch)

    @staticmethod
    def _flag(state: State, whose: str, number: int, epoch: int) -> State:
        flags = frozenset(each for each in state.flags if each[0] != (whose, number))
        return state._replace(flags=flags | {((whose, number), epoch)})

    def check_end(self, state: State) -> None:
        """A state from which nothing can come: everything must be done."""
        if any(at[0] < len(kernels) for at, kernels in zip(state.at, self.kernels, strict=True)):
            raise Wrong("nobody can go on")
