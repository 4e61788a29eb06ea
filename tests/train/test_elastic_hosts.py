"""axo train --elastic --hosts: hosts are lost, the run goes on from other hosts' memory; losses are serial training's.

Hosts share no /dev/shm, process or parent, and each has a folder of its own for the run.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from axo.train import launchers
from tests.hosts import Hosts, available, python
from tests.train.test_train import text

__all__ = ["text"]  # a fixture
pytestmark = pytest.mark.hosts
WHY_NOT = available()
if WHY_NOT:
    pytest.skip(f"no hosts can be made here: {WHY_NOT}", allow_module_level=True)

START_S = 240  # to import torch on a busy machine
NOT_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# axo train whose steps take a while, so that a host is lost between them; DELAY: how many seconds
# each is longer; AHEAD: by how many its clock is. From
# the twelfth step on it waits while there is a file HOLD.
PROGRAM = """
import os, sys, time
from axo.train import loop
step, clock, ahead = loop.Trainer.step, time.time, float(os.environ.get("AHEAD", "0"))
def slow(self, index):
    time.sleep(float(os.environ["DELAY"]))
    while index >= 12 and os.path.exists(os.environ["HOLD"]):
        time.sleep(0.01)
    return step(self, index)
loop.Trainer.step, time.time = slow, lambda: clock() + ahead
from axo.cli.main import main
main()
"""


class Run:
    """A run on all of ``hosts``: a launcher on each, which can be started again where it was lost."""

    def __init__(
        self, hosts: Hosts, folder: Path, text: str, *options: str, of_last: tuple[str, ...] = (), delay: float = 0.1
    ) -> None:
        self.hosts, self.folder, self.hold = hosts, folder, folder / "hold"
        self.environment = {"HOLD": str(self.hold), "DELAY": str(delay), "AXO_SECRET": "s" * 32} | dict.fromkeys(
            NOT_TORCHRUN
        )
        self.usual = {
            "--data": text, "--grid": "2x1x2x1", "--elastic": "2:4", "--copy-every": "3", "--steps": "24",
            "--batch-size": "12", "--seq-len": "32", "--precision": "32-true", "--model-override": "n_layer=1",
            "--hosts": ",".join(host.address for host in hosts), "--threads": "1",  # hosts share this machine's cores
        }  # fmt: skip
        self.usual |= dict(zip(options[::2], options[1::2], strict=True)) | {"--out": str(folder / "out")}
        (folder / "out").mkdir()
        for host in hosts:
            host.run("mount", "-t", "tmpfs", "tmpfs", str(folder / "out"))
        self.processes = [self.start(number) for number in range(len(hosts) - 1)]
        self.processes.append(self.start(len(hosts) - 1, *of_last))

    def start(self, number: int, *options: str, **other: str) -> Any:
        """The command on one host, also where it was lost."""
        usual = self.usual | dict(zip(options[::2], options[1::2], strict=True))
        words = [word for option in usual.items() for word in option] + ["--compare-serial"]
        command = python(PROGRAM, "train", *words)
        only = Hosts.start(self.hosts, command, 1, f"{number}-", [number], **self.environment, **other)
        return only[0]

    def inside(self, number: int, path: Path | str) -> Path:
        """A path of a host, as this process sees it."""
        return Path(f"/proc/{self.hosts[number]._inside.pid}/root{path}")

    def log(self, number: int) -> list[dict[str, Any]]:
        path = self.inside(number, self.folder / "out" / "log.jsonl")
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def output(self, number: int) -> str:
        return self.hosts.output(number, f"{number}-")

    def wait_for_step(self, number: int, step: int, seconds: float = START_S) -> None:
        """Until the log of a host has this step."""
        end = time.monotonic() + seconds
        while not any(line["kind"] == "step" and line["step"] >= step for line in self.log(number)):
            if time.monotonic() > end or self.processes[number].poll() is not None:
                raise AssertionError(f"no step {step}:\n" + "\n".join(map(self.output, range(len(self.hosts)))))
            time.sleep(0.02)

    def wait_until_it_listens(self, number: int) -> None:
        """Until the launcher of a host can be asked, and so has a say in what the run does next."""
        end, listening = time.monotonic() + START_S, self.hosts[number].command("ss", "-Hltn")
        while f":{launchers._PORT} " not in subprocess.run(listening, capture_output=True, text=True).stdout:
            assert time.monotonic() < end and self.processes[number].poll() is None, self.output(number)
            time.sleep(0.05)

    def come_back(self, number: int, left: int, ranks: int) -> None:
        """A host that was lost has power again, and nothing else; then the run, which waits, is told so many ranks."""
        self.hold.touch()
        self.hosts[number].put_cable_back()
        self.hosts[number].run("umount", str(self.folder / "out"))
        self.hosts[number].run("mount", "-t", "tmpfs", "tmpfs", str(self.folder / "out"))
        self.processes[number] = self.start(number, AHEAD="3600")
        self.wait_until_it_listens(number)
        self.tell(left, ranks)
        self.hold.unlink()

    def tell(self, number: int, ranks: int) -> None:
        (self.inside(number, self.folder / "out") / "ranks").write_text(f"{ranks}")

    def kill_a_rank(self, number: int, draw: random.Random) -> None:
        parents = {pid: Path(f"/proc/{pid}/stat").read_text().split()[3] for pid in self.hosts[number].processes()}
        os.kill(draw.choice([pid for pid, parent in parents.items() if int(parent) in parents]), signal.SIGKILL)

    def recovery(self, number: int, since: float) -> tuple[dict[str, float], int]:
        """Seconds of each part of the first recovery after a fault, in the log of this host; its first step."""
        end = time.monotonic() + START_S
        while not (later := [line for line in self.log(number) if line.get("noticed", 0) > since]):
            over = time.monotonic() > end or self.processes[number].poll() is not None
            assert not over, "\n".join(map(self.output, range(len(self.hosts))))
            time.sleep(0.02)
        return {"detect": later[0]["noticed"] - since, **later[0]["seconds"]}, later[0]["start"]

    def end(self, *numbers: int, seconds: float = START_S) -> list[int]:
        """Exit codes of the launchers on these hosts, when they have ended."""
        end = time.monotonic() + seconds
        while any(self.processes[number].poll() is None for number in numbers):
            if time.monotonic() > end:
                raise AssertionError("no end:\n" + "\n".join(map(self.output, range(len(self.hosts)))))
            time.sleep(0.05)
        return [self.processes[number].returncode for number in numbers]


def of_kind(log: list[dict[str, Any]], kind: str, key: str) -> list[Any]:
    return [line[key] for line in log if line["kind"] == kind]


@pytest.mark.parametrize(("lost", "addresses"), [(0, ["10.77.0.1", "10.77.0.2"]), (1, ["[fd77::1]", "[fd77::2]"])])
def test_a_lost_host_costs_a_few_steps_and_no_file(lost: int, addresses: list[str], text: str, tmp_path: Path) -> None:
    """The host of rank 0, which opened the store and wrote the log, or the other; there by IPv6."""
    with Hosts(2) as hosts:
        run, left = Run(hosts, tmp_path, text, "--hosts", ",".join(addresses)), 1 - lost
        run.wait_for_step(0, 8)
        since = time.monotonic()
        hosts[lost].lose_power()
        assert run.end(left) == [0], run.output(left)
        output, (took, start) = run.output(left), run.recovery(left, since)
        assert "over 24 steps (limit 1e-4): ok" in output, output
        assert f"host {addresses[lost].strip('[]')} is lost; goes on with 2 ranks on grid" in output, output
        print(f"\nhost {lost} lost: {sum(took.values()):.2f} s, {took}, goes on from {start}")
        assert of_kind(run.log(left), "step", "step")[-1] == 23 and start >= 3
        assert not os.listdir(run.inside(left, "/dev/shm"))


@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_that_comes_back_gets_ranks_when_that_is_told(lost: int, text: str, tmp_path: Path) -> None:
    """It brings nothing: what it lacks of the newest copy comes from the other. Clocks are an hour apart."""
    with Hosts(2) as hosts:
        (tmp_path / "hold").touch()
        run, left = Run(hosts, tmp_path, text), 1 - lost
        run.wait_for_step(0, 4)
        hosts[lost].lose_power()
        run.recovery(left, 0)
        run.come_back(lost, left, 4)
        assert run.end(0, 1) == [0, 0], (run.output(0), run.output(1))
        assert "out/ranks said so; goes on with 4 ranks on grid 2x1x2x1" in run.output(0).replace("\n", "")
        assert "over 24 steps (limit 1e-4): ok" in run.output(0), run.output(0)
        assert of_kind(run.log(0), "header", "grid")[-1] == "2x1x2x1"


def test_a_rank_that_dies_leaves_its_host_in_the_run(text: str, tmp_path: Path) -> None:
    with Hosts(2) as hosts:
        run = Run(hosts, tmp_path, text)
        run.wait_for_step(0, 8)
        run.kill_a_rank(1, random.Random(1))
        assert run.end(0, 1) == [0, 0], (run.output(0), run.output(1))
        assert re.search(r"rank [23] was killed by SIGKILL.*; goes on with 3 ranks on grid 1x1x3x1", run.output(0))
        assert "over 24 steps (limit 1e-4): ok" in run.output(0), run.output(0)


def test_what_hosts_cannot_agree_on_ends_all_of_them(text: str, tmp_path: Path) -> None:
    """Other options on one host."""
    with Hosts(2) as hosts:
        run = Run(hosts, tmp_path, text, of_last=("--lr", "0.1"))
        assert run.end(0, 1) == [2, 2], (run.output(0), run.output(1))
        for number in range(2):
            assert "have different options; give each the same" in run.output(number).replace("\n", " ")


def test_two_neighbours_lost_at_once_end_the_run_with_one_error(text: str, tmp_path: Path) -> None:
    """They had both copies of a shard."""
    with Hosts(4) as hosts:
        run = Run(hosts, tmp_path, text, "--elastic", "1:4")
        run.wait_for_step(0, 8)
        for lost in (1, 2):
            hosts[lost].pull_cable()
        for lost in (1, 2):
            hosts[lost].lose_power()
        assert run.end(0, 3) == [1, 1], (run.output(0), run.output(3))
        for left in (0, 3):
            output = " ".join(run.output(left).split())
            assert "host 10.77.0.2 is lost; host 10.77.0.3 is lost; elastic=1:4 ends here: the hosts that are" in output
            assert "had the only copies of some shards" in output and "Traceback" not in output, output


@pytest.mark.soak
@pytest.mark.timeout(14400)
def test_many_runs_whose_hosts_are_lost_and_come_back(text: str, tmp_path: Path) -> None:
    """200 steps on two to eight ranks of two hosts or four; ``AXO_ELASTIC_RUNS``: which of the runs, such as 0:50."""
    first, _, end = os.environ.get("AXO_ELASTIC_RUNS", "0:50").partition(":")
    faults = [faults_of_a_run(number, text, tmp_path / str(number)) for number in range(int(first), int(end))]
    rows = [row for each in faults for row in each]
    for what, most in (("host", 10.0), ("rank", 5.0)):
        totals = [row["detect"] + row["agree"] + row["move"] + row["step"] for row in rows if row["what"] == what]
        print(f"\n{len(totals)} times a {what} was lost: {statistics.median(totals):.2f} s")
        assert statistics.median(totals) < most
    assert max(row["lost"] for row in rows) <= 10


def faults_of_a_run(number: int, text: str, folder: Path) -> list[dict[str, Any]]:
    """A run with faults and joins at random moments, which ends with the losses of serial training (1e-4).

    Returns, and prints, what each has cost.
    """
    draw, count, rows, options = random.Random(number), (2, 4)[number % 2], list[dict[str, Any]](), ["--steps", "200"]
    options += ["--elastic", f"2:{2 * count}", "--grid", f"2x1x{count}x1", "--copy-every", "10", "--batch-size", "24"]
    folder.mkdir()
    with Hosts(count) as hosts:
        run, left, ranks, step = Run(hosts, folder, text, *options, delay=0.03), [*range(count)], 2 * count, 0
        while (step := step + draw.randint(20, 50)) < 175:
            run.wait_for_step(min(left), step)
            time.sleep(draw.uniform(0, 0.1))
            gone = [host for host in range(count) if host not in left]
            since, first, chance = time.monotonic(), min(left), draw.random()
            if ranks < 2 * count and chance < 0.5:
                what, left = "join", sorted([*left, *gone[:1]])
                if gone:
                    run.come_back(gone[0], first, 2 * len(left))
                else:
                    run.tell(first, 2 * count)
            elif ranks > 2 and (chance < 0.7 or len(left) == 1):
                what = "rank"
                run.kill_a_rank(draw.choice(left), draw)
            elif len(left) > 1 and ranks >= 4:
                what = "host"
                left.remove(lost := draw.choice(left))
                hosts[lost].lose_power()
            else:
                continue
            done = of_kind(run.log(first), "step", "step")[-1] + 1
            seconds, start = run.recovery(min(left), since)
            ranks = math.prod(map(int, of_kind(run.log(min(left)), "header", "grid")[-1].split("x")))
            if what == "join":  # steps went on until the ranks ended, and none was lost
                done = start
                del seconds["detect"]
            rows.append({"run": number, "hosts": count, "what": what, "ranks": ranks, "lost": done - start, **seconds})
            print("\nrecovery", json.dumps(rows[-1]), flush=True)
        assert run.end(*left) == [0] * len(left), "\n".join(map(run.output, left))
        told = re.search(r"(\S+) over 200 steps \(limit 1e-4\): ok", run.output(min(left)))
        assert told is not None, run.output(min(left))
        print(f"\nrun {number} has ended: {len(rows)} faults and joins, losses apart by {told[1]}", flush=True)
    return rows
