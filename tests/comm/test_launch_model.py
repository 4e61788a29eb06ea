"""Which stream policies cannot deadlock, in every order in which thread blocks may begin (see launch_model.py).

Oracle: the model finds the deadlocks that are known (communicators on streams of their own without a launch order; a
shared stream that blocking calls go around) in the same programs in which the policies of today have none.
"""

from itertools import product
from pathlib import Path

import pytest

from tests.comm.launch_cases import (
    BESIDE,
    CAP,
    CAPPED,
    OWN,
    OWN_ORDERED,
    POLICIES,
    SHARED,
    SHARED_UNCHAINED,
    STEP,
    STRATEGIES,
    TODAY,
    cases,
    ranks_of,
    table,
)
from tests.comm.launch_model import Machine, Model, Rank

# The stops that are known. Of old policies, where two collectives do not fit beside each other whole; priorities help
# those that could only stop behind a blocking call.
STOPS = {
    (STEP, OWN): {False: STRATEGIES, True: ("split", "signal")},
    (STEP, SHARED_UNCHAINED): {False: ("serial",), True: ()},
    (BESIDE, OWN): {False: STRATEGIES, True: ()},
    (BESIDE, SHARED_UNCHAINED): {False: STRATEGIES, True: ()},
}


def known_stops(case):
    machine = case.machine
    if case.program in (STEP, BESIDE):
        fit = machine.units >= 2 * machine.channels
        return () if fit or case.policy in TODAY else STOPS[case.program, POLICIES[case.policy]][machine.priorities]
    # Of those of today: a kernel that spins and leaves less than what it waits for needs, and who comes before that.
    wanted = machine.channels + (CAP if case.program == CAPPED else 0)
    enough = machine.reserved >= wanted or machine.priorities or not machine.wait_for_each_other
    return () if enough else ("signal",)


@pytest.fixture(scope="module")
def rows():
    return {case: case.search() for case in cases()}


def test_which_policies_stop(rows):
    """Neither policy of today in any program that leaves enough to the collectives; the old ones as known."""
    assert {(case.program, POLICIES[case.policy]) for case in rows} >= set(product((STEP, BESIDE), POLICIES.values()))
    for policy in TODAY:
        seen = {case.machine for case in rows if (case.program, case.policy, case.grid) == (STEP, policy, "2x2x2")}
        assert {(m.units, m.channels) for m in seen} >= {(1, 1), (2, 2), (3, 2), (4, 2)}
        assert {m.priorities for m in seen} == {False, True}
    assert {case.machine.wait_for_each_other for case in rows if case.program == CAPPED} == {False, True}
    for case, found in rows.items():
        assert tuple(strategy for strategy, model in found.items() if model.stuck) == known_stops(case), case
        assert all(model.states > 1 for model in found.values()), case


def two_sums(machine):
    model = Model(machine, OWN)
    for rank in (Rank(model, number, {"a": "a", "b": "b"}) for number in range(2)):
        rank.collective("a")
        rank.collective("b")
    return model


def test_a_collective_that_is_there_in_part_holds_what_it_has():
    """Two sums of two channels: on three multiprocessors one of them is there in half, on the other rank the other."""
    assert two_sums(Machine(3, channels=2)).deadlock()
    assert two_sums(Machine(4, channels=2)).deadlock() is None
    # Channels that end each by themselves: the half that is there everywhere makes room for the rest.
    assert two_sums(Machine(3, channels=2, wait_for_each_other=False)).deadlock() is None
    assert two_sums(Machine(1, channels=1, wait_for_each_other=False)).deadlock()


def test_priorities_order_what_has_been_submitted():
    """A host may be late: what it has submitted before a kernel of a higher priority may have begun by then."""

    def found(late, priorities):
        model = Model(Machine(1, priorities=priorities), OWN)
        for rank in ranks_of(model, (2, 2, 1)):
            point, producer = rank.fork(), rank.compute("producer")
            for axis in ("x", "y") if late else ("y", "x"):
                if axis == "x":
                    rank.collective(axis, blocking=True)  # of the lower priority
                else:
                    rank.collective(axis, flag_of=producer, forked=point)
        return model.deadlock()

    assert found(late=False, priorities=False) and found(late=True, priorities=False)
    assert found(late=True, priorities=True)
    assert found(late=False, priorities=True) is None


def test_states_are_counted_when_they_are_looked_at():
    """One unit, two sums over both ranks: nothing begun, then one here, then the other there, and nothing goes on."""
    model = two_sums(Machine(1))
    assert model.deadlock() and model.states == 3


def test_the_page_has_the_table(rows):
    """Oracle: the model; `python -m tests.comm.launch_cases` prints what belongs there."""
    assert table(rows) in (Path(__file__).parents[2] / "docs" / "devices.md").read_text(encoding="utf-8")


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
        assert found(True, Machine(1, one_queue=one_queue)) is None
    assert found(False, Machine(1)) is None and found(False, Machine(1, one_queue=True))


def test_ranks_that_issue_in_different_orders():
    """No policy helps them: what AXO_CHECK=1 is for."""
    for policy in (OWN_ORDERED, SHARED):
        model = Model(Machine(1), policy)
        for rank in ranks_of(model, (2, 2, 1)):
            for axis in ("x", "y") if rank.rank % 3 else ("y", "x"):
                rank.collective(axis)
        assert model.deadlock(), policy
