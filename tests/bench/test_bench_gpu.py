"""The command for a machine with a GPU, end to end on stand-ins and the CPU: ``python -m bench.gpu --walk``.

Oracles are in the scripts: sums written out, on collectives that the stand-in really reduces and moves; fp64 products.
Long because the command has four parts, and what each test plays in fake time is shared.
"""

import ast
import json
import os
import re
import subprocess
import sys
import tarfile
import time
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import device, gpu, gpu_step, kernels, offload
from bench.lib import attempts, page, table
from bench.lib.step_models import serial
from bench.lib.table import read_rows, rows_to_go_on_with
from tests.launcher import Command, run_as_program

# What a machine that has torch, triton and numpy alone lacks. (Torch itself takes yaml where there is one.)
ABSENT = ("litgpt", "lightning", "lightning_fabric", "transformers", "typer", "rich", "matplotlib", "isal")


def fork_the_parts() -> None:
    """``prepare``: parts that take what is imported as it is run in forks. Triton's interpreter is chosen at import."""
    start = attempts.run_within
    sys.modules.update(dict.fromkeys(ABSENT))

    def run(command, **options):
        if command[1:2] != ["-m"] or command[2] == "bench.kernels":
            return start(command, **options)
        part = os.fork()
        if part == 0:
            run_as_program(command[2], command[3:])
        return os.waitstatus_to_exitcode(os.waitpid(part, 0)[1])

    attempts.run_within = run


@pytest.mark.slow
def test_torch_and_triton_are_enough_to_import_every_part():
    """In a process of its own; the walk below is without them too, but for the kernels."""
    absent = (*ABSENT, "yaml")
    parts = ", ".join(f"bench.{part.name}" for part in gpu.PARTS)
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); import bench.gpu, {parts}"
    subprocess.run([sys.executable, "-c", code], cwd=Path(gpu.__file__).parents[1], check=True)


@pytest.mark.slow
def test_walks_through_without_a_gpu(tmp_path):
    """The same code as on a GPU, at toy sizes: every check right, every verdict a line."""
    walk = Command("bench.gpu", "--walk", "--seconds", "900", "--out", str(tmp_path), prepare=fork_the_parts)
    said = walk.communicate(timeout=900)
    assert walk.returncode == 0, said[-8000:]
    assert "0 of 4 parts failed" in said
    header, *rows = [json.loads(line) for line in (tmp_path / "device.jsonl").read_text().splitlines()]
    assert {"bench", "device", "torch", "commit", "date"} <= header.keys() and header["kind"] == "standin"
    for ranks in (1, 2, 4):
        checks = {row["check"]: row["wrong"] for row in rows if row.get("ranks") == ranks}
        assert ("axo all_reduce, pending" in checks) == (ranks < 4), "host time: of one rank, and of two"
        assert (
            ("training on 1x1x2x1, losses as serial" in checks) == ("a killed rank is named" in checks) == (ranks == 2)
        )
        assert {"all_reduce sum", "reduce_scatter max", "scatter", "scaled all_reduce"} <= checks.keys()
        assert ("uneven all_to_all" in checks) == (ranks > 1)
        assert any(name.startswith("graph of 3 communicators") for name in checks)
        assert not any(checks.values()), checks
    assert "overhead over torch's NCCL backend under 3 us a call: not measured" in said
    assert "offload of optimizer, parameters as without: True" in said
    assert re.search(r"losses of axo apart: \S+ \(goal: at most 0.02\): True", said)
    assert re.search(r"losses of axo fp8 apart: \S+ \(goal: at most 0.2\): True", said)
    assert "the bound over Axo's step (goal: at least 0.7): not measured" in said
    assert (tmp_path / "step_trace.json.gz").stat().st_size > 1000
    assert len((tmp_path / "verdicts.txt").read_text().splitlines()) > 30
    logged = (tmp_path / "log.txt").read_text()
    assert "--- gpu_step: at most" in logged and "all results right: True" in logged, "the parts' words too"
    assert len(list(tmp_path.iterdir())) == 7, "with an archive eight, which is all that comes back from a lent machine"
    lines = [json.loads(line) for line in (tmp_path / "kernels.jsonl").read_text().splitlines()]
    verdicts = [line["note"] for line in lines if "verdict" in line]
    assert "all results right: True" in verdicts and "tuned, of torch (goal: at least 1): not measured" in verdicts
    assert sum(verdict.endswith("not measured") for verdict in verdicts) == 2 + 11 + 4 + 3 * 3 * 2 * 3 + 1, (
        "trials of Hopper's kernel, the number of GPT shapes; errors, Triton, Gluon, added, tuned; fp8; "
        "shares x operations x shapes, hidden by "
        "launches and as a graph, and against serial; Gluon at flags"
    )
    checks = [line for line in lines if "check" in line]
    assert len(checks) == 3 * 3 * (3 * 2 + 3) + 3 * 2 * 4 + 1 + 3 * 2 * 2 * 2, (
        "dtypes x layouts x (sizes, epilogues), strategies, rounds, fp8's layouts x scalings x formats x dtypes"
    )


