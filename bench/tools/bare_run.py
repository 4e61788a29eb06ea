"""The command for a machine with a GPU, run on one that has nothing: no GPU, no network, torch and triton alone.

    python -m bench.tools.bare_run --json bench/results/gpu_walk.jsonl         six minutes on two busy cores

It unpacks the last commit into a temporary folder, makes an environment of torch, triton, numpy (Triton's interpreter
wants it), setuptools and what these require, and types there, without a network (``unshare``, so Linux and root)

    python3 setup.py build_ext --inplace
    PYTHONPATH=python:. python3 -m bench.gpu --walk --seconds 400 --out DIR

The lines say how long each took by the clock and in seconds of a CPU, which files came of it, and every verdict. Speed
on a GPU, and what its libraries really do, it cannot show: the libraries are the tests'
stand-ins.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import tempfile
import time
import venv
from importlib import metadata
from pathlib import Path

import torch

from bench.lib.arguments import Parser
from bench.lib.table import Table, environment

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "triton", "numpy", "setuptools")
COLUMNS = {"step": "s", "exit": "d", "seconds": ".1f", "cpu_seconds": ".1f"}
# What must fail there, for the walk to prove anything.
ABSENT = (
    "import importlib.util, socket\n"
    "assert not any(map(importlib.util.find_spec, ('litgpt', 'lightning', 'cupy', 'typer', 'pytest', 'axo')))\n"
    "try:\n    socket.create_connection(('192.0.2.1', 80), timeout=2)\n"
    "except OSError as error:\n    print(error)\n"
    "else:\n    raise SystemExit('there is a network')\n"
)


def required(names: tuple[str, ...]) -> dict[str, metadata.Distribution]:
    """The distributions of this environment with what they require, extras aside."""
    found: dict[str, metadata.Distribution] = {}
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            if name in names:
                raise
            continue  # of another platform
        for line in found[name].requires or []:
            if "extra ==" not in line and (match := re.match(r"[\w.-]+", line)):
                waiting.append(match.group())
    return found


def bare_environment(folder: Path) -> Path:
    """An environment that has PACKAGES and nothing else; returns its folder of programs."""
    venv.create(folder, with_pip=False, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    for distribution in required(PACKAGES).values():
        for top in {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists() and not top.endswith(".pth"):
                (site / top).symlink_to(Path(str(distribution.locate_file(top))).resolve())
    return folder / "bin"


def main(arguments: list[str] | None = None) -> int:
    """Build and walk; returns 0 when both ended with 0."""
    parser = Parser("bench.tools.bare_run", __doc__)
    parser.add_argument("--json", type=Path, default=None, help="write JSON lines to this file, which it replaces")
    parser.add_argument("--seconds", type=int, default=400, help="of the walk")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tree, out = folder / "tree", folder / "out"
        tree.mkdir()
        archive = subprocess.Popen(["git", "-C", str(ROOT), "archive", "HEAD"], stdout=subprocess.PIPE)
        unpacked = subprocess.run(["tar", "-x", "-C", str(tree)], stdin=archive.stdout)
        if archive.wait() or unpacked.returncode:
            parser.error(f"{ROOT} is not a checkout that git can read")
        programs = bare_environment(folder / "env")
        if options.json:
            options.json.unlink(missing_ok=True)  # the file is one run, which the page tells of
        table = Table(
            COLUMNS, options.json, {"bench": "gpu_walk", "cores": os.cpu_count()} | environment(torch.device("cpu"))
        )
        given = {
            "PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": str(folder),
            "LANG": "C.UTF-8",
        }
        steps = {
            "nothing but torch and triton": ["python3", "-c", ABSENT],
            "build": ["python3", "setup.py", "build_ext", "--inplace"],
            "walk": ["python3", "-m", "bench.gpu", "--walk", "--seconds", str(options.seconds), "--out", str(out)],
        }
        code = 0
        for step, command in steps.items():
            more = {"PYTHONPATH": "python:."} if step == "walk" else {}
            code = code or _timed(step, command, tree, given | more, table)
        for file in sorted(out.iterdir()) if out.exists() else []:
            table.note(f"{file.name}: {file.stat().st_size} bytes", file=file.name)
            if file.name == "verdicts.txt":
                for line in file.read_text(encoding="utf-8").splitlines():
                    table.note(line, verdict="not measured" if ": not measured" in line else line.rsplit(": ", 1)[1])
    return code


def _timed(step: str, command: list[str], tree: Path, given: dict[str, str], table: Table) -> int:
    """Run one step without a network; a row of what it took."""
    alone = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    code = subprocess.run(alone, cwd=tree, env=given).returncode
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    table.add(step=step, exit=code, seconds=time.perf_counter() - started, cpu_seconds=cpu)
    return code


if __name__ == "__main__":
    sys.exit(main())
