"""The built wheel holds everything (axo, axo_kernels, the benches, the extension) and works away from the checkout."""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import pathlib, sys
import axo, axo.comm.extension, axo_kernels, axo_bench, axo.nn, axo.perf
where = pathlib.Path(sys.prefix)
for module in (axo, axo.comm.extension._C, axo_kernels, axo_bench, axo.nn):
    assert where in pathlib.Path(module.__file__).parents, module.__file__
comms = axo.connect("1x1x1x1")
import torch.distributed as dist, torch
dist.init_process_group("axo", store=dist.HashStore(), rank=0, world_size=1)
t = torch.ones(3)
dist.all_reduce(t)
assert t.tolist() == [1.0, 1.0, 1.0]
print("works", axo.__version__)
"""


def run(*command, **options):
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
def test_wheel_in_a_clean_environment(tmp_path):
    # --no-deps: torch is there, and the test must work without a network. Only what has changed is compiled again.
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(ROOT),
    ]
    run(*build)
    (wheel,) = tmp_path.glob("axo-*.whl")
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    folders = {
        "axo": ROOT / "python" / "axo",
        "axo_kernels": ROOT / "axo_kernels",
        "axo_bench": ROOT / "bench",
    }  # tools are the checkout's
    sources = {
        f"{package}/{module.relative_to(folder)}": module
        for package, folder in folders.items()
        for module in folder.rglob("*.py")
        if module.parent != ROOT / "bench" / "tools"
    }
    assert {name for name in names if name.endswith(".py")} == set(sources), (
        "the wheel's modules are not the checkout's"
    )
    for name, module in sources.items():
        assert archive.read(name) == module.read_bytes(), f"{name} in the wheel is not the checkout's"
    assert any(name.startswith("axo/_C.") and name.endswith(".so") for name in names)
    assert not [name for name in names if name.startswith(("tests", "csrc", "build"))]

    folder = tmp_path / "elsewhere"
    folder.mkdir()
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    python = str(environment / "bin" / "python")
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip()
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, str(wheel))
    # torch and its companions come from here, behind the environment's own packages: not the editable install, which is
    # a .pth file, and those work in real site folders only.
    variables = {**os.environ, "PYTHONPATH": site + os.pathsep + str(Path(torch.__file__).parent.parent)}
    assert "works" in run(python, "-c", PROGRAM, cwd=folder, env=variables)
    listing = run(python, "-m", "axo.cli", "bench", "--help", cwd=folder, env=variables)
    for bench in ("gemm", "overlap"):
        assert bench in listing
