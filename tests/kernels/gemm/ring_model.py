"""A model of the barriers and buffers of the kernel for Hopper (axo_kernels/gemm/hopper.py), and every order of events.

The kernel's three warp groups become lists of instructions, which follow from the sizes alone. What the hardware does
behind their backs are events of their own: a bulk copy arrives, a product ends, a bulk store has read its buffer. From
each state every group and every event that can go on does so, until all are done or nobody can: :func:`explore` visits
all states and names what is wrong.

    mbarrier    a phase is over when all counted arrivals and all expected bytes are in; ``wait(parity)`` passes once
                the phase of that parity is over, so a barrier that nobody has used passes ``wait(1)``
    bulk copy   what was in the buffer is gone when the copy is issued, what is new is there when it arrives
    product     reads its buffers from its issue to its end; a group's products end in order
    bulk store  reads its buffer from its issue to its end, and is in memory some time later

A group is one thread here. In the kernel it is 128, which meet at a barrier of their own before one of them arrives
anywhere; that this is so in the compiled code is checked there (bench.tools.assembly.grouped_complaints).

Where the kernel meets a stream at flags, memory is weak: who has not acquired what another has released knows nothing
of it.

    wait        chunks come one by one, or never. A bulk load may read what the producer has acquired, and then fenced
                for the copy engine, or has given up; then the groups must know of that
    signal      a group has two threads: one that stores, and learns that a store is in memory by waiting for its end,
                and one that counts, and learns of it at the barrier of the group. A count passes on what is known. A
                flag must stand for all parts of all tiles of its chunk

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
        meets: ``"wait"`` or ``"signal"`` where the program meets a stream at flags.
        chunk: Tiles of a chunk.
    """

    pingpong: bool
    stages: int
    tiles: int
    k_steps: int
    parts: int = 1
    head: int | None = None
    broken: str = ""
    meets: str = ""
    chunk: int = 1

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
            chunk = tile // self.chunk
            if self.meets == "wait" and tile % self.chunk == 0:
                before: list[Instruction] = [("flag", chunk), ("mark", chunk), ("fence",)]
                if self.broken in ("flag", "mark", "fence"):
                    before = [each for each in before if each[0] != self.broken]
                yield from reversed(before) if self.broken == "fence first" else before
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
            if self.meets == "wait" and self.broken == "looks first":
                yield "look", turn // self.chunk
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
            if self.meets == "wait" and self.broken != "looks first":
                yield "look", turn // self.chunk
            for part in range(self.parts):
                if self.broken != "buffer in use":
                    yield "stores", 0
                yield "fill", f"c {who}", (turn, part)
                yield "store", f"c {who}", (turn, who, part)
            if self.meets == "signal":
                yield "stores" if self.broken == "buffer alone" else "written", 0
                yield ("meet",)
        yield "stores", 0

    def counter(self, who: int) -> Iterator[Instruction]:
        """The thread of a group that counts what the group has stored."""
        for number, turn in enumerate(range(who if self.pingpong else 0, self.tiles, 2 if self.pingpong else 1)):
            if self.broken != "no barrier":
                yield "met", number
            yield "count", turn // self.chunk

    def parts_of(self, chunk: int) -> frozenset[tuple[int, int, int]]:
        """What a chunk's flag stands for: turn, group, part."""
        groups = (0, 1)
        return frozenset(
            (turn, who, part)
            for turn in range(chunk * self.chunk, min(self.tiles, (chunk + 1) * self.chunk))
            for who in (groups if not self.pingpong else (turn % 2,))
            for part in range(self.parts)
        )

    def counted(self, chunk: int) -> int:
        """How often a chunk is counted before its flag is set."""
        tiles = min(self.tiles, (chunk + 1) * self.chunk) - chunk * self.chunk
        return 1 if self.broken == "every tile" else tiles * (1 if self.broken == "half" else self.halves)

    @property
    def chunks(self) -> int:
        return -(-self.tiles // self.chunk)


class Wrong(Exception):
    """What a state shows that must never be."""


class State(NamedTuple):
    """Everything that decides what can happen next; hashable."""

    at: tuple[int, ...]  # the next instruction of group 0, group 1, the producer, and who counts of each group
    barriers: tuple[tuple[int, int, int], ...]  # parity of the phase that runs, arrivals and bytes that are missing
    held: tuple[Any, ...]  # what is in each buffer; None: a copy is on its way there
    loads: frozenset[tuple[int, int, Any]]  # barrier, buffer, content
    products: tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]  # buffers being read, oldest first
    stores: tuple[tuple[int, ...], tuple[int, ...]]  # the same
    come: int = 0  # chunks, in order
    acquired: frozenset[int] = frozenset()  # chunks, by the producer
    loadable: frozenset[int] = frozenset()  # chunks, by the copy engine
    given_up: frozenset[int] = frozenset()
    marked: frozenset[int] = frozenset()
    writes: tuple[tuple[Any, ...], tuple[Any, ...]] = ((), ())  # of each group, on their way to memory, oldest first
    known: tuple[frozenset[Any], ...] = (frozenset(),) * 4  # parts in memory, by each group's two threads
    meetings: tuple[tuple[frozenset[Any], ...], ...] = ((), ())  # of each group: what was known there
    counters: tuple[tuple[int, frozenset[Any]], ...] = ()  # of each chunk: how often, and what is passed on
    flags: frozenset[int] = frozenset()  # that the program has set


