"""Communicators that span hosts: ranks of this machine that are told to be on different ones.

The checks of test_collectives.py, whose oracles are serial, run with their ranks over 2 and 4 hosts; then what is
special to several hosts: errors that name ranks and hosts, messages, torch.distributed, the link's rate, parity of
training.
"""

import argparse
import contextlib
import glob
import os
import resource
import signal
import struct
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import axo
from axo.comm.communicator import Communicator, tell_of
from axo.comm.extension import _C
from axo.comm.transports import alone
from bench.lib.arguments import rate
from tests.comm import test_collectives as serial
from tests.launcher import rank_outcomes, run_ranks

PAIRS = {"ranks_per_host": 2}
SINGLES = {"ranks_per_host": 1}
UNEVEN = {"ranks_per_host": 3}  # 4 ranks: three on one host, one on the other
NOTICED_S = 10.0  # far more than noticing a death takes, far less than any time limit


def test_reductions_of_every_dtype_on_two_hosts():
    dtypes = [*serial.FLOATS, *serial.INTEGERS, torch.bool]
    run_ranks(serial.check_reductions, 4, dtypes, [0, 1, 7, 1000], hosts=PAIRS)


@pytest.mark.parametrize("hosts", [SINGLES, UNEVEN], ids=["4x1", "3+1"])
def test_reductions_on_other_shapes(hosts):
    run_ranks(serial.check_reductions, 4, [torch.float32, torch.bfloat16], [0, 5, 1000], hosts=hosts)


def test_reductions_on_four_hosts():
    run_ranks(serial.check_reductions, 8, [torch.float32, torch.bfloat16], [1, 50_003], hosts=PAIRS, timeout=120)


def test_moves_of_every_dtype_on_two_hosts():
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool, *serial.MOVED_ONLY]
    run_ranks(serial.check_moves, 4, dtypes, hosts=PAIRS)


@pytest.mark.parametrize("world, hosts", [(3, SINGLES), (4, UNEVEN), (8, PAIRS)], ids=["3x1", "3+1", "4x2"])
def test_moves_on_other_shapes(world, hosts):
    run_ranks(serial.check_moves, world, [torch.float32], hosts=hosts, timeout=120)


def check_everything_else(ranks_per_host):
    for check in serial.CHECKS:
        # Its oracle sums in rank order; with several ranks a host, hosts are summed first (check_rounding_once).
        if check is not serial.check_rounding or ranks_per_host == 1:
            check()


@pytest.mark.parametrize("hosts", [PAIRS, UNEVEN, SINGLES], ids=["2x2", "3+1", "4x1"])
def test_checks_on_two_hosts(hosts):
    run_ranks(check_everything_else, 4, hosts["ranks_per_host"], hosts=hosts)


def transports():
    comms = axo.connect("2x2x1x1")
    return comms.world.transport, comms.x.transport, comms.y.transport


def test_transports_say_what_they_use():
    # x is innermost: its two ranks share a host, those of y do not.
    found = ("shared memory x 2 hosts over tcp", "shared-memory", "2 hosts over tcp")
    assert run_ranks(transports, 4, hosts=PAIRS) == [found] * 4


def check_rounding_once(count):
    """bf16 sums equal the fp32 sum of partial sums by host, rounded once; all ranks have the same bits."""
    comm = axo.connect("4x1x1x1").world
    generator = torch.Generator().manual_seed(3)
    every = torch.randn(4, count, generator=generator).bfloat16()
    wide = every.float()
    expected = ((wide[0] + wide[1]) + (wide[2] + wide[3])).bfloat16()
    for _ in range(3):
        serial.same(comm.all_reduce(every[comm.rank].clone()), expected, "bf16 sum")
    mean = comm.all_reduce(every[comm.rank].clone(), op="avg")
    serial.same(mean, (((wide[0] + wide[1]) + (wide[2] + wide[3])) / 4).bfloat16(), "bf16 mean")


def test_half_precision_is_rounded_once():
    run_ranks(check_rounding_once, 4, 10_001, hosts=PAIRS)


def check_messages_beside_collectives():
    """A receive that is posted long before its send holds nothing up, whatever tags and hosts are crossed."""
    comm = axo.connect("4x1x1x1").world
    rank, size = comm.rank, comm.size
    got = {(p, tag): torch.empty(70_001) for p in range(size) if p != rank for tag in (1, 2)}
    works = [comm.recv(tensor, p, tag=tag, async_op=True) for (p, tag), tensor in got.items()]
    assert comm.all_reduce(torch.ones(1)).item() == size
    for tag in (2, 1):
        for p in range(size):
            if p != rank:
                works.append(comm.send(torch.full((70_001,), 10.0 * rank + tag), p, tag=tag, async_op=True))
    for work in works:
        work.wait()
    for (p, tag), tensor in got.items():
        assert (tensor == 10.0 * p + tag).all()


