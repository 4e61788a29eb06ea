"""What hangs or dies on a GPU costs that alone, and leaves what mends it: programs that sleep stand for such kernels.

Each is a process of its own, whose end and whose output are looked at.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from axo_kernels.fused.strategies import FusedPlan
from bench import device, gpu, kernels
from bench.lib import attempts, card, fp8, log, numerics, table, verdicts
from bench.lib.table import read_rows
from bench.lib.trials import Trial

from .test_bench_gpu import kernels_in_this_process, measure_in_fake_time

ROOT = Path(gpu.__file__).parents[1]


def test_a_case_that_hangs_ends_its_process(tmp_path):
    """Which says where it is, and has named in the file what it was at."""
    path = tmp_path / "kernels.jsonl"
    code = (
        "import pathlib, time, torch\n"
        "from bench.lib import attempts, table\n"
        f"one = table.Table({{}}, pathlib.Path({str(path)!r}), earlier=())\n"
        "def hangs():\n    one.begins('a tile')\n    time.sleep(600)\n"
        "with attempts.bounded('quick', 0.2, torch.device('cuda')):\n    pass\n"
        "with attempts.bounded('slow', 0.2, torch.device('cpu')):\n    time.sleep(0.5)\n"
        "attempts.attempt('NT', hangs, torch.device('cuda'), one, 0.2)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == attempts.HUNG and "NT: has not ended after 0.2 s" in done.stdout
    assert "in hangs" in done.stderr
    assert table.under_way(read_rows(path)) == {"NT": "a tile"}


def test_a_part_that_is_late_says_where_it_is(monkeypatch, tmp_path, capfd):
    """By a signal that Python answers with its threads; one that answers to nothing is killed.

    Its time is over when it has said that it is inside of its product, by a file.
    """
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")
    there, started = tmp_path / "there", []

    class Late(subprocess.Popen):
        def __init__(self, *given, **more):
            super().__init__(*given, **more)
            started.append(self)

        def wait(self, timeout=None):
            if timeout != 60.0:
                return super().wait(timeout)
            while not there.exists():
                assert self.poll() is None
                time.sleep(0.01)
            raise subprocess.TimeoutExpired(self.args, timeout)

    hangs = f"import time\ndef product():\n    open({str(there)!r}, 'w').close()\n    time.sleep(600)\n"
    assert attempts.run_within([sys.executable, "-c", "raise SystemExit(3)"], 60) == 3
    for deaf in ("", "import faulthandler, signal; faulthandler.disable(); signal.signal(6, signal.SIG_IGN)\n"):
        monkeypatch.setattr(attempts, "_LEAVING", 0.5 if deaf else 600.0)
        there.unlink(missing_ok=True)
        with monkeypatch.context() as patched, pytest.raises(subprocess.TimeoutExpired):
            patched.setattr(attempts.subprocess, "Popen", Late)
            attempts.run_within([sys.executable, "-c", hangs + deaf + "product()"], 60.0)
        assert started[0].wait() == (-signal.SIGKILL if deaf else -signal.SIGABRT)
        assert ("in product" in capfd.readouterr().err) == (not deaf)
        started.clear()


def test_what_the_driver_does_not_let_go_of_is_left(monkeypatch, capsys):
    """Of a trial, of what compiles and of ranks that measure together: a process that no kill ends stands for it."""

    class Held(subprocess.Popen):
        def __init__(self, command, **more):
            super().__init__([sys.executable, "-c", "import time; time.sleep(600)"], **more)
            held.append(self)

        def kill(self):
            pass

        def wait(self, timeout=None):
            assert timeout is not None, "it would never come back"
            raise subprocess.TimeoutExpired(self.args, timeout)

    held, stand_in = [], device.StandIn()  # it is built by a compiler
    monkeypatch.setattr(subprocess, "Popen", Held)
    try:
        Trial(["a trial"]).kill()
        kernels.compile_ahead(2, 0.0)
        monkeypatch.setattr(device, "TOGETHER_SECONDS", 0.0)
        with pytest.raises(RuntimeError, match="2 ranks did not end within"):
            device.in_processes(stand_in, 2, ("graph",), table.Table({}))
    finally:
        for process in held:
            os.kill(process.pid, signal.SIGKILL)
            super(Held, process).wait()
    assert capsys.readouterr().out.count("does not end") == len(held) == 5


def test_the_debugger_looks_at_what_hangs(monkeypatch, tmp_path, capfd):
    """Where it is installed: a program of its name stands for it."""
    attempts.show_where(1)
    assert capfd.readouterr().out == ""
    debugger = tmp_path / "cuda-gdb"
    debugger.write_text('#!/bin/sh\necho "$@"\n')
    debugger.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    attempts.show_where(17)
    assert capfd.readouterr().out == "-p 17 -batch -ex info cuda kernels -ex info cuda warps\n"


def test_kernels_that_hang_are_begun_once_more(monkeypatch, tmp_path, capsys):
    """While their time lasts, each time without what hung; not where nothing new has stopped them."""
    measure_in_fake_time(monkeypatch, {"gemm": 1.0, "overlap": 1.0})
    cut, given, hangs = [], [], ["NN 64x48x32 float32", "TN 64x48x32 float32"]
    kernels_in_this_process(monkeypatch, tmp_path)
    plain, product = attempts.run_within, kernels.gemm._one

    def one(asked, *rest):
        if asked.name in hangs and asked.name not in cut:
            cut.append(asked.name)
            raise SystemExit(attempts.HUNG)
        product(asked, *rest)

    def run(command, timeout):
        given.append(command[2:])
        try:
            return plain(command, timeout)
        except SystemExit as end:
            path = tmp_path / "kernels.jsonl"  # as a process leaves it that has ended itself
            path.write_text("".join(line for line in path.open() if '"over": "' + cut[-1] not in line))
            return end.code

    monkeypatch.setattr(kernels.gemm, "_one", one)
    monkeypatch.setattr(attempts, "run_within", run)
    arguments = ["--walk", "--out", str(tmp_path), "--seconds", "4000"]
    assert gpu.main(arguments) == 1 and cut == hangs
    assert ["--again" in command for command in given if "bench.kernels" in command] == [False, True, True]
    said = (tmp_path / "verdicts.txt").read_text()
    for name in hangs:
        assert (
            f"kernels: {name}: not tried again, since the run before was stopped, or died, in the middle of it: F"
            in said
        )
    assert "ended early" not in said and "all results right: True" in said and '"asked_share": 0.8' in lines(tmp_path)
    shown = capsys.readouterr().out
    assert f"kernels: ended early with {attempts.HUNG}, in the middle of {hangs[0]}" in shown


def lines(out):
    return (out / "kernels.jsonl").read_text()


CHECKS = {"check": "s", "error": ".1e", "limit": ".1e"}


@pytest.mark.parametrize("dies", [False, True])
def test_a_check_that_raises_leaves_the_others_their_turn(monkeypatch, dies):
    """Of the kernels, of fp8 and of the strategies; where the device works no more, the section ends and names it."""
    cpu, plain = torch.device("cpu"), numerics.matmul

    def gelu_does_not_compile(*given, activation=None, **rest):
        if activation == "gelu":
            raise RuntimeError("PassManager::run failed")
        return plain(*given, activation=activation, **rest)

    monkeypatch.setattr(numerics, "matmul", gelu_does_not_compile)
    monkeypatch.setattr(attempts, "works", lambda device: not dies)
    one = table.Table(CHECKS)
    whole = numerics.numeric_cases
    few = lambda dtype, dry: [case for case in whole(dtype, dry) if case.product.layout == "NT"]  # noqa: E731
    monkeypatch.setattr(numerics, "numeric_cases", few)
    only = [torch.float32]
    gelu = "numerics: NT 101x13x97 float32 gelu"
    with pytest.raises(RuntimeError, match=f"stopped working in {gelu}") if dies else nullcontext():
        numerics.numerics(cpu, one, True, only)
    assert len(one.rows) == 3 * 2 + (0 if dies else 2) and list(one.failed) == [gelu]
    if dies:
        return
    again = table.Table(CHECKS, earlier=[{"failed": gelu, "note": one.failed[gelu]}])
    numerics.numerics(cpu, again, True, only)
    assert len(again.rows) == len(one.rows), "not once more"

    def not_to_fp32(left, right, dtype):
        return raises() if dtype == torch.float32 else multiply(left, right, dtype)

    monkeypatch.setattr(fp8.fp8, "multiply", not_to_fp32)
    fp8.right(cpu, rows := table.Table(CHECKS), True)
    assert len(rows.rows) == len(rows.failed) == 12

    call = kernels.overlap._call
    monkeypatch.setattr(
        kernels.overlap, "_call", lambda *given: raises if given[-1] == FusedPlan("split", 4) else call(*given)
    )
    kernels.strategies(cpu, rows := table.Table(CHECKS), True)
    assert len(rows.failed) == 3 and len(rows.rows) == 3 * 7
    judged = kernels_with(
        monkeypatch, lambda device, table, dry, dtypes: kernels.case("numerics: NT", raises, device, table)
    )
    assert judged["all results right"] is False and judged["numerics: NT: RuntimeError: no kernel image"] is False


multiply = fp8.fp8.multiply


def raises(*_):
    raise RuntimeError("no kernel image")


def kernels_with(monkeypatch, numerics):
    """The verdicts of the kernels' bench with another first section."""
    measure_in_fake_time(monkeypatch, {"gemm": 1.0, "overlap": 1.0})
    monkeypatch.setattr(kernels, "numerics", numerics)
    found = {}
    monkeypatch.setattr(table.Table, "judge", lambda table, verdicts: found.update(verdicts) or 0)
    with tempfile.TemporaryDirectory() as out:
        kernels.main(["--dry", "--out", out])
    return found


