"""CPU ranks on hosts that share nothing: network namespaces with addresses, names and /dev/shm of their own.

What they do is checked with ranks of one machine that play several hosts (test_hosts.py); here is what only a network
shows: cables, frozen and lost hosts, names that mean nothing, slow links.
"""

import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import time
from pathlib import Path

import pytest

from axo import Grid
from tests.comm.on_hosts import CALL, STEPS, least_bytes, result_of, train_grids
from tests.comm.test_c10d_suite import PARTS, check_all, over_all_ranks
from tests.gpt import LLAMA, serial_losses
from tests.hosts import Hosts, available, python
from tests.launcher import run_ranks, slowness

pytestmark = pytest.mark.hosts
WHY_NOT = available()
if WHY_NOT:
    pytest.skip(f"no hosts can be made here: {WHY_NOT}", allow_module_level=True)

START_S = 120 * slowness()  # to import torch on a busy machine
LOST_S = 6.0  # from a fault to the error, on every rank
BUSY_S = 6.0  # what a busy machine may add to it

# Collectives whose results are known, until an error comes or time is over. Arguments: seconds, elements, ranks a host,
# and for how many seconds the ranks wait for each other.
COLLECTIVES = """
import sys, time, torch, axo
seconds, elements, local = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
import os
size = int(os.environ["WORLD_SIZE"])
try:
    comms = axo.connect(f"{local}x{size // local}x1x1", timeout=300, meeting_timeout=float((*sys.argv, 60)[4]))
    world, n = comms.world, 0
    print(world.transport, flush=True)
    end = time.monotonic() + seconds
    while True:
        x = torch.full((elements,), float(world.rank + 1))
        x[0] = float(time.monotonic() < end)
        world.all_reduce(x)
        assert x[-1] == size * (size + 1) / 2, x
        n += 1
        if n == 3: print("going", flush=True)
        if x[0] < size: break
    print("done", flush=True)
except axo.Error as error:
    print("error", time.time(), type(error).__name__, error, flush=True)
"""


def errors(hosts, ranks, limit):
    """By rank: when an error came, and what it says."""
    hosts.wait_for("\nerror ", ranks, limit)
    lines = [next(line for line in hosts.output(rank).splitlines() if line.startswith("error ")) for rank in ranks]
    return [(float(line.split(" ", 2)[1]), line.split(" ", 2)[2]) for line in lines]


def check_lost(told, since, ranks_per_host=2):
    """Every rank names the host that it has lost, with that host's ranks, in time."""
    for rank, (at, text) in enumerate(told):
        other = 1 - rank // ranks_per_host
        ranks = ", ".join(str(r) for r in range(other * ranks_per_host, (other + 1) * ranks_per_host))
        assert text.startswith("PeerLost"), text
        assert f"(host host{other}) is lost: its host (ranks {ranks}) has answered nothing for 5 s" in text, text
        assert at - since < LOST_S + BUSY_S, (at - since, text)
    return max(at for at, _ in told) - since


def test_a_short_outage_and_a_frozen_host_are_waited_for_and_a_lost_host_is_named():
    with Hosts(2) as hosts:
        ranks = hosts.start(python(COLLECTIVES, 600, 1000, 2), 2)
        hosts.wait_for("going", [0, 1, 2, 3], START_S)
        hosts[1].pull_cable()
        time.sleep(3)
        hosts[1].put_cable_back()
        time.sleep(2)  # until bytes pass again: a kernel tries after 0.2, 0.4, 0.8 ... seconds
        hosts[1].signal(signal.SIGSTOP)
        time.sleep(7)
        hosts[1].signal(signal.SIGCONT)
        time.sleep(0.5)
        assert all(rank.poll() is None for rank in ranks), [hosts.output(rank) for rank in range(4)]
        since = time.time()
        hosts[1].pull_cable()
        check_lost(errors(hosts, [0, 1, 2, 3], 60), since)
        assert hosts.wait(ranks, 60) == [0] * 4


