"""The long proofs of the runtime, one after the other: what ran, for how long, and how many checks failed.

    make soak                              # all parts, then the proofs of the Python side
    python -m bench.soak core fuzz         # some parts; --json FILE appends a line for each proof
    python -m bench.soak --short           # the same parts at a tenth of their length or less: whether all of it runs

    core     200,000 random pending collectives over 4 overlapping communicators, 4 ranks; memory and descriptors
    kills    100 ranks killed inside collectives, connect, split and abort
    memory   all C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer
    threads  those whose ranks are threads under ThreadSanitizer
    device   the GPU transport's tests on the stand-ins, under each sanitizer
    fuzz     random bytes for everything that reads what others write, under the first two: 300 seconds in all
    tables   the tables of functions against NCCL and the CUDA runtime of two CUDA versions, from pip (700 MB)
    suite    PyTorch's own backend tests at 2, 4 and 8 ranks

A part that fails does not keep the others from running; the exit status is 1 then. It wants the checkout, make and g++,
and says nothing about speed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .lib.arguments import Parser
from .lib.table import Table, environment

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = {"part": "s", "proof": "s", "tests": "d", "checks": "d", "failed": "d", "seconds": ".1f"}
MEMORY = "address,undefined"
FUZZ_SECONDS, SHORT_FUZZ_SECONDS = 300, 10
FUZZ_TARGETS = 5
FEWEST_OF_SUITE = 90  # tests that apply at any number of ranks
DEADLINE_S = "3600"
Row = dict[str, Any]


def core_tests(name: str, sanitizer: str = "", filter_: str = "", **variables: str) -> Row:
    """The C++ tests whose names contain ``filter_``, built with a sanitizer or none."""
    command = ["make", "-s", "-j2", "-C", "csrc/tests", "test", f"FILTER={filter_}"]
    command += [f"SAN={sanitizer}"] if sanitizer else []
    with tempfile.NamedTemporaryFile(mode="r") as results:
        row, output = run(name, command, {"AXO_RESULTS": results.name, "AXO_TEST_SECONDS": DEADLINE_S, **variables})
        counts = re.findall(r"^(\d+) tests, (\d+) failed", output, re.MULTILINE)
        row["tests"], row["failed"] = (int(n) for n in counts[-1]) if counts else (0, 1)
        row["checks"] = sum(int(n) for n in re.findall(r"^\w+ +(\d+) checks ", output, re.MULTILINE))
        lines = [json.loads(line) for line in results.read().splitlines()]
    return row | ({"results": lines} if lines else {})


def device_tests(sanitizer: str) -> Row:
    row, output = run(
        f"stand-ins, {sanitizer}", ["make", "-s", "-j2", "-C", "csrc/tests/device", f"SAN={sanitizer}"], {}
    )
    counts = re.findall(r"^\w+: (\d+) tests, (\d+) failed", output, re.MULTILINE)
    row["tests"], row["failed"] = sum(int(n) for n, _ in counts), sum(int(n) for _, n in counts) + (len(counts) < 4)
    return row


def suite(world: int, slices: str = "") -> Row:
    """What test_c10d_suite prints of one number of ranks, over its slices, or one of them."""
    chosen = f"{world}-{slices}"
    command = [sys.executable, "-m", "pytest", "-m", "soak", "-s", "tests/comm/test_c10d_suite.py", "-k", chosen]
    row, output = run(f"{world} ranks", command, {})
    counts = re.findall(rf"^{world} ranks: (\d+) passed, (\d+) failed, (\d+) skipped", output, re.MULTILINE)
    passed, failed, skipped = (sum(int(line[i]) for line in counts) for i in range(3))
    too_few = passed < (1 if slices else FEWEST_OF_SUITE)
    return row | {"tests": passed + failed, "failed": failed + too_few, "skipped": skipped}


def tables() -> Row:
    command = [sys.executable, "-m", "pytest", "-m", "soak", "-ra", "tests/comm/test_device_transport.py"]
    row, output = run("the vendors' own libraries", command, {})
    passed = re.search(r"^(\d+) passed", output, re.MULTILINE)
    wheels = sorted(path.name.split("-py3")[0] for path in (ROOT / "build/wheels").glob("*.whl"))
    return row | {"tests": int(passed[1]) if passed else 0, "failed": int(not passed), "wheels": wheels}


def run(name: str, command: list[str], variables: dict[str, str]) -> tuple[Row, str]:
    """Run from the checkout; a failure is shown and counted by the caller."""
    start = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout[-6000:], done.stderr[-6000:], sep="\n", flush=True)
    settings = " ".join(f"{k}={v}" for k, v in variables.items() if k.startswith("AXO_") and k != "AXO_RESULTS")
    said = " ".join("python" if word == sys.executable else word for word in command if word not in ("-s", "-j2"))
    row = {"proof": name, "seconds": time.monotonic() - start, "exit": done.returncode}
    return row | {"command": f"{settings} {said}".strip()}, done.stdout


def proofs(part: str, short: bool = False) -> Iterator[Row]:
    if part == "core":
        yield core_tests("random operations", filter_="soak_random", AXO_SOAK="1" if short else "10")
    elif part == "kills":
        yield core_tests("kills", filter_="soak_kills", **({} if short else {"AXO_SOAK": "1"}))
    elif part == "memory":
        yield core_tests(MEMORY, MEMORY)
    elif part == "threads":
        yield core_tests("thread", "thread")
    elif part == "device":
        for sanitizer in ("address", "undefined", "thread"):
            yield device_tests(sanitizer)
    elif part == "fuzz":
        seconds = str((SHORT_FUZZ_SECONDS if short else FUZZ_SECONDS) / FUZZ_TARGETS)
        yield core_tests(f"fuzz, {MEMORY}", MEMORY, "fuzz", AXO_FUZZ_SECONDS=seconds)
    elif part == "tables":
        yield tables()
    elif short:
        yield suite(4, slices="0")
    else:
        for world in (2, 4, 8):
            yield suite(world)


PARTS = ("core", "kills", "memory", "threads", "device", "fuzz", "tables", "suite")


def main() -> int:
    parser = Parser("axo bench soak", __doc__)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--short", action="store_true", help="a sample of each part, which proves little")
    parser.add_argument("--json", type=Path, default=None, help="append a line for each proof to this file")
    options = parser.parse_args()
    if not (ROOT / "csrc/tests").is_dir():
        parser.error(f"{ROOT} is not the checkout: its C++ tests are what runs here")
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(PARTS)}")
    header = {"bench": "soak", **({"short": True} if options.short else {}), **environment(torch.device("cpu"))}
    table = Table(COLUMNS, options.json, header)
    failed = 0
    for part in options.parts or PARTS:
        for row in proofs(part, options.short):
            failed += bool(row["failed"] or row["exit"])
            table.add(part=part, **row)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