def test_messages_are_not_ordered_against_collectives():
    run_ranks(check_messages_beside_collectives, 4, hosts=PAIRS)


def check_c10d():
    dist.init_process_group("axo")
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((1001,), float(rank))
    dist.all_reduce(tensor)
    assert (tensor == sum(range(size))).all()
    across = dist.new_group([0, 2])
    if rank in (0, 2):
        assert dist.get_world_size(across) == 2
        parts = [torch.empty(2) for _ in range(2)]
        dist.all_gather(parts, torch.full((2,), float(rank)), group=across)
        assert [part.tolist() for part in parts] == [[0.0, 0.0], [2.0, 2.0]]
    received = [torch.empty(3 * p + rank + 1) for p in range(size)]  # rank p sends p' items of unequal sizes
    dist.all_to_all(received, [torch.full((3 * rank + p + 1,), 10.0 * rank + p) for p in range(size)])
    assert all((part == 10.0 * p + rank).all() for p, part in enumerate(received))
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": p} for p in range(size)]
    model = torch.nn.Linear(8, 4)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    wrapped(torch.full((2, 8), float(rank))).sum().backward()
    assert torch.allclose(model.weight.grad, torch.full((4, 8), 2 * sum(range(size)) / size))
    dist.destroy_process_group()


def test_torch_distributed_on_two_hosts():
    run_ranks(check_c10d, 4, hosts=PAIRS)


def die_in_the_middle(victim):
    comm = axo.connect("4x1x1x1").world
    comm.all_reduce(torch.ones(10))
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.all_reduce(torch.ones(200_000))


@pytest.mark.parametrize("hosts", [PAIRS, SINGLES], ids=["2x2", "4x1"])
def test_survivors_name_the_dead_rank_and_its_host(hosts):
    host = f"host{3 // hosts['ranks_per_host']}"
    for outcome in rank_outcomes(die_in_the_middle, 4, 3, hosts=hosts):
        if outcome.rank == 3:
            assert outcome.signal == "SIGKILL"
            continue
        assert outcome.error == "PeerLost" and outcome.seconds < NOTICED_S, outcome.describe()
        assert "all_reduce(" in outcome.message and f"rank 3 (host {host}) died" in outcome.message


def die_before_a_message(victim, beside):
    """Only the rank beside the victim, which waits for a message inside their host, can see the death."""
    comm = axo.connect("4x1x1x1").world
    comm.barrier()
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.recv(torch.empty(1), victim if comm.rank == beside else beside)


