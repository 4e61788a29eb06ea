"""connect, the meaning of axes, counting, blocked time, and every way in which ranks can go wrong.

What goes wrong must end on every rank with one clear error, soon, and leave nothing behind.
"""

import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings

import pytest
import torch
import torch.distributed as dist

import axo
from axo.comm import flight
from tests.launcher import Command, fork_the_ranks_of_torchrun, rank_outcomes, run_ranks

# Far more than noticing a death takes (milliseconds), far less than any time limit of an operation: a busy machine
# passes, and a rank that waits for its time limit does not.
NOTICED_S = 10.0


def peers_of_each_axis(grid):
    comms = axo.connect(grid)
    rank = torch.tensor([comms.rank])
    got = {axis: comms.axis(axis).all_gather(rank).tolist() for axis in axo.AXES}
    assert got == {axis: comms.grid.ranks(axis, comms.rank) for axis in axo.AXES}
    assert tuple(comms.axis(axis).rank for axis in axo.AXES) == tuple(comms.coords)
    assert comms.world.all_gather(rank).tolist() == list(range(comms.grid.world_size))
    comms.close()
    return True


def two_grids_at_once():
    first, second = axo.connect("4x1x1x1"), axo.connect("2x1x2x1")
    a, b = torch.ones(1), torch.ones(1)
    work = first.x.all_reduce(a, async_op=True)
    second.z.all_reduce(b)
    work.wait()
    return a.item(), b.item(), second.x.size


def world_is_shared():
    def communicators():
        return sorted({(entry["communicator"], entry["id"]) for entry in map(json.loads, flight.lines())})

    dist.init_process_group("axo")
    before = communicators()
    comms = axo.connect("2x1x1x1", timeout=7)
    assert len(before) == 1 and len(communicators()) == 2, (before, communicators())  # the world's, and that of x
    assert dist.get_world_size() == comms.world.all_reduce(torch.ones(1)).item() == comms.world.size
    again = axo.connect("1x2x1x1", timeout=60)
    assert len(communicators()) == 3
    one = torch.ones(1)
    comms.close()  # not the process group's, nor that of the other grid
    dist.all_reduce(one)
    assert again.world.all_reduce(one).item() == 4.0 and again.y.all_reduce(one).item() == 8.0


def mesh_of_grid():
    comms = axo.connect("2x1x2x1")
    mesh = comms.device_mesh
    assert mesh.mesh_dim_names == ("data", "z", "y", "x") and tuple(mesh.shape) == (1, 2, 1, 2)
    for axis in axo.AXES:
        assert mesh.get_local_rank(axis) == getattr(comms.coords, axis)
    return comms.device_mesh is mesh


def counted():
    comms = axo.connect("2x2x1x1")
    with axo.count_collectives() as outer:
        comms.x.all_reduce(torch.ones(3, 5))
        with axo.count_collectives() as inner:
            comms.y.all_gather(torch.ones(7, dtype=torch.bfloat16))
            comms.y.reduce_scatter(torch.ones(6, dtype=torch.float64))
            comms.z.all_reduce(torch.ones(4))  # an axis of one rank
            comms.x.barrier()
        comms.x.all_reduce(torch.ones(1), async_op=True).wait()
    assert inner == {("all_gather", "y"): (1, 7, 14), ("reduce_scatter", "y"): (1, 6, 48), ("barrier", "x"): (1, 0, 0)}
    assert outer["all_reduce", "x"] == (2, 16, 64) and outer["all_reduce", "z"].calls == 0
    assert outer.get(("all_reduce", "z")) == (0, 0, 0) and outer.get(("all_reduce", "x")) == (2, 16, 64)
    assert outer.total(op="all_reduce") == (2, 16, 64) and outer.total(axis="y") == (2, 13, 62)
    comms.x.all_reduce(torch.ones(1))
    assert outer.total().calls == 5, "counting goes on after its block"


def blocked_time(waits):
    """Rank 0 sleeps half a second from when the other one is about to wait."""
    comms = axo.connect("2x1x1x1")
    comms.x.barrier()
    before = comms.blocked_seconds["x"]
    if comms.rank == 1:
        waits.touch()
    while not waits.exists():
        time.sleep(0.01)
    time.sleep(0.5 * (comms.rank == 0))
    comms.x.all_reduce(torch.ones(1))
    return comms.blocked_seconds["x"] - before, sorted(comms.blocked_seconds)


