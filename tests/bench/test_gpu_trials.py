"""The kernel for Hopper is tried in processes of its own: what one costs that hangs, dies or is late, and no more.

Programs that sleep stand for such kernels; a clock that the test tells says that one has hung.
"""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from axo_kernels.tune.trust import shape_class
from bench import kernels
from bench.lib import table
from bench.lib.table import read_rows
from bench.lib.trials import OutOfTimeError, Trial

from .test_bench_gpu import measure_in_fake_time


def program(*lines):
    """A trial that runs these lines of Python; ``say`` prints a row."""
    say = "say = lambda **row: print(json.dumps(row), flush=True)"
    return [sys.executable, "-c", "\n".join(["import json, sys, time", say, *lines])]


def spoken(*lines, begins=""):
    """A trial that has begun a tile and now runs on, silently; however long its Python takes to start."""
    trial = Trial(program(*lines, begins or BEGINS, "time.sleep(600)"))
    while b"begins" not in os.pread(trial._file.fileno(), 10**6, 0):  # its own place in the file stays where it is
        assert trial.process.poll() is None
        time.sleep(0.01)
    return trial


def long_ago(trial):
    """The same as if its last word were too long ago, by a clock that this tells."""
    trial._started = said = time.time() - 10 * kernels.QUIET
    os.utime(trial._file.fileno(), (said, said))
    return trial


def unhurried():
    return time.perf_counter() + 600


@pytest.fixture
def one(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels.tiles, "HOPPER", kernels.HOPPER)
    return table.Table({"check": "s"}, tmp_path / "kernels.jsonl", earlier=())


TILE = kernels.HOPPER[1].name
BEGINS = f"say(begins='NT {TILE}', tile='{TILE}')"


def test_a_tile_that_hangs_is_left_out_alone(monkeypatch, one):
    """What the trial had found stands, what is no row is shown, and what is behind that tile is tried without it."""
    started = []

    def again(layout, without, smoke):
        started.append((layout, set(without)))
        return Trial(program(f"say(check='{layout} behind', error=0.0, limit=0.5)"))

    monkeypatch.setattr(kernels, "_trial", again)
    noise = "print('.version 8.4' * 20000)"  # more than a pipe holds: a compiler that fails prints its program
    trials = {
        "NN": Trial(program(noise, "say(check='NN', error=0.0, limit=0.5)")),
        "NT": long_ago(spoken("say(check='NT', error=0.0, limit=0.5)")),
        "TN": long_ago(spoken()),
    }
    hung = [trials["NT"], trials["TN"]]
    kernels.tried(trials, unhurried(), one)
    assert [row["check"] for row in one.rows] == ["NN", "NT", "NT behind", "TN behind"]
    assert started == [("NT", {TILE}), ("TN", {TILE})]
    (told,) = one.failed.values()
    assert "TN has said nothing for " in told and f": a kernel that hangs, in NT {TILE}" in told
    assert [trial.process.poll() for trial in hung] == [-9, -9]
    assert [config.name for config in kernels.tiles.HOPPER] == [c.name for c in kernels.HOPPER if c.name != TILE]
    rows = read_rows(one_file(one))
    assert kernels.left_of_hopper(rows) == kernels.tiles.HOPPER, "nor does a run that goes on use it"


def test_a_tile_that_hangs_at_flags_still_multiplies(monkeypatch, one):
    started = []
    spoken_of = f"{TILE}{kernels.AT_FLAGS}"
    monkeypatch.setattr(
        kernels, "_trial", lambda layout, without, smoke: (started.append(set(without)), Trial(program("pass")))[1]
    )
    hangs = long_ago(spoken(begins=f"say(begins='a sum', tile='{spoken_of}')"))
    kernels.tried({"NT": hangs}, unhurried(), one)
    assert started == [{spoken_of}] and kernels.tiles.HOPPER == kernels.HOPPER
    assert list(one.failed) == [f"{kernels.HOPPER_SECTION}: {spoken_of}"]
    assert kernels.left_of_hopper(read_rows(one_file(one))) == kernels.HOPPER
    first = kernels.HOPPER[0].name
    rows = [{"check": f"a sum signal/{chunks} {first}", "error": 0.001, "limit": 0.004} for chunks in (2, 4)]
    assert kernels.right_at_flags([{"check": first, "error": 0.0, "limit": 0.5}, *rows])
    assert not kernels.right_at_flags([]) and not kernels.right_at_flags([*rows, rows[0] | {"error": 1.0}])


