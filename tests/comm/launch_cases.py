"""The cases of the model of launch_model.py, and their table: which policy can stop for ever, in which program.

    python -m tests.comm.launch_cases          prints the table of docs/devices.md

A cell says whether some order in which blocks may begin stops for ever, and how many states were looked at: all there
are, or those up to the first stop. With an order of launches, or of a shared stream, few orders are left to look at.
Cases that differ in the machine alone and end alike share a row, with the sum of their states.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from tests.comm.launch_model import Machine, Model, Policy, Rank

OWN = Policy(shared=False, chained=False, ordered=False)
OWN_ORDERED = Policy(shared=False, chained=False, ordered=True)  # NCCL 2.26
SHARED_UNCHAINED = Policy(shared=True, chained=False, ordered=False)  # each communicator after its own last operation
SHARED = Policy(shared=True, chained=True, ordered=False)  # AMD, and NCCL before 2.26


def ranks_of(model, sizes):
    """The ranks of a grid, x innermost, with the communicators that each is in."""
    for rank, (z, y, x) in enumerate(product(*(range(size) for size in reversed(sizes)))):
        yield Rank(model, rank, {"x": f"x{y}{z}", "y": f"y{x}{z}", "z": f"z{x}{y}"})


def reduced_product(rank, axis, strategy, chunks=2):
    """A product whose result is summed over an axis."""
    if strategy == "serial":
        rank.compute()
        rank.collective(axis, blocking=True)
    elif strategy == "split":
        works = []
        for _ in range(chunks):
            rank.compute()
            works.append(rank.collective(axis))
        rank.wait(works)
    else:
        point = rank.fork()
        producer = rank.compute("producer")
        rank.wait([rank.collective(axis, flag_of=producer, forked=point) for _ in range(chunks)])


def gathered_product(rank, axis, strategy, chunks=2, cap=0):
    """A product of an operand that is gathered over an axis."""
    works = [rank.collective(axis, cap=cap) for _ in range(chunks)]
    if strategy == "signal":
        rank.compute("consumer", spins_for=works)
        rank.wait(works)
    else:
        for work in works:
            rank.wait([work])
            rank.compute()


def step(rank, strategy):
    """Two layers forward and backward: weights gathered ahead and gradients scattered over z, sums over y and x."""
    ahead = rank.collective("z")
    for axis, more in (("y", True), ("x", False)):
        rank.wait([ahead])
        if more:
            ahead = rank.collective("z")
        reduced_product(rank, axis, strategy)
    pending = []
    for axis in ("y", "x"):
        reduced_product(rank, axis, strategy)
        rank.compute("weight's gradient")
        pending.append(rank.collective("z"))
    rank.wait(pending)


def reduced_beside_gather(rank, strategy):
    """A sum over y, then a pending gather over z and a blocking sum over y on the caller's stream."""
    reduced_product(rank, "y", strategy)
    ahead = rank.collective("z")
    rank.collective("y", blocking=True)
    rank.wait([ahead])


def gathered_and_reduced(rank, strategy):
    """An operand gathered over z, then a sum over y; as ``signal`` the first product spins until chunks have come."""
    gathered_product(rank, "z", strategy)
    reduced_product(rank, "y", strategy)


def capped_beside_sum(rank, strategy):
    """A pending sum over y, which nobody has capped, then an operand that is gathered over z by one channel."""
    ahead = rank.collective("y")
    gathered_product(rank, "z", strategy, cap=CAP)
    rank.wait([ahead])


CAP = 1
STRATEGIES = ("serial", "split", "signal")
POLICIES = {
    "own streams, no order": OWN,
    "own streams, launch order": OWN_ORDERED,
    "shared stream, blocking calls beside it": SHARED_UNCHAINED,
    "shared stream, one chain": SHARED,
}