class Nvml:
    """Stands for the driver's library: calls return 0 and write where they are told to."""

    VALUES = {"nvmlDeviceGetClockInfo": 1755, "nvmlDeviceGetPowerUsage": 654321, "nvmlDeviceGetTemperature": 61}  # noqa: RUF012

    def __getattr__(self, name):
        def call(*given):
            if name == "nvmlDeviceGetHandleByPciBusId_v2":
                assert given[0] == b"00000000:1b:00.0"
            if name == "nvmlDeviceGetTemperature":
                return 3  # not supported
            if name in self.VALUES:
                given[-1]._obj.value = self.VALUES[name]
            if name == "nvmlDeviceGetCurrentClocksThrottleReasons":
                given[-1]._obj.value = 4
            return 0

        return call


def test_what_the_card_says_of_itself(monkeypatch):
    """Through the driver's library, where it has one; nothing else is needed, and nothing fails without it."""
    place = torch.device("cuda", 0)
    one = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(card.torch.cuda, "get_device_properties", lambda device: one)

    def none(name):
        raise OSError(name)

    for library, found in ((none, {}), (lambda name: Nvml(), {"sm_mhz": 1755, "watts": 654.321, "throttled": "0x4"})):
        card._card.cache_clear()
        monkeypatch.setattr(card.ctypes, "CDLL", library)
        assert card.state(place) == found
    card._card.cache_clear()
    monkeypatch.setenv("PATH", "")
    assert card.state(torch.device("cpu")) == {} and card.described() == "nvidia-smi: FileNotFoundError"