class Machine:
    """The groups' instructions with numbers for names, and what one step does to a state."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        counts = ring.counts()
        self.barriers = {name: number for number, name in enumerate(counts)}
        self.counts = tuple(counts.values())
        self.buffers: dict[str, int] = {}
        parts = [ring.consumer(0), ring.consumer(1), ring.producer()]
        parts += [ring.counter(0), ring.counter(1)] if ring.meets == "signal" else []
        self.programs = [self._numbered(each) for each in parts]
        self.expected = set[Any]().union(*(ring.parts_of(chunk) for chunk in range(ring.chunks)))

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
        held = ("nothing",) * len(self.buffers)
        counters = ((0, frozenset[Any]()),) * self.ring.chunks
        at = (0,) * len(self.programs)
        return State(at, barriers, held, frozenset(), ((), ()), ((), ()), counters=counters)

    def after(self, state: State) -> Iterator[State]:
        """Every state that can come next."""
        for group, program in enumerate(self.programs):
            if state.at[group] < len(program):
                following = self._instruction(state, group, program[state.at[group]])
                if following is not None:
                    yield following
                elif program[state.at[group]][0] == "flag":  # its bound is used up
                    yield state._replace(
                        at=_put(state.at, group, state.at[group] + 1),
                        given_up=state.given_up | {program[state.at[group]][1]},
                    )
        if self.ring.meets == "wait" and state.come < self.ring.chunks:
            yield state._replace(come=state.come + 1)
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
            if len(state.writes[who]) > len(state.stores[who]):
                yield state._replace(writes=_put(state.writes, who, state.writes[who][1:]))

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
        if name in _MEETING:
            return self._meeting(state, on, group, name, words)
        if name == "load":
            barrier, buffer, content = words
            chunk = content[0] // self.ring.chunk
            if self.ring.meets == "wait" and chunk not in state.loadable | state.given_up:
                raise Wrong("a copy reads what has not come")
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
        on = on._replace(stores=_put(state.stores, group, (*state.stores[group], words[0])))
        if self.ring.meets != "signal":
            return on
        return on._replace(writes=_put(state.writes, group, (*state.writes[group], words[1])))

    def _meeting(self, state: State, on: State, group: int, name: str, words: list[Any]) -> State | None:
        """The same of what happens at flags."""
        broken = self.ring.broken
        if name == "flag":
            if state.come <= words[0]:
                return None
            return on if broken == "no acquire" else on._replace(acquired=state.acquired | {words[0]})
        if name == "fence":
            return on._replace(loadable=state.acquired)
        if name == "mark":
            return on._replace(marked=state.marked | (state.given_up & {words[0]}))
        if name == "look":
            if words[0] in state.given_up - state.marked:
                raise Wrong("what has not come is stored as if it had")
            return on
        if name == "written":
            if state.writes[group]:
                return None
            done = {each[2] for each in self.programs[group][: state.at[group]] if each[0] == "store"}
            return on._replace(known=_put(state.known, group, frozenset(done)))
        if name == "meet":
            return on._replace(meetings=_put(state.meetings, group, (*state.meetings[group], state.known[group])))
        who = group - 3
        if name == "met":
            if len(state.meetings[who]) <= words[0]:
                return None
            return on._replace(known=_put(state.known, 2 + who, state.known[2 + who] | state.meetings[who][words[0]]))
        assert name == "count"
        (chunk,), known = words, state.known[2 + who]
        count, passed = state.counters[chunk]
        if broken != "count relaxed":
            known = passed = known | passed
            on = on._replace(known=_put(state.known, 2 + who, known))
        if (last := count + 1 == self.ring.counted(chunk)) and broken != "count kept":
            count = -1
        on = on._replace(counters=_put(state.counters, chunk, (count + 1, passed)))
        if last and not self.ring.parts_of(chunk) <= (frozenset() if broken == "no release" else known):
            raise Wrong("a flag is set before all that it stands for is known to be in memory")
        return on._replace(flags=state.flags | {chunk}) if last else on

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
        if self.ring.meets == "signal" and (len(state.flags) < self.ring.chunks or any(n for n, _ in state.counters)):
            raise Wrong("a flag is not set, or a counter not empty")


_MEETING = ("flag", "fence", "mark", "look", "written", "meet", "met", "count")


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
