"""The first lines that a user types: README's, in an empty environment, with whatever torch the registry gives today.

A long proof of 10 minutes and 6 GB, which prints versions and sizes: `pytest -m soak tests/docs/test_install.py -s`.
`.ci/package` does the same in short with the torch that is there, and types what is refused.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

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
