"""Shared set-up of the tests, and a line at the end that says what did not run."""

import atexit
import gc
import os
from collections import Counter

import pytest

# Before torch is imported: on a machine of few cores many ranks with many threads each would stand in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_THREAD_LIMIT", "1")  # also where a command takes all cores for its only rank
# torch's store asks the name server who 127.0.0.1 is whenever a rank opens it: an answer that is lost costs one second
# instead of five.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# Of a test without a limit of its own; pyproject.toml has the same for a machine that is not busy.
if "AXO_TEST_SLOWNESS" in os.environ:
    os.environ.setdefault("PYTEST_TIMEOUT", str(300 * float(os.environ["AXO_TEST_SLOWNESS"])))
# What has been tuned on this machine is no part of the tests: a folder that can be neither read nor written.
os.environ["AXO_TUNE_CACHE"] = os.path.join(os.devnull, "tuner")
os.environ.pop("AXO_TUNE", None)

# What the collection of tests imports stays: the collector of garbage looks at it neither meanwhile nor later.
gc.disable()

_left_out: Counter[str] = Counter()


def pytest_collection_finish() -> None:
    gc.freeze()
    atexit.register(gc.unfreeze)  # else Triton's modules report all of theirs as leaked when the run ends
    gc.set_threshold(50_000, 10, 10)  # with Python's 700 a tenth of the time goes into the search
    gc.enable()


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in ("gpu", "soak"):
            if item.get_closest_marker(mark):
                _left_out[mark] += 1
                break


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _left_out["gpu"]:
        terminalreporter.write_line(f"not run: {_left_out['gpu']} tests that need a GPU (make gpu)")
    if _left_out["soak"]:
        terminalreporter.write_line(f"not run: {_left_out['soak']} long proofs (make soak)")
