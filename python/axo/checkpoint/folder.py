"""Names of checkpoints, the newest complete one, and how a written one takes its place.

    FOLDER/step-00000100        complete: it got this name after every file in it was written and synced
    FOLDER/.step-00000100.part  being written, or left by a run that was killed: never read, replaced by the next save
    FOLDER/.step-00000100.old   on its way out

Not here: what is inside.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
from pathlib import Path

METADATA = ".metadata"
_NAME = re.compile(r"step-(\d{8,})")
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def name_of(step: int) -> str:
    """The name of the checkpoint of ``step``."""
    return f"step-{step:08d}"


def is_checkpoint(path: Path) -> bool:
    """Whether ``path`` is a folder with DCP's metadata in it."""
    return (path / METADATA).is_file()


def complete(folder: str | os.PathLike[str]) -> list[Path]:
    """The complete checkpoints in ``folder``, oldest step first."""
    folder = Path(folder)
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and is_checkpoint(path):
            found.append((int(match[1]), path))
    return [path for _, path in sorted(found)]


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint of the highest step in ``folder``; None where there is none."""
    found = complete(folder)
    return found[-1] if found else None


def resolve(path: str | os.PathLike[str]) -> Path:
    """A checkpoint, or the newest one in a folder of checkpoints.

    Raises:
        ValueError: Neither; says what is there.
    """
    path = Path(path)
    if is_checkpoint(path):
        return path
    newest = latest(path)
    if newest is not None:
        return newest
    if not path.exists():
        what = "does not exist"
    elif not path.is_dir():
        what = "is a file"
    elif any(part.name.endswith(".part") for part in path.iterdir()):
        what = "holds no complete checkpoint (a save in it was interrupted)"
    else:
        what = "holds no checkpoint"
    raise ValueError(f"checkpoint: {path} {what}; give a folder step-... that axo.checkpoint.save wrote, or its parent")


def part_of(final: Path) -> Path:
    """Where ``final`` is written."""
    return final.with_name(f".{final.name}.part")


def prepare(final: Path) -> Path:
    """Make the folder to write into, empty."""
    part = part_of(final)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    return part


def commit(final: Path) -> None:
    """Give what was written its name; an older checkpoint of that name is replaced in one step where the disk can."""
    part = part_of(final)
    _sync(part)
    if final.exists():
        old = final.with_name(f".{final.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if _exchange(part, final):
            os.rename(part, old)
        else:
            os.rename(final, old)
            os.rename(part, final)
        shutil.rmtree(old)
    else:
        os.rename(part, final)
    _sync(final.parent)


def prune(folder: Path, keep: int, newest: Path) -> None:
    """Remove the oldest complete checkpoints but ``keep``; never ``newest``."""
    others = [path for path in complete(folder) if path != newest]
    for path in others[: max(0, len(others) - (keep - 1))]:
        old = path.with_name(f".{path.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        os.rename(path, old)  # first, so that a half-removed one never looks complete
        shutil.rmtree(old)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
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
