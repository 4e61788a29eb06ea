"""The extension compiles with every torch that Axo supports, not only with the one that is installed here.

A machine with a GPU may have the oldest one. Oracle: that torch's own headers, out of its wheel (`soak`); in short, the
kinds of operations that they name.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / "build/wheels"
UNITS = sorted((ROOT / "csrc/torch").glob("*.cpp"))
OLDEST = "2.11.0"
# c10d::OpType in torch 2.11: a later one may have more.
KINDS = """BROADCAST ALLREDUCE ALLREDUCE_COALESCED REDUCE ALLGATHER _ALLGATHER_BASE ALLGATHER_COALESCED GATHER SCATTER
    REDUCE_SCATTER ALLTOALL_BASE ALLTOALL SEND RECV RECVANYSOURCE BARRIER _REDUCE_SCATTER_BASE COALESCED
    _ALLREDUCE_SPARSE UNKNOWN""".split()


def test_the_oldest_torch_is_the_one_that_is_asked_for():
    assert f'"torch>={OLDEST.removesuffix(".0")},<' in (ROOT / "pyproject.toml").read_text()


def test_kinds_of_operations_are_known_to_the_oldest_torch():
    used = {kind for unit in (ROOT / "csrc/torch").iterdir() for kind in re.findall(r"OpType::(\w+)", unit.read_text())}
    assert len(used) > 15 and used <= set(KINDS)


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_every_unit_compiles_with_the_oldest_torch():
    """The wheel for CUDA, 530 MB, kept in build/wheels. Only its headers are used."""
    WHEELS.mkdir(parents=True, exist_ok=True)
    if not list(WHEELS.glob(f"torch-{OLDEST}-*.whl")):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", WHEELS, f"torch=={OLDEST}"]
        subprocess.run(command, check=True, timeout=1800)
    (wheel,) = WHEELS.glob(f"torch-{OLDEST}-*.whl")
    headers = WHEELS / wheel.stem
    if not headers.exists():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(headers, [name for name in archive.namelist() if name.startswith("torch/include/")])
    include = headers / "torch/include"
    folders = (include, include / "torch/csrc/api/include", sysconfig.get_paths()["include"])
    flags = ["-std=c++20", "-fsyntax-only", "-DTORCH_API_INCLUDE_EXTENSION_H", f'-DAXO_TORCH_VERSION="{OLDEST}"']

    def compile_unit(unit: Path) -> str:
        command = ["g++", *flags, "-I", "csrc", *(f"-isystem{folder}" for folder in folders), unit]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stderr

    with ThreadPoolExecutor(2) as pool:
        said = dict(zip(UNITS, pool.map(compile_unit, UNITS), strict=True))
    assert len(UNITS) > 6 and not {unit.name: text[:2000] for unit, text in said.items() if "error:" in text}
