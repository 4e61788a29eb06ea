"""A pytest plugin: run LitGPT's own ``tests/test_model.py``, unchanged, on models that a grid shares.

    torchrun --nproc-per-node 2 -m pytest -p axo.integrations.pytest_litgpt --axo-grid 2x1x1x1 tests/test_model.py

``litgpt.GPT`` is replaced by a class that splits itself over the grid as soon as it is built: whole weights are cut
when they are loaded, logits come back whole, and the file compares them with Hugging Face's classes as it always does.
The ranks run the same tests in the same order under the same seeds (one a test, from its name). What Axo refuses is a
skip that shows the refusal, and what a shared model cannot satisfy (``_DIFFERENT``) is an expected failure with its
reason: run with ``-rsx`` to see them. A test that fails on any rank fails on all.

Not here: the test file itself. It is in LitGPT's source distribution:
``pip download --no-deps --no-binary :all: litgpt==0.5.13``.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator
from typing import Any

import pytest
import torch

import axo
from axo.grid import Grid
from axo.integrations.fabric.compile import keep_out_of_graphs

# Tests that look into one rank's part of the model, or at the last bits of fp32: name -> (the axes that make them
# differ, why).
_DIFFERENT = {
    "test_kv_cache_buffer_shape": ("x", "a rank's cache holds its own query groups, not all"),
    "test_against_original_gemma_2": (
        "xy",
        "it allows 3e-5, and with its random weights fp32 itself, Hugging Face's too, is 4e-5 to 2e-4 from fp64: sums"
        " that are split round otherwise, not worse, and whether that passes is chance",
    ),
}


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--axo-grid", default="1x1x1x1", metavar="XxYxZxDATA", help="Ranks on each axis.")


def pytest_configure(config: Any) -> None:
    torch.set_num_threads(1)
    config.addinivalue_line("markers", "flaky: of pytest-rerunfailures, which the file uses; nothing is run again here")
    comms = axo.connect(config.getoption("--axo-grid"))
    config.add_cleanup(comms.close)
    config.pluginmanager.register(_OneVoice(comms), "axo-one-voice")
    _replace_gpt(comms)
    if comms.rank:
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            config.pluginmanager.unregister(reporter)


def pytest_report_header(config: Any) -> str:
    return f"axo: litgpt.GPT is shared by grid {config.getoption('--axo-grid')}"


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    grid = Grid.parse(config.getoption("--axo-grid"))
    for item in items:
        axes, reason = _DIFFERENT.get(item.originalname, ("", ""))
        if any(grid.size(axis) > 1 for axis in axes):
            item.add_marker(pytest.mark.xfail(reason=f"axo: {reason}"))


@pytest.fixture(autouse=True)
def _same_seed(request: Any) -> None:
    torch.manual_seed(zlib.crc32(request.node.name.encode()))  # wherever the file lies


def _replace_gpt(comms: Any) -> None:
    """Must run before a test module says ``from litgpt import GPT``."""
    import litgpt
    import litgpt.model

    class GPT(litgpt.model.GPT):
        """litgpt's GPT, split over the grid when it is built."""

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            try:
                axo.parallelize(self, comms, gather_logits=True)
            except ValueError as refusal:
                pytest.skip(f"refused: {refusal}")
            keep_out_of_graphs(self)  # as AxoStrategy does

    litgpt.GPT = litgpt.model.GPT = GPT  # type: ignore[misc]


class _OneVoice:
    """Every rank must come to the same verdict on a test: one that differs fails it on all."""

    def __init__(self, comms: Any) -> None:
        self._comms = comms

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Generator[None, Any, Any]:
        report = yield
        failed = torch.tensor([int(report.failed), int(report.skipped)])
        if self._comms.grid.world_size > 1:
            failed = self._comms.world.all_reduce(failed, "max")
        if failed[0] and not report.failed:
            report.outcome = "failed"
            report.longrepr = "failed on another rank of the grid"
        elif failed[1] and not report.skipped and not report.failed:
            report.outcome = "failed"
            report.longrepr = "skipped on another rank of the grid and not on this one"
        return report
