"""Defects that a review found before a GPU was there, put back one by one: the test named beside each must fail.

A defect is an edit or more of the product, in a copy of the checkout. Its test is one of the usual ones, which pass
without the edits. Oracle: that test's own message, so that it fails for the defect and not for something else.

    pytest -m soak tests/test_defects.py        # docs/notes/proofs.md has the table
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import standin

ROOT = Path(__file__).resolve().parents[1]
DEVICE_TESTS = Path("csrc/tests/device")
BUILT = Path("build/device-tests")


@dataclass(frozen=True)
class Edit:
    """``old``, which stands in ``file`` exactly once, becomes ``new``."""

    file: str
    old: str
    new: str

    def apply(self, root: Path) -> None:
        path = root / self.file
        text = path.read_text()
        assert text.count(self.old) == 1, f"{self.file} holds {self.old!r} {text.count(self.old)} times"
        path.write_text(text.replace(self.old, self.new))


@dataclass(frozen=True)
class Defect:
    """What was wrong, how it is put back, and which test of which family (or pytest's name) says what then."""

    name: str
    edits: tuple[Edit, ...]
    family: str  # of the stand-ins, "" for a test of pytest's
    test: str
    says: str  # a pattern


CORE = "csrc/device/core.cpp"
DOES_NOT_BLOCK = Edit(CORE, "  config.blocking = 1;", "  config.blocking = 0;")
THROWS = '  if (result == kNcclInProgress) refuse_nonblocking(std::string(function) + " answers before it is done");'
POLL = "nccl()->CommGetAsyncError(comm_, &result)"
# How the core waited when its communicators did not block: for "in progress" alone. And how it ought to have waited.
TRUSTS_SUCCESS = (
    DOES_NOT_BLOCK,
    Edit(CORE, THROWS, f"  while (result == kNcclInProgress) {POLL};"),
)
ALWAYS_ASKS = (
    DOES_NOT_BLOCK,
    Edit(
        CORE,
        THROWS,
        f"  if (result == kNcclSuccess || result == kNcclInProgress) {{\n"
        f"    do {POLL};\n    while (result == kNcclInProgress);\n  }}",
    ),
)
FUSED = "axo_kernels/fused/kernels.py"
SAMPLE = "tests/kernels/gemm/test_compile.py::test_sample_of_the_matrix"

DEFECTS = (
    Defect("1: a split's handle comes late", TRUSTS_SUCCESS, "cuda", "a_split_waits_for_its_ranks", "ncclCommUserRank"),
    Defect("2: a window's handle comes late", TRUSTS_SUCCESS, "cuda", "windows_of_every_version", "window != nullptr"),
    Defect(
        "3: a lone transfer is done too early",
        TRUSTS_SUCCESS,
        "old",
        "a_lone_transfer_ends_when_it_has_come",
        r"data == values\(0, 6\)",
    ),
    Defect(
        "4: what a copy on another stream reads is freed",
        (
            Edit(
                "csrc/torch/c10d_work.cpp",
                "  if (!parts_.empty()) parts_.back()->keep_until(current_stream(device_), by_program(steps));",
                "",
            ),
        ),
        "",
        "tests/comm/test_c10d_device.py::test_on_ranks[order_and_futures-2]",
        "copied on another stream",
    ),
    Defect("5: a thread for every launch", ALWAYS_ASKS, "cuda", "no_launch_makes_a_thread", r"launch_threads\(\) == 0"),
    Defect(
        "5: a thread of Axo's own for every launch",
        (Edit(CORE, "  *last_ = {work->", "  std::thread([] {}).join();\n  *last_ = {work->"),),
        "cuda",
        "no_launch_makes_a_thread",
        "a sum has made a thread",
    ),
    Defect(
        "5: one rank is taken for what a launch costs",
        (
            Edit(
                "bench/device.py",
                "    alone, together = extra.get(1), extra.get(2)\n",
                "    alone, together = None, extra.get(2, extra.get(1))\n",
            ),
        ),
        "",
        "tests/bench/test_bench_gpu.py::test_parts_of_the_transport_and_of_the_step_have_their_turns",
        "one GPU cannot reach the goal|under 3 us a call: 2.00",
    ),
    Defect(
        "6: only the same communicator is chained",
        (Edit(CORE, "  if (shared) last_ = &context_->last_shared_launch();\n", ""),),
        "hip",
        "kernels_that_do_not_fit_beside_each_other",
        r"did not complete|x \+ y \+ z == 6",  # one rank's time limit may end the wait of the other
    ),
    Defect(
        "6: streams of their own before NCCL 2.26",
        (
            Edit(
                "csrc/device/nccl_api.cpp",
                "if (vendor_ == GpuVendor::hip || version_ < 22600) return;",
                "if (vendor_ == GpuVendor::hip) return;",
            ),
        ),
        "cuda",
        "streams_of_their_own_only_where_launches_are_ordered",
        "is not",
    ),
    Defect(
        "6: the launch order asked for after torch has made a communicator",
        (Edit("csrc/device/nccl_api.cpp", "if (!library_.was_loaded()) setenv", "setenv"),),
        "cuda",
        "streams_of_their_own_only_where_launches_are_ordered",
        "is not",
    ),
    Defect(
        "7: chunks follow flags alone",
        (
            Edit(
                "csrc/device/communicator.cpp",
                "core_->order(core_->stream(), stream, true, ",
                "core_->order(core_->stream(), stream, false, ",
            ),
        ),
        "cuda",
        "chunks_come_after_what_the_stream_held_before",
        r"!work->is_completed\(\)",
    ),
    Defect(
        "8: parts of one GPU are the same GPU",
        (
            Edit(
                "csrc/device/gpu_runtime.cpp",
                "  if (!get_device_ || !get_uuid_) return \"\";\n",
                "  if (device >= 0) return \"\";\n",
            ),
        ),
        "cuda",
        "two_ranks_on_one_gpu",
        "are on the same GPU",
    ),
    Defect(
        "8: HIP's wait for a value, which does not wrap around",
        (
            Edit(
                "csrc/device/gpu_runtime.cpp",
                '    get_device_ = library_.symbol("hipDeviceGet");\n',
                '    get_device_ = library_.symbol("hipDeviceGet");\n'
                '    wait_value_ = library_.symbol("hipStreamWaitValue32");\n'
                '    write_value_ = library_.symbol("hipStreamWriteValue32");\n',
            ),
        ),
        "hip",
        "flags_order_chunks_of_a_running_kernel",
        "wait_flag: stream waits for values",
    ),
    Defect(
        "8: the kernels leave their flags to HIP's driver",
        (
            Edit(
                "axo_kernels/comm/adapters.py",
                "self._by_driver = torch.version.hip is None",
                "self._by_driver = True",
            ),
        ),
        "",
        "tests/kernels/comm/test_flags.py::test_the_driver_has_the_flags_on_nvidia_alone[6.4.0]",
        r"first extra item: \('wait', 1, 1\)",
    ),
    Defect(
        "9: no divisor of where a segment lies",
        tuple(
            Edit(FUSED, f"        {name} = tl.multiple_of({name}, ALIGNMENT)\n", "")
            for name in ("source", "target", "rows")
        ),
        "",
        SAMPLE,
        "stores of the result that are narrower",
    ),
    Defect(
        "9: counters at system scope",
        (Edit(FUSED, 'number, 1, sem="acq_rel", scope="gpu"', 'number, 1, sem="acq_rel", scope="sys"'),),
        "",
        SAMPLE,
        "orders at system scope",
    ),
    Defect(
        "10: nothing is reserved for a cap",
        (Edit(CORE, "  context_->reserve_ctas(reserved_ctas());\n  FlightLog", "  FlightLog"),),
        "cuda",
        "configuration_of_every_version",
        r"reserved_ctas\(\) == 8",
    ),
    Defect(
        "10: a product for each rank and chunk",
        (
            Edit(
                "axo_kernels/fused/strategies.py",
                "            multiply(rows, b.expand(comm.size, *b.shape), out=into)\n",
                "            for rank in range(comm.size):\n"
                "                multiply(rows[rank], b, out=into[rank])\n",
            ),
        ),
        "",
        "tests/kernels/fused/test_launches.py::test_a_split_operation_is_one_product_a_chunk[0]",
        r"\(12, 3, 0\) == \(3, 3, 0\)",
    ),
    Defect(
        "11: one program a multiprocessor",
        (
            Edit(
                "axo_kernels/gemm/matmul.py",
                "    slots = target.units * config.occupancy("
                'target, left.dtype.itemsize, out.dtype.itemsize, wide, activation or "")\n',
                "    slots = target.units\n",
            ),
        ),
        "",
        "tests/kernels/gemm/test_matmul.py::test_programs_are_as_many_as_fit_the_multiprocessors",
        r"108 == \(108 \* 3\)",
    ),
    Defect(
        "11: neighbouring tiles on different XCDs",
        (
            Edit(
                "axo_kernels/gemm/kernels.py",
                "        program = xcd * (programs // XCDS) + min(xcd, programs % XCDS) + program // XCDS\n",
                "        program += 0 * programs * xcd\n",
            ),
        ),
        "",
        "tests/kernels/gemm/test_matmul.py::test_neighbours_in_the_order_of_tiles_are_on_one_xcd",
        r"\(304, 8, \[0, 8, 16",
    ),
    Defect(
        "12: one limit for sums of any length",
        (Edit("bench/lib/accuracy.py", "    return 2.0**-23 * (2 * k / 3 + 0.5 + added)\n", "    return 2e-6\n"),),
        "",
        "tests/kernels/tune/test_timing.py::"
        "test_the_limit_of_a_sum_lies_between_truncated_addition_and_a_wrong_kernel[1003]",
        r"< 2e-06",
    ),
    Defect(
        "12: a head start of 0.2 ms, however long a call takes to issue",
        (
            Edit(
                "axo_kernels/tune/timing.py",
                "    return min(_LONGEST, max(_SHORTEST, 2 * issued))\n",
                "    return _SHORTEST\n",
            ),
        ),
        "",
        "tests/kernels/tune/test_timing.py::test_the_device_is_held_until_all_is_issued",
        r">= 0\.006",
    ),
    Defect(
        "13: aborts wait for each other",
        (
            Edit(
                "csrc/device/watchdog.cpp",
                "const bool made = pthread_create(&thread, &detached, start, own.get()) == 0;",
                "const bool made = (static_cast<void>(start), static_cast<void>(thread), false);",
            ),
        ),
        "cuda",
        "aborts_do_not_wait_for_each_other",
        "TIMEOUT",
    ),
    Defect(
        "14: clusters of thread blocks under a cap",
        (Edit(CORE, "  if (cap > 0) config.cgaClusterSize = 0;\n", ""),),
        "cuda",
        "capped_operations_fit_where_a_product_left_room",
        "did not complete",
    ),
    Defect(
        "15: memory is unmapped under running kernels",
        (Edit("csrc/device/context.cpp", "  if (!gpu_->synchronize_device()) {", "  if (false) {"),),
        "cuda",
        "memory_goes_when_the_device_is_done_with_it",
        "not: waited",
    ),
    Defect(
        "16: a communicator is closed under its graphs",
        (Edit("csrc/device/core_end.cpp", "  if (!failed()) check_graphs();\n", ""),),
        "cuda",
        "a_communicator_is_not_closed_while_graphs_hold_it",
        "expected axo::Error, nothing was thrown",
    ),
    Defect(
        "17: what is capped shares buffers with its parent",
        (
            Edit(
                "csrc/device/communicator.cpp",
                '    AXO_CHECK(!core_->shares_buffers(), "capped: split_share", "true", "false");\n',
                "",
            ),
        ),
        "cuda",
        "capped_operations_run_beside_those_of_their_parent",
        "operations that share buffers run at once",
    ),
    Defect(
        "18: a least number of thread blocks alone",
        (Edit(CORE, "  if (cap == 0 && options_.min_ctas > 0) config.maxCTAs", "  if (cap < 0) config.maxCTAs"),),
        "cuda",
        "only_the_least_of_the_thread_blocks",
        "ncclCommInitRankConfig",
    ),
    Defect(
        "19: parts of one GPU reach an NCCL that refuses them",
        (
            Edit(
                "csrc/device/rendezvous.cpp",
                "const bool parts = context.nccl().version() >= 23000;",
                "const bool parts = true;",
            ),
        ),
        "cuda",
        "two_ranks_on_one_gpu",
        "invalid usage",
    ),
    Defect(
        "20: transfers take more than is reserved",
        (Edit(CORE, "  while (ctas > 0 && ctas < options_.max_ctas) ctas *= 2;", "  ctas = options_.max_ctas;"),),
        "cuda",
        "a_cap_that_is_no_power_of_two",
        "6 is not 7",
    ),
    Defect(
        "21: a context on GPU 0 for every rank",
        (
            Edit(
                "csrc/device/gpu_runtime.cpp",
                "if (changed_ && runtime_.has_context(previous_)) runtime_",
                "if (changed_) runtime_",
            ),
        ),
        "cuda",
        "no_context_on_a_gpu_that_is_not_the_ranks",
        "has_context",
    ),
    Defect(
        "22: RCCL runs one operation after the other",
        (Edit(CORE, "  if (nccl().orders_launches()) config", "  config"),),
        "hip",
        "configuration_of_every_version",
        "one operation after the other",
    ),
    Defect(
        "23: RCCL is asked to exchange with nobody",
        (Edit("csrc/device/library_call.cpp", "  alone_ = core.size() == 1 && ", "  alone_ = core.size() == 0 && "),),
        "hip",
        "exchanges_of_one_rank",
        "call.rfind",
    ),
    Defect(
        "24: a cap that RCCL does not keep to",
        (
            Edit(
                "csrc/device/nccl_api.h",
                "keeps_caps() const { return vendor_ == GpuVendor::cuda; }",
                "keeps_caps() const { return true; }",
            ),
        ),
        "hip",
        "split_by_color_and_key",
        r"reserved_ctas\(\) == kept\(8\)",
    ),
    Defect(
        "25: parts of one GPU reach an RCCL that refuses them",
        (
            Edit(
                "csrc/device/rendezvous.cpp",
                "const bool parts = context.nccl().version() >= 23000;",
                "const bool parts = context.gpu().vendor() == GpuVendor::hip || context.nccl().version() >= 23000;",
            ),
        ),
        "hip",
        "two_ranks_on_one_gpu",
        "invalid usage",
    ),
    Defect(
        "26: RCCL 2.22 splits with its MSCCL",
        (Edit("csrc/device/nccl_api.cpp", 'setenv("RCCL_MSCCL_ENABLE", "0", 0);', "(void)0;"),),
        "hip",
        "msccl_of_the_rccl_that_crashes_with_it",
        "crashes",
    ),
    Defect(
        "27: a stream that captures waits for its own event",
        (Edit(CORE, "if (last_->event && last_->stream != stream && last_", "if (last_->event && last_"),),
        "hip",
        "one_graph_holds_all_communicators",
        "form a circle",
    ),
    Defect(
        "28: flags beside an RCCL that keeps to no cap",
        (
            Edit(
                "axo_kernels/comm/adapters.py",
                "return () if named or shared or torch.version.hip is not None else CAPS",
                "return () if named or shared else CAPS",
            ),
        ),
        "",
        "tests/kernels/comm/test_device.py::test_rccl_keeps_to_no_cap",
        "caps == ",
    ),
    Defect(
        "29: the XCDs of an MI350 are one",
        (Edit("axo_kernels/gemm/tiles.py", ', "gfx950": ((32, 8),)', ""),),
        "",
        "tests/kernels/gemm/test_matmul.py::test_neighbours_in_the_order_of_tiles_are_on_one_xcd",
        "gfx950",
    ),
)  # fmt: skip
NAMES = [defect.name for defect in DEFECTS]


def run(command: list[str], folder: Path, **variables: str) -> tuple[int, str]:
    done = subprocess.run(
        command, cwd=folder, env=os.environ | variables, capture_output=True, text=True, errors="replace", timeout=600
    )
    return done.returncode, done.stdout + done.stderr


def built(defect: Defect, root: Path) -> Path:
    """A copy of the checkout with the defect, and with what was compiled before: only what was edited compiles anew."""
    for folder in ("csrc", "axo_kernels", "bench", "python", "tests"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for file in ("pyproject.toml", "setup.py"):
        shutil.copy2(ROOT / file, root / file)
    shutil.copytree(ROOT / BUILT, root / BUILT, ignore=shutil.ignore_patterns("*.gcda"))
    for folder in (ROOT / "build").glob("obj-*") if not defect.family else ():
        shutil.copytree(folder, root / "build" / folder.name)
    for edit in defect.edits:
        edit.apply(root)
    return root


def core_objects() -> str:
    return os.environ.get("EXTENSION") or str(ROOT / "build/csrc-tests")


def failure_of(defect: Defect, root: Path) -> str:
    """What the defect's test says."""
    if defect.family:
        code, said = run(["make", "-s", "-C", str(DEVICE_TESTS), "build", f"EXTENSION={core_objects()}"], root)
        assert code == 0, said
        command = [str(root / BUILT / "tests"), defect.family, defect.test]
        code, said = run(command, root, GCOV_PREFIX=str(root / "coverage"))
        found = re.search(rf"^{defect.test} .* FAILED (.*)$|^TIMEOUT in {defect.test}$", said, re.MULTILINE)
    else:
        if any(edit.file.startswith("csrc/") for edit in defect.edits):
            code, said = run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], root)
            assert code == 0, said
        path = f"{root / 'python'}:{root}"
        code, said = run([sys.executable, "-m", "pytest", "-n0", defect.test], root, PYTHONPATH=path)
        found = re.search(rf"^FAILED {re.escape(defect.test)}(?:.|\n)*", said, re.MULTILINE) and re.search(
            r"(?:.|\n)*", said
        )
    assert code != 0 and found, f"with the defect {defect.name!r}, {defect.test} did not fail:\n{said[-3000:]}"
    return found[0]


