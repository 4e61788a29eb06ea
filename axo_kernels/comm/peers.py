"""Memory that the kernels of several ranks reach: torch's symmetric memory, for ranks of one host.

A rank allocates (:meth:`Peers.allocate`), then all map what each has (:meth:`Peers.map`, in which each waits for the
others, so that none must have failed before). Torch wants a process group for it, of which it uses nothing but a store.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class PeerMemory(NamedTuple):
    """Memory that the ranks' kernels reach: this rank's bytes, where each rank's lie, and what holds them mapped."""

    mine: torch.Tensor  # uint8, zeros
    bases: tuple[int, ...]
    keep: object = None


def host_number() -> int:
    """48 bits that are alike where processes can hand each other memory: of one kernel, processes and files."""
    words = [os.readlink(f"/proc/self/ns/{space}") for space in ("pid", "mnt")] + [os.uname().nodename]
    try:
        words.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"))
    except OSError:  # not shown in some containers
        pass
    return int.from_bytes(hashlib.sha256(" ".join(words).encode()).digest()[:6], "big")


class Peers:
    """A line of ranks that meet at a store, under a name that was never used before."""

    def __init__(self, name: str, store: dist.Store, rank: int, size: int) -> None:
        self._name = f"axo {name}"
        self._store = _Numbered(dist.PrefixStore(self._name, store))  # kept, as the group keeps what is not Python's
        self._group = dist.ProcessGroup(self._store, rank, size)
        register: Any = torch._C._distributed_c10d._register_process_group
        register(self._name, self._group)  # which does not keep it

    @staticmethod
    def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
        """Zeros, there before any peer writes."""
        mine = _memory().empty_strided_p2p((nbytes,), (1,), torch.uint8, device).zero_()
        torch.cuda.synchronize(device)
        return mine

    def map(self, mine: torch.Tensor) -> PeerMemory:
        """Collective."""
        handle = _memory().rendezvous(mine, self._name)
        return PeerMemory(mine, tuple(handle.buffer_ptrs), handle)


def _memory() -> Any:
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory


class _Numbered(dist.Store):
    """A store in which torch's exchanges ``name/number/rank`` are numbered from 0.

    Before 2.15 torch counts all of a process, whatever the group: ranks that have shared memory with others wait for
    each other's numbers for ever (pytorch 196082).
    """

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store
        self._numbers: dict[str, int] = {}

    def _key(self, key: str) -> str:
        name, number, *rest = key.split("/")
        return "/".join([name, str(self._numbers.setdefault(number, len(self._numbers))), *rest])

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._key(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def add(self, key: str, value: int) -> int:
        return self._store.add(self._key(key), value)

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._store.wait([self._key(key) for key in keys], *timeout)
