"""The first lines that a user types: README's, in an empty environment, with whatever torch the registry gives today.

A long proof of 10 minutes and 6 GB, which prints versions and sizes: `pytest -m soak tests/docs/test_install.py -s`.
`.ci/package` does the same in short with the torch that is there, and types what is refused.
"""

from __future__ import annotations

import contextlib
import re
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch

import axo
from bench.tools import wheels
from tests.environments import ROOT, Environment, copy_of_the_checkout, python_of

README = (ROOT / "README.md").read_text()
# Shells read the line without its comment; the second line of that block wants LitGPT.
FIRST_LINE = re.search(r"```bash\n(pip install torch[^#\n]*)", README)[1].strip()
EXAMPLE = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1]
RUN = re.search(r"`(torchrun --nproc-per-node \d+ )FILE`", README)[1]


def test_the_lines_are_those_of_the_readme():
    assert FIRST_LINE == "pip install torch && pip install ." and RUN == "torchrun --nproc-per-node 4 "


def works(environment: Environment, folder: Path, uninstall: str = "pip uninstall -q -y axo") -> None:
    """The example gives its lines, `axo info` is content, and an uninstall leaves nothing."""
    (folder / "example.py").write_text(EXAMPLE)
    said = environment.type(f"{RUN} example.py", folder)
    assert "torch.Size([16, 32])" in said and "all_reduce y" in said, said
    assert "axo " in environment.type("axo info --grid 1x1x1x1", folder)
    environment.type(uninstall, folder)
    (site,) = environment.folder.glob("lib/python*/site-packages")
    assert not list(site.glob("axo*")) and not (environment.folder / "bin/axo").exists()


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_what_the_readme_types_works(tmp_path):
    environment, away = Environment(tmp_path / "venv"), tmp_path / "away"
    away.mkdir()
    source = copy_of_the_checkout(tmp_path / "axo")
    environment.type(FIRST_LINE, source)
    versions = {name: environment.version(name) for name in ("torch", "numpy")}
    print(f"\n{sys.version.split()[0]}, {versions}, environment {environment.size():.2f} GB")
    works(environment, away)

    environment.type("pip install -q build uv setuptools", away)
    environment.type("python -m build -q --no-isolation --sdist .", source)
    (archive,) = (source / "dist").glob("axo-*.tar.gz")
    environment.type(f"pip install -q {archive}", away)
    works(environment, away)

    environment.type("pip wheel -q --no-deps -w dist .", source)
    (wheel,) = (source / "dist").glob("axo-*.whl")
    print(f"source {archive.stat().st_size / 1e6:.2f} MB, wheel {wheel.stat().st_size / 1e6:.2f} MB")
    environment.type(f"pip install -q {wheel}", away)
    works(environment, away)

    environment.type("uv pip install -q .", source)
    works(environment, away, "uv pip uninstall -q axo")


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_an_old_python_is_refused_by_name(tmp_path):
    environment = Environment(tmp_path / "venv", python_of("3.10"))
    said = environment.type("pip install .", copy_of_the_checkout(tmp_path / "axo"), fails=True)
    assert re.search(r"axo needs Python >=3\.11, and .* is 3\.10\.\d+: make an environment with another", said), said
    assert "ownloading torch" not in said, "pip fetches gigabytes before it refuses"


def test_a_wheel_says_which_torch_it_is_for_and_whose_code_it_holds(tmp_path):
    """Oracle: what pip reads, the version and the requirement."""
    for name in ("pyproject.toml", "python/axo/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    wheels.stamp(tmp_path, "2.15", Path(torch.__file__).parents[1])
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert "torch>=2.15,<2.16" in project["dependencies"] and project["license"] == "Apache-2.0 AND BSD-3-Clause"
    assert project["license-files"] == ["LICENSE", "licenses/*"]
    assert f'__version__ = "{axo.__version__}+torch2.15"' in (tmp_path / "python/axo/__init__.py").read_text()
    texts = {file.stem: file.read_text() for file in (tmp_path / "licenses").iterdir()}
    assert "Wenzel Jakob" in texts["pybind11"] and "Facebook" in texts["torch"]


def test_a_wheel_with_libraries_of_others_is_refused(tmp_path):
    fields = "License-Expression: Apache-2.0 AND BSD-3-Clause\n" + "License-File: x\n" * 3
    for libraries, metadata, words in (
        (["axo/_C.x.so"], fields, None),
        (["axo/_C.x.so", "axo.libs/libgomp.so.1"], fields, r"holds libraries of others: .*libgomp"),
        (["axo/_C.x.so"], "", "does not name the licences"),
    ):
        with zipfile.ZipFile(tmp_path / "axo-0-cp311-cp311-manylinux_2_28_x86_64.whl", "w") as archive:
            archive.writestr("axo-0.dist-info/METADATA", metadata)
            for name in libraries:
                archive.writestr(name, b"")
        with pytest.raises(SystemExit, match=words) if words else contextlib.nullcontext():
            lines = list(wheels.contents(Path(archive.filename)))
            assert "tag manylinux_2_28_x86_64" in lines[0]


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_wheel_of_this_torch_is_audited_and_works(tmp_path, capsys):
    wheels.main(["--torch", ".".join(torch.__version__.split(".")[:2]), "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert re.search(r"tag manylinux_2_\d+_\w+$", said, re.MULTILINE) and "the README's example runs" in said, said
