"""What the ranks of a save or a load tell each other: one process group, apart from training's, and shared errors.

A save that goes on while training does uses that group too, so whoever wants it waits for the save. What ranks send is
in the format of ``axo.comm.values``: nothing that comes from a peer is unpickled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from axo.comm.connect import Communicators
from axo.comm.values import pack, unpack
from axo.errors import Error

_MOST = 1 << 30  # bytes that a rank may send


class Save:
    """A checkpoint on its way to disk.

    Attributes:
        path: Where it will be.
        apart: Its error is its owner's, who will wait for it, and not the next save's to raise.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.apart = path, False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def begin(self, work: Callable[[], None]) -> None:
        """Run ``work`` on another thread; where the system has none left, on this one."""

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error

        thread = threading.Thread(target=run, name=f"axo {self.path.name}")
        try:
            thread.start()
            self._thread = thread
        except RuntimeError:
            run()

    def wait(self) -> Path:
        """Block until it is complete, and return where.

        Raises:
            CheckpointError: It failed; on every rank, and once.
        """
        self.finish()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self.path

    def finish(self) -> None:
        """Block until it has ended; an error is kept for ``wait``."""
        if self._thread is not None:
            self._thread.join()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._thread is None or not self._thread.is_alive()


@dataclass
class LastSave:
    """The last save of this process. There is one at a time, so that host memory holds one copy at most."""

    save: Save

    def wait(self) -> None:
        """Block until it has ended.

        Raises:
            CheckpointError: It failed, and nobody will ask for it.
        """
        self.save.finish() if self.save.apart else self.save.wait()


pending = LastSave(Save(Path()))


def checkpoint_group(comms: Communicators | None) -> dist.ProcessGroup | None:
    """The process group of a grid's checkpoints, on CPU; None for one rank. Collective on its first use.

    Waits for a save under way, which uses it too; its error is kept for ``Save.wait``.

    Raises:
        ValueError: Several ranks, and no communicators.
        axo.PeerLost, axo.Timeout: On its first use: a rank has died, or does not come.
    """
    pending.save.finish()
    if comms is None:
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f"checkpoint: {dist.get_world_size()} ranks, and the model has no parallel layer; pass comms="
            )
        return None
    if not hasattr(comms, "everyone"):
        raise ValueError(f"checkpoint: comms={comms!r} is not what axo.connect returned; pass that, or None")
    return comms.checkpoint_group if comms.everyone.size > 1 else None


def number_of(comms: Communicators | None) -> int:
    """This rank's number among those of all stages."""
    return 0 if comms is None else comms.stage * comms.grid.world_size + comms.rank


def rank_in(group: dist.ProcessGroup | None) -> int:
    """This process's rank in the group; 0 without one."""
    return 0 if group is None else group.rank()  # dist.get_rank asks the default group too


# --- plain values -----------------------------------------------------------------------------------------------------


def share(group: dist.ProcessGroup | None, value: Any) -> list[Any]:
    """Every rank's value, in rank order: whatever ``axo.comm.values`` can send.

    Raises:
        axo.errors.Error: A rank sent something else; on every rank.
    """
    if group is None:
        return [value]
    own = pack(value)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(own)]), group=group)
    longest = max(map(int, sizes))
    if not all(0 < size <= _MOST for size in sizes):
        raise Error(f"checkpoint: ranks sent {[int(size) for size in sizes]} bytes; at most {_MOST} are taken")
    messages = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(messages, torch.nn.functional.pad(own, (0, longest - len(own))), group=group)
    values = []
    for rank, (message, size) in enumerate(zip(messages, sizes, strict=True)):
        try:
            values.append(unpack(message[: int(size)]))
        except (Error, TypeError) as error:
            raise Error(f"checkpoint: rank {rank} sent what is no plain value: {error}") from None
    return values


# --- agreement --------------------------------------------------------------------------------------------------------


def share_path(comms: Communicators | None, path: Path | None) -> Path | None:
    """Rank 0's path, on every rank."""
    shared = share(checkpoint_group(comms), path and str(path))[0]
    return None if shared is None else Path(shared)


@contextmanager
def on_all_ranks(
    group: dist.ProcessGroup | None,
    errors: tuple[type[Exception], ...] = (ValueError,),
    say: Callable[[Any], str] = str,
) -> Iterator[dict[str, Any]]:
    """A block that every rank runs: an error of one rank is every rank's.

    Args:
        group: The ranks.
        errors: What is told to the others; anything else is this rank's alone.
        say: The message of one.

    Yields:
        A dict: what the block puts there must be the same on all ranks.

    Raises:
        ValueError: At the end of the block: some rank had an error, or put other values there; the same on every rank.
    """
    arguments: dict[str, Any] = {}
    problem = ""
    try:
        yield arguments
    except errors as error:
        problem = say(error)
    agree(group, problem, **arguments)


def agree(group: dist.ProcessGroup | None, problem: str, **arguments: Any) -> None:
    """Go on only if no rank has a problem ("" = none) and all were given the same arguments.

    Raises:
        ValueError: Some rank has one, or was given another; the same message on every rank.
    """
    told = share(group, (problem, arguments))
    wrong = [(rank, text) for rank, (text, _) in enumerate(told) if text]
    if wrong:
        rank, text = wrong[0]
        raise ValueError(text if len(wrong) == len(told) else f"rank {rank}: {text}")
    first = told[0][1]
    for rank, (_, given) in enumerate(told):
        if given.keys() != first.keys():
            raise ValueError(
                f"checkpoint: ranks made different calls: rank 0 one with {', '.join(first) or 'nothing'}, rank {rank}"
                f" one with {', '.join(given) or 'nothing'}; every rank must make the same"
            )
    for name, expected in first.items():
        others = {rank: given[name] for rank, (_, given) in enumerate(told) if given[name] != expected}
        if others:
            listed = ", ".join(f"rank {rank} {other!r}" for rank, other in list(others.items())[:4])
            more = f" and {len(others) - 4} more ranks" if len(others) > 4 else ""
            raise ValueError(
                f"checkpoint: ranks were given different values of {name}: rank 0 {expected!r}, {listed}{more}; every"
                " rank must pass the same (take rank 0's where it depends on time or on what is in a folder)"
            )