def ended(out):
    """The parts that have come to their end, by what stands in their files."""
    return {part.name for part in gpu.PARTS if any("ended" in row for row in read_rows(out / f"{part.name}.jsonl"))}


def test_parts_fit_into_the_time_and_a_second_run_goes_on(monkeypatch, capsys, tmp_path):
    """A part that runs past its share, and one that dies: reported, the others still run; only those two run again."""
    given = {}

    def run(command, timeout):
        name = command[2].removeprefix("bench.")
        given[name] = (command[3:], timeout)
        if name == "device":
            raise subprocess.TimeoutExpired(command, timeout)
        if name == "kernels":  # comes to its end
            line = json.dumps({"note": "as fast as it should be: False", "verdict": False})
            (tmp_path / "kernels.jsonl").write_text(line + "\n")
        return 3 if name == "kernels" else -11

    arguments = ["--out", str(tmp_path)]
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu.main(arguments)
    assert "no GPU is visible, so nothing is measured; --walk" in capsys.readouterr().err
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu.card, "described", lambda: "a card")
    monkeypatch.setattr(gpu, "environment", lambda device, part: {"kind": device.type})
    monkeypatch.setattr(attempts, "run_within", run)
    assert gpu.main(arguments) == 4
    said = capsys.readouterr().out
    assert "device: stopped after 270 s" in said and "kernels: 3 verdicts failed" in said
    assert "gpu_step: ended early with -11, after nothing" in said
    assert list(given) == ["kernels", "device", "offload", "gpu_step"]
    kernels, seconds = given["kernels"]
    assert float(kernels[kernels.index("--seconds") + 1]) < seconds < gpu.SECONDS < 8 * 60
    assert (tmp_path / "verdicts.txt").read_text().splitlines() == [
        "kernels: as fast as it should be: False",
        "device: stopped after 270 s, after nothing: False",
        "offload: ended early with -11, after nothing: False",
        "gpu_step: ended early with -11, after nothing: False",
    ]
    given.clear()
    assert gpu.main(arguments) == 4 and list(given) == ["device", "offload", "gpu_step"]
    assert "kernels: has ended before" in capsys.readouterr().out
    given.clear()
    assert gpu.main([*arguments, "--fresh"]) == 4 and "kernels" in given
    with pytest.raises(SystemExit):
        gpu.main(["--seconds", "10"])
    given.clear()
    left: dict[str, str] = {}
    assert gpu.run(gpu.PARTS[-1], tmp_path, time.perf_counter() + 1, [], left) == (None, False) and not given
    assert left == {"gpu_step": "not begun: no time was left"}