@pytest.fixture(scope="module")
def everything_built() -> None:
    standin.build()
    command = ["make", "-s", "-j2", "-C", str(DEVICE_TESTS), "build"]
    code, said = run(command, ROOT)
    assert code == 0, said


@pytest.mark.soak
@pytest.mark.timeout(700)
@pytest.mark.parametrize("defect", DEFECTS, ids=NAMES)
def test_a_defect_is_found(defect, tmp_path, everything_built):
    said = failure_of(defect, built(defect, tmp_path))
    assert re.search(defect.says, said), f"{defect.test} failed for another reason:\n{said[-3000:]}"


@pytest.mark.parametrize("defect", DEFECTS, ids=NAMES)
def test_a_defect_can_be_put_back(defect, tmp_path):
    """The edits still fit the sources, the named test is there, and the table in the docs has it."""
    for file in {edit.file for edit in defect.edits}:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, tmp_path / file)
    for edit in defect.edits:
        edit.apply(tmp_path)
    if defect.family:
        named = "".join(path.read_text() for path in (ROOT / DEVICE_TESTS).glob("test_*.cpp"))
        assert f"TEST({defect.test})" in named
    else:
        file, _, name = defect.test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text()
    name = defect.test.rpartition("::")[2]
    assert f"`{name}`" in (ROOT / "docs/notes/proofs.md").read_text()
