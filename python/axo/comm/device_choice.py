"""Which device a user names. Only where that is no CPU need torch be imported, to look for it.

``cpu`` and ``cuda``; any other is one that a program has taught torch, which it has then imported.
"""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def check_device(what: str, device: str | torch.device) -> tuple[str, int | None]:
    """The kind of the device that ``device`` names, and its index if it names one.

    Raises:
        ValueError: Nobody knows it, or torch finds none here; ``what`` asked for it.
    """
    named = re.fullmatch(r"([a-z]\w*)(?::(\d+))?", str(device))
    unknown = ValueError(f"{what}: device={str(device)!r} is not known; use cpu, or cuda")
    if named is None or (named[1] not in ("cpu", "cuda") and "torch" not in sys.modules):
        raise unknown
    kind, index = named[1], None if named[2] is None else int(named[2])
    if kind == "cpu":
        return kind, index
    import torch

    try:
        torch.device(device)
    except RuntimeError:
        raise unknown from None
    accelerator = torch.accelerator.current_accelerator(check_available=True)  # else what torch is built for
    if accelerator is None or accelerator.type != kind:
        available = "none" if accelerator is None else f"{accelerator.type!r}"
        raise ValueError(
            f"{what}: device={str(device)!r}, and torch {torch.__version__} finds {available} here; use device='cpu',"
            " or a torch that is built for the GPU and a machine that has one"
        )
    return kind, index


def resolve_device(device: str | torch.device) -> torch.device:
    """The device with its index, made current: the index given, else LOCAL_RANK, else the current device.

    Raises:
        ValueError: This torch, or this machine, does not have it.
    """
    import torch

    kind, index = check_device("connect", device)
    if kind == "cpu":
        return torch.device(device)
    count = torch.accelerator.device_count()
    if index is None:
        index = int(os.environ.get("LOCAL_RANK", torch.accelerator.current_device_index()))
        if count == 1:
            index = 0  # the launcher shows each rank its own GPU; two ranks on one are found when they meet
    if index >= count:
        raise ValueError(f"connect: device {index} of {count}; start at most {count} ranks on this machine")
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)