def test_what_was_measured_elsewhere_is_begun_anew(monkeypatch, tmp_path):
    """A walk, another device, other sources of that part; the same on another day goes on."""
    sources = {part.name: "1" for part in gpu.PARTS}
    machine, given = {"device": "a GPU", "commit": "abc", "sources": sources, "date": "today", "threads": 2}, []

    def run(command, timeout):
        name = command[2].removeprefix("bench.")
        given.append(name)
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"note": f"{len(given)}: True", "verdict": True}) + "\n")
        return 0

    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu.card, "described", lambda: "a card")
    monkeypatch.setattr(gpu, "environment", lambda device, part: machine | {"sources": machine["sources"][part]})
    monkeypatch.setattr(attempts, "run_within", run)
    arguments = ["--out", str(tmp_path)]

    def parts(*options):
        given.clear()
        assert gpu.main([*arguments, *options]) == 0
        return len(given)

    assert parts("--walk") == 4 and parts("--walk") == 0
    assert parts() == 4 and parts() == 0
    machine |= {"date": "tomorrow", "threads": 8, "commit": "def"}  # another commit of the same sources
    assert parts() == 0
    machine["device"] += " other"
    (tmp_path / "kernels.jsonl").write_text("earlier")
    assert parts() == 4
    sources["device"] += " mended"
    assert parts() == 1 and given == ["device"], "of the other parts nothing has changed"
    with tarfile.open(tmp_path / "before.tar") as archive:
        names = [Path(name).name for name in archive.getnames()]
        kept = [archive.extractfile(member).read() for member in archive.getmembers()]
    assert len(names) == 4 + 4 + 1 and b"earlier" in kept, "a walk's, the other device's, the other sources'"
    assert len(list(tmp_path.iterdir())) == 4 + 3, "and a trace of the step: eight files, which is all that comes back"


def test_offload_that_dies_has_no_verdict(monkeypatch, tmp_path):
    """So it is run again, and then its file holds each verdict once."""
    plain = offload.Run.__init__

    def dies(run, case, *rest):
        if case == "activations":
            raise RuntimeError("no kernel image")
        plain(run, case, *rest)

    arguments = ["--walk", "--out", str(tmp_path)]
    whole = offload.main(arguments)
    verdicts = [line for line in read_rows(tmp_path / "offload.jsonl") if "verdict" in line]
    assert whole == 0 and len(verdicts) == 2 * (len(offload.CASES) - 1)
    for begin in (dies, plain):
        monkeypatch.setattr(offload.Run, "__init__", begin)
        with pytest.raises(RuntimeError, match="no kernel image") if begin is dies else nullcontext():
            offload.main(arguments)
        found = [line for line in read_rows(tmp_path / "offload.jsonl") if "verdict" in line]
        assert found == ([] if begin is dies else verdicts)


class Clock:
    """Time that passes where a test says so."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def strftime(self, _):
        return "2026-01-01"


def measure_in_fake_time(monkeypatch, takes):
    """The kernels' bench without its measurements: each appends its name to the list, and takes so many seconds."""
    clock, measured = Clock(), []

    def check(name):
        def run(device, table, *_):
            measured.append(name)
            if takes.get(name) is None:
                raise RuntimeError("no kernel image")
            clock.now += takes[name]
            table.add(check=name, error=0.0, limit=1.0)

        return run

    def product(product, device, table, *_):
        measured.append(product.name)
        clock.now += takes["gemm"]
        table.add(product=product.name, tuned_ratio=1.0, errors={})

    def case(operation, shape, share, counts, dtype, device, table, *_):
        measured.append((operation, share))
        clock.now += takes["overlap"]
        name = "NT " + "x".join(map(str, shape)) + " float32"
        table.add(operation=operation, shape=name, asked_share=share, strategy="split", chunks=2)

    for name in ("numerics", "grouped", "strategies", "rounds", "graphs", "silence"):
        takes.setdefault(name, 1.0)
        monkeypatch.setattr(kernels, name, check(name))
    for module in (gpu, kernels):
        monkeypatch.setattr(module, "environment", lambda device, part: {"device": device.type})
    monkeypatch.setattr(kernels.gemm, "_one", product)
    monkeypatch.setattr(kernels.overlap, "_case", case)
    for module in (kernels, attempts):
        monkeypatch.setattr(module, "time", clock)
    return measured


def kernels_in_this_process(monkeypatch, out, begins=lambda: None):
    """``bench.gpu`` whose other parts end at once; ``begins`` is called before each run of the kernels."""

    def run(command, timeout):
        name = command[2].removeprefix("bench.")
        if name == "kernels":
            begins()
        code = kernels.main(command[3:]) if name == "kernels" else 0
        if name != "kernels":
            (out / f"{name}.jsonl").write_text(json.dumps({"note": "right: True", "verdict": True}) + "\n")
        return code

    monkeypatch.setattr(attempts, "run_within", run)


