"""Which stream policies cannot deadlock, in every order in which kernels may begin (see launch_model.py).

Oracle: the model finds the deadlocks that are known (communicators on streams of their own without a launch order; a
shared stream that blocking calls go around) in the same programs in which the policies of today have none.
"""

from itertools import product
from pathlib import Path

import pytest

from tests.comm.launch_cases import (
    BESIDE,
    GATHER,
    OWN,
    OWN_ORDERED,
    POLICIES,
    SHARED,
    SHARED_UNCHAINED,
    STEP,
    STRATEGIES,
    cases,
    ranks_of,
    table,
)
from tests.comm.launch_model import Machine, Model, Rank

# The stops that are known: old policies where one collective fits at a time, and a spinning kernel that leaves nothing.
STOPS = {
    (STEP, OWN, 1): STRATEGIES,
    (STEP, SHARED_UNCHAINED, 1): ("serial",),
    (BESIDE, OWN, 1): STRATEGIES,
    (BESIDE, SHARED_UNCHAINED, 1): STRATEGIES,
}
SPINS = ("signal",)


@pytest.fixture(scope="module")
def rows():
    return {case: case.search() for case in cases()}


def test_which_policies_stop(rows):
    """Neither policy of today in any program that leaves a multiprocessor to the collectives; the old ones as known."""
    assert {(case.program, POLICIES[case.policy]) for case in rows} >= set(product((STEP, BESIDE), POLICIES.values()))
    for case, found in rows.items():
        known = STOPS.get((case.program, POLICIES[case.policy], case.machine.units), ())
        if case.program == GATHER and not case.machine.reserved:
            known = SPINS
        assert tuple(strategy for strategy, model in found.items() if model.stuck) == known, case
        assert all(model.states > 1 for model in found.values()), case


def test_states_are_counted_when_they_are_looked_at():
    """One unit, two sums over both ranks: nothing begun, then one here, then the other there, and nothing goes on."""
    model = Model(Machine(1, 1), OWN)
    for rank in (Rank(model, number, {"a": "a", "b": "b"}) for number in range(2)):
        rank.collective("a")
        rank.collective("b")
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
        assert found(True, Machine(1, 1, one_queue)) is None
    assert found(False, Machine(1, 1, one_queue=True))


def test_ranks_that_issue_in_different_orders():
    """No policy helps them: what AXO_CHECK=1 is for."""
    for policy in (OWN_ORDERED, SHARED):
        model = Model(Machine(1, 1), policy)
        for rank in ranks_of(model, (2, 2, 1)):
            for axis in ("x", "y") if rank.rank % 3 else ("y", "x"):
                rank.collective(axis)
        assert model.deadlock(), policy
