"""Names of checkpoints, the newest complete one, and how a written one takes its place.

    FOLDER/step-00000100                  complete: it got this name after every file in it was written and synced
    FOLDER/.step-00000100.TOKEN.new       being written
    FOLDER/.step-00000100.TOKEN.part      locked by its writer, which lives as long as the lock does
    FOLDER/.axo.TOKEN.removed             on its way out
    FOLDER/.step-00000100.replaced        the older one of that name while the newer is renamed, on file systems that
                                          cannot swap two names; complete, and taken where the name itself is missing

The marker ``axo.json`` in a checkpoint says that Axo wrote it, at which step, and which run. Only what carries one is
ever replaced or removed, and only for the same run. What stands beside a lock that is free was left by a process that
died: the next save in that folder removes it. Each rename is made durable before what it makes superfluous is deleted,
so a loss of power leaves the older or the newer checkpoint, whole.

Not here: what else is inside.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import secrets
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from axo import files
from axo.checkpoint import checksum

METADATA = ".metadata"
MARKER = "axo.json"
_STEP = re.compile(r"step-(\d{8,})")
_REPLACED = re.compile(r"\.step-(\d{8,})\.replaced")
_REMOVED = re.compile(r"\.axo\.[0-9a-f]{8}\.removed")
_MOST_MARKER = 64 << 10  # bytes
_ROUNDS = 100  # a broken file system may list for ever what it cannot find
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@dataclass(frozen=True)
class Marker:
    """What the marker of a checkpoint says.

    Attributes:
        step: Its step. run: The run that saved it; None: none was named. metadata: Checksum of DCP's metadata.
        checksum: Which one that is, and those of the entries.
    """

    step: int = 0
    run: str | None = None
    metadata: str | None = None
    checksum: str = checksum.KIND


def read_marker(path: Path) -> Marker | None:
    """The marker of a checkpoint that Axo wrote; None where there is none or it cannot be read."""
    try:
        said = files.parse_json(files.read_text(path / MARKER, _MOST_MARKER))
        kind = said.get("checksum", "xxh3")  # the first ones do not say
        marker = Marker(int(said["step"]), said["run"], said["metadata"], kind)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None
    words = (marker.run or "", marker.metadata or "", marker.checksum)
    return marker if all(isinstance(word, str) for word in words) else None


def name_of(step: int) -> str:
    """The name of the checkpoint of ``step``."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step whose checkpoint has this name; None: the name is of none."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def number_of(path: Path) -> int:
    """The step of a checkpoint that ``complete`` found, whose name may be that of one that is being replaced."""
    return int(re.findall(r"\d+", path.name)[0])


def is_checkpoint(path: Path) -> bool:
    """Whether ``path`` is a folder with DCP's metadata in it."""
    return (path / METADATA).is_file()


def complete(folder: str | os.PathLike[str]) -> list[Path]:
    """The complete checkpoints in ``folder`` that Axo wrote, of any run, oldest step first."""
    folder = Path(folder)
    for _ in range(_ROUNDS):
        by_step: dict[int, Path] = {}
        gone = False
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():  # ".step-1.replaced" comes before "step-1"
            match = _STEP.fullmatch(path.name) or _REPLACED.fullmatch(path.name)
            if match and is_checkpoint(path) and read_marker(path) is not None:
                by_step[int(match[1])] = path
            gone |= match is not None and not os.path.lexists(path)
        if not gone:  # else a save has removed it since, and what it saved before that was not listed yet
            break
    return [path for _, path in sorted(by_step.items())]


def latest(folder: str | os.PathLike[str], *, run: str | None = None) -> Path | None:
    """The complete checkpoint of the highest step in ``folder``; None where there is none.

    A later one that has lost its metadata, or whose marker is damaged, is passed over with a warning.

    Args:
        folder: Where ``save`` wrote. What Axo did not write is passed over.
        run: Look at those of this run only (see ``axo.checkpoint.Run``); None: at all.
    """
    newest = next((path for path in reversed(complete(folder)) if run is None or run_of(path) == run), None)
    after = -1 if newest is None else number_of(newest)
    for path in Path(folder).iterdir() if Path(folder).is_dir() else ():
        step = step_of(path.name)
        if step is not None and step > after and _fault(path) and (run is None or run_of(path) in (None, run)):
            warnings.warn(f"axo: {path} {_fault(path)}, and is passed over", UserWarning, stacklevel=2)
    return newest


def _fault(path: Path) -> str:
    """What a checkpoint that Axo wrote has lost, as the end of a sentence; "" where it has its files."""
    if not (path / MARKER).is_file():
        return ""
    if not is_checkpoint(path):
        return f"has no {METADATA} (was it copied without hidden files?)"
    return "" if read_marker(path) else f"has an {MARKER} that cannot be read"