def test_a_second_run_measures_what_the_first_left_out(monkeypatch, capsys, tmp_path):
    """No product and no case twice, none never; a section that raised is tried again; then there is nothing to do."""
    takes = {"gemm": 100.0, "overlap": 40.0, "grouped": None}
    measured = measure_in_fake_time(monkeypatch, takes)
    kernels_in_this_process(monkeypatch, tmp_path)
    arguments = ["--walk", "--out", str(tmp_path), "--seconds", "400"]
    assert gpu.main(arguments) == 1
    first, seen = list(measured), capsys.readouterr().out
    assert "left out: the kernel for Hopper, 1 of gemm, 8 of overlap, numerics in fp16; the same" in seen
    assert "kernels" not in ended(tmp_path)
    takes["grouped"] = 1.0
    for _ in range(8):
        gpu.main(arguments)
        if "kernels" in ended(tmp_path):
            break
    again = measured[len(first) :]
    assert again[0] == "grouped" and len(measured) == len(set(measured)) + 2, (
        "all else once, numerics in fp16 by itself"
    )
    assert sum(isinstance(name, tuple) for name in measured) == 9 and "TN 64x48x32 float32" in again
    said = (tmp_path / "verdicts.txt").read_text()
    assert "all results right: True" in said and said.count("all results right") == 1
    count = len(measured)
    capsys.readouterr()
    assert gpu.main(arguments) == 0 and len(measured) == count
    assert "kernels: has ended before" in capsys.readouterr().out
    gpu.main([*arguments, "--fresh"])
    assert len(measured) > count and measured[count] == "numerics"


PRODUCT, RATES = "NT 64x48x32 float32", "fp8 NT 64x48x32 bfloat16 a scale a row"
CASE = "matmul_all_reduce 32x32x32 share 0.4"


@pytest.mark.parametrize("kills", [None, PRODUCT, RATES, CASE, "strategies"])
def test_what_raises_leaves_the_rest_their_turn(monkeypatch, tmp_path, kills):
    """A product and a case of each kind: a verdict each, once, and all others measured; what kills the GPU as well.

    That begins the kernels once more in the same call, and once alone.
    """
    measured = measure_in_fake_time(monkeypatch, {"gemm": 1.0, "overlap": 1.0})
    works, tried, runs = [True], [], []
    kernels_in_this_process(monkeypatch, tmp_path, lambda: (works.__setitem__(0, True), runs.append(True)))

    def breaks(module, function, name_of):
        plain = getattr(module, function)

        def run(*given):
            assert works[0], "nothing is begun on a dead device"
            name = name_of(given)
            tried.append(name)
            if name in (PRODUCT, RATES, CASE, kills):
                works[0] = name != kills
                raise RuntimeError("illegal address" if name == kills else "no kernel image")
            plain(*given)

        monkeypatch.setattr(module, function, run)

    breaks(kernels.gemm, "_one", lambda given: given[0].name)
    breaks(kernels.fp8, "_case", lambda given: f"fp8 {given[0].name} a scale a {given[1]}")
    breaks(kernels.overlap, "_case", lambda given: f"{given[0]} 32x32x32 share {given[2]}")
    breaks(kernels, "strategies", lambda given: "strategies")
    for module in (kernels, attempts):
        monkeypatch.setattr(module, "works", lambda device: works[0])
    arguments = ["--walk", "--out", str(tmp_path), "--seconds", "4000"]
    assert gpu.main(arguments) == 1 and "kernels" in ended(tmp_path)
    assert len(runs) == (2 if kills else 1)
    assert len(tried) == len(set(tried)) == 3 + 2 + 9 + 1, "all, and none twice"
    assert {"numerics", "rounds", "silence", "TN 64x48x32 float32", ("all_gather_matmul", 0.8)} <= set(measured)
    said = (tmp_path / "verdicts.txt").read_text().splitlines()
    assert {line for line in said if "RuntimeError" in line or "all results" in line} == {
        f"kernels: {name}: RuntimeError: {'illegal address' if name == kills else 'no kernel image'}: False"
        for name in {PRODUCT, RATES, CASE, kills} - {None}
    } | {f"kernels: all results right: {kills != 'strategies'}"}


