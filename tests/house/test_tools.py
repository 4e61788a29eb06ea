"""The tools that watch the house: which tests are near to a change, how heavy it is, what a commit must pass."""

import json
import re
import subprocess

import pytest
import yaml

import axo
from bench.tools import lines
from tests.house import changed
from tests.house.test_house import AXO, ROOT


@pytest.mark.parametrize(
    "path, test",
    [
        ("python/axo/placement.py", "tests/test_placement.py"),
        ("python/axo/overlap/gathers.py", "tests/overlap"),
        ("bench/tools/lines.py", "tests/house/test_tools.py"),
        ("tests/integrations/runs.py", "tests/integrations"),
        ("tests/test_launch.py", "tests/test_launch.py"),
    ],
)
def test_the_tests_that_are_nearest_to_a_change(path, test):
    files = [str(file.relative_to(ROOT)) for file in changed.nearest([ROOT / path])]
    assert 1 <= len(files) <= changed.NEAREST and any(file.startswith(test) for file in files), files


def test_an_import_leads_to_its_file():
    """Of names that are relative, public, a package's program, or a string."""
    imported = changed.imported(ROOT / "bench/step.py")
    assert {ROOT / "bench/lib/step_models.py", ROOT / "bench/lib/table.py"} <= imported
    assert AXO / "cli/__main__.py" in changed.imported(ROOT / "tests/integrations/litgpt/test_serving.py")
    assert AXO / "plans/litgpt/plan.py" in changed.imported(AXO / "integrations/litgpt/restarts.py")


def test_statements_are_counted_without_docstrings():
    text = '"""A module."""\nimport os\n\n\ndef f(x):\n    """A function."""\n    # why\n    return (x +\n        1)\n'
    assert lines.statements(text) == 3  # import, def, return


def test_lines_by_folder_add_up(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["lines", "--json"])
    lines.main()
    rows = json.loads(capsys.readouterr().out)
    parts = [rows[name] for name in ("csrc", "axo_kernels", "python/axo")]
    assert rows["product"]["lines"] == sum(row["lines"] for row in parts) > 10_000
    assert rows["bench"]["lines"] == sum(
        path.read_text().count("\n") for kind in ("*.py", "*.cpp") for path in (ROOT / "bench").rglob(kind)
    )
    assert rows["python/axo/comm"]["statements"] < rows["python/axo"]["statements"]


def test_a_commit_runs_the_tools_of_make_lint():
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = {hook["id"]: hook["entry"].split() for hook in local["hooks"]}
    (recipe,) = re.findall(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    ran = [line.replace("$(V)", ".venv").split() for line in recipe.splitlines()]
    for words in ran:
        same = [entry for entry in hooks.values() if entry[:2] == words[:2] or entry == words]
        assert same, f"no hook runs {' '.join(words[:2])}"
    assert len(ran) == len(hooks) - 1 == 4


@pytest.mark.parametrize(
    "message, passes",
    [
        ("What changed\n\nWhy", True),
        ("What changed", True),
        ("x" * 72 + "\n# a comment of git's\n", True),
        ("x" * 73, False),
        ("What changed.", False),
        ("What changed\nand more", False),
        ("", False),
    ],
)
def test_a_subject_says_what_in_72_characters(tmp_path, message, passes):
    (tmp_path / "message").write_text(message)
    run = subprocess.run([ROOT / ".ci/subject", tmp_path / "message"], capture_output=True, text=True)
    assert run.returncode == (not passes) and ("72 characters" in run.stdout) == (not passes), run


def test_one_version_stands_everywhere():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == axo.__version__
    assert re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == axo.__version__