def connect_with(grids):
    axo.connect(grids[int(os.environ["RANK"]) % len(grids)], timeout=20)


def mismatched(case):
    comm = axo.connect("3x1x1x1", timeout=20).x
    odd = comm.rank == 2
    calls = {
        "size": lambda: comm.all_reduce(torch.ones(5 if odd else 4)),
        "dtype": lambda: comm.all_reduce(torch.ones(4, dtype=torch.float64 if odd else torch.float32)),
        "op": lambda: comm.all_reduce(torch.ones(4), "max" if odd else "sum"),
        "root": lambda: comm.broadcast(torch.ones(4), root=1 if odd else 0),
        "kind": lambda: comm.all_gather(torch.ones(4)) if odd else comm.all_reduce(torch.ones(4)),
        "rows": lambda: comm.all_to_all(
            torch.ones(3 if not odd else 4), torch.empty(3),
            send_counts=[1, 1, 1] if not odd else [2, 1, 1], recv_counts=[1, 1, 1],
        ),
    }  # fmt: skip
    try:
        calls[case]()
    except axo.Mismatch as error:
        with pytest.raises(axo.Error):  # the communicator is done for
            comm.barrier()
        return str(error)
    raise AssertionError("no Mismatch")


def lose_a_peer(how, pending):
    comm = axo.connect("4x1x1x1").x
    comm.barrier()
    if comm.rank == 2:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(7)
        if how == "raise":
            raise ZeroDivisionError("rank 2 fails")
        return None
    start = time.monotonic()
    try:
        if pending:
            comm.all_reduce(torch.ones(1_000_000), async_op=True).wait()
        else:
            comm.all_reduce(torch.ones(1_000_000))
    except axo.PeerLost as error:
        return error.peer, str(error), time.monotonic() - start
    raise AssertionError("no PeerLost")


def one_never_comes():
    if os.environ["RANK"] == "1":
        os._exit(3)
    axo.connect("3x1x1x1", timeout=5)


def times_out(over):
    comm = axo.connect("2x1x1x1").x
    comm.set_timeout(1)
    if comm.rank == 1:
        while not over.exists():
            time.sleep(0.01)
        return None
    with pytest.raises(axo.Timeout) as caught:
        comm.all_reduce(torch.ones(3))
    over.touch()
    return str(caught.value)


def aborts():
    comm = axo.connect("2x1x1x1").x
    comm.barrier()
    if comm.rank == 1:
        comm.abort("had enough")
        return "had enough"
    try:
        comm.recv(torch.ones(1), peer=1)
    except axo.Aborted as error:
        return str(error)
    raise AssertionError("no Aborted")


def abort_at_length():
    comms = axo.connect("2x1x1x1")
    texts = []
    for reason in ("\u00fc" * 3000, "x" + "\u00fc" * 3000):  # one of the two would be cut inside a character
        comm = comms.world.split(0)
        if comm.rank == 0:
            comm.abort(reason)
        with pytest.raises(axo.Aborted) as caught:
            comm.barrier()
        comms.world.barrier()
        texts.append(str(caught.value))
    return texts


def open_and_close(rounds):
    def open_files():
        return len(os.listdir("/proc/self/fd"))

    dist.init_process_group("axo")
    counts = []
    for _ in range(rounds):
        comms = axo.connect("2x2x1x1")
        comms.x.all_reduce(torch.ones(1000))
        sub = comms.world.split(comms.rank % 2)
        sub.barrier()
        sub.close()
        comms.close()
        del comms, sub
        counts.append(open_files())
    return counts


def meet_again():
    for _ in range(3):
        comms = axo.connect("2x2x1x1")
        total = comms.world.all_reduce(torch.ones(1)).item()
        assert comms.device_mesh.size() == 4  # process groups of other sizes, whose names come back in the next round
        comms.close()
        assert total == 4.0 and not dist.is_initialized()
    for members in ([0, 1], [0, 1, 2, 3], [1, 3]):
        dist.init_process_group("axo")
        group = dist.new_group(members)
        if dist.get_rank() in members:
            one = torch.ones(1)
            dist.all_reduce(one, group=group)
            assert one.item() == len(members)
        dist.destroy_process_group()


def killed_all():
    comms = axo.connect("2x2x1x1")
    comms.world.all_reduce(torch.ones(1 << 20), async_op=True)
    comms.world.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("grid", ["2x2x2x1", "1x2x1x2", "1x1x4x1"])
