"""What the tensors of a step take: every storage is followed from its first tensor to its end.

A ``Ledger`` counts; ``Following`` feeds it with tensors that have values, ``axo.dryrun.shapes`` with others.
The peak is kept with what was there by kind, and with the phase of the step:

    weights, optimizer, gradients     this rank's shards, AdamW's moments, .grad
    gathered weights                  blocks that products read: gathered over z, or cast
    gradients under way               blocks before they are scattered, and buckets
    activations                       made in the forward pass (and in recomputations) and still referred to
    backward                          made in the backward pass: gradients of activations, temporaries
    messages                          what torch's stages receive into

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
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from axo.offload.tier import Tier
from axo.overlap.dispatch_modes import ObservingMode
from axo.overlap.pool import Pool

WEIGHTS, OPTIMIZER, GRADIENTS = "weights", "optimizer", "gradients"
GATHERED, UNDER_WAY, ACTIVATIONS, BACKWARD = "gathered weights", "gradients under way", "activations", "backward"
MESSAGES, UNCOUNTED = "messages", "uncounted"
KINDS = (WEIGHTS, OPTIMIZER, GRADIENTS, GATHERED, UNDER_WAY, ACTIVATIONS, BACKWARD, MESSAGES)


@dataclass(frozen=True)
class Peak:
    """The fullest moment: bytes by kind, and the phase that it was in."""

    phase: str
    by_kind: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())


class Ledger:
    """Which bytes lie in storages that something refers to, by kind."""

    def __init__(self) -> None:
        self.kind, self.phase = WEIGHTS, "building"
        self.now: Counter[str] = Counter()
        self._total = 0  # of all kinds
        self._kinds: dict[int, tuple[str, int]] = {}  # of each live storage: kind, bytes
        self._leaving: list[tuple[int, StorageWeakRef]] = []  # storages whose Python objects are gone
        self.restart()

    def restart(self) -> None:
        """Look for the peak from here on."""
        self._most = Counter(self.now)
        self._peaks: dict[str, Peak] = {}
        self.look()

    @property
    def peak(self) -> Peak:
        """The fullest moment since the last ``restart``."""
        return max(self._peaks.values(), key=lambda peak: peak.total)

    @property
    def peaks(self) -> dict[str, Peak]:
        """The fullest moment of each phase since then."""
        return dict(self._peaks)

    @property
    def most(self) -> dict[str, int]:
        """The most that there was of each kind since then."""
        return {kind: self._most[kind] for kind in KINDS}

    @contextmanager
    def during(self, phase: str, kind: str) -> Iterator[None]:
        """Call what is made inside ``kind``, and the time ``phase``."""
        before = self.phase, self.kind
        self.phase, self.kind = phase, kind
        self.look()
        try:
            yield
        finally:
            self.phase, self.kind = before

    def call(self, tensor: torch.Tensor, kind: str) -> None:
        """What ``tensor`` lies in is of this kind from here on; one that is not followed yet is."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._kinds:
            old, size = self._kinds[storage._cdata]
            self._add(old, -size)
            self._kinds[storage._cdata] = kind, size
            self._add(kind, size)
        else:
            self._follow(storage, kind)

    def see(self, tensor: torch.Tensor) -> None:
        """Follow what ``tensor`` lies in, if it is new."""
        if self._leaving:
            self._forget()
        storage = tensor.untyped_storage()
        if storage._cdata not in self._kinds:
            self._follow(storage, self.kind)
            self.look()

    def _follow(self, storage: torch.UntypedStorage, kind: str) -> None:
        key, size = storage._cdata, storage.nbytes()
        weakref.finalize(storage, self._leaving.append, (key, StorageWeakRef(storage)))
        self._kinds[key] = kind, size
        self._add(kind, size)

    def _add(self, kind: str, size: int) -> None:
        self.now[kind] += size
        if kind != UNCOUNTED:
            self._total += size
        if self.now[kind] > self._most[kind]:
            self._most[kind] = self.now[kind]

    def _forget(self) -> None:
        """Take out what is freed. A storage may outlive its Python object; while it is referred to, weakly too, no
        other has its address."""
        leaving, self._leaving[:] = self._leaving[:], []
        for key, storage in leaving:
            if storage.expired():
                kind, size = self._kinds.pop(key)
                self._add(kind, -size)
            else:
                self._leaving.append((key, storage))

    def there(self, kind: str) -> int:
        """Bytes of this kind now."""
        self._forget()
        return self.now[kind]

    def look(self) -> None:
        """Take note of what is there now."""
        if self._leaving:
            self._forget()
        peak = self._peaks.get(self.phase)
        if peak is None or self._total > peak.total:
            self._peaks[self.phase] = Peak(self.phase, {kind: self.now[kind] for kind in KINDS})


class Following(ObservingMode):
    """Follows the storages of tensors with values."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        result = operation(*args, **(options or {}))
        for tensor in tree_leaves(result) if isinstance(result, (tuple, list, dict)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._ledger.see(tensor)
        return result


class FollowedPool(Pool):
    """The engine's buffers by kind, each made when it is asked for and gone when nobody refers to it."""

    def __init__(self, ledger: Ledger, mode: TorchDispatchMode) -> None:
        super().__init__()
        self._ledger, self._mode = ledger, mode

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        caller = sys._getframe(1)
        gathers = caller.f_globals["__name__"] in ("axo.overlap.gathers", "axo.overlap.engine")
        before, self._ledger.kind = self._ledger.kind, GATHERED if gathers else UNDER_WAY
        try:
            with self._mode:
                return torch.empty(shape, dtype=dtype, device=device)
        finally:
            self._ledger.kind = before


class FollowedTier(Tier):
    """The lower tier, whose blocks are no memory of a rank."""

    def __init__(self, ledger: Ledger, mode: TorchDispatchMode) -> None:
        self._ledger, self._mode = ledger, mode

    def block(self, size: int) -> torch.Tensor:
        with self._mode:
            block = torch.empty(size, dtype=torch.uint8)
        self._ledger.call(block, UNCOUNTED)
        return block