def run_of(path: Path) -> str | None:
    """The run that saved a checkpoint; None: none was named."""
    marker = read_marker(path)
    return None if marker is None else marker.run


def resolve(path: str | os.PathLike[str]) -> Path:
    """A checkpoint, or the newest one in a folder of checkpoints.

    Raises:
        ValueError: Neither; says what is there.
    """
    path = Path(path)
    if is_checkpoint(path):
        return path
    if _fault(path):
        raise ValueError(f"checkpoint: {path} {_fault(path)}; copy it again, with all its files")
    newest = latest(path)
    if newest is not None:
        return newest
    what = kind_of(path)
    if what == "is a folder":
        left = any(part.name.endswith(".part") for part in path.iterdir())
        what = "holds no complete checkpoint (a save in it was interrupted)" if left else "holds no checkpoint"
        what += "".join(f" ({each.name}/ in it does)" for each in path.iterdir() if each.is_dir() and complete(each))
    raise ValueError(f"checkpoint: {path} {what}; give a folder step-... that axo.checkpoint.save wrote, or its parent")


def kind_of(path: Path) -> str:
    """What stands at ``path``, as the end of a sentence."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return f"is a link to {os.readlink(path)}, which does not exist" if path.is_symlink() else "does not exist"
    except OSError as error:
        return f"cannot be looked at ({error.strerror})"
    return f"is {files.kind(mode)}"


def check_local(path: Any, otherwise: str = "checkpoint: a path is empty; name one") -> None:
    """Refuse what is no path, or only looks like one.

    Raises:
        ValueError: It is an address; or it names nothing, which ``otherwise`` says.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path) or "\0" in os.fspath(path):
        raise ValueError(otherwise)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", os.fspath(path)):  # pathlib makes "s3:/" of "s3://"
        raise ValueError(f"checkpoint: {path} is an address, not a folder; mount it, and give the folder")


def check_place(final: Path, run: str | None) -> None:
    """Whether a checkpoint of ``run`` may be written as ``final``.

    Raises:
        ValueError: Something is there that is not an earlier checkpoint of the same run.
    """
    if final.parent.exists() and not final.parent.is_dir():
        raise ValueError(f"checkpoint: {final.parent} {kind_of(final.parent)}; give a folder")
    if not os.path.lexists(final):
        return
    marker = read_marker(final)
    if marker is None or final.is_symlink():
        what = f"{kind_of(final)} that axo.checkpoint.save did not write (it {_fault(final) or f'has no {MARKER}'})"
        what = "is a link that axo.checkpoint.save did not write" if final.is_symlink() else what
        raise ValueError(
            f"checkpoint: {final} {what}, and is left as it is; give another folder or name, or move it away"
        )
    if marker.run != run:
        other, this = ("a run without identity" if each is None else f"run {each}" for each in (marker.run, run))
        raise ValueError(
            f"checkpoint: {final} is a checkpoint of {other}, and this is {this}; give another folder, or remove it"
        )


