"""SLURM's tasks as ranks: from its variables, and under a real srun where this machine has one."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from axo import slurm
from axo.launch import Rank
from tests.hosts import Hosts, available

STEP = {
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[003-005,9],big1",
    "SLURM_TASK_PID": "9",
}
ONE_HOST = {
    "SLURM_JOB_ID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_NNODES": "1",
}


def test_a_step_of_several_hosts():
    assert slurm._of_torchrun(STEP) == {
        "RANK": "5",
        "WORLD_SIZE": "7",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu003",
        "MASTER_PORT": str(12000 + 31 * 71 + 2),
    }
    assert slurm._of_torchrun(STEP | {"SLURM_NODEID": "3"})["LOCAL_WORLD_SIZE"] == "1"


@pytest.mark.parametrize(
    ("listed", "first"),
    [("n1", "n1"), ("n[1-2]", "n1"), ("r[01-04]n[2,7]", "r01n2"), ("a-b,c", "a-b"), ("x[a,b]y,z", "xay")],
)
def test_the_first_host(listed, first):
    assert slurm._first_host({"SLURM_JOB_NODELIST": listed}) == first


def test_tasks_of_one_host_are_ranks(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that what is set here is taken back
        monkeypatch.delenv(name)
    for name, value in ONE_HOST.items():
        monkeypatch.setenv(name, value)
    assert Rank.from_environment() == Rank(1, 2, 1, 2)
    assert os.environ["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"},  # salloc
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_TASK_PID": "7"},  # a batch script
        ONE_HOST | {"SLURM_NTASKS": "1"},
        ONE_HOST | {"RANK": "0"},  # torchrun in a task
    ],
    ids=["none", "salloc", "batch", "one-task", "torchrun"],
)
def test_what_is_no_task_starts_its_own_ranks(variables):
    assert slurm._of_torchrun(variables) == {}


def test_variables_that_say_too_little():
    with pytest.raises(ValueError, match=r"7 tasks on 4 hosts .* give srun --ntasks-per-node"):
        slurm._of_torchrun({k: v for k, v in STEP.items() if k != "SLURM_STEP_TASKS_PER_NODE"})
    with pytest.raises(ValueError, match=r"SLURM_NODEID='one' is not a whole number of at least 0; SLURM sets it"):
        slurm._of_torchrun(STEP | {"SLURM_NODEID": "one"})
    with pytest.raises(ValueError, match=r"names no hosts .*; set MASTER_ADDR"):
        slurm._of_torchrun(STEP | {"SLURM_STEP_NODELIST": ""})


CONFIGURATION = """
ClusterName=axo
SlurmctldHost={host}({address})
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=15
MpiDefault=none
ProctrackType=proctrack/linuxproc
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldPort={port}
SlurmdSpoolDir={folder}/%n
SlurmUser=root
StateSaveLocation={folder}/state
SwitchType=switch/none
TaskPlugin=task/none
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdTimeout=10
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
PROGRAMS = ("srun", "sbatch", "scancel", "squeue", "scontrol", "slurmctld", "slurmd", "munged", "mungekey")
NEEDS_SLURM = pytest.mark.skipif(
    os.geteuid() != 0 or any(shutil.which(name) is None for name in PROGRAMS),
    reason="needs root's rights and Debian's packages slurm-wlm and munge",
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Two nodes of SLURM on this machine: the environment in which srun finds them."""
    folder, host = tmp_path_factory.mktemp("slurm"), socket.gethostname()
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = 17000 + one.getsockname()[1] % 10000
    nodes = f"NodeName=node[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{port + 1}-{port + 2}] CPUs=2"
    with daemons_of(folder, nodes, host, "127.0.0.1", port, {"node1": [], "node2": []}) as environment:
        yield environment


@contextlib.contextmanager
def daemons_of(folder, nodes, host, address, port, names):
    """SLURM's daemons, of nodes that slurm.conf has as ``nodes``.

    Args:
        folder: For what they write.
        host, address, port: Of the controller.
        names: Of each node, and what to put before a command that runs there; the first has the controller.
    """
    folder.chmod(0o755)
    for name in ("state", *names):
        (folder / name).mkdir()
    text = CONFIGURATION.format(folder=folder, host=host, address=address, port=port, nodes=nodes)
    (folder / "slurm.conf").write_text(text)
    there = next(iter(names.values()))
    subprocess.run(["mungekey", "-c", "-k", folder / "munge.key"], check=True)
    munge = [f"--{name}={folder}/munge.{end}" for name, end in (("key-file", "key"), ("socket", "socket"),
             ("pid-file", "pid"), ("log-file", "log"), ("seed-file", "seed"))]  # fmt: skip
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
    daemons = [
        subprocess.Popen(["munged", "-F", "--force", *munge]),
        subprocess.Popen([*there, "slurmctld", "-D", "-i"], env=environment, stderr=subprocess.DEVNULL),
        *(subprocess.Popen([*before, "slurmd", "-D", "-N", name], env=environment, stderr=subprocess.DEVNULL)
          for name, before in names.items()),
    ]  # fmt: skip
    try:
        end, jobs = time.monotonic() + 60, {"env": environment, "capture_output": True, "text": True, "timeout": 60}
        while subprocess.run([*there, "srun", "-N2", "true"], **jobs).returncode:
            assert time.monotonic() < end, (folder / "controller.log").read_text()
            time.sleep(0.2)
        yield environment
    finally:  # a job whose daemons end first leaves its processes behind
        end = time.monotonic() + 60
        while subprocess.run([*there, "squeue", "--noheader"], **jobs).stdout and time.monotonic() < end:
            subprocess.run([*there, "scancel", "--me", "--full", "--signal=KILL"], **jobs)
            time.sleep(0.5)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait()


@NEEDS_SLURM
@pytest.mark.soak
def test_srun_starts_one_rank_a_task(cluster, tmp_path):
    axo = str(Path(sys.executable).with_name("axo"))
    command = ["srun", "-N2", "-n4", "--ntasks-per-node=2", axo, "train", "--grid", "2x1x2x1", "--steps", "4"]
    done = subprocess.run(
        [*command, "--precision", "32-true", "--compare-serial", "--out", str(tmp_path)],
        env=cluster | {"MASTER_ADDR": "127.0.0.1"}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("parity: ") == 1 and ": ok" in done.stdout


BATCH = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --requeue
trap 'again=1; kill -USR1 $!' USR1
srun {axo} train --grid 2x1x2x1 --steps {steps} --precision 32-true --save-every {steps} --resume auto --out {out} \
  --compare-serial &
wait $!; wait $!
[ -z "$again" ] || scontrol requeue $SLURM_JOB_ID
"""


@NEEDS_SLURM
@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_job_whose_time_is_over_is_requeued_and_goes_on(cluster, tmp_path):
    """SLURM's notice before the limit is sent by hand; limits are whole minutes."""
    steps, out, told = 40, tmp_path / "run", tmp_path / "job.out"
    (tmp_path / "job.sh").write_text(BATCH.format(axo=Path(sys.executable).with_name("axo"), steps=steps, out=out))
    submitted = subprocess.run(
        ["sbatch", "--parsable", "--open-mode=append", f"--output={told}", "job.sh"], cwd=tmp_path, check=True,
        env=cluster | {"MASTER_ADDR": "127.0.0.1"}, capture_output=True, text=True,
    )  # fmt: skip
    job = submitted.stdout.strip()
    await_text(told, f" 4/{steps}: ")
    subprocess.run(["scancel", "--batch", "--signal=USR1", job], env=cluster, check=True)
    await_text(told, "parity: ")
    text = told.read_text()
    assert text.count("stopped by SIGUSR1 after") == 1 and text.count(", after step ") == 1, text
    assert ": ok" in text.partition("parity: ")[2], text


@NEEDS_SLURM
@pytest.mark.soak
@pytest.mark.hosts
@pytest.mark.timeout(600)
def test_a_job_goes_on_without_a_node_that_fails(tmp_path):
    """docs/clusters.md: srun --no-kill, of an elastic run. Nodes are hosts of their own; one loses its power."""
    if why := available():
        pytest.skip(f"no hosts can be made here: {why}")
    with Hosts(2) as hosts:
        nodes = "\n".join(f"NodeName={each.name} NodeAddr={each.address} CPUs=2" for each in hosts)
        names = {each.name: each.command() for each in hosts}
        first = hosts[0]
        with daemons_of(tmp_path, nodes, first.name, first.address, 17000, names) as environment:
            axo, log = str(Path(sys.executable).with_name("axo")), tmp_path / "job.out"
            command = ["srun", "-N2", "--ntasks-per-node=1", "--no-kill", axo, "train", "--grid", "2x1x2x1"]
            command += ["--elastic", "2:4", "--hosts", ",".join(each.address for each in hosts), "--copy-every", "3"]
            command += ["--steps", "60", "--precision", "32-true", "--compare-serial", "--batch-size", "12"]
            with log.open("wb") as output:
                given = {"stdout": output, "stderr": output, "env": environment | {"AXO_SECRET": "s" * 32}}
                job = subprocess.Popen(first.command(*command, "--out", str(tmp_path / "out")), **given)
            await_text(log, " 12/60: ")
            hosts[1].lose_power()
            await_text(log, "parity: ")
            code, text = job.wait(timeout=200), log.read_text()
            assert f"host {hosts[1].address} is lost; goes on with 2 ranks on grid" in text.replace("\n", ""), text
            assert code == 0 and ": ok" in text.partition("parity: ")[2], text


def await_text(path, text, seconds=300):
    """Wait until a file has it."""
    end = time.monotonic() + seconds
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < end, path.read_text() if path.exists() else f"no {path}"
        time.sleep(0.1)
