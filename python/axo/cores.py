"""How many cores this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Cores that the process may run on (its affinity), and that its control groups pay for (their quota of time).

    A quota of a part of a core counts as a whole one.
    """
    return max(1, min(len(os.sched_getaffinity(0)), _quota()))


def _quota(groups: Path = _GROUPS, own: Path = Path("/proc/self/cgroup")) -> int:
    """Cores by the smallest ``cpu.max`` from this process's control group up to the root; of version 1, ``cpu``'s."""
    least = math.inf
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        group = (groups / "cpu" if controllers else groups) / path.lstrip("/")
        for folder in (group, *group.parents):
            try:
                if controllers:
                    quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
                else:
                    quota, period = (folder / "cpu.max").read_text().split()
            except OSError:
                pass  # the root has none, and a container does not see what is above its own
            else:
                if quota.strip() not in ("max", "-1"):
                    least = min(least, int(quota) / int(period))
            if folder == groups:
                break
    return 1 << 30 if math.isinf(least) else math.ceil(least)
