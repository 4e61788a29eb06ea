"""``axo bench collectives`` at a toy size: every operation and rival is right; JSON lines say where they are from."""

import json

import pytest

from bench import mpi
from tests.launcher import Command

OPERATIONS = "all_reduce,all_gather,reduce_scatter,all_to_all,broadcast,reduce,gather,scatter,sendrecv,barrier"


def bench(*options):
    command = Command("axo.cli", "bench", "collectives", *options)
    output = command.communicate()
    return command.returncode, output


def test_every_rival_is_right(tmp_path):
    """Oracle: whole numbers, whose reductions are exact; the bench counts what differs."""
    lines, picture = tmp_path / "rows.jsonl", tmp_path / "busbw.png"
    rivals = "axo,axo-shared,axo-c10d,gloo,mpi"
    options = ["--ranks", "2", "--sizes", "1K", "--rounds", "1", "--json", str(lines), "--plot", str(picture)]
    code, output = bench(*options, "--ops", OPERATIONS, "--rivals", rivals)
    assert code == 0, output
    header, *rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert {"device", "torch", "commit", "date"} <= set(header)
    notes = [row["note"] for row in rows if "note" in row]
    rows = [row for row in rows if "rival" in row]
    assert {row["rival"] for row in rows} >= {"axo", "axo-shared", "axo-c10d", "gloo"}
    if mpi.launcher():
        assert {row["op"] for row in rows if row["rival"] == "mpi"} == set(OPERATIONS.split(",")) - {"sendrecv"}, notes
        assert all(row["times_mpi"] > 0 for row in rows if row["op"] != "sendrecv")
    else:
        assert any("not installed" in note for note in notes)
    assert len({row["op"] for row in rows}) == 10 and all(row["wrong"] == 0 for row in rows)
    assert any("copy traffic" in note for note in notes)
    assert picture.stat().st_size > 1000


def test_types_that_mpi_cannot_reduce_are_left_out_and_a_rank_that_ends_is_told():
    if not mpi.launcher():
        pytest.skip("mpirun and mpi4py are not installed")
    with mpi.ranks_of(1) as (folder, why):
        assert not why
        peer = mpi.Peer(folder, 0)
        assert peer.prepare("all_reduce", 8, "bfloat16") is None and peer.prepare("sendrecv", 8, "float32") is None
        assert peer.prepare("all_reduce", 8, "float32") == 0 and peer.spend(2) > 0
        with pytest.raises(RuntimeError, match="Open MPI's rank ended while it was asked"):
            peer.prepare("all_reduce", -8, "float32")


def test_words_that_it_does_not_know():
    for option, value in (("--ops", "all_sum"), ("--rivals", "nccl"), ("--dtype", "float31")):
        code, output = bench(option, value)
        assert code == 2 and value in output and "Traceback" not in output, output