def test_a_rank_that_raises_tells_all_and_then_waits_until_it_is_heard(monkeypatch):
    """Against cores that write down what they are told: no wait before all are told, a second in all."""
    log, now = [], [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    class Core:
        rank, size, transport = 0, 2, "stub"

        def give_up(self, error):
            log.append(error)

        def until_heard(self, milliseconds):
            log.append(milliseconds)
            now[0] += 0.75

    lines = [Communicator(Core(), name=name, axis=name) for name in ("world", "x", "y")]
    tell_of(ValueError("last words"), [*lines, alone("z", torch.device("cpu"))])
    assert log == ["raised ValueError: last words"] * 3 + [1000, 250, 0]


def test_a_death_inside_a_host_is_told_to_all_hosts():
    for outcome in rank_outcomes(die_before_a_message, 4, 3, 2, hosts=PAIRS):
        if outcome.rank == 3:
            assert outcome.signal == "SIGKILL"
            continue
        assert outcome.error == "PeerLost" and outcome.seconds < NOTICED_S, outcome.describe()
        # that the victim has left the barrier does not say that all have
        assert outcome.message.startswith(("recv(", "barrier")), outcome.message
        assert "rank 3 (host host1) died" in outcome.message


def come_late(folder):
    comms = axo.connect("4x1x1x1")
    comms.world.set_timeout(3)  # in which the others have come on a busy machine, too
    if comms.rank == 1:
        while len(os.listdir(folder)) < 3:
            time.sleep(0.01)
        with pytest.raises(axo.Error):
            comms.world.all_reduce(torch.ones(1))
        return
    try:
        comms.world.all_reduce(torch.ones(1))
    finally:
        open(f"{folder}/{comms.rank}", "w").close()


def test_a_time_limit_says_who_has_not_arrived(tmp_path):
    outcomes = rank_outcomes(come_late, 4, tmp_path, hosts=PAIRS)
    for rank in (0, 2, 3):
        assert outcomes[rank].error == "Timeout", outcomes[rank].describe()
        assert "arrived: 0, 2, 3; not arrived: rank 1 (host host0)" in outcomes[rank].message
    assert outcomes[1].ok, outcomes[1].traceback


def disagree():
    comm = axo.connect("4x1x1x1").world
    if comm.rank == 2:
        comm.broadcast(torch.ones(5), root=0)
    else:
        comm.all_reduce(torch.ones(5))


def test_operations_that_differ_between_hosts_are_named():
    for outcome in rank_outcomes(disagree, 4, hosts=PAIRS):
        assert outcome.error == "Mismatch", outcome.describe()
        assert "all_reduce" in outcome.message and "broadcast" in outcome.message


def abort_while_waiting():
    comms = axo.connect("4x1x1x1")
    if comms.rank == 0:
        comms.world.recv(torch.empty(1), 1, async_op=True)
        work = comms.world.recv(torch.empty(1), 3, async_op=True)
        comms.world.abort("enough")
        work.wait()
    comms.world.barrier()


def abort_beside_a_stopped_peer():
    """Seconds that issuing receives and aborting take while the peer's process is stopped and reads nothing."""
    comm = axo.connect("2x1x1x1").world
    other = int(comm.all_gather(torch.tensor([os.getpid()]))[1 - comm.rank])
    comm.barrier()
    if comm.rank == 1:
        with pytest.raises(axo.Aborted, match="enough"):
            comm.barrier()
        return 0.0
    os.kill(other, signal.SIGSTOP)
    try:
        start = time.monotonic()
        works = [comm.recv(torch.empty(1), 1, async_op=True) for _ in range(400)]
        comm.abort("enough")
        spent = time.monotonic() - start
    finally:
        os.kill(other, signal.SIGCONT)
    for work in works:
        with pytest.raises(axo.Aborted, match="enough"):
            work.wait()
    return spent


def test_abort_does_not_wait_for_a_peer_that_is_stopped():
    assert max(run_ranks(abort_beside_a_stopped_peer, 2, hosts=SINGLES)) < 3.0


def threads(name: str) -> int:
    """How many threads of this process have this name."""
    found = 0
    for task in glob.glob("/proc/self/task/*"):
        with contextlib.suppress(OSError):  # a thread may end meanwhile
            found += Path(task, "comm").read_text().strip() == name
    return found


def stack_pointer(task: str) -> int:
    """Of a thread, as soon as it waits in the kernel. One that never does, as Gloo's would, hits the test's limit."""
    while len(words := Path(task, "syscall").read_text().split()) < 3:
        time.sleep(0.001)
    return int(words[-2], 16)


def heads_in_stacks_of_ended_threads() -> dict[int, bytes]:
    """Heads of frames (hosts/mesh.h) by address. A living thread changes its own stack, so theirs are left out."""
    magic = struct.pack("<Q", 0x32656D6172666F78)
    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    others = set(os.listdir("/proc/self/task")) - {str(threading.get_native_id())}
    living = [stack_pointer(f"/proc/self/task/{thread}") for thread in others]
    found = {}
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for start, end in (line.split()[0].split("-") for line in maps if " rw-p 00000000 00:00 0" in line):
            if int(end, 16) - int(start, 16) != stack or any(int(start, 16) <= at < int(end, 16) for at in living):
                continue
            memory.seek(int(start, 16))
            data = memory.read(stack)
            at = data.find(magic)
            while at >= 0:
                found[int(start, 16) + at] = data[at : at + 256]
                at = data.find(magic, at + 1)
    return found


def close_before_the_peer():
    """How many heads of frames lie in stacks after closing, and where a peer's last frame has changed one."""
    dist.init_process_group("gloo")
    store = dist.PrefixStore("order", dist.distributed_c10d._get_default_store())
    comms = axo.connect("2x1x1x1")
    comms.x.all_reduce(torch.ones(4))
    assert threads("axo-hosts") > 2, "a reader, a writer, one that issues for each communicator"
    if comms.rank == 1:
        store.wait(["looked"])
        comms.close()
        store.set("closed", "")
        return 1, []
    comms.close()
    while threads("axo-hosts"):
        time.sleep(0.01)
    before = heads_in_stacks_of_ended_threads()
    store.set("looked", "")
    store.wait(["closed"])
    time.sleep(0.2)  # for the frame's way: where that is too short a defect may go unseen, and none is invented
    after = heads_in_stacks_of_ended_threads()
    return len(before), [hex(at) for at, head in before.items() if after.get(at, head) != head]


def test_what_a_peer_sends_after_closing_is_not_written_into_memory_of_threads_that_have_ended():
    (heads, changed), _ = run_ranks(close_before_the_peer, 2, hosts=SINGLES)
    assert heads > 0, "nothing to look at"
    assert not changed


def test_abort_frees_every_waiter():
    for outcome in rank_outcomes(abort_while_waiting, 4, hosts=PAIRS):
        assert outcome.error == "Aborted" and "enough" in outcome.message, outcome.describe()


def bad_settings():
    if os.environ["RANK"] == "0":  # the other rank never comes: the answer must not wait for it
        axo.connect("2x1x1x1")


def test_settings_that_mean_nothing_are_refused():
    outcome, _ = rank_outcomes(bad_settings, 2, hosts=SINGLES, env={"AXO_FLIGHT_DIR": "/nowhere"})
    assert outcome.error == "ValueError" and "AXO_FLIGHT_DIR='/nowhere' is not a folder" in outcome.message


def nothing():
    pass


@pytest.mark.parametrize(
    "hosts, error, message",
    [
        ({"ranks_per_host": 1, "rate": 1e-300}, "Error", "link rate"),
        ({"ranks_per_host": 1, "rate": -1.0}, "Error", "link rate"),
        ({"ranks_per_host": 1, "latency": 100.0}, "Error", "link latency"),
        ({"ranks_per_host": -1}, "ValueError", "ranks_per_host=-1"),
    ],
)
def test_hosts_that_mean_nothing_are_refused(hosts, error, message):
    outcome = rank_outcomes(nothing, 1, hosts=hosts)[0]
    assert outcome.error == error and message in outcome.message, outcome.describe()


def test_a_host_has_a_plain_name():
    with pytest.raises(axo.Error, match="letters, digits"):
        _C.simulate_host("a b")


def test_rates_of_command_lines():
    assert [rate(text) for text in ("200M", "1.5G", "7")] == [2e8, 1.5e9, 7]
    for bad in ("", "fast", "-1M", "0", "1T", "nan", "1 M", "0x10", "1e-300", "1e300", "1e308G"):
        with pytest.raises(argparse.ArgumentTypeError, match="such as 200M"):
            rate(bad)


def limited(count, rounds):
    """Seconds of an all_reduce of ``count`` floats across two hosts, and of the operation as Axo measured it."""
    comm = axo.connect("4x1x1x1").world
    tensor = torch.ones(count)
    comm.barrier()
    start = time.perf_counter()
    for _ in range(rounds):
        comm.all_reduce(tensor)
    return (time.perf_counter() - start) / rounds


def test_a_limited_link_takes_at_least_its_time():
    # Two hosts: 2 (H - 1) / H = 1, so 4e5 bytes leave each host. Only the lower bound does not depend on the machine.
    # A rank that a busy machine holds up before it begins sees less of it, the first one sees all.
    seconds = run_ranks(limited, 4, 100_000, 2, hosts={**PAIRS, "rate": 2e6})
    assert max(seconds) >= 0.95 * 4e5 / 2e6


def forked_child():
    """The child has none of the threads that drive the communicator: it is told so, and can end."""
    comms = axo.connect("2x1x1x1", timeout=20)
    done, pending = torch.ones(1), torch.ones(1)
    work = comms.x.all_reduce(done, async_op=True)
    work.wait()
    late = comms.x.all_reduce(pending, async_op=True) if comms.rank == 0 else None
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work.wait()
            calls = [lambda: comms.x.all_reduce(done)]
            calls += [late.wait] if late is not None else []
            for call in calls:
                with pytest.raises(axo.Error, match="belongs to the parent process; connect again after fork"):
                    call()
            comms.x.abort("of the parent only")
            comms.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    if late is None:
        comms.x.all_reduce(pending)
    else:
        late.wait()
    return pending.item()


def test_a_forked_child_neither_uses_nor_hangs_on_its_parents_communicators():
    assert run_ranks(forked_child, 2, hosts=SINGLES) == [2.0, 2.0]


def train_gpt(steps):
    from tests.gpt import NEOX, train

    dist.init_process_group("axo")
    return train(axo.connect("2x2x2x1"), NEOX, steps, meta=False)


def test_training_over_two_hosts_equals_one_host():
    pytest.importorskip("litgpt")
    together = run_ranks(train_gpt, 8, 3, timeout=120)
    apart = run_ranks(train_gpt, 8, 3, timeout=120, hosts={"ranks_per_host": 4})
    assert apart[0][-1] < apart[0][0], "the model learns nothing, so it proves nothing"
    # Sums over an axis that crosses the hosts are added in another order: 1e-5 over three steps, as between two grids.
    assert all(abs(a - b) < 1e-5 for a, b in zip(together[0], apart[0], strict=True))
    assert len({tuple(losses) for losses in apart}) == 1
