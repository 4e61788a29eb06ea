"""CPU ranks on hosts that share nothing: network namespaces with addresses, names and /dev/shm of their own.

What they do is checked with ranks of one machine that play several hosts (test_hosts.py); here is what only a network
shows: cables, frozen and lost hosts, names that mean nothing, slow links.
"""

import json
import random
import signal
import time

import pytest

from tests.hosts import Hosts, available, python

pytestmark = pytest.mark.hosts
WHY_NOT = available()
if WHY_NOT:
    pytest.skip(f"no hosts can be made here: {WHY_NOT}", allow_module_level=True)

START_S = 120  # to import torch on a busy machine
LOST_S = 6.0  # from a fault to the error, on every rank
BUSY_S = 6.0  # what a busy machine may add to it

# Collectives whose results are known, until an error comes or time is over. Arguments: seconds, elements, ranks a host.
COLLECTIVES = """
import sys, time, torch, axo
seconds, elements, local = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
import os
size = int(os.environ["WORLD_SIZE"])
comms = axo.connect(f"{local}x{size // local}x1x1", timeout=300)
world, n = comms.world, 0
print(world.transport, flush=True)
end = time.monotonic() + seconds
try:
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
    """Fifteen each of: power lost, cable out idle, cable out while bytes move, cable out for 3 s, frozen for 10 s."""
    draw, seen = random.Random(7), []
    for trial in range(60):
        fault = ("power", "idle", "moving", "short", "frozen")[trial % 5]
        moves = fault in ("moving", "short")
        with Hosts(2) as hosts:
            if moves:
                hosts[1].limit("50mbit")
            seconds = 600 if fault in ("power", "idle", "moving") else 16
            ranks = hosts.start(python(COLLECTIVES, seconds, 1 << 20 if moves else 1000, 2), 2)
            hosts.wait_for("over tcp" if moves else "going", [0, 1, 2, 3], START_S)
            time.sleep(draw.uniform(0.5, 2.5))
            host, since = hosts[trial % 2], time.time()
            if fault == "power":
                host.lose_power()
                survivors = [0, 1] if trial % 2 else [2, 3]
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
