"""The launcher itself: results in rank order, failures that show, ranks that die or hang."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests import launcher
from tests.launcher import rank_outcomes, run_ranks


def rank_and_argument(argument):
    return int(os.environ["RANK"]), argument, torch.get_num_threads()


def gloo_sum():
    dist.init_process_group("gloo")
    value = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(value)
    dist.destroy_process_group()
    return value.item()


def fail_on_rank_1():
    if os.environ["RANK"] == "1":
        got = 3
        assert got == 4


def die_on_rank_1():
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)


def sleep_on_rank_1():
    if os.environ["RANK"] == "1":
        print("before sleep", flush=True)
        time.sleep(60)


def test_results_come_in_rank_order():
    assert run_ranks(rank_and_argument, 3, {"a": 1}) == [(rank, {"a": 1}, 1) for rank in range(3)]


def test_ranks_can_meet_twice():
    for _ in range(2):
        assert run_ranks(gloo_sum, 3) == [3.0] * 3


def test_environment_reaches_the_ranks_only():
    assert run_ranks(os.getenv, 2, "AXO_TEST_MARK", env={"AXO_TEST_MARK": "seen"}) == ["seen"] * 2
    assert "AXO_TEST_MARK" not in os.environ


def test_a_failing_rank_is_shown():
    with pytest.raises(AssertionError, match=r"(?s)1 of 2 ranks; first was rank 1: AssertionError.*assert 3 == 4"):
        run_ranks(fail_on_rank_1, 2)


def test_a_dead_rank_is_shown():
    outcomes = rank_outcomes(die_on_rank_1, 2)
    assert outcomes[0].ok and outcomes[1].signal == "SIGKILL"


def test_a_late_rank_is_killed_and_its_place_shown():
    outcomes = rank_outcomes(sleep_on_rank_1, 2, timeout=2)
    assert outcomes[0].ok and outcomes[1].timed_out
    assert "before sleep" in outcomes[1].output and "sleep_on_rank_1" in outcomes[1].output


def interrupt(pid):
    if os.environ["RANK"] == "1":
        os.kill(pid, signal.SIGUSR1)
    time.sleep(60)


def answer():
    return "mine"


@pytest.mark.parametrize("again", [False, True])
def test_an_interrupted_job_answers_nobody_else(again, monkeypatch):
    """As when pytest's time limit cuts a test off: its ranks end, and the next test is given its own answer.

    ``again``: cut off once more while it waits for their end.
    """

    def cut_off(*_):
        if again:
            monkeypatch.setattr(launcher, "_receive", second)
        raise InterruptedError("cut off")

    def second(_):
        monkeypatch.undo()
        raise InterruptedError("cut off again")

    before = signal.signal(signal.SIGUSR1, cut_off)
    try:
        with pytest.raises(InterruptedError, match="cut off again" if again else "cut off$"):
            run_ranks(interrupt, 2, os.getpid())
        assert run_ranks(answer, 2) == ["mine", "mine"]
    finally:
        signal.signal(signal.SIGUSR1, before)