@pytest.mark.parametrize("hangs", [PRODUCT, RATES, CASE, "strategies"])
def test_what_a_run_was_killed_in_is_not_tried_again(monkeypatch, tmp_path, hangs):
    """A kernel that hangs, which no exception tells of: the run after measures all else."""
    measured = measure_in_fake_time(monkeypatch, {"gemm": 1.0, "overlap": 1.0})
    kernels_in_this_process(monkeypatch, tmp_path)
    left_behind = {}

    def hang(module, function, name_of):
        plain = getattr(module, function)

        def run(*given):
            if name_of(given) == hangs:
                left_behind.setdefault("lines", (tmp_path / "kernels.jsonl").read_text())
                left_behind["times"] = left_behind.get("times", 0) + 1
            plain(*given)

        monkeypatch.setattr(module, function, run)

    hang(kernels.gemm, "_one", lambda given: given[0].name)
    hang(kernels.fp8, "_case", lambda given: f"fp8 {given[0].name} a scale a {given[1]}")
    hang(kernels.overlap, "_case", lambda given: f"{given[0]} 32x32x32 share {given[2]}")
    hang(kernels, "strategies", lambda given: "strategies")
    arguments = ["--walk", "--out", str(tmp_path), "--seconds", "4000"]
    assert gpu.main(arguments) == 0
    (tmp_path / "kernels.jsonl").write_text(left_behind["lines"])  # as a kill leaves it
    measured.clear()
    assert gpu.main(arguments) == 1 and left_behind["times"] == 1 and ("all_gather_matmul", 0.8) in measured
    said = (tmp_path / "verdicts.txt").read_text()
    assert f"{hangs}: not tried again, since the run before was stopped, or died, in the middle of it: False" in said


def test_parts_of_the_transport_and_of_the_step_have_their_turns(monkeypatch, tmp_path):
    """What raises is a verdict; the rest is measured. A case begins when the model of the one before is gone."""
    calls, alive = [], []

    def in_processes(gpu, size, checks, table):
        calls.append((size, *checks))
        told = [] if checks[0] == "torch" and size == 4 else [f"{check} of it" for check in checks if check != "torch"]
        if size == 1:
            told = told[:1]
        times = {"axo all_reduce": 5.0 + size, "torch NCCL all_reduce": 4.0} if "host time of a call" in checks else {}
        for check, us in [*((each, None) for each in told), *times.items()]:
            table.add(check=check, ranks=size, us=us, wrong=0)
        if size != 2:
            raise RuntimeError("invalid argument")

    monkeypatch.setattr(device, "in_processes", in_processes)
    stand_in = SimpleNamespace(kind="standin", shared=lambda ranks: ranks > 2)
    verdicts = device.measure(stand_in, table.Table({}))
    assert calls == [
        (2, "collectives", "graph", "host time of a call"), (2, "signals", "push"), (2, "training"), (2, "abort"),
        (2, "death"), (4, "torch", "collectives", "graph"), (1, "collectives", "graph", "host time of a call"),
    ]  # fmt: skip
    names = [f"collectives and graph at {ranks} ranks" for ranks in (1, 2, 4)]
    assert [verdicts[name] for name in names[:2]] == [False, True]
    assert verdicts[names[2]].startswith("not measured: torch's own backend does not run so: "), "no fault of ours"
    assert verdicts["collectives, graph, host time at 1 ranks: RuntimeError: invalid argument"] is False
    ours = [name for name, verdict in verdicts.items() if verdict is False and "overhead" not in name]
    assert len(ours) == 2
    overhead = "overhead over torch's NCCL backend under 3 us a call"
    assert verdicts[f"{overhead}: 3.00"] is False, "the figure of two ranks counts, not that of one"
    told = [{"check": "a killed rank is named", "ranks": 2, "wrong": wrong} for wrong in (0, 1)]
    alone = device.alone_at_two(told)
    assert alone["two ranks: a killed rank is named, 2 checks"] is False
    assert alone["two ranks: sums by push, 0 checks"] == "not measured"
    calls.clear()
    stand_in.shared = lambda ranks: ranks > 1
    assert f"{overhead}, two ranks on one GPU: 3.00" in device.measure(stand_in, table.Table({}), smoke=True)
    assert calls[0][:2] == (2, "torch") and {size for size, *_ in calls} == {2}
    alone = "not measured: one rank takes another path in NCCL (5.00 us there)"
    assert device.judged({1: 5.0}) == {overhead: alone}
    assert device.judged({1: 5.0, 2: 2.9}) == {f"{overhead}: 2.90": True}
    assert device.judged({2: None}) == device.judged({}) == {overhead: "not measured"}

    def layers(*_):
        raise RuntimeError("no kernel image")

    class Model:
        def __init__(self):
            self.itself = self
            alive.append(weakref.ref(self))

    def step(comms, case, *_):
        assert all(model() is None for model in alive)
        Model()
        if case == "gpt h=32":
            raise RuntimeError("out of memory")
        return {"torch": (1.0, 0.0), "axo": (1.0, 0.0)}

    monkeypatch.setattr(gpu_step, "layers", layers)

    def profile(comms, sizes, path):
        assert len(alive) == 2 and sizes is gpu_step.TOY_STEPS["gpt h=32"], "behind all that is measured"
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

    monkeypatch.setattr(gpu_step, "step", step)
    monkeypatch.setattr(gpu_step, "profile", profile)
    assert gpu_step.main(["--walk", "--out", str(tmp_path)]) == 3 and len(alive) == 2
    notes = [line["note"] for line in read_rows(tmp_path / "gpu_step.jsonl") if "verdict" in line]
    assert {"layers: RuntimeError: no kernel image: False", "gpt h=32: RuntimeError: out of memory: False"} <= {*notes}
    assert {"begun": "gpt h=32"} in read_rows(tmp_path / "gpu_step.jsonl"), "what a kill leaves"
    assert "a profile: RuntimeError: CUPTI_ERROR_INSUFFICIENT_PRIVILEGES: False" in notes
    assert "gpt h=32 recomputed, losses of axo apart: 0.0e+00 (goal: at most 0.02): True" in notes


