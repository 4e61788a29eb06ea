"""Flight files: written by ranks on SIGUSR1 and on failure, and what ``axo info --flight`` says of them.

The oracle of the report is a set of files made here, whose late and missing ranks are known.
"""

import json
import os
import signal
import time

import pytest
import torch

import axo
from axo.comm import flight
from tests.cli.test_cli import run_axo
from tests.launcher import rank_outcomes, run_ranks


def record(rank, sequence, issued, **changed):
    fields = {
        "communicator": "x", "id": "7", "rank": rank, "size": 3, "world_rank": 2 * rank, "host": "a", "pid": 100 + rank,
        "op": "all_reduce", "sequence": sequence, "dtype": "float32", "count": 4, "reduce": "sum", "root": None,
        "tag": 0, "state": "done", "issued": issued, "started": issued, "ended": issued + 0.5, "written": 20.0,
        "epoch": 1000.0, "failure": None,
    }  # fmt: skip
    return fields | changed


def write(folder, name, records):
    path = folder / name
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


@pytest.fixture
def files(tmp_path):
    """Rank 1 comes 0.25 s after the others to #0; rank 2 never comes to #1, and the others wait."""
    waiting = {"state": "running", "ended": None}
    return [
        write(tmp_path, "0", [record(0, 0, 10.0), record(0, 1, 12.0, **waiting)]),
        write(tmp_path, "1", [record(1, 0, 10.25), record(1, 1, 12.5, **waiting)]),
        write(tmp_path, "2", [record(2, 0, 10.0)]),
    ]


def test_who_was_late_and_who_is_missing(files):
    lines = flight.read(files)
    (line,) = lines
    (late,) = flight.latest(lines)
    assert (late.sequence, late.last, late.seconds) == (0, 1, pytest.approx(0.25))
    (stuck,) = flight.stuck(lines)
    assert (stuck.sequence, stuck.state, stuck.missing, [*stuck.unknown]) == (1, "running", (2,), [])
    assert stuck.waited == pytest.approx(8.0)
    assert line.called(1) == "1 (world 2)"


def test_a_rank_without_a_file_is_not_called_late(files):
    (stuck,) = flight.stuck(flight.read(files[:2]))
    assert stuck.sequence == 1 and stuck.missing == () and [*stuck.unknown] == [2]


def test_communicators_of_one_name_are_kept_apart(tmp_path):
    first = write(tmp_path, "a", [record(0, 0, 1.0)])
    second = write(tmp_path, "b", [record(0, 0, 2.0, id="8")])
    assert len(flight.read([first, second])) == 2


def test_hosts_are_compared_by_wall_clock(tmp_path):
    lines = [
        write(tmp_path, str(rank), [record(rank, 0, 10.0 + rank, host=f"h{rank}", epoch=1000.0 - rank)])
        for rank in range(3)
    ]
    (late,) = flight.latest(flight.read(lines))
    assert late.seconds == pytest.approx(0.0)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "is empty"),
        ("hello\n", "line 1: is not JSON"),
        ("[1]\n", "line 1: is not a JSON object"),
        ('{"communicator": "x"}\n', "id=None is not str"),
        (json.dumps(record(5, 0, 1.0)) + "\n", "rank 5 of 3"),
    ],
)
def test_other_files_are_refused(tmp_path, text, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"bad\.jsonl") as error:
        flight.read([path])
    assert message in str(error.value)


def test_the_command_prints_tables(files):
    code, output = run_axo("info", "--flight", *map(str, files))
    text = "\n".join(output)
    assert code == 0 and "all_reduce #1" in text and "2 (world 4)" in text and "250.000 ms" in text, text
    code, output = run_axo("info", "--flight", "/nowhere/at/all")
    assert code == 2 and "cannot be read" in "\n".join(output)


def write_on_signal_and_failure(folder):
    os.environ["AXO_FLIGHT_DIR"] = folder
    comms = axo.connect("2x1x1x1")
    for _ in range(3):
        comms.x.all_reduce(torch.ones(4))
    comms.world.barrier()
    path = os.path.join(folder, f"axo-flight-{os.getpid()}.jsonl")
    os.kill(os.getpid(), signal.SIGUSR1)
    deadline = time.monotonic() + 30
    while not os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(0.01)
    written = flight.read([axo_path(path)])
    comms.world.barrier()
    if comms.rank == 0:
        time.sleep(0.5)  # rank 1 waits, then rank 0 gives up
        comms.x.abort("given up")
    else:
        with pytest.raises(axo.Aborted):
            comms.x.all_reduce(torch.ones(4))
    comms.world.barrier()
    return {line.name: len(line.ranks[comms.rank]) for line in written}


def axo_path(path):
    from pathlib import Path

    return Path(path)


@pytest.mark.parametrize("hosts", [None, {"ranks_per_host": 1}], ids=["one host", "two hosts"])
def test_ranks_write_their_files(tmp_path, hosts):
    found = run_ranks(write_on_signal_and_failure, 2, str(tmp_path), hosts=hosts)
    assert all(each["x"] >= 3 for each in found)
    lines = flight.read(sorted(tmp_path.glob("axo-flight-*.jsonl")))
    (x,) = [line for line in lines if line.name == "x"]
    assert any("given up" in failure for failure in x.failures.values())
    assert any(late.missing == (0,) or late.state == "failed" for late in flight.stuck([x]))


def no_folder():
    if os.environ["RANK"] == "0":  # the other rank never comes: the answer must not wait for it
        axo.connect("2x1x1x1")


def test_a_folder_that_is_not_there_is_refused():
    outcome, _ = rank_outcomes(no_folder, 2, env={"AXO_FLIGHT_DIR": "/nowhere/at/all"})
    assert outcome.error == "ValueError" and "/nowhere/at/all" in outcome.message, outcome.describe()
