"""Axo builds and works with every torch that it supports, on every Python: docs/install.md has the table.

Each cell is an environment of its own with wheels of the registry, 1 GB (torch for CPUs) to 6 GB, one at a time, and
takes 15 to 25 minutes; one cell: `pytest -m soak tests/comm/test_torch_matrix.py -s -k "2.15 and 3.13"`. It needs no
torch beside that of the cell: with --noconftest it runs where a Python of another distribution stands. Oracles: those
of the sample's tests, and all of PyTorch's own backend tests of that version, on 4 ranks.
"""

from __future__ import annotations

import json
import re
import shutil
import time
import zipfile

import pytest

from tests.environments import ROOT, Environment, copy_of_the_checkout, python_of

TORCH = ["2.11", "2.13", "2.14", "2.15"]
PYTHON = ["3.11", "3.12", "3.13", "3.14"]
SAMPLE = """tests/comm/test_c10d.py tests/comm/test_c10d_suite.py tests/comm/test_collectives.py
    tests/comm/test_entry_point.py tests/nn/test_linear.py tests/overlap/test_special_cases.py
    tests/house/test_readme.py::test_the_example_runs_as_printed"""
SUITE = "-m soak tests/comm/test_c10d_suite.py -k 4- -s"


def test_the_matrix_and_the_pages_go_from_end_to_end_of_the_range():
    (low, past) = re.findall(r'"torch>=2\.(\d+),<2\.(\d+)"', (ROOT / "pyproject.toml").read_text())[0]
    assert TORCH[0] == f"2.{low}" and TORCH[-1] == f"2.{int(past) - 1}"
    for page in ("README.md", "docs/install.md"):
        text = (ROOT / page).read_text()
        assert f"torch {TORCH[0]} to {TORCH[-1]}" in text, f"{page} names another range"
    assert all(f"\n| {minor}" in text for minor in TORCH), "docs/install.md: a torch has no row"


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("python", PYTHON)
@pytest.mark.parametrize("torch", TORCH)
def test_it_builds_and_works(torch, python, tmp_path):
    environment = Environment(tmp_path / "venv", python_of(python))
    try:
        environment.type(f"pip install -q --no-cache-dir --no-compile 'torch=={torch}.*'", tmp_path)
        code = "import sysconfig, torch; print(torch.__version__, sysconfig.get_config_var('SOABI'))"
        version, abi = environment.type(f'python -c "{code}"', tmp_path).split()[-2:]
        row = {"torch": version, "python": python, "environment_GB": round(environment.size(), 2)}
        source = copy_of_the_checkout(tmp_path / "axo", f"obj-{abi}-torch{version}")
        start = time.monotonic()
        said = environment.type("pip wheel -v --no-deps -w wheel .", source)
        warnings = re.findall(r".*\.(?:cpp|h|hpp|inc):\d+.* warning: .*", said)  # of compilers, not of setuptools
        assert "c10d_backend" in said and not warnings, "\n".join(warnings)
        row["build_s"] = round(time.monotonic() - start)
        (wheel,) = (source / "wheel").glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (library,) = [member for member in archive.infolist() if member.filename.endswith(".so")]
        row |= {"wheel_MB": round(wheel.stat().st_size / 1e6, 2), "library_MB": round(library.file_size / 1e6, 2)}
        environment.type(
            f"pip install -q --no-cache-dir --no-compile '{wheel}[litgpt]' pytest pytest-timeout expecttest", source
        )
        after = environment.version("torch").partition("+")[0]
        assert after == version.partition("+")[0], f"the rest of the packages brought torch {after}"
        shutil.rmtree(source / "python")  # what is tested is what is installed
        said = environment.type(f"python -m pytest {' '.join(SAMPLE.split())} || true", source)
        row |= {outcome: int(count) for count, outcome in re.findall(r"(\d+) (passed|failed|errors?)\b", said)}
        suite = environment.type(f"python -m pytest {SUITE} || true", source)
        for passed, failed, skipped in re.findall(r"4 ranks: (\d+) passed, (\d+) failed, (\d+) skipped", suite):
            for outcome, count in {"passed": passed, "failed": failed, "skipped": skipped}.items():
                row[f"suite_{outcome}"] = row.get(f"suite_{outcome}", 0) + int(count)
        print("\n" + json.dumps(row))
        assert row["passed"] > 50 and not {"failed", "error", "errors"} & set(row), said[-6000:]
        assert row["suite_passed"] > 80 and not row["suite_failed"], suite[-6000:]
    finally:
        shutil.rmtree(tmp_path, ignore_errors=True)