def test_an_environment_names_what_is_compared_with(monkeypatch):
    """cuBLAS and NCCL, where there are any: a share of torch's is one of a version of these."""
    assert table._libraries(torch.device("cpu")) == {}
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    library = SimpleNamespace(cublasLtGetVersion=lambda: 130002)
    library.cublasLtGetVersion.restype = None
    names = []
    monkeypatch.setattr(table.ctypes, "CDLL", lambda name: (names.append(name), library)[1])
    assert table._libraries(torch.device("cuda")) == {"nccl": "2.28.9", "cublas": "130002"}
    assert names == ["libcublasLt.so.13"]


def test_a_rival_from_elsewhere_says_why_it_is_missing(monkeypatch):
    """CuPy, in the row: what is printed alone is nobody's when the machine is gone."""
    product, told = kernels.Product("NT", 64, 48, 32, torch.bfloat16), []
    on_gpu = SimpleNamespace(is_cuda=True)
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert kernels.gemm._cupy(on_gpu, on_gpu, product, told.append) is None and not told, "not installed"

    class Cupy:
        def find_spec(self, name, path=None, target=None):
            if name == "cupy":
                raise ImportError("libcublas.so.13: cannot open shared object file")

    monkeypatch.delitem(sys.modules, "cupy")
    monkeypatch.setattr(sys, "meta_path", [Cupy(), *sys.meta_path])
    assert kernels.gemm._cupy(on_gpu, on_gpu, product, told.append) is None
    assert told == ["not measured: ImportError: libcublas.so.13: cannot open shared object file"]


