"""Ranks that SLURM starts: ``srun axo train --grid 2x2x2x1`` is one rank a task.

What torchrun would say (RANK, WORLD_SIZE, ...) is read from SLURM's variables, where nobody else has said it. A batch
script itself is no task, though SLURM numbers it as one: what it types without ``srun`` starts ranks as on any machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

_FIRST_PORT, _PORTS = 12000, 20000  # below those that a kernel gives to whoever asks for any


def adopt() -> None:
    """Set the variables of torchrun where this process is a task of SLURM and RANK is not set.

    MASTER_ADDR and MASTER_PORT stay where the user has set them; else they are the first host of the step, and a port
    made of the job's number.

    Raises:
        ValueError: SLURM's variables do not say how many tasks there are on this host, or where the first is, or
            are no numbers.
    """
    for name, value in _of_torchrun(os.environ).items():
        os.environ.setdefault(name, value)


def _of_torchrun(slurm: Mapping[str, str]) -> dict[str, str]:
    tasks = slurm.get("SLURM_STEP_NUM_TASKS") or slurm.get("SLURM_NTASKS") or "1"
    batch_script = "SLURM_TASK_PID" in slurm and "SLURM_STEP_ID" not in slurm
    if "RANK" in slurm or "SLURM_PROCID" not in slurm or batch_script or tasks == "1":
        return {}
    hosts = slurm.get("SLURM_STEP_NUM_NODES") or slurm.get("SLURM_NNODES") or "1"
    job, step = (_number(slurm, name) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return {
        "RANK": slurm["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": slurm.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": _tasks_of_host(slurm, tasks, hosts),
        "MASTER_ADDR": "127.0.0.1" if hosts == "1" else _first_host(slurm),
        "MASTER_PORT": str(_FIRST_PORT + (31 * job + step) % _PORTS),
    }


def _tasks_of_host(slurm: Mapping[str, str], tasks: str, hosts: str) -> str:
    """How many tasks of the step run on this host, from lists such as ``2(x3),1``."""
    if hosts == "1":
        return tasks
    counts: list[str] = []
    for part in (slurm.get("SLURM_STEP_TASKS_PER_NODE") or slurm.get("SLURM_TASKS_PER_NODE") or "").split(","):
        if (each := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)) is not None:
            counts += [each[1]] * int(each[2] or 1)
    number = _number(slurm, "SLURM_NODEID")
    if number < len(counts):
        return counts[number]
    if of_each := slurm.get("SLURM_NTASKS_PER_NODE"):
        return of_each
    raise ValueError(
        f"SLURM starts {tasks} tasks on {hosts} hosts and does not say how many on each; give srun --ntasks-per-node"
    )


def _number(slurm: Mapping[str, str], name: str) -> int:
    text = slurm.get(name, "0")
    if not text.isdecimal():
        raise ValueError(f"{name}={text!r} is not a whole number of at least 0; SLURM sets it")
    return int(text)


def _first_host(slurm: Mapping[str, str]) -> str:
    """The first of a list of hosts such as ``gpu[003-010,12],login``: ``gpu003``."""
    listed = slurm.get("SLURM_STEP_NODELIST") or slurm.get("SLURM_JOB_NODELIST") or slurm.get("SLURM_NODELIST") or ""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", listed)
    if first is None or not first[0]:
        raise ValueError("SLURM names no hosts (SLURM_STEP_NODELIST); set MASTER_ADDR to the host of rank 0")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])
