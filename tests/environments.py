"""Virtual environments as a user makes them, away from the checkout's own: for tests of the installation.

An environment of torch's default wheel takes 4 to 6 GB: a test makes one at a time, and removes it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CORE = ("base", "memory", "progress", "host", "hosts", "device")  # of csrc: units that see neither torch nor Python


class Environment:
    """An empty virtual environment of one Python, and what is typed in it."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        self.folder, self.python = folder, folder / "bin/python"
        subprocess.run([python, "-m", "venv", folder], check=True, capture_output=True)
        ours = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "OMP_NUM_THREADS", "OMP_THREAD_LIMIT")
        self.variables = {name: value for name, value in os.environ.items() if name not in ours}
        self.variables |= {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "VIRTUAL_ENV": str(folder)}

    def type(self, line: str, cwd: Path, *, fails: bool = False, **variables: str) -> str:
        """What bash prints for ``line``, which succeeds, or with ``fails`` does not."""
        command = ["bash", "-o", "pipefail", "-c", line]
        environment = self.variables | variables
        done = subprocess.run(
            command, cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert (done.returncode != 0) == fails, f"{line}: exit {done.returncode}\n{done.stdout[-4000:]}"
        return done.stdout

    def version(self, package: str) -> str:
        code = f"from importlib.metadata import version; print(version({package!r}))"
        return self.type(f'python -c "{code}"', self.folder).strip()

    def size(self) -> float:
        """GB (1e9 bytes) on the disk."""
        blocks = subprocess.run(["du", "-s", "-B1", self.folder], check=True, capture_output=True, text=True).stdout
        return int(blocks.split()[0]) / 1e9


def python_of(minor: str) -> str:
    """A Python of a minor version such as "3.12" on the PATH that starts, or the test is skipped."""
    for candidate in (sys.executable, f"python{minor}"):
        code = "import sys, ensurepip; print(sys.executable, *sys.version_info[:2])"
        try:
            path, *version = subprocess.run([candidate, "-c", code], capture_output=True, text=True).stdout.split()
        except (OSError, ValueError):
            continue
        if ".".join(version) == minor:
            return path
    pytest.skip(f"no python{minor} on the PATH starts")


def copy_of_the_checkout(folder: Path, objects: str = "") -> Path:
    """The files that git knows, in ``folder``. With ``objects``, a folder's name below build/, the core's objects too,
    which the same commands make for every torch and Python: only the units that see torch compile then."""
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in listing.splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    built = ROOT / "build/objects"
    if objects and built.exists():
        for part in CORE:
            shutil.copytree(built / part, folder / "build" / objects / part)
        for command in folder.glob("build/*/*/*.cmd"):  # it names the objects' folder
            command.write_text(command.read_text().replace(f"/{built.readlink()}/", f"/{objects}/"))
    return folder