def check_step(owner: str, step: Any) -> None:
    """Refuse what is no number of a step.

    Raises:
        ValueError: It is none.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ValueError(f"{owner}: step={step!r} is not a step; use a whole number of at least 0")


def check_writable(what: str, path: Path) -> None:
    """Check that files can be made in the folder ``path``, which is there or can be made, by making one without a name.

    Raises:
        ValueError: They cannot; names ``what``, and what is in the way.
    """
    place = nearest(what, path, path / "file")
    if path.is_symlink() and not path.exists():
        raise ValueError(f"{what}={path} {kind_of(path)}; give a folder")
    with _writing(what, path, f" in {place}"):
        tempfile.TemporaryFile(dir=place).close()


def nearest(what: str, given: Path, file: Path) -> Path:
    """The folder in which ``file``, or the first of the folders that it lacks, is to be made.

    Raises:
        ValueError: What stands there is no folder, or a name is too long; names ``what`` and what was ``given`` for it.
    """
    place = file.parent.absolute()
    with _writing(what, given):
        file.exists()  # raises for a name that is too long
        while not place.exists():
            place = place.parent
        if not place.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{place} is not a folder")
    return place


@contextlib.contextmanager
def _writing(what: str, path: Path, where: str = "") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"{what}={str(path)[:120]} cannot be written: {error.strerror}{where}") from None


class _Unfinished:
    """A locked file beside ``final``, in which a file is written, and beside which a folder may be.

    Args:
        final: The name that what is written will get. What writers of it that have died left beside it is removed.
        others: Names, as a pattern, of which the same is removed.

    Raises:
        OSError: The file cannot be made.

    Attributes:
        file: The file. folder: Where the folder may be.
    """

    def __init__(self, final: Path, others: str = "") -> None:
        _remove_left_over(final.parent, rf"\.({re.escape(final.name)}|{others})\.[0-9a-f]{{8}}\.part")
        while True:
            self.file = final.with_name(f".{final.name}.{secrets.token_hex(4)}.part")
            self.folder = self.file.with_suffix(".new")
            self._lock = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                if files.lock(self._lock) and self.file.exists():
                    return
            except OSError:  # a file system without locks
                return
            os.close(self._lock)  # another writer took the file for what a dead one has left

    def close(self) -> None:
        """Remove what is there, not committed or replaced by the commit, and release the lock. May be called again."""
        if self._lock >= 0:
            _remove_tree(self.folder)
            self.file.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1


def _remove_left_over(folder: Path, names: str) -> None:
    """Remove files that match ``names`` and that nobody holds a lock on, and the folders beside them."""
    with contextlib.suppress(OSError):  # a folder that may not be listed
        for path in [path for path in folder.iterdir() if re.fullmatch(names, path.name)]:
            # No file of its own: not ours. No locks on this file system: its writer may live.
            with contextlib.suppress(OSError, ValueError), open(files.open_own(path, create=False), "rb") as file:
                if files.lock(file.fileno()):
                    _remove_tree(path.with_suffix(".new"))
                    path.unlink()


class UnfinishedCheckpoint(_Unfinished):
    """A checkpoint that is being written, in a hidden folder; one process makes it, all write into it.

    Args:
        final: The name that it will get.
        run: Whose it is.

    Raises:
        OSError: The folder cannot be made.

    Attributes:
        folder: Where to write.
    """

    def __init__(self, final: Path, run: str | None) -> None:
        self.final, self.run = final, run
        make_folder(final.parent)
        for path in final.parent.iterdir():
            if _REMOVED.fullmatch(path.name):
                _remove_tree(path)
        super().__init__(final, ".+")  # whatever its name: what nobody holds a lock of is dead
        try:
            self.folder.mkdir()
        except BaseException:
            self.close()
            raise

    def commit(self, step: int, metadata: str) -> None:
        """Give what was written its name, durably; an earlier checkpoint of that name is replaced.

        Args:
            step: Its step.
            metadata: Checksum of DCP's metadata.

        Raises:
            ValueError: What has that name by now may not be replaced.
            OSError: The file system refused; what was there before is there.
        """
        check_place(self.final, self.run)
        with open(self.folder / MARKER, "x") as marker:
            json.dump(asdict(Marker(step, self.run, metadata)), marker)
            marker.flush()
            os.fsync(marker.fileno())
        _sync(self.folder)
        replaced = self.final.with_name(f".{self.final.name}.replaced")
        if not os.path.lexists(self.final):
            os.rename(self.folder, self.final)
        elif not _exchange(self.folder, self.final):
            remove(replaced)
            os.rename(self.final, replaced)
            os.rename(self.folder, self.final)
        _sync(self.final.parent)
        remove(replaced)


def prune(newest: Path, keep: int, run: str | None) -> None:
    """Remove the oldest checkpoints of ``run`` beside ``newest`` but ``keep``; never ``newest``, and no link."""
    others = [path for path in complete(newest.parent) if path != newest and run_of(path) == run]
    others = [path for path in others if not path.is_symlink()]
    keep -= step_of(newest.name) is not None  # one with a name of its own does not count
    for path in others[: max(0, len(others) - keep)]:
        try:
            remove(path)
        except OSError as error:  # the save itself is complete
            warnings.warn(f"axo: {path} cannot be removed ({error.strerror}); remove it", UserWarning, stacklevel=2)


def remove(path: Path) -> None:
    """Remove a checkpoint. It loses its name first and durably, so that a half-removed one never looks complete.

    Of a link only the link is removed. What may not be removed (another user's files) is left, with a warning.
    """
    if path.is_symlink():
        path.unlink()
        return
    gone = path.with_name(f".axo.{secrets.token_hex(4)}.removed")  # not longer where a name is as long as it may be
    try:
        os.rename(path, gone)
    except FileNotFoundError:
        return
    _sync(path.parent)
    _remove_tree(gone)


def _remove_tree(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        warnings.warn(f"axo: {folder} cannot be removed (is it another user's?); remove it", UserWarning, stacklevel=3)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, so that a loss of power does not undo it."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{folder} {kind_of(folder)}")
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync(folder.parent)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Where to write a file in this block; it gets its name behind it, whole and on disk, or not at all.

    Each writer has a file of its own, which it holds a lock on; what a killed one has left is removed.
    """
    unfinished = _Unfinished(path)
    try:
        yield unfinished.file
        _sync(unfinished.file)
        os.replace(unfinished.file, path)
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk does not say where
        raise
    finally:
        unfinished.close()
    _sync(path.parent)


def _sync(path: Path) -> None:
    """Have a file, or the names in a folder, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names in one step (Linux); False where libc or the file system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    return rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0
