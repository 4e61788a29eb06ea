"""Whether ranks learn why another ended: one of four raises while large all-reduces are under way, and exits at once.

    python -m bench.tools.last_words --seconds 60

The ranks play two hosts. Each of the others should read what was raised; a connection that the ended process resets may
lose it ("died"), and a rank that learns it late ends late. The counts depend on how busy the cores are: compare two
commits in turns. It wants the checkout.
"""

from __future__ import annotations

import sys
import time
from collections import Counter

import torch

import axo
from tests.launcher import rank_outcomes

from ..lib.arguments import Parser

RANKS, ELEMENTS, LATE_SECONDS = 4, 3_000_000, 1.5


def work(victim: int) -> None:
    """On every rank: rounds of pending all-reduces over three axes; ``victim`` raises in the fourth."""
    with axo.connect("2x1x2x1", timeout=20) as comms:
        tensors = [torch.ones(ELEMENTS) for _ in range(4)]
        lines = (comms.world, comms.x, comms.z, comms.world)
        for number in range(6):
            if number == 3 and comms.rank == victim:
                raise ValueError("last words")
            for pending in [line.all_reduce(t, async_op=True) for line, t in zip(lines, tensors, strict=True)]:
                pending.wait()


def main() -> int:
    from bench.tools.last_words import work  # ranks import it by this name, not as __main__

    parser = Parser("python -m bench.tools.last_words", __doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    end, runs, late = time.monotonic() + options.seconds, 0, 0
    read: Counter[str] = Counter()
    while time.monotonic() < end:
        outcomes = rank_outcomes(work, RANKS, runs % RANKS, hosts={"ranks_per_host": 2})
        messages = [one.message or "" for rank, one in enumerate(outcomes) if rank != runs % RANKS]
        read.update("raised" if "last words" in m else "died" if "died" in m else "else" for m in messages)
        late += max(one.seconds or 0.0 for one in outcomes) > LATE_SECONDS
        runs += 1
    counts = ", ".join(f"{count} {word}" for word, count in sorted(read.items()))
    print(f"{runs} runs, {late} with a rank that ended after more than {LATE_SECONDS} s; the others read: {counts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