class Case(NamedTuple):
    """A row: what each rank runs, on which grid and machine."""

    program: str
    policy: str
    grid: str
    machine: Machine

    def search(self) -> dict[str, Model]:
        """By strategy the model after its search."""
        found = {}
        for strategy in STRATEGIES:
            model = found[strategy] = Model(self.machine, POLICIES[self.policy])
            for rank in ranks_of(model, [int(size) for size in self.grid.split("x")]):
                PROGRAMS[self.program](rank, strategy)
            model.deadlock()
        return found


STEP, BESIDE, GATHER = "a step on all axes", "a blocking sum beside a gather", "a gathered product, then a summed one"
CAPPED = "a sum, then a product behind a capped gather"
PROGRAMS = {STEP: step, BESIDE: reduced_beside_gather, GATHER: gathered_and_reduced, CAPPED: capped_beside_sum}
TODAY = ("own streams, launch order", "shared stream, one chain")
SIZES = ((1, 1), (2, 1), (2, 2), (3, 2), (4, 2))  # multiprocessors, and channels of a collective
HEAD = """| program | policy | grid x, y, z | multiprocessors / channels | begins first | serial | split | signal |
|---|---|---|---|---|---|---|---|
"""


def few_enough(policy, grid, units, channels, priorities):
    """Whether all states of a step can be looked at in a second: always with the policies of today."""
    if policy in TODAY:
        return True
    if grid == "1x2x2":
        return POLICIES[policy] != OWN or units < 3
    if priorities:
        return units == 1
    return units < 4 and (POLICIES[policy] != OWN or (units, channels) != (2, 1))


def cases():
    """All cases."""
    for policy, grid, size, priorities in product(POLICIES, ("1x2x2", "2x2x2"), SIZES, (False, True)):
        if few_enough(policy, grid, *size, priorities):
            yield Case(STEP, policy, grid, Machine(size[0], 1, size[1], priorities))
    for policy, (units, channels), priorities in product(POLICIES, SIZES, (False, True)):
        yield Case(BESIDE, policy, "1x2x2", Machine(units, 1, channels, priorities))
    for policy, (units, reserved, channels), priorities in product(
        TODAY, ((2, 1, 1), (2, 0, 1), (4, 2, 2), (4, 1, 2)), (False, True)
    ):
        yield Case(GATHER, policy, "1x2x2", Machine(units, reserved, channels, priorities))
    for policy, together, (units, reserved), priorities in product(
        TODAY, (True, False), ((3, 1), (4, 3)), (False, True)
    ):
        yield Case(CAPPED, policy, "1x2x2", Machine(units, reserved, 2, priorities, together))


def table(rows) -> str:
    """The cases, searched, in Markdown."""
    alike: dict[tuple, dict[str, dict[bool, list[Model]]]] = {}  # -> what the machines are called -> priorities
    for case, found in rows.items():
        machine = case.machine
        size = f"{machine.units} / {machine.channels}"
        if case.program in (GATHER, CAPPED):
            size += f", {machine.reserved} left free"
        program = case.program + ("" if machine.wait_for_each_other else ", each channel by itself")
        ends = tuple("**stops**" if model.stuck else "none" for model in found.values())
        same = alike.setdefault((program, case.policy, case.grid, ends), {})
        same.setdefault(size, {})[machine.priorities] = list(found.values())
    text = HEAD
    for (program, policy, grid, ends), sizes in alike.items():
        for title, wanted in (("any", {False}), ("communication", {True}), ("either", {False, True})):
            group = [size for size, by_priority in sizes.items() if by_priority.keys() == wanted]
            if not group:
                continue
            searched = [models for size in group for models in sizes[size].values()]
            states = [sum(model.states for model in models) for models in zip(*searched, strict=True)]
            cells = [f"{end} ({count:,})" for end, count in zip(ends, states, strict=True)]
            text += "| " + " | ".join([program, policy, grid, "; ".join(group), title, *cells]) + " |\n"
    return text


if __name__ == "__main__":
    print(table({case: case.search() for case in cases()}), end="")
