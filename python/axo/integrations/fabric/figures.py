"""What a training run logs beside its own metrics: figures of all ranks, alike on every rank.

    figures = Figures(fabric.strategy.comms)
    fabric.log_dict({"loss": figures.mean(loss)} | figures.take())

    loss               mean over the data ranks (z and data)
    tokens_per_sec     of all data ranks, since the figures before
    mfu                flops of the model in that time, of what all ranks could have done in it (``peak``)
    memory_gb          the most that any rank has held so far: of the device, or of the process on a CPU; 1e9 bytes
    comm_share/x ...   share of that time in which a rank was blocked in communication over the axis, mean over ranks;
                       and comm_share/all

``take`` costs two all-reduces of a few numbers over all ranks, and ``mean`` one over z and one over data.
"""

from __future__ import annotations

import time

import torch

from axo.comm.connect import Communicators
from axo.comm.memory import most_held
from axo.grid import AXES
from axo.integrations import data_ranks


class Figures:
    """Figures of one run, from now on.

    Args:
        peak: Flops per second of one rank's device; None: not known, and no ``mfu``.
    """

    def __init__(self, comms: Communicators, *, peak: float | None = None) -> None:
        self._comms, self._peak = comms, peak
        self._since = time.perf_counter()
        self._blocked = self._blocked_by_axis()
        self._counted: dict[str, float] = {}

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """The mean of ``value`` (any shape) over the data ranks. Every rank must call it."""
        return data_ranks.reduce(value.to(self._comms.device, torch.float64), self._comms, "mean").to(value.dtype)

    def take(self, tokens: int | None = None, *, flops: float | None = None) -> dict[str, float]:
        """The figures. Every rank must call it.

        Args:
            tokens: Tokens that all data ranks have seen so far; None: nothing is said of them.
            flops: Those of the model's steps so far, of all data ranks, each product counted once; None: the same.
        """
        now, blocked = time.perf_counter(), self._blocked_by_axis()
        seconds = now - self._since
        shares = [(after - before) / seconds for after, before in zip(blocked, self._blocked, strict=True)]
        mean = self._comms.everyone.all_reduce(
            torch.tensor(shares, dtype=torch.float64, device=self._comms.device), "sum"
        )
        most = torch.tensor([most_held(self._comms.device)], dtype=torch.float64, device=self._comms.device)
        figures = {
            f"comm_share/{axis}": share / self._comms.everyone.size
            for axis, share in zip(AXES, mean.tolist(), strict=True)
        }
        figures["comm_share/all"] = sum(figures.values())
        figures["memory_gb"] = self._comms.everyone.all_reduce(most, "max").item() / 1e9
        could = self._peak and self._peak * self._comms.everyone.size
        counts = {"tokens_per_sec": tokens, "mfu": flops / could if flops is not None and could else None}
        for name, count in counts.items():
            if count is not None:
                before = self._counted.get(name, count)  # a run that goes on begins with what was counted before it
                if count > before:
                    figures[name] = (count - before) / seconds
                self._counted[name] = count
        self._since, self._blocked = now, blocked
        return figures

    def _blocked_by_axis(self) -> list[float]:
        seconds = self._comms.blocked_seconds
        return [seconds[axis] for axis in AXES]