def test_a_section_goes_on_behind_the_check_that_hung(tmp_path):
    """It has no end, so it runs again; what it was in the middle of is not tried."""
    path, known = tmp_path / "kernels.jsonl", {"device": "a GPU"}
    begun = ["numerics", "numerics: NT", "numerics: NN"]
    lines = [
        known | {"bench": "right"},
        {"begun": begun[0]},
        {"begun": begun[1]},
        {"over": begun[1]},
        {"begun": begun[2]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (row,) = table.rows_to_go_on_with(path, known)
    assert row["failed"] == "numerics: NN"


def test_a_rival_that_raises_leaves_the_others_their_times(monkeypatch):
    """And the row says why it has none; where torch's own raises, or the device is dead, the product has failed."""
    cpu, product = torch.device("cpu"), kernels.Product("NT", 64, 48, 32, torch.float32)
    monkeypatch.setattr(kernels.gemm, "runner", lambda *given: raises)
    monkeypatch.setattr(kernels.gemm.Tuner, "choose", lambda *given: kernels.Choice("vendor", "NN"))
    rows = table.Table(kernels.gemm.COLUMNS)
    assert kernels.gemm.measure([product], cpu, rows, 3, 8, 60.0) == 0 and not rows.failed
    (row,) = rows.rows
    assert row["tuned_ratio"] is None and row["left_out"] == [["tuned", "RuntimeError: no kernel image"]]
    assert row["torch_tflops"] > 0 and row["right"]
    judged = verdicts.speed([row | {"triton_ratio": 1.0}], [product], 132)
    assert judged["tuned at worst, of torch (goal: at least 0.99)"] == "not measured"
    monkeypatch.setattr(kernels.gemm.Tuner, "choose", lambda *given: kernels.Choice("vendor", "NT"))
    kernels.gemm.measure([product], cpu, rows := table.Table(kernels.gemm.COLUMNS), 3, 8, 60.0)
    assert rows.rows[0]["tuned_ratio"] == 1.0 and list(rows.rows[0]["seconds"]) == ["torch"], "it is the same call"
    monkeypatch.setattr(kernels.gemm.Tuner, "choose", lambda *given: kernels.Choice("vendor", "NN"))
    monkeypatch.setattr(kernels.gemm, "works", lambda device: False)
    kernels.gemm.measure([product], cpu, rows := table.Table(kernels.gemm.COLUMNS), 3, 8, 60.0)
    assert rows.failed == {product.name: f"{product.name}: RuntimeError: tuned: RuntimeError: no kernel image"}


def test_what_is_said_is_in_the_log(tmp_path):
    """By this process and by those that it starts, on both streams, also what a killed one has not flushed."""
    path = tmp_path / "log.txt"
    child = "import os, sys; print('a child'); print('its error', file=sys.stderr); os.kill(os.getpid(), 9)"
    code = (
        "import pathlib, subprocess, sys\nfrom bench.lib.log import logged\n"
        f"with logged(pathlib.Path({str(path)!r})):\n    print('the parent')\n"
        f"    subprocess.run([sys.executable, '-c', {child!r}])\nprint('afterwards')\n"
    )
    for _ in (1, 2):
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
        assert done.stdout == "the parent\na child\nits error\nafterwards\n", done.stderr
    assert path.read_text() == "the parent\na child\nits error\n" * 2, "a second run goes on with it"


def test_a_log_keeps_its_beginning_and_its_end(capfd, tmp_path):
    path = tmp_path / "log.txt"
    with log.logged(path, 4000):
        os.write(1, b"begins " + b"a" * 993 + b"b" * 6000 + b"ends" * 10)
    said, screen = path.read_bytes(), capfd.readouterr().out
    whole = said.startswith(b"begins a"), said.endswith(b"b" + b"ends" * 10), b"bytes left out" in said
    assert whole == (True, True, True) and len(said) <= 4000 and len(screen) == 7040


def test_what_says_most_is_measured_first():
    """Squares whose speed is known of every library, then all kinds of a hidden size; in the end all of them, once."""
    shapes = kernels.shapes(False)
    assert [(one.layout, one.m, one.n, one.k) for one in shapes[:6]] == [
        (layout, size, size, size) for size in (8192, 4096) for layout in kernels.LAYOUTS
    ]
    kinds = [layer.products(torch.bfloat16).values() for layer in kernels.layers("gpt-20b", (1, 1, 1), 4096)]
    assert shapes[6:18] == [product for each in kinds for product in each]
    assert len(shapes) == len(set(shapes)) == 36


def test_products_leave_the_others_their_time(monkeypatch, tmp_path):
    """Overlap has goals as well: of 235 s the products get what is left beside its part and that of fp8."""
    measure_in_fake_time(monkeypatch, {"gemm": 70.0, "overlap": 4.0})
    given = {}

    def gives(module, seconds_of):
        plain = module.measure

        def measure(*rest, **more):
            given[module.__name__] = seconds_of(rest)
            return plain(*rest, **more)

        monkeypatch.setattr(module, "measure", measure)

    gives(kernels.gemm, lambda rest: rest[5])
    gives(kernels.fp8, lambda rest: rest[4])
    gives(kernels.overlap, lambda rest: rest[6].seconds)
    kernels.main(["--dry", "--seconds", "241", "--out", str(tmp_path)])
    gemm, fp8_times, overlap = given.values()
    assert gemm == 235 - 55 and overlap >= 235 - 210 and fp8_times == 0.4 * 25, given
    kernels.main(["--dry", "--seconds", "46", "--out", str(tmp_path / "short")])
    assert given["bench.gemm"] == 0.4 * 40


def test_a_process_that_ends_with_its_parent():
    """Else one that hangs inside a kernel would have half of the GPU's time for as long as the machine runs."""
    held, open_there = os.pipe()
    parent = os.fork()
    if parent == 0:
        if os.fork() == 0:
            attempts.end_with_parent()
            os.write(open_there, b"here")
            kernels.time.sleep(600)
        os.read(held, 4)
        os._exit(0)
    os.close(open_there)
    assert os.waitpid(parent, 0)[1] == 0
    assert os.read(held, 1) == b"", "the pipe ends with its last holder"
    os.close(held)
