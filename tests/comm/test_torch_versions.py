"""The extension compiles with every torch that Axo supports, not only with the one that is installed here.

A machine with a GPU may have the oldest one. Oracle: each torch's own headers, out of its wheel (`soak`); in short, the
kinds of operations that the oldest names, and that only one file asks for the version.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
HEADERS = ROOT / "build/headers"
UNITS = sorted((ROOT / "csrc/torch").glob("*.cpp"))
OLDEST = "2.11.0"
MINORS = (OLDEST, "2.13.0", "2.14.1", "2.15.0")  # the rows of csrc/torch/c10d_versions.h
# c10d::OpType in torch 2.11: a later one may have more.
KINDS = """BROADCAST ALLREDUCE ALLREDUCE_COALESCED REDUCE ALLGATHER _ALLGATHER_BASE ALLGATHER_COALESCED GATHER SCATTER
    REDUCE_SCATTER ALLTOALL_BASE ALLTOALL SEND RECV RECVANYSOURCE BARRIER _REDUCE_SCATTER_BASE COALESCED
    _ALLREDUCE_SPARSE UNKNOWN""".split()


def test_the_oldest_torch_is_the_one_that_is_asked_for():
    assert f'"torch>={OLDEST.removesuffix(".0")},<' in (ROOT / "pyproject.toml").read_text()


def test_kinds_of_operations_are_known_to_the_oldest_torch():
    used = {kind for unit in (ROOT / "csrc/torch").iterdir() for kind in re.findall(r"OpType::(\w+)", unit.read_text())}
    assert len(used) > 15 and used <= set(KINDS)


def test_every_minor_has_its_row_and_one_file_knows_them():
    adapter = ROOT / "csrc/torch/c10d_versions.h"
    asking = [path for path in (ROOT / "csrc").rglob("*.*") if re.search(r"TORCH_VERSION_M", path.read_text())]
    assert asking == [adapter]
    assert all(f"// {version.rpartition('.')[0]}  |" in adapter.read_text() for version in MINORS)


def headers_of(version: str) -> Path:
    """torch's headers: the installed torch's, or out of the wheel, 530 MB, of which they are kept in build/headers."""
    if torch.__version__.startswith(version.rpartition(".")[0] + "."):
        return Path(torch.__file__).parent / "include"
    kept = HEADERS / version
    if not kept.exists():
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, f"torch=={version}"]
            subprocess.run(command, check=True, timeout=1800)
            (wheel,) = Path(folder).glob("torch-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                names = [name for name in archive.namelist() if name.startswith("torch/include/")]
                archive.extractall(Path(folder) / "headers", names)
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(Path(folder) / "headers", kept)
    return kept / "torch/include"


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("version", MINORS)
def test_every_unit_compiles(version):
    include = headers_of(version)
    folders = (include, include / "torch/csrc/api/include", sysconfig.get_paths()["include"])
    flags = ["-std=c++20", "-fsyntax-only", "-DTORCH_API_INCLUDE_EXTENSION_H", f'-DAXO_TORCH_VERSION="{version}"']

    def compile_unit(unit: Path) -> str:
        command = ["g++", *flags, "-I", "csrc", *(f"-isystem{folder}" for folder in folders), unit]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stderr

    with ThreadPoolExecutor(2) as pool:
        said = dict(zip(UNITS, pool.map(compile_unit, UNITS), strict=True))
    assert len(UNITS) > 6 and not {unit.name: text[:2000] for unit, text in said.items() if "error:" in text}
