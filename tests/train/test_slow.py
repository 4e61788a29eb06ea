"""A rank that is slow is named in the log, and shown by ``axo info --live``."""

import json
import random
import re
import statistics
import time

import pytest
import torch
from typer.testing import CliRunner

from axo import Grid
from axo.cli.main import app
from axo.grid import AXES
from axo.train import slow
from axo.train.loop import Trainer
from axo.train.runner import train_rank
from tests.launcher import run_ranks
from tests.train.test_train import TEXT, small


@pytest.mark.parametrize("text", ["2x3x2x2", "1x1x4x1", "1x1x1x1"])
def test_the_spread_of_an_axis_is_the_largest_of_its_lines(text):
    grid, draw = Grid.parse(text), random.Random(0)
    blocked = [[draw.random() for _ in AXES] for _ in range(2 * grid.world_size)]  # two stages
    expected = {}
    for place, axis in enumerate(AXES):
        for rank, _ in enumerate(blocked if grid.size(axis) > 1 else ()):
            first = rank // grid.world_size * grid.world_size
            line = [blocked[first + peer][place] for peer in grid.ranks(axis, rank % grid.world_size)]
            expected[axis] = max(expected.get(axis, 0), max(line) - min(line))
    assert slow.spread(grid, torch.tensor(blocked, dtype=torch.float64)) == expected


@pytest.mark.parametrize("ranks", [8, 512])
def test_the_watch_takes_less_than_a_percent_of_a_step_of_100_ms(ranks):
    """What rank 0 does in a step beside what it did without the watch, in processor time: nobody else's work counts."""
    grid, watch = Grid(x=2, y=2, data=ranks // 4), slow.SlowRanks(ranks, ["host"] * ranks)
    by_rank = 1 + torch.rand(ranks, 5, dtype=torch.float64)

    def step(index):
        watch.take(index, by_rank[:, 0].tolist())
        json.dumps([round(seconds, 6) for seconds in by_rank[:, 0].tolist()])
        return slow.spread(grid, by_rank[:, 1:])

    seconds = []
    for index in range(200):
        began = time.thread_time()
        assert step(index).keys() == {"x", "y", "data"}
        seconds.append(time.thread_time() - began)
    median = statistics.median(seconds[slow.STEPS :])
    print(f"\n{ranks} ranks: {1e6 * median:.0f} us in 3 calls a step, {median / 0.1:.3%} of 100 ms")
    assert median < 0.01 * 0.1


def test_a_rank_is_named_once_when_it_has_been_slow_for_twenty_steps():
    watch = slow.SlowRanks(4, [f"host{rank // 4}" for rank in range(8)])
    fast, late = [1.0, 1.05, 0.95, 1.0, 3.0, 3.1, 2.9, 3.0], [1.0, 1.05, 0.95, 1.0, 3.0, 3.1, 3.8, 3.0]
    told = [watch.take(step, fast) for step in range(30)] + [watch.take(30 + step, late) for step in range(60)]
    (line,) = [each for each in told if each]
    assert (line["rank"], line["host"], line["kind"]) == (6, "host1", "slow") and 40 < line["step"] < 50
    assert line["times"] >= 1.2 and "rank 6 on 'host1' has worked 1.2" in slow.words(line)
    again = [watch.take(100 + step, fast if step < 30 else late) for step in range(60)]
    assert [each["rank"] for each in again if each] == [6]  # after it was fast for a while


def test_no_rank_is_slower_than_itself():
    watch = slow.SlowRanks(1, ["a", "b"])
    assert not any(watch.take(step, [1.0, 9.0]) for step in range(40))


def train_with_a_slow_rank(config):
    accumulate = Trainer.accumulate

    def late(self, *args):
        if self.comms.rank == 2:
            time.sleep(0.15)
        return accumulate(self, *args)

    Trainer.accumulate = late
    return train_rank(config) and None


def test_a_slow_rank_is_named_in_the_log_and_shown(tmp_path, capsys):
    (tmp_path / "text.txt").write_text(TEXT)
    config = small(str(tmp_path / "text.txt"), grid=Grid(2, 1, 2, 1), steps=24, log_every=2)
    run_ranks(train_with_a_slow_rank, 4, config, hosts={"ranks_per_host": 2}, timeout=120)
    header, *lines, _ = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    (named,) = [line for line in lines if line["kind"] == "slow"]
    assert len({*header["hosts"]}) == 2 and named["rank"] == 2 and named["host"] == header["hosts"][2]
    assert named["step"] >= slow.STEPS - 1
    for step in steps:
        assert len(step["worked"]) == 4 and step["worked"][2] > 0.15 and max(step["worked"]) < step["seconds"]
        assert step["spread"].keys() == {"x", "z"} and max(step["spread"].values()) > 0.05

    shown = CliRunner().invoke(app, ["info", "--live", str(tmp_path / "out")]).output
    assert re.search(r"^slowest: rank 2 on .*, \d+\.\d\d times the others of its stage$", shown, re.MULTILINE), shown
    assert "rank 2 on" in shown.splitlines()[-1] and "the first to arrive waits for the last: x " in shown
    assert re.search(r"^\W+(\d) ", shown.split("of the step", 1)[1], re.MULTILINE)[1] == "2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no step is in it yet"),
        ('{"kind": "step"}\n', "KeyError"),
        ('{"kind": "header", "hosts": ["a"], "grid": "1x1x1x1"}\n{"kind": "step", "worked": ["x"]}\n', "TypeError"),
        ('{"kind": "header", "hosts": 5, "grid": []}\n{"kind": "step", "worked": [1]}\n', "TypeError"),
    ],
    ids=str,
)
def test_a_log_without_such_figures_is_one_error(tmp_path, text, message):
    (tmp_path / "log.jsonl").write_text(text)
    with pytest.raises(ValueError, match=f"log.jsonl is no log of a run with times of its ranks .*{message}"):
        slow.live(tmp_path)


@pytest.mark.parametrize("key", ["rank", "steps", "times", "step"])
def test_what_a_log_says_of_a_slow_rank_is_numbers(tmp_path, key):
    """A text would reach the terminal, which obeys it."""
    step = {"kind": "step", "step": 20, "seconds": 1.0, "worked": [1.0, 2.0], "spread": {"x": 1.0}}
    named = {"kind": "slow", "step": 20, "rank": 1, "host": "\x1b[2J", "times": 2.0, "steps": 20}
    for line in (named, named | {key: "\x1b[2J"}):
        log = [{"kind": "header", "hosts": ["a", "b"], "grid": "2x1x1x1"}, step, line]
        (tmp_path / "log.jsonl").write_text("".join(json.dumps(each) + "\n" for each in log))
        if line is named:
            said = slow.live(tmp_path)[2][-1]
            assert said.startswith("step 21: rank 1 on ") and "for 20 steps" in said and "\x1b" not in said
            continue
        with pytest.raises(ValueError, match="is no log of a run with times of its ranks") as raised:
            slow.live(tmp_path)
        assert "\x1b" not in str(raised.value)


def test_live_wants_one_run(tmp_path):
    for arguments in (["--live"], ["--live", str(tmp_path / "none")], ["--live", "a", "b"]):
        assert CliRunner().invoke(app, ["info", *arguments]).exit_code != 0
