"""What a batch of ``axo train`` passes on its way: few files, few calls. The limits are what was reached, with a little
room; whoever needs more says why."""

from __future__ import annotations

from pathlib import Path

from axo.grid import Grid
from axo.train import TrainConfig
from axo.train.check import check
from bench.tools import walk
from tests.launcher import run_ranks

# Files, calls: 2,450 to 2,500 in a step, and more where ranks are late and ask again. A step passes two files for a
# loss that reads a split weight: each backward pass is looked at for that.
MOST = {"before the first batch": (74, 6900), "a step": (38, 2600)}


def test_a_batch_walks_no_further_than_it_did(tmp_path: Path) -> None:
    config = TrainConfig(grid=Grid(2, 1, 2, 1), steps=walk.STEPS, out=str(tmp_path), precision="32-true")
    parts = run_ranks(walk.counted, 4, config, check(config))[0]
    for (part, (most_files, most_calls)), calls in zip(MOST.items(), parts, strict=True):
        by_file = walk.files(calls)
        assert by_file["train/loop.py"] > 0, part
        assert len(by_file) <= most_files, (part, by_file)
        assert calls.total() <= most_calls, (part, calls.most_common(20))
