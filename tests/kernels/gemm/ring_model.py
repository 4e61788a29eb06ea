"""A model of the barriers and buffers of the kernel for Hopper (axo_kernels/gemm/hopper.py), and every order of events.

The kernel's three warp groups become lists of instructions, which follow from the sizes alone. What the hardware does
behind their backs are events of their own: a bulk copy arrives, a product ends, a bulk store has read its buffer. From
each state every group and every event that can go on does so, until all are done or nobody can: :func:`explore` visits
all states and names what is wrong.

    mbarrier    a phase is over when all counted arrivals and all expected bytes are in; ``wait(parity)`` passes once
                the phase of that parity is over, so a barrier that nobody has used passes ``wait(1)``
    bulk copy   what was in the buffer is gone when the copy is issued, what is new is there when it arrives
    product     reads its buffers from its issue to its end; a group's products end in order
    bulk store  reads its buffer from its issue to its end

A group is one thread here. In the kernel it is 128, which meet at a barrier of their own before one of them arrives
anywhere; that this is so in the compiled code is checked there (bench.tools.assembly.grouped_complaints).

Not here: numerics, addresses in memory, and how fast it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

Instruction = tuple[Any, ...]


@dataclass(frozen=True)
class Ring:
    """A launch of one program, and what may be broken in it.

    Attributes:
        pingpong: Groups take tiles in turns; otherwise each has half of the rows of every tile.
        stages, tiles, k_steps, parts: As in the kernel; tiles of this program.
        head: Steps that group 1 starts behind group 0; None: half of the stages, as in the kernel.
        broken: A mutation, by name; "": none.
    """

    pingpong: bool
    stages: int
    tiles: int
    k_steps: int
    parts: int = 1
    head: int | None = None
    broken: str = ""

    @property
    def halves(self) -> int:
        return 1 if self.pingpong else 2

    def counts(self) -> dict[str, int]:
        """Arrivals that each barrier counts."""
        counts = {"order 0": 1, "order 1": 1}
        for stage in range(self.stages):
            counts[f"full {stage}"] = 1
            counts[f"empty {stage}"] = 1 if self.broken == "empty counts one group" else self.halves
        return counts

    def producer(self) -> Iterator[Instruction]:
        index, phase = 0, 0 if self.broken == "first phase" else 1
        for tile in range(self.tiles):
            for step in range(self.k_steps):
                yield "wait", f"empty {index}", phase
                yield "expect", f"full {index}", 1 if self.broken == "too few bytes" else self.halves + 1
                for half in range(self.halves):
                    yield "load", f"full {index}", f"a {index} {half}", (tile, step)
                yield "load", f"full {index}", f"b {index}", (tile, step)
                index += 1
                if index == self.stages:
                    index = 0
                    phase ^= self.broken != "phase never turns"

    def consumer(self, who: int) -> Iterator[Instruction]:
        stride, first = (2, who) if self.pingpong else (1, 0)
        head = min(self.stages // 2 if self.head is None else self.head, self.k_steps)
        if not self.pingpong and who == 1:
            yield "wait", "order 1", 0
        for turn in range(first, self.tiles, stride):
            position = 0 if self.broken == "position" and turn == first else turn * self.k_steps
            index, phase = position % self.stages, position // self.stages & 1
            last = index
            if self.pingpong and self.broken != "no order":
                yield "wait", f"order {who}", (turn // 2 + 1 - who) & 1
            for step in range(self.k_steps):
                yield "wait", f"full {index}", phase
                half = 0 if self.pingpong else who
                yield "product", (f"a {index} {half}", f"b {index}"), (turn, step)
                yield "products", 2 if self.broken == "two left in flight" else 1
                if self.broken == "gives back what is read":
                    last = index
                if step > 0 or self.broken == "gives back what is read":
                    yield "arrive", f"empty {last}"
                if not self.pingpong and who == 0 and turn == 0 and step == head - 1:
                    yield "arrive", "order 1"
                last = index
                index += 1
                if index == self.stages:
                    index, phase = 0, phase ^ 1
            if self.pingpong:
                yield "arrive", f"order {1 - who}"
            yield "products", 0
            if self.broken not in ("last stage kept", "gives back what is read"):
                yield "arrive", f"empty {last}"
            for part in range(self.parts):
                if self.broken != "buffer in use":
                    yield "stores", 0
                yield "fill", f"c {who}", (turn, part)
                yield "store", f"c {who}", (turn, who, part)
        yield "stores", 0


class Wrong(Exception):
    """What a state shows that must never be."""


class State(NamedTuple):
    """Everything that decides what can happen next; hashable."""

    at: tuple[int, int, int]  # the next instruction of group 0, group 1 and the producer
    barriers: tuple[tuple[int, int, int], ...]  # parity of the phase that runs, arrivals and bytes that are missing
    held: tuple[Any, ...]  # what is in each buffer; None: a copy is on its way there
    loads: frozenset[tuple[int, int, Any]]  # barrier, buffer, content
    products: tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]  # buffers being read, oldest first
    stores: tuple[tuple[int, ...], tuple[int, ...]]  # the same


class Machine:
    """The groups' instructions with numbers for names, and what one step does to a state."""

    def __init__(self, ring: Ring) -> None:
        counts = ring.counts()
        self.barriers = {name: number for number, name in enumerate(counts)}
        self.counts = tuple(counts.values())
        self.buffers: dict[str, int] = {}
        self.programs = [self._numbered(each) for each in (ring.consumer(0), ring.consumer(1), ring.producer())]
        groups = (0, 1)
        self.expected = {
            (turn, who, part)
            for turn in range(ring.tiles)
            for who in (groups if not ring.pingpong else (turn % 2,))
            for part in range(ring.parts)
        }

    def _numbered(self, program: Iterator[Instruction]) -> list[Instruction]:
        found = []
        for name, *rest in program:
            words = []
            for word in rest:
                if isinstance(word, str) and word in self.barriers:
                    words.append(self.barriers[word])
                elif isinstance(word, str):
                    words.append(self.buffers.setdefault(word, len(self.buffers)))
                elif name == "product" and isinstance(word[0], str):
                    words.append(tuple(self.buffers.setdefault(each, len(self.buffers)) for each in word))
                else:
                    words.append(word)
            found.append((name, *words))
        return found

    def start(self) -> State:
        barriers = tuple((0, count, 0) for count in self.counts)
        return State((0, 0, 0), barriers, ("nothing",) * len(self.buffers), frozenset(), ((), ()), ((), ()))

    def after(self, state: State) -> Iterator[State]:
        """Every state that can come next."""
        for group, program in enumerate(self.programs):
            if state.at[group] < len(program):
                following = self._instruction(state, group, program[state.at[group]])
                if following is not None:
                    yield following
        for load in state.loads:
            barrier, buffer, content = load
            yield state._replace(
                loads=state.loads - {load},
                held=_put(state.held, buffer, content),
                barriers=self._barrier(state, barrier, 0, -1),
            )
        for who in (0, 1):
            if state.products[who]:
                yield state._replace(products=_put(state.products, who, state.products[who][1:]))
            if state.stores[who]:
                yield state._replace(stores=_put(state.stores, who, state.stores[who][1:]))

    def _instruction(self, state: State, group: int, instruction: Instruction) -> State | None:
        """The state behind an instruction; None while it must wait."""
        name, *words = instruction
        on = state._replace(at=_put(state.at, group, state.at[group] + 1))
        if name == "wait":
            return on if state.barriers[words[0]][0] != words[1] else None
        if name == "products":
            return on if len(state.products[group]) <= words[0] else None
        if name == "stores":
            return on if len(state.stores[group]) <= words[0] else None
        if name == "arrive":
            return on._replace(barriers=self._barrier(state, words[0], -1, 0))
        if name == "expect":
            return on._replace(barriers=self._barrier(state, words[0], -1, words[1]))
        if name == "load":
            barrier, buffer, content = words
            if any(buffer in read for products in state.products for read in products):
                raise Wrong("a buffer is filled while a product reads it")
            if state.held[buffer] is None:
                raise Wrong("a buffer is filled twice at once")
            return on._replace(held=_put(state.held, buffer, None), loads=state.loads | {(barrier, buffer, content)})
        if name == "product":
            buffers, content = words
            if any(state.held[buffer] != content for buffer in buffers):
                raise Wrong("a product reads what is not there")
            return on._replace(products=_put(state.products, group, (*state.products[group], buffers)))
        if name == "fill":
            if words[0] in state.stores[group]:
                raise Wrong("a buffer is written while it is stored")
            return on._replace(held=_put(state.held, words[0], words[1]))
        assert name == "store"
        return on._replace(stores=_put(state.stores, group, (*state.stores[group], words[0])))

    def _barrier(self, state: State, number: int, arrivals: int, expected: int) -> tuple[tuple[int, int, int], ...]:
        parity, missing, pending = state.barriers[number]
        missing, pending = missing + arrivals, pending + expected
        if missing < 0:
            raise Wrong("more arrivals than a barrier counts")
        if missing == 0 and pending == 0:
            parity, missing = parity ^ 1, self.counts[number]
        return _put(state.barriers, number, (parity, missing, pending))

    def check_end(self, state: State) -> None:
        """A state from which nothing can come: everything must be done, every tile's every step multiplied."""
        if any(at < len(program) for at, program in zip(state.at, self.programs, strict=True)):
            raise Wrong("nobody can go on")
        if state.loads or any(state.products) or any(state.stores):
            raise Wrong("the program ends while something is on its way")


def _put(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])


def explore(ring: Ring, most: int = 2_000_000) -> tuple[int, str]:
    """Visit every state; how many there are, and what is wrong with the first bad one ("" when none is)."""
    machine = Machine(ring)
    stored = {instruction[2] for program in machine.programs for instruction in program if instruction[0] == "store"}
    if stored != machine.expected:
        return 0, "not every part of every tile is stored"
    return visit(machine, most)


def visit(machine: Any, most: int = 2_000_000) -> tuple[int, str]:
    """Visit every state of a machine from its ``start``, by ``after``, until ``check_end``; as :func:`explore`."""
    first = machine.start()
    seen, rest = {first}, [first]
    try:
        while rest:
            state = rest.pop()
            ended = True
            for following in machine.after(state):
                ended = False
                if following not in seen:
                    seen.add(following)
                    rest.append(following)
            if ended:
                machine.check_end(state)
            assert len(seen) <= most, f"{machine}: more than {most} states"
    except Wrong as wrong:
        return len(seen), str(wrong)
    return len(seen), ""
