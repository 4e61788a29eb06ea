"""How far does a batch walk? Files of Axo and Python calls of ``axo train``, before the first batch and in a step.

    python -m bench.tools.walk --grid 2x1x2x1 --most 20

A hook of the interpreter counts on rank 0, in all threads: each entry into a function, each value that a generator is
asked for. The first part ends with the rank's first step; the step is the last of five, when every order is known.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import axo
from axo.grid import Grid
from axo.launch import launch_local
from axo.train import TrainConfig, loop, runner
from axo.train.check import check
from axo.train.data import Batches

STEPS = 5
_ROOT = f"{Path(axo.__file__).parent}/"
_POLLS = {"Meeting._ask", "Meeting._end", "_looks"}  # as often as ranks are late: counted once
Calls = Counter[tuple[str, str]]  # (file, function) -> calls


def counted(config: TrainConfig, batches: Batches) -> list[Calls]:
    """Run a rank of a run of ``STEPS`` steps: its calls before the first batch, and those of the last step."""
    calls, parts, plain = Calls(), list[Calls](), loop.Trainer.step

    def hook(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_ROOT):
            name = code.co_filename.removeprefix(_ROOT), code.co_qualname
            calls[name] = 1 if code.co_qualname in _POLLS else calls[name] + 1

    def step(self: loop.Trainer, index: int) -> loop.Step:
        if index == 0:
            parts.append(calls.copy())
        calls.clear()
        result = plain(self, index)
        if index == STEPS - 1:
            parts.append(calls.copy())
        return result

    loop.Trainer.step = step  # type: ignore[method-assign]
    threading.setprofile(hook)
    sys.setprofile(hook)
    runner.train_rank(config, batches)
    sys.setprofile(None)
    return parts


def files(calls: Calls) -> Counter[str]:
    """Calls by file."""
    return Counter(file for file, _ in calls.elements())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--grid", default="2x1x2x1", help="ranks on each axis")
    parser.add_argument("--most", type=int, default=0, help="print so many of the files and functions called most")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as out:
        config = TrainConfig(grid=Grid.parse(asked.grid), steps=STEPS, log_every=STEPS, out=out, precision="32-true")
        parts = launch_local(counted, config.ranks, config, check(config, one_machine=True))
    for name, calls in zip(("before the first batch", "a step"), parts, strict=True):
        print(json.dumps({"part": name, "grid": asked.grid, "files": len(files(calls)), "calls": calls.total()}))
        for what, count in [*files(calls).most_common(asked.most), *calls.most_common(asked.most)]:
            print(f"{count:7} {what if isinstance(what, str) else ' '.join(what)}")


if __name__ == "__main__":
    main()
