"""The cases of the model of launch_model.py, and their table: which policy can stop for ever, in which program.

    python -m tests.comm.launch_cases          prints the table of docs/devices.md

A cell says whether some order in which kernels may begin stops for ever, and how many states were looked at: all there
are, or those up to the first stop. With an order of launches, or of a shared stream, few orders are left to look at.
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


def gathered_product(rank, axis, strategy, chunks=2):
    """A product of an operand that is gathered over an axis."""
    works = [rank.collective(axis) for _ in range(chunks)]
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
PROGRAMS = {STEP: step, BESIDE: reduced_beside_gather, GATHER: gathered_and_reduced}
HEAD = """| program | policy | grid x, y, z | multiprocessors | serial | split | signal |
|---|---|---|---|---|---|---|
"""


def cases():
    """All rows. Without an order 2x2x2 on two multiprocessors has too many states to look at all."""
    for policy, grid, units in product(POLICIES, ("1x2x2", "2x2x2"), (1, 2)):
        if (POLICIES[policy], grid, units) != (OWN, "2x2x2", 2):
            yield Case(STEP, policy, grid, Machine(units, 1))
    for policy in POLICIES:
        yield Case(BESIDE, policy, "1x2x2", Machine(1, 1))
    for policy, reserved in product(("own streams, launch order", "shared stream, one chain"), (1, 0)):
        yield Case(GATHER, policy, "1x2x2", Machine(2, reserved))


def table(rows) -> str:
    """The rows of :func:`cases`, searched, in Markdown."""
    text = HEAD
    for case, found in rows.items():
        machine = f"{case.machine.units}" + (f", {case.machine.reserved} left free" if case.program == GATHER else "")
        cells = [f"{'**stops**' if model.stuck else 'none'} ({model.states:,})" for model in found.values()]
        text += "| " + " | ".join([case.program, case.policy, case.grid, machine, *cells]) + " |\n"
    return text


if __name__ == "__main__":
    print(table({case: case.search() for case in cases()}), end="")
