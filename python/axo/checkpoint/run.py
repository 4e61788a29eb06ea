"""A training run holds its folder: its checkpoints carry an identity, and a lock keeps other processes out.

run = axo.checkpoint.Run("runs/a", comms)                # every rank; a new run
axo.checkpoint.save("runs/a", model, step=5, run=run.id, keep=3)
axo.checkpoint.latest("runs/a", run=run.id)              # of this run, whatever else lies there

FOLDER/axo-run.json   the identity of the run whose folder it is
FOLDER/.axo-lock      locked by rank 0 for as long as it lives; holds its process id and host
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import warnings
from pathlib import Path

from axo import files
from axo.checkpoint import folder as folders
from axo.checkpoint.ranks import checkpoint_group, on_all_ranks, rank_in, share
from axo.comm.connect import Communicators

IDENTITY = "axo-run.json"
_LOCK = ".axo-lock"


class Run:
    """A run's hold on ``folder``. Every rank makes it, with the same arguments.

    The lock is released by ``close`` and by death. On a file system without locks a run of this host is still noticed,
    and a warning says that one of another host would not be.

    Args:
        folder: The run's own; made if it does not exist.
        comms: What ``axo.connect`` returned; None: one process.
        checkpoints: Where its checkpoints lie; None: in ``folder``.
        resume: Go on with the run whose folder it is (or start one, where there is none).
        overwrite: Start again, and remove the checkpoints that earlier runs left.
        identity: Whose folder it is, where that may have been lost with a host; None: the folder says it.

    Raises:
        ValueError: Another process holds the folder (names it), or, for a new run, it holds another's checkpoints; on
            every rank.
        axo.PeerLost, axo.Timeout: A rank has died, or does not make its own within ``axo.connect(timeout=)``; names it.

    Attributes:
        id: The identity, for ``save`` and ``latest``; the same on every rank.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        comms: Communicators | None = None,
        *,
        checkpoints: str | os.PathLike[str] | None = None,
        resume: bool = False,
        overwrite: bool = False,
        identity: str | None = None,
    ) -> None:
        self._lock, self._folder, self._comms, self._known_as = -1, folder, comms, identity
        self._holder = os.getpid()
        group = checkpoint_group(comms)

        identity = ""
        try:
            with on_all_ranks(group, (ValueError, OSError), self._say) as told:
                told |= {"folder": str(folder), "resume": resume, "overwrite": overwrite}
                if rank_in(group) == 0:
                    folders.check_local(folder, f"checkpoint: folder={folder!r} names no folder; give the run's own")
                    self._folder = Path(folder).absolute()
                    identity = self._claim(self._folder, Path(checkpoints or folder), resume, overwrite)
            self.id: str = share(group, identity)[0]
        except BaseException:
            self.close()
            raise

    def _say(self, error: ValueError | OSError) -> str:
        if not isinstance(error, OSError):
            return str(error)
        return f"checkpoint: {error.filename2 or error.filename or self._folder} cannot be used: {error.strerror}"

    def hold(self) -> None:
        """Take the folder once more where it was moved or removed since, with a warning. Every rank calls it.

        Raises:
            ValueError: Another has it by now; on every rank.
        """
        group = checkpoint_group(self._comms)
        with on_all_ranks(group, (ValueError, OSError), self._say):
            if rank_in(group) == 0:
                self._claim_again()

    def _claim_again(self) -> None:
        folder, lost = Path(self._folder), self._lock
        if lost < 0 or files.is_open(folder / _LOCK, lost):
            return
        folders.make_folder(folder)
        self._hold(folder)
        _held.discard(lost)
        os.close(lost)
        identity = _identity(folder)
        if identity not in (None, self.id):
            raise ValueError(f"checkpoint: {folder} is another run's by now; give each a folder of its own")
        if identity is None:
            _identify(folder, self.id)
        warnings.warn(
            f"axo: {folder}, or its {_LOCK}, was moved or removed while a run held it; the run goes on there, and what"
            " it wrote before is where that was moved to",
            UserWarning,
            stacklevel=3,
        )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock. May be called again, and in a forked child, which has none."""
        if self._lock >= 0 and self._holder == os.getpid():  # else another file may have the number by now
            os.ftruncate(self._lock, 0)
            os.close(self._lock)
            _held.discard(self._lock)
        self._lock = -1

    def _claim(self, folder: Path, checkpoints: Path, resume: bool, overwrite: bool) -> str:
        folders.make_folder(folder)
        self._hold(folder)
        identity, earlier = _identity(folder), folders.complete(checkpoints)
        if self._known_as is not None and identity != self._known_as:
            return _identify(folder, self._known_as)
        if resume and (identity or earlier):
            return identity or folders.run_of(earlier[-1]) or _identify(folder)
        if earlier and not overwrite:
            raise ValueError(
                f"checkpoint: {checkpoints} holds checkpoints of an earlier run, the newest {earlier[-1].name}; resume"
                " it, give another folder, or ask to overwrite it"
            )
        for path in earlier:
            folders.remove(path)
        return _identify(folder)

    def _hold(self, folder: Path) -> None:
        path = folder / IDENTITY
        if path.exists() and not path.is_file():
            raise ValueError(f"checkpoint: {path} {folders.kind_of(path)}, and a file of that name is to be written")
        try:
            lock = files.open_own(folder / _LOCK)
        except ValueError as error:
            raise ValueError(f"checkpoint: {error}") from None
        owner = os.read(lock, 1000).decode(errors="replace").strip()
        try:
            free = files.lock(lock)
        except OSError as error:
            free = not _lives_here(owner)
            if free:
                warnings.warn(
                    f"axo: the file system of {folder} has no locks ({error.strerror}): nothing keeps a run on another"
                    f" host from writing there too (last taken by {owner or 'nobody'})",
                    UserWarning,
                    stacklevel=4,
                )
        if not free:
            os.close(lock)
            owner = owner or "another process"
            raise ValueError(f"checkpoint: {folder} is in use by {owner}; wait until it ends, or give another folder")
        self._lock = lock
        _held.add(lock)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


_held: set[int] = set()  # the locks of this process


def _let_go() -> None:
    """Close all locks in a forked child: a worker that outlives its parent would hold on to them."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go)


def _lives_here(owner: str) -> bool:
    """Whether ``owner``, the text of a lock file, names a process of this host that lives."""
    match = re.fullmatch(r"process (\d+) on (.+)", owner)
    return match is not None and match[2] == socket.gethostname() and Path("/proc", match[1]).exists()


def _identify(folder: Path, identity: str = "") -> str:
    """Write the identity of a run, or a new one."""
    identity = identity or secrets.token_hex(8)
    with folders.whole_file(folder / IDENTITY) as unfinished:
        unfinished.write_text(json.dumps({"run": identity}) + "\n")
    return identity


def _identity(folder: Path) -> str | None:
    try:
        said = files.parse_json(files.read_text(folder / IDENTITY))["run"]
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
    return said if isinstance(said, str) and said else None
