"""What tensors without values would take: a FakeTensorMode that follows every storage from its first tensor to its end.

The peak is kept with what was there by kind, and with the phase of the step:

    weights, optimizer, gradients     this rank's shards, AdamW's moments, .grad
    gathered weights                  blocks that products read: gathered over z, or cast
    gradients under way               blocks before they are scattered, and buckets
    activations                       made in the forward pass (and in recomputations) and still referred to
    backward                          made in the backward pass: gradients of activations, temporaries

Small tensors that have values (token ids, statistics of the loss) are not counted. Allocators round up and leave gaps;
that is not counted either.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from axo.overlap.pool import Pool

WEIGHTS, OPTIMIZER, GRADIENTS = "weights", "optimizer", "gradients"
GATHERED, UNDER_WAY, ACTIVATIONS, BACKWARD = "gathered weights", "gradients under way", "activations", "backward"
KINDS = (WEIGHTS, OPTIMIZER, GRADIENTS, GATHERED, UNDER_WAY, ACTIVATIONS, BACKWARD)


@dataclass(frozen=True)
class Peak:
    """The fullest moment: bytes by kind, and the phase that it was in."""

    phase: str
    by_kind: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())


class Tracker(FakeTensorMode):
    """Fake tensors whose storages are counted while anything refers to them."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.kind, self.phase = WEIGHTS, "building"
        self.now: Counter[str] = Counter()
        self._kinds: dict[int, tuple[str, int]] = {}  # of each live storage: kind, bytes
        self.restart()

    def restart(self) -> None:
        """Look for the peak from here on."""
        self._most = -1
        self._peaks: dict[str, Peak] = {}
        self._look()

    @property
    def peak(self) -> Peak:
        """The fullest moment since the last ``restart``."""
        return max(self._peaks.values(), key=lambda peak: peak.total)

    @property
    def peaks(self) -> dict[str, Peak]:
        """The fullest moment of each phase since then."""
        return dict(self._peaks)

    @contextmanager
    def during(self, phase: str, kind: str) -> Iterator[None]:
        """Call what is made inside ``kind``, and the time ``phase``."""
        before = self.phase, self.kind
        self.phase, self.kind = phase, kind
        self._look()
        try:
            yield
        finally:
            self.phase, self.kind = before

    def dispatch(self, *args: Any, **options: Any) -> Any:
        result = super().dispatch(*args, **options)
        for tensor in tree_leaves(result) if isinstance(result, (tuple, list, dict)) else (result,):
            if isinstance(tensor, FakeTensor):
                self._see(tensor)
        return result

    def call(self, tensor: torch.Tensor | None, kind: str) -> None:
        """What ``tensor`` lies in is of this kind from here on."""
        if not isinstance(tensor, FakeTensor):
            return
        key = tensor.untyped_storage()._cdata
        if key in self._kinds:
            old, size = self._kinds[key]
            self._kinds[key] = kind, size
            self.now[old] -= size
            self.now[kind] += size

    def _see(self, tensor: FakeTensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._kinds:
            return
        size = storage.nbytes()
        self._kinds[key] = self.kind, size
        self.now[self.kind] += size
        weakref.finalize(storage, self._gone, key)
        self._look()

    def _gone(self, key: int) -> None:
        kind, size = self._kinds.pop(key, ("", 0))
        self.now[kind] -= size

    def _look(self) -> None:
        total = sum(self.now.values())
        known = self._peaks.get(self.phase)
        if known is None or total > known.total:
            self._peaks[self.phase] = Peak(self.phase, {kind: self.now[kind] for kind in KINDS})


class FakePool(Pool):
    """The engine's buffers as fake tensors, by kind."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self._tracker = tracker

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        caller = sys._getframe(1)
        gathers = caller.f_globals["__name__"] in ("axo.overlap.gathers", "axo.overlap.exchange")
        before, self._tracker.kind = self._tracker.kind, GATHERED if gathers else UNDER_WAY
        try:
            with self._tracker:
                return torch.empty(shape, dtype=dtype, device=device)
        finally:
            self._tracker.kind = before