def test_axes_are_the_grids(grid):
    assert all(run_ranks(peers_of_each_axis, axo.Grid.parse(grid).world_size, grid))


def test_two_grids_live_in_one_process():
    assert run_ranks(two_grids_at_once, 4) == [(4.0, 2.0, 2)] * 4


def unclosed():
    """What Python says of files and sockets that a grid and a part of it leave open, and of one that is left open."""
    said = []
    sys.unraisablehook = lambda found: said.append(str(found.exc_value))  # a warning in a destructor has no caller
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        comms = axo.connect("2x1x1x1")
        part = comms.world.split(0, name="part")
        comms.x.all_reduce(torch.ones(4), async_op=True).wait()
        part.all_reduce(torch.ones(4))
        part.close()
        comms.close()
        del comms, part
        gc.collect()
        before = list(said)
        open(os.devnull)
    return before, said


def test_nothing_is_left_unclosed():
    for before, after in run_ranks(unclosed, 2):
        assert before == [] and len(after) == 1 and "unclosed file" in after[0]


def test_the_process_group_and_the_grid_share_the_world():
    run_ranks(world_is_shared, 2)


def test_device_mesh_agrees_with_the_coordinates():
    assert all(run_ranks(mesh_of_grid, 4))


def test_counts_are_calls_elements_and_bytes():
    run_ranks(counted, 4)


def test_blocked_seconds_of_the_rank_that_waits(tmp_path):
    (busy, axes), (waiting, _) = run_ranks(blocked_time, 2, tmp_path / "waits")
    assert axes == ["data", "world", "x", "y", "z"]
    assert waiting >= 0.1 and busy >= 0  # it slept 0.5 s: what a busy machine takes from that is no time of waiting


def test_a_grid_of_another_size_is_one_error_on_every_rank():
    outcomes = rank_outcomes(connect_with, 4, ["2x2x2x1"])
    messages = {(outcome.error, outcome.message) for outcome in outcomes}
    assert len(messages) == 1
    error, message = messages.pop()
    assert error == "ValueError" and "grid 2x2x2x1 has 8 ranks, but 4 were started" in message and "2x2x1x1" in message


def test_different_grids_are_one_error_on_every_rank():
    outcomes = rank_outcomes(connect_with, 4, ["2x2x1x1", "4x1x1x1"])
    assert {(o.error, o.message) for o in outcomes} == {
        ("ValueError", "connect: rank 0 asks for grid 2x2x1x1 and rank 1 for 4x1x1x1; pass one grid")
    }


def test_a_grid_without_ranks_says_how_to_start_them():
    with pytest.raises(ValueError, match="torchrun --nproc-per-node 4"):
        axo.connect("2x2x1x1")
    with pytest.raises(ValueError, match="device='cuda'"):
        axo.connect("1x1x1x1", device="cuda")


@pytest.mark.parametrize("case", ["size", "dtype", "op", "root", "kind", "rows"])
def test_mismatched_calls_are_one_error_on_every_rank(case):
    messages = run_ranks(mismatched, 3, case)
    assert all("'x'" in message for message in messages), messages


@pytest.mark.parametrize("pending", [False, True], ids=["blocking", "pending"])
@pytest.mark.parametrize("how", ["kill", "exit", "raise", "return"])
def test_a_lost_peer_is_named_by_every_survivor(how, pending):
    outcomes = rank_outcomes(lose_a_peer, 4, how, pending)
    for outcome in (outcomes[0], outcomes[1], outcomes[3]):
        assert outcome.ok, outcome.describe() + outcome.traceback
        peer, message, seconds = outcome.value
        assert peer == 2 and "rank 2" in message and "all_reduce" in message
        assert seconds < NOTICED_S
    assert outcomes[2].signal == "SIGKILL" if how == "kill" else outcomes[2].exit_code == 7 if how == "exit" else True


def test_a_rank_that_dies_at_start_up_is_an_error_for_the_others():
    outcomes = rank_outcomes(one_never_comes, 3)
    assert outcomes[1].exit_code == 3
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error == "Timeout" and "ranks [1] have not come" in outcome.message, outcome.describe()
        assert outcome.seconds < 5 + NOTICED_S


def test_an_operation_that_takes_too_long_says_who_is_missing(tmp_path):
    message = run_ranks(times_out, 2, tmp_path / "over")[0]
    assert "all_reduce" in message and "1" in message


def test_abort_frees_the_waiting():
    assert all("had enough" in text for text in run_ranks(aborts, 2))


