"""What the ranks of a run have of memory for themselves, over time: read from Linux, ten times a second."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

PERIOD = 0.1  # seconds


class Memory:
    """Anonymous memory (``RssAnon``) of this process's children: neither files nor what ranks share.

    Attributes:
        samples: Of each process: (seconds since the first look, bytes).
    """

    def __init__(self) -> None:
        self.samples: dict[int, list[tuple[float, int]]] = {}

    def watch(self, ended: threading.Event) -> None:
        """Look until ``ended``."""
        start = time.monotonic()
        while not ended.wait(PERIOD):
            for process in children():
                if (size := anonymous(process)) > 0:
                    self.samples.setdefault(process, []).append((time.monotonic() - start, size))

    @property
    def most(self) -> int:
        """The most that a process has had beyond what it had at first."""
        return max(max(size for _, size in of) - min(size for _, size in of[:3]) for of in self.samples.values())


def return_freed_memory() -> None:
    """Let the C library give the memory of each freed tensor back at once; else ranks keep it for their next step."""
    m_mmap_threshold, smallest = -3, 64 << 10  # malloc.h
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(smallest)  # which ranks then leave as it is
    ctypes.CDLL(None).mallopt(m_mmap_threshold, smallest)


def children() -> list[int]:
    """The processes that this one has started and that are there."""
    numbers: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread that has ended
            numbers += map(int, (task / "children").read_text().split())
    return numbers


def anonymous(process: int) -> int:
    """Bytes; 0 of a process that has ended."""
    try:
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return 0


def draw(path: Path, memory: Memory, predicted: float, title: str) -> Path:
    """A line for each rank, MiB beyond its first look over seconds, and what the dry run had said."""
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    for samples in memory.samples.values():
        first = min(size for _, size in samples[:3])
        axes.plot([at for at, _ in samples], [(size - first) / 2**20 for _, size in samples], lw=0.8)
    axes.axhline(predicted, color="black", ls="--", lw=1, label=f"dry run: {predicted:.0f} MiB")
    axes.set(title=title, xlabel="seconds", ylabel="MiB of a rank's own", ylim=(0, None))
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    return path
