"""What a process and all that it starts say, on the screen and in a file.

Compilers and drivers tell what is wrong on the screen alone, and a leased machine keeps no screen. The copy is made by
a process of its own (``tee``), so that what a killed bench had said is in the file.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MOST = 12 << 20  # bytes: machines that are lent give back files of 16 MiB


@contextlib.contextmanager
def logged(path: Path, most: int = MOST) -> Iterator[None]:
    """In this block, what this process and all that it starts say goes to the screen and to the end of a file.

    Of what is too much (a compiler may print whole programs) the first and the last quarter of ``most`` bytes stay.
    """
    # in a session of its own: it ends when all that it listens to has, not by their signals
    log = subprocess.Popen(["tee", "-pa", str(path)], stdin=subprocess.PIPE, start_new_session=True)
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
        if len(said := path.read_bytes()) > most:
            part = most // 4
            told = f"\n... {len(said) - 2 * part} bytes left out ...\n".encode()
            path.write_bytes(said[:part] + told + said[-part:])