def test_processes_that_measure_together_have_a_limit(monkeypatch):
    """Of the time, and of how they end; what they had said is in the table."""
    stand_in = device.StandIn()
    monkeypatch.setattr(device, "TOGETHER_SECONDS", 0.0025)
    with pytest.raises(RuntimeError, match=r"2 ranks did not end within 0\.0025 s: rank 0 has said nothing"):
        device.in_processes(stand_in, 2, ("graph",), table.Table({}))
    monkeypatch.setattr(device, "TOGETHER_SECONDS", 60)
    monkeypatch.setattr(device.sys, "executable", "false")
    with pytest.raises(RuntimeError, match="rank 0 of 2 ended with 1"):
        device.in_processes(stand_in, 2, ("graph",), table.Table({}))


def test_ranks_of_one_gpu_are_hosts_of_their_own(monkeypatch):
    """As the library takes it: another host each, over the loopback; on GPUs of their own nothing is set."""
    monkeypatch.setattr(device.torch.cuda, "device_count", lambda: 1)
    one = device.Gpu()
    found = [one.environment(rank, 4) for rank in range(4)]
    assert len({each["NCCL_HOSTID"] for each in found}) == 4 and {each["LOCAL_RANK"] for each in found} == {"0"}
    assert {each["NCCL_SOCKET_IFNAME"] for each in found} == {"lo"} and one.place(3, 4) == torch.device("cuda", 0)
    monkeypatch.setattr(device.torch.cuda, "device_count", lambda: 4)
    assert not any("NCCL" in name for name in one.environment(3, 4)) and one.place(3, 4) == torch.device("cuda", 3)


