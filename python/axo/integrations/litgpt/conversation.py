"""What a user types into ``axo litgpt chat``: read by rank 0, told to all ranks."""

from __future__ import annotations

import os
import queue
import sys
import threading
from typing import Any

TOLD_EVERY = 10.0  # seconds: ranks that wait for a user hear from each other, so that a lost one is noticed
_END = "!quit"  # ends a conversation, as the end of the input does
_kept: int | None = None


def keep_input() -> None:
    """Keep the standard input for a rank that is forked from this process: its own is closed."""
    global _kept
    if _kept is None:
        _kept = os.dup(sys.stdin.fileno())


class Lines:
    """Stands for ``input`` on every rank of a run.

    Args:
        fabric: The run's Fabric, after its model is set up.
    """

    def __init__(self, fabric: Any) -> None:
        self._fabric = fabric
        self._lines: queue.Queue[str] = queue.Queue()
        if fabric.global_rank == 0:
            threading.Thread(target=self._read, daemon=True).start()

    def __call__(self, prompt: str = "") -> str:
        """The next line, without its end, the same on all ranks; ``!quit`` when there are no more."""
        self._fabric.print(prompt, end="", flush=True)
        while True:
            line = None
            if self._fabric.global_rank == 0:
                try:
                    line = self._lines.get(timeout=TOLD_EVERY)
                except queue.Empty:
                    pass
            line = self._fabric.broadcast(line)
            if line is not None:
                return str(line)

    def _read(self) -> None:
        with open(_kept, closefd=False) if _kept is not None else sys.stdin as source:
            for line in source:
                self._lines.put(line.rstrip("\n"))
        for _ in range(2):  # with --multiline the first ends a prompt
            self._lines.put(_END)
