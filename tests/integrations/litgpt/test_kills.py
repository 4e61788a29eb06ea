"""Ranks of ``axo litgpt`` that are killed by SIGKILL: the run ends where an undisturbed one does.

    make soak-python ARGS="tests/integrations/litgpt/test_kills.py"        five to ten minutes; prints a JSON line a run

A killer follows the output of the run. Three kills of four wait for a step drawn at random from all steps, and up to a
tenth of a second on top, so that they fall into steps, saves and what is between; the others hit a start in its first
seconds, before or while it loads. Processes are those of a user: the command, which restarts its ranks, and torchrun.
"""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.integrations.runs import NOT_TORCHRUN, arguments, finish, losses_of
from tests.integrations.support import distance, tell

RANKS, STEPS, SAVE = 4, 240, 5
LAST = 216  # no kill is drawn after it, or the run could end before it comes


def children(pid):
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def environment_of(pid):
    try:
        return Path(f"/proc/{pid}/environ").read_text().split("\0")
    except OSError:
        return []


class Killer(threading.Thread):
    """Kills a random rank ``times`` times; ``at`` says where: the step that was being done, "start" for none yet."""

    def __init__(self, process, log, times, seed, start_seconds):
        super().__init__(daemon=True)
        self.process, self.log, self.draw = process, log, random.Random(seed)
        steps = iter(sorted(self.draw.randrange(1, LAST) for _ in range(times)))
        self.targets = [None if number % 4 == 3 else next(steps) for number in range(times)]
        self.start_seconds = start_seconds
        self.at = []

    def run(self):
        seen = 0
        for target in self.targets:
            self._ranks([])
            wait = self.draw.uniform(0, self.start_seconds if target is None else 0.1)
            while self.process.poll() is None and target is not None and self._step(seen) < target:
                time.sleep(0.002)
            time.sleep(wait)
            step, seen = self._step(seen), self.log.stat().st_size
            while True:
                ranks = self._ranks([])  # not those of before: on a busy machine a start may have failed by itself
                if self.process.poll() is not None:
                    return
                with suppress(ProcessLookupError):  # one that has ended since: draw again
                    os.kill(self.draw.choice(ranks), signal.SIGKILL)
                    break
            self.at.append(step or "start")
            self._ranks(ranks)

    def _ranks(self, old):
        """The ranks of a start, once they are all there and those of the start before are gone."""
        while self.process.poll() is None:
            ranks = children(self.process.pid)
            if len(ranks) == RANKS and not set(ranks) & set(old):
                return ranks
            time.sleep(0.005)
        return old

    def _step(self, after):
        """The newest step in the output since ``after`` (bytes); 0: none yet."""
        with self.log.open("rb") as output:
            output.seek(after)
            found = re.findall(rb"\| iter \d+ step (\d+) \|", output.read())
        return int(found[-1]) if found else 0


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kills", "launcher"), [(20, "axo litgpt --max-restarts"), (6, "torchrun --max-restarts")])
def test_killed_at_random_moments_a_run_ends_where_the_undisturbed_one_does(folder, kills, launcher):
    """Oracle: the undisturbed run: the loss of every step and of the validation at the end to 1e-4, weights to 1e-5."""
    undisturbed, state = finish(folder, f"undisturbed-{kills}", steps=STEPS, save=SAVE)
    assert undisturbed.ok, undisturbed.output
    out, by_torchrun = f"killed-{kills}", launcher.startswith("torchrun")
    restarts = str(2 * kills)
    given = arguments(folder, out, *([] if by_torchrun else ["--max-restarts", restarts]), steps=STEPS, save=SAVE)
    torchrun = ["torch.distributed.run", f"--nproc-per-node={RANKS}", f"--max-restarts={restarts}", "--standalone"]
    environment = {name: value for name, value in os.environ.items() if name not in NOT_TORCHRUN}
    log = folder / f"{out}.log"
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", *([*torchrun, "-m"] if by_torchrun else []), "axo.cli", "litgpt", *given],
            stdout=output, stderr=output, env=environment | {"PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
    killer = Killer(process, log, kills, seed=kills, start_seconds=10 if by_torchrun else 2)
    killer.start()
    try:
        code = process.wait(timeout=800)
    finally:
        process.kill()
    killer.join()
    seconds = round(time.monotonic() - began, 1)
    said = log.read_text(errors="replace")
    assert code == 0, said[-4000:]
    assert len(killer.at) == kills, (killer.at, said[-4000:])
    losses, expected = losses_of(folder, out), losses_of(folder, f"undisturbed-{kills}")
    assert sorted(expected) == list(range(1, STEPS + 1)) and losses == pytest.approx(expected, abs=1e-4)
    ends = [
        float(re.findall(r"Final evaluation \| val loss: ([\d.]+)", text)[-1]) for text in (said, undisturbed.output)
    ]
    assert ends[0] == pytest.approx(ends[1], abs=1e-3)  # it is printed with three digits
    final = torch.load(folder / out / "final" / "lit_model.pth", weights_only=True)
    apart = distance(final["model"], state["model"])
    assert apart < 1e-5
    resumed = [int(step) for step in re.findall(r"Resuming training from \S+step-(\d+)", said)]
    assert len(set(resumed)) > kills // 2
    worst = max(abs(losses[step] - expected[step]) for step in expected)
    tell(
        "kills of a litgpt run", launcher=launcher, grid="2x1x2x1", kills=kills, steps=STEPS, save_every=SAVE,
        killed_at=killer.at, went_on_from=resumed, losses_apart=worst, weights_apart=apart, seconds=seconds,
    )  # fmt: skip


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_torchruns_of_two_hosts_start_again_when_one_lost_a_rank(folder):
    """Two agents of torchrun's, each of which counts its own failures. Oracle: the undisturbed run."""
    grid = {"grid": "1x1x2x1", "steps": 120, "save": 20}
    undisturbed, state = finish(folder, "one-host", **grid)
    assert undisturbed.ok, undisturbed.output
    given = arguments(folder, "two-hosts", **grid)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{free.getsockname()[1]}"
    torchrun = [
        sys.executable, "-u", "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=2",
        "--rdzv-backend=c10d", f"--rdzv-endpoint={place}", "--rdzv-id=job", "--local-addr=127.0.0.1",
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name not in NOT_TORCHRUN}
    logs = [folder / f"host-{host}.log" for host in range(2)]
    agents = []
    for log in logs:
        with log.open("wb") as output:
            command = [*torchrun, "-m", "axo.cli", "litgpt", *given]
            agents.append(subprocess.Popen(command, stdout=output, stderr=output, env=environment))
    counts, first = {}, folder / "two-hosts" / "step-00000020" / "lit_model.pth"
    try:
        while any(agent.poll() is None for agent in agents):
            for rank in (rank for agent in agents for rank in children(agent.pid)):
                told = dict(word.partition("=")[::2] for word in environment_of(rank))
                if "TORCHELASTIC_RESTART_COUNT" in told:  # it has begun
                    counts[rank] = told["RANK"], told["TORCHELASTIC_RESTART_COUNT"]
                    if counts[rank] == ("1", "0") and first.is_file():
                        with suppress(ProcessLookupError):
                            os.kill(rank, signal.SIGKILL)
            time.sleep(0.01)
    finally:
        for agent in agents:
            agent.kill()
    said = "".join(log.read_text(errors="replace") for log in logs)
    assert [agent.returncode for agent in agents] == [0, 0], said[-6000:]
    starts = sorted(counts.values())
    assert len(starts) == 4 and starts[0] == ("0", "0") and starts[2:] == [("1", "0"), ("1", "1")], starts
    assert losses_of(folder, "two-hosts") == pytest.approx(losses_of(folder, "one-host"), abs=1e-4)
    assert "Resuming training from" in said
    final = torch.load(folder / "two-hosts" / "final" / "lit_model.pth", weights_only=True)
    assert distance(final["model"], state["model"]) < 1e-5