def test_a_cable_that_is_pulled_while_bytes_are_on_their_way():
    with Hosts(2) as hosts:
        hosts[1].limit("50mbit")
        ranks = hosts.start(python(COLLECTIVES, 600, 4 << 20, 1), 1)
        hosts.wait_for("over tcp", [0, 1], START_S)
        time.sleep(1.5)  # a collective takes some 3 s
        since = time.time()
        hosts[1].pull_cable()
        check_lost(errors(hosts, [0, 1], 60), since, ranks_per_host=1)
        assert hosts.wait(ranks, 60) == [0] * 2


def test_names_of_hosts_do_not_matter(tmp_path):
    """One is known nowhere, one stands for 127.0.1.1 as Debian writes it, one is empty; they meet by IPv6."""
    known = tmp_path / "hosts"
    known.write_text("127.0.0.1 localhost\n127.0.1.1 deb12.example.org deb12\n")
    with Hosts(3, names=["node-7.nowhere.example", "deb12", "nameless"]) as hosts:
        for host in hosts:
            host.run("mount", "--bind", str(known), "/etc/hosts")
        hosts[2].run(*python("import socket; socket.sethostname('')"))
        ranks = hosts.start(python(COLLECTIVES, 0, 1000, 1), 1, MASTER_ADDR="fd77::1")
        assert hosts.wait(ranks, START_S) == [0] * 3, [hosts.output(rank) for rank in range(3)]
        assert all("done" in hosts.output(rank) for rank in range(3))


