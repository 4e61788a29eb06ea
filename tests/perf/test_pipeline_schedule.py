"""Schedules of pipelines against the clock.

Oracles: the actions that torch's own schedules hold once they are made in full, with messages; steps of two ranks by
hand; the closed forms of the literature.
"""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed import pipelining

from axo.perf import pipeline_schedule
from axo.perf.pipeline_schedule import KINDS, Action, actions, estimate, in_flight, simulate, stages_of

TIMES = [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.0, 2.0, 1.0), (2.0, 1.0, 1.0), (1.0, 0.8, 1.2)]


def by_rank(name: str, ranks: int, times: list[list[float]]) -> list[tuple[int, list[float]]]:
    """Seconds of F, I and W of each rank, from those of each stage."""
    stages = [stages_of(rank, len(times[0]), ranks, KINDS[name].order) for rank in range(ranks)]
    return [(1, [sum(row[stage] for stage in mine) for row in times]) for mine in stages]


def test_actions_are_those_of_torchs_schedules() -> None:
    ranks, microbatches = 4, 8
    for name, kind in KINDS.items():
        stages = [
            SimpleNamespace(
                num_stages=ranks * kind.stages_per_rank, group_size=ranks, group_rank=0, stage_index=index * ranks,
                is_first=index == 0, is_last=False, has_backward=True, submod=None, device=torch.device("cpu"),
            )
            for index in range(kind.stages_per_rank)
        ]  # fmt: skip
        whole = getattr(pipelining, kind.torch_name)(stages if len(stages) > 1 else stages[0], microbatches)
        if kind.stages_per_rank > 1:
            order = whole.pipeline_order_with_comms
            for rank in range(ranks):
                flat = [each for one in order[rank] for each in one.sub_actions or (one,)]
                computed = [one for one in flat if one.computation_type.value in "FBIW"]
                wanted = [(one.computation_type.value, one.stage_index, one.microbatch_index) for one in computed]
                assert list(actions(name, ranks, microbatches)[rank]) == wanted, (name, rank)
    # By hand: what torch's loops of one stage a rank do; on the last of 1F1B one forward, one backward.
    assert actions("gpipe", 2, 2)[1] == tuple(Action(kind, 1, i) for kind in "FB" for i in (0, 1))
    assert actions("1f1b", 2, 3)[0] == tuple(Action(*one) for one in (("F", 0, 0), ("F", 0, 1), ("B", 0, 0),
        ("F", 0, 2), ("B", 0, 1), ("B", 0, 2)))  # fmt: skip
    assert actions("1f1b", 2, 3)[1] == tuple(Action(kind, 1, i) for i in (0, 1, 2) for kind in "FB")


def test_two_ranks_by_hand() -> None:
    """F 1 s, B 2 s, a message 0.5 s; uneven: the second stage takes twice as long."""
    found = simulate("1f1b", 2, 2, 1.0, 1.5, 0.5, 0.5)
    #  rank 0: F0 0-1  F1 1-2  B0 5-7 (F0 on rank 1 1.5-2.5, B0 2.5-4.5)  B1 after rank 1's F1 4.5-5.5, B1 5.5-7.5: 8-10
    assert [(one.rank, str(one.action.kind), one.start, one.end) for one in found.ran] == [
        (0, "F", 0, 1), (0, "F", 1, 2), (1, "F", 1.5, 2.5), (1, "B", 2.5, 4.5), (1, "F", 4.5, 5.5), (0, "B", 5, 7),
        (1, "B", 5.5, 7.5), (0, "B", 8, 10),
    ]  # fmt: skip
    assert found.seconds == 10 and found.busy == (6, 6) and found.bubble == pytest.approx(1 - 12 / 20)
    assert found.held() == (2, 1) and found.held([3.0, 10.0]) == (6, 10)
    uneven = simulate("gpipe", 2, 2, [1.0, 2.0], [1.0, 2.0], [1.0, 2.0])
    assert uneven.seconds == 1 + 2 * 2 + 2 * 4 + 2


@pytest.mark.parametrize("name", KINDS)
def test_closed_forms_are_those_of_the_clock(name: str) -> None:
    """Time within 3% with equal stages, 8% with uneven ones and messages; what is held to a micro-batch of a stage."""
    share = KINDS[name].stages_per_rank
    for ranks, microbatches in ((2, 4), (4, 8), (4, 16), (8, 32)):
        stages = ranks * share
        for times in TIMES:
            each = [[seconds / share] * stages for seconds in times]
            found = simulate(name, ranks, microbatches, *each)
            assert estimate(name, ranks, microbatches, by_rank(name, ranks, each)) == pytest.approx(
                found.seconds, rel=0.03
            ), times
            for rank, held in enumerate(found.held(1 / share)):
                assert in_flight(name, ranks, microbatches, rank) == pytest.approx(held, abs=0.5), (times, rank)
            uneven = [[one * (1 + 0.15 * (stage == stages - 1)) for stage, one in enumerate(row)] for row in each]
            found = simulate(name, ranks, microbatches, *uneven, 0.02)
            assert estimate(name, ranks, microbatches, by_rank(name, ranks, uneven), 0.02) == pytest.approx(
                found.seconds, rel=0.08
            ), times


def test_less_bubble_with_each_schedule() -> None:
    shares = {name: simulate(name, 4, 8, 1 / kind.stages_per_rank, 1 / kind.stages_per_rank,
                             1 / kind.stages_per_rank).bubble for name, kind in KINDS.items()}  # fmt: skip
    assert shares["gpipe"] == shares["1f1b"] == pytest.approx(3 / 11)
    assert shares["looped-bfs"] == shares["interleaved-1f1b"] == pytest.approx(1.5 / 9.5)
    assert shares["zero-bubble"] == shares["zbv"] == shares["dualpipev"] == pytest.approx(0.5 / 8.5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: simulate("2f2b", 2, 4, 1, 1, 1), "schedule='2f2b' is not known; use one of gpipe, 1f1b"),
        (lambda: simulate("1f1b", 4, 2, 1, 1, 1), "microbatches=2 are fewer than the 4 stages"),
        (lambda: simulate("zero-bubble", 4, 9, 1, 1, 1), "microbatches=9 do not divide into 2; use a multiple of 4"),
        (lambda: simulate("1f1b", 2, 2, [1.0], 1, 1), "one for each of the 2 stages"),
        (lambda: simulate("1f1b", 2, 2, -1.0, 1, 1), "must be one figure of at least 0"),
    ],
)
def test_what_means_nothing(call, message: str) -> None:
    with pytest.raises(ValueError, match=r"^pipeline: ") as caught:
        call()
    assert message in str(caught.value)
    assert pipeline_schedule.schedule_kind("zbv").order == "v"
