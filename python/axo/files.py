"""Files that somebody else may have written, or put where Axo writes: opened without harm, and read within bounds.

    read_text(path, most)        a regular file of at most ``most`` bytes: no FIFO, no device, no end of memory
    parse_json, parse_yaml       of a text: nesting and aliases are bounded, so that little text stays little
    open_own(path), lock(...)    a file of Axo's own that it will lock and overwrite: no link, no second name, no device
    shown(value)                 a value as a message shows it, without writing out all of it first

What a reader does with a value (checks its type, its range) is the reader's.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import reprlib
import stat
from pathlib import Path
from typing import Any

MOST_TEXT = 16 << 20  # bytes of a text that a user writes: a configuration, a machine, a model
_MOST_EXPANDED = 1_000_000  # characters that a YAML text with aliases stands for
_DEEPEST = 100  # of YAML; what a person writes is five deep
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFLNK: "a link"}

_repr = reprlib.Repr()
_repr.maxlevel = 3
_repr.maxstring = _repr.maxother = _repr.maxlong = 200
_repr.maxlist = _repr.maxtuple = _repr.maxdict = _repr.maxset = _repr.maxfrozenset = _repr.maxdeque = 20


def kind(mode: int) -> str:
    """What a file is, by its mode, as part of a sentence."""
    return "a file" if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "a device")


def open_regular(path: str | os.PathLike[str], *, follow: bool = True) -> io.FileIO:
    """Open a regular file for reading; never waits for a writer.

    Args:
        path: The file.
        follow: Whether it may be a symbolic link.

    Raises:
        ValueError: It is something else.
        OSError: It cannot be opened.
    """
    return io.FileIO(_open(path, os.O_RDONLY | (0 if follow else os.O_NOFOLLOW)), "rb")


def open_own(path: str | os.PathLike[str], *, create: bool = True) -> int:
    """Open a file of Axo's own for reading and writing, which its caller locks, truncates or overwrites.

    Returns:
        The descriptor.

    Raises:
        ValueError: It is a link, has another name, or is no file: to write into it might destroy somebody's data.
        OSError: It cannot be opened or made.
    """
    descriptor = _open(path, os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if create else 0))
    if os.fstat(descriptor).st_nlink > 1:
        os.close(descriptor)
        raise ValueError(f"{path} is another name of a file elsewhere, and is not written into; remove it")
    return descriptor


def _open(path: str | os.PathLike[str], flags: int) -> int:
    mode = 0
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)
    except OSError as error:  # a link with O_NOFOLLOW; a socket, a FIFO or a folder that cannot be opened so
        try:
            mode = (os.lstat if flags & os.O_NOFOLLOW else os.stat)(path).st_mode
        except OSError:
            raise error from None
        if stat.S_ISREG(mode):
            raise
    else:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode):
            return descriptor
        os.close(descriptor)
    raise ValueError(f"{path} is {kind(mode)}, and a file of its own is wanted there")


def read_bytes(path: str | os.PathLike[str], most: int) -> bytes:
    """What a regular file of at most ``most`` bytes holds.

    Raises:
        ValueError: It is longer, or no file.
        OSError: It cannot be read.
    """
    with open_regular(path) as file, io.BufferedReader(file) as reader:
        if os.fstat(file.fileno()).st_size <= most and len(data := reader.read(most + 1)) <= most:
            return data
    raise ValueError(f"{path} is longer than {most} bytes, which no file of its kind is")


def read_text(path: str | os.PathLike[str], most: int = MOST_TEXT) -> str:
    """The same as text (UTF-8).

    Raises:
        ValueError: It is longer, no file, or no text.
        OSError: It cannot be read.
    """
    try:
        return read_bytes(path, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not text, from byte {error.start} on") from None


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: It is none, or nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def parse_yaml(text: str) -> Any:
    """The value of a YAML text of plain values.

    Raises:
        ValueError: It is nested too deeply, its aliases stand for too much, or a value is not of its tag.
        yaml.YAMLError: It is none.
    """
    import yaml

    check_yaml(text)
    try:
        return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (LookupError, TypeError, ArithmeticError, AttributeError) as error:  # of ``!!int ""``, for example
        raise ValueError(f"a value of it cannot be read ({type(error).__name__}: {cut(str(error))})") from None


def check_yaml(text: str) -> None:
    """Check, without building its value, that a YAML text is not too deep and that aliases do not multiply it.

    Nine lines of ``b: [*a, *a, *a, *a, *a, *a, *a, *a, *a]``, each of the one before, stand for 387 million values.

    Raises:
        ValueError: It is, or they do.
        yaml.YAMLError: It is no YAML.
    """
    import yaml

    sizes: dict[str, int] = {}  # anchor -> characters that it stands for
    started: list[tuple[str | None, int]] = []
    size = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.AliasEvent):
            size += sizes.get(event.anchor, _MOST_EXPANDED)  # in itself, or of nothing: endless, or no YAML
            if size > _MOST_EXPANDED:
                raise ValueError(f"line {event.start_mark.line + 1}: aliases stand for too much; write it out")
        elif isinstance(event, yaml.CollectionStartEvent):
            started.append((event.anchor, size))
            size += 1
            if len(started) > _DEEPEST:
                raise ValueError(f"line {event.start_mark.line + 1}: nested more than {_DEEPEST} deep")
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = started.pop()
            if anchor is not None:
                sizes[anchor] = size - before
        elif isinstance(event, yaml.ScalarEvent):
            size += 1 + len(event.value)
            if event.anchor is not None:
                sizes[event.anchor] = 1 + len(event.value)


def lock(descriptor: int) -> bool:
    """Lock a file against other processes, until it is closed or this process has died; False: another holds it.

    Raises:
        OSError: The file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_open(path: Path, descriptor: int) -> bool:
    """Whether what stands at ``path`` is the file that is open."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False


def shown(value: Any, most: int = 60) -> str:
    """A value as a message shows it: the beginning of its ``repr``, of which no more than that is made."""
    try:
        text = _repr.repr(value)
    except ValueError:  # an integer of more digits than Python writes
        text = f"a large {type(value).__name__}"
    return cut(text, most)


def cut(text: str, most: int = 60) -> str:
    """A text of at most ``most`` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def printable(text: str) -> str:
    """A text without control characters, which a terminal would obey: each as ``\\x1b``."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda sign: f"\\x{ord(sign[0]):02x}", text)


def is_confined(name: str) -> bool:
    """Whether ``name`` is that of a file in a folder, and of nothing elsewhere."""
    return name not in ("", ".", "..") and Path(name).name == name and "\0" not in name
