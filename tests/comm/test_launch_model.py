"""Which stream policies cannot deadlock, in every order in which kernels may begin (see launch_model.py).

Oracle: the model finds the deadlocks that are known (communicators on streams of their own without a launch order; a
shared stream that blocking calls go around) in the same programs in which the policies of today have none.
"""

from itertools import product

import pytest

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


def searched(policy, program, strategy, sizes, machine):
    model = Model(machine, policy)
    for rank in ranks_of(model, sizes):
        program(rank, strategy)
    return model.deadlock()


@pytest.mark.parametrize("strategy", ["serial", "split", "signal"])
def test_a_step_on_every_axis(strategy):
    """2x2x2x1, where one collective fits beside computation: none on the policies of today, one without an order."""
    tight = Machine(units=2, reserved=1)
    for policy in (OWN_ORDERED, SHARED):
        assert searched(policy, step, strategy, (2, 2, 2), tight) is None, policy
    assert searched(OWN, step, strategy, (1, 2, 2), Machine(units=1, reserved=1))


@pytest.mark.parametrize("strategy", ["serial", "split", "signal"])
def test_blocking_calls_beside_a_shared_stream(strategy):
    """A pending gather over z, then a blocking sum over y on the caller's stream, which nothing orders after it."""

    def found(policy):
        model = Model(Machine(1, 1), policy)
        for rank in ranks_of(model, (1, 2, 2)):
            reduced_product(rank, "y", strategy)
            ahead = rank.collective("z")
            rank.collective("y", blocking=True)
            rank.wait([ahead])
        return model.deadlock()

    assert found(SHARED_UNCHAINED)
    assert found(SHARED) is None
    assert found(OWN)
    assert found(OWN_ORDERED) is None


def test_what_the_order_of_submission_must_be():
    """A stream may wait only for the flags of a kernel that was submitted before."""

    def found(producer_first, machine):
        model = Model(machine, OWN_ORDERED)
        for rank in ranks_of(model, (2, 1, 1)):
            point = rank.fork()
            if producer_first:
                rank.collective("x", flag_of=rank.compute("producer"), forked=point)
            else:
                late = len(model.kernels) + 1
                rank.collective("x", flag_of=late, forked=point)
                rank.compute("producer")
        return model.deadlock()

    for one_queue in (False, True):
        assert found(True, Machine(1, 1, one_queue)) is None
    assert found(False, Machine(1, 1, one_queue=True))


@pytest.mark.parametrize("strategy", ["split", "signal"])
def test_a_kernel_that_spins_beside_collectives(strategy):
    """It holds its units until its operand has come, which takes units that were set aside."""

    def program(rank, strategy):
        gathered_product(rank, "z", strategy)
        reduced_product(rank, "y", strategy)

    for policy in (OWN_ORDERED, SHARED):
        assert searched(policy, program, strategy, (1, 2, 2), Machine(units=2, reserved=1)) is None
        unreserved = searched(policy, program, strategy, (1, 2, 2), Machine(units=2, reserved=0))
        assert bool(unreserved) == (strategy == "signal")


def test_ranks_that_issue_in_different_orders():
    """No policy helps them: what AXO_CHECK=1 is for."""
    for policy in (OWN_ORDERED, SHARED):
        model = Model(Machine(1, 1), policy)
        for rank in ranks_of(model, (2, 2, 1)):
            for axis in ("x", "y") if rank.rank % 3 else ("y", "x"):
                rank.collective(axis)
        assert model.deadlock(), policy