@pytest.mark.parametrize("hosts", [None, {"ranks_per_host": 1}], ids=["one host", "two hosts"])
def test_a_long_reason_in_any_language_arrives(hosts):
    for texts in run_ranks(abort_at_length, 2, hosts=hosts):
        assert all("\u00fc" * 200 in text and "\ufffd" not in text for text in texts)


def test_ranks_that_part_can_meet_again_through_the_same_store():
    run_ranks(meet_again, 4)


def test_nothing_is_left_behind():
    before = set(os.listdir("/dev/shm"))
    for counts in run_ranks(open_and_close, 4, 6):
        assert counts[-1] == counts[1], f"open files grow: {counts}"
    assert [outcome.signal for outcome in rank_outcomes(killed_all, 4)] == ["SIGKILL"] * 4
    deadline = time.monotonic() + 20  # what other programs put there comes and goes
    while (left := set(os.listdir("/dev/shm")) - before) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left


# Both say that the backend is known, whichever is imported first.
PLAIN_PROGRAM = """
import axo, sys, torch.distributed
assert torch.distributed.is_backend_available("axo") and "axo._C" not in sys.modules
comms = axo.connect("2x1x1x1")
total = comms.x.all_reduce(torch.ones(1) + comms.rank)
print(f"sum {total.item()}", flush=True)
"""


def test_a_program_under_torchrun(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PLAIN_PROGRAM)
    torchrun = Command("torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program))
    output = torchrun.communicate()
    assert torchrun.returncode == 0 and output.count("sum 3.0") == 2, output


RAISING_PROGRAM = """
import sys, torch.distributed, axo
comms = axo.connect("3x1x1x1")
comms.x.barrier()
if comms.rank == 1:
    raise ValueError("bad batch")
try:
    comms.x.all_reduce(torch.ones(1))
except axo.Error as error:
    open(sys.argv[1] + str(comms.rank), "w").write(f"{type(error).__name__} {error}")
    raise
"""


# Rank 1 ends when the others have written what they were told, or torchrun would end them before.
ENDING_LAST = """
import atexit, glob, os, sys, time
def wait_for_the_others():
    end = time.monotonic() + 30
    while sum(os.path.getsize(told) > 0 for told in glob.glob(sys.argv[1] + "*")) < 2 and time.monotonic() < end:
        time.sleep(0.05)
if os.environ["RANK"] == "1":
    atexit.register(wait_for_the_others)
"""


@pytest.mark.parametrize("block", [False, True], ids=["at exit", "with"])
def test_peers_and_torchrun_are_told_what_a_rank_raised(block, tmp_path):
    program = tmp_path / "program.py"
    lines = RAISING_PROGRAM.strip().splitlines()
    if block:
        lines = [lines[0], 'with axo.connect("3x1x1x1") as comms:', *("    " + line for line in lines[2:])]
    else:
        lines.insert(1, 'assert torch.distributed.is_backend_available("axo") and "axo._C" not in sys.modules')
    program.write_text("\n".join([ENDING_LAST, *lines]))
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node=3")
    prepare = fork_the_ranks_of_torchrun if block else None
    command = Command(*torchrun, str(program), f"{tmp_path}/told", prepare=prepare)
    output = command.communicate()
    assert command.returncode != 0
    for rank in (0, 2):
        told = (tmp_path / f"told{rank}").read_text()
        assert re.match(r"PeerLost all_reduce.* rank 1 \(process \d+\) raised ValueError: bad batch", told), told
    report = output[output.index("Root Cause") :]
    assert "rank      : 1 " in report and "ValueError: bad batch" in report, report


def one_of_two_connects():
    if os.environ["RANK"] == "0":  # the other rank never comes: the answer must not wait for it
        axo.connect("2x1x1x1")


@pytest.mark.parametrize(("name", "values"), [("AXO_CHECK", "0, 1"), ("AXO_TUNE", "off, cached, first-step")])
def test_a_variable_that_says_what_is_not_known_is_refused(name, values):
    outcome, _ = rank_outcomes(one_of_two_connects, 2, env={name: "true"})
    assert outcome.error == "ValueError", outcome.describe()
    assert f"{name}='true' is not known; use one of {values}, or unset it" in outcome.message, outcome.describe()


def test_planning_needs_no_torch():
    program = (
        "import axo, sys; axo.Grid.parse('2x2x2x1'); axo.PeerLost; import axo.perf; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
