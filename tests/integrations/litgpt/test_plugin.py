"""LitGPT's own ``tests/test_model.py``, unchanged, with the pytest plugin: what passes serially passes on every grid.

The file is in LitGPT's source distribution. It is looked for in ``AXO_LITGPT_TESTS`` (a path), then where an earlier
run has put it, and else fetched with pip; without a network the tests are skipped, which the summary shows.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.launcher import run_ranks

# Not test_model_compile: fabric/test_compile.py has it, on this grid, of a smaller model.
SAMPLE = "hf_mixtral or test_load_legacy_state_dict or test_forward_with_without_input_pos_maxp1"
# Tests whose own code looks at one rank's part, or at the last bits of sums; the plugin says why.
IMPORTED = ("transformers.models.mixtral.modeling_mixtral", "torch._dynamo.repro.after_dynamo")
SHARED = {"test_kv_cache_buffer_shape", "test_against_original_gemma_2"}


@pytest.fixture(scope="session")
def suite():
    """The path of the file."""
    release = version("litgpt")
    kept = Path(sys.prefix, f"litgpt-{release}", "test_model.py")
    given = Path(os.environ.get("AXO_LITGPT_TESTS", kept))
    if given.is_file():
        return given
    with tempfile.TemporaryDirectory() as folder:
        fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", folder]
        done = subprocess.run([*fetch, f"litgpt=={release}"], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"LitGPT's source distribution cannot be fetched: {done.stderr.strip().splitlines()[-1]}")
        (archive,) = Path(folder).glob("litgpt-*.tar.gz")
        with tarfile.open(archive) as files:
            text = files.extractfile(f"litgpt-{release}/tests/test_model.py").read()
    kept.parent.mkdir(exist_ok=True)
    kept.write_bytes(text)
    return kept


class Outcomes:
    """Counts what became of each test."""

    def __init__(self):
        self.found = {}

    def pytest_runtest_logreport(self, report):
        name = report.nodeid.partition("::")[2]
        if report.when == "call" or report.outcome != "passed":
            expected = hasattr(report, "wasxfail") and report.outcome == "skipped"
            self.found[name] = "xfailed" if expected else report.outcome


def outcomes(path, grid, expression):
    """On one rank: {test: outcome}. Without a grid: no plugin, one process."""
    seen = Outcomes()
    plugin = [] if grid is None else ["-p", "tests.integrations.litgpt.plugin", "--axo-grid", grid]
    arguments = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={path.parent}", "-W", "ignore"]
    pytest.main([*arguments, *plugin, "-k", expression, str(path)], plugins=[seen])
    assert seen.found
    return seen.found


def compare(suite, grid, expression, timeout):
    ranks = 1
    for size in grid.split("x"):
        ranks *= int(size)
    options = {"timeout": timeout, "preload": IMPORTED}
    serial = run_ranks(outcomes, 1, suite, None, expression, **options)[0]
    per_rank = run_ranks(outcomes, ranks, suite, grid, expression, **options)
    for found in per_rank:
        assert found.keys() == serial.keys() and list(found.values()) == list(per_rank[0].values())
        for name, outcome in found.items():
            expected = {"xfailed", serial[name]} if name.partition("[")[0] in SHARED else {serial[name]}
            assert outcome in expected, f"{name} at {grid}: {outcome}, serially {serial[name]}"
    counts = [dict(sorted(Counter(found.values()).items())) for found in (serial, per_rank[0])]
    print(f"LitGPT's test_model.py: serial {counts[0]}; grid {grid} {counts[1]}")


@pytest.mark.slow
def test_a_sample_passes_on_a_grid(suite):
    for found in run_ranks(outcomes, 2, suite, "2x1x1x1", SAMPLE, timeout=120, preload=IMPORTED):
        assert len(found) == 4 and set(found.values()) == {"passed"}, found


@pytest.mark.soak
@pytest.mark.timeout(1300)  # two runs of the file, of 600 s at most
@pytest.mark.parametrize("grid", ["2x1x1x1", "1x2x1x1", "1x1x2x1", "2x2x1x1", "1x2x2x1"])
def test_all_passes_on_a_grid(suite, grid):
    """Prints the counts (-s)."""
    compare(suite, grid, "test", 600)
