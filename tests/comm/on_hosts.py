"""What a rank does on a host of tests/hosts.py, for the tests of test_real_hosts.py.

hosts.start(python(CALL, "train_grids", json.dumps(grids)), ranks_per_host=2)
"""

import contextlib
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import axo

CALL = """
import json, sys
from tests.comm import on_hosts
result = getattr(on_hosts, sys.argv[1])(*map(json.loads, sys.argv[2:]))
print("result", json.dumps(result), flush=True)
"""
STEPS = 4
SIZE = 32 << 20  # bytes of a collective whose bytes are counted
HEADER = 14 + 20 + 32  # bytes of Ethernet, IP and TCP with its time stamps in each packet


def result_of(text):
    """What a rank has returned, from what it has printed."""
    return json.loads(next(line for line in text.splitlines() if line.startswith("result ")).removeprefix("result "))


def train_grids(grids):
    """The losses of a small GPT on each grid."""
    from tests.gpt import LLAMA, train  # imports a library of models, which the others need not wait for

    torch.set_num_threads(1)
    dist.init_process_group("axo")
    losses = {}
    for grid in grids:
        with axo.connect(grid) as comms:
            losses[grid] = train(comms, LLAMA, STEPS, False)
    dist.destroy_process_group()
    return losses


def sent_bytes():
    """Payload that has left this host, by its interface's counters: without headers and what was sent again.

    Into how many packets a stream is cut, how many acknowledge and what is sent twice depends on how busy the machine
    is; the payload does not.
    """
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if "eth0:" in line)
    size, packets = map(int, line.split(":")[1].split()[8:10])
    streams = subprocess.run(["ss", "-Htin"], capture_output=True, text=True, check=True).stdout
    return size - packets * HEADER - sum(map(int, re.findall(r"bytes_retrans:(\d+)", streams)))


def least_bytes(ranks, hosts):
    """Of each collective, over all hosts, where each host has as many ranks; SIZE as nccl-tests counts it."""
    others, local = hosts - 1, ranks // hosts
    return {
        "all_reduce": 2 * others * SIZE,
        "all_gather": others * SIZE,
        "reduce_scatter": others * SIZE,
        "broadcast": others * SIZE,
        "reduce": others * SIZE,
        "all_to_all": ranks * SIZE * others // hosts,
        "gather": (ranks - local) * SIZE // ranks,
        "scatter": (ranks - local) * SIZE // ranks,
    }


def bytes_of_collectives(local):
    """By collective: what has left this host during it, in bytes; of a host's other ranks nothing."""
    world = axo.connect(f"{os.environ['WORLD_SIZE']}x1x1x1").world
    whole, part = torch.ones(SIZE // 4), torch.ones(SIZE // 4 // world.size)
    calls = {
        "all_reduce": lambda: world.all_reduce(whole),
        "all_gather": lambda: world.all_gather(part),
        "reduce_scatter": lambda: world.reduce_scatter(whole),
        "broadcast": lambda: world.broadcast(whole),
        "reduce": lambda: world.reduce(whole),
        "all_to_all": lambda: world.all_to_all(whole),
        "gather": lambda: world.gather(part),
        "scatter": lambda: world.scatter(whole if world.rank == 0 else None, out=part),
    }
    left = {}
    for name, call in calls.items():
        world.barrier()
        time.sleep(0.1)  # what acknowledges has left
        before = sent_bytes()
        world.barrier()
        call()
        world.barrier()
        time.sleep(0.1)
        left[name] = sent_bytes() - before if int(os.environ["LOCAL_RANK"]) == 0 else 0
    world.barrier()  # a stream that has ended would no longer tell what it has sent twice
    return left


def beside_gloo(size, rounds):
    """Seconds of an all_reduce of ``size`` bytes by Axo and by Gloo, in turns: the slowest rank's, and its median."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group("axo")
    world = axo.connect(f"{os.environ['WORLD_SIZE']}x1x1x1", timeout=600).world
    gloo = dist.new_group(backend="gloo")
    tensor, seconds = torch.zeros(size // 4), {"axo": [], "gloo": []}
    for _ in range(rounds + 1):
        for name, call in (
            ("axo", lambda: world.all_reduce(tensor)),
            ("gloo", lambda: dist.all_reduce(tensor, group=gloo)),
        ):
            world.barrier()
            start = time.perf_counter()
            call()
            seconds[name].append(world.all_reduce(torch.tensor([time.perf_counter() - start]), op="max").item())
    return {name: statistics.median(each[1:]) for name, each in seconds.items()}


def torchs_suite(folder, part):
    """A part of PyTorch's own backend tests, as tests/comm/test_c10d_suite.py runs them on one host."""
    from tests.comm import test_c10d_suite as suite

    os.environ |= {"SUITE_DIR": folder, "GLOO_SOCKET_IFNAME": "eth0"}
    torch.manual_seed(0)  # what the suite draws when it is imported is alike on its own ranks, which are forked
    # The suite's barrier counts files named after processes, whose numbers the hosts must not share.
    host = int(os.environ["RANK"]) // int(os.environ["LOCAL_WORLD_SIZE"])
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(5000 * (host + 1)))
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=os.environ["RANK"] == "0", wait_for_workers=False)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # tests that ask torch for a store there find this one
    names = suite.applicable(int(os.environ["WORLD_SIZE"]))[part :: suite.PARTS]
    results = suite.run_suite([name for name in names if "any_source" not in name])  # is for ranks of one host
    store.add("done", 1)
    while os.environ["RANK"] == "0" and store.add("done", 0) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.1)
    sys.stdout.flush()
    return results


def be_refused(environments):
    """With variables by rank: when this rank came, when it had an error, and what that says."""
    os.environ |= environments[int(os.environ["RANK"])]
    came, text = time.time(), ""
    try:
        axo.connect(f"{os.environ['WORLD_SIZE']}x1x1x1", timeout=60)
    except (axo.Error, ValueError) as error:
        text, at = str(error), time.time()
        if os.environ["RANK"] == "0":
            time.sleep(3)  # the store is the error's frames'; a launcher's is there until all ranks have ended
        return came, at, text
    return came, time.time(), text


def steps(seconds):
    """When each step of some computation and one all_reduce has ended."""
    torch.set_num_threads(1)
    world = axo.connect(f"{os.environ['WORLD_SIZE']}x1x1x1", timeout=60).world
    weight, total, ends = torch.randn(384, 384), torch.ones(1 << 18), []
    end, going = time.time() + seconds, torch.full((1,), float(world.size))
    print("going", flush=True)
    while going.item() == world.size:
        for _ in range(4):
            weight = torch.nn.functional.normalize(weight @ weight)
        world.all_reduce(total, op="max")
        going.fill_(float(time.time() < end))
        world.all_reduce(going)
        ends.append(time.time())
    return ends


def scan(addresses, seconds):
    """Knock at every port of some hosts, in turns of two seconds each; when each turn began, and at which."""
    turns, knocks, port = [], 0, 1024
    end = time.time() + seconds
    while time.time() < end:
        turns.append((time.time(), address := addresses[len(turns) % len(addresses)]))
        while time.time() < turns[-1][0] + 2:
            port = 1024 + (port - 1023) % 64_000
            with socket.socket() as stranger:
                stranger.settimeout(0.05)
                knocks += 1
                with contextlib.suppress(OSError):
                    stranger.connect((address, port))
                    stranger.sendall(os.urandom(64))
    return turns, knocks