def test_the_page_says_what_was_measured_and_what_was_not(tmp_path):
    """As committed: of the committed results. Of a GPU's each line, bad ones too; a walk's fill no row."""
    root, written = Path(gpu.__file__).parents[1], tmp_path / "gpu.md"
    gpu.main(["--out", str(root / "bench/results/gpu"), "--page", str(written)])
    assert written.read_text() == (root / "docs/gpu.md").read_text(), "the page is of other results"
    empty = page.page(None)
    rows = [{"bench": "right", "kind": "cuda", "device": "a GPU", "date": "today", "commit": "abc", "torch": "2.11"}]
    rows += [{"note": f"{name}: {verdict}", "verdict": verdict} for name, verdict in (
        ("all results right", True), ("tuned at worst, of torch: 0.940 (goal: at least 0.99)", False),
    )]  # fmt: skip
    write = lambda: (tmp_path / "kernels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))  # noqa: E731
    write()
    assert gpu.main(["--out", str(tmp_path), "--page", str(written)]) == 0
    found = written.read_text()
    assert "- `bench.kernels`: a GPU, today, torch 2.11, commit abc" in found and "Nothing yet" not in found
    assert "| tuned at worst, of torch: 0.940 (goal: at least 0.99) | no |" in found and "right | yes |" in found
    rows += [{"note": "an odd part: RuntimeError: no: False", "verdict": False}]
    write()
    gpu.main(["--out", str(tmp_path), "--page", str(written)])
    assert "| `bench.kernels` | an odd part: RuntimeError: no | no |" in written.read_text(), "whatever else failed"
    assert found.count("not measured") == empty.count("not measured") - 2 > 10
    rows[0]["kind"] = "cpu"
    write()
    gpu.main(["--out", str(tmp_path), "--page", str(written)])
    assert written.read_text() == empty and "Nothing yet" in empty


def test_no_more_than_eight_files_whatever_lies_there(tmp_path):
    for name in ("kernels.jsonl", "kernels.swap", "core.1", "log.txt", "verdicts.txt", "a", "b", "c", "d", "e"):
        (tmp_path / name).write_text(name)
    gpu.keep_to_eight(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"kernels.jsonl", "log.txt", "verdicts.txt", "before.tar"}
    with tarfile.open(tmp_path / "before.tar") as archive:
        assert len(archive.getnames()) == 7


def test_weights_are_drawn_on_the_device():
    """Billions of numbers of a CPU's generator take longer than what is measured with them."""
    sizes = gpu_step.TOY_STEPS["gpt h=32"]
    model = serial(sizes, torch.device("meta"))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    untouched = torch.get_rng_state()
    assert torch.equal(untouched, torch.Generator().manual_seed(0).get_state())


def test_a_case_over_real_ranks_is_not_skipped(monkeypatch):
    """The others are in the middle of it: the rank that failed ends, and they hear of that."""

    def dies(*_):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(kernels.overlap, "_case", dies)
    shapes, options, one = [(32, 32, 32)], SimpleNamespace(seconds=60.0), table.Table({})
    cpu, dtype = gpu.torch.device("cpu"), gpu.torch.float32
    assert kernels.overlap.measure(shapes, [0.2], [2], dtype, cpu, one, options) == 0 and len(one.failed) == 3
    with pytest.raises(RuntimeError, match="no kernel image"):
        kernels.overlap.measure(shapes, [0.4], [2], dtype, cpu, one, options, comm=object())


def test_whether_a_device_works(monkeypatch):
    def dies(device):
        raise RuntimeError("illegal address")

    assert attempts.works(gpu.torch.device("cpu"))
    monkeypatch.setattr(gpu.torch.cuda, "synchronize", dies)
    assert attempts.works(gpu.torch.device("cpu")) and not attempts.works(gpu.torch.device("cuda"))


def test_sources_are_those_that_are_run(tmp_path):
    """Their text and their names; the committed state does not matter, nor does what is not run."""

    def digest():
        return table.sources([tmp_path])

    assert {"sources", "commit"} <= table.environment(gpu.torch.device("cpu")).keys()
    (tmp_path / "one.py").write_text("a")
    found = [digest()]
    (tmp_path / "results.jsonl").write_text("b")
    assert digest() == found[0]
    (tmp_path / "one.py").write_text("b")
    found.append(digest())
    (tmp_path / "one.py").rename(tmp_path / "two.py")
    found.append(digest())
    assert len(set(found)) == 3


@pytest.mark.slow
def test_what_a_part_imports_is_in_its_digest():
    """So that what is mended in it is measured anew."""
    code = (
        "import importlib, os, sys\n"
        "from bench.lib.table import RUN_BY, _run_by\n"
        "from pathlib import Path\n"
        "for part in RUN_BY:\n"
        "    if os.fork() == 0:\n"
        "        importlib.import_module(f'bench.{part}')\n"
        "        rooms = ('bench', 'axo_kernels') if part == 'kernels' else ('bench', 'axo_kernels', 'axo')\n"
        "        mine = [module for name, module in sys.modules.items() if name.split('.')[0] in rooms]\n"
        "        files = [Path(module.__file__) for module in mine]\n"
        "        known = _run_by(part)\n"
        "        print(part, len(files), [file.name for file in files\n"
        "            if file not in known and not set(file.parents) & set(known)], flush=True)\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(gpu.__file__).parents[1], capture_output=True, text=True
    )
    rest = {"__init__.py"}
    found = [line.split(" ", 2) for line in done.stdout.splitlines()]
    assert [part for part, *_ in found] == [part.name for part in gpu.PARTS], done.stderr
    for part, count, missing in found:
        assert int(count) > 10 and set(ast.literal_eval(missing)) <= rest, (part, missing)


def test_what_is_gone_on_with(tmp_path):
    """Rows of the same device, versions and sources, of a run that left something out or was killed; nothing else."""
    path, known = tmp_path / "kernels.jsonl", {"device": "a GPU", "sources": "abc", "date": "today"}
    row, head = (
        {"check": "NN", "error": 0.0},
        {"bench": "right", "date": "yesterday", "device": "a GPU", "sources": "abc"},
    )
    verdict, left = {"note": "right: False", "verdict": False}, {"note": "left out: gemm", "left_out": ["gemm"]}
    ended = {"note": "numerics: ended", "section": "numerics"}
    failed = {"note": "NT: OutOfMemoryError", "failed": "NT"}

    def found(*lines, torn="", known=known):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines) + torn)
        return rows_to_go_on_with(path, known)

    assert found(head, row, failed, {"bench": "gemm"}, left, verdict) == [row, failed]
    assert found(head, row, ended, {"bench": "gemm"}, left, verdict) == [row, ended]
    assert [json.loads(line) for line in path.read_text().splitlines()] == [head, row, ended]
    assert found(head, row, torn='{"check": "NT 1') == [row], "killed while it wrote"
    for lines, changed in (([head, row, verdict], {}), ([head, row, left], {"sources": "def"}), ([], {})):
        assert found(*lines, known=known | changed) == [] and not path.exists()
    assert rows_to_go_on_with(path, known) == []
    begun, over = {"begun": "NT"}, {"over": "NT"}
    assert found(head, begun, row, over) == [row]
    *rows, cut_off = found(head, {"begun": "NN"}, {"over": "NN"}, begun, row)
    assert rows == [row] and cut_off["failed"] == "NT" and "NT: not tried again" in cut_off["note"]
    assert found(head, row, cut_off) == [row, cut_off], "nor by a third run"
    *_, within = found(head, begun, {"begins": "one tile"}, {"begins": "another"})
    assert within["cut_off"] == "another" and within["note"].endswith("in the middle of it, at another")


def test_an_error_leaves_its_traceback(capsys, tmp_path):
    """In the file and on the screen. In a line, how it begins and how it ends: Triton says what is wrong last."""

    def compiles():
        raise ValueError("PassManager::run failed\n  at 12:3\nptxas fatal: not enough registers\n")

    one = table.Table({}, tmp_path / "kernels.jsonl", earlier=())
    assert attempts.attempt("NT", compiles, torch.device("cpu"), one)
    assert one.failed == {"NT": "NT: ValueError: PassManager::run failed ... ptxas fatal: not enough registers"}
    verdicts = {}
    kernels.section("numerics", compiles, torch.device("cpu"), one, verdicts)
    found = [line for line in read_rows(tmp_path / "kernels.jsonl") if "trace" in line]
    assert len(found) == 2 and all("in compiles" in line["trace"] for line in found) and len(verdicts) == 1
    assert capsys.readouterr().out.count("Traceback") == 2