def test_what_meets_a_stream_is_walked_through(monkeypatch, capsys):
    """On a CPU, whose flags are the host's, at toy sizes: each tile in turn, one that is left out, one that raises."""
    monkeypatch.setattr(kernels, "MEETING_SIZES", (64, 128, 32))
    call, names = kernels.overlap._call, [config.name for config in kernels.HOPPER]

    def fails(operation, *given):
        config = given[-1].config
        return call(operation, *given) if config is None or config.name != names[2] else 1 / 0

    monkeypatch.setattr(kernels.overlap, "_call", fails)
    for layout, operations in (("NT", ("matmul_all_reduce", "all_gather_matmul")), ("TN", ("matmul_reduce_scatter",))):
        kernels.met(torch.device("cpu"), kernels._Printed(), layout, {names[1] + kernels.AT_FLAGS, names[3]})
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        checks = {row["check"]: row["error"] < row["limit"] for row in rows if "check" in row}
        told = {f"{operation} signal/4 {name}": True for operation in operations for name in names[:1] + names[4:]}
        told |= {f"{each} signal/4 {names[2]}: ZeroDivisionError: division by zero": False for each in operations}
        assert checks == told and sum("begins" in row for row in rows) == len(rows) / 2
        assert {row["tile"] for row in rows if "tile" in row} <= {name + kernels.AT_FLAGS for name in names}


def one_file(one):
    return Path(one._file.name)


def test_a_tile_that_kills_its_device_is_left_out_alone(monkeypatch, one):
    """Its traceback is in the file, since what a trial prints is gone with the machine."""
    monkeypatch.setattr(kernels, "_trial", lambda layout, without, smoke: Trial(program("pass")))
    dies = Trial(program(BEGINS, "say(trace='RuntimeError: illegal address')", "sys.exit(1)"))
    kernels.tried({"NT": dies}, unhurried(), one)
    assert (
        list(one.failed) == [f"{kernels.HOPPER_SECTION}: {TILE}"]
        and len(kernels.tiles.HOPPER) == len(kernels.HOPPER) - 1
    )
    (row,) = (row for row in read_rows(one_file(one)) if "failed" in row)
    assert "NT ended with 1" in row["note"] and "illegal address" in row["trace"]


@pytest.mark.parametrize("hangs", [True, False])
def test_where_no_tile_is_known_the_kernel_is_left_out(one, hangs):
    first = long_ago(Trial(program("time.sleep(600)"))) if hangs else Trial(program("sys.exit(3)"))
    trials = {"NT": first, "TN": Trial(program("time.sleep(600)"))}
    kernels.tried(trials, unhurried(), one)
    (told,) = one.failed.values()
    assert list(one.failed) == [kernels.HOPPER_SECTION]
    assert ("a kernel that hangs" if hangs else "NT ended with 3") in told and TILE not in told
    assert all(trial.process.poll() is not None for trial in trials.values())
    assert kernels.left_of_hopper(read_rows(one_file(one))) == ()


@pytest.mark.parametrize("began", [True, False])
def test_no_time_left_is_nothing_against_a_kernel(one, began):
    """What it has found stands, and a run that goes on tries all tiles."""
    check = "say(check='NT', error=0.0, limit=0.5)"
    trials = {"NT": spoken(check) if began else Trial(program("time.sleep(600)"))}
    trials["TN"] = Trial(program("time.sleep(600)"))
    with pytest.raises(OutOfTimeError) as found:
        kernels.tried(trials, time.perf_counter(), one)
    assert str(found.value) == "NT: no time was left for it" + (f", in NT {TILE}" if began else "")
    assert not one.failed and [row["check"] for row in one.rows] == ["NT"] * began
    assert all(trial.process.poll() is not None for trial in trials.values())
    assert kernels.left_of_hopper(read_rows(one_file(one))) == kernels.tiles.HOPPER == kernels.HOPPER


def test_no_time_left_behind_a_tile_that_hangs(monkeypatch, one):
    """It has failed alone; the others are for a run that goes on, not for a process that nobody would wait for."""
    monkeypatch.setattr(kernels, "_trial", None)  # which is not to be called
    with pytest.raises(OutOfTimeError, match=f"no time was left to try NT behind {TILE}"):
        kernels.tried({"NT": long_ago(spoken())}, time.perf_counter(), one)
    assert list(one.failed) == [f"{kernels.HOPPER_SECTION}: {TILE}"]
    others = tuple(config for config in kernels.HOPPER if config.name != TILE)
    assert kernels.left_of_hopper(read_rows(one_file(one))) == others


def test_a_section_whose_time_is_over_is_left_to_the_same_command(monkeypatch, tmp_path):
    """It is no verdict that the kernel is wrong, but what it has not tried this run does not use."""
    measure_in_fake_time(monkeypatch, {"gemm": 1.0, "overlap": 1.0})
    monkeypatch.setattr(kernels.tiles, "HOPPER", kernels.HOPPER)

    def late(device, table):
        kernels.tried({"NT": Trial(program("time.sleep(600)"))}, 0.0, table)

    monkeypatch.setattr(kernels, "grouped", late)
    assert kernels.main(["--dry", "--out", str(tmp_path)]) == 1 and not kernels.tiles.HOPPER
    rows = read_rows(tmp_path / "kernels.jsonl")
    assert [row["note"] for row in rows if row.get("verdict") is False] == ["all results right: False"]
    assert [row["left_out"] for row in rows if "left_out" in row] == [[kernels.HOPPER_SECTION]]
    seen = []
    monkeypatch.setattr(kernels, "grouped", lambda device, table: seen.append(kernels.tiles.HOPPER))
    assert kernels.main(["--dry", "--out", str(tmp_path)]) == 0 and kernels.tiles.HOPPER == kernels.HOPPER
    assert seen == [kernels.HOPPER], "tried again, with all its tiles"


