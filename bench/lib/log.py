"""Copies what comes in to the screen and to the end of a file that stays small: ``... | python -m bench.lib.log FILE``.

Compilers and drivers tell what is wrong on the screen alone, and a leased machine keeps no screen. Of what is too much
(a compiler may print whole programs) the beginning and the end stay. A process of its own, without torch, so that what
a killed bench had said is in the file.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

MOST = 12 << 20  # bytes: machines that are lent give back files of 16 MiB


def copy(path: Path, most: int = MOST) -> None:
    """Copy standard input to its end."""
    with path.open("ab+") as file:
        while piece := os.read(0, 1 << 16):
            with contextlib.suppress(OSError):  # nobody may be looking any more
                os.write(1, piece)
            file.write(piece)
            file.flush()
            if file.seek(0, os.SEEK_END) > most:
                _shorten(file, most)


def _shorten(file: BinaryIO, most: int) -> None:
    """Keep the first and the last quarter of what a file may hold."""
    size, part = file.tell(), most // 4
    file.seek(0)
    first = file.read(part)
    file.seek(size - part)
    last = file.read()
    file.truncate(0)
    file.write(first + f"\n... {size - 2 * part} bytes left out ...\n".encode() + last)
    file.flush()


@contextlib.contextmanager
def logged(path: Path) -> Iterator[None]:
    """In this block, what this process and all that it starts say goes to the screen and into a file."""
    module = __spec__.name if __spec__ else "bench.lib.log"
    log = subprocess.Popen([sys.executable, "-m", module, str(path)], stdin=subprocess.PIPE)
    assert log.stdin is not None
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(number) for number in (1, 2)]
    for number in (1, 2):
        os.dup2(log.stdin.fileno(), number)
    log.stdin.close()
    # of a process that is killed, too: not what waits in its buffer, but all that it has said, and where it crashed
    given = {name: os.environ.get(name) for name in ("PYTHONUNBUFFERED", "PYTHONFAULTHANDLER")}
    os.environ.update(dict.fromkeys(given, "1"))
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, before in zip((1, 2), kept, strict=True):
            os.dup2(before, number)
            os.close(before)
        for name, value in given.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process that was left behind may still hold the pipe
            log.wait(timeout=5)


if __name__ == "__main__":
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)  # it ends when all that it listens to has
    copy(Path(sys.argv[1]))
