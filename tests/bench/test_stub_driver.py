"""Kernels through Triton's real launcher, over a driver that computes nothing.

Oracle: the rules of cuTensorMapEncodeTiled in NVIDIA's description of the driver.
"""

import ctypes
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.lib import compiled

ROOT = Path(__file__).resolve().parents[2]


def stub(*options, timeout=1500):
    command = [sys.executable, "-m", "bench.tools.stub_driver", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    said = re.search(r"^(\d+) calls, (\d+) launches, (\d+) tensor maps, (\d+) wrong", done.stdout, re.MULTILINE)
    assert said, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.returncode == (said[4] != "0"), done.stdout[-3000:]
    return [int(number) for number in said.groups()], done.stdout


ONE = "NN 2048x2048x1024 bfloat16 pingpong 128x128x64 g8 w4 s5 bias"


@pytest.mark.slow
def test_a_sample_is_launched_and_its_cache_can_be_moved(tmp_path, monkeypatch):
    """Also by tensor maps; what was compiled is found again behind another path, without what nothing reads."""
    filled, moved = tmp_path / "filled", tmp_path / "moved"
    (calls, launched, maps, wrong), _ = stub("--cache", str(filled), "--only", ONE)
    assert calls >= 1 and launched >= calls and maps >= 3 and wrong == 0
    assert {path.suffix for path in filled.rglob("*") if path.is_file()} <= {".json", ".cubin", ".so"}
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    assert "kernels were compiled elsewhere" in compiled.bring(filled, moved) and compiled.brought_along()
    for path in filled.rglob("*.cubin"):
        path.unlink()
    before = set(moved.rglob("*.cubin"))
    (calls, launched, _, wrong), _ = stub("--cache", str(moved), "--only", ONE)
    assert launched >= calls and wrong == 0 and set(moved.rglob("*.cubin")) == before
    (filled / compiled.LABEL).write_text(json.dumps({"triton": "0.1"}))
    assert "kernels are compiled here" in compiled.bring(filled, tmp_path / "other")
    assert "kernels are compiled here" in compiled.bring(tmp_path / "none", tmp_path / "other")


@pytest.mark.soak
def test_every_kernel_and_candidate():
    (calls, launched, maps, wrong), told = stub(timeout=7200)
    print(told.splitlines()[-1])
    assert calls > 400 and launched > calls and maps > 1000 and wrong == 0


def test_maps_and_grids_against_the_rules(tmp_path):
    """Each rule refuses what breaks it alone."""
    from bench.tools.stub_driver import build

    library = build(tmp_path)
    store = ctypes.create_string_buffer(256)
    aligned = (ctypes.addressof(store) + 63) // 64 * 64
    good = {"map": aligned, "type": 9, "address": 1 << 20, "dims": (64, 8), "strides": (128,), "box": (64, 8)}
    good["swizzle"] = 3  # 128 bytes

    def refused(**changed):
        given = good | changed
        code = library.cuTensorMapEncodeTiled(
            ctypes.c_void_p(given["map"]), given["type"], 2, ctypes.c_void_p(given["address"]),
            (ctypes.c_uint64 * 2)(*given["dims"]), (ctypes.c_uint64 * 1)(*given["strides"]),
            (ctypes.c_uint32 * 2)(*given["box"]), (ctypes.c_uint32 * 2)(1, 1), 0, given["swizzle"], 0, 0,
        )  # fmt: skip
        return code != 0

    assert not refused() and not refused(type=6)
    for name, bad in (
        ("map", aligned + 8), ("address", (1 << 20) + 8), ("dims", (0, 8)), ("strides", (136,)), ("strides", (112,)),
        ("box", (64, 257)), ("box", (4, 8)), ("box", (128, 8)), ("swizzle", 1), ("type", 99),
    ):  # fmt: skip
        assert refused(**{name: bad}), name