def test_a_run_without_the_kernel_for_hopper(monkeypatch, tmp_path):
    measure_in_fake_time(monkeypatch, {"gemm": 1.0, "overlap": 1.0})
    monkeypatch.setattr(kernels.tiles, "HOPPER", kernels.HOPPER)
    monkeypatch.setattr(kernels, "grouped", lambda device, table: kernels.tried({}, 0.0, table))
    assert kernels.main(["--dry", "--out", str(tmp_path / "right")]) == 0 and kernels.tiles.HOPPER
    fails = lambda device, table: table.fail(kernels.HOPPER_SECTION, TimeoutError("hangs"))  # noqa: E731
    monkeypatch.setattr(kernels, "grouped", fails)
    assert kernels.main(["--dry", "--out", str(tmp_path / "hangs")]) == 2 and not kernels.tiles.HOPPER


def test_a_product_that_hung_costs_the_tile_that_it_looked_at():
    """All of Hopper's, where it was not looking at one candidate: the bench times them, and the tuner does."""
    product = "NT 4096x4096x4096 bfloat16"

    def left(within):
        return kernels.left_of_hopper([{"failed": product, "cut_off": within}])

    assert left("") == left(f"matmul {product}") == left(f"matmul {product}: times") == ()
    assert left(f"matmul {product}: NT {TILE}") == tuple(c for c in kernels.HOPPER if c.name != TILE)
    assert left(f"matmul {product}: NT tma 128x256x64 g8 w8 s3 p2") == left_of_a_section() == kernels.HOPPER


def left_of_a_section():
    return kernels.left_of_hopper([{"failed": "strategies", "cut_off": ""}, {"failed": "NT", "note": "out of memory"}])


def test_what_is_measured_has_been_tried_in_a_process_of_its_own():
    """With the same tile, borders, length of sums and tiles of a program (132 multiprocessors), and borders as well."""

    def classes(shapes):
        products = [kernels.Product("NT", *sizes, torch.bfloat16) for sizes in shapes]
        choices = [kernels.Choice("triton", "NT", config) for config in kernels.HOPPER]
        return {shape_class(choice, product, 132) for choice in choices for product in products}

    tried = classes(kernels.TRIAL_SIZES)
    assert classes((one.m, one.n, one.k) for one in kernels.shapes(False)) <= tried
    assert {(True, True, True, False, 1), (True, True, True, False, 3)} <= {each[3:] for each in tried}


def test_a_second_run_on_a_gpu_tries_the_kernel_for_hopper_again(monkeypatch, tmp_path):
    """The cache of compiled kernels may be gone with the machine, and trials are what fills it; not where one hung."""
    measure_in_fake_time(monkeypatch, {"gemm": 1.0, "overlap": 1.0})
    started, seen = [], []
    monkeypatch.setattr(kernels.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(kernels, "works", lambda device: True)
    monkeypatch.setattr(kernels, "compile_ahead", lambda jobs, seconds: None)
    killed = []
    process = SimpleNamespace(kill=lambda: killed.append(True))
    monkeypatch.setattr(kernels, "_trial", lambda layout, without, smoke: (started.append(layout), process)[1])
    monkeypatch.setattr(kernels.tiles, "HOPPER", kernels.HOPPER)
    monkeypatch.setattr(kernels, "tried", lambda trials, until, table, smoke: seen.append(set(trials)))
    monkeypatch.setattr(kernels.devices, "target_of", lambda device: kernels.tiles.TARGETS["sm_90"])
    for name in ("gemm", "fp8", "overlap"):  # leave something for the next run
        monkeypatch.setattr(getattr(kernels, name), "measure", lambda *_: 1)
    monkeypatch.setattr(kernels.fp8, "right", lambda *_: None)
    for times in (1, 2):
        kernels.main(["--out", str(tmp_path)])
        assert started == [*kernels.LAYOUTS] * times
        assert seen == [set(kernels.LAYOUTS)] * times
    kernels.main(["--again", "--out", str(tmp_path)])  # on the same machine
    assert len(started) == 6
    lines = (tmp_path / "kernels.jsonl").read_text()
    failed = json.dumps({"note": "hangs", "failed": kernels.HOPPER_SECTION})
    (tmp_path / "kernels.jsonl").write_text(lines + failed + "\n")
    kernels.main(["--out", str(tmp_path)])
    assert len(started) == len(killed) == 6 and len(seen) == 2 and not kernels.tiles.HOPPER
