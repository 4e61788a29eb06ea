"""Checkpoints in the memory of several hosts, each of which keeps its ranks' files and those of the host before it.

    save      a rank writes its file into its host's folder; its mirror, a rank of the next host, gets a copy of it
    a host    has a whole checkpoint's metadata, and of the files that it does not keep their size: a hole
    lost      each file lies on another host, too; ``complete`` gives every host that is left, or new, what it lacks

Bytes go between ranks over the process group of checkpoints, whose peers have proved the job's secret. The folder has
the same path on each host. A checkpoint is removed when a newer one is known to be complete on all hosts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from axo import files
from axo.checkpoint import folder as folders
from axo.checkpoint.ranks import rank_in, share
from axo.comm.extension import _C
from axo.errors import Error

_PART = ".part"  # how the name of a file ends that is being received
_MOST = 1 << 48  # bytes of a file


class _FileCopy(NamedTuple):
    source: int
    target: int
    name: str
    size: int  # bytes


class Mirrors:
    """Which rank keeps whose files. Every rank makes it.

    Args:
        group: The process group of checkpoints.

    Attributes:
        first: The first rank of this rank's host.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group, self._rank = group, rank_in(group)
        by_host: dict[str, list[int]] = {}
        for rank, identity in enumerate(share(group, _C.host_identity())):
            by_host.setdefault(identity, []).append(rank)
        self._hosts = list(by_host.values())
        self._own = next(ranks for ranks in self._hosts if self._rank in ranks)
        self.first = self._own[0]
        self._newest: Path | None = None  # that is complete on all hosts

    def prune(self, run: str | None) -> None:
        """Remove from this host what is not the newest that all hosts have."""
        if self._newest is not None:
            folders.prune(self._newest, 1, run)

    def confirm(self, newest: Path) -> None:
        """``newest`` is complete on all hosts."""
        self._newest = newest

    def exchange(self, folder: Path, name: str) -> list[str]:
        """Give a copy of this rank's file ``name`` to its mirror. Collective. Returns what has failed on each rank.

        Raises:
            axo.errors.Error: A rank names what is no file of the folder; on every rank.
        """
        told = share(self._group, (name, (folder / name).stat().st_size))
        names, transfers, problem = [_checked(rank, each) for rank, each in enumerate(told)], [], ""
        for host, following in zip(self._hosts, (*self._hosts[1:], self._hosts[0]), strict=True):
            for i, source in enumerate(host):
                target = source if host is following else following[i % len(following)]
                transfers.append(_FileCopy(source, target, *names[source]))
        try:
            for each in transfers if self._rank == self.first else ():
                if each.source not in self._own and each.target not in self._own:
                    with open(folder / each.name, "wb") as hole:
                        hole.truncate(each.size)
        except OSError as error:
            problem = f"rank {self._rank}: {error}"
        return self._transfer(folder, transfers, problem)

    def complete(self, checkpoint: Path) -> None:
        """Let every host have all files of ``checkpoint``, each of which some host has. Collective.

        Raises:
            OSError: This host has no room for it, or another.
            axo.errors.Error: A rank names what is no file of the folder; on every rank.
        """
        own: dict[str, int] = {}
        if self._rank == self.first:
            checkpoint.mkdir(parents=True, exist_ok=True)
            own = {name: size for name, size in files_of(checkpoint).items() if size}
        told = [_checked_files(rank, each) for rank, each in enumerate(share(self._group, own))]
        transfers = []
        for i, name in enumerate(sorted(set().union(*told))):  # axo.json, which says that it is complete, is last
            holders = [host for host in self._hosts if name in told[host[0]]]
            for host in self._hosts:
                if host not in holders:
                    source = holders[i % len(holders)]
                    size = told[source[0]][name]
                    transfers.append(_FileCopy(source[i % len(source)], host[i % len(host)], name, size))
        if any(problems := self._transfer(checkpoint, transfers)):
            raise OSError("; ".join(filter(None, problems)))
        self.confirm(checkpoint)

    def _transfer(self, folder: Path, transfers: Iterable[_FileCopy], problem: str = "") -> list[str]:
        own = [each for each in transfers if each.source != each.target and self._rank in each[:2]]
        try:
            for each in own:
                if each.target == self._rank:  # a hole in mapped memory would end the process where there is no room
                    with open(folder / f"{each.name}{_PART}", "wb") as file:
                        os.posix_fallocate(file.fileno(), 0, each.size)
        except OSError as error:
            problem = problem or f"rank {self._rank}: {error}"
        if any(problems := share(self._group, problem)):
            return problems
        works = []
        for source, target, name, size in own:
            place = folder / (name if source == self._rank else f"{name}{_PART}")
            mapped = torch.from_file(str(place), shared=True, size=size, dtype=torch.uint8)
            send = source == self._rank
            works.append(dist.isend(mapped, target, self._group) if send else dist.irecv(mapped, source, self._group))
        for work in works:
            assert work is not None  # this rank is of the group
            work.wait()
        for each in own:
            if each.target == self._rank:
                os.replace(folder / f"{each.name}{_PART}", folder / each.name)
        return share(self._group, "")


def _checked(rank: int, told: object) -> tuple[str, int]:
    """A file's name and bytes, as ``rank`` tells them, which are written to.

    Raises:
        axo.errors.Error: It is no name of a file in a folder, or no number of bytes.
    """
    match told:
        case [str(name), int(size)] if files.is_confined(name) and type(size) is int and 0 <= size <= _MOST:
            return name, size
    raise Error(f"checkpoint: rank {rank} names {files.shown(told)}, which is no file of the folder and its bytes")


def _checked_files(rank: int, told: object) -> dict[str, int]:
    return dict(_checked(rank, each) for each in (told.items() if isinstance(told, dict) else [told]))


def files_of(checkpoint: Path) -> dict[str, int]:
    """The files of a checkpoint in this host's memory: their bytes, of those that another host keeps 0."""
    every = ((path, path.stat()) for path in checkpoint.iterdir() if not path.name.endswith(_PART))
    return {path.name: status.st_size if status.st_blocks else 0 for path, status in every}
