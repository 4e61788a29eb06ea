"""Damaged files end in ValueError with the file's name, within bounds: see ``tests/fuzz.py``."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests import fuzz
from tests.launcher import run_ranks

KINDS = 15


def test_some_damaged_files_are_one_error_or_are_read(tmp_path: Path) -> None:
    (done,) = run_ranks(fuzz.run, 1, str(tmp_path), 0, 20 * KINDS)
    assert sum(done.values()) == 20 * KINDS and set(done.values()) == {20}


@pytest.mark.parametrize("case", [2033009, 2164694])
def test_cases_that_failed_once(tmp_path: Path, case: int) -> None:
    run_ranks(fuzz.run, 1, str(tmp_path), case, 1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_thousand_damaged_files_are_one_error_or_are_read(tmp_path: Path) -> None:
    """AXO_FUZZ_MINUTES=30 runs for that long instead."""
    minutes = float(os.environ.get("AXO_FUZZ_MINUTES", "0"))
    (done,) = run_ranks(fuzz.run, 1, str(tmp_path), 1000, 1 << 62 if minutes else 10_000, minutes, timeout=3600)
    print(json.dumps(done))
    assert len(done) == KINDS and (minutes or sum(done.values()) == 10_000)