@pytest.mark.soak
@pytest.mark.timeout(4000)
def test_sixty_faults(tmp_path):
    """Fifteen each of: power lost, cable out for good (idle or while bytes move), out for 3 s, frozen for 10 s."""
    draw, seen = random.Random(7), []
    for trial in range(60):
        fault = ("power", ("idle", "moving")[trial // 4 % 2], "short", "frozen")[trial % 4]
        moves = fault in ("moving", "short")
        with Hosts(2) as hosts:
            if moves:
                hosts[1].limit("50mbit")
            seconds = 600 if fault in ("power", "idle", "moving") else 16
            ranks = hosts.start(python(COLLECTIVES, seconds, 1 << 20 if moves else 1000, 2), 2)
            hosts.wait_for("over tcp" if moves else "going", [0, 1, 2, 3], START_S)
            time.sleep(draw.uniform(0.5, 2.5))
            lost = trial // 8 % 2
            host, since = hosts[lost], time.time()
            if fault == "power":
                host.lose_power()
                survivors = [0, 1] if lost else [2, 3]
                told = errors(hosts, survivors, 60)
                assert all("is lost: its host" in text for _, text in told), told
                seen.append((fault, max(at for at, _ in told) - since))
            elif fault in ("idle", "moving"):
                host.pull_cable()
                seen.append((fault, check_lost(errors(hosts, [0, 1, 2, 3], 60), since)))
            else:
                host.pull_cable() if fault == "short" else host.signal(signal.SIGSTOP)
                time.sleep(3 if fault == "short" else 10)
                host.put_cable_back() if fault == "short" else host.signal(signal.SIGCONT)
                assert hosts.wait(ranks, 120) == [0] * 4
                assert all("done" in (text := hosts.output(rank)) for rank in range(4)), text
                seen.append((fault, 0.0))
    print(json.dumps({fault: [round(s, 2) for f, s in seen if f == fault] for fault, _ in seen}))
    assert max(seconds for _, seconds in seen) < LOST_S


def call_on(hosts, local, seconds, name, *arguments, **environment):
    """What a function of on_hosts.py returns on each of ``local`` ranks a host."""
    command = python(CALL, name, *map(json.dumps, arguments))
    ranks = hosts.start(command, local, AXO_SECRET="s" * 32, OMP_NUM_THREADS="1", **environment)
    ends = hosts.wait(ranks, seconds)
    assert not any(ends), "\n".join(hosts.output(rank)[-3000:] for rank, end in enumerate(ends) if end)
    return [result_of(hosts.output(rank)) for rank in range(len(ranks))]


def check_grids(count, local, grids):
    """Their losses on ``count`` hosts are those of one host, and nearly those of serial training."""
    with Hosts(count) as hosts:
        between = call_on(hosts, local, 1500, "train_grids", grids)[0]
    one_host, serial = run_ranks(train_grids, count * local, grids, timeout=1500)[0], serial_losses(LLAMA, STEPS, False)
    for grid in grids:
        assert between[grid] == pytest.approx(one_host[grid], rel=1e-6), grid
        assert between[grid] == pytest.approx(serial, rel=1e-4), grid


@pytest.mark.soak
@pytest.mark.timeout(4000)
def test_all_grids_of_four_ranks_train_on_two_hosts_as_on_one_and_as_serial():
    check_grids(2, 2, [str(grid) for grid in Grid.all(4)])


@pytest.mark.soak
@pytest.mark.timeout(4000)
def test_some_grids_of_eight_ranks_train_on_four_hosts_as_on_one_and_as_serial():
    check_grids(4, 2, [str(grid) for grid in random.Random(3).sample(list(Grid.all(8)), 6)])


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_what_leaves_a_host_is_the_least_that_each_collective_needs(count):
    """By the counters of the hosts' interfaces; what starts and ends a collective is a few tenths of a percent."""
    with Hosts(count) as hosts:
        left = call_on(hosts, 2, 3 * START_S, "bytes_of_collectives", 2)
    least = least_bytes(2 * count, count)
    ratios = {name: sum(of_rank[name] for of_rank in left) / least[name] for name in least}
    print(f"\n{count} hosts x 2 ranks, payload between hosts over the least: {ratios}")
    assert all(1.0 <= ratio < 1.01 for ratio in ratios.values()), ratios


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_an_all_reduce_over_limited_links_beats_gloos():
    with Hosts(2) as hosts:
        for host in hosts:
            host.limit("400mbit")
        seconds = call_on(hosts, 4, 1200, "beside_gloo", 64 << 20, 7)[0]
    print(f"\n2 hosts x 4 ranks, 400 Mbit/s, all_reduce of 64 MiB: {seconds}")
    assert seconds["gloo"] > 1.5 * seconds["axo"], seconds


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_torchs_own_backend_tests_on_two_hosts(part, tmp_path):
    with Hosts(2) as hosts:
        results = call_on(hosts, 2, 3000, "torchs_suite", str(tmp_path), part)
    check_all("2 hosts x 2 ranks", over_all_ranks(results), 80 // PARTS - 1)  # without messages from any rank


def test_an_impostor_is_refused_by_name_within_a_second():
    with Hosts(2) as hosts:
        secrets = [{"AXO_SECRET": "s" * 32}, {"AXO_SECRET": "an impostor's secret"}]
        ends = call_on(hosts, 1, 3 * START_S, "be_refused", secrets)
    last = max(came for came, _, _ in ends)
    for rank, (_, at, text) in enumerate(ends):
        assert f"rank {1 - rank} does not prove that it knows this rank's secret" in text, text
        assert at - last < 1 + BUSY_S, ends
    print(f"\nrefused {max(at for _, at, _ in ends) - last:.3f} s after the last one came")


HELD = """
import socket, sys
address, count = sys.argv[1], int(sys.argv[2])
held = []
for _ in range(count):
    try:
        held.append(socket.create_connection((address, 29400), 2))
    except ConnectionRefusedError:
        pass
print(len(held))
"""


LIMITED = """
import resource
from axo.cli.main import main
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
main()
"""


def test_strangers_who_hold_connections_cost_a_run_no_descriptor(tmp_path):
    """They used to take all 256 of rank 0, which ended when it opened its text."""
    (tmp_path / "text.txt").write_text("Words of a text. " * 1000)
    out = tmp_path / "out"
    command = ["train", "--grid", "2x1x1x1", "--data", tmp_path / "text.txt", "--out", out, "--steps", "400"]
    command += ["--batch-size", "4", "--seq-len", "32", "--save-every", "200"]
    command += ["--model-override", "n_layer=1", "--model-override", "padded_vocab_size=512"]
    with Hosts(3) as hosts:
        other = hosts.pop()
        ranks = hosts.start(python(LIMITED, *command), 1, AXO_SECRET="s" * 32)
        end = time.monotonic() + START_S
        while not (out / "log.jsonl").exists():
            assert ranks[0].poll() is None and time.monotonic() < end, hosts.output(0)
            time.sleep(0.01)
        strangers = other.command(*python(HELD, hosts[0].address, 1000))
        held = subprocess.run(strangers, check=True, capture_output=True, text=True).stdout
        assert ranks[0].poll() is None, hosts.output(0)
        assert hosts.wait(ranks, START_S) == [0, 0], [hosts.output(rank) for rank in range(2)]
    assert held == "0\n"


def test_an_interface_that_one_host_lacks_is_an_error_of_all():
    with Hosts(2) as hosts:
        ends = call_on(hosts, 2, 3 * START_S, "be_refused", [{}, {}, {}, {"AXO_INTERFACE": "ib7"}])
    last = max(came for came, _, _ in ends)
    for _, at, text in ends:
        assert "AXO_INTERFACE='ib7' is no interface of this host; use one of " in text and "eth0" in text, text
        assert at - last < 1 + BUSY_S, ends


def test_a_second_run_on_a_port_ends_and_the_first_goes_on():
    with Hosts(2) as hosts:
        first = hosts.start(python(COLLECTIVES, 600, 1000, 1), 1)
        hosts.wait_for("going", [0, 1], START_S)
        second = hosts.start(python(COLLECTIVES, 0, 1000, 1, 5), 1, outputs="second")
        assert hosts.wait(second, START_S) == [0, 0]
        told = [hosts.output(rank, "second") for rank in range(2)]
        assert "another program listens at 10.77.0.1:29400; give a MASTER_PORT that is free there" in told[0], told[0]
        assert "ranks [0] have not come within" in told[1], told[1]
        assert all(rank.poll() is None for rank in first), [hosts.output(rank) for rank in range(2)]


FAR_CLOCKS = """
import time
clock, ahead = time.time, 3600 * int(os.environ["RANK"])
time.time = lambda: clock() + ahead
"""


def test_clocks_an_hour_apart_do_not_matter():
    """The time of day, and the clock that limits are counted by: a host's counts from its own start."""
    later = 'if [ "$RANK" = 1 ]; then set -- unshare --fork --kill-child --time --monotonic 3600 "$@"; fi; exec "$@"'
    with Hosts(2) as hosts:
        program = python("import os\n" + FAR_CLOCKS + COLLECTIVES, 4, 1000, 1)
        ranks = hosts.start(["sh", "-c", later, "sh", *program], 1, AXO_SECRET="s" * 32)
        hosts.wait_for("going", [0, 1], START_S)
        hosts[1].pull_cable()
        time.sleep(2)
        hosts[1].put_cable_back()
        assert hosts.wait(ranks, START_S) == [0, 0]
        assert all("done" in (text := hosts.output(rank)) for rank in range(2)), text


@pytest.mark.soak
def test_strangers_do_not_slow_a_step():
    """A third host knocks at every port of the two that train, and in turns at a fourth one's, which costs as much."""
    seconds = 80
    with Hosts(4) as hosts:
        train, others = hosts[:2], hosts[2:]
        del hosts[2:]
        ranks = hosts.start(python(CALL, "steps", seconds), 1, AXO_SECRET="s" * 32, OMP_NUM_THREADS="1")
        hosts.wait_for("going", [0, 1], START_S)
        targets = [train[0].address, others[1].address, train[1].address, others[1].address]
        told = subprocess.run(
            others[0].command(*python(CALL, "scan", json.dumps(targets), seconds - 8)),
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            check=True,
        )
        assert hosts.wait(ranks, 60) == [0, 0]
        ends = result_of(hosts.output(0))
    turns, knocks = result_of(told.stdout)
    medians = []  # of the steps in each turn
    for begin, _ in turns:
        if begin + 2 > ends[-1]:  # the scan began late, and goes on after the last step
            break
        inside = [end for end in ends if begin + 0.2 < end < begin + 1.9]
        medians.append(statistics.median(later - earlier for earlier, later in itertools.pairwise(inside)))
    ratios = [scanned / quiet for scanned, quiet in zip(medians[::2], medians[1::2], strict=False)]
    assert len(ratios) >= 10, turns
    print(
        f"\n{knocks} strangers, {len(ratios)} pairs of turns: a step takes {statistics.median(ratios):.3f} of its time"
    )
    assert statistics.median(ratios) < 1.05, ratios
